"""Which headers and paths pass between gateway and engine. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from multidict import CIMultiDictProxy

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "expect",
})  # fmt: skip
"""RFC 9110 section 7.6.1, and ``expect``, which only concerns the hop it was sent on."""

NOT_TO_ENGINE = HOP_BY_HOP | {
    "host", "content-length", "accept-encoding", "authorization", "cookie", "x-api-key", "x-worker-secret", "forwarded",
}  # fmt: skip
NOT_TO_GATEWAY = HOP_BY_HOP | {
    "set-cookie", "set-cookie2", "server", "date", "alt-svc", "strict-transport-security", "www-authenticate", "via",
}  # fmt: skip
_PATH = re.compile(r"/v1(?:/[A-Za-z0-9_.:@~-]+)+/?(?:\?[\x21-\x7e]*)?\Z")
METHODS = frozenset({"GET", "POST"})


def is_allowed_path(path: str) -> bool:
    """Return whether an engine may be asked for ``path``: below ``/v1/``, no dot segments, no escapes, no fragment."""
    if not _PATH.match(path) or "#" in path:
        return False
    segments = path.partition("?")[0].split("/")
    return "." not in segments and ".." not in segments


def headers_to_engine(given: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """Return the request headers for the engine: what the gateway sent, less what must not travel, plus our own."""
    kept = {name: value for name, value in given.items() if name.lower() not in NOT_TO_ENGINE}
    return {**kept, "Accept-Encoding": "identity", **own}


def headers_to_gateway(given: CIMultiDictProxy[str], *, is_event_stream: bool) -> dict[str, str]:
    """Return the response headers for the gateway, lower-case, repeated ones joined by a comma.

    An event stream loses its ``content-length``: a chunk may be taken out of it.
    """
    kept: dict[str, str] = {}
    for name, value in given.items():
        lower = name.lower()
        if lower in NOT_TO_GATEWAY or lower.startswith("access-control-"):
            continue
        if lower == "content-length" and is_event_stream:
            continue
        kept[lower] = f"{kept[lower]}, {value}" if lower in kept else value
    return kept
