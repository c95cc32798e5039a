"""The inference surfaces: hand the client to the pipeline, and keep a bug of ours from losing the answer."""

from __future__ import annotations

import logging

from gateway.client import Receive, Scope, Send
from gateway.dialects import Surface
from gateway.errors import ClientLeft, GatewayError, MethodNotAllowed
from gateway.refusing import Application
from gateway.runtime import GatewayRuntime
from gateway.views.base import make_client, send_failure

logger = logging.getLogger("muster.gateway")


def make_inference(runtime: GatewayRuntime, surface: Surface) -> Application:
    """Return the application of one inference surface."""
    pipeline = runtime.pipeline

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        client = make_client(runtime, scope, receive, send)
        if scope["method"] != "POST":
            send_failure(client, MethodNotAllowed("Use POST."), surface, [(b"allow", b"POST")])
            return
        try:
            await pipeline.serve(client, surface)
            await client.drain()
        except ClientLeft:
            return
        except Exception:  # process edge: a bug of ours must not lose the answer
            logger.exception("request.bug")
            if not client.started and not client.is_gone:
                send_failure(client, GatewayError(), surface)
            else:
                client.abort()

    return application
