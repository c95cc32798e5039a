"""Addresses and TCP ports of this machine: which there are, whether a port is free, and who has it when it is not."""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

from controlplane.launcher.console import LauncherError
from controlplane.launcher.processes import read_command_line

_LISTEN = "0A"
_HOSTS_FILE = Path("/etc/hosts")


class _Interface(ctypes.Structure):
    """The beginning of ``struct ifaddrs``, which Linux and macOS have in common."""


_Interface._fields_ = [  # assigned later: the type names itself
    ("next", ctypes.POINTER(_Interface)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(ctypes.c_ubyte)),
]


def list_addresses() -> list[str]:
    """Return the addresses under which other machines may reach this one, IPv4 first. Asks the kernel, never the network.

    Without link-local ones: IPv6's need a zone, which no browser takes in a URL.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_Interface)()
    if libc.getifaddrs(ctypes.byref(first)):
        return []
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    try:
        entry = first
        while bool(entry):  # false at the end of the list, a null pointer
            if bool(entry.contents.address) and (address := _read_address(entry.contents.address)):
                found.append(address)
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(first)
    usable = [address for address in dict.fromkeys(found) if not (address.is_loopback or address.is_link_local)]
    return [str(address) for address in sorted(usable, key=lambda address: address.version)]


def _read_address(raw: ctypes._Pointer[ctypes.c_ubyte]) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return what a ``struct sockaddr`` holds; None when it is neither IPv4 nor IPv6."""
    family = raw[1] if sys.platform == "darwin" else int.from_bytes(bytes(raw[:2]), sys.byteorder)
    if family == socket.AF_INET:
        return ipaddress.IPv4Address(bytes(raw[4:8]))
    return ipaddress.IPv6Address(bytes(raw[8:24])) if family == socket.AF_INET6 else None


def list_names(addresses: list[str]) -> list[str]:
    """Return the names of this machine that it knows without asking the network: its host name and those in /etc/hosts."""
    own = socket.gethostname()
    names = [own] if "." in own else [own, f"{own}.local"]
    try:
        lines = _HOSTS_FILE.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        address, *known_as = line.partition("#")[0].split() or [""]
        if address in addresses or (address.startswith("127.") and own in known_as):
            names += known_as
    return list(dict.fromkeys(name.lower() for name in names))


def claim_port(host: str, port: int, *, option: str, held: ExitStack, claims: list[socket.socket] | None = None) -> int:
    """Return ``port`` when it can be listened on, or a free one when it is 0.

    Until ``held`` is closed nobody else gets it by chance, while a child of ours may listen on it: on Linux a socket that is
    bound and does not listen keeps a port from everyone but who names it and sets SO_REUSEADDR, as servers do. There it is
    added to ``claims``: a child that is to listen on this very socket leaves it listening for the next one when it dies.

    Raises LauncherError when ``host`` is not ours, and when the port is busy: then with the holder, where that can be read.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise LauncherError(f"--host {host}: {error.strerror}. Use an address of this machine, e.g. 127.0.0.1") from None
    claim = socket.socket(family, socket.SOCK_STREAM)
    claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        claim.bind(address)
        number = int(claim.getsockname()[1])
    except OSError as error:
        claim.close()
        raise LauncherError(_explain(error, host, port, option)) from None
    if sys.platform != "linux" or not port:  # a port that the kernel chose would be lost with the first listener's shutdown
        with claim:
            return number if sys.platform != "linux" else claim_port(host, number, option=option, held=held, claims=claims)
    held.callback(claim.close)
    if claims is not None:
        claims.append(claim)
    return number


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
