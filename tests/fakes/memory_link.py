"""The line between a gateway and a node, in memory: a WebSocket at each end, and a test that may spoil what lies between.

Frames of muster v1 travel as they are, text as ``str`` and the rest as ``bytes``. Each direction keeps their order, as TCP
does; what a test can change is whether and when they arrive, and so the order between directions and between links.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NoReturn

import aiohttp

from nodes.links.relay import SCOPE_FRAMES
from runner.errors import SessionLost
from runner.limits import limits
from tests.fakes.waiting import takes

BUFFER_BYTES = 256 * 1024
"""What the two ends hold of one direction before whoever sends has to wait."""

Frame = str | bytes


class Way(StrEnum):
    """A direction of a link."""

    UP = "up"
    """From the node to the gateway."""
    DOWN = "down"


class Lost(ConnectionResetError):
    """The connection broke."""


class Line:
    """One direction. ``take`` gets what arrives: a frame, or the (code, reason) of a close as the last."""

    def __init__(self, take: Callable[[Frame | tuple[int, str]], None]) -> None:
        self._take = take
        self._waiting: deque[Frame | tuple[int, str]] = deque()
        self.waiting_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._is_moving = False
        self.is_stalled = False
        self.is_cut = False
        self.delay_s = 0.0
        """How long each frame travels."""

    async def send(self, item: Frame | tuple[int, str]) -> None:
        """Hand over what is to arrive; wait while the buffers are full. Raises Lost."""
        if self.is_cut:
            raise Lost
        self.post(item)
        await self._room.wait()
        if self.is_cut:
            raise Lost

    @property
    def is_free(self) -> bool:
        """Whether whoever sends need not wait."""
        return self._room.is_set() and not self.is_cut

    def post(self, item: Frame | tuple[int, str]) -> None:
        if self.is_cut:
            return
        self._waiting.append(item)
        self.waiting_bytes += _size(item)
        if self.waiting_bytes > BUFFER_BYTES:
            self._room.clear()
        self._move()

    def stall(self) -> None:
        self.is_stalled = True

    def resume(self) -> None:
        self.is_stalled = False
        self._move()

    def cut(self, *, let_through: int = 0) -> None:
        """Lose all but the first ``let_through`` of the frames that have not arrived; the next was under way in part."""
        if self.is_cut:
            return
        for _ in range(min(let_through, len(self._waiting))):
            self._take(self._waiting.popleft())
        self.is_cut = True
        self._waiting.clear()
        self._room.set()

    def _move(self) -> None:
        if self._is_moving or self.is_stalled or self.is_cut or not self._waiting:
            return
        self._is_moving = True
        asyncio.get_running_loop().call_later(self.delay_s, self._deliver)

    def _deliver(self) -> None:
        self._is_moving = False
        if self.is_stalled or self.is_cut or not self._waiting:
            return
        item = self._waiting.popleft()
        self.waiting_bytes -= _size(item)
        if self.waiting_bytes <= BUFFER_BYTES:
            self._room.set()
        self._take(item)
        self._move()


def _size(item: Frame | tuple[int, str]) -> int:
    return len(item) if isinstance(item, str | bytes) else 0


class GatewayEnd:
    """The gateway's end: what an ASGI server gives the application of a WebSocket, frames by callback included."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._receiver: Callable[[Frame], None] | None = None
        self._is_over = False
        self._events.put_nowait({"type": "websocket.connect"})
        self.receive = self._events.get

    def take_over(self, receiver: Callable[[Frame], None]) -> bool:
        """Have ``receiver`` called with each later frame (``nodes.links.relay.FrameSource``)."""
        if self._events.empty():
            self._receiver = receiver
        return self._receiver is not None

    def write_frame(self, frame: bytes) -> bool:
        """Send a frame at once, unless the line is full or gone."""
        is_free = not self._is_over and self._link.down.is_free
        if is_free:
            self._link.down.post(frame)
        return is_free

    def take(self, item: Frame | tuple[int, str]) -> None:
        if self._is_over:
            return
        if isinstance(item, tuple):
            self.lose(item[0])
            return
        if self._receiver is not None:
            self._receiver(item)
        else:
            self._events.put_nowait({"type": "websocket.receive", "text" if isinstance(item, str) else "bytes": item})

    def lose(self, code: int = 1006) -> None:
        if not self._is_over:
            self._is_over = True
            self._events.put_nowait({"type": "websocket.disconnect", "code": code})

    def close(self, code: int) -> None:
        """End the socket from the server's side, as it does when the application has returned or the server stops."""
        if not self._is_over:
            self._link.down.post((code, ""))
            self.lose(code)

    async def send(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "websocket.accept":
                self._link.accepted.set()
            case "websocket.send":
                if self._is_over:
                    raise Lost
                frame = event.get("bytes")
                await self._link.down.send(event["text"] if frame is None else frame)
            case "websocket.close":
                self._link.accepted.set()
                if not self._is_over:
                    await self._link.down.send((event["code"], event.get("reason") or ""))
                    self.lose(event["code"])


class NodeEnd:
    """The node's end: what aiohttp gives the runner, as far as the runner uses it."""

    def __init__(self, link: MemoryLink) -> None:
        self._link = link
        self._messages: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()
        self._wanting_room: list[Callable[[], None]] = []
        self._is_behind = asyncio.Event()
        self._is_over = False
        self.receive = self._messages.get

    def take(self, item: Frame | tuple[int, str]) -> None:
        if self._is_over:
            return
        if isinstance(item, tuple):
            self._is_over = True
            self._messages.put_nowait(aiohttp.WSMessage(aiohttp.WSMsgType.CLOSE, item[0], item[1]))
            return
        kind = aiohttp.WSMsgType.TEXT if isinstance(item, str) else aiohttp.WSMsgType.BINARY
        self._messages.put_nowait(aiohttp.WSMessage(kind, item, None))

    def lose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._messages.put_nowait(aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None))

    @property
    def waiting_bytes(self) -> int:
        return self._link.up.waiting_bytes

    @property
    def has_room(self) -> bool:
        return self.waiting_bytes <= limits().connection.outbox_bytes

    @property
    def _is_broken(self) -> bool:
        return self._is_over or self._link.up.is_cut

    def post(self, frame: Frame) -> None:
        """Send one message; what is posted to a connection that broke is dropped, and ``watch_room`` says so."""
        if not self._is_broken:
            self._link.up.post(frame)
        if self._is_broken or not self.has_room:
            self._is_behind.set()

    def when_room(self, go_on: Callable[[], None]) -> None:
        self._wanting_room.append(go_on)
        self._is_behind.set()

    async def watch_room(self) -> NoReturn:
        """Let streams go on once there is room; ends like the runner's own when the gateway does not read at all."""
        bounds = limits().connection
        while not self._is_broken:
            await self._is_behind.wait()
            self._is_behind.clear()
            while not self.has_room and not self._is_broken:
                if self.waiting_bytes > bounds.outbox_bytes_max:
                    raise SessionLost("the gateway does not read what is sent to it")
                await takes(bounds.outbox_look_s)
            wanting, self._wanting_room = self._wanting_room, []
            for go_on in wanting:
                go_on()
        raise SessionLost("the connection broke")

    async def wait_sent(self) -> None:
        while self.waiting_bytes and not self._is_broken:
            await takes(limits().connection.outbox_look_s)

    async def close(self, *, code: int = 1000) -> bool:
        """Close the socket in good order; behind a full line nothing waits longer than aiohttp does."""
        self._is_over = True
        if not self._link.up.is_cut:
            try:
                async with asyncio.timeout(1.0):
                    await self._link.up.send((code, ""))
            except (TimeoutError, Lost):
                self._link.up.cut()
        return True


class MemoryLink:
    """One WebSocket from a node to a gateway, from the dial on."""

    def __init__(self) -> None:
        self.gateway_end, self.node_end = GatewayEnd(self), NodeEnd(self)
        self.up, self.down = Line(self.gateway_end.take), Line(self.node_end.take)
        self.accepted = asyncio.Event()
        """Set once the gateway took or refused the upgrade."""

    def lines(self, way: Way | None) -> tuple[Line, ...]:
        return {Way.UP: (self.up,), Way.DOWN: (self.down,), None: (self.up, self.down)}[way]

    @property
    def is_clear(self) -> bool:
        return not any(line.is_stalled or line.is_cut or line.delay_s for line in (self.up, self.down))

    def stall(self, way: Way | None = None) -> None:
        """Deliver nothing from now on and keep it; None = both ways."""
        for line in self.lines(way):
            line.stall()

    def resume(self) -> None:
        for line in (self.up, self.down):
            line.resume()

    def delay(self, seconds: float, way: Way | None = None) -> None:
        for line in self.lines(way):
            line.delay_s = seconds

    def cut(self, *, untold: Way | None = None, let_through: int = 0) -> None:
        """Break the connection; of what is under way each direction still delivers ``let_through`` frames and a part of one.

        ``untold``: the direction in which not even the break arrives, so that the end there only finds silence.
        """
        for line in (self.up, self.down):
            line.cut(let_through=let_through)
        if untold is not Way.UP:
            self.gateway_end.lose()
        if untold is not Way.DOWN:
            self.node_end.lose()

    def make_scope(self, url: str, headers: dict[str, str]) -> dict[str, Any]:
        _, _, rest = url.partition("://")
        path, _, query = rest[rest.index("/") :].partition("?")
        return {
            "type": "websocket", "path": path, "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()], "client": ("127.0.0.1", 1),
            "subprotocols": [], "extensions": {SCOPE_FRAMES: self.gateway_end},
        }  # fmt: skip
