"""A gateway in memory, as a runner sees it: dialled through its HTTP client, it takes registrations and opens streams."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp

from wire import bridge, clock, frames

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
    """What a runner uses of an ``aiohttp.ClientWebSocketResponse``."""

    def __init__(self, gateway: MemoryGateway) -> None:
        self._gateway = gateway
        self.to_runner: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue()

    async def receive(self) -> aiohttp.WSMessage:
        return await self.to_runner.get()

    async def send_str(self, text: str) -> None:
        self._check()
        self._gateway.take_message(bridge.decode_worker_message(text))

    async def send_bytes(self, data: bytes) -> None:
        self._check()
        self._gateway.take_frame(frames.decode_frame(data))

    async def close(self, *, code: int) -> None:
        del code
        if self._gateway.socket is self:
            self._gateway.hang_up()

    def _check(self) -> None:
        if self._gateway.socket is not self:
            raise aiohttp.ClientConnectionResetError("the connection is closed")


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
