"""The ASGI application of the control plane: Django over HTTP, operators' live pages over WebSocket.

The data plane is not here: clients and GPU boxes talk to ``controlplane.serve_gateway``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

from asgiref.sync import ThreadSensitiveContext
from django.core.asgi import get_asgi_application

# Fills the app registry, so it stands before every import that touches a model.
_http_application = get_asgi_application()

from channels.auth import AuthMiddlewareStack
from channels.routing import ProtocolTypeRouter
from channels.security.websocket import AllowedHostsOriginValidator
from django.db import Error as DatabaseFailure
from django.urls import path, re_path

from controlplane.live import TRY_AGAIN_LATER, BoxConsumer, OperationConsumer, OverviewConsumer
from gateway.refusing import SlashRouter, refuse_unknown_socket

Scope = dict[str, Any]  # Any: the ASGI specification leaves the values open
AsgiApplication = Callable[[Scope, Callable[..., Any], Callable[..., Any]], Awaitable[None]]

logger = logging.getLogger(__name__)


def isolate_threads(application: AsgiApplication) -> AsgiApplication:
    """Return ``application`` with a thread of its own for each connection that runs synchronous code.

    Without it one slow query in one consumer stalls every other socket of the process (django/channels#2132).
    """

    async def isolated(scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        async with ThreadSensitiveContext():
            await application(scope, receive, send)

    return isolated


def turn_away_without_database(application: AsgiApplication) -> AsgiApplication:
    """Return ``application``, a socket's, that says "later" while the database cannot tell who asks.

    Accepted first: a browser learns no reason for a refused handshake.
    """

    async def guarded(scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        try:
            await application(scope, receive, send)
        except DatabaseFailure as error:
            logger.warning("socket_turned_away path=%s reason=%s", scope["path"], type(error).__name__)
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": TRY_AGAIN_LATER})

    return guarded


def for_operators(consumer: AsgiApplication) -> Any:  # Any: Django's types expect views in a route
    """Return a page's socket behind everything that says who may open it."""
    return isolate_threads(AllowedHostsOriginValidator(turn_away_without_database(AuthMiddlewareStack(consumer))))


# The path is looked at first: one that does not exist is 404 for everybody.
application = ProtocolTypeRouter(
    {
        "http": _http_application,
        "websocket": SlashRouter(
            [
                path("ws/overview", for_operators(OverviewConsumer.as_asgi())),
                path("ws/nodes/<uuid:node_id>", for_operators(BoxConsumer.as_asgi())),
                path("ws/operations/<uuid:operation_id>", for_operators(OperationConsumer.as_asgi())),
                re_path("(?s:.*)", cast("Any", refuse_unknown_socket)),  # as in for_operators
            ]
        ),
    }
)
