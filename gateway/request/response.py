"""Headers of an answer: those of the node that may reach a client, and ours. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import lru_cache

from channels.routing import URLRouter

from core.limits import limits
from gateway.dialects.surface import DEFAULT_SURFACE, Surface
from gateway.errors import GatewayError, OriginNotPermitted, RateLimited, RouteNotFound, ShuttingDown
from gateway.request.client import ClientConnection, Receive, Scope, Send
from gateway.values import Header, HeaderView, InferenceRequest
from nodes.errors import TooManySockets

Application = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""


def refuse(
    client: ClientConnection,
    surface: Surface,
    error: GatewayError,
    request_id: str,
    extra: list[Header],
    request: InferenceRequest | None = None,
) -> None:
    """Say the error, if anybody listens and nothing was said before; in the stream when signs of life went out in one."""
    if client.is_gone or client.finished:
        return
    if not client.started:
        send_error(client, surface, error, request_id, extra)
        return
    client.close_after_response()
    client.write(surface.render_first_error(error, request_id, request))
    client.finish()


def send_error(client: ClientConnection, surface: Surface, error: GatewayError, request_id: str, extra: list[Header]) -> None:
    headers = [*_list_headers(error), *extra]
    if isinstance(error, ShuttingDown):  # asked again on this connection, it would be this gateway once more
        client.close_after_response()
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    client.respond(error.status, headers, surface.render_error(error, request_id))


def _list_headers(error: GatewayError) -> list[Header]:
    headers: list[Header] = [(b"content-type", b"application/json")]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    return headers


class SlashRouter(URLRouter):  # type: ignore[misc]  # channels ships no types
    """Channels' router, for which ``//metrics`` is ``/metrics``, without that: the last route takes every path of two slashes.

    A proxy that keeps clients from a path compares the path as it was sent.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("//"):
            await self.routes[-1].callback(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def admit_programs(application: Application, origins: Collection[str]) -> Application:
    """Return a socket that no page of a browser opens but one of ``origins`` or of the very address that it asks.

    Programs send no ``Origin``, or that of the address (RFC 6455 section 10.2); a browser always says whose page asks.
    ``application`` raises TooManySockets instead of taking the upgrade.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        headers = HeaderView(scope["headers"])
        origin = headers.get("origin", "")
        if not origin or origin in origins or origin.partition("://")[2].lower() == headers.get("host", "").lower():
            try:
                await application(scope, receive, send)
            except TooManySockets as error:
                await refuse_socket(scope, receive, send, RateLimited(error.message, retry_after_s=error.retry_after_s))
        else:
            await refuse_socket(scope, receive, send, OriginNotPermitted())

    return serve


async def refuse_unknown_socket(scope: Scope, receive: Receive, send: Send) -> None:
    error = RouteNotFound("There is no WebSocket at this path. Nodes connect to /v1/worker/connect, agents to their session.")
    await refuse_socket(scope, receive, send, error)


async def refuse_socket(scope: Scope, receive: Receive, send: Send, error: GatewayError) -> None:
    """Answer an upgrade with an error instead of taking it."""
    await receive()  # the upgrade itself
    if "websocket.http.response" not in scope.get("extensions", {}):
        # A server without ASGI's extension can only turn the upgrade away (403).
        await send({"type": "websocket.close"})
        return
    head = _list_headers(error)
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": head})
    await send({"type": "websocket.http.response.body", "body": DEFAULT_SURFACE.render_error(error, "")})


EVERYBODY = "*"
ORIGIN_RE = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]-]+\Z")
"""Scheme, host and port as browsers send them: in small letters, without a path."""
_HEADER_NAMES_RE = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{0,1000}\Z")
_METHODS = b"GET, HEAD, POST, DELETE"


def admit_origin(headers: Mapping[str, str], origins: Collection[str]) -> tuple[Header, ...]:
    """Return the headers that let the page which asks read the answer; none for other clients and other pages.

    ``origins``: the ones that are let in; ``EVERYBODY`` among them stands for all.
    """
    if not origins:
        return ()
    if EVERYBODY in origins:
        return ((b"access-control-allow-origin", b"*"), (b"access-control-expose-headers", b"*"))
    origin = headers.get("origin", "")
    vary: Header = (b"vary", b"Origin")
    if origin not in origins:
        return (vary,)
    return ((b"access-control-allow-origin", origin.encode("latin-1")), (b"access-control-expose-headers", b"*"), vary)


def is_preflight(method: str, headers: Mapping[str, str]) -> bool:
    return method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers


def answer_preflight(client: ClientConnection) -> None:
    """Say which requests a page may send; without the headers of ``admit_origin``, which the client adds, it is a no."""
    asked = client.headers.get("access-control-request-headers", "")
    extra: list[Header] = [
        (b"access-control-allow-methods", _METHODS),
        (b"access-control-max-age", b"%d" % limits().gateway.preflight_age_s),
    ]
    if asked and _HEADER_NAMES_RE.match(asked):
        extra.append((b"access-control-allow-headers", asked.encode("ascii")))
    client.respond(204, extra, b"")


_DROPPED = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade",
    "content-length", "server", "date", "set-cookie", "location", "alt-svc", "strict-transport-security", "x-request-id",
    "request-id", "x-accel-buffering", "x-queue-wait-ms",
})  # fmt: skip
_OF_THE_BODY = frozenset({"content-type", "content-encoding", "content-md5", "content-digest", "digest", "etag"})
# ``x-muster-`` is ours, between gateways too: a node must not be able to say there that it was never asked.
_DROPPED_FAMILIES = ("access-control-", "x-ratelimit-", "anthropic-ratelimit-", "x-muster-")
_SAFE_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*\Z")
_SAFE_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+\Z")
_JSON_TYPE = re.compile(r"application/([a-z0-9.-]+\+)?json(; ?charset=utf-8)?\Z", re.IGNORECASE)
_WHOLE_NUMBER = re.compile(r"[0-9]{1,9}\Z")


def render_head(headers: Mapping[str, str], *, queue_ms: int, is_event_stream: bool, content_type: str = "") -> list[Header]:
    """Return a node's headers without what belongs to its connection, or could split the response.

    ``queue_ms``: the wait at this gateway, which is added to that on the node. ``content_type`` replaces what
    the engine said of its body when that is not sent.
    """
    head = [
        (passed, value.encode("latin-1", "replace"))
        for name, value in headers.items()
        if (passed := _pass_name(name)) and _SAFE_VALUE.match(value) and not (content_type and name in _OF_THE_BODY)
    ]
    if content_type:
        head.append((b"content-type", content_type.encode()))
    on_node = headers.get("x-queue-wait-ms", "")
    waited_ms = queue_ms + (int(on_node) if _WHOLE_NUMBER.match(on_node) else 0)
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


def name_node(node: str, model: str) -> list[Header]:
    return [name_header(b"x-muster-node", node), name_header(b"x-muster-model", model)]


@lru_cache(maxsize=512)
def name_header(name: bytes, value: str) -> Header:
    """Return a header whose value is a name somebody chose; what does not fit into a header becomes a question mark."""
    text = value[:200]
    if not (text.isascii() and text.isprintable()):
        text = "".join(letter if " " <= letter <= "~" else "?" for letter in text)
    return name, text.encode()
