"""The parts of an installation as specifications: command lines, environments, and how each says that it is ready."""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from controlplane.env import LOG_FORMATS, is_loopback, read_choice, read_float, read_list, read_text
from controlplane.launcher.environment import ROOT
from controlplane.launcher.installation import Credentials, Place, credentials_path
from controlplane.launcher.postgres import Postgres
from controlplane.launcher.processes import Command
from controlplane.launcher.supervisor import PartSpec
from controlplane.launcher.valkey import Valkey
from core.limits import limits

STOP_ORDER = (("node",), ("gateway",), ("worker", "control"), ("valkey",), ("postgres",))
RUN_ID_VARIABLE = "MUSTER_RUN_ID"
_SETTINGS = "controlplane.settings"
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104  # only translated
# The C allocator otherwise keeps up to eight arenas per core, each with memory that no other thread can use.
_HOSTS = ("MUSTER_DIRECT_HOSTS", "MUSTER_DIRECT_ALLOW_LOOPBACK")
_ALLOCATOR = {"MALLOC_ARENA_MAX": "2"}
# Beginnings of variables of the shell that the local node does not get: what only the control plane may know, and what the
# person set for another node. Either would have it serve other models, join another group or obey other people. Variables of
# the machine and its engines (``CUDA_VISIBLE_DEVICES``, ``HF_HOME``, proxies) go through. A test compares this with what a
# runner reads.
_NOT_FOR_THE_NODE = (
    *("MUSTER_", "DATABASE_URL", "REDIS_URL", "DJANGO_"),
    *("MODEL_BASE_PATH", "VERIFIED_OP_TOKEN_", "OP_TOKEN_", "MAX_QUEUE_DEPTH", "QUEUE_TIMEOUT_MS", "ENABLE_", "METRICS_PORT"),
    *("DEFAULT_RATE_LIMIT", "TENANT_", "LOG_LEVEL", "LOG_FORMAT", "LLM_POOL_"),
)
# Those of ModelRelay's worker, whole: others begin as they do.
_OF_A_WORKER = frozenset(
    {"PROXY_URL", "WORKER_SECRET", "WORKER_NAME", "PROVIDER_NAME", "BACKEND_URL", "MODELS", "MAX_CONCURRENCY", "RUST_LOG"}
)
FOR_THE_NODE = (
    "MUSTER_LOG_LEVEL",
    "MUSTER_LOG_FORMAT",
    "MUSTER_OFFLINE_AFTER_S",
    "MUSTER_RUNNER_DRAIN_S",
    "MUSTER_OPS_PER_HOUR",
    "MUSTER_VLLM_PYTHON",
)
"""What the local node takes from the shell all the same: settings of the installation and of this machine."""
TINY_MODEL = ROOT / "runner" / "tiny" / "muster-tiny-q8_0.gguf"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the installation listens. ``own``: addresses of this machine, ``names``: its names, both as others may use them.

    ``gateway_sockets``: file descriptors that are bound to the gateways' ports; none where a system cannot hold a port so.
    ``certified``: with TLS the hosts that the certificate names, and ``plain_ports`` those on loopback that speak plain HTTP
    to programs of this machine, of the control plane first.
    """

    host: str
    control_port: int
    gateway_ports: tuple[int, ...]
    gateway_sockets: tuple[int, ...] = ()
    own: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    certified: tuple[str, ...] = ()
    plain_ports: tuple[int, ...] = ()

    @property
    def near_host(self) -> str:
        """How a program on this machine reaches what listens on ``host``."""
        return _WILDCARDS.get(self.host, self.host)

    @property
    def control_url(self) -> str:
        return self._near_url(self.control_port, 0)

    @property
    def public_url(self) -> str:
        """Base URL of the control plane for people."""
        if self.plain_ports:
            return self.outside_urls(self.control_port)[0]
        # On loopback the name: browsers bind no passkey to an address.
        return f"http://localhost:{self.control_port}" if self.is_on_loopback else self.control_url

    @property
    def is_on_loopback(self) -> bool:
        """Whether people open it on this machine: what listens everywhere is reached on loopback as well."""
        return self.host in _WILDCARDS or is_loopback(self.host)

    @property
    def gateway_url(self) -> str:
        return self.gateway_urls()[0]

    def gateway_urls(self) -> list[str]:
        """Return the base URLs at which programs of this machine reach the gateways."""
        return [self._near_url(port, index) for index, port in enumerate(self.gateway_ports, start=1)]

    def client_urls(self, port: int) -> list[str]:
        """Return all base URLs of a port, for people: the one on this machine first, unless the certificate names others."""
        near = [] if self.plain_ports else [self._url(port)]
        return list(dict.fromkeys([*near, *self.outside_urls(port)]))

    @property
    def is_open_to_others(self) -> bool:
        return self.host in _WILDCARDS or not is_loopback(self.host)

    def outside_urls(self, port: int) -> list[str]:
        """Return the base URLs under which other machines reach a port: one for each address that is listened on, and name.

        With TLS those that the certificate names; names that are not this machine's may lead to it elsewhere.
        """
        if self.plain_ports:
            hosts = self.certified or (self.near_host,)
            return [f"https://{_bracket(host)}:{port}" for host in sorted(hosts, key=self._is_foreign)]
        if self.host not in _WILDCARDS:
            return [self._url(port)] if self.is_open_to_others else []
        is_v6 = self.host == "::"
        listened = [address for address in self.own if (":" in address) == is_v6]
        names = [name for name in self.names if name != "localhost"] if listened else []
        return [f"http://{_bracket(host)}:{port}" for host in [*listened, *names]]

    def plain_option(self, index: int) -> list[str]:
        return [f"--plain-port={self.plain_ports[index]}"] if self.plain_ports else []

    def _is_foreign(self, host: str) -> bool:
        return host not in self.names

    def allowed_hosts(self) -> set[str]:
        """Return the hosts under which the control plane answers, as ``Host`` headers write them, without a port."""
        hosts = {"localhost", "127.0.0.1", "[::1]", _bracket(self.near_host)}
        if self.is_open_to_others:
            hosts |= {*self.names, *map(_bracket, self.own)}
        return hosts | {_bracket(host) for host in self.certified}

    def _near_url(self, port: int, index: int) -> str:
        return f"http://127.0.0.1:{self.plain_ports[index]}" if self.plain_ports else self._url(port)

    def _url(self, port: int) -> str:
        return f"http://{_bracket(self.near_host)}:{port}"


@dataclass(frozen=True, slots=True)
class Installation:
    """Everything that the parts need to know about the installation they belong to."""

    place: Place
    addresses: Addresses
    database_url: str
    redis_url: str
    secret_key: str
    cluster_secret: str
    log_key: str
    run_id: str
    tls: tuple[str, ...] = ()
    """The files of certificate and key, when the servers speak TLS."""
    is_preloaded: bool = False
    """Whether this process has loaded what its Django processes need, so that they can be forks of it."""

    def environment(self) -> dict[str, str]:
        """Return the whole environment of every Django process that the launcher starts."""
        # Without bytecode a gateway that died is back after four seconds of compiling instead of one of loading.
        ours = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {
            **_ALLOCATOR,
            **ours,
            **self.own_variables(),
            **_log_format(),
            RUN_ID_VARIABLE: self.run_id,
            "PYTHONUNBUFFERED": "1",
        }

    def own_variables(self) -> dict[str, str]:
        """Return the variables that make a Django process one of this installation."""
        public_url = read_text("MUSTER_PUBLIC_URL", self.addresses.public_url)
        public = urlsplit(public_url)
        # A list of the operator's own takes the place of the machine's names. The launcher itself asks at a near one.
        near = {*Addresses(self.addresses.host, 0, ()).allowed_hosts(), _bracket(public.hostname or "localhost")}
        hosts = near | {*(read_list("MUSTER_ALLOWED_HOSTS") or self.addresses.allowed_hosts())}
        origins = {*read_list("MUSTER_CSRF_TRUSTED_ORIGINS"), f"{public.scheme}://{public.netloc}"}
        return {
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.redis_url,
            "MUSTER_SECRET_KEY": self.secret_key,
            "MUSTER_CLUSTER_SECRET": self.cluster_secret,
            "MUSTER_LOG_KEY": self.log_key,
            "MUSTER_PUBLIC_URL": public_url,
            "MUSTER_PLAYGROUND_GATEWAY_URL": read_text("MUSTER_PLAYGROUND_GATEWAY_URL", self.addresses.gateway_url),
            **self._tls_variables(),
            "MUSTER_ALLOWED_HOSTS": ",".join(sorted(hosts)),
            "MUSTER_CSRF_TRUSTED_ORIGINS": ",".join(sorted(origins)),
            "DJANGO_SETTINGS_MODULE": _SETTINGS,
            # The internal CA is made from a shell that may not have them.
            **{name: os.environ[name] for name in _HOSTS if name in os.environ},
        }

    def _tls_variables(self) -> dict[str, str]:
        if not self.tls:
            return {}
        public_url = self.addresses.client_urls(self.addresses.gateway_ports[0])[0]
        return {
            "MUSTER_TLS_CERT": self.tls[0],
            "MUSTER_TLS_KEY": self.tls[1],
            "MUSTER_GATEWAY_PUBLIC_URL": read_text("MUSTER_GATEWAY_PUBLIC_URL", public_url),
        }

    def pageless_environment(self) -> dict[str, str]:
        return {**self.environment(), "MUSTER_ADMIN_PAGES": "0"}


def embedded_spec(name: str, server: Postgres | Valkey) -> PartSpec:
    return PartSpec(
        name=name,
        command=server.command,
        is_ready=server.is_ready,
        before_start=server.clear_leftovers,
        stop_signal=server.stop_signal,
        stop_deadline_s=30.0,
    )


def control_spec(installation: Installation) -> PartSpec:
    where = installation.addresses
    arguments = ["--host", where.host, "--port", str(where.control_port), *where.plain_option(0)]
    return PartSpec(
        name="control",
        command=lambda: _django(installation, "controlplane.serve_control", arguments, installation.environment()),
        is_ready=lambda _pid: answers_ok(where.control_url, "/healthz"),
    )


def gateway_specs(installation: Installation) -> list[PartSpec]:
    """Return the gateways: the data plane on uvicorn, one process each."""
    return [_gateway_spec(installation, index) for index in range(len(installation.addresses.gateway_ports))]


def _gateway_spec(installation: Installation, index: int) -> PartSpec:
    where = installation.addresses
    port = where.gateway_ports[index]
    arguments = ["--host", where.host, "--port", str(port), *where.plain_option(1 + index)]
    sockets = where.gateway_sockets[index : index + 1]
    arguments += [f"--fd={number}" for number in sockets]
    environment = installation.pageless_environment()
    if len(where.gateway_ports) > 1:
        environment["MUSTER_INTERNAL_URL"] = where.gateway_urls()[index]
    return PartSpec(
        name="gateway" if index == 0 else f"gateway-{index + 1}",
        command=lambda: _django(installation, "controlplane.serve_gateway", arguments, environment, sockets),
        is_ready=lambda _pid: answers_ok(where.gateway_urls()[index], "/health"),
        # Streams in flight may finish: the gateway's own grace period and a little more.
        stop_deadline_s=read_gateway_grace_s() + 5.0,
    )


def worker_spec(installation: Installation) -> PartSpec:
    ready_file = installation.place.run / "worker.ready"
    arguments = ["--ready-file", str(ready_file)]
    return PartSpec(
        name="worker",
        command=lambda: _django(installation, "controlplane.serve_worker", arguments, installation.pageless_environment()),
        is_ready=lambda pid: names_process(ready_file, pid),
        # Its id may come again after a reboot, and this file with it.
        before_start=lambda: ready_file.unlink(missing_ok=True),
        stop_deadline_s=15.0,
    )


def node_spec(installation: Installation, credentials: Credentials) -> PartSpec:
    """Return the local node with the model that ships with the repository. What it knows outlives restarts."""
    where, place = installation.addresses, installation.place
    arguments = ["-m", "runner", "--engine", "llamacpp", "--name", "local", "--gateway", ",".join(where.gateway_urls())]
    # Named outright: with a folder of models beside it, the runner would begin with none.
    arguments += ["--model-path", str(TINY_MODEL), "--model-name", credentials.model]
    arguments += ["--threads", str(max(1, min(2, (os.cpu_count() or 1) - 1))), "--data", str(place.node)]
    drain_s = read_node_drain_s()
    environment = {
        **_ALLOCATOR,
        **node_environment(os.environ),
        **_log_format(),
        "MODEL_BASE_PATH": str(place.models),
        # The credential goes by variable: a command line is there for everybody to read.
        "MUSTER_TOKEN": credentials.local_node_token,
        "MUSTER_RUNNER_DRAIN_S": str(drain_s),
        RUN_ID_VARIABLE: installation.run_id,
        "PYTHONUNBUFFERED": "1",
    }
    return PartSpec(
        name="node",
        command=lambda: _python(arguments, environment),
        is_ready=lambda _pid: lists_model(where.gateway_url, api_key=credentials.api_key, model=credentials.model),
        stop_deadline_s=drain_s + 5.0,
    )


def _log_format() -> dict[str, str]:
    """Return the form of the logs of the parts: they are files, and whoever started the launcher at a terminal reads them."""
    said = read_choice("MUSTER_LOG_FORMAT", dict.fromkeys(LOG_FORMATS, ""))
    return {"MUSTER_LOG_FORMAT": said if said != "auto" else "console" if sys.stderr.isatty() else "json"}


def node_environment(shell: Mapping[str, str]) -> dict[str, str]:
    def is_for_it(name: str) -> bool:
        return name in FOR_THE_NODE or not (name in _OF_A_WORKER or name.startswith(_NOT_FOR_THE_NODE))

    return {name: value for name, value in shell.items() if is_for_it(name)}


def read_node_drain_s() -> float:
    """Return how long the local node finishes what runs when it is stopped. Raises SettingError."""
    return read_float("MUSTER_RUNNER_DRAIN_S", 10.0, minimum=0.05)


def read_gateway_grace_s() -> float:
    """Return how long a gateway finishes what runs when it is stopped. Raises SettingError."""
    return read_float("MUSTER_SHUTDOWN_GRACE_S", 30.0)


def check_settings() -> None:
    """Read the settings as a part of the server will. Raises SettingError with everything that is wrong."""
    importlib.import_module(_SETTINGS)
    del sys.modules[_SETTINGS]  # of the shell alone: ``load_server`` reads them in the environment of the installation


def load_server() -> None:
    """Load what the server's processes have in common: settings, models and pages, and with them the libraries of all."""
    importlib.import_module("django").setup()  # nothing of it is installed when this module is loaded
    importlib.import_module("controlplane.asgi")  # most of it the gateway loads too


def bootstrap_command(installation: Installation) -> Command:
    """Return the command that migrates the database and makes the credentials."""
    arguments = ["bootstrap", "--credentials", str(credentials_path(installation.place.data))]
    return _django(installation, "controlplane.manage", arguments, installation.pageless_environment())


def _django(
    installation: Installation,
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    sockets: tuple[int, ...] = (),
) -> Command:
    """Return how to run a module of the server: in a fork, unless it needs other settings than this process has loaded."""
    command = _python(["-m", module, *arguments], environment, sockets)
    loaded = [{**variables, "MUSTER_ADMIN_PAGES": ""} for variables in (environment, installation.environment())]
    is_alike = loaded[0] == loaded[1]  # pages that nobody opens cost a fork nothing
    return replace(command, program=(module, *arguments)) if installation.is_preloaded and is_alike else command


def _python(arguments: list[str], environment: dict[str, str], sockets: tuple[int, ...] = ()) -> Command:
    return Command(argv=[sys.executable, *arguments], env=environment, cwd=ROOT, sockets=sockets)


def _bracket(host: str) -> str:
    """Return a host as URLs and ``Host`` headers write it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def fetch(url: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes] | None:
    """Return status and body of a plain GET, or None when nobody gives an HTTP answer within a second or two."""
    parts = urlsplit(url)
    # By hand: ``http.client`` would keep TLS and mail parsing in the supervisor's memory for good.
    lines = [f"GET {path} HTTP/1.0", f"Host: {parts.netloc}", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    try:
        with socket.create_connection((parts.hostname, parts.port), timeout=limits().launcher.ready_answer_s) as connection:
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
            answer = b""
            while len(answer) < limits().launcher.ready_answer_bytes and (piece := connection.recv(65536)):
                answer += piece
    except OSError:
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        return None
    return int(words[1]), body


def answers_ok(url: str, path: str) -> bool:
    answer = fetch(url, path)
    return answer is not None and answer[0] == 200


def lists_model(url: str, *, api_key: str, model: str) -> bool:
    answer = fetch(url, "/v1/models", {"Authorization": f"Bearer {api_key}"})
    if answer is None or answer[0] != 200:
        return False
    try:
        entries = json.loads(answer[1])["data"]
        return any(entry.get("id") == model for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def names_process(path: Path, pid: int) -> bool:
    """Return whether process ``pid`` wrote its id into ``path``; what an earlier process left there does not count."""
    try:
        return path.read_text(encoding="ascii", errors="replace").strip() == str(pid)
    except OSError:
        return False


def describe_unreachable(url: str, *, default_port: int) -> str:
    """Return why nothing answers at the server that ``url`` names, or an empty text when something does.

    Understands ``scheme://host:port``, ``unix:///path`` and ``postgresql://…?host=/directory``.
    """
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    host = query.get("host") or parts.hostname or ""
    try:
        port = int(query.get("port") or parts.port or default_port)
    except ValueError:
        return "its port is not a number"
    try:
        if parts.scheme == "unix" or host.startswith("/"):
            path = parts.path if parts.scheme == "unix" else f"{host}/.s.PGSQL.{port}"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(limits().launcher.ready_answer_s)
                probe.connect(path)
        else:
            socket.create_connection((host or "127.0.0.1", port), timeout=5.0).close()
    except OSError as error:
        return f"nothing answers at {host or parts.path or '127.0.0.1'} port {port} ({error.strerror or error})"
    return ""
