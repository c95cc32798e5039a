"""Where an option comes from: the flag, then the environment, then the default; and the parser with every flag."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from runner.errors import ConfigError

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

EPILOG = """\
Every option also reads the environment: MUSTER_GATEWAY, MUSTER_TOKEN or MUSTER_TOKEN_FILE, MUSTER_PROVIDER,
MUSTER_BACKEND_URL, MUSTER_BACKEND_KEY or MUSTER_BACKEND_KEY_FILE, MUSTER_MODELS, MUSTER_TRANSLATE, MUSTER_TIDY,
MUSTER_MAX_CONCURRENT, MUSTER_NAME, MUSTER_ENGINE, MUSTER_MODEL_PATH, MUSTER_MODEL_NAME, MUSTER_CONTEXT, MUSTER_THREADS,
MUSTER_OWNER, MUSTER_LOG_LEVEL, MUSTER_API_HOST, MUSTER_API_PORT, MUSTER_API_KEY or MUSTER_API_KEY_FILE, MUSTER_DATA,
MUSTER_MEMORY_BUDGET_MB.

The model-runner's own variables: MODEL_BASE_PATH (folder of models), HF_HOME (downloads), MAX_QUEUE_DEPTH (16),
QUEUE_TIMEOUT_MS (30000), ENABLE_MULTI_TENANT, DEFAULT_RATE_LIMIT and TENANT_RATE_LIMIT_<tenant> (100req/min),
TENANT_WEIGHT_<tenant>, CUDA_VISIBLE_DEVICES, VLLM_MAX_MODEL_LEN, VLLM_GPU_MEMORY_UTILIZATION, VLLM_ENABLE_PREFIX_CACHING,
LOG_LEVEL, LOG_FORMAT (text or json), ENABLE_METRICS, METRICS_PORT. MUSTER_KEEP_ENGINE_ERRORS (true: the log has what an engine
says when it refuses or fails, without what it repeats of the request). LLM_POOL_SETTINGS_PATH and LLM_POOL_LOCAL_SETTINGS_PATH
name the settings files. MUSTER_HUB_ALLOW limits which repositories may be fetched (a comma list of patterns such as org/*).

Who may load, unload and flush: OP_TOKEN_LEVEL (0, 1 or 2: what an operation token must prove; 2 unless the next one is set),
VERIFIED_OP_TOKEN_KEY_PATH (the owner's own key of operation tokens; with OP_TOKEN_LEVEL=0 /etc/safebox/model-api.key when it
exists), OP_TOKEN_MIN_SIGNERS (2, below level 2), OP_TOKEN_SIGNERS (names that count, below level 2; a comma list),
MUSTER_RUNNER_ID (whom tokens must be made for, below level 2; default: the name), MUSTER_OPS_PER_HOUR (60: how many operations
may begin within an hour). At level 2 a person confirms the policy here once: ./muster trust --help.

Seconds, environment only: MUSTER_OFFLINE_AFTER_S (15: a gateway not heard for so long is left),
MUSTER_RECONNECT_MAX_S (30: longest pause before dialling again), MUSTER_RUNNER_DRAIN_S (30),
MUSTER_UNLOAD_DRAIN_S (300: how long an unload waits for what runs),
MUSTER_ENGINE_SILENT_S (10: an engine that does not answer for so long is restarted).

Signals: SIGTERM or Ctrl-C finishes what runs (up to 30 s), then leaves; a second one leaves at once.
SIGHUP reads the settings files again. SIGUSR1 takes the box back for its owner (spare_off); SIGUSR2 lends it again (spare_on).
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


class Options:
    """One place to look an option up: flag, then environment, then default."""

    _ENV = {"backend": "MUSTER_BACKEND_URL"}

    def __init__(self, args: argparse.Namespace, env: Mapping[str, str]) -> None:
        self._args = args
        self._env = env

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables of the process."""
        return self._env

    def is_set(self, name: str) -> bool:
        """Return whether a switch was given on the command line."""
        return bool(getattr(self._args, name, False))

    def variable(self, name: str, default: str = "") -> str:
        """Return a variable of the environment, trimmed."""
        return self._env.get(name, "").strip() or default

    def switch(self, variable: str, *, default: bool) -> bool:
        """Return a variable that is true or false. Raises ConfigError."""
        raw = self.variable(variable).lower()
        if raw in {"true", "1", "yes", "on", "false", "0", "no", "off"}:
            return raw in {"true", "1", "yes", "on"}
        if raw:
            raise ConfigError(f"{variable} must be true or false, not {raw!r}")
        return default

    def whole(self, variable: str, default: int, *, lowest: int, highest: int) -> int:
        """Return a whole number that a variable gives. Raises ConfigError."""
        raw = self.variable(variable)
        if not raw:
            return default
        if not raw.isdecimal() or not lowest <= int(raw) <= highest:
            raise ConfigError(f"{variable} must be a whole number from {lowest} to {highest}, not {raw!r}")
        return int(raw)

    def text(self, name: str, default: str = "") -> str:
        """Return an option as text, trimmed; an empty one counts as not given."""
        value = getattr(self._args, name, None)
        if value is None:
            value = self._env.get(self._ENV.get(name, f"MUSTER_{name.upper()}"))
        return str(value).strip() or default if value is not None else default

    def texts(self, name: str) -> list[str]:
        """Return an option that may be repeated or be a comma list."""
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
        """Return an option that is a whole number from 1 to ``highest``. Raises ConfigError."""
        raw = self.text(name)
        if not raw:
            return default
        flag = name.replace("_", "-")
        if not raw.isdecimal() or not 1 <= int(raw) <= highest:
            raise ConfigError(f"--{flag} must be a whole number from 1 to {highest}, not {raw!r}")
        return int(raw)

    def seconds(self, variable: str, default: float) -> float:
        """Return a variable that is a number of seconds. Raises ConfigError."""
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="./muster node",
        description="Serve models on this box: connected to a Muster gateway, or alone behind HTTP (--standalone), with the "
        "engines it brings or by fronting any OpenAI-compatible server (--backend).",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--gateway", action="append", metavar="URL", help="gateway to dial; may be repeated or a comma list")
    add("--token", help="worker credential (msw_…); the environment or a file keeps it out of the process list")
    add("--token-file", metavar="FILE", help="file that holds the worker credential")
    add("--standalone", action="store_true", help="serve without a gateway, on the box's own HTTP port")
    add("--api-port", metavar="PORT", help="port of the box's own HTTP API (default with --standalone: 8090; 0 = any)")
    add("--api-host", metavar="HOST", help="address it listens on (default: 127.0.0.1; others need --api-key-file)")
    add("--api-key", metavar="KEY", help="key that its clients must send; better in a file or the environment")
    add("--api-key-file", metavar="FILE", help="file that holds that key")
    add("--data", metavar="DIR", help="folder for what must survive a restart: keys, pinned policy, used tokens, load tasks")
    add("--memory-budget-mb", metavar="N", help="memory that all models together may take (default: what is free)")
    add("--provider", help="provider this box belongs to (default: local)")
    add("--backend", metavar="URL", help="OpenAI-compatible server to front, such as http://127.0.0.1:11434")
    add("--backend-key", metavar="KEY", help="bearer key of that server")
    add("--models", action="append", metavar="A,B", help="models to offer (default: what the backend lists)")
    add("--translate", action="append", metavar="A,B", help="messages, responses: have gateways translate what is asked there")
    add("--tidy", action="store_true", help="put chunks of its chat streams right for strict clients")
    add("--max-concurrent", metavar="N", help="requests served at the same time (default: 4)")
    add("--name", help="name of this box (default: its host name)")
    add("--engine", metavar="ENGINE", help="embedded engine: llamacpp (default)")
    add("--model-path", metavar="FILE", help="GGUF file to serve from the start (default: the shipped tiny model)")
    add("--model-name", metavar="NAME", help="name that clients use for it (default: muster-tiny, or the file's name)")
    add("--context", metavar="TOKENS", help="its context per request (default: 2048)")
    add("--threads", metavar="N", help="threads of an engine on the CPU (default: 1-2 for the tiny model, else cores-1)")
    add("--owner", metavar="NAME", help="who owns this box, as operators should see it")
    add("--log-level", metavar="LEVEL", help=f"one of {', '.join(LOG_LEVELS)} (default: info)")
    return parser
