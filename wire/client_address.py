"""Client addresses behind proxies: which hop of ``X-Forwarded-For`` is the client. Pure.

Each proxy appends the address it was called from, so the list is as true as its last writers: it is read from the right, and
the first hop that is no trusted proxy is the client. Everything left of it is the client's own word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any

from wire.limits import WIRE

Address = IPv4Address | IPv6Address

_FORWARDED_FOR = b"x-forwarded-for"
_FORWARDED_PROTO = b"x-forwarded-proto"
_HOP_RE = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}|([0-9A-Fa-f:.]+)")


class TrustedProxies:
    """The proxies whose forwarding headers are believed; false when there are none.

    ``is_tls``: whether they also say, in ``X-Forwarded-Proto``, that their client spoke TLS.
    """

    def __init__(self, networks: Sequence[IPv4Network | IPv6Network], *, is_tls: bool = False) -> None:
        self._networks = tuple(networks)
        self._is_tls = is_tls
        self._judge = lru_cache(maxsize=WIRE.forwarded_judged)(self._judge_hop)

    def __bool__(self) -> bool:
        return bool(self._networks)

    def correct_scope(self, scope: dict[str, Any]) -> None:  # Any: an ASGI scope
        """Put the client's own address, and the scheme it used, into the ASGI scope of a request that a trusted proxy sent.

        A scope from anybody else stays as it is. The client's port is not known then: 0.
        """
        client = scope.get("client")
        if not client or not self._judge(str(client[0]))[1]:
            return
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        hops = b",".join(value for name, value in headers if name == _FORWARDED_FOR)
        if hops:
            scope["client"] = (self._find_client(str(client[0]), hops.decode("latin-1")), 0)
        if self._is_tls:
            schemes = b",".join(value for name, value in headers if name == _FORWARDED_PROTO)
            if schemes.rpartition(b",")[2].strip().lower() == b"https":
                scope["scheme"] = "wss" if scope["type"] == "websocket" else "https"

    def _find_client(self, peer: str, hops: str) -> str:
        """Return the last hop that no trusted proxy is, or, where the list ends or stops making sense, the last good one."""
        found = peer
        for hop in reversed(hops.rsplit(",", WIRE.forwarded_hops)):
            address, is_trusted = self._judge(hop)
            if not address:
                break
            found = address
            if not is_trusted:
                break
        return found

    def _judge_hop(self, text: str) -> tuple[str, bool]:
        """Return the address of a hop as it is usually written, empty for what is none, and whether it is a trusted proxy."""
        address = _read_address(text.strip())
        if address is None:
            return "", False
        return str(address), any(address in network for network in self._networks)


def _read_address(text: str) -> Address | None:
    """Return the address of ``10.0.0.1``, ``10.0.0.1:443``, ``::1``, ``[::1]`` or ``[::1]:443``; None for anything else."""
    written = _HOP_RE.fullmatch(text)
    try:
        address = ip_address(next(filter(None, written.groups()))) if written else None
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
