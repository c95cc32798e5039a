"""One attempt of one request: bytes from the box to the client, in order, bounded, with every way it can end.

An ``Exchange`` is the sink of the box's stream. Nothing is sent to the client before the first body byte, so until then
another box may still take over. After the first byte there is one more thing to say at most: an error event.
"""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.answers import count_answer_chars, find_usage, read_usage
from gateway.client import ClientConnection, Header
from gateway.dialects import Surface
from gateway.dispatch import Job, Lease
from gateway.errors import (
    ClientLeft,
    ForwardedRequestFailed,
    GatewayError,
    RequestInterrupted,
    RequestTimeout,
    StreamTooLarge,
)
from gateway.values import Limits
from nodes.links import EndKind, LinkEnd, Stream
from nodes.links.http import USAGE_COMMENT
from nodes.session import OpenRequest
from wire.bridge import CANCEL_CLIENT_DISCONNECT, CANCEL_TIMEOUT, TokenCounts
from wire.usage import write_token_counts

_HOLD_LIMIT_BYTES = 1024 * 1024
_DROPPED_HEADERS = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "content-length",
        "server",
        "date",
        "set-cookie",
        "location",
        "alt-svc",
        "strict-transport-security",
        "x-request-id",
        "request-id",
        "x-accel-buffering",
    }
)
_SAFE_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*\Z")
_SAFE_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-z-]+\Z")


class RetryReason(StrEnum):
    """Why another box should be tried."""

    LOST = "lost"
    ENGINE = "engine"
    BUSY = "busy"
    RECLAIMED = "reclaimed"


@dataclass(frozen=True, slots=True)
class Served:
    """The client has the whole answer. ``status`` is the engine's; ``usage`` is None when the engine did not say."""

    status: int
    usage: TokenCounts | None
    text_chars: int | None = field(default=None, compare=False)
    """Characters of an unstreamed answer without usage, to estimate from."""


@dataclass(frozen=True, slots=True)
class Retry:
    """Nothing reached the client; another box may take it. ``error`` is what to say if none may."""

    reason: RetryReason
    error: GatewayError


@dataclass(frozen=True, slots=True)
class Broken:
    """It is over. ``told`` says whether the client was told already (a stream that had begun)."""

    error: GatewayError
    told: bool


Outcome = Served | Retry | Broken


class Exchange:
    """One attempt. Create, ``run``, read the counters. ``surface`` None: a break cuts the answer instead of saying so."""

    def __init__(
        self,
        *,
        job: Job,
        lease: Lease,
        client: ClientConnection,
        surface: Surface | None,
        limits: Limits,
        extra: list[Header],
    ) -> None:
        self._job = job
        self._lease = lease
        self._client = client
        self._surface = surface
        self._limits = limits
        self._extra = extra
        self._stream: Stream | None = None
        self._done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._over = False
        self._status = 0
        self._headers: dict[str, str] = {}
        self._held: list[bytes] = []
        self._ungranted = 0
        self._usage_data = b""
        self._sniff = not lease.link.reports_usage
        self._passing = False
        self.bytes_out = 0
        self.events = 0
        self.first_byte_at: float | None = None

    async def run(self) -> Outcome:
        """Serve the attempt. Raises ClientLeft when the client goes; whatever happens, slot and box are let go."""
        job, client = self._job, self._client
        loop = asyncio.get_running_loop()
        remaining = job.deadline - time.monotonic()
        timer = loop.call_later(max(0.0, remaining), self._take_deadline)
        client.on_gone = self._take_gone
        client.on_drained = self._take_drained
        try:
            if client.is_gone:
                raise ClientLeft
            if self._lease.link.closed:  # lost between the grant and this task's turn
                return Retry(RetryReason.LOST, RequestInterrupted())
            request = job.request
            opening = OpenRequest(
                request_id=job.request_id,
                attempt=job.attempts,
                model=request.model,
                path=request.endpoint,
                body=request.body,
                headers=request.headers,
                is_streaming=request.is_streaming,
                deadline_ms=max(1, int(remaining * 1000)),
                tenant=job.tenant,
                priority=job.priority,
            )
            try:
                self._stream = self._lease.link.open_stream(opening, self)
            except UnicodeDecodeError:
                self._end(Broken(ForwardedRequestFailed("The body is not UTF-8."), told=False))
            return await client.wait(self._done)
        finally:
            timer.cancel()
            client.on_gone = client.on_drained = None
            self._stop(CANCEL_CLIENT_DISCONNECT)

    # Sink

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Remember the head; it goes out with the first byte."""
        if not 200 <= status <= 599:
            self._fail(ForwardedRequestFailed("The node answered with an impossible status."))
            return
        self._status = status
        self._headers = headers

    def on_data(self, data: bytes) -> None:
        """Pass bytes on, or hold them while the answer may still be given elsewhere."""
        if self._over or not data:
            return
        self.bytes_out += len(data)
        if self.bytes_out > self._limits.max_stream_bytes:
            self._fail(StreamTooLarge())
            return
        if self._sniff and b'"usage"' in data and not (self._usage_data and b'"usage":null' in data):
            self._usage_data = data
        if self.first_byte_at is None:
            self.first_byte_at = time.monotonic()
            self._passing = self._job.request.is_streaming
            if self._passing:
                self._client.start(self._status or 200, self._head())
        if not self._passing:
            self._hold(data)
            return
        self.events += 1
        self._client.write(data)
        self._grant(len(data))

    def on_end(self, end: LinkEnd) -> None:
        """Finish the answer, or decide what its breaking means."""
        if self._over:
            return
        self._stream = None
        self._lease.release()
        if end.kind is EndKind.COMPLETE and self._status:
            self._complete(end)
            return
        error, reason = _judge(end)
        if self._client.started:
            self._tell(error)
        elif reason is not None:
            self._end(Retry(reason, error))
        else:
            self._end(Broken(error, told=False))

    # inside

    def _head(self) -> list[Header]:
        headers = [
            (name.encode("latin-1"), value.encode("latin-1", "replace"))
            for name, value in self._headers.items()
            if name not in _DROPPED_HEADERS
            and not name.startswith("access-control-")
            and _SAFE_NAME.match(name)
            and _SAFE_VALUE.match(value)
        ]
        if self._is_event_stream:
            headers.append((b"x-accel-buffering", b"no"))
            if "cache-control" not in self._headers:
                headers.append((b"cache-control", b"no-cache"))
        return headers + self._extra

    @property
    def _is_event_stream(self) -> bool:
        return self._headers.get("content-type", "").startswith("text/event-stream")

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._grant(len(data))
        if self.bytes_out > _HOLD_LIMIT_BYTES:
            self._passing = True
            self._client.start(self._status or 200, self._head())
            for part in self._held:
                self._client.write(part)
            self._held.clear()

    def _grant(self, amount: int) -> None:
        if self._stream is None:
            return
        if self._client.is_blocked:
            self._ungranted += amount
        else:
            self._stream.grant(amount)

    def _take_drained(self) -> None:
        if self._stream is not None and self._ungranted:
            self._stream.grant(self._ungranted)
        self._ungranted = 0

    def _complete(self, end: LinkEnd) -> None:
        client = self._client
        usage = end.detail.usage if end.detail is not None and end.detail.usage is not None else None
        if not client.started:
            body = b"".join(self._held)
            text_chars = None
            if usage is None and self._status < 400:
                usage = read_usage(body)
                text_chars = count_answer_chars(body) if usage is None else None
            client.respond(self._status, self._head(), body)
            self._end(Served(self._status, usage, text_chars))
            return
        if usage is None and self._usage_data:
            usage = find_usage(self._usage_data)
        if usage is not None and self._surface is None and self._is_event_stream:
            client.write(USAGE_COMMENT + write_token_counts(usage) + b"\n\n")  # for the peer's records
        client.finish()
        self._end(Served(self._status, usage))

    def _take_deadline(self) -> None:
        self._stop(CANCEL_TIMEOUT)
        self._fail(RequestTimeout())

    def _take_gone(self) -> None:
        self._stop(CANCEL_CLIENT_DISCONNECT)

    def _fail(self, error: GatewayError) -> None:
        """End the attempt for a reason of ours."""
        if self._over:
            return
        self._stop(CANCEL_TIMEOUT if isinstance(error, RequestTimeout) else CANCEL_CLIENT_DISCONNECT)
        if self._client.started:
            self._tell(error)
        else:
            self._end(Broken(error, told=False))

    def _tell(self, error: GatewayError) -> None:
        """Say in the stream that it broke, end it, and close the connection; a body that is no stream is cut."""
        client = self._client
        if self._is_event_stream and self._surface is not None:
            client.close_after_response()
            client.write(self._surface.render_stream_error(error, self._job.request_id))
            client.finish()
        else:
            client.abort()
        self._end(Broken(error, told=True))

    def _stop(self, reason: str) -> None:
        """Let go of box and slot; idempotent, and it does not wait for the box."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel(reason)
        self._lease.release()

    def _end(self, outcome: Outcome) -> None:
        self._over = True
        if not self._done.done():
            self._done.set_result(outcome)


def _judge(end: LinkEnd) -> tuple[GatewayError, RetryReason | None]:
    """Return what to tell the client and, when another box may try, why."""
    match end.kind:
        case EndKind.BUSY:
            return ForwardedRequestFailed(), RetryReason.BUSY
        case EndKind.LINK_LOST:
            return RequestInterrupted(), RetryReason.LOST
        case EndKind.RECLAIMED:
            return RequestInterrupted(), RetryReason.RECLAIMED
        case EndKind.TIMEOUT:
            return RequestTimeout(), None
        case EndKind.ENGINE_FAILED | EndKind.COMPLETE:
            return ForwardedRequestFailed(), RetryReason.ENGINE if end.retryable else None
