"""A muster v1 box that does exactly what a test tells it to; it speaks through ``wire``, which both sides share."""

from __future__ import annotations

import asyncio
import socket
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.fakes.scripted_worker import dial_options
from tests.fakes.waiting import DEADLINE_S
from wire import bridge, frames


@dataclass
class Stream:
    """One request as the box got it: identity, meta, body so far, and what happened to it."""

    id: int
    attempt: int
    meta: frames.OpenMeta
    body: bytearray
    whole: bool
    window: int
    cancelled: str | None = None


@dataclass
class ScriptedBox:
    """A connected box. ``messages`` holds the JSON frames of the server, ``streams`` what it opened, in order."""

    socket: ClientConnection
    ack: bridge.RegisterAck | None = None
    load: int = 0
    messages: list[bridge.ServerMessage] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)
    close_code: int | None = None
    close_reason: str = ""
    _taken: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def dial(
        cls,
        url: str,
        *,
        secret: str,
        name: str,
        models: Sequence[str],
        max_concurrent: int = 1,
        instance_id: str | None = None,
        endpoints: Sequence[str] = ("/v1/chat/completions",),
        replicas: Sequence[bridge.ReplicaInfo] | None = None,
        governance: bridge.BoxGovernance | None = None,
    ) -> ScriptedBox:
        """Connect, register and wait for the acknowledgement. ``replicas`` None: each model is loaded."""
        target = f"{url}?{urlencode({'provider': 'local'})}"
        connection = await connect(target, additional_headers={"x-worker-secret": secret}, **dial_options())
        box = cls(connection)
        box._reading = asyncio.create_task(box._read())
        await box.send(
            bridge.Register(
                worker_name=name,
                models=list(models),
                max_concurrent=max_concurrent,
                protocol_version=bridge.MUSTER_V1,
                instance_id=instance_id or uuid.uuid4().hex,
                agent_version="scripted",
                endpoints=list(endpoints),
                gpus=[bridge.GpuInfo(index=0, name="Scripted GPU", memory_total_mb=24576, memory_used_mb=1024)],
                replicas=list(replicas)
                if replicas is not None
                else [bridge.ReplicaInfo(model=model, state="loaded", engine="scripted") for model in models],
                governance=governance,
            )
        )
        await box._wait(lambda: box.ack is not None, DEADLINE_S, "register_ack")
        return box

    async def _read(self) -> None:
        try:
            async for data in self.socket:
                async with self._changed:
                    if isinstance(data, bytes):
                        self._take_frame(frames.decode_frame(data))
                    else:
                        await self._take_message(bridge.decode_server_message(data))
                    self._changed.notify_all()
        except ConnectionClosed:
            pass
        finally:
            async with self._changed:
                self.close_code = self.socket.close_code
                self.close_reason = self.socket.close_reason or ""
                self._changed.notify_all()

    async def _take_message(self, message: bridge.ServerMessage) -> None:
        self.messages.append(message)
        if isinstance(message, bridge.RegisterAck):
            self.ack = message
        elif isinstance(message, bridge.Ping):
            await self.send(bridge.Pong(current_load=self.load))

    def _take_frame(self, frame: frames.Frame) -> None:
        whole = bool(frame.flags & frames.FLAG_FIN)
        if frame.kind == frames.OPEN:
            meta, body = frames.decode_open(frame.payload)
            self.streams.append(Stream(frame.stream, frame.attempt, meta, bytearray(body), whole, meta.window_bytes))
            return
        stream = next(s for s in reversed(self.streams) if s.id == frame.stream and s.attempt == frame.attempt)
        if frame.kind == frames.BODY:
            stream.body += frame.payload
            stream.whole = whole
        elif frame.kind == frames.CANCEL:
            stream.cancelled = frame.payload.decode()
        elif frame.kind == frames.CREDIT:
            stream.window += frames.decode_credit(frame.payload)
        else:
            raise AssertionError(f"the server sent a frame of kind {frame.kind}")

    async def _wait(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: condition() or self.close_code is not None)
        except TimeoutError:
            raise AssertionError(f"box: no {what} within {within_s:g} s") from None
        if not condition():
            raise AssertionError(f"box: closed {self.close_code} {self.close_reason!r} before {what}")

    async def stream(self, *, within_s: float = DEADLINE_S) -> Stream:
        await self._wait(lambda: len(self.streams) > self._taken, within_s, "OPEN")
        found = self.streams[self._taken]
        self._taken += 1
        await self._wait(lambda: found.whole, within_s, "whole body")
        return found

    async def cancelled(self, stream: Stream, *, within_s: float = DEADLINE_S) -> str:
        await self._wait(lambda: stream.cancelled is not None, within_s, "CANCEL")
        return stream.cancelled or ""

    async def credit(self, stream: Stream, at_least: int, *, within_s: float = DEADLINE_S) -> None:
        """Wait until the window is at least that many bytes wide."""
        await self._wait(lambda: stream.window >= at_least, within_s, f"window of {at_least} bytes")

    async def message(self, kind: type[bridge.Message], *, within_s: float = DEADLINE_S) -> bridge.Message:
        await self._wait(lambda: any(isinstance(m, kind) for m in self.messages), within_s, kind.__name__)
        return next(m for m in self.messages if isinstance(m, kind))

    async def closed(self, *, within_s: float = DEADLINE_S) -> tuple[int, str]:
        """Wait until the server has closed the socket; return code and reason."""
        await self._wait(lambda: self.close_code is not None, within_s, "close")
        return self.close_code or 0, self.close_reason

    async def send(self, message: bridge.Message) -> None:
        await self.socket.send(bridge.encode_message(message))

    async def send_frame(self, kind: int, stream: Stream, payload: bytes = b"", *, attempt: int | None = None) -> None:
        """Send one binary frame, with another attempt number when told so."""
        await self.socket.send(frames.encode_frame(kind, stream.id, stream.attempt if attempt is None else attempt, payload))

    async def head(
        self,
        stream: Stream,
        *,
        status: int = 200,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        head = frames.Head(status=status, headers={"content-type": content_type, **(headers or {})})
        await self.send_frame(frames.HEAD, stream, frames.encode_json(head))

    async def data(self, stream: Stream, payload: bytes) -> None:
        stream.window -= len(payload)
        await self.send_frame(frames.DATA, stream, payload)

    async def end(self, stream: Stream, end: frames.End | None = None) -> None:
        await self.send_frame(frames.END, stream, frames.encode_json(end or frames.End()))

    async def answer(self, stream: Stream, body: bytes, *, usage: tuple[int, int] | None = None) -> None:
        counts = None
        if usage is not None:
            counts = bridge.TokenCounts(prompt_tokens=usage[0], completion_tokens=usage[1], total_tokens=sum(usage))
        await self.head(stream)
        await self.data(stream, body)
        await self.end(stream, frames.End(usage=counts))

    def die(self) -> None:
        """Vanish as a killed process does: TCP reset, no close frame."""
        raw = self.socket.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.transport.abort()

    async def close(self) -> None:
        await self.socket.close()
        if self._reading is not None:
            await self._reading
