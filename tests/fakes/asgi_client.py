"""An HTTP client that talks ASGI in memory: it sends a body, takes the answer as fast as a test says, and may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from core.limits import GatewayLimits
from core.outbox import Outbox
from gateway.request.client import SCOPE_LINE, ClientConnection, Receive, Scope, Send
from gateway.values import Header
from tests.fakes.waiting import turns


class AsgiLine:
    """The line of a response (``gateway.request.client.Line``) that is said as ASGI events, and what was asked of it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.lost: Callable[[], None] | None = None
        self.closes = False
        self.aborted = False

    def begin(
        self, *, limit_bytes: int, timeout_s: float, on_stuck: Callable[[str], None], on_drained: Callable[[], None]
    ) -> None:
        self._outbox = Outbox(
            self._send, limit_bytes=limit_bytes, timeout_s=timeout_s, on_stuck=on_stuck, on_drained=on_drained
        )

    @property
    def is_blocked(self) -> bool:
        return self._outbox.is_blocked

    @property
    def is_dead(self) -> bool:
        return self._outbox.dead

    @property
    def waiting_bytes(self) -> int:
        return self._outbox.waiting_bytes

    def start(self, status: int, headers: Sequence[Header]) -> None:
        self._outbox.put({"type": "http.response.start", "status": status, "headers": list(headers)}, 0)

    def write(self, data: bytes) -> None:
        self._outbox.put({"type": "http.response.body", "body": data, "more_body": True}, len(data))

    def finish(self, data: bytes) -> None:
        self._outbox.put({"type": "http.response.body", "body": data, "more_body": False}, len(data))

    def stop(self) -> None:
        self._outbox.stop()

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        self.start(status, headers)
        self.finish(body)

    def set_lost_callback(self, callback: Callable[[], None] | None) -> None:
        self.lost = callback

    def close_after_response(self) -> None:
        self.closes = True

    def abort(self) -> None:
        self.aborted = True


def on_our_server(application: Callable[[Scope, Receive, Send], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """Return an application as our server runs it, for clients that speak ASGI themselves."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        await application({**scope, "extensions": {SCOPE_LINE: AsgiLine(send)}}, receive, send)

    return serve


class MemoryClient:
    """One request. ``events`` is what the server was told to send, in order."""

    def __init__(
        self, *, body: list[bytes] | None = None, headers: dict[str, str] | None = None, limits: GatewayLimits | None = None,
        path: str = "/v1/chat/completions", method: str = "POST",
    ) -> None:  # fmt: skip
        self.events: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.changed = asyncio.Event()
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        parts = body if body is not None else [b"{}"]
        for index, part in enumerate(parts):
            self.incoming.put_nowait({"type": "http.request", "body": part, "more_body": index < len(parts) - 1})
        self.handle = AsgiLine(self.send)
        self.scope: dict[str, Any] = {
            "type": "http", "method": method, "path": path, "query_string": b"",
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()],
            "extensions": {SCOPE_LINE: self.handle},
        }  # fmt: skip
        self.connection = ClientConnection(self.scope, self.incoming.get, limits=limits or GatewayLimits())

    async def send(self, event: dict[str, Any]) -> None:
        """ASGI send: waits while the client does not read."""
        await self.reading.wait()
        self.take(event)

    def take(self, event: dict[str, Any]) -> None:
        assert not self.is_whole, "nothing follows the end of a response"
        self.events.append(event)
        self.changed.set()

    def leave(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})
        if self.handle.lost is not None:
            self.handle.lost()

    async def wait(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition`` holds; it is looked at after every event and turn of the loop."""
        async with asyncio.timeout(30):
            while not condition():
                await turns()

    @property
    def status(self) -> int:
        return int(self.events[0]["status"]) if self.events else 0

    @property
    def headers(self) -> dict[str, str]:
        return {k.decode(): v.decode("latin-1") for k, v in self.events[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(event["body"] for event in self.events[1:])

    @property
    def is_whole(self) -> bool:
        return len(self.events) > 1 and not self.events[-1]["more_body"]
