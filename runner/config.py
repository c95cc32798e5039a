"""Options of the runner: flags win over the environment, that over defaults. Nothing here starts anything."""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit, urlunsplit

from runner.errors import ConfigError

TINY_MODEL_PATH = Path(__file__).parent / "tiny" / "muster-tiny-q8_0.gguf"
TINY_MODEL_NAME = "muster-tiny"
LOG_LEVELS = ("debug", "info", "warning", "error")
_WS_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}

EPILOG = """\
Every option also reads the environment: MUSTER_GATEWAY, MUSTER_TOKEN or MUSTER_TOKEN_FILE, MUSTER_PROVIDER,
MUSTER_BACKEND_URL, MUSTER_BACKEND_KEY or MUSTER_BACKEND_KEY_FILE, MUSTER_MODELS, MUSTER_MAX_CONCURRENT, MUSTER_NAME,
MUSTER_ENGINE, MUSTER_MODEL_PATH, MUSTER_MODEL_NAME, MUSTER_CONTEXT, MUSTER_THREADS, MUSTER_OWNER, MUSTER_LOG_LEVEL.
Seconds, environment only: MUSTER_OFFLINE_AFTER_S (15: a gateway not heard for so long is left),
MUSTER_RECONNECT_MAX_S (30: longest pause before dialling again), MUSTER_RUNNER_DRAIN_S (30),
MUSTER_ENGINE_SILENT_S (10: an engine that does not answer for so long is restarted).

Signals: SIGTERM or Ctrl-C finishes what runs (up to 30 s), then leaves; a second one leaves at once.
SIGUSR1 takes the box back for its owner (spare_off); SIGUSR2 lends it again (spare_on).
"""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds, every wait of the runner that is not an engine's own."""

    connect_s: float = 10.0
    ack_s: float = 10.0
    silence_s: float = 15.0
    heartbeat_s: float = 5.0
    reconnect_first_s: float = 0.2
    reconnect_max_s: float = 30.0
    auth_retry_s: float = 30.0
    healthy_after_s: float = 5.0
    learned_give_up_s: float = 600.0
    drain_s: float = 30.0
    engine_silent_s: float = 10.0


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """An OpenAI-compatible server that somebody else runs. ``url`` ends before ``/v1``."""

    url: str
    key: str = field(default="", repr=False)
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """An embedded llama.cpp with one model. ``context_tokens`` is per slot."""

    model_path: Path
    model_name: str
    context_tokens: int
    threads: int


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Everything the process needs to know."""

    gateways: tuple[str, ...]
    token: str = field(repr=False)
    name: str
    provider: str
    owner: str
    max_concurrent: int
    engine: BackendConfig | LlamaConfig
    log_level: str
    timeouts: Timeouts


def normalise_gateway(url: str) -> str:
    """Return the ``ws(s)://host[:port][/prefix]`` form of a gateway address. Raises ConfigError."""
    parts = _split_url("gateway", url, set(_WS_SCHEMES))
    return urlunsplit((_WS_SCHEMES[parts.scheme], parts.netloc, parts.path.rstrip("/"), "", ""))


def read_config(argv: Sequence[str], env: Mapping[str, str]) -> RunnerConfig:
    """Return the configuration of ``argv`` over ``env``. Raises ConfigError; argparse itself exits on unknown flags."""
    args = _build_parser().parse_args(argv)
    options = _Options(args, env)
    gateways = tuple(dict.fromkeys(normalise_gateway(url) for url in options.texts("gateway")))
    if not gateways:
        raise ConfigError("no gateway: give --gateway http://HOST:8080 or set MUSTER_GATEWAY")
    token = options.secret("token")
    if not token:
        raise ConfigError("no credential: give --token, --token-file or set MUSTER_TOKEN (a worker credential, msw_…)")
    if not token.isprintable() or not token.isascii() or " " in token:
        raise ConfigError("--token holds characters that no credential has; copy it again")
    log_level = options.text("log_level", "info").lower()
    if log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, not {log_level!r}")
    max_concurrent = options.number("max_concurrent", 4, highest=1024)
    return RunnerConfig(
        gateways=gateways,
        token=token,
        name=options.text("name", socket.gethostname() or "worker"),
        provider=options.text("provider", "local"),
        owner=options.text("owner"),
        max_concurrent=max_concurrent,
        engine=_read_engine(options),
        log_level=log_level,
        timeouts=Timeouts(
            silence_s=options.seconds("MUSTER_OFFLINE_AFTER_S", 15.0),
            reconnect_max_s=options.seconds("MUSTER_RECONNECT_MAX_S", 30.0),
            drain_s=options.seconds("MUSTER_RUNNER_DRAIN_S", 30.0),
            engine_silent_s=options.seconds("MUSTER_ENGINE_SILENT_S", 10.0),
        ),
    )


def _read_engine(options: _Options) -> BackendConfig | LlamaConfig:
    backend = options.text("backend")
    if backend:
        parts = _split_url("backend", backend, {"http", "https"})
        path = parts.path.rstrip("/").removesuffix("/v1")
        url = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
        models = tuple(dict.fromkeys(name for name in options.texts("models") if name != "*"))
        return BackendConfig(url=url, key=options.secret("backend_key"), models=models)
    engine = options.text("engine", "llamacpp")
    if engine != "llamacpp":
        raise ConfigError(f"--engine must be llamacpp, not {engine!r}; any other server goes behind --backend URL")
    if importlib.util.find_spec("xllamacpp") is None:
        raise ConfigError("the embedded engine is not installed: pip install 'muster[llamacpp]', or give --backend URL")
    path_text = options.text("model_path")
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
    )


def _split_url(option: str, url: str, schemes: set[str]) -> SplitResult:
    parts = urlsplit(url.strip())
    try:
        usable = parts.scheme in schemes and parts.hostname and (parts.port or 1)
    except ValueError:
        usable = None
    if not usable or parts.query or parts.fragment:
        raise ConfigError(f"--{option} must look like {min(schemes, key=len)}://HOST:PORT, not {url!r}")
    if parts.username is not None:
        raise ConfigError(f"--{option} must not carry a user name or password; use the key option instead")
    return parts


class _Options:
    """One place to look an option up: flag, then environment, then default."""

    _ENV = {"backend": "MUSTER_BACKEND_URL"}

    def __init__(self, args: argparse.Namespace, env: Mapping[str, str]) -> None:
        self._args = args
        self._env = env

    def text(self, name: str, default: str = "") -> str:
        value = getattr(self._args, name, None)
        if value is None:
            value = self._env.get(self._ENV.get(name, f"MUSTER_{name.upper()}"))
        return str(value).strip() or default if value is not None else default

    def texts(self, name: str) -> list[str]:
        given = getattr(self._args, name, None)
        whole = ",".join(given) if given else self._env.get(f"MUSTER_{name.upper()}", "")
        return [part.strip() for part in whole.split(",") if part.strip()]

    def secret(self, name: str) -> str:
        """Return a secret given directly or as the path of a file that holds it."""
        value = getattr(self._args, name, None)
        path = getattr(self._args, f"{name}_file", None)
        variable = f"MUSTER_{name.upper()}"
        if value is None and path is None:
            value, path = self._env.get(variable), self._env.get(f"{variable}_FILE")
        if value is not None:
            return str(value).strip()
        if not path:
            return ""
        try:
            return Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the {name} from {path}: {error}") from None

    def number(self, name: str, default: int, *, highest: int) -> int:
        raw = self.text(name)
        if not raw:
            return default
        flag = name.replace("_", "-")
        if not raw.isdecimal() or not 1 <= int(raw) <= highest:
            raise ConfigError(f"--{flag} must be a whole number from 1 to {highest}, not {raw!r}")
        return int(raw)

    def seconds(self, variable: str, default: float) -> float:
        raw = self._env.get(variable, "").strip()
        if not raw:
            return default
        try:
            value = float(raw)
        except ValueError:
            value = 0.0
        if not 0.05 <= value <= 86400:
            raise ConfigError(f"{variable} must be a number of seconds from 0.05 to 86400, not {raw!r}")
        return value


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m runner",
        description="Connect this box to a Muster gateway and serve models: with the embedded engine, or by fronting "
        "any OpenAI-compatible server (--backend).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gateway", action="append", metavar="URL", help="gateway to dial; may be repeated or a comma list")
    add("--token", help="worker credential (msw_…); the environment or a file keeps it out of the process list")
    add("--token-file", metavar="FILE", help="file that holds the worker credential")
    add("--provider", help="provider this box belongs to (default: local)")
    add("--backend", metavar="URL", help="OpenAI-compatible server to front, such as http://127.0.0.1:11434")
    add("--backend-key", metavar="KEY", help="bearer key of that server")
    add("--models", action="append", metavar="A,B", help="models to offer (default: what the backend lists)")
    add("--max-concurrent", metavar="N", help="requests served at the same time (default: 4)")
    add("--name", help="name of this box (default: its host name)")
    add("--engine", metavar="ENGINE", help="embedded engine: llamacpp (default)")
    add("--model-path", metavar="FILE", help="GGUF file for the embedded engine (default: the shipped tiny model)")
    add("--model-name", metavar="NAME", help="name that clients use for it (default: muster-tiny, or the file's name)")
    add("--context", metavar="TOKENS", help="context of the embedded engine per request (default: 2048)")
    add("--threads", metavar="N", help="threads of the embedded engine (default: 1-2 for the tiny model, else cores-1)")
    add("--owner", metavar="NAME", help="who owns this box, as operators should see it")
    add("--log-level", metavar="LEVEL", help=f"one of {', '.join(LOG_LEVELS)} (default: info)")
    return parser
