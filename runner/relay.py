"""Serving streams of a gateway: what the node answers, forwarded under credit, cancel and deadline."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field

from runner.errors import (
    EngineUnavailable,
    ModelQueueFull,
    QueueFull,
    QueueTimeout,
    RequestRefused,
    StreamClosed,
    TenantQueueFull,
    Unavailable,
    UnknownModel,
    WrongState,
    refusal_body,
)
from runner.limits import limits
from runner.serving.request import Answer, Inference, check_crowd, read_cache_mode, read_cache_tag, read_fields, read_priority
from runner.session import Outlet, Stream
from wire import clock
from wire.events import find_boundary
from wire.frames import End, Head, OpenMeta
from wire.limits import WIRE

log = logging.getLogger(__name__)

_ELSEWHERE = (
    EngineUnavailable, QueueFull, QueueTimeout, TenantQueueFull, ModelQueueFull, Unavailable, UnknownModel, WrongState,
)  # fmt: skip
"""Refusals that say nothing about the request: another node, or this one later, may take it."""


@dataclass(slots=True, eq=False)
class _Job:
    """One stream being served. What its window or its socket has no room for is held, and the engine waits meanwhile."""

    stream: Stream
    outlet: Outlet
    has_head: bool = False
    is_stream: bool = False
    answer: Answer | None = None
    started_at: float = field(default_factory=clock.monotonic)
    task: asyncio.Task[None] | None = None
    whole: tuple[Head, bytes] | None = None
    """An answer short enough to leave in one frame with its end."""
    _waits_for_room: bool = False
    _held: bytes = b""
    _let_out: asyncio.Future[None] | None = None

    def write(self, out: bytes) -> None:
        stream, outlet, size = self.stream, self.outlet, len(out)
        if not self._held and outlet.has_room and size <= stream.window and size <= WIRE.frame_payload_bytes:
            if stream.is_open:  # else the gateway has cancelled it, and its task is about to hear that
                stream.window -= size
                outlet.post(stream.data_head + out)
            return
        self._held += out
        self.go_on()
        if self._held and self.answer is not None and self.answer.flow is not None:
            self.answer.flow.pause()

    def go_on(self) -> None:
        """Send what is held as far as there is room, cut between events where that is possible."""
        held, stream, outlet = self._held, self.stream, self.outlet
        start = 0
        while start < len(held) and stream.is_open:
            if not outlet.has_room:
                if not self._waits_for_room:
                    self._waits_for_room = True
                    outlet.when_room(self._take_room)
                break
            room = min(stream.window, WIRE.frame_payload_bytes)
            if room <= 0:
                break
            piece = held[start : start + room]
            if self.is_stream and start + room < len(held):
                cut = find_boundary(piece)
                piece = piece[:cut] if cut else piece
            outlet.post(stream.data(piece))
            start += len(piece)
        self._held = held[start:] if stream.is_open else b""
        if self._held:
            return
        if held and self.answer is not None and self.answer.flow is not None:
            self.answer.flow.resume()
        if self._let_out is not None and not self._let_out.done():
            self._let_out.set_result(None)

    def _take_room(self) -> None:
        self._waits_for_room = False
        self.go_on()

    async def let_out(self) -> None:
        while self._held:
            self._let_out = asyncio.get_running_loop().create_future()
            await self._let_out

    def end(self, error: str = "", message: str = "", *, retryable: bool = False) -> End:
        end = End(error=error, message=message, retryable=retryable)
        if self.answer is not None:
            waited_ms = round(self.answer.numbers.queue_wait_ms)
            end.usage = self.answer.usage
            end.queue_wait_ms = waited_ms
            end.engine_ms = max(0, round((clock.monotonic() - self.started_at) * 1000) - waited_ms)
        return end


class Relay:
    """Serves the streams of every session through ``open_answer``, which raises RequestRefused."""

    def __init__(self, open_answer: Callable[[Inference], AbstractAsyncContextManager[Answer]]) -> None:
        self._open_answer = open_answer
        self._limits = limits().connection
        self._jobs: dict[Stream, _Job] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def load(self) -> int:
        return len(self._jobs)

    def open(self, stream: Stream, body: bytes, outlet: Outlet) -> None:
        job = _Job(stream, outlet)
        self._jobs[stream] = job
        self._idle.clear()
        job.task = asyncio.create_task(self._serve(job, body))
        job.task.add_done_callback(lambda task: self._forget(job, task))

    def abort(self, stream: Stream) -> None:
        """Stop serving a stream: the engine's connection closes in the next turn of the loop."""
        job = self._jobs.get(stream)
        if job is not None and job.task is not None:
            job.task.cancel()

    def credit(self, stream: Stream) -> None:
        job = self._jobs.get(stream)
        if job is not None:
            job.go_on()

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def close(self) -> None:
        """Stop everything and wait until every connection to the engine is closed."""
        for stream in list(self._jobs):
            self.abort(stream)
        await self._idle.wait()

    def _forget(self, job: _Job, task: asyncio.Task[None]) -> None:
        del self._jobs[job.stream]
        if not self._jobs:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("stream failed unexpectedly stream=%s", job.stream.ident, exc_info=error)

    async def _serve(self, job: _Job, body: bytes) -> None:
        deadline_ms = job.stream.meta.deadline_ms
        try:
            try:
                async with asyncio.timeout(deadline_ms / 1000 if deadline_ms > 0 else None):
                    end = await self._answer(job, body)
            except TimeoutError:
                # An answer that is here in full when time runs out is delivered: only our own accounts were still being closed.
                end = job.end() if job.whole else job.end("timeout", f"not finished within {deadline_ms} ms")
            frame = job.stream.reply(*job.whole, end) if job.whole is not None else job.stream.end(end)
            job.outlet.post(frame)
        except StreamClosed:
            log.debug("stream abandoned stream=%s", job.stream.ident)
        except Exception:
            # A bug of ours: the gateway would wait for the end of this stream until its deadline.
            with contextlib.suppress(StreamClosed):
                job.outlet.post(job.stream.end(job.end("engine_failed", "the node failed; its log says why")))
            raise

    async def _answer(self, job: _Job, body: bytes) -> End:
        try:
            request = _read_request(job.stream.meta, body)
            async with self._open_answer(request) as answer:
                job.answer = answer
                await self._forward(job, answer)
        except RequestRefused as refusal:
            if job.has_head:  # nobody else can go on with an answer of which bytes are out
                return job.end("engine_failed", refusal.message)
            if isinstance(refusal, _ELSEWHERE):
                return job.end(
                    "engine_failed" if isinstance(refusal, EngineUnavailable) else "busy", refusal.message, retryable=True
                )
            headers = {"content-type": "application/json"}
            if refusal.retry_after_s is not None:
                headers["retry-after"] = str(max(1, round(refusal.retry_after_s)))
            job.whole = (Head(status=refusal.status, headers=headers), refusal_body(refusal))
        return job.end()

    async def _forward(self, job: _Job, answer: Answer) -> None:
        stream = job.stream
        if answer.body is not None and len(answer.body) <= min(self._limits.whole_answer_bytes, stream.window):
            job.whole = (Head(status=answer.status, headers=answer.headers), answer.body)
            return
        job.outlet.post(stream.head(answer.status, answer.headers))
        job.has_head, job.is_stream = True, answer.body is None and answer.is_event_stream
        if answer.body is not None:
            job.write(answer.body)
        elif answer.flow is not None and answer.flow.is_piped:
            await answer.flow.pipe(job.write)
        else:
            assert answer.chunks is not None
            async for out in answer.chunks:
                job.write(out)
                await job.let_out()
        await job.let_out()


def _read_request(meta: OpenMeta, body: bytes) -> Inference:
    headers = {name.lower(): value for name, value in meta.headers.items()}
    check_crowd(body)  # a gateway of an earlier release lets it through
    # The gateway has checked key, tenant and limits.
    return Inference(
        method=meta.method,
        path=meta.path,
        headers=headers,
        body=body,
        model=meta.model,
        tenant=meta.tenant or "anonymous",
        priority=read_priority(meta.priority),
        cache_mode=read_cache_mode(headers.get("x-cache-mode", "")),
        cache_tag=read_cache_tag(headers.get("x-cache-tag", "")),
        is_streaming=meta.is_streaming,
        allow_remote=b'"allow_remote"' in body and bool(read_fields(body).allow_remote),
        on_socket=True,
        request_id=meta.request_id,
    )
