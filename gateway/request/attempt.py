"""One attempt of one request: bytes from the node to the client, in order, bounded, with every way it can end.

An ``Exchange`` is the sink of the node's stream. Nothing is sent to the client before the first body byte, so until then
another node may still take over. After the first byte there is one more thing to say at most: an error event.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from core.limits import GatewayLimits, limits
from gateway.dialects.chat import AnswerContext, AnswerTranslator, FailingTranslator, Translation
from gateway.dialects.continuation import Continuation, JoinedStream
from gateway.dialects.pool_meta import MetaStream, PoolMeta, Resumed, add_meta
from gateway.dialects.refusal import read_refusal, read_stream_failure
from gateway.dialects.surface import Surface
from gateway.errors import (
    ClientLeft,
    EngineRefused,
    ForwardedRequestFailed,
    GatewayError,
    RequestInterrupted,
    RequestTimeout,
    StreamTooLarge,
)
from gateway.request.candidates import find_other_words
from gateway.request.client import ClientConnection
from gateway.request.dispatch import Job, Lease, QueuePlace
from gateway.request.outcomes import Broken, Outcome, Retry, RetryReason, Served, judge_end
from gateway.request.response import name_error_type, render_head
from gateway.values import Header
from nodes.links import EndKind, LinkEnd, Sink, Stream
from nodes.links.http import USAGE_COMMENT
from nodes.session import OpenRequest
from wire import clock
from wire.bridge import CANCEL_CLIENT_DISCONNECT, CANCEL_TIMEOUT, TokenCounts
from wire.events import EndReader, StreamEnd, open_end_reader
from wire.ids import format_id
from wire.tidy import ChatTidier
from wire.unreadable import UNREADABLE
from wire.usage import Usage, write_token_counts

_USAGE = b'"usage"'


class _Body(msgspec.Struct):
    usage: Usage | None = None


_prefix_decoder = json.JSONDecoder()
_body_decoder = msgspec.json.Decoder(_Body)


def read_usage(body: bytes) -> TokenCounts | None:
    try:
        usage = _body_decoder.decode(body).usage
    except UNREADABLE:
        return None
    return None if usage is None else usage.to_counts()


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] = []


_choices_decoder = msgspec.json.Decoder(_Choices)


def count_answer_chars(body: bytes) -> int:
    """Return the characters an unstreamed completion says, or of the whole body when it is none."""
    try:
        choices = _choices_decoder.decode(body).choices
    except UNREADABLE:
        return len(body)
    said = [choice.message.content if choice.message is not None else choice.text for choice in choices]
    return sum(len(text) for text in said if text is not None)


def find_usage(data: bytes) -> TokenCounts | None:
    end = len(data)
    # An engine chooses the bytes, and the event loop waits while they are searched: so few places, of bounded size.
    bounds = limits().gateway
    for _ in range(bounds.usage_tries):
        end = data.rfind(_USAGE, 0, end)
        if end < 0:
            break
        start = end + len(_USAGE)
        text = data[start : start + bounds.usage_bytes].decode("latin-1").lstrip()
        try:
            value, _rest = _prefix_decoder.raw_decode(text.removeprefix(":").lstrip())
            usage = msgspec.convert(value, Usage | None)
        except (ValueError, RecursionError):
            continue
        if usage is not None and (counts := usage.to_counts()) is not None:
            return counts
    return None


class Rewriter:
    """One attempt's answer, rewritten. ``measure``: given when the client asked for the pool's numbers.

    ``tidier``: given for a chat stream that is passed on and changed: put right for strict clients, or joined of several.
    """

    def __init__(
        self,
        translator: AnswerTranslator | None,
        measure: Callable[[], PoolMeta] | None,
        tidier: ChatTidier | JoinedStream | None = None,
    ) -> None:
        self.translator = translator
        self._tidier = tidier
        self._measure = measure
        self._meta = MetaStream(measure) if measure is not None else None

    def follow(self, measure: Callable[[], PoolMeta]) -> None:
        """Take that another attempt goes on with the stream; ``measure`` is its."""
        if self._meta is not None:
            self._measure = self._meta.measure = measure

    @property
    def failure(self) -> GatewayError | None:
        return self.translator.failure if self.translator is not None else None

    @property
    def usage(self) -> TokenCounts | None:
        return self.translator.usage if self.translator is not None else None

    def feed(self, data: bytes) -> bytes:
        if self.translator is not None:
            data = self.translator.feed(data)
        elif self._tidier is not None:
            data = self._tidier.feed(data)
        return self._meta.feed(data) if self._meta is not None and data else data

    def finish(self) -> bytes:
        """Return the closing events; after a failure only what came before it."""
        last = b""
        if self.translator is not None:
            last = self.translator.finish()
        elif self._tidier is not None:
            last = self._tidier.finish()
        return last if self._meta is None else self._meta.feed(last) + self._meta.finish()

    def rewrite_whole(self, body: bytes) -> bytes:
        if self.translator is not None:
            body = self.translator.translate_whole(body)
        return add_meta(body, self._measure()) if self._measure is not None and self.failure is None else body

    def render_failure(self, error: GatewayError) -> bytes:
        """Return the events by which this dialect ends a broken stream, or nothing when one error event does."""
        return self.translator.fail(error) if isinstance(self.translator, FailingTranslator) else b""


COMMENT = b": ping\n\n"
# What writes that belong to no answer begin with: our comments, an engine's, and what stands for nothing written yet.
_NO_ANSWER = (b":", b"\n")
_HEAD: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class KeepAlive:
    """Begins the response of one streamed request if nothing else did, and pings whenever nothing was said for a while.

    ``event`` is what is sent within the answer; whoever passes that on sets the one of its dialect. Until something of the
    answer is out it is a comment, since Messages begin with ``message_start``. ``extra``: headers of the response.
    """

    def __init__(self, client: ClientConnection, *, extra: Sequence[Header], every_s: float) -> None:
        self.event = COMMENT
        self._client = client
        self._extra = extra
        self._every_s = every_s
        self._seen = client.tail
        self._has_answer = False
        self._quiet = 0
        """How many looks ago something was said last."""
        self._timer: asyncio.TimerHandle | None = None
        self._queue_timer: asyncio.TimerHandle | None = None

    def start(self, quiet_s: float = 0.0) -> None:
        """Begin to count; a sign comes after ``every_s`` seconds of silence at most, the first one not before.

        ``quiet_s``: for how long nothing was said already.
        """
        self._quiet = 1 if quiet_s else 0
        delay_s = max(0.0, self._every_s - quiet_s) if quiet_s else self._every_s / 2
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def stop(self) -> None:
        self.leave_queue()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def watch_queue(self, read_place: Callable[[], QueuePlace | None], every_s: float) -> None:
        """Say every so often where the request waits, while it does; ``leave_queue`` ends that."""
        self._queue_timer = asyncio.get_running_loop().call_later(every_s, self._tell_place, read_place, every_s)

    def leave_queue(self) -> None:
        if self._queue_timer is not None:
            self._queue_timer.cancel()
            self._queue_timer = None

    def _tell_place(self, read_place: Callable[[], QueuePlace | None], every_s: float) -> None:
        client, place = self._client, read_place()
        if client.finished or client.is_gone:
            return
        if place is not None:  # else its wait may end with a status soon, which a stream that began cannot say
            if not client.started:
                client.start(200, [*_HEAD, *self._extra])
            client.write(b": queued position=%d estimate_ms=%d\n\n" % place)
            self._quiet, self._seen = 0, client.tail
        self.watch_queue(read_place, every_s)

    def _tick(self) -> None:
        client = self._client
        if client.finished or client.is_gone:
            return
        self._quiet = self._quiet + 1 if client.tail is self._seen else 1
        if self._quiet >= 2:
            self._quiet = 0
            self._say(client)
        self._seen = client.tail
        self._timer = asyncio.get_running_loop().call_later(self._every_s / 2, self._tick)

    def _say(self, client: ClientConnection) -> None:
        if not client.started:
            client.start(200, [*_HEAD, *self._extra])
            client.write(COMMENT)
        elif client.tail.endswith(b"\n\n") and not client.is_blocked:  # between two events: within one it would tear it apart
            self._has_answer = self._has_answer or not client.tail.startswith(_NO_ANSWER)
            client.write(self.event if self._has_answer else COMMENT)


_JSON = "application/json"
_CUT = "The engine ended its stream before its answer was finished."
_SILENT = "The engine ended its stream before it said anything."
_DONE_ENDS = (b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n")
_WITHOUT_BODY = frozenset({204, 205})
_LOSSES = frozenset({EndKind.LINK_LOST, EndKind.RECLAIMED, EndKind.ENGINE_FAILED})
"""Ends after which another node may go on with a stream that had begun."""


class Begun(Protocol):
    """An attempt that was begun elsewhere, as far as it has come. Times are clock.monotonic() seconds."""

    stream: Stream | None
    """None: it is over, and nothing of it is to be stopped."""
    status: int
    headers: dict[str, str]
    ends: EndReader | None
    """Of a stream that is passed on as it comes."""
    parts: list[bytes]
    """Of an answer that is held until it is whole, or of a stream whose client got nothing yet."""
    response_started: bool
    is_closing: bool
    """Whether the closing event came, and was counted."""
    started: float
    first_byte_at: float | None
    received: int
    events: int
    bytes_out: int


class Exchange(Sink):
    """One attempt. Create, ``run``, read the counters. ``surface`` None: a break cuts the answer instead of saying so.

    ``translation``: the node is asked in other words, and its answer is translated back. ``waits``: the last bytes stay here
    until ``deliver``, because something has to be written down before the client has the whole answer. ``tidies``: chunks of
    a chat stream are put right for strict clients. ``continuation``: the stream may go on elsewhere when its node dies.
    """

    # More than 30 attributes would be looked up in a dictionary of each instance's own, for every chunk.
    __slots__ = (
        "_began", "_client", "_closed", "_continuation", "_done", "_ends", "_extra", "_headers", "_held", "_is_adopted",
        "_job", "_keepalive", "_lease", "_limits", "_over", "_passing", "_path", "_queue_ms", "_rewriter", "_sniff",
        "_status", "_stream", "_surface", "_translation", "_ungranted", "_usage_data", "_waits", "bytes_out", "events",
        "first_byte_at", "is_delivered", "last", "received", "translator", "was_blocked",
    )  # fmt: skip

    def __init__(
        self,
        *,
        job: Job,
        lease: Lease,
        client: ClientConnection,
        surface: Surface | None,
        limits: GatewayLimits,
        extra: list[Header],
        translation: Translation | None = None,
        keepalive: KeepAlive | None = None,
        queue_ms: int = 0,
        waits: bool = False,
        tidies: bool = False,
        continuation: Continuation | None = None,
    ) -> None:
        self._job = job
        self._lease = lease
        self._client = client
        self._surface = surface
        self._limits = limits
        self._extra = extra
        self._translation = translation
        self._path = lease.path
        self._keepalive = keepalive
        self._queue_ms = queue_ms
        self._waits = waits
        self._is_adopted = False
        self._stream: Stream | None = None
        self._done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._over = False
        self._status = 0
        self._headers: dict[str, str] = {}
        self._held: list[bytes] = []
        self._ungranted = 0
        self._usage_data = b""
        self._sniff = not lease.link.reports_usage and translation is None
        self._passing = False
        self.received = 0
        self.was_blocked = False
        """Whether the client took the answer more slowly than the node gave it."""
        self._began = clock.monotonic()
        # Runs from the engine's closing event on; nothing that comes behind it matters.
        self._closed: asyncio.TimerHandle | None = None
        # Of an engine's own stream; a translator sees for itself how the one it reads ends.
        self._ends: EndReader | None = None
        self.is_delivered = False
        self.last = b""
        """The bytes that ``waits`` holds back: the closing events, or the whole body."""
        self.translator: AnswerTranslator | None = None
        if translation is not None:
            context = AnswerContext(job.request_id, job.request.model, int(clock.unix_s()), received_at=job.accepted)
            self.translator = translation.open_answer(context)
        self._continuation = continuation
        self._rewriter: Rewriter | None = None
        if translation is not None or job.request.options is not None or tidies or continuation is not None:
            measure = self._measure if job.request.options is not None else None
            tidier = ChatTidier() if tidies else None
            if continuation is None or translation is not None:
                self._rewriter = Rewriter(self.translator, measure, tidier)
            else:
                self._rewriter = Rewriter(None, measure, JoinedStream(continuation, tidier))
        self.bytes_out = 0
        self.events = 0
        self.first_byte_at: float | None = None

    def adopt(self, begun: Begun) -> None:
        """Go on with an attempt that was begun elsewhere and whose stream calls here from now on. Call before ``run``."""
        self._is_adopted = True
        self._stream, self._began = begun.stream, begun.started
        self._status, self._headers = begun.status, begun.headers
        self.received, self.first_byte_at = begun.received, begun.first_byte_at
        self.events, self.bytes_out = begun.events, begun.bytes_out
        if begun.ends is None:
            self._held = begun.parts
            return
        self._ends, self._passing = begun.ends, True
        if not begun.response_started:
            self._client.start(self._status, self._head())
            for part in begun.parts:
                self._client.write(part)
        if self._keepalive is not None and self._surface is not None:
            self._keepalive.event = self._surface.ping
        if begun.is_closing:
            self._closed = asyncio.get_running_loop().call_later(self._limits.closed_s, self._end_closed)

    @property
    def continuation(self) -> Continuation | None:
        """What keeps the stream, if another node may go on with it."""
        return self._continuation

    @property
    def recent(self) -> bytes:
        """The end of what the node said."""
        return self.last if self._ends is None else self._ends.recent

    def follow(self, previous: Exchange) -> None:
        """Go on with the stream that another attempt began and its node did not end. Call before ``run``."""
        assert previous._rewriter is not None
        self._continuation, self._rewriter, self.translator = previous._continuation, previous._rewriter, previous.translator
        self._rewriter.follow(self._measure)
        self._began = previous._began
        if self._continuation is not None and self._continuation.first_byte_at is None:
            self._continuation.first_byte_at = previous.first_byte_at
        self.received, self.events, self.bytes_out = previous.received, previous.events, previous.bytes_out

    def find_failover(self) -> tuple[Job, tuple[str, ...]] | None:
        """Return the request and the API paths on which another node may take it, if its own is lost; None = none may."""
        if self._over or self._closed is not None or self._surface is None:
            return None
        if not self._passing:
            return self._job, self._job.request.paths
        paths = self._continuation.next_paths if self._continuation is not None else ()
        return (self._job, paths) if paths else None

    def give_up(self, error: GatewayError) -> Outcome:
        """Say in a stream that broke that nobody goes on with it."""
        self._tell(error)
        return Broken(error, told=True)

    async def run(self) -> Outcome:
        """Serve the attempt. Raises ClientLeft when the client goes; whatever happens, slot and node are let go."""
        job, client = self._job, self._client
        loop = asyncio.get_running_loop()
        remaining = job.deadline - clock.monotonic()
        timer = loop.call_later(max(0.0, remaining), self._take_deadline)
        client.on_gone = self._take_gone
        client.on_drained = self._take_drained
        try:
            if client.is_gone:
                raise ClientLeft
            if not self._is_adopted:
                if self._lease.link.closed:  # lost between the grant and this task's turn
                    return Retry(RetryReason.LOST, RequestInterrupted())
                try:
                    self._stream = self._lease.link.open_stream(self._open_request(remaining), self)
                except UnicodeDecodeError:
                    self._end(Broken(ForwardedRequestFailed("The body is not UTF-8."), told=False))
            return await client.wait(self._done)
        finally:
            timer.cancel()
            if self._closed is not None:
                self._closed.cancel()
            client.on_gone = client.on_drained = None
            self._stop(CANCEL_CLIENT_DISCONNECT)

    def send_ahead(self) -> None:
        if self.is_delivered or self._client.started or len(self.last) <= self._limits.end_bytes:
            return
        # It is too large for a socket's buffer, and its client may still leave before the end.
        head = self._head(_JSON if self.translator is not None else "")
        self._client.start(self._status, [*head, (b"content-length", b"%d" % len(self.last))])
        self._client.write(self.last[: -self._limits.end_bytes])
        self.last = self.last[-self._limits.end_bytes :]

    def deliver(self, last: bytes) -> None:
        self.is_delivered = True
        client = self._client
        if client.started:
            if last:
                client.write(last)
            client.finish()
        else:
            client.respond(self._status, self._head(_JSON if self.translator is not None else ""), last)

    # Sink

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Remember the head; it goes out with the first byte."""
        if not 200 <= status <= 599 or 300 <= status < 400:
            self._fail(ForwardedRequestFailed(f"The node answered with HTTP {status}, which is no answer."))
            return
        self._status = status
        self._headers = headers

    def on_data(self, data: bytes) -> None:
        """Pass bytes on, or hold them while the answer may still be given elsewhere."""
        if self._over or not data:
            return
        size = len(data)
        self.received += size
        if self.received > self._limits.max_stream_bytes:
            self._fail(StreamTooLarge())
            return
        if self._sniff and b'"usage"' in data and not (self._usage_data and b'"usage":null' in data):
            self._usage_data = data
        if self.first_byte_at is None and not self._take_first_byte():
            return
        if not self._passing:
            self._hold(data)
            return
        if self._ends is not None:
            data = self._ends.feed(data)
        if self._closed is None and (self._ends.closing if self._ends is not None else data.endswith(_DONE_ENDS)):
            self._take_closing()
        if self._rewriter is not None:
            data = self._rewriter.feed(data) if data else data
            if self._rewriter.failure is not None:
                if data:
                    self._client.write(data)
                self._fail(self._rewriter.failure)
                return
        if not data:
            self._grant(size)
            return
        self.events += 1
        self.bytes_out += len(data)
        self._client.write(data)
        self._grant(size)

    def on_end(self, end: LinkEnd) -> None:
        if self._over:
            return
        self._stream = None
        self._lease.release()
        if end.kind is EndKind.COMPLETE and self._status:
            if self.first_byte_at is None and self._job.request.is_streaming and self._status == 200 and self._is_event_stream:
                self._end(Retry(RetryReason.ENGINE, ForwardedRequestFailed(_SILENT)))
            else:
                self._complete(end)
            return
        error, reason = judge_end(end)
        if reason is not None and not self._passing:
            self._end(Retry(reason, error))
        elif not ((is_loss := end.kind in _LOSSES) and self._hand_on(error)):
            self._break(error, is_loss=is_loss)

    # inside

    def _open_request(self, remaining: float) -> OpenRequest:
        job, request = self._job, self._job.request
        headers = request.headers
        if job.trace is not None:
            link, at = self._lease.link, clock.monotonic()
            headers = {**headers, **job.trace.begin_attempt(link, request.model, number=job.attempts, at=at)}
        return OpenRequest(
            request_id=job.request_id,
            attempt=job.attempts,
            model=request.model,
            path=self._path if self._translation is None else self._translation.path,
            body=request.body if self._translation is None else self._translation.body,
            headers=headers,
            is_streaming=request.is_streaming,
            deadline_ms=max(1, int(remaining * 1000)),
            tenant=job.tenant,
            priority=job.priority,
            is_last=job.losses >= self._limits.max_requeues,
        )

    def _head(self, content_type: str = "") -> list[Header]:
        is_event_stream = self._is_event_stream
        head = render_head(self._headers, queue_ms=self._queue_ms, is_event_stream=is_event_stream, content_type=content_type)
        return head + self._extra

    @property
    def _is_event_stream(self) -> bool:
        return self._headers.get("content-type", "").startswith("text/event-stream")

    def _take_first_byte(self) -> bool:
        if self._status in _WITHOUT_BODY:
            said = f"The node answered with HTTP {self._status} and a body, which it may not have."
            self._fail(ForwardedRequestFailed(said))
            return False
        self.first_byte_at = clock.monotonic()
        client = self._client
        if not self._job.request.is_streaming or self._status >= 400:
            return True
        if not self._is_event_stream:
            if self._rewriter is not None or client.started:
                return True
            if self._keepalive is not None:
                self._keepalive.stop()
        elif self.translator is None:
            self._ends = open_end_reader(self._path)
        self._passing = True
        if not client.started:
            client.start(self._status, self._head())
        if self._keepalive is not None and self._surface is not None:
            self._keepalive.event = self._surface.ping
        if self._continuation is not None:
            self._continuation.nodes.append((self._lease.link.node_id, self._lease.link.node_name))
        return True

    def _take_closing(self) -> None:
        self.events += 1
        # From here on the answer is whole, whatever becomes of its node.
        self._closed = asyncio.get_running_loop().call_later(self._limits.closed_s, self._end_closed)

    def _end_closed(self) -> None:
        if not self._over:
            self._stop(CANCEL_CLIENT_DISCONNECT)
            self._complete(LinkEnd(kind=EndKind.COMPLETE))

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._grant(len(data))
        if self.received <= self._limits.hold_bytes:
            return
        if self._status >= 400:  # no error says anything worth reading in its second megabyte
            self._stop(CANCEL_CLIENT_DISCONNECT)
            self._complete_held(b"".join(self._held)[: self._limits.hold_bytes], None)
            return
        if self._rewriter is not None or self._client.started:
            if self.received > self._limits.whole_bytes:
                self._fail(StreamTooLarge())
            return
        self._passing = True
        self._client.start(self._status or 200, self._head())
        for part in self._held:
            self.bytes_out += len(part)
            self._client.write(part)
        self._held.clear()

    def _measure(self) -> PoolMeta:
        link, now, first = self._lease.link, clock.monotonic(), self.first_byte_at
        nodes: list[tuple[uuid.UUID, str]] = []
        if self._continuation is not None:
            nodes, first = self._continuation.nodes[1:], self._continuation.first_byte_at or first
        return PoolMeta(
            gpu_id=format_id("node", link.node_id),
            node=link.node_name,
            model=self._job.request.model,
            asked_model=self._job.asked_model,
            queue_ms=self._queue_ms,
            inference_ms=round((now - self._began) * 1000),
            ttfb_ms=None if first is None else round((first - self._began) * 1000),
            attempts=self._job.attempts,
            unmatched=self._job.unmatched,
            resumed=[Resumed(format_id("node", node_id), name) for node_id, name in nodes] or msgspec.UNSET,
        )

    def _grant(self, amount: int) -> None:
        if self._client.is_blocked:
            self.was_blocked = True
            self._ungranted += amount
        elif self._stream is not None:
            self._stream.grant(amount)

    def _take_drained(self) -> None:
        if self._stream is not None and self._ungranted:
            self._stream.grant(self._ungranted)
        self._ungranted = 0

    def _complete(self, end: LinkEnd) -> None:
        usage = end.detail.usage if end.detail is not None and end.detail.usage is not None else None
        if not self._passing:
            self._complete_held(b"".join(self._held), usage)
            return
        continuation = self._continuation
        if continuation is not None and not continuation.is_finished and self._hand_on(RequestInterrupted(_CUT)):
            return
        if usage is None and (said := self._usage_data or (self._ends.recent if self._closed and self._ends else b"")):
            usage = find_usage(said)
        if continuation is not None and usage is not None:
            usage = continuation.count(usage)
        last, ended, failure = b"", StreamEnd.WHOLE, None
        if self._ends is not None:
            last, ended = self._ends.finish(), self._ends.judge()
            if ended is StreamEnd.CUT and self._surface is not None:  # a peer says nothing: its client's gateway judges
                failure = read_stream_failure(self._ends.error) if self._ends.error else RequestInterrupted(_CUT)
        if self._rewriter is not None:
            last = (self._rewriter.feed(last) if last else b"") + self._rewriter.finish()
            usage = self._rewriter.usage or usage
            failure = self._rewriter.failure or failure
        if continuation is not None:
            failure = failure or continuation.failure
            usage = None if continuation.has_estimated_usage else usage  # the record estimates for itself, and says so
        if failure is not None:
            if last:
                self._client.write(last)
            self._tell(failure)
            return
        if usage is not None and self._surface is None and self._is_event_stream:
            last += USAGE_COMMENT + write_token_counts(usage) + b"\n\n"  # for the peer's records
        has_failed = ended is StreamEnd.FAILED
        error = read_stream_failure(self._ends.error) if has_failed and self._ends is not None and self._ends.error else None
        self._finish(last, Served(self._status, usage, has_failed=has_failed, error=error))

    def _complete_held(self, body: bytes, usage: TokenCounts | None) -> None:
        if self._continuation is not None and self._continuation.number > 1:
            self._end(Retry(RetryReason.UNCONTINUED, RequestInterrupted()))
            return
        if self._status >= 400:
            self._complete_refused(body)
            return
        if self._client.started or (self.translator is not None and self._job.request.is_streaming):
            self._break(ForwardedRequestFailed("The engine answered a streamed request without a stream."))
            return
        if self._rewriter is not None:
            body = self._rewriter.rewrite_whole(body)
            usage = self._rewriter.usage or usage
            if self._rewriter.failure is not None:
                self._break(self._rewriter.failure)
                return
        usage = usage if usage is not None else read_usage(body)
        text_chars = count_answer_chars(body) if usage is None else None
        self._finish(body, Served(self._status, usage, text_chars))

    def _complete_refused(self, body: bytes) -> None:
        reason, request, error = None, self._job.request, read_refusal(self._status, body)
        if self._translation is None and self._path == request.endpoint:
            reason = find_other_words(self._lease.link, self._surface, request, status=self._status, body=body)
        if reason is not None:
            self._end(Retry(reason, error))
        elif self._surface is not None and self._surface.wants_count(error):
            self._end(Broken(error, told=False))
        elif self._client.started:
            self._tell(error)
        elif self._surface is None:
            self._client.respond(self._status, self._head(), body)
            self._end(Served(self._status, None))
        else:
            sent = request.body if self._translation is not None else None
            said = self._surface.render_refusal(self._status, body, self._job.request_id, translated=sent)
            self.is_delivered = True
            status = error.status if isinstance(error, EngineRefused) else self._status
            self._client.respond(status, self._head(name_error_type(self._headers) if said is body else _JSON), said)
            self._end(Served(status, None, error=error))

    def _finish(self, last: bytes, outcome: Served) -> None:
        self.last = last
        self.bytes_out += len(last)
        if not self._waits:
            self.deliver(last)
        self._end(outcome)

    def _take_deadline(self) -> None:
        self._stop(CANCEL_TIMEOUT)
        self._fail(RequestTimeout())

    def _take_gone(self) -> None:
        self._stop(CANCEL_CLIENT_DISCONNECT)

    def _fail(self, error: GatewayError) -> None:
        if self._over:
            return
        self._stop(CANCEL_TIMEOUT if isinstance(error, RequestTimeout) else CANCEL_CLIENT_DISCONNECT)
        self._break(error)

    def _hand_on(self, error: GatewayError) -> bool:
        """Let another node go on with a stream that broke, or end one that lacks nothing but its end; False: neither can be."""
        continuation = self._continuation
        if continuation is None or not self._passing or self._closed is not None:
            return False
        if closing := continuation.close():
            if self._ends is not None:
                self._ends = open_end_reader(self._path)
            self.on_data(closing)
            if not self._over:
                self._complete(LinkEnd(kind=EndKind.COMPLETE))
            return True
        if continuation.ineligibility or continuation.failure is not None:
            return False
        self._end(Retry(RetryReason.BROKEN, error))
        return True

    def _break(self, error: GatewayError, *, is_loss: bool = False) -> None:
        # Behind its closing event an answer is whole.
        if self._closed is not None or (self._ends is not None and self._ends.is_closed):
            self._complete(LinkEnd(kind=EndKind.COMPLETE))
        elif is_loss and self._job.request.options is not None and self._surface is not None and self._is_event_stream:
            self._end(Retry(RetryReason.BROKEN, error))  # its client is told of another node first
        elif self._client.started:
            self._tell(error)
        else:
            self._end(Broken(error, told=False))

    def _tell(self, error: GatewayError) -> None:
        """Say in the stream that it broke, end it, and close the connection; a body that is no stream is cut."""
        client = self._client
        if self._surface is not None and (self._is_event_stream or not self._passing):
            said = self._rewriter.render_failure(error) if self._rewriter is not None else b""
            client.close_after_response()
            if not said and self._ends is not None:
                said = self._surface.render_broken(error, first=self._ends.first, last=self._ends.recent)
            if not client.tail.endswith(b"\n\n"):
                client.write(b"\n\n")  # the part of an event that went out must not run into the error
            client.write(said or self._surface.render_first_error(error, self._job.request_id, self._job.request))
            client.finish()
        else:
            client.abort()
        self._end(Broken(error, told=True))

    def _stop(self, reason: str) -> None:
        """Let go of node and slot; idempotent, and it does not wait for the node."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.cancel(reason)
        self._lease.release()

    def _end(self, outcome: Outcome) -> None:
        self._over = True
        if not self._done.done():
            self._done.set_result(outcome)
