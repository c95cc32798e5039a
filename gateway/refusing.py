"""Saying to a client, in its dialect, why it gets no answer."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Collection

from channels.routing import URLRouter

from gateway.dialects import Surface
from gateway.dialects.surface import DEFAULT_SURFACE
from gateway.errors import GatewayError, OriginNotPermitted, RateLimited, RouteNotFound
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
    """Send an error as a whole response in the surface's dialect."""
    headers = [*_list_headers(error), *extra]
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
        """Serve a scope."""
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
                await _refuse_socket(scope, receive, send, RateLimited(error.message, retry_after_s=error.retry_after_s))
        else:
            await _refuse_socket(scope, receive, send, OriginNotPermitted())

    return serve


async def refuse_unknown_socket(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer an upgrade on a path that has no socket with 404, as an ASGI application."""
    error = RouteNotFound("There is no WebSocket at this path. Nodes connect to /v1/worker/connect of a gateway.")
    await _refuse_socket(scope, receive, send, error)


async def _refuse_socket(scope: Scope, receive: Receive, send: Send, error: GatewayError) -> None:
    """Answer an upgrade with an error. A server without ASGI's extension for it can only turn the upgrade away (403)."""
    await receive()  # the upgrade itself
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    head = _list_headers(error)
    await send({"type": "websocket.http.response.start", "status": error.status, "headers": head})
    await send({"type": "websocket.http.response.body", "body": DEFAULT_SURFACE.render_error(error, "")})
