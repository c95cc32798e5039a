"""Answers of a chat engine as answers of ``/v1/messages``, streamed and whole. Pure."""

from __future__ import annotations

import re

from core.limits import limits
from gateway.dialects.chat import ChatChoice, ChatMessage, ChatPiece, ChatUsage, list_payloads, read_chat
from gateway.dialects.messages import events
from gateway.dialects.messages.answer import FAILED_FINISHES, count_tokens, find_stop, render_whole
from gateway.dialects.messages.strands import Kind, Strands
from gateway.dialects.refusal import read_refusal, read_stream_failure
from gateway.dialects.translation import AnswerContext
from gateway.errors import ForwardedRequestFailed, GatewayError, RequestInterrupted, StreamTooLarge
from wire.bridge import TokenCounts
from wire.events import EventCutter
from wire.unreadable import UNREADABLE

_DONE = b"[DONE]"
_ERROR_OBJECT = re.compile(rb'"object"\s*:\s*"error"')
_SPOKEN = re.compile(r"[^A-Za-z0-9_-]")
_NOT_CHAT = "The engine's answer is no chat completion."
_NOT_FINISHED = "The engine ended its answer before it was finished."

_encode = events.encode
_DELTA_END = events.DELTA_END
_TEXT, _THINKING = Kind.TEXT, Kind.THINKING


class MessagesTranslator:
    """One answer; see ``AnswerTranslator``. The closing events are held until ``finish``: usage follows the last piece."""

    __slots__ = (
        "_context",
        "_cutter",
        "_failure",
        "_finish_reason",
        "_has_started",
        "_id",
        "_is_done",
        "_large",
        "_refuses",
        "_stopped_by",
        "_strands",
        "_usage",
    )

    def __init__(self, context: AnswerContext) -> None:
        self._context = context
        self._id = _SPOKEN.sub("", context.request_id.removeprefix("req_"))
        self._cutter = EventCutter()
        self._large = b""
        self._strands = Strands(self._make_call_id)
        self._has_started = False
        self._is_done = False
        self._refuses = False
        self._finish_reason: str | None = None
        self._stopped_by: int | str | None = None
        self._usage: ChatUsage | None = None
        self._failure: GatewayError | None = None

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
        """Nothing: messages are not kept."""
        return None

    def feed(self, data: bytes) -> bytes:
        """Take bytes of a chat stream, cut anywhere; return whole events of a Messages stream, or nothing."""
        if self._failure is not None:
            return b""
        whole = self._cutter.feed(data)
        if self._large or self._cutter.is_inside_event:
            whole = self._gather(whole)
        if not whole:
            return b""
        if whole.startswith(b"data: {") and whole.find(b"\n") == len(whole) - 2:
            return self._take(whole[6:-2])
        return self._take_all(whole)

    def finish(self) -> bytes:
        """Return the closing events; none, and ``failure``, when the engine never said that its answer was finished."""
        out = b""
        if self._failure is None:
            out = self._take_rest(self._large + self._cutter.finish())
        if self._failure is not None:
            return out
        if self._finish_reason is None and not self._is_done:
            self._failure = RequestInterrupted(_NOT_FINISHED)
            return out
        if not self._has_started:
            out += self._start()
        try:
            if self._strands.is_empty:
                out += self._strands.add(_TEXT, "")
            out += self._strands.finish()
        except ForwardedRequestFailed as error:
            self._failure = error
            return out
        strands = self._strands
        stop_reason, stop_sequence = find_stop(
            self._finish_reason,
            self._stopped_by,
            has_calls=strands.has_calls,
            has_cut_calls=strands.has_cut_calls,
            refuses=self._refuses,
        )
        return out + events.render_message_delta(stop_reason, stop_sequence, self._usage) + events.MESSAGE_STOP

    def translate_whole(self, body: bytes) -> bytes:
        """Return an unstreamed chat answer (HTTP 2xx) as a message; nothing, and ``failure``, when it is none."""
        try:
            piece = read_chat(body)
        except UNREADABLE:
            piece = ChatPiece()
        self._usage = piece.usage
        choice = next((choice for choice in piece.choices if choice.index == 0), None)
        if piece.error is not None:
            self._failure = read_stream_failure(_encode(piece.error))
        elif choice is None or choice.message is None:
            is_error = _ERROR_OBJECT.search(body) is not None
            self._failure = read_refusal(502, body) if is_error else ForwardedRequestFailed(_NOT_CHAT)
        elif choice.finish_reason in FAILED_FINISHES:
            self._failure = ForwardedRequestFailed(_NOT_FINISHED)
        else:
            head: dict[str, object] = {
                "id": self._message_id,
                "type": "message",
                "role": "assistant",
                "model": self._context.model,
            }
            return render_whole(choice, choice.message, head=head, usage=piece.usage, make_id=self._make_call_id)
        return b""

    @property
    def _message_id(self) -> str:
        return f"msg_{self._id}"

    def _make_call_id(self, number: int) -> str:
        return f"toolu_{self._id}_{number}"

    def _gather(self, piece: bytes) -> bytes:
        """Collect an event that is larger than what the cutter holds; return it once it is whole."""
        self._large += piece
        if len(self._large) > limits().gateway.messages_event_bytes:
            self._failure = StreamTooLarge()
            self._large = b""
        if self._cutter.is_inside_event or not piece:
            return b""
        whole, self._large = self._large, b""
        return whole

    def _take_all(self, whole: bytes) -> bytes:
        out = []
        for payload in list_payloads(whole):
            out.append(self._take(payload))
            if self._failure is not None:
                break
        return b"".join(out)

    def _take_rest(self, rest: bytes) -> bytes:
        """Take what stood behind the last blank line: an event without its end, if it is whole in itself."""
        out = b""
        for payload in list_payloads(rest):
            try:
                _ = payload == _DONE or read_chat(payload)
            except UNREADABLE:
                break
            out += self._take(payload)
        return out

    def _take(self, payload: bytes) -> bytes:
        """Take one chunk; return the events it becomes."""
        try:
            piece = read_chat(payload)
        except UNREADABLE:
            return self._take_other(payload)
        if piece.error is not None:
            self._failure = read_stream_failure(_encode(piece.error))
            return b""
        if piece.usage is not None:
            self._usage = piece.usage
        choices = piece.choices
        if not choices:
            if piece.usage is None and _ERROR_OBJECT.search(payload):
                self._failure = read_refusal(502, payload)
            return b""
        out = [] if self._has_started else [self._start()]
        for choice in choices:
            if choice.index:
                continue
            delta = choice.delta
            if delta is not None:
                out.append(self._take_delta(delta))
            if choice.finish_reason:
                self._take_end(choice)
            if self._failure is not None:
                break
        return b"".join(out)

    def _take_delta(self, delta: ChatMessage) -> bytes:
        content, thought, strands = delta.content, delta.reasoning_content or delta.reasoning, self._strands
        if not delta.tool_calls and not delta.refusal:
            if not thought and (strands.open_kind is _TEXT or not content):
                return strands.prefix + _encode(content) + _DELTA_END if content else b""
            if not content and strands.open_kind is _THINKING:
                return strands.prefix + _encode(thought) + _DELTA_END
        out = []
        try:
            if thought:
                out.append(strands.add(_THINKING, thought))
            if content:
                out.append(strands.add(_TEXT, content))
            if delta.refusal:
                self._refuses = True
                out.append(strands.add(_TEXT, delta.refusal))
            out.extend(strands.add_call(part) for part in delta.tool_calls or ())
        except ForwardedRequestFailed as error:
            self._failure = error
        return b"".join(out)

    def _take_end(self, choice: ChatChoice) -> None:
        self._finish_reason = choice.finish_reason
        self._stopped_by = choice.stopped_by
        if choice.finish_reason in FAILED_FINISHES:
            self._failure = ForwardedRequestFailed(_NOT_FINISHED)

    def _take_other(self, payload: bytes) -> bytes:
        if payload == _DONE:
            self._is_done = True
        elif not self._is_done:
            self._failure = ForwardedRequestFailed(_NOT_CHAT)
        return b""

    def _start(self) -> bytes:
        self._has_started = True
        return events.render_message_start(self._message_id, self._context.model, self._usage)
