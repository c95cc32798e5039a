"""Whether a TCP port is free, and who has it when it is not."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

from controlplane.launcher.errors import LauncherError
from controlplane.launcher.processes import read_command_line

_LISTEN = "0A"


def claim_port(host: str, port: int, *, option: str) -> int:
    """Return ``port`` when it can be listened on, or a free one when it is 0.

    Raises LauncherError when ``host`` is not ours, and when the port is busy: then with the holder, where that can be read.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise LauncherError(f"--host {host}: {error.strerror}. Use an address of this machine, e.g. 127.0.0.1") from None
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise LauncherError(_explain(error, host, port, option)) from None
        return int(probe.getsockname()[1])


def _explain(error: OSError, host: str, port: int, option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        holder = describe_holder(port)
        by = f" by {holder}" if holder else ""
        return f"port {port} on {host} is in use{by}. Stop that program or choose another port with {option}"
    if error.errno == errno.EACCES:
        return f"port {port} needs more rights than this user has. Choose one above 1023 with {option}"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine"
    return f"cannot listen on {host} port {port}: {error.strerror}"


def describe_holder(port: int) -> str:
    """Return ``process 123 (command line)`` for whoever listens on ``port``, or an empty text when that is not readable."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and _holds_socket(Path("/proc", entry, "fd"), inodes):
            command = read_command_line(int(entry))
            return f"process {entry} ({command[:80]})" if command else f"process {entry}"
    return ""


def _listening_inodes(port: int) -> set[str]:
    wanted = f"{port:04X}"
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and fields[1].rpartition(":")[2] == wanted:
                found.add(f"socket:[{fields[9]}]")
    return found


def _holds_socket(directory: Path, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(directory / name) in inodes for name in os.listdir(directory))
    except OSError:
        return False
