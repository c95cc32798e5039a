"""A gateway that does exactly what a test says: the server's end of muster v1 on a real WebSocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, TypeVar, cast

import aiohttp
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from tests.fakes.waiting import DEADLINE_S, takes
from wire import bridge, clock, frames
from wire.limits import WIRE

TOKEN = "msw_scripted"

M = TypeVar("M", bound=bridge.Message)


@dataclass
class Answer:
    """A whole response as it reached the gateway."""

    status: int
    headers: dict[str, str]
    pieces: list[bytes]
    end: frames.End

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def json(self) -> dict[str, object]:
        parsed: dict[str, object] = json.loads(self.body)
        return parsed


class OpenStream:
    """The gateway's end of one stream."""

    def __init__(self, box: ConnectedBox, number: int) -> None:
        self.box = box
        self.number = number
        self.frames: asyncio.Queue[frames.Frame] = asyncio.Queue()

    def take(self, frame: frames.Frame) -> None:
        """Queue a frame; a whole answer counts as the three frames that it stands for."""
        if frame.kind != frames.REPLY:
            self.frames.put_nowait(frame)
            return
        head, body, end = frames.decode_reply(frame.payload)
        parts = ((frames.HEAD, frames.encode_json(head)), (frames.DATA, body), (frames.END, frames.encode_json(end)))
        for kind, payload in parts:
            self.frames.put_nowait(frame._replace(kind=kind, payload=payload))

    async def next(self) -> frames.Frame:
        return await asyncio.wait_for(self.frames.get(), DEADLINE_S)

    async def expect_end(self) -> frames.End:
        while (frame := await self.next()).kind != frames.END:
            pass
        return frames.decode_end(frame.payload)

    async def finish(self) -> Answer:
        """Read head, data and end, granting credit for every byte; fails on any other order."""
        first = await self.next()
        assert first.kind == frames.HEAD, frames.decode_end(first.payload)
        head = frames.decode_head(first.payload)
        pieces: list[bytes] = []
        while (frame := await self.next()).kind == frames.DATA:
            pieces.append(frame.payload)
            with contextlib.suppress(ConnectionClosed):  # the node may have sent all and left
                await self.credit(len(frame.payload))
        assert frame.kind == frames.END
        return Answer(head.status, head.headers, pieces, frames.decode_end(frame.payload))

    async def credit(self, amount: int) -> None:
        await self.box.socket.send(frames.encode_credit(self.number, 1, amount))

    async def cancel(self, reason: str = "client_disconnect") -> None:
        await self.box.socket.send(frames.encode_frame(frames.CANCEL, self.number, 1, reason.encode()))


@dataclass
class ConnectedBox:
    """One session of one node."""

    socket: ServerConnection
    register: bridge.Register
    secret: str
    path: str
    messages: list[bridge.WorkerMessage] = field(default_factory=list)
    streams: dict[int, OpenStream] = field(default_factory=dict)
    news: asyncio.Condition = field(default_factory=asyncio.Condition)
    is_over: bool = False

    async def open(
        self, body: dict[str, object] | bytes, *, path: str = "/v1/chat/completions",
        window_bytes: int = WIRE.stream_window_bytes, headers: dict[str, str] | None = None, model: str = "", tenant: str = "",
    ) -> OpenStream:  # fmt: skip
        """Send OPEN (and BODY frames) of a new stream, for the first model of the node unless another is named."""
        number = len(self.streams) + 1
        stream = self.streams[number] = OpenStream(self, number)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        meta = frames.OpenMeta(
            request_id=f"req_{number}", model=model or next(iter(self.models()), "muster-tiny"), tenant=tenant, path=path,
            headers=headers or {"content-type": "application/json"}, is_streaming=b'"stream": true' in raw,
            deadline_ms=60_000, window_bytes=window_bytes,
        )  # fmt: skip
        for frame in frames.encode_open(number, 1, meta, raw):
            await self.socket.send(frame)
        return stream

    def models(self) -> list[str]:
        updates = [message for message in self.messages if isinstance(message, bridge.ModelsUpdate)]
        return updates[-1].models if updates else self.register.models

    async def send(self, message: bridge.Message) -> None:
        await self.socket.send(bridge.encode_message(message))

    async def expect(self, kind: type[M], *, skip: int = 0) -> M:
        """Wait for a message of ``kind``, the first one after ``skip`` of them."""

        def found() -> M | None:
            wanted = [message for message in self.messages if isinstance(message, kind)]
            return wanted[skip] if len(wanted) > skip else None

        async with asyncio.timeout(DEADLINE_S), self.news:
            await self.news.wait_for(lambda: found() is not None or self.is_over)
        message = found()
        assert message is not None, f"the session ended without {kind.__name__}"
        return message

    async def declares(self, *models: str) -> None:
        async with asyncio.timeout(DEADLINE_S), self.news:
            await self.news.wait_for(lambda: self.models() == list(models))

    async def expect_loss(self) -> None:
        async with asyncio.timeout(DEADLINE_S), self.news:
            await self.news.wait_for(lambda: self.is_over)

    async def serve(self) -> None:
        """Sort what the node sends until it leaves."""
        try:
            async for data in self.socket:
                async with self.news:
                    if isinstance(data, bytes):
                        frame = frames.decode_frame(data)
                        self.streams[frame.stream].take(frame)
                    else:
                        self.messages.append(bridge.decode_worker_message(data))
                    self.news.notify_all()
        except ConnectionClosed:
            pass
        finally:
            async with self.news:
                self.is_over = True
                self.news.notify_all()


class ScriptedGateway:
    """Accepts nodes on a loopback port. ``refusal`` turns the next handshakes away with that HTTP status."""

    def __init__(self) -> None:
        self.arrivals: asyncio.Queue[ConnectedBox] = asyncio.Queue()
        self.refusal: HTTPStatus | None = None
        self.close_code: int | None = None
        self.close_reason = "worker authentication failed"
        self.pings = True
        self.attempts = 0
        self.more_gateways: list[str] = []
        self.url = ""

    async def accept(self) -> ConnectedBox:
        return await asyncio.wait_for(self.arrivals.get(), DEADLINE_S)

    def _screen(self, _connection: ServerConnection, _request: Request) -> Response | None:
        self.attempts += 1
        return _connection.respond(self.refusal, "no\n") if self.refusal is not None else None

    async def _welcome(self, socket: ServerConnection) -> None:
        # Before it is turned away too: a node that writes to a connection that is gone does not read why it was closed.
        first = bridge.decode_worker_message(await socket.recv())
        if self.close_code is not None:
            await socket.close(self.close_code, self.close_reason)
            return
        assert isinstance(first, bridge.Register)
        request = socket.request
        assert request is not None
        box = ConnectedBox(socket, first, request.headers.get("x-worker-secret", ""), request.path)
        ack = bridge.RegisterAck(
            worker_id="w1", models=first.models, protocol_version=bridge.MUSTER_V1, node_id="node_1", heartbeat_interval_s=0.2,
            window_bytes=WIRE.stream_window_bytes, gateways=self.more_gateways,
        )  # fmt: skip
        await box.send(ack)
        self.arrivals.put_nowait(box)
        pinger = asyncio.create_task(self._ping(socket))
        try:
            await box.serve()
        finally:
            pinger.cancel()

    async def _ping(self, socket: ServerConnection) -> None:
        while self.pings:
            try:
                await socket.send(bridge.encode_message(bridge.Ping(timestamp_unix_ms=1)))
            except ConnectionClosed:
                return
            await takes(0.2)


@asynccontextmanager
async def run_gateway(port: int = 0) -> AsyncIterator[ScriptedGateway]:
    gateway = ScriptedGateway()
    server: Server
    async with serve(
        gateway._welcome,
        "127.0.0.1",
        port,
        process_request=gateway._screen,
        compression=None,
        ping_interval=None,
        max_size=64 * 1024 * 1024,
        close_timeout=0.2,
    ) as server:
        gateway.url = f"http://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}"
        yield gateway


PING_EVERY_S = 5.0


@dataclass
class GatewayStream:
    """One request that the gateway sent. ``ends``: how often it was told its end; ``is_let_go``: nobody waits for one."""

    number: int
    model: str
    opened_at: float
    heads: int = 0
    ends: list[frames.End] = field(default_factory=list)
    is_let_go: bool = False


class _Socket:
    """What a runner uses of its ``GatewaySocket``."""

    def __init__(self, gateway: MemoryGateway) -> None:
        self._gateway = gateway
        self.to_runner: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()

    async def receive(self) -> aiohttp.WSMessage:
        return await self.to_runner.get()

    has_room = True

    async def watch_room(self) -> None:
        await asyncio.get_running_loop().create_future()

    async def wait_sent(self) -> None:
        pass

    def post(self, frame: str | bytes) -> None:
        if self._gateway.socket is not self:
            return
        if isinstance(frame, str):
            self._gateway.take_message(bridge.decode_worker_message(frame))
        else:
            self._gateway.take_frame(frames.decode_frame(frame))

    async def close(self, *, code: int) -> None:
        del code
        if self._gateway.socket is self:
            self._gateway.hang_up()


class MemoryGateway:
    """Holds at most one session. ``replicas`` and ``models`` are what the runner has told last, at ``told_at``."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.socket: _Socket | None = None
        self.since = 0.0
        self.models: list[str] = []
        self.replicas: list[bridge.ReplicaInfo] = []
        self.told_at = 0.0
        self.mode = ""
        self.streams: list[GatewayStream] = []
        self.statuses: dict[str, list[bridge.OpStatus]] = {}

    @property
    def client(self) -> aiohttp.ClientSession:
        return cast("aiohttp.ClientSession", self)  # the runner dials gateways with it, and the fake engines need none

    async def ws_connect(self, _url: str, **_options: Any) -> _Socket:  # Any: as aiohttp has it
        self.hang_up()
        self.socket = _Socket(self)
        return self.socket

    def hang_up(self) -> None:
        socket, self.socket = self.socket, None
        if socket is not None:
            socket.to_runner.put_nowait(aiohttp.WSMessage(aiohttp.WSMsgType.CLOSED, None, None))
        for stream in self.streams:
            stream.is_let_go = True

    def post(self, message: bridge.Message) -> None:
        self._put(aiohttp.WSMsgType.TEXT, bridge.encode_message(message))

    def open(self, model: str, *, tenant: str, deadline_s: float, window_bytes: int) -> None:
        number = len(self.streams) + 1
        self.streams.append(GatewayStream(number, model, clock.monotonic()))
        meta = frames.OpenMeta(
            request_id=f"req_{number}", model=model, tenant=tenant, path="/v1/chat/completions", is_streaming=True,
            headers={"content-type": "application/json"}, deadline_ms=round(deadline_s * 1000), window_bytes=window_bytes,
        )  # fmt: skip
        body = b'{"model":"%b","stream":true,"messages":[{"role":"user","content":"hello"}]}' % model.encode()
        for frame in frames.encode_open(number, 1, meta, body):
            self._put(aiohttp.WSMsgType.BINARY, frame)

    def cancel(self, stream: GatewayStream) -> None:
        stream.is_let_go = True
        self._put(aiohttp.WSMsgType.BINARY, frames.encode_frame(frames.CANCEL, stream.number, 1, b"client_disconnect"))

    def credit(self, stream: GatewayStream, amount: int) -> None:
        self._put(aiohttp.WSMsgType.BINARY, frames.encode_credit(stream.number, 1, amount))

    def take_message(self, message: bridge.WorkerMessage) -> None:
        match message:
            case bridge.Register():
                self.since = clock.monotonic()
                self._note(message.replicas, message.models)
                self.post(bridge.RegisterAck(worker_id="w1", models=message.models, protocol_version=bridge.MUSTER_V1))
                self._ping(self.socket)
            case bridge.ModelsUpdate():
                self.models = message.models
            case bridge.Telemetry():
                self._note(message.replicas, self.models)
            case bridge.ModeChange():
                self.mode = message.mode
            case bridge.OpStatus():
                self.statuses.setdefault(message.op_id, []).append(message)
            case _:
                pass

    def take_frame(self, frame: frames.Frame) -> None:
        stream = self.streams[frame.stream - 1]
        if frame.kind == frames.END:
            stream.ends.append(frames.decode_end(frame.payload))
        elif frame.kind == frames.REPLY:
            stream.ends.append(frames.decode_reply(frame.payload)[2])
        elif frame.kind == frames.HEAD:
            stream.heads += 1

    def _note(self, replicas: list[bridge.ReplicaInfo], models: list[str]) -> None:
        self.replicas, self.models, self.told_at = replicas, models, clock.monotonic()

    def _ping(self, socket: _Socket | None) -> None:
        if socket is not None and socket is self.socket:
            self.post(bridge.Ping(timestamp_unix_ms=1))
            self._loop.call_later(PING_EVERY_S, self._ping, socket)

    def _put(self, kind: aiohttp.WSMsgType, data: str | bytes) -> None:
        if self.socket is not None:
            self.socket.to_runner.put_nowait(aiohttp.WSMessage(kind, data, None))
