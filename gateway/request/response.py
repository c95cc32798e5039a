"""Headers of an answer: those of the box that may reach a client, and ours. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from gateway.values import Header

_DROPPED = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
    "content-length", "server", "date", "set-cookie", "location", "alt-svc", "strict-transport-security", "x-request-id",
    "request-id", "x-accel-buffering", "x-queue-wait-ms",
})  # fmt: skip
_OF_THE_BODY = frozenset({"content-type", "content-encoding", "content-md5", "content-digest", "digest", "etag"})
_DROPPED_FAMILIES = ("access-control-", "x-ratelimit-", "anthropic-ratelimit-", "x-muster-")
"""``x-muster-`` is ours, between gateways too: a box must not be able to say there that it was never asked."""
_SAFE_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*\Z")
_SAFE_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+\Z")
_JSON_TYPE = re.compile(r"application/([a-z0-9.-]+\+)?json(; ?charset=utf-8)?\Z", re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}\Z")


def render_head(headers: Mapping[str, str], *, queue_ms: int, is_event_stream: bool, content_type: str = "") -> list[Header]:
    """Return a box's headers without what belongs to its connection, or could split the response.

    ``queue_ms``: the wait at this gateway, which is added to that on the box. ``content_type`` replaces what
    the engine said of its body when that is not sent.
    """
    head = [
        (passed, value.encode("latin-1", "replace"))
        for name, value in headers.items()
        if (passed := _pass_name(name)) and _SAFE_VALUE.match(value) and not (content_type and name in _OF_THE_BODY)
    ]
    if content_type:
        head.append((b"content-type", content_type.encode()))
    on_box = headers.get("x-queue-wait-ms", "")
    waited_ms = queue_ms + (int(on_box) if _WHOLE_NUMBER.match(on_box) else 0)
    head.append((b"x-queue-wait-ms", b"%d" % waited_ms))
    if is_event_stream:
        head.append((b"x-accel-buffering", b"no"))
        if "cache-control" not in headers:
            head.append((b"cache-control", b"no-cache"))
    return head


def name_error_type(headers: Mapping[str, str]) -> str:
    """Return the content type of an engine's error that goes out in its own words: its own when that is a kind of JSON.

    Source: RFC 6839 section 3.1, RFC 9457 section 3.
    """
    said = headers.get("content-type", "")
    return said if _JSON_TYPE.match(said) else "application/json"


@lru_cache(maxsize=512)
def _pass_name(name: str) -> bytes:
    """Return the name of a header that may reach a client as it goes out; nothing for every other one."""
    is_dropped = name in _DROPPED or name.startswith(_DROPPED_FAMILIES) or not _SAFE_NAME.match(name)
    return b"" if is_dropped else name.encode("ascii")


def id_headers(request_id: str, *, is_anthropic: bool) -> list[Header]:
    """Return the headers that name a request, under the names clients of the surface look for."""
    headers = [(b"x-request-id", request_id.encode())]
    if is_anthropic:
        headers.append((b"request-id", request_id.encode()))
    return headers


def read_name(headers: Mapping[str, str], name: str, *, max_chars: int) -> str:
    """Return a name that another gateway put into a header, as UTF-8 (``nodes.links.http``); nothing when it sent none."""
    return headers.get(name, "").encode("latin-1").decode("utf-8", "replace")[:max_chars]


def name_box(node: str, model: str) -> list[Header]:
    """Return the headers that say which box answers and which model."""
    return [name_header(b"x-muster-node", node), name_header(b"x-muster-model", model)]


@lru_cache(maxsize=512)
def name_header(name: bytes, value: str) -> Header:
    """Return a header whose value is a name somebody chose; what does not fit into a header becomes a question mark."""
    text = value[:200]
    if not (text.isascii() and text.isprintable()):
        text = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
    return name, text.encode()
