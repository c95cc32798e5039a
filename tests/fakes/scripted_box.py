"""A muster v1 node that does exactly what a test tells it to; it speaks through ``wire``, which both sides share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any  # frames are JSON objects
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from tests.fakes.waiting import DEADLINE_S
from wire import bridge, frames


@dataclass
class Stream:
    """One request as the node got it: identity, meta, body so far, and what happened to it."""

    id: int
    attempt: int
    meta: frames.OpenMeta
    body: bytearray
    whole: bool
    window: int
    cancelled: str | None = None


@dataclass
class Dialled:
    """The worker's end of a socket that was dialled as a real worker does."""

    socket: ClientConnection
    close_code: int | None = None
    close_reason: str = ""
    _taken: int = 0
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _reading: asyncio.Task[None] | None = None

    async def _read(self) -> None:
        try:
            async for data in self.socket:
                await self._take(data)
                async with self._changed:
                    self._changed.notify_all()
        except ConnectionClosed:
            pass
        finally:
            async with self._changed:
                self.close_code = self.socket.close_code
                self.close_reason = self.socket.close_reason or ""
                self._changed.notify_all()

    async def _take(self, data: str | bytes) -> None:
        raise NotImplementedError

    async def _wait(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """Wait for ``condition``; a closed socket ends the wait early when it cannot come true any more."""
        try:
            async with asyncio.timeout(within_s), self._changed:
                await self._changed.wait_for(lambda: condition() or self.close_code is not None)
        except TimeoutError:
            raise AssertionError(f"no {what} within {within_s:g} s; got {self.kinds}") from None
        if not condition():
            raise AssertionError(f"closed {self.close_code} {self.close_reason!r} before {what}; got {self.kinds}")

    @property
    def kinds(self) -> list[str]:
        return []

    async def closed(self) -> tuple[int, str]:
        await self._wait(lambda: self.close_code is not None, DEADLINE_S, "close")
        return self.close_code or 0, self.close_reason

    def die(self) -> None:
        """Vanish as a killed process does: TCP reset, no close frame."""
        raw = self.socket.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.transport.abort()

    async def close(self) -> None:
        await self.socket.close()
        if self._reading is not None:
            await self._reading


@dataclass
class ScriptedBox(Dialled):
    """A connected node. ``messages`` holds the JSON frames of the server, ``streams`` what it opened, in order."""

    ack: bridge.RegisterAck | None = None
    load: int = 0
    messages: list[bridge.ServerMessage] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    @classmethod
    async def dial(
        cls, url: str, *, secret: str, name: str, models: Sequence[str], max_concurrent: int = 1,
        instance_id: str | None = None, endpoints: Sequence[str] = ("/v1/chat/completions",),
        replicas: Sequence[bridge.ReplicaInfo] | None = None, governance: bridge.NodeGovernance | None = None,
    ) -> ScriptedBox:  # fmt: skip
        """Connect, register and wait for the acknowledgement. ``replicas`` None: each model is loaded."""
        target = f"{url}?{urlencode({'provider': 'local'})}"
        connection = await connect(target, additional_headers={"x-worker-secret": secret}, **dial_options())
        box = cls(connection)
        box._reading = asyncio.create_task(box._read())
        loaded = [bridge.ReplicaInfo(model=model, state="loaded", engine="scripted") for model in models]
        await box.send(bridge.Register(
            worker_name=name, models=list(models), max_concurrent=max_concurrent, protocol_version=bridge.MUSTER_V1,
            instance_id=instance_id or uuid.uuid4().hex, agent_version="scripted", endpoints=list(endpoints),
            gpus=[bridge.GpuInfo(index=0, name="Scripted GPU", memory_total_mb=24576, memory_used_mb=1024)],
            replicas=loaded if replicas is None else list(replicas), governance=governance, tells_log=True,
        ))  # fmt: skip
        await box._wait(lambda: box.ack is not None, DEADLINE_S, "register_ack")
        return box

    async def _take(self, data: str | bytes) -> None:
        if isinstance(data, bytes):
            self._take_frame(frames.decode_frame(data))
        else:
            await self._take_message(bridge.decode_server_message(data))

    @property
    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.messages]

    async def _take_message(self, message: bridge.ServerMessage) -> None:
        self.messages.append(message)
        if isinstance(message, bridge.RegisterAck):
            self.ack = message
        elif isinstance(message, bridge.Ping):
            await self.send(bridge.Pong(current_load=self.load))
        elif isinstance(message, bridge.LogQuery):
            lines = [bridge.LogLine(at_ms=1_700_000_000_000, level="warning", text="scripted: <b>all is well</b>")]
            await self.send(bridge.LogTail(query_id=message.query_id, lines=lines))

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

    async def stream(self, *, within_s: float = DEADLINE_S) -> Stream:
        await self._wait(lambda: len(self.streams) > self._taken, within_s, "OPEN")
        found = self.streams[self._taken]
        self._taken += 1
        await self._wait(lambda: found.whole, within_s, "whole body")
        return found

    async def cancelled(self, stream: Stream) -> str:
        await self._wait(lambda: stream.cancelled is not None, DEADLINE_S, "CANCEL")
        return stream.cancelled or ""

    async def credit(self, stream: Stream, at_least: int) -> None:
        await self._wait(lambda: stream.window >= at_least, DEADLINE_S, f"window of {at_least} bytes")

    async def send(self, message: bridge.Message) -> None:
        await self.socket.send(bridge.encode_message(message))

    async def send_frame(self, kind: int, stream: Stream, payload: bytes = b"") -> None:
        await self.socket.send(frames.encode_frame(kind, stream.id, stream.attempt, payload))

    async def head(
        self, stream: Stream, *, status: int = 200, content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
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


PROTOCOL = "2026-04-bridge-v1"
SCRIPTED: dict[str, Any] = {"id": "chatcmpl-scripted", "created": 1775000000}
Frame = dict[str, Any]


@dataclass
class Job:
    """One ``request`` frame as the worker got it."""

    frame: Frame

    @property
    def id(self) -> str:
        return str(self.frame["request_id"])

    @property
    def body(self) -> Any:
        return json.loads(self.frame["body"])

    @property
    def text(self) -> str:
        """What the last message says; tests mark their requests with it."""
        return str(self.body["messages"][-1]["content"])


def dial_options() -> dict[str, Any]:
    """Return how a real worker dials: no Origin, no subprotocol, no compression, and pings only inside JSON."""
    wire: dict[str, Any] = {"compression": None, "ping_interval": None, "max_size": None, "user_agent_header": None}
    return {**wire, "proxy": None, "open_timeout": DEADLINE_S}


@dataclass
class ScriptedWorker(Dialled):
    """A connected worker. ``frames`` holds everything the server sent, in order."""

    models: list[str] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    @classmethod
    async def dial(
        cls, url: str, *, secret: str | None, provider: str | None = "local", local_host: str | None = None,
        headers: dict[str, str] | None = None, options: dict[str, Any] | None = None,
    ) -> ScriptedWorker:  # fmt: skip
        """Open the socket without registering. ``local_host`` picks the address that is seen; ``options`` go to the library."""
        shown = dict(headers or {})
        if secret is not None:
            shown["x-worker-secret"] = secret
        options = {**dial_options(), **(options or {})}
        if local_host is not None:
            options["local_addr"] = (local_host, 0)
        target = url + (f"?{urlencode({'provider': provider})}" if provider is not None else "")
        connection = await connect(target, additional_headers=shown, **options)
        worker = cls(connection)
        worker._reading = asyncio.create_task(worker._read())
        return worker

    async def register(self, models: Sequence[str], *, name: str = "worker", max_concurrent: int = 1) -> Frame:
        self.models = list(models)
        about = {"worker_name": name, "models": self.models, "max_concurrent": max_concurrent}
        await self.send({"type": "register", **about, "protocol_version": PROTOCOL, "current_load": 0})
        return await self.frame("register_ack")

    async def _take(self, data: str | bytes) -> None:
        frame = json.loads(data)
        if frame["type"] == "ping":
            await self.pong()
        self.frames.append(frame)
        if frame["type"] == "request":
            self.jobs.append(Job(frame))

    @property
    def kinds(self) -> list[str]:
        return [str(frame["type"]) for frame in self.frames]

    def of_kind(self, kind: str) -> list[Frame]:
        return [frame for frame in self.frames if frame["type"] == kind]

    def cancels(self, job: Job) -> list[Frame]:
        return [frame for frame in self.of_kind("cancel") if frame["request_id"] == job.id]

    async def frame(self, kind: str) -> Frame:
        await self._wait(lambda: bool(self.of_kind(kind)), DEADLINE_S, f"{kind} frame")
        return self.of_kind(kind)[0]

    async def job(self, *, within_s: float = DEADLINE_S) -> Job:
        await self._wait(lambda: len(self.jobs) > self._taken, within_s, "request")
        self._taken += 1
        return self.jobs[self._taken - 1]

    async def cancelled(self, job: Job) -> Frame:
        await self._wait(lambda: bool(self.cancels(job)), DEADLINE_S, f"cancel of {job.id}")
        return self.cancels(job)[0]

    async def send(self, frame: Frame) -> None:
        """Send one frame as compact JSON, ``type`` first."""
        await self.socket.send(json.dumps(frame, separators=(",", ":"), ensure_ascii=False))

    async def pong(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            await self.send({"type": "pong", "current_load": 0, "timestamp_unix_ms": 1775000000000})

    async def chunk(self, job: Job, text: str) -> None:
        await self.send({"type": "response_chunk", "request_id": job.id, "chunk": text})

    async def complete(
        self, job: Job, *, status: int = 200, body: str = "", headers: dict[str, str] | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        shown = {"content-type": "application/json"} if headers is None else headers
        frame: Frame = {
            "type": "response_complete", "request_id": job.id, "status_code": status, "headers": shown, "body": body,
        }  # fmt: skip
        if tokens is not None:
            counts = {"prompt_tokens": tokens[0], "completion_tokens": tokens[1], "total_tokens": sum(tokens)}
            frame["token_counts"] = counts
        await self.send(frame)

    async def answer(self, job: Job, text: str = "ok", *, tokens: tuple[int, int] | None = None) -> None:
        await self.complete(job, body=completion_text(job, text), tokens=tokens)

    async def stream(self, job: Job, pieces: Sequence[str], *, tokens: tuple[int, int] | None = None) -> None:
        for piece in pieces:
            await self.chunk(job, delta_text(job, piece))
        await self.chunk(job, "data: [DONE]\n\n")
        await self.complete(job, headers={"content-type": "text/event-stream"}, tokens=tokens)


def completion_text(job: Job, text: str) -> str:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return json.dumps({**SCRIPTED, "object": "chat.completion", "model": job.frame["model"], "choices": [choice]})


def delta_text(job: Job, piece: str) -> str:
    choice = {"index": 0, "delta": {"role": "assistant", "content": piece}, "finish_reason": None}
    content = {**SCRIPTED, "object": "chat.completion.chunk", "model": job.frame["model"], "choices": [choice]}
    return f"data: {json.dumps(content)}\n\n"
