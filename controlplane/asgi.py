"""The ASGI application of the control plane: Django over HTTP, operators' live pages over WebSocket.

The data plane is not here: clients and GPU nodes talk to ``controlplane.serve_gateway``.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from io import BytesIO
from typing import Any, cast
from urllib.parse import urlsplit

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from asgiref.sync import ThreadSensitiveContext
from django.core.asgi import get_asgi_application

# Fills the app registry, so it stands before every import that touches a model.
_http_application = get_asgi_application()

from channels.routing import ProtocolTypeRouter
from channels.sessions import CookieMiddleware
from django.conf import settings
from django.core.exceptions import DisallowedHost
from django.core.handlers.asgi import ASGIRequest
from django.urls import path, re_path

from controlplane.live import NodePageConsumer, OperationConsumer, OverviewConsumer, OverviewFeed
from gateway.request.response import SlashRouter, refuse_unknown_socket

_TLS_SCHEMES = frozenset({"https", "wss"})
Scope = dict[str, Any]  # Any: the ASGI specification leaves the values open
AsgiApplication = Callable[[Scope, Callable[..., Any], Callable[..., Any]], Awaitable[None]]


def isolate_threads(application: AsgiApplication) -> AsgiApplication:
    """Return ``application`` with a thread of its own for each connection that runs synchronous code.

    Without it one slow query in one consumer stalls every other socket of the process (django/channels#2132).
    """

    async def isolated(scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        async with ThreadSensitiveContext():
            await application(scope, receive, send)

    return isolated


def refuse_other_origins(application: AsgiApplication) -> AsgiApplication:
    """Return ``application``, a socket's, for pages of our own origins alone: browsers bring the cookie from all others too."""

    async def guarded(scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if is_own_origin(scope):
            await application(scope, receive, send)
        else:
            await send({"type": "websocket.close"})

    return guarded


def is_own_origin(scope: Scope) -> bool:
    """Return whether the handshake comes from the address it goes to, MUSTER_PUBLIC_URL or MUSTER_CSRF_TRUSTED_ORIGINS.

    Scheme, host and port have to be the same: a cookie goes to every port of a host. Without an Origin it is no browser's.
    """
    request = ASGIRequest({**scope, "method": "GET"}, BytesIO())
    public = urlsplit(settings.PUBLIC_URL)
    own = {f"{public.scheme}://{public.netloc}", *settings.CSRF_TRUSTED_ORIGINS}
    with suppress(DisallowedHost):
        own.add(f"{'https' if scope.get('scheme') in _TLS_SCHEMES else 'http'}://{request.get_host()}")
    return request.headers.get("Origin", "") in own


def for_operators(consumer: AsgiApplication) -> Any:  # Any: Django's types expect views in a route
    """Return a page's socket behind everything that says from where it may be opened; it says itself by whom."""
    return isolate_threads(refuse_other_origins(CookieMiddleware(consumer)))


# The path is looked at first: one that does not exist is 404 for everybody.
application = ProtocolTypeRouter(
    {
        "http": _http_application,
        "websocket": SlashRouter(
            [
                path("ws/overview", for_operators(OverviewConsumer.as_asgi(feed=OverviewFeed()))),
                path("ws/nodes/<uuid:node_id>", for_operators(NodePageConsumer.as_asgi())),
                path("ws/operations/<uuid:operation_id>", for_operators(OperationConsumer.as_asgi())),
                re_path("(?s:.*)", cast("Any", refuse_unknown_socket)),  # as in for_operators
            ]
        ),
    }
)
