"""An HTTP client that talks ASGI in memory: it sends a body, takes the answer as fast as a test says, and may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from core.limits import GatewayLimits
from gateway.request.client import SCOPE_HANDLE, ClientConnection
from tests.fakes.waiting import turns


class Handle:
    """The server's side of ``ConnectionHandle``: remembers what was asked of the connection."""

    def __init__(self, client: MemoryClient) -> None:
        self._client = client
        self.lost: Callable[[], None] | None = None
        self.closes = False
        self.aborted = False

    def set_lost_callback(self, callback: Callable[[], None] | None) -> None:
        self.lost = callback

    def close_after_response(self) -> None:
        self.closes = True

    def abort(self) -> None:
        self.aborted = True

    def respond(self, status: int, headers: Any, body: bytes) -> None:  # a sequence of pairs of bytes
        self._client.take({"type": "http.response.start", "status": status, "headers": list(headers)})
        self._client.take({"type": "http.response.body", "body": body, "more_body": False})


class MemoryClient:
    """One request. ``events`` is what the server was told to send, in order."""

    def __init__(
        self, *, body: list[bytes] | None = None, headers: dict[str, str] | None = None, limits: GatewayLimits | None = None,
        with_handle: bool = True, path: str = "/v1/chat/completions", method: str = "POST",
    ) -> None:  # fmt: skip
        self.events: list[dict[str, Any]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.changed = asyncio.Event()
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        parts = body if body is not None else [b"{}"]
        for index, part in enumerate(parts):
            self.incoming.put_nowait({"type": "http.request", "body": part, "more_body": index < len(parts) - 1})
        self.handle = Handle(self)
        self.scope: dict[str, Any] = {
            "type": "http", "method": method, "path": path, "query_string": b"",
            "headers": [(k.encode("latin-1"), v.encode("latin-1")) for k, v in (headers or {}).items()],
            "extensions": {SCOPE_HANDLE: self.handle} if with_handle else {},
        }  # fmt: skip
        self.connection = ClientConnection(self.scope, self.incoming.get, self.send, limits=limits or GatewayLimits())

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
