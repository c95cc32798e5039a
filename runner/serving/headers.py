"""Which response headers and paths pass between an engine and who asked. Pure."""

from __future__ import annotations

import re

from multidict import CIMultiDictProxy

from runner.engines.port import CHAT, COMPLETIONS, EMBEDDINGS, IMAGES, MESSAGES, RESPONSES, TRANSCRIPTIONS

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "expect",
})  # fmt: skip
"""RFC 9110 section 7.6.1, and ``expect``, which only concerns the hop it was sent on."""

NOT_TO_CLIENT = HOP_BY_HOP | {
    "set-cookie", "set-cookie2", "server", "date", "alt-svc", "strict-transport-security", "www-authenticate", "via",
}  # fmt: skip
INFERENCE_PATHS = (
    CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES, MESSAGES, IMAGES, TRANSCRIPTIONS, "/v1/audio/translations", "/v1/audio/speech",
    "/v1/images/edits", "/v1/moderations", "/v1/rerank", "/v1/score",
)  # fmt: skip
"""What a server that does not say which paths it answers is asked for by POST: none of them loads, unloads or flushes."""
_PATH = re.compile(r"/v1(?:/[A-Za-z0-9_.:@~-]+)+/?(?:\?[\x21-\x7e]*)?\Z")


def is_allowed_path(path: str) -> bool:
    """Return whether an engine may be asked for ``path``: below ``/v1/``, no dot segments, no escapes, no fragment."""
    if not _PATH.match(path) or "#" in path:
        return False
    segments = path.partition("?")[0].split("/")
    return "." not in segments and ".." not in segments


def headers_to_client(given: CIMultiDictProxy[str], *, is_event_stream: bool) -> dict[str, str]:
    """Return the response headers to pass on, lower-case, repeated ones joined by a comma.

    An event stream loses its ``content-length``: a chunk may be taken out of it.
    """
    kept: dict[str, str] = {}
    for name, value in given.items():
        lower = name.lower()
        if lower in NOT_TO_CLIENT or lower.startswith("access-control-"):
            continue
        if lower == "content-length" and is_event_stream:
            continue
        kept[lower] = f"{kept[lower]}, {value}" if lower in kept else value
    return kept
