"""Serving streams: admission, the HTTP exchange with the engine, forwarding under credit, cancel and deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Protocol

import aiohttp
from yarl import URL

from runner.admission import Admission
from runner.errors import BoxBusy, SessionLost, StreamClosed
from runner.relay.headers import METHODS, headers_to_engine, headers_to_gateway, is_allowed_path
from runner.session import Stream
from wire.events import find_boundary
from wire.frames import MAX_PAYLOAD_BYTES, End, Head
from wire.usage import BodyReader, StreamReader, ask_for_usage

log = logging.getLogger(__name__)

_WHOLE_BYTES = 64 * 1024
"""Unstreamed answers up to this size leave the box in one frame."""

Send = Callable[[bytes], Awaitable[None]]
"""Puts one frame on the stream's own socket, waiting while that is full. Raises SessionLost."""


class Upstream(Protocol):
    """What serving needs to know of the engine. ``base_url`` ends before ``/v1``."""

    @property
    def is_ready(self) -> bool:
        """Whether it can take requests."""

    @property
    def base_url(self) -> str:
        """Its address."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What every request to it must carry, such as its key."""

    def report_failure(self, reason: str) -> None:
        """Have it checked: a request failed."""


class _Job:
    """One stream being served."""

    __slots__ = ("credit", "has_head", "queue_wait_ms", "send", "started_at", "stream", "task", "whole")

    def __init__(self, stream: Stream, send: Send) -> None:
        self.stream = stream
        self.send = send
        self.credit = asyncio.Event()
        self.has_head = False
        self.queue_wait_ms: int | None = None
        self.started_at = time.monotonic()
        self.task: asyncio.Task[None] | None = None
        self.whole: tuple[Head, bytes] | None = None
        """An answer short enough to leave in one frame with its end."""

    def end(self, error: str = "", message: str = "", *, retryable: bool = False) -> End:
        """Return how this stream ended, with the times it took in milliseconds."""
        total_ms = round((time.monotonic() - self.started_at) * 1000)
        engine_ms = None if self.queue_wait_ms is None else total_ms - self.queue_wait_ms
        return End(error=error, message=message, retryable=retryable, queue_wait_ms=self.queue_wait_ms, engine_ms=engine_ms)


class Relay:
    """Serves the streams of every session. ``client`` has no time-out of its own; ``on_load`` is told of changes."""

    def __init__(
        self, *, client: aiohttp.ClientSession, upstream: Upstream, admission: Admission, on_load: Callable[[], None]
    ) -> None:
        self._client = client
        self._upstream = upstream
        self._admission = admission
        self._on_load = on_load
        self._jobs: dict[Stream, _Job] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def load(self) -> int:
        """Requests that run or wait here."""
        return len(self._jobs)

    def open(self, stream: Stream, body: bytes, send: Send) -> None:
        """Start serving a stream."""
        job = _Job(stream, send)
        self._jobs[stream] = job
        self._idle.clear()
        job.task = asyncio.create_task(self._serve(job, body))
        job.task.add_done_callback(lambda task: self._forget(job, task))
        self._on_load()

    def abort(self, stream: Stream) -> None:
        """Stop serving a stream: the engine's connection closes in the next turn of the loop."""
        job = self._jobs.get(stream)
        if job is not None and job.task is not None:
            job.task.cancel()

    def abort_all(self, streams: Iterable[Stream]) -> None:
        """Stop serving the streams of a session that is gone."""
        for stream in streams:
            self.abort(stream)

    def credit(self, stream: Stream) -> None:
        """Wake a stream that waits for its window to open."""
        job = self._jobs.get(stream)
        if job is not None:
            job.credit.set()

    async def wait_idle(self) -> None:
        """Return when nothing is being served."""
        await self._idle.wait()

    async def close(self) -> None:
        """Stop everything and wait until every connection to the engine is closed."""
        self.abort_all(list(self._jobs))
        await self._idle.wait()

    def _forget(self, job: _Job, task: asyncio.Task[None]) -> None:
        del self._jobs[job.stream]
        if not self._jobs:
            self._idle.set()
        self._on_load()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("stream failed unexpectedly stream=%s", job.stream.ident, exc_info=error)

    async def _serve(self, job: _Job, body: bytes) -> None:
        """Serve one stream to its END, unless it is cancelled or its session is lost."""
        deadline_ms = job.stream.meta.deadline_ms
        try:
            try:
                async with asyncio.timeout(deadline_ms / 1000 if deadline_ms > 0 else None):
                    end = await self._admit(job, body)
            except TimeoutError:
                end = job.end("timeout", f"not finished within {deadline_ms} ms")
            frame = job.stream.reply(*job.whole, end) if job.whole is not None else job.stream.end(end)
            await job.send(frame)
        except (SessionLost, StreamClosed):
            log.debug("stream abandoned stream=%s", job.stream.ident)

    async def _admit(self, job: _Job, body: bytes) -> End:
        meta = job.stream.meta
        if meta.method not in METHODS or not is_allowed_path(meta.path):
            return job.end("engine_failed", "this box serves GET and POST below /v1/ only")
        try:
            await self._admission.enter()
        except BoxBusy as refusal:
            return job.end("busy", str(refusal), retryable=True)
        try:
            job.queue_wait_ms = round((time.monotonic() - job.started_at) * 1000)
            if not self._upstream.is_ready:
                return job.end("engine_failed", "the engine is not ready", retryable=True)
            return await self._exchange(job, body)
        finally:
            self._admission.leave()

    async def _exchange(self, job: _Job, body: bytes) -> End:
        """Send the request to the engine and forward the answer. Never raises for what the engine does."""
        meta = job.stream.meta
        body, adds_usage = ask_for_usage(meta.path, body)
        try:
            response = await self._client.request(
                meta.method,
                URL(self._upstream.base_url + meta.path, encoded=True),
                data=body or None,
                headers=headers_to_engine(meta.headers, self._upstream.headers),
                allow_redirects=False,
            )
            try:
                return await self._forward(job, response, drops_usage=adds_usage)
            finally:
                response.close()
        except (aiohttp.ClientError, OSError) as error:
            reason = type(error).__name__
            self._upstream.report_failure(f"{meta.method} {meta.path}: {reason}")
            when = "broke off in the middle of its answer" if job.has_head else "did not answer"
            return job.end("engine_failed", f"the engine {when} ({reason})", retryable=not job.has_head)

    async def _forward(self, job: _Job, response: aiohttp.ClientResponse, *, drops_usage: bool) -> End:
        """Forward status, headers and body as they come; reading stops while the gateway grants no credit."""
        is_stream = response.content_type == "text/event-stream"
        headers = headers_to_gateway(response.headers, is_event_stream=is_stream)
        length = response.content_length
        if not is_stream and length is not None and length <= min(_WHOLE_BYTES, job.stream.window):
            return await self._take_whole(job, response, headers)
        await job.send(job.stream.head(response.status, headers))
        job.has_head = True
        reader = (
            StreamReader(drops_usage=drops_usage)
            if is_stream
            else BodyReader(is_readable=response.status < 300 and response.content_type.endswith("json"))
        )
        stream, send, feed, read = job.stream, job.send, reader.feed, response.content.readany
        while chunk := await read():
            out = feed(chunk)
            if not out:
                continue
            if len(out) <= stream.window and len(out) <= MAX_PAYLOAD_BYTES:
                await send(stream.data(out))
            else:
                await self._send_pieces(job, out, is_stream=is_stream)
        if rest := reader.finish():
            await self._send_pieces(job, rest, is_stream=is_stream)
        end = job.end()
        end.usage = reader.usage()
        return end

    async def _take_whole(self, job: _Job, response: aiohttp.ClientResponse, headers: dict[str, str]) -> End:
        """Read a short answer to its end; one that breaks off before can still be given by another box."""
        reader = BodyReader(is_readable=response.status < 300 and response.content_type.endswith("json"))
        body = reader.feed(await response.read())
        end = job.end()
        end.usage = reader.usage()
        job.whole = (Head(status=response.status, headers=headers), body)
        return end

    async def _send_pieces(self, job: _Job, out: bytes, *, is_stream: bool) -> None:
        """Send bytes that do not fit at once, cut between events where that is possible."""
        stream, start = job.stream, 0
        while start < len(out):
            room = min(stream.window, MAX_PAYLOAD_BYTES)
            if room <= 0:
                job.credit.clear()
                await job.credit.wait()
                continue
            piece = out[start : start + room]
            if is_stream and start + room < len(out):
                cut = find_boundary(piece)
                piece = piece[:cut] if cut else piece
            await job.send(stream.data(piece))
            start += len(piece)
