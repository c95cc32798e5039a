"""The inference surfaces: hand the client to the pipeline, and keep a bug of ours from losing the answer."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from typing import Any

from channels.consumer import AsyncConsumer

from gateway.dialects import Surface
from gateway.errors import ClientLeft, GatewayError, MethodNotAllowed
from gateway.request.client import ClientConnection, Receive, Scope, Send
from gateway.runtime import GatewayRuntime
from gateway.values import HeaderView
from gateway.views.base import make_client, send_failure

logger = logging.getLogger("muster.gateway")


async def _ask_nobody(*_event: object) -> Any:  # Any: it stands for two shapes
    """Stand for the server's ``receive`` and ``send`` where it needs neither."""
    raise NotImplementedError


class InferenceConsumer(AsyncConsumer):  # type: ignore[misc]  # channels ships no types
    """A request to an inference surface, as Channels consumes it: one event, read and answered by its client.

    No channel layer has a part in it, and no thread is asked to look after Django's connections: it uses none.
    """

    def __init__(self, inference: Inference) -> None:
        self._inference = inference

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a scope."""
        self.scope, self.receive, self.base_send = scope, receive, send
        await self.dispatch({"type": "http.request"})

    async def dispatch(self, message: dict[str, object]) -> None:
        """Call the handler of an event."""
        await self.http_request(message)

    async def http_request(self, _message: dict[str, object]) -> None:
        """Answer the request; its client reads the body, once it is known who asks."""
        await self._inference.serve_scope(self.scope, self.receive, self.base_send)


class Inference:
    """One inference surface, for requests that come by Channels and for those that the server has whole."""

    def __init__(self, runtime: GatewayRuntime, surface: Surface) -> None:
        self._runtime = runtime
        self.surface = surface

    async def serve_scope(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request by its ASGI scope, whatever its method."""
        client = make_client(self._runtime, scope, receive, send)
        if scope["method"] != "POST":
            send_failure(client, MethodNotAllowed("Use POST."), self.surface, [(b"allow", b"POST")])
            return
        await self.serve(client, self._runtime.pipeline.serve(client, self.surface))

    def serve_known(self, scope: Scope, headers: HeaderView, body: bytes) -> Coroutine[Any, Any, None]:
        """Serve a request whose body is there already. Its scope carries our server's handle and line."""
        client = self.make_client(scope, headers, body)
        return self.serve(client, self._runtime.pipeline.serve(client, self.surface))

    def make_client(self, scope: Scope, headers: HeaderView, body: bytes) -> ClientConnection:
        """Return the client of a request whose body is there already."""
        return make_client(self._runtime, scope, _ask_nobody, _ask_nobody, headers=headers, body=body)

    async def serve(self, client: ClientConnection, answering: Coroutine[Any, Any, None]) -> None:
        """Have a request answered, whatever happens to it on the way."""
        try:
            await answering
            await client.drain()
        except ClientLeft:
            return
        except Exception:  # process edge: a bug of ours must not lose the answer
            logger.exception("request.bug")
            if not client.started and not client.is_gone:
                send_failure(client, GatewayError(), self.surface)
            else:
                client.abort()
