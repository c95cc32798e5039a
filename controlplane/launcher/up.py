"""``./muster up``: from nothing to a served request, and then keep it so until told to stop."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from controlplane.env import SettingError, list_alias_notes, read_keyless, read_path, read_text
from controlplane.launcher import parts
from controlplane.launcher.console import LauncherError, StopRequested, complain, elapsed_s, progress, say
from controlplane.launcher.files import FileLock, LockHeld, read_json, read_or_create_secret, write_json
from controlplane.launcher.installation import (
    Credentials,
    Place,
    check_data,
    children_path,
    choose_place,
    credentials_path,
    describe_command,
    find_missing,
    installation_path,
    lock_path,
    prepare_data,
    remove_unused,
    require_credentials,
)
from controlplane.launcher.parts import RUN_ID_VARIABLE, describe_unreachable
from controlplane.launcher.ports import claim_port, list_addresses, list_names
from controlplane.launcher.postgres import Postgres
from controlplane.launcher.processes import (
    Child,
    find_by_variable,
    is_alive,
    preload,
    raise_file_limit,
    send,
    send_group,
    start,
    wait_gone,
)
from controlplane.launcher.supervisor import Supervisor, open_log, read_last_line, read_tail
from controlplane.launcher.valkey import Valkey
from core.limits import limits
from wire import COMMAND, clock

EXAMPLE_QUESTION = "Tell me a story."
"""The same as in README.md."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    data: Path
    host: str = "127.0.0.1"
    port: int = 8000
    gateway_port: int = 8080
    gateways: int = 1
    ready_file: Path | None = None
    with_node: bool = True
    tls_cert: Path | None = None
    tls_key: Path | None = None


def run_up(options: UpOptions) -> int:
    """Start everything, supervise it until Ctrl-C or SIGTERM, stop it in order. Returns the exit status.

    Raises LauncherError and SettingError; nothing is left running then either.
    """
    _check_settings(options)
    tls = _read_tls(options)
    made, is_empty = find_missing(options.data.absolute()), check_data(options.data)
    data = prepare_data(options.data)
    try:
        return _lock_and_run(options, data, tls)
    # A start that failed leaves no folder behind that was not there.
    except (LauncherError, SettingError):
        if is_empty:
            remove_unused(data, made)
        raise


def _lock_and_run(options: UpOptions, data: Path, tls: _Tls) -> int:
    lock = FileLock(lock_path(data))
    try:
        lock.acquire(within_s=0.3)
    except LockHeld as held:
        raise LauncherError(
            f"{data} is in use by another muster up (process {held.holder or '?'}). Stop it with {COMMAND} down --data {data}"
        ) from None
    except OSError as error:
        raise LauncherError(f"cannot write to {data}: {error.strerror}. Choose another directory with --data DIR") from None
    with lock:
        return _run_locked(options, data, tls)


def _check_settings(options: UpOptions) -> None:
    # Before anything starts: what every part will read, and then what the launcher does, so that all that is wrong is said.
    parts.check_settings()
    parts.read_gateway_grace_s()
    parts.read_node_drain_s()
    read_keyless(options.host)
    for line in list_alias_notes():
        say(line)


@dataclass(frozen=True, slots=True)
class _Tls:
    """The files of certificate and key, and the hosts that the certificate names."""

    files: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


def _read_tls(options: UpOptions) -> _Tls:
    """Return what the servers shall show, if they are to speak TLS. Raises LauncherError and SettingError."""
    certificate = options.tls_cert or read_path("MUSTER_TLS_CERT")
    key = options.tls_key or read_path("MUSTER_TLS_KEY") or certificate
    if not certificate:
        if key:
            raise LauncherError("--tls-key needs --tls-cert, the certificate of that key")
        return _Tls()
    from controlplane.tls import (
        CertificateError,
        Pair,
        explain_time,
        list_hosts,
    )  # it would stay in the memory of a launcher that needs none of it

    pair = Pair(Path(certificate).absolute(), Path(key).absolute())
    try:
        leaf = pair.check()
    except CertificateError as error:
        raise LauncherError(str(error)) from None
    if trouble := explain_time(leaf):
        complain(f"{trouble}. Going on with it; the servers take over a new one within a minute")
    return _Tls((str(pair.certificate), str(pair.key)), tuple(list_hosts(leaf)))


def _run_locked(options: UpOptions, data: Path, tls: _Tls) -> int:
    end_leftovers(children_path(data))
    raise_file_limit()
    with ExitStack() as held:
        addresses = _claim_addresses(options, held, tls)
        _check_ready_file(options.ready_file)
        place, note = choose_place(data)
        if note:
            say(note)
        session = _Session(options, place, addresses, tls)
        try:
            session.start()
            session.supervisor.run()
        except StopRequested:
            say("Stopping")
        finally:
            session.stop()
    say("Stopped")
    return 0


def _claim_addresses(options: UpOptions, held: ExitStack, tls: _Tls) -> parts.Addresses:
    """Return where we shall listen; the ports are ours until ``held`` is closed. Raises LauncherError when one is busy."""
    control_port = claim_port(options.host, options.port, option="--port", held=held)
    wanted = [options.gateway_port + index if options.gateway_port else 0 for index in range(options.gateways)]
    claims: list[socket.socket] = []
    gateway_ports = [claim_port(options.host, port, option="--gateway-port", held=held, claims=claims) for port in wanted]
    if len({control_port, *gateway_ports}) != 1 + len(gateway_ports):
        raise LauncherError(f"--port and --gateway-port are both {control_port}: choose two different ones")
    own = list_addresses()
    return parts.Addresses(
        host=options.host,
        control_port=control_port,
        gateway_ports=tuple(gateway_ports),
        gateway_sockets=tuple(claim.fileno() for claim in claims),
        own=tuple(own),
        names=tuple(list_names(own)),
        certified=tls.hosts,
        plain_ports=tuple(claim_port("127.0.0.1", 0, option="", held=held) for _ in (0, *wanted)) if tls.files else (),
    )


def _check_ready_file(path: Path | None) -> None:
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise LauncherError(f"cannot replace {path}: {error.strerror}. Choose another --ready-file") from None
    if not os.access(path.parent, os.W_OK):
        raise LauncherError(f"cannot write {path}: its directory is missing or closed. Choose another --ready-file")


@dataclass(slots=True)
class _Session:
    """One run: what was started, and what is published about it."""

    options: UpOptions
    place: Place
    addresses: parts.Addresses
    tls: _Tls = field(default_factory=_Tls)
    run_id: str = field(default_factory=lambda: os.urandom(16).hex())
    credentials: Credentials | None = None
    is_ready: bool = False
    supervisor: Supervisor = field(init=False)
    installation: parts.Installation = field(init=False)

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(self.place.logs, self.publish)

    def start(self) -> None:
        """Start every part and wait until all are ready. Raises LauncherError and StopRequested."""
        self.supervisor.listen_for_signals()
        database_url, redis_url = self._start_servers()
        self.installation = parts.Installation(
            place=self.place,
            addresses=self.addresses,
            database_url=database_url,
            redis_url=redis_url,
            secret_key=_read_secret("MUSTER_SECRET_KEY", self.place.data / "secret_key"),
            cluster_secret=_read_secret("MUSTER_CLUSTER_SECRET", self.place.data / "cluster_secret"),
            log_key=_read_secret("MUSTER_LOG_KEY", self.place.data / "log_key"),
            run_id=self.run_id,
            tls=self.tls.files,
        )
        is_first = not credentials_path(self.place.data).exists()
        if is_first:
            self._bootstrap()  # executed, so that what compiling the server leaves behind is not in the memory that is shared
        progress("Loading the server")
        is_preloaded = preload(self.installation.environment(), parts.load_server)
        self.installation = replace(self.installation, is_preloaded=is_preloaded)
        if not is_first:
            self._bootstrap()
        self.credentials = require_credentials(credentials_path(self.place.data))
        is_served = self._start_parts(self.credentials)
        self.is_ready = True
        self.publish()
        self._announce(self.credentials, is_first=is_first, is_served=is_served)

    def publish(self) -> None:
        """Write down what runs: for the next ``up``, for ``manage`` and ``down``, and for whoever reads the ready file."""
        # The identity tells a child from a later process of the same id.
        identities = {name: part.identity for name, part in self.supervisor.parts.items()}
        children = {name: {"pid": pid, "identity": identities[name]} for name, pid in self.supervisor.pids.items()}
        write_json(children_path(self.place.data), {"run_id": self.run_id, "children": children})
        if not self.is_ready or self.credentials is None:
            return
        description = describe_installation(self.installation, self.credentials, self.supervisor.pids)
        write_json(installation_path(self.place.data), {**description, "environment": self.installation.own_variables()})
        if self.options.ready_file is not None:
            try:
                write_json(self.options.ready_file, description)
            except OSError as error:
                complain(f"cannot write {self.options.ready_file}: {error.strerror}")

    def stop(self) -> None:
        """Stop everything that runs, in order, and take back what was published."""
        self.is_ready = False
        self.supervisor.stop(
            [tuple(name for name in self.supervisor.parts if _kind(name) in group) for group in parts.STOP_ORDER]
        )
        for path in (installation_path(self.place.data), children_path(self.place.data), self.options.ready_file):
            if path is not None:
                path.unlink(missing_ok=True)
        self.place.remove_socket_directory()

    def _start_servers(self) -> tuple[str, str]:
        """Start the embedded servers that no variable replaces; return DATABASE_URL and REDIS_URL."""
        urls = {"postgres": read_text("DATABASE_URL"), "valkey": read_text("REDIS_URL")}
        self.place.make_socket_directory()
        servers: dict[str, Postgres | Valkey] = {
            "postgres": Postgres(home=self.place.postgres, sockets=self.place.sockets / "postgres"),
            "valkey": Valkey(sockets=self.place.sockets),
        }
        own = []
        for name, server in servers.items():
            if urls[name]:
                variable, port = ("DATABASE_URL", 5432) if name == "postgres" else ("REDIS_URL", 6379)
                if trouble := describe_unreachable(urls[name], default_port=port):
                    raise LauncherError(
                        f"{variable} is set, but {trouble}. Start that server or unset {variable} to use an embedded one"
                    )
                progress(f"Using {variable} from the environment")
                continue
            progress(f"Starting {name}")
            server.prepare()
            urls[name] = server.url
            own.append(parts.embedded_spec(name, server))
        self.supervisor.start(own)
        self.supervisor.wait_ready([spec.name for spec in own], lambda name: progress(f"{name} is ready"))
        return urls["postgres"], urls["valkey"]

    def _bootstrap(self) -> None:
        """Migrate and make credentials, in one Django process. Raises LauncherError with its last lines."""
        progress("Preparing the database")
        log_path = self.place.logs / "bootstrap.log"
        with open_log(log_path) as log:
            before = log.tell() or log_path.stat().st_size
            process = start(parts.bootstrap_command(self.installation), log)
        try:
            status = self._await_bootstrap(process, log_path, before)
        finally:
            if process.poll() is None:
                send_group(process.pid, signal.SIGKILL)
                process.wait()
        lines = [line.strip() for line in read_tail(log_path, since=before).splitlines() if line.strip()]
        for line in lines:
            if line.startswith("warning: "):
                complain(line.removeprefix("warning: "))
        if status:
            raise LauncherError(
                f"preparing the database failed: {lines[-1] if lines else f'status {status}'} (all of it: {log_path})"
            )

    def _await_bootstrap(self, process: Child, log_path: Path, before: int) -> int:
        began = said_at = clock.monotonic()
        said = ""
        while (status := process.poll()) is None:
            self.supervisor.check()
            self.supervisor.sleep(0.05)
            now = clock.monotonic()
            if now - began > limits().launcher.bootstrap_s:
                raise LauncherError(
                    f"preparing the database takes more than {limits().launcher.bootstrap_s:.0f} s; see {log_path}"
                )
            if now - said_at > limits().launcher.bootstrap_said_s:
                last = read_last_line(log_path, since=before)
                if last != said and log_path.stat().st_size > before:
                    progress(f"  {last[:100]}")
                elif now - said_at > limits().launcher.bootstrap_said_again_s:
                    progress(f"Still preparing the database after {now - began:.0f} s. Last line: {last}")
                else:
                    continue
                said, said_at = last, now
        return status

    def _start_parts(self, credentials: Credentials) -> bool:
        """Start the parts and wait for them. Returns whether the local node serves its model."""
        gateways = parts.gateway_specs(self.installation)
        specs = [*gateways, parts.control_spec(self.installation), parts.worker_spec(self.installation)]
        progress(f"Starting {', '.join(spec.name for spec in specs)}")
        self.supervisor.start(specs)

        def say_ready(name: str) -> None:
            progress(f"{name} is ready")

        # The node comes once there is something to dial: a refused connection would make it wait before it tries again.
        self.supervisor.wait_ready([spec.name for spec in gateways], say_ready)
        if self.options.with_node:
            progress("Starting node")
            self.supervisor.start([parts.node_spec(self.installation, credentials)])
        self.supervisor.wait_ready([spec.name for spec in specs if spec not in gateways], say_ready)
        return self.options.with_node and self._await_node(credentials)

    def _await_node(self, credentials: Credentials) -> bool:
        try:
            self.supervisor.wait_ready(["node"], lambda name: progress(f"{name} serves {credentials.model}"))
        except LauncherError as error:
            # A fleet does not depend on this one node, nor on its model being on the allow-list.
            complain(f"the local node does not serve {credentials.model}: {error}. Going on without it")
            return False
        return True

    def _announce(self, credentials: Credentials, *, is_first: bool, is_served: bool) -> None:
        where = self.addresses
        # Said once, by the start that made it: what is printed may be kept by a log.
        secret = f" / {credentials.password}" if is_first else ""
        pages = list(dict.fromkeys([self._public_url, where.public_url, *where.outside_urls(where.control_port)]))
        gateways = where.client_urls(where.gateway_ports[0])
        for line in (
            "",
            f"Muster is ready after {elapsed_s():.1f} s. Ctrl-C stops it.",
            "",
            f"  Control plane  {pages[0]}/admin/{'start/' if is_first else ''}   login {credentials.username}{secret}",
            *(f"                 {url}/admin/" for url in pages[1:]),
            f"                 {self._name_limits()}",
            f"  Gateway        {gateways[0]}/v1",
            *(f"                 {url}/v1" for url in gateways[1:]),
            *([f"  Demo API key   {credentials.api_key}"] if is_first else []),
            *_describe_keyless(self.options.host),
            f"  Credentials    {credentials_path(self.place.data)}, shown by: {describe_command(self.place.data)}",
            f"  Logs           {self.place.logs}",
            "",
            *self._suggest(credentials, is_served=is_served),
            "",
        ):
            say(line)

    def _suggest(self, credentials: Credentials, *, is_served: bool) -> list[str]:
        """Return what to do next; a request for a model only when somebody serves it."""
        url = f"{self.addresses.gateway_url}/v1"
        key = f'  export MUSTER_API_KEY="$({describe_command(self.place.data)} api_key)"'
        authorization = '-H "Authorization: Bearer $MUSTER_API_KEY"'
        if not is_served:
            return [
                f"No node serves a model yet. Connect one: {COMMAND} node --help. Then see what is served:",
                key,
                f"  curl {url}/models {authorization}",
            ]
        question = f'[{{"role": "user", "content": "{EXAMPLE_QUESTION}"}}]'
        body = f'{{"model": "{credentials.model}", "stream": true, "messages": {question}}}'
        return [
            "Try it:",
            key,
            f"  curl -N {url}/chat/completions {authorization} -H 'Content-Type: application/json' -d '{body}'",
        ]

    @property
    def _public_url(self) -> str:
        return self.installation.own_variables()["MUSTER_PUBLIC_URL"].rstrip("/")

    def _name_limits(self) -> str:
        """Return what to say of passkeys at the addresses that people open."""
        where = self.addresses
        if self.tls.files:
            return f"Passkeys belong to {self._public_url}. This machine's own programs use {where.gateway_url} without TLS."
        if self._public_url != where.public_url:
            return f"Passkeys belong to {self._public_url} (MUSTER_PUBLIC_URL)."
        if not where.is_open_to_others:
            return "Use localhost, not 127.0.0.1: passkeys need a host name."
        if not where.is_on_loopback:
            return "Passkeys need HTTPS or localhost: use --tls-cert, or a TLS proxy with MUSTER_PUBLIC_URL, or --host 0.0.0.0."
        port = where.control_port
        tunnel = f"ssh -L {port}:localhost:{port} {socket.gethostname()}"
        return f"Passkeys need HTTPS or localhost: on another machine run `{tunnel}` and open the first address."


def _describe_keyless(host: str) -> list[str]:
    who = {"near": "programs on this machine need none", "admitted": "nobody needs one"}.get(read_keyless(host))
    return [] if who is None else [f"  Keys           {who}: requests without a key are those of the tenant keyless"]


def describe_installation(
    installation: parts.Installation, credentials: Credentials, pids: dict[str, int]
) -> dict[str, object]:
    return {
        "control_url": installation.addresses.control_url,
        "public_url": installation.own_variables()["MUSTER_PUBLIC_URL"],
        "gateway_url": installation.addresses.gateway_url,
        "admin": {"username": credentials.username, "password": credentials.password},
        **{name: getattr(credentials, name) for name in ("admin_token", "api_key", "model", "worker_secret", "node_token")},
        "database_url": installation.database_url,
        "redis_url": installation.redis_url,
        "pids": pids,
    }


def _read_secret(variable: str, path: Path) -> str:
    try:
        return read_text(variable) or read_or_create_secret(path)
    except OSError as error:
        raise LauncherError(f"cannot keep a secret in {path}: {error.strerror}") from None


def _kind(name: str) -> str:
    return name.partition("-")[0]


def end_leftovers(path: Path) -> None:
    """End the children of an earlier run that are still alive; a process that only shares an id with one is left alone.

    Raises LauncherError.
    """
    kept = read_json(path)
    children = kept.get("children")
    run_id = kept.get("run_id")
    if not isinstance(children, dict) or not isinstance(run_id, str):
        return
    recorded = [
        (int(child["pid"]), str(child["identity"]))
        for name, child in children.items()
        # ``Postgres.clear_leftovers`` knows all processes of that one.
        if name != "postgres" and isinstance(child, dict) and is_alive(int(child["pid"]), str(child["identity"]))
    ]

    def survivors() -> set[int]:
        return {pid for pid, identity in recorded if is_alive(pid, identity)} | set(find_by_variable(RUN_ID_VARIABLE, run_id))

    if not survivors():
        return
    say(f"Ending {len(survivors())} processes that an earlier run left behind")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid, identity in recorded:
            if is_alive(pid, identity):
                send_group(pid, number)
        for pid in find_by_variable(RUN_ID_VARIABLE, run_id):
            send(pid, number)
        if wait_gone(lambda: not survivors(), limits().launcher.leftover_s):
            return
    raise LauncherError(f"processes of an earlier run cannot be ended: {sorted(survivors())}. Stop them and try again")
