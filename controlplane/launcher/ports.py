"""Addresses and TCP ports of this machine: which there are, whether a port is free, and who has it when it is not."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil

from controlplane.launcher.console import LauncherError
from controlplane.launcher.processes import read_command_line

_HOSTS_FILE = Path("/etc/hosts")


def list_addresses() -> list[str]:
    """Return the addresses under which other machines may reach this one, IPv4 first. Asks the kernel, never the network."""
    families = {socket.AF_INET, socket.AF_INET6}
    listed = [each.address for held in psutil.net_if_addrs().values() for each in held if each.family in families]
    found = map(ipaddress.ip_address, dict.fromkeys(listed))
    # Without link-local ones: IPv6's need a zone, which no browser takes in a URL.
    usable = [address for address in found if not (address.is_loopback or address.is_link_local)]
    return [str(address) for address in sorted(usable, key=lambda address: address.version)]


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

    Until ``held`` is closed nobody else gets it by chance (Linux). ``claims`` gets its socket there, for a child to listen on.
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
    # A socket that is bound and does not listen keeps the port from everyone but who names it and sets SO_REUSEADDR, as our
    # children do.
    held.callback(claim.close)
    if claims is not None:
        # A child that listens on this very socket leaves it listening for the next one when it dies.
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
    try:
        found = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:  # macOS tells it to root alone
        return ""
    pid = next((each.pid for each in found if each.laddr and each.laddr.port == port and each.pid is not None), None)
    if pid is None:
        return ""
    command = read_command_line(pid)
    return f"process {pid} ({command[:80]})" if command else f"process {pid}"
