"""Heads of HTTP requests that no server of ours takes, though the parsers do. Pure.

A request is smuggled past a proxy by a head that two programs read differently: what has two readings gets none (RFC 9110,
section 5.3; RFC 9112, section 3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wire.limits import WIRE

_ONCE = (b"host", b"authorization", b"x-api-key")
_VERSIONS = frozenset({"1.0", "1.1"})


@dataclass(frozen=True, slots=True)
class HeadFault:
    """What is wrong with a head. ``message``: a sentence for the client that says what would do."""

    status: int
    phrase: str
    message: str


TOO_LARGE = HeadFault(
    431,
    "Request Header Fields Too Large",
    f"The request headers have more than {WIRE.request_head_bytes} bytes. Send fewer or shorter ones.",
)


def find_head_fault(version: str, headers: Sequence[tuple[bytes, bytes]], *, is_upgrade: bool) -> HeadFault | None:
    """Return what is wrong with a head; None = nothing.

    ``version``: such as 1.1; ``headers``: names in small letters; ``is_upgrade``: whether the parser ends the message here.
    """
    if version not in _VERSIONS:
        return HeadFault(505, "HTTP Version Not Supported", f"HTTP/{version} is not spoken here. Send an HTTP/1.1 request.")
    by_name = dict(headers)
    if b"host" not in by_name and version == "1.1":
        return HeadFault(400, "Bad Request", "The request has no Host header. Send one, as HTTP/1.1 asks for.")
    if is_upgrade and (by_name.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in by_name):
        # The parser ends the message at the head, so the body would be taken for the next request.
        message = "A request with a body cannot ask for another protocol. Send it as HTTP/1.1, without the Upgrade header."
        return HeadFault(400, "Bad Request", message)
    if len(by_name) == len(headers):
        return None
    names = [name for name, _ in headers]
    for name in _ONCE:
        if names.count(name) > 1:
            message = f"The request has the header '{name.decode()}' more than once. Send it once."
            return HeadFault(400, "Bad Request", message)
    return None


def find_size_fault(target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> HeadFault | None:
    """Return ``TOO_LARGE`` when a request target and headers, without blanks that mean nothing, are over the bound."""
    size = len(target) + sum(len(name) + len(value) + 4 for name, value in headers)
    return TOO_LARGE if size > WIRE.request_head_bytes else None
