"""Whether a request was made on this machine by whoever reads the answer, or was passed on by a proxy here."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

_PROXY_HEADERS = (
    "forwarded",
    "via",
    "x-forwarded-for",
    "x-forwarded-host",
    "x-forwarded-port",
    "x-forwarded-proto",
    "x-forwarded-server",
    "x-original-forwarded-for",
    "x-real-ip",
    "cf-connecting-ip",
    "true-client-ip",
)


def came_directly(scope: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Whether a request comes from a program on this machine and nothing says that it was passed on.

    A proxy says so in a header, or keeps the name that its caller asked for, or speaks HTTP/1.0, as nginx does to what stands
    behind it unless told otherwise. One that hides all of that cannot be seen. ``scope``: of ASGI; an absent client is a
    socket of this machine. Its client is the peer of the connection: only a forwarding header changes that, and with one
    nothing is direct. No name that is asked for opens anything; another one closes, also for a page whose own name was made
    to lead here.
    """
    client = scope.get("client")
    if client and not _is_loopback(str(client[0])):
        return False
    if scope.get("http_version") == "1.0" or any(name in headers for name in _PROXY_HEADERS):
        return False
    host = _read_host(headers.get("host", ""))
    return not host or host == "localhost" or _is_loopback(host)


def _is_loopback(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _read_host(value: str) -> str:
    """Return the name of a Host header without its port, in small letters; what cannot be read stays as it is."""
    try:
        return urlsplit(f"//{value}").hostname or value
    except ValueError:
        return value
