"""Options of the runner: the flag, then the environment, then the default. Nothing here starts anything."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import SplitResult, urlsplit, urlunsplit

from runner.definitions.fields import SWITCHES, TRANSLATABLE
from runner.errors import ConfigError
from runner.limits import Limits, limits
from runner.system import IS_WINDOWS
from wire import COMMAND
from wire.limits import WIRE, Bound, list_bounds
from wire.logs import FORMATS
from wire.variables import Alias, Variable, find_variable, print_problems, read_level, read_rust_log

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class BackendConfig:
    """An OpenAI-compatible server that somebody else runs. ``url`` ends before ``/v1``.

    ``translate``: surfaces that gateways are to translate although the server may answer them. ``tidies``: chunks of its chat
    streams are put right for strict clients.
    """

    url: str
    key: str = field(default="", repr=False)
    models: tuple[str, ...] = ()
    translate: tuple[str, ...] = ()
    tidies: bool = False


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """One GGUF model that llama.cpp serves from the start. ``context_tokens`` is per slot; ``translate`` as of a backend."""

    model_path: Path
    model_name: str
    context_tokens: int
    threads: int
    translate: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The node's own HTTP port. ``metrics_port`` None = metrics on the same port; ``key`` empty = none asked for."""

    host: str
    port: int
    key: str = field(repr=False)
    has_metrics: bool
    metrics_port: int | None


@dataclass(frozen=True, slots=True)
class ApiWish:
    """What flags and environment say of that port; None = the settings file may say, else the default."""

    host: str | None
    port: int | None
    key: str = field(repr=False)
    has_metrics: bool
    metrics_port: int | None


@dataclass(frozen=True, slots=True)
class TicketConfig:
    """Where clients with a ticket reach the node's own port, and the origins (``*`` = all) whose pages may be such clients."""

    url: str
    origins: frozenset[str]


@dataclass(frozen=True, slots=True)
class TlsConfig:
    """What the node's own port shows: files of the owner, or what the internal CA certifies for ``host``, in ``folder``."""

    certificate: Path | None = None
    key: Path | None = None
    folder: Path | None = None
    host: str = ""


@dataclass(frozen=True, slots=True)
class OperationsConfig:
    """Who may load, unload and flush. ``level`` is 0, 1 or 2; ``is_level_given``: the owner named it.

    ``key_path``: the owner's own keys of tokens, None = the node makes its own at levels 1 and 2, and has none at level 0.
    ``runner_id``: the audience of tokens below level 2, "" = the name of the node. ``ops_per_hour``: how many may begin.
    ``counted_signers``: names that count towards ``min_signers`` below level 2, None = any. ``cluster_address``: where other
    nodes of a replica reach this one, "" = nowhere.
    """

    key_path: Path | None
    level: int
    is_level_given: bool
    min_signers: int
    runner_id: str
    ops_per_hour: int
    counted_signers: frozenset[str] | None = None
    cluster_address: str = ""


@dataclass(frozen=True, slots=True)
class FilesConfig:
    """Where things lie. ``data`` None = nothing is kept over a restart. Settings paths as in the llm-pool specification:
    those in the data folder need not be there.
    """

    data: Path | None
    model_base: Path | None
    hf_home: Path | None
    settings: Path | None
    local_settings: Path | None
    hub_allow: tuple[str, ...]

    def find_settings(self) -> tuple[Path | None, Path | None]:
        """Return the settings file and the local one to read now: one of the data folder only when it is there by now."""
        return self._find(self.settings), self._find(self.local_settings)

    def _find(self, path: Path | None) -> Path | None:
        own = () if self.data is None else (self.data / "settings.json", self.data / "local.json")
        is_optional = path in own
        return None if path is None or (is_optional and not path.is_file()) else path


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Everything the process needs to know. ``engine`` None = only what settings or operations load.

    ``log_level`` None = not given: the settings file may say. ``log_format``: one of
    ``wire.logs.FORMATS``. ``environment`` is what names limits, weights and engine
    defaults in variables of open-ended names. ``keeps_engine_errors``: the log has what engines say when they fail.
    ``tells_log``: the control plane may ask for the last lines of that log.
    ``limits``: what the process installs.
    """

    gateways: tuple[str, ...]
    gateway_ca: Path | None
    """Certificates of authorities that may certify a gateway, beside those that this machine trusts."""
    token: str = field(repr=False)
    name: str
    provider: str
    speaks_bridge: bool
    """Whether the gateways are servers of ModelRelay."""
    owner: str
    max_concurrent: int
    max_queue_depth: int
    memory_budget_mb: int | None
    threads: int
    gpu_ids: tuple[int, ...]
    engine: BackendConfig | LlamaConfig | None
    api: ApiWish | None
    tickets: TicketConfig | None
    tls: TlsConfig | None
    operations: OperationsConfig
    files: FilesConfig
    log_level: str | None
    log_format: str
    keeps_engine_errors: bool
    tells_log: bool
    limits: Limits
    environment: Mapping[str, str] = field(repr=False)


LOG_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "critical": "critical",
}
"""Words for a log level, in any case, and what we call each. ``controlplane.env`` has the same for the server."""

EPILOG = f"""\
Every option also reads the environment: MUSTER_GATEWAY, MUSTER_GATEWAY_CA, MUSTER_TOKEN or MUSTER_TOKEN_FILE, MUSTER_PROVIDER,
MUSTER_BACKEND_URL, MUSTER_BACKEND_KEY or MUSTER_BACKEND_KEY_FILE, MUSTER_MODELS, MUSTER_TRANSLATE, MUSTER_TIDY,
MUSTER_MAX_CONCURRENT, MUSTER_NAME, MUSTER_ENGINE, MUSTER_MODEL_PATH, MUSTER_MODEL_NAME, MUSTER_CONTEXT, MUSTER_THREADS,
MUSTER_OWNER, MUSTER_LOG_LEVEL, MUSTER_API_HOST, MUSTER_API_PORT, MUSTER_API_KEY or MUSTER_API_KEY_FILE, MUSTER_DATA,
MUSTER_MEMORY_BUDGET_MB, MUSTER_TICKET_URL, MUSTER_TICKET_ORIGINS, MUSTER_API_TLS_CERT, MUSTER_API_TLS_KEY,
MUSTER_CLUSTER_ADDRESS.

The port speaks TLS with a certificate of yours (--api-tls-cert), or with an https:// --ticket-url, for which the internal CA of
the installation certifies it; --api-plain (MUSTER_API_PLAIN) leaves TLS to a proxy in front of it.

The model-runner's own variables: MODEL_BASE_PATH (folder of models), HF_HOME (downloads), MAX_QUEUE_DEPTH (16),
QUEUE_TIMEOUT_MS (30000), ENABLE_MULTI_TENANT, DEFAULT_RATE_LIMIT and TENANT_RATE_LIMIT_<tenant> (100req/min),
TENANT_WEIGHT_<tenant>, CUDA_VISIBLE_DEVICES, VLLM_MAX_MODEL_LEN, VLLM_GPU_MEMORY_UTILIZATION, VLLM_ENABLE_PREFIX_CACHING,
LOG_LEVEL, LOG_FORMAT (as MUSTER_LOG_FORMAT: json, console or auto, which is console on a terminal), ENABLE_METRICS,
METRICS_PORT. MUSTER_KEEP_ENGINE_ERRORS (true: the log has what an engine says when it refuses or fails, without what it repeats
of the request). MUSTER_TELL_LOG (true: operators may ask for its last lines). LLM_POOL_SETTINGS_PATH and
LLM_POOL_LOCAL_SETTINGS_PATH name the settings files. MUSTER_HUB_ALLOW limits which repositories may be fetched (a comma list of
patterns such as org/*).

Who may load, unload and flush: OP_TOKEN_LEVEL (0, 1 or 2: what an operation token must prove; 2 unless the next one is set),
VERIFIED_OP_TOKEN_KEY_PATH (the owner's own key of operation tokens; with OP_TOKEN_LEVEL=0 /etc/safebox/model-api.key when it
exists), OP_TOKEN_MIN_SIGNERS (2, below level 2), OP_TOKEN_SIGNERS (names that count, below level 2; a comma list),
MUSTER_RUNNER_ID (whom tokens must be made for, below level 2; default: the name), MUSTER_OPS_PER_HOUR (60: how many operations
may begin within an hour). At level 2 a person confirms the policy here once: {COMMAND} trust --help.

Seconds, environment only: MUSTER_OFFLINE_AFTER_S (15: a gateway not heard for so long is left),
MUSTER_RECONNECT_MAX_S (30: longest pause before dialling again), MUSTER_RUNNER_DRAIN_S (30),
MUSTER_UNLOAD_DRAIN_S (300: how long an unload waits for what runs),
MUSTER_ENGINE_SILENT_S (10: an engine that does not answer for so long is restarted),
MUSTER_JOIN_S (120: how long a load over several nodes waits for each of them),
MUSTER_MEMBER_SILENT_S (10: a replica over several nodes ends when one of them is not heard for so long).

Signals: SIGTERM or Ctrl-C finishes what runs (up to 30 s), then leaves; a second one leaves at once.
SIGHUP reads the settings files again. SIGUSR1 takes the node back for its owner (spare_off); SIGUSR2 lends it again (spare_on).
"""


def split_url(option: str, url: str, schemes: set[str]) -> SplitResult:
    """Return the parts of an address that an option gave. Raises ConfigError naming the option."""
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


ALIASES = (
    Alias("PROXY_URL", "MUSTER_GATEWAY", "--proxy-url"),
    Alias("WORKER_SECRET", "MUSTER_TOKEN", "--worker-secret"),
    Alias("WORKER_NAME", "MUSTER_NAME", "--worker-name"),
    Alias("PROVIDER_NAME", "MUSTER_PROVIDER", "--provider"),
    Alias("BACKEND_URL", "MUSTER_BACKEND_URL", "--backend-url"),
    Alias("MODELS", "MUSTER_MODELS", "--models"),
    Alias("MAX_CONCURRENCY", "MUSTER_MAX_CONCURRENT", "--max-concurrency"),
    Alias("RUST_LOG", "MUSTER_LOG_LEVEL", read=read_rust_log),
    Alias("LOG_LEVEL", "MUSTER_LOG_LEVEL", "--log-level", read_level),
    Alias("LOG_FORMAT", "MUSTER_LOG_FORMAT", read=lambda text: "console" if text.lower() == "text" else text),
)
"""What a node reads for users of ModelRelay's worker, and of the model-runner specification (``LOG_…``), where ours is not set.

The first that is set counts. ``controlplane.env`` has a server's.
"""


PROTOCOLS = ("muster", "bridge-v1")


class Options:
    """One place to look an option up: flag, then environment, then default.

    What cannot be used is noted, and ``finish`` raises all of it.
    """

    _ENV = {"backend": "MUSTER_BACKEND_URL"}

    def __init__(self, args: argparse.Namespace, env: Mapping[str, str]) -> None:
        self.args = args
        self._env = env
        self.problems: list[str] = []
        self.read: dict[str, Variable] = {}
        """By variable, what was found."""

    def finish(self) -> None:
        """Raise ConfigError with everything that was noted."""
        if self.problems:
            raise ConfigError(print_problems(list(dict.fromkeys(self.problems))))

    def refuse(self, message: str, variable: str = "") -> None:
        self.problems.append(message)
        if variable in self.read:
            self.read[variable] = replace(self.read[variable], problem=message)

    def attempt(self, read: Callable[[], Value], default: Value) -> Value:
        """Return what ``read`` returns, ``default`` when it cannot be used."""
        try:
            return read()
        except ConfigError as error:
            message = str(error)
            option, _, rest = message.removeprefix("--").partition(" ")
            variable = self.variable_of(option.replace("-", "_"))
            if message.startswith("--") and variable in self.read:
                message = f"{self.subject(variable, option)} {rest}"
            self.refuse(message, variable)
            return default

    def variable(self, name: str, default: str = "", *, allowed: str = "") -> str:
        return self._look_up(name, default, allowed=allowed)

    def switch(self, variable: str, *, default: bool, option: str = "") -> bool:
        if option and getattr(self.args, option):
            self.read[variable] = Variable(variable, "true", "option", f"--{option.replace('_', '-')}")
            return True
        text = self.variable(variable, "true" if default else "false", allowed="true or false")
        return self.attempt(lambda: read_switch(self.subject(variable), text, default=default), default)

    def whole(self, variable: str, default: int, *, lowest: int, highest: int) -> int:
        text = self.variable(variable, str(default), allowed=f"a whole number from {lowest} to {highest}")
        return self._check_whole(variable, text, default, lowest=lowest, highest=highest)

    def text(self, name: str, default: str = "", *, allowed: str = "") -> str:
        """Return an option as text, trimmed; an empty one counts as not given."""
        return self._look_up(self.variable_of(name), default, option=name, allowed=allowed)

    def texts(self, name: str) -> list[str]:
        whole = self._look_up(self.variable_of(name), "", option=name, allowed="a list, separated by commas")
        return [part.strip() for part in whole.split(",") if part.strip()]

    def secret(self, name: str) -> str:
        """Return a secret given directly or as the path of a file that holds it."""
        variable, option = self.variable_of(name), f"--{name.replace('_', '-')}"
        path = getattr(self.args, f"{name}_file", None)
        if getattr(self.args, name, None) is not None or path is None:
            value = self._look_up(variable, "", option=name, has_file=True)
            if self.read[variable].origin != "file":
                return value
            path = value
        else:
            self.read[variable] = Variable(variable, "", "option", f"{option}-file")
        try:
            value = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            self.refuse(f"cannot read the {name} from {path}: {error}", variable)
            return ""
        self.read[variable] = replace(self.read[variable], text=value)
        return value

    def number(self, name: str, default: int, *, highest: int) -> int:
        """Return an option that is a whole number from 1 to ``highest``."""
        text = self.text(name, str(default), allowed=f"a whole number from 1 to {highest}")
        return self._check_whole(self.variable_of(name), text, default, lowest=1, highest=highest)

    def seconds(self, variable: str, default: float) -> float:
        raw = self.variable(variable, f"{default:g}", allowed="a number of seconds from 0.05 to 86400")
        if self.read[variable].origin == "default":
            return default
        try:
            value = float(raw)
        except ValueError:
            value = 0.0
        if not 0.05 <= value <= 86400:
            message = f"{self.subject(variable)} must be a number of seconds from 0.05 to 86400, not {raw!r}"
            self.refuse(message, variable)
            return default
        return value

    def variable_of(self, option: str) -> str:
        return self._ENV.get(option, f"MUSTER_{option.upper()}")

    def subject(self, variable: str, option: str = "") -> str:
        """Return what an error names: whatever was given, and the option that it stands for."""
        found = self.read.get(variable)
        if found is None or found.origin in {"option", "default"}:
            return f"--{option}" if option else variable if found is None else found.source or variable
        return f"{variable} (--{option})" if option and found.origin == "variable" else found.subject

    def _look_up(self, variable: str, default: str, *, option: str = "", allowed: str = "", has_file: bool = False) -> str:
        given = getattr(self.args, option, None) if option else None
        if given is not None:
            text = ",".join(given) if isinstance(given, list) else str(given)
            found = Variable(variable, text, "option", f"--{option.replace('_', '-')}")
        else:
            found = find_variable(variable, self._env, ALIASES, has_file=has_file) or Variable(variable, "", "default")
        text = found.text.strip()
        if not text:
            found = Variable(variable, default, "default")
        self.read[variable] = replace(found, text=text or default, default=default, allowed=allowed)
        return text or default

    def _check_whole(self, variable: str, raw: str, default: int, *, lowest: int, highest: int) -> int:
        if raw.isascii() and raw.isdecimal() and lowest <= int(raw) <= highest:
            return int(raw)
        if self.read[variable].origin != "default":
            message = f"{self.subject(variable)} must be a whole number from {lowest} to {highest}, not {raw!r}"
            self.refuse(message, variable)
        return default


def read_switch(variable: str, text: str, *, default: bool) -> bool:
    """Return what a variable says, ``default`` where that is nothing. Raises ConfigError."""
    word = text.strip().lower()
    if word and word not in SWITCHES:
        raise ConfigError(f"{variable} must be true or false, not {word!r}")
    return SWITCHES.get(word, default)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="muster node",
        description="Serve models on this node: connected to a Muster gateway, or alone behind HTTP (--standalone), with the "
        "engines it brings or by fronting any OpenAI-compatible server (--backend).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gateway", "--proxy-url", action="append", metavar="URL", help="gateway to dial; may be repeated or a comma list")
    add("--gateway-ca", metavar="FILE", help="CA certificates (PEM) to trust for gateways, beside those of this machine")
    add(
        "--token",
        "--worker-secret",
        help="worker credential (msw_…); the environment or a file keeps it out of the process list",
    )
    add("--token-file", metavar="FILE", help="file that holds the worker credential")
    add("--standalone", action="store_true", help="serve without a gateway, on the node's own HTTP port")
    add("--api-port", metavar="PORT", help="port of the node's own HTTP API (default with --standalone: 8090; 0 = any)")
    add("--api-host", metavar="HOST", help="address it listens on (default: 127.0.0.1; others need --api-key-file)")
    add("--api-key", metavar="KEY", help="key that its clients must send; better in a file or the environment")
    add("--api-key-file", metavar="FILE", help="file that holds that key")
    add(
        "--api-tls-cert",
        metavar="FILE",
        help="certificate and chain (PEM) that the port shows; read again when changed",
    )
    add("--api-tls-key", metavar="FILE", help="its key, where that lies in a file of its own")
    add("--api-plain", action="store_true", help="a proxy in front of that port speaks TLS for an https:// --ticket-url")
    add("--ticket-url", metavar="URL", help="where clients with a ticket reach that port, such as http://gpu1.lan:8090")
    add("--ticket-origins", action="append", metavar="A,B", help="origins of web pages that may use tickets (* = all)")
    add("--cluster-address", metavar="HOST:PORT", help="where other nodes of a replica reach this one; a private network only")
    add("--data", metavar="DIR", help="folder for what must survive a restart: keys, pinned policy, used tokens, load tasks")
    add("--memory-budget-mb", metavar="N", help="memory that all models together may take (default: what is free)")
    add("--provider", help="provider this node belongs to (default: local)")
    add("--protocol", metavar="NAME", help="muster (the default), or bridge-v1 to work for a server of ModelRelay")
    add("--backend", "--backend-url", metavar="URL", help="OpenAI-compatible server to front, such as http://127.0.0.1:11434")
    add("--backend-key", metavar="KEY", help="bearer key of that server")
    add("--models", action="append", metavar="A,B", help="models to offer (default: what the backend lists)")
    add("--translate", action="append", metavar="A,B", help="messages, responses: have gateways translate what is asked there")
    add("--tidy", action="store_true", help="put chunks of its chat streams right for strict clients")
    add("--max-concurrent", "--max-concurrency", metavar="N", help="requests served at the same time (default: 4)")
    add("--name", "--worker-name", help="name of this node (default: its host name)")
    add("--engine", metavar="ENGINE", help="embedded engine: llamacpp (default)")
    add("--model-path", metavar="FILE", help="GGUF file to serve from the start (default: the shipped tiny model)")
    add("--model-name", metavar="NAME", help="name that clients use for it (default: muster-tiny, or the file's name)")
    add("--context", metavar="TOKENS", help="its context per request (default: 2048)")
    add("--threads", metavar="N", help="threads of an engine on the CPU (default: 1-2 for the tiny model, else cores-1)")
    add("--owner", metavar="NAME", help="who owns this node, as operators should see it")
    add("--log-level", metavar="LEVEL", help=f"one of {', '.join(LOG_LEVELS)} (default: info)")
    return parser


TINY_MODEL_PATH = Path(__file__).resolve().parent / "tiny" / "muster-tiny-q8_0.gguf"
TINY_MODEL_NAME = "muster-tiny"
SHARED_KEY_PATH = Path("/etc/safebox/model-api.key")
"""Where the model-runner specification has the key of operation tokens."""
_WS_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+\Z")
_LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})


def normalise_gateway(url: str) -> str:
    """Return the ``ws(s)://host[:port][/prefix]`` form of a gateway address. Raises ConfigError."""
    parts = split_url("gateway", url, set(_WS_SCHEMES))
    return urlunsplit((_WS_SCHEMES[parts.scheme], parts.netloc, parts.path.rstrip("/"), "", ""))


def read_config(argv: Sequence[str], env: Mapping[str, str], *, shared_key: Path = SHARED_KEY_PATH) -> RunnerConfig:
    """Return the configuration of ``argv`` over ``env``. Raises ConfigError; argparse itself exits on unknown flags.

    ``shared_key``: the key file of the specification, taken at level 0 when it is there and no other is named.
    """
    config, options = read_options(argv, env, shared_key=shared_key)
    options.finish()
    return config


def read_options(
    argv: Sequence[str], env: Mapping[str, str], *, shared_key: Path = SHARED_KEY_PATH
) -> tuple[RunnerConfig, Options]:
    """Return what ``read_config`` does, with defaults where something cannot be used, and what was read and is wrong."""
    options = Options(build_parser().parse_args(argv), env)
    named = options.texts("gateway")
    gateways = tuple(dict.fromkeys(url for one in named if (url := options.attempt(partial(normalise_gateway, one), ""))))
    is_alone = bool(options.args.standalone)
    if not named and not is_alone:
        options.refuse("no gateway: give --gateway http://HOST:8080 or set MUSTER_GATEWAY, or serve alone with --standalone")
    api = _read_api(options, is_alone=is_alone)
    name = options.text("name", socket.gethostname() or "worker")
    files = _read_files(options)
    has_gateway = bool(named)
    tickets = options.attempt(
        lambda: _read_tickets(options, files=files, has_port=api is not None, has_gateway=has_gateway), None
    )
    has_models = files.find_settings()[0] is not None or files.model_base is not None
    engine = options.attempt(lambda: _read_engine(options, has_models=has_models), None)
    cores = os.cpu_count() or 1
    log_level = options.text("log_level", allowed=", ".join(LOG_LEVELS)).lower()
    if log_level and log_level not in LOG_LEVELS:
        subject = options.subject("MUSTER_LOG_LEVEL", "log-level")
        options.refuse(f"{subject} must be one of {', '.join(LOG_LEVELS)}, not {log_level!r}", "MUSTER_LOG_LEVEL")
    log_format = options.variable("MUSTER_LOG_FORMAT", "auto", allowed=", ".join(FORMATS)).lower()
    if log_format not in FORMATS:
        subject = options.subject("MUSTER_LOG_FORMAT")
        options.refuse(f"{subject} must be one of {', '.join(FORMATS)}, not {log_format!r}", "MUSTER_LOG_FORMAT")
    budget = options.number("memory_budget_mb", 0, highest=1 << 30)
    config = RunnerConfig(
        gateways=gateways,
        gateway_ca=options.attempt(lambda: _read_gateway_ca(options, gateways), None),
        token=_read_token(options) if has_gateway else "",
        name=name,
        provider=options.text("provider", "local"),
        speaks_bridge=_read_protocol(options),
        owner=options.text("owner"),
        max_concurrent=options.number("max_concurrent", 4, highest=1024),
        max_queue_depth=options.whole("MAX_QUEUE_DEPTH", 16, lowest=0, highest=100_000),
        memory_budget_mb=budget or None,
        threads=options.number("threads", max(1, cores - 1), highest=1024),
        gpu_ids=_read_gpu_ids(options),
        engine=engine,
        api=api,
        tickets=tickets,
        tls=options.attempt(lambda: _read_tls(options, files=files, has_port=api is not None, tickets=tickets), None),
        operations=_read_operations(options, files=files, shared_key=shared_key),
        files=files,
        log_level=LOG_LEVELS.get(log_level),
        log_format=log_format,
        keeps_engine_errors=options.switch("MUSTER_KEEP_ENGINE_ERRORS", default=True),
        tells_log=options.switch("MUSTER_TELL_LOG", default=True),
        limits=_read_limits(options),
        environment=dict(env),
    )
    return config, options


def _read_limits(options: Options) -> Limits:
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


def _read_gateway_ca(options: Options, gateways: tuple[str, ...]) -> Path | None:
    text = options.text("gateway_ca")
    if not text:
        return None
    if not any(url.startswith("wss:") for url in gateways):
        raise ConfigError("--gateway-ca needs a --gateway with https://, whose certificate it is to check")
    path = Path(text).expanduser()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(f"--gateway-ca {path} holds no certificates (PEM) that can be read: {error}") from None
    return path


def _read_token(options: Options) -> str:
    token = options.secret("token")
    if not token and not options.read["MUSTER_TOKEN"].problem:
        options.refuse("no credential: give --token, --token-file or set MUSTER_TOKEN (a worker credential, msw_…)")
    if not token.isprintable() or not token.isascii() or " " in token:
        subject = options.subject("MUSTER_TOKEN", "token")
        options.refuse(f"{subject} holds characters that no credential has; copy it again", "MUSTER_TOKEN")
    return token


def settle_api(wish: ApiWish, *, host: str | None, port: int | None) -> ApiConfig:
    """Return what the port is to be: flags and environment first, then what the settings file says. Raises ConfigError."""
    settled = wish.host or host or "127.0.0.1"
    if settled not in _LOOPBACK and not wish.key:
        raise ConfigError(f"listening on {settled} opens the API to others: protect it with --api-key-file or MUSTER_API_KEY")
    chosen = wish.port if wish.port is not None else 8090 if port is None else port
    return ApiConfig(settled, chosen, wish.key, wish.has_metrics, wish.metrics_port)


def _read_api(options: Options, *, is_alone: bool) -> ApiWish | None:
    port_text = options.text("api_port", allowed="a port from 0 to 65535")
    if not port_text and not is_alone:
        return None
    if port_text and (not port_text.isdecimal() or int(port_text) > 65535):
        subject = options.subject("MUSTER_API_PORT", "api-port")
        options.refuse(f"{subject} must be a port from 0 to 65535, not {port_text!r}", "MUSTER_API_PORT")
        port_text = ""
    key = options.secret("api_key")
    if key and len(key) < WIRE.least_secret_chars:
        subject = options.subject("MUSTER_API_KEY", "api-key")
        options.refuse(f"the API key ({subject}) must have at least {WIRE.least_secret_chars} characters", "MUSTER_API_KEY")
    metrics_port = options.whole("METRICS_PORT", 0, lowest=0, highest=65535)
    return ApiWish(
        options.text("api_host") or None, int(port_text) if port_text else None, key,
        options.switch("ENABLE_METRICS", default=True), metrics_port or None,
    )  # fmt: skip


def _read_tickets(options: Options, *, files: FilesConfig, has_port: bool, has_gateway: bool) -> TicketConfig | None:
    url = options.text("ticket_url")
    if not url:
        return None
    parts = split_url("ticket-url", url, {"http", "https"})
    if not has_port or not has_gateway:
        raise ConfigError("--ticket-url needs --api-port, where tickets are taken, and --gateway, which gives them out")
    if files.data is None:
        raise ConfigError("--ticket-url needs --data DIR: which tickets were used must survive a restart, or one works twice")
    origins = frozenset(origin.lower().rstrip("/") for origin in options.texts("ticket_origins"))
    if wrong := [origin for origin in origins if origin != "*" and not _ORIGIN.match(origin)]:
        raise ConfigError(f"--ticket-origins must be a comma list such as https://app.example.org, or *, not {wrong[0]!r}")
    return TicketConfig(urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/").removesuffix("/v1"), "", "")), origins)


def _read_protocol(options: Options) -> bool:
    said = options.text("protocol", PROTOCOLS[0], allowed=" or ".join(PROTOCOLS))
    if said not in PROTOCOLS:
        subject = options.subject("MUSTER_PROTOCOL", "protocol")
        options.refuse(f"{subject} must be {' or '.join(PROTOCOLS)}, not {said!r}", "MUSTER_PROTOCOL")
    return said == PROTOCOLS[1]


def _read_tls(options: Options, *, files: FilesConfig, has_port: bool, tickets: TicketConfig | None) -> TlsConfig | None:
    certificate, key = options.text("api_tls_cert"), options.text("api_tls_key")
    is_plain = options.switch("MUSTER_API_PLAIN", default=False, option="api_plain")
    if key and not certificate:
        raise ConfigError("--api-tls-key needs --api-tls-cert, the certificate of that key")
    if certificate and (is_plain or not has_port):
        raise ConfigError("--api-tls-cert needs --api-port, whose clients it is for, and no --api-plain")
    if certificate:
        return TlsConfig(Path(certificate).expanduser(), Path(key).expanduser() if key else None)
    parts = urlsplit("" if tickets is None else tickets.url)
    if parts.scheme != "https" or is_plain:
        return None
    return TlsConfig(folder=files.data, host=(parts.hostname or "").lower())


def _read_operations(options: Options, *, files: FilesConfig, shared_key: Path) -> OperationsConfig:
    key_path = options.variable("VERIFIED_OP_TOKEN_KEY_PATH")
    # The file alone does not choose level 0: whoever has its key would operate the node alone, which only its owner may want.
    if not key_path and options.variable("OP_TOKEN_LEVEL") == "0" and shared_key.is_file():
        key_path = str(shared_key)
    if key_path and files.data is None:
        options.refuse(
            f"VERIFIED_OP_TOKEN_KEY_PATH ({key_path}) needs --data DIR: which tokens were used must survive a restart, "
            "or one works twice"
        )
    counted = frozenset(part.strip() for part in options.variable("OP_TOKEN_SIGNERS").split(",") if part.strip()) or None
    level = options.whole("OP_TOKEN_LEVEL", 0 if key_path else 2, lowest=0, highest=2)
    min_signers = options.whole("OP_TOKEN_MIN_SIGNERS", 2, lowest=1, highest=64)
    if counted is not None and level == 2:
        options.refuse("OP_TOKEN_SIGNERS counts below level 2 only: at level 2 the pinned policy says who may approve")
    if counted is not None and len(counted) < min_signers:
        options.refuse(f"OP_TOKEN_SIGNERS has {len(counted)} names and OP_TOKEN_MIN_SIGNERS asks for {min_signers}: no token")
    # An owner who hands out keys chose the public format, which knows no proofs; everybody else gets the strongest level.
    return OperationsConfig(
        key_path=Path(key_path).expanduser() if key_path else None,
        level=level,
        is_level_given=options.read["OP_TOKEN_LEVEL"].origin != "default",
        min_signers=min_signers,
        runner_id=options.variable("MUSTER_RUNNER_ID"),
        ops_per_hour=options.whole("MUSTER_OPS_PER_HOUR", 60, lowest=1, highest=10_000),
        counted_signers=counted,
        cluster_address=_read_cluster_address(options),
    )


def _read_files(options: Options) -> FilesConfig:
    data = options.text("data")
    base = _folder("MODEL_BASE_PATH", options)
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


def _folder(variable: str, options: Options) -> Path | None:
    text = options.variable(variable, allowed="a folder")
    if not text:
        return None
    path = Path(text).expanduser()
    if not path.is_dir():
        options.refuse(f"{variable}: there is no folder {path}", variable)
    return path.resolve()


def _settings_file(variable: str, options: Options, data: Path | None, name: str) -> Path | None:
    if given := options.variable(variable, allowed="a file"):
        path = Path(given).expanduser()
        if not path.is_file():
            options.refuse(f"{variable}: there is no file {path}", variable)
        return path
    # It need not be there yet: an owner may write it later, and have it read with SIGHUP.
    return None if data is None else data / name


def _read_gpu_ids(options: Options) -> tuple[int, ...]:
    words = [word.strip() for word in options.variable("CUDA_VISIBLE_DEVICES").split(",")]
    return tuple(int(word) for word in words if word.isdecimal())


def _read_cluster_address(options: Options) -> str:
    text = options.text("cluster_address", allowed="IP address and port")
    host, _, port = text.rpartition(":")
    try:
        address = ipaddress.ip_address(host.removeprefix("[").removesuffix("]")) if text else None
    except ValueError:
        address = None
    # Ray takes no names, and others cannot dial the address that stands for all.
    is_usable = address is not None and not address.is_unspecified and port.isdecimal() and 0 < int(port) < 65536
    if text and not is_usable:
        subject = options.subject("MUSTER_CLUSTER_ADDRESS", "cluster-address")
        options.refuse(f"{subject} must be an IP address of this node and a port, such as 10.0.0.1:8070, not {text!r}")
    return text


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
            tidies=options.switch("MUSTER_TIDY", default=False, option="tidy"),
        )
    engine = options.text("engine", "llamacpp")
    if engine != "llamacpp":
        raise ConfigError(f"--engine must be llamacpp, not {engine!r}; other engines are named in the settings file")
    path_text = options.text("model_path")
    if not path_text and has_models:
        return None
    if IS_WINDOWS:
        raise ConfigError("the engines that a node starts need Linux or macOS: on Windows give --backend URL")
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
