"""A chat answer, streamed or whole, as a response: its events, its object, and its honest end."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from core.limits import limits
from gateway.dialects.chat import ChatPiece, ChatTimings, ChatUsage, list_payloads, read_chat
from gateway.dialects.refusal import read_stream_failure
from gateway.dialects.responses.answer import AnswerItems, number_calls
from gateway.dialects.responses.object import (
    ResponseFrame,
    ResponseMoment,
    Status,
    count_tokens,
    make_response_id,
    render_error,
    render_response,
    render_usage,
)
from gateway.dialects.responses.output import EventLog
from gateway.dialects.responses.pool import Stopwatch, measure
from gateway.dialects.responses.tools import ToolTable
from gateway.dialects.translation import AnswerContext
from gateway.errors import ForwardedRequestFailed, GatewayError, RequestInterrupted, StreamTooLarge
from wire.bridge import TokenCounts
from wire.events import EventCutter
from wire.unreadable import UNREADABLE

_INCOMPLETE_REASONS = {"length": b"max_output_tokens", "content_filter": b"content_filter"}
_BROKEN_ENDS = frozenset({"abort", "error"})
"""Finish reasons with which vLLM says that it gave the request up."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What an answer takes over from its request, most of it for the ``ResponseFrame``. ``response_id`` None: one is made."""

    echo: bytes
    table: ToolTable
    response_id: str | None = None
    is_stored: bool = False
    uses_pool_fields: bool = False


class ResponsesTranslator:
    """Says one chat answer as a response (``AnswerTranslator``). ``fail`` ends a stream that broke for any reason."""

    def __init__(self, plan: AnswerPlan, context: AnswerContext) -> None:
        self._plan = plan
        self._context = context
        self._frame = ResponseFrame(
            response_id=plan.response_id or make_response_id(context.request_id),
            model=context.model,
            created=context.created,
            echo=plan.echo,
            is_stored=plan.is_stored,
        )
        self._opened_at = context.clock()
        self._first_text_at: float | None = None
        self._cutter = EventCutter()
        self._large: list[bytes] = []
        self._log = EventLog()
        self._items = self._make_items()
        self._finish_reason: str | None = None
        self._usage: ChatUsage | None = None
        self._timings: ChatTimings | None = None
        self._failure: GatewayError | None = None
        self._kept: bytes | None = None
        self._is_done = self._is_over = False

    @property
    def usage(self) -> TokenCounts | None:
        """What the engine counted, as far as it said."""
        return count_tokens(self._usage)

    @property
    def failure(self) -> GatewayError | None:
        """Why the answer is over, if it is."""
        return self._failure

    @property
    def kept(self) -> bytes | None:
        """The final response object as JSON, once the answer is whole (completed or incomplete)."""
        return self._kept

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine's event stream, cut anywhere; return whole events, or nothing."""
        if self._is_over or self._failure is not None:
            return b""
        events = self._cutter.feed(data)
        if self._cutter.is_inside_event or self._large:
            events = self._gather(events)
        if events:
            self._read(events)
            if self._first_text_at is None and not self._items.is_empty:
                self._first_text_at = self._context.clock()
        return self._log.take()

    def finish(self) -> bytes:
        """Return the closing events. An engine that ended before its finish_reason or ``[DONE]`` is a ``failure``."""
        if self._is_over or self._failure is not None:
            return b""
        rest = b"".join(self._large) + self._cutter.finish()
        if rest and self._finish_reason is None:
            self._read(rest, is_cut=True)
        if self._failure is None and self._finish_reason is None and not self._is_done:
            self._failure = RequestInterrupted("The engine broke off before the end of its answer.")
        if self._failure is None:
            self._begin()
            self._end()
        return self._log.take()

    def fail(self, error: GatewayError) -> bytes:
        """Return the events that end the stream with this error; nothing when it has ended already."""
        if self._is_over:
            return b""
        self._is_over = True
        self._failure = self._failure or error
        self._begin()
        moment = ResponseMoment(Status.FAILED, self._items.render(), render_usage(self._usage), render_error(error))
        self._log.add(b"response.failed", b'"response":' + render_response(self._frame, moment))
        return self._log.take()

    def translate_whole(self, body: bytes) -> bytes:
        """Return an unstreamed chat answer (HTTP 2xx) as a response object; nothing and a ``failure`` when it is none."""
        self._log = EventLog(is_silent=True)
        self._items = self._make_items()
        try:
            answer = read_chat(body)
        except UNREADABLE:
            self._failure = ForwardedRequestFailed("The engine answered with what is no chat completion.")
            return b""
        for choice in answer.choices:
            number_calls(choice.message)
        self._take(answer)
        if self._failure is None and self._finish_reason is None:
            self._failure = ForwardedRequestFailed("The engine answered without a finished message.")
        if self._failure is None:
            self._end()
        return self._kept or b""

    def _make_items(self) -> AnswerItems:
        plan = self._plan
        return AnswerItems(stem=self._frame.stem, table=plan.table, log=self._log, repeats_text=plan.uses_pool_fields)

    def _gather(self, events: bytes) -> bytes:
        """Put an event together that is too large for the cutter to hold."""
        self._large.append(events)
        if sum(map(len, self._large)) > limits().gateway.responses_event_bytes:
            self._failure = StreamTooLarge()
            self._large.clear()
            return b""
        if self._cutter.is_inside_event:
            return b""
        whole = b"".join(self._large)
        self._large.clear()
        return whole

    def _read(self, events: bytes, *, is_cut: bool = False) -> None:
        """Take whole events. ``is_cut``: the last one may be a piece of one, which counts for nothing."""
        if events.startswith(b"data: {") and events.find(b"\n") == len(events) - 2:
            payloads = iter((events[6:],))  # the usual case, one event of one line
        else:
            payloads = list_payloads(events)
        for payload in payloads:
            if payload == b"[DONE]":
                self._is_done = True
                continue
            try:
                piece = read_chat(payload)
            except UNREADABLE:
                if not is_cut:
                    self._failure = ForwardedRequestFailed("The engine sent what is no chat stream.")
                return
            self._take(piece)
            if self._failure is not None:
                return

    def _take(self, piece: ChatPiece) -> None:
        if piece.error is not None:
            self._failure = read_stream_failure(_encode(piece.error))
            return
        if self._log.is_empty:
            self._begin()
        if piece.usage is not None:
            self._usage = piece.usage
        if piece.timings is not None:
            self._timings = piece.timings
        for choice in piece.choices:
            if choice.index != 0:
                continue
            try:
                self._items.take(choice)
            except StreamTooLarge as error:
                self._failure = error
                return
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
                if choice.finish_reason in _BROKEN_ENDS:
                    self._failure = ForwardedRequestFailed("The engine gave the request up.")

    def _begin(self) -> None:
        """Say that the response exists, if that was not said yet."""
        if self._log.is_empty:
            response = b'"response":' + render_response(self._frame, ResponseMoment())
            self._log.add(b"response.created", response)
            self._log.add(b"response.in_progress", response)

    def _end(self) -> None:
        """Close every item and the response."""
        if self._items.has_unnamed_call:
            self._failure = ForwardedRequestFailed("The engine called a tool without naming it.")
            return
        reason = _INCOMPLETE_REASONS.get(self._finish_reason or "")
        self._items.close(is_cut=reason is not None)
        self._is_over = True
        ended_at = self._context.clock()
        moment = ResponseMoment(
            status=Status.COMPLETED if reason is None else Status.INCOMPLETE,
            output=self._items.render(),
            usage=render_usage(self._usage),
            incomplete_details=b"null" if reason is None else b'{"reason":"%b"}' % reason,
            completed_at=b"%d" % (self._context.created + int(ended_at - self._opened_at)) if reason is None else b"null",
            extra=self._tell_metrics(ended_at) if self._plan.uses_pool_fields else b"",
        )
        self._kept = response = render_response(self._frame, moment)
        # To llm-pool's readers there is no end but this one; the object in it says what is missing.
        is_completed = reason is None or self._plan.uses_pool_fields
        self._log.add(b"response.completed" if is_completed else b"response.incomplete", b'"response":' + response)

    def _tell_metrics(self, ended_at: float) -> bytes:
        """Say llm-pool's numbers in an event of their own; return what its readers want in the object."""
        watch = Stopwatch(
            received_at=self._context.received_at,
            opened_at=self._opened_at,
            first_text_at=self._first_text_at,
            ended_at=ended_at,
        )
        metrics = _encode(measure(watch, usage=self.usage, timings=self._timings))
        self._log.add(b"response.metrics", b'"id":%b,"metrics":%b' % (_encode(self._frame.response_id), metrics))
        return b',"output_text":%b,"metrics":%b' % (_encode(self._items.text), metrics)
