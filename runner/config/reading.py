"""Reading the configuration. Nothing here starts anything."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from urllib.parse import urlunsplit

from runner.config.options import LOG_LEVELS, Options, build_parser, split_url
from runner.config.values import (
    ApiConfig,
    ApiWish,
    BackendConfig,
    FilesConfig,
    LlamaConfig,
    OperationsConfig,
    RunnerConfig,
)
from runner.definitions.fields import TRANSLATABLE
from runner.errors import ConfigError
from runner.limits import Limits, limits
from wire.limits import Bound, list_bounds

TINY_MODEL_PATH = Path(__file__).resolve().parent.parent / "tiny" / "muster-tiny-q8_0.gguf"
TINY_MODEL_NAME = "muster-tiny"
SHARED_KEY_PATH = Path("/etc/safebox/model-api.key")
"""Where the model-runner specification has the key of operation tokens."""
_WS_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def normalise_gateway(url: str) -> str:
    """Return the ``ws(s)://host[:port][/prefix]`` form of a gateway address. Raises ConfigError."""
    parts = split_url("gateway", url, set(_WS_SCHEMES))
    return urlunsplit((_WS_SCHEMES[parts.scheme], parts.netloc, parts.path.rstrip("/"), "", ""))


def read_config(argv: Sequence[str], env: Mapping[str, str], *, shared_key: Path = SHARED_KEY_PATH) -> RunnerConfig:
    """Return the configuration of ``argv`` over ``env``. Raises ConfigError; argparse itself exits on unknown flags.

    ``shared_key``: the key file of the specification, taken at level 0 when it is there and no other is named.
    """
    options = Options(build_parser().parse_args(argv), env)
    gateways = tuple(dict.fromkeys(normalise_gateway(url) for url in options.texts("gateway")))
    is_alone = options.is_set("standalone")
    if not gateways and not is_alone:
        raise ConfigError("no gateway: give --gateway http://HOST:8080 or set MUSTER_GATEWAY, or serve alone with --standalone")
    name = options.text("name", socket.gethostname() or "worker")
    files = _read_files(options)
    engine = _read_engine(options, has_models=files.find_settings()[0] is not None or files.model_base is not None)
    cores = os.cpu_count() or 1
    log_level = options.text("log_level", options.variable("LOG_LEVEL")).lower()
    if log_level and log_level not in LOG_LEVELS:
        raise ConfigError(
            f"--log-level (MUSTER_LOG_LEVEL, LOG_LEVEL) must be one of {', '.join(LOG_LEVELS)}, not {log_level!r}"
        )
    log_format = options.variable("LOG_FORMAT", "text").lower()
    if log_format not in {"text", "json"}:
        raise ConfigError(f"LOG_FORMAT must be text or json, not {log_format!r}")
    budget = options.number("memory_budget_mb", 0, highest=1 << 30)
    return RunnerConfig(
        gateways=gateways,
        token=_read_token(options) if gateways else "",
        name=name,
        provider=options.text("provider", "local"),
        owner=options.text("owner"),
        max_concurrent=options.number("max_concurrent", 4, highest=1024),
        max_queue_depth=options.whole("MAX_QUEUE_DEPTH", 16, lowest=0, highest=100_000),
        memory_budget_mb=budget or None,
        threads=options.number("threads", max(1, cores - 1), highest=1024),
        gpu_ids=_read_gpu_ids(options),
        engine=engine,
        api=_read_api(options, is_alone=is_alone),
        operations=_read_operations(options, files=files, shared_key=shared_key),
        files=files,
        log_level=LOG_LEVELS[log_level] if log_level else None,
        log_json=log_format == "json",
        keeps_engine_errors=options.switch("MUSTER_KEEP_ENGINE_ERRORS", default=True),
        limits=_read_limits(options),
        environment=dict(env),
    )


def _read_limits(options: Options) -> Limits:
    """Return the limits that hold, with what variables say of those that have one."""
    chosen = limits()
    for section in fields(chosen):
        values = getattr(chosen, section.name)
        told = {
            bound.name: _read_bound(options, bound, getattr(values, bound.name))
            for bound in list_bounds(values)
            if bound.setting
        }
        chosen = replace(chosen, **{section.name: replace(values, **told)})
    return chosen


def _read_bound(options: Options, bound: Bound, default: float) -> float:
    if bound.setting.endswith("_MS"):
        return options.whole(bound.setting, round(default * 1000), lowest=1, highest=86_400_000) / 1000
    return options.seconds(bound.setting, default)


def _read_token(options: Options) -> str:
    token = options.secret("token")
    if not token:
        raise ConfigError("no credential: give --token, --token-file or set MUSTER_TOKEN (a worker credential, msw_…)")
    if not token.isprintable() or not token.isascii() or " " in token:
        raise ConfigError("--token holds characters that no credential has; copy it again")
    return token


def settle_api(wish: ApiWish, *, host: str | None, port: int | None) -> ApiConfig:
    """Return what the port is to be: flags and environment first, then what the settings file says. Raises ConfigError."""
    settled = wish.host or host or "127.0.0.1"
    if settled not in _LOOPBACK and not wish.key:
        raise ConfigError(f"listening on {settled} opens the API to others: protect it with --api-key-file or MUSTER_API_KEY")
    chosen = wish.port if wish.port is not None else 8090 if port is None else port
    return ApiConfig(settled, chosen, wish.key, wish.has_metrics, wish.metrics_port)


def _read_api(options: Options, *, is_alone: bool) -> ApiWish | None:
    port_text = options.text("api_port")
    if not port_text and not is_alone:
        return None
    if port_text and (not port_text.isdecimal() or int(port_text) > 65535):
        raise ConfigError(f"--api-port must be a port from 0 to 65535, not {port_text!r}")
    key = options.secret("api_key")
    if key and len(key) < 16:
        raise ConfigError("the API key must have at least 16 characters")
    metrics_port = options.whole("METRICS_PORT", 0, lowest=0, highest=65535)
    return ApiWish(
        options.text("api_host") or None, int(port_text) if port_text else None, key,
        options.switch("ENABLE_METRICS", default=True), metrics_port or None,
    )  # fmt: skip


def _read_operations(options: Options, *, files: FilesConfig, shared_key: Path) -> OperationsConfig:
    key_path = options.variable("VERIFIED_OP_TOKEN_KEY_PATH")
    # The file alone does not choose level 0: whoever has its key would operate the node alone, which only its owner may want.
    if not key_path and options.variable("OP_TOKEN_LEVEL") == "0" and shared_key.is_file():
        key_path = str(shared_key)
    if key_path and files.data is None:
        raise ConfigError(
            f"VERIFIED_OP_TOKEN_KEY_PATH ({key_path}) needs --data DIR: which tokens were used must survive a restart, "
            "or one works twice"
        )
    counted = frozenset(part.strip() for part in options.variable("OP_TOKEN_SIGNERS").split(",") if part.strip()) or None
    level = options.whole("OP_TOKEN_LEVEL", 0 if key_path else 2, lowest=0, highest=2)
    min_signers = options.whole("OP_TOKEN_MIN_SIGNERS", 2, lowest=1, highest=64)
    if counted is not None and level == 2:
        raise ConfigError("OP_TOKEN_SIGNERS counts below level 2 only: at level 2 the pinned policy says who may approve")
    if counted is not None and len(counted) < min_signers:
        raise ConfigError(
            f"OP_TOKEN_SIGNERS has {len(counted)} names and OP_TOKEN_MIN_SIGNERS asks for {min_signers}: no token"
        )
    # An owner who hands out keys chose the public format, which knows no proofs; everybody else gets the strongest level.
    return OperationsConfig(
        key_path=Path(key_path).expanduser() if key_path else None,
        level=level,
        is_level_given=bool(options.variable("OP_TOKEN_LEVEL")),
        min_signers=min_signers,
        runner_id=options.variable("MUSTER_RUNNER_ID"),
        ops_per_hour=options.whole("MUSTER_OPS_PER_HOUR", 60, lowest=1, highest=10_000),
        counted_signers=counted,
    )


def _read_files(options: Options) -> FilesConfig:
    data = options.text("data")
    base = _folder("MODEL_BASE_PATH", options.variable("MODEL_BASE_PATH"))
    data_path = Path(data).expanduser().resolve() if data else None
    hub = options.variable("HF_HOME")
    return FilesConfig(
        data=data_path,
        model_base=base,
        hf_home=Path(hub).expanduser() if hub else (data_path / "hub" if data_path is not None else None),
        settings=_settings_file("LLM_POOL_SETTINGS_PATH", options, data_path, "settings.json"),
        local_settings=_settings_file("LLM_POOL_LOCAL_SETTINGS_PATH", options, data_path, "local.json"),
        hub_allow=tuple(part.strip() for part in options.variable("MUSTER_HUB_ALLOW", "*").split(",") if part.strip()),
    )


def _folder(variable: str, text: str) -> Path | None:
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_dir():
        raise ConfigError(f"{variable}: there is no folder {path}")
    return path.resolve()


def _settings_file(variable: str, options: Options, data: Path | None, name: str) -> Path | None:
    """Return the file that the variable names, else the one of that name in the data folder, where it may come to be."""
    if given := options.variable(variable):
        path = Path(given).expanduser()
        if not path.is_file():
            raise ConfigError(f"{variable}: there is no file {path}")
        return path
    return None if data is None else data / name


def _read_gpu_ids(options: Options) -> tuple[int, ...]:
    words = [word.strip() for word in options.variable("CUDA_VISIBLE_DEVICES").split(",")]
    return tuple(int(word) for word in words if word.isdecimal())


def _read_engine(options: Options, *, has_models: bool) -> BackendConfig | LlamaConfig | None:
    backend = options.text("backend")
    if backend:
        parts = split_url("backend", backend, {"http", "https"})
        path = parts.path.rstrip("/").removesuffix("/v1")
        url = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        models = tuple(dict.fromkeys(name for name in options.texts("models") if name != "*"))
        return BackendConfig(
            url=url,
            key=options.secret("backend_key"),
            models=models,
            translate=_read_translate(options),
            tidies=options.is_set("tidy") or options.switch("MUSTER_TIDY", default=False),
        )
    engine = options.text("engine", "llamacpp")
    if engine != "llamacpp":
        raise ConfigError(f"--engine must be llamacpp, not {engine!r}; other engines are named in the settings file")
    path_text = options.text("model_path")
    if not path_text and has_models:
        return None
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError("the embedded engine is not installed: pip install 'muster[llamacpp]', or give --backend URL")
    path_, tiny = (Path(path_text).expanduser(), False) if path_text else (TINY_MODEL_PATH, True)
    if not path_.is_file():
        raise ConfigError(f"--model-path: there is no file {path_}")
    cores = os.cpu_count() or 1
    threads = max(1, min(2, cores - 1)) if tiny else max(1, cores - 1)
    return LlamaConfig(
        model_path=path_.resolve(),
        model_name=options.text("model_name") or (TINY_MODEL_NAME if tiny else path_.stem),
        context_tokens=options.number("context", 2048, highest=1 << 20),
        threads=options.number("threads", threads, highest=1024),
        translate=_read_translate(options),
    )


def _read_translate(options: Options) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(options.texts("translate")))
    if unknown := [word for word in words if word not in TRANSLATABLE]:
        raise ConfigError(f"--translate must be a comma list of {', '.join(TRANSLATABLE)}, not {unknown[0]!r}")
    return words
