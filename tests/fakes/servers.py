"""PostgreSQL and Valkey as ``./muster up`` starts them, for tests and benchmarks: in a temporary directory, gone afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from controlplane.launcher.console import LauncherError
from controlplane.launcher.postgres import Postgres
from controlplane.launcher.processes import spawn, wait_gone
from controlplane.launcher.valkey import Valkey
from wire import clock

START_S, STOP_S = 30.0, 15.0
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
        until = clock.monotonic() + START_S
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
        if not wait_gone(lambda: process.poll() is not None, STOP_S):
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
