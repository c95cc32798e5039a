"""Chat completions as engines answer them, as far as other dialects need it, and the contract of a translation to them.

A translation is chosen once a node is found that does not speak the caller's dialect. Whoever writes one keeps to this:
what cannot be carried is refused by name (``BadRequest(param=...)``), what may be left out is listed in ``ignored``, and
an answer never pretends to be whole: after a failure there is no closing event.

One decoder reads chunks and whole answers. Engines differ: reasoning is ``reasoning_content`` (llama.cpp, older vLLM) or
``reasoning`` (vLLM), ids come late or never, errors arrive inside a stream. Source: OpenAI API reference, "Chat" and
"Chat streaming".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from core.limits import limits
from gateway.dialects.body import is_crowded
from gateway.dialects.refusal import read_refusal, read_stream_failure
from gateway.errors import ForwardedRequestFailed, GatewayError, RequestInterrupted, StreamTooLarge
from wire import clock
from wire.bridge import TokenCounts
from wire.events import EventCutter
from wire.limits import WIRE
from wire.unreadable import UNREADABLE
from wire.usage import PromptDetails, count_tokens


@dataclass(frozen=True, slots=True)
class AnswerContext:
    """What an answer may say about its circumstances. ``created``: Unix seconds.

    ``clock``: monotonic seconds, read when the answer is opened, at its first text and at its end. ``received_at``: what it
    showed when the request came in, None = nobody noted it.
    """

    request_id: str
    model: str
    created: int
    clock: Callable[[], float] = clock.monotonic
    received_at: float | None = None


class AnswerTranslator(Protocol):
    """One attempt's answer. Streamed: ``feed`` …, then ``finish``. Whole: ``translate_whole``. Never both."""

    @property
    def usage(self) -> TokenCounts | None:
        """What the engine counted, as far as it said."""

    @property
    def failure(self) -> GatewayError | None:
        """Why the answer is over, if it is: an error in the stream, or bytes that are no chat answer.

        Set by ``feed``, ``finish`` or ``translate_whole``; whoever called says it in the client's dialect and ends.
        """

    @property
    def kept(self) -> bytes | None:
        """The whole answer as one JSON object of this dialect once it is finished, for surfaces that keep answers."""

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine's event stream, cut anywhere; return whole events of this dialect, or nothing."""

    def finish(self) -> bytes:
        """Return the closing events. An engine that ended before its answer was whole is a ``failure``, not an end."""

    def translate_whole(self, body: bytes) -> bytes:
        """Return an unstreamed answer (HTTP 2xx) in this dialect."""


@runtime_checkable
class FailingTranslator(Protocol):
    """A translator of a dialect that ends a broken stream with more than one line about the error."""

    def fail(self, error: GatewayError) -> bytes:
        """Return the events that end the stream with this error."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A request as the node gets it. ``path``: the API path it is asked on. ``ignored``: names of fields that were left out."""

    path: str
    body: bytes
    open_answer: Callable[[AnswerContext], AnswerTranslator]
    ignored: tuple[str, ...] = ()


class FunctionPart(msgspec.Struct, gc=False):
    """Name and arguments of a call, or the next piece of them. ``given``: arguments as they came."""

    name: str | None = None
    given: str | dict[str, object] | None = msgspec.field(default=None, name="arguments")

    @property
    def arguments(self) -> str | None:
        """The arguments, or the next piece of them, as text; some engines send the object itself, in one piece."""
        given = self.given
        return msgspec.json.encode(given).decode() if isinstance(given, dict) else given


class ToolCallPart(msgspec.Struct):
    """A tool call, or the next piece of one. Pieces of one call share ``index``."""

    index: int | None = None
    id: str | None = None
    function: FunctionPart | None = None


class ChatMessage(msgspec.Struct):
    """``message`` of a whole answer, ``delta`` of a chunk."""

    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallPart] | None = None

    @property
    def thought(self) -> str:
        """The reasoning text under whichever name it came; an engine that sends both means the same text."""
        return self.reasoning_content or self.reasoning or ""


class ChatChoice(msgspec.Struct):
    """One of ``n`` answers. ``stop_reason`` (vLLM) or ``matched_stop`` (SGLang): the stop sequence that ended it, or a token.

    ``logprobs``: JSON as it came, None = none.
    """

    index: int = 0
    delta: ChatMessage | None = None
    message: ChatMessage | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    matched_stop: int | str | None = None
    logprobs: object = None

    @property
    def stopped_by(self) -> int | str | None:
        """The stop sequence, or the id of the stop token, that ended it, from engines that say it."""
        return self.matched_stop if self.stop_reason is None else self.stop_reason


class CompletionDetails(msgspec.Struct, gc=False):
    """``usage.completion_tokens_details``."""

    reasoning_tokens: int | None = None


class ChatUsage(msgspec.Struct):
    """Token counts of a chat answer as the engine says them; the properties are never below zero."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None

    @property
    def prompt(self) -> int:
        return max(0, self.prompt_tokens or 0)

    @property
    def completion(self) -> int:
        return max(0, self.completion_tokens or 0)

    @property
    def cached(self) -> int:
        details = self.prompt_tokens_details
        return max(0, details.cached_tokens or 0) if details is not None else 0

    @property
    def thought(self) -> int | None:
        """Tokens of the answer that were thought; None = the engine does not say."""
        details = self.completion_tokens_details
        return None if details is None or details.reasoning_tokens is None else max(0, details.reasoning_tokens)

    def to_counts(self) -> TokenCounts | None:
        """Return the counts that are written down, None when nobody can say; their sum is ours, for clients reckon it too."""
        return count_tokens(self.prompt_tokens, self.completion_tokens, cached=self.cached)


class ChatTimings(msgspec.Struct):
    """llama.cpp's own measurements."""

    prompt_ms: float | None = None
    predicted_ms: float | None = None


class ChatPiece(msgspec.Struct):
    """One chunk of a chat stream, or a whole chat answer. ``error``: JSON, not None = the engine failed after it had begun."""

    id: str | None = None
    created: int | None = None
    model: str | None = None
    choices: list[ChatChoice] = []
    usage: ChatUsage | None = None
    timings: ChatTimings | None = None
    error: object = None


chat_decoder = msgspec.json.Decoder(ChatPiece)


def read_chat(data: bytes) -> ChatPiece:
    """Return a chunk or a whole answer. Raises one of UNREADABLE for what is none, or holds more values than any does."""
    if len(data) > WIRE.body_marks and is_crowded(data):
        raise msgspec.DecodeError(f"more than {WIRE.body_marks} values")
    return chat_decoder.decode(data)


def list_payloads(events: bytes) -> Iterator[bytes]:
    """Yield the data of whole events (``EventCutter`` cuts them), comments and empty events left out.

    An engine's events have one ``data`` line each; several lines of one event are joined by a newline (WHATWG HTML 9.2.6).
    """
    if b"\r" in events:
        events = events.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for event in filter(None, events.split(b"\n\n")):
        if event.startswith(b"data:") and b"\n" not in event:
            payload = event[5:].strip()
        else:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            payload = b"\n".join(lines).strip()
        if payload:
            yield payload


FAILED_FINISHES = frozenset({"abort", "error"})
"""What vLLM says when it stopped for a reason of its own: no answer."""
_DONE = b"[DONE]"
_ERROR_OBJECT = re.compile(rb'"object"\s*:\s*"error"')
_NOT_CHAT = "The engine's answer is no chat completion."
_NOT_FINISHED = "The engine ended its answer before it was finished."


class ChatReader:
    """Reads an engine's chat answer, streamed or whole, for a dialect that says it in its own words.

    A dialect hears ``_begin`` before the first choice and ``_take_choice`` for each piece of the first of ``n`` answers; that
    may raise ForwardedRequestFailed or StreamTooLarge. After a ``failure`` nothing more is read.
    """

    __slots__ = ("_cutter", "_failure", "_finish_reason", "_is_done", "_large", "_stopped_by", "_timings", "_usage")

    def __init__(self) -> None:
        self._cutter = EventCutter()
        self._large: list[bytes] = []
        """Of an event that is larger than what the cutter holds."""
        self._is_done = False
        self._finish_reason: str | None = None
        self._stopped_by: int | str | None = None
        self._usage: ChatUsage | None = None
        self._timings: ChatTimings | None = None
        self._failure: GatewayError | None = None

    @property
    def usage(self) -> TokenCounts | None:
        return None if self._usage is None else self._usage.to_counts()

    @property
    def failure(self) -> GatewayError | None:
        return self._failure

    def _begin(self) -> None:
        """Hear that the engine has begun to answer; of a stream this comes again with each piece."""
        raise NotImplementedError

    def _take_choice(self, choice: ChatChoice) -> None:
        raise NotImplementedError

    def _read(self, data: bytes) -> None:
        """Take bytes of a stream, cut anywhere."""
        events = self._cutter.feed(data)
        if self._large or self._cutter.is_inside_event:
            events = self._gather(events)
        if not events:
            return
        if events.startswith(b"data: {") and events.find(b"\n") == len(events) - 2:
            self._take_payload(events[6:-2])  # the usual case, one event of one line
            return
        for payload in list_payloads(events):
            self._take_payload(payload)
            if self._failure is not None:
                return

    def _read_rest(self) -> None:
        """Take what stood behind the last blank line: an event without its end, if it is whole in itself."""
        for payload in list_payloads(b"".join(self._large) + self._cutter.finish()):
            try:
                _ = payload == _DONE or read_chat(payload)
            except UNREADABLE:
                break
            self._take_payload(payload)
        if self._failure is None and self._finish_reason is None and not self._is_done:
            self._failure = RequestInterrupted(_NOT_FINISHED)

    def _read_whole(self, body: bytes) -> None:
        try:
            answer = read_chat(body)
        except UNREADABLE:
            answer = ChatPiece()
        self._usage = answer.usage
        has_answer = any(choice.index == 0 and choice.message is not None for choice in answer.choices)
        if answer.error is None and not has_answer:
            is_error = _ERROR_OBJECT.search(body) is not None
            self._failure = read_refusal(502, body) if is_error else ForwardedRequestFailed(_NOT_CHAT)
            return
        for choice in answer.choices:  # there, each piece of a call is a call
            for number, part in enumerate((choice.message.tool_calls if choice.message is not None else None) or ()):
                part.index = number
        self._take_piece(answer, body)

    def _gather(self, events: bytes) -> bytes:
        self._large.append(events)
        if sum(map(len, self._large)) > limits().gateway.chat_event_bytes:
            self._failure = StreamTooLarge()
            self._large.clear()
        if self._cutter.is_inside_event or not events:
            return b""
        whole = b"".join(self._large)
        self._large.clear()
        return whole

    def _take_payload(self, payload: bytes) -> None:
        try:
            piece = read_chat(payload)
        except UNREADABLE:
            if payload == _DONE:
                self._is_done = True
            elif not self._is_done:
                self._failure = ForwardedRequestFailed(_NOT_CHAT)
            return
        self._take_piece(piece, payload)

    def _take_piece(self, piece: ChatPiece, text: bytes) -> None:
        if piece.error is not None:
            self._failure = read_stream_failure(msgspec.json.encode(piece.error))
            return
        if piece.usage is not None:
            self._usage = piece.usage
        if piece.timings is not None:
            self._timings = piece.timings
        choices = piece.choices
        if not choices:
            if piece.usage is None and _ERROR_OBJECT.search(text):
                self._failure = read_refusal(502, text)
            return
        self._begin()
        for choice in choices:
            if choice.index:
                continue
            try:
                self._take_choice(choice)
            except (ForwardedRequestFailed, StreamTooLarge) as error:
                self._failure = error
            if choice.finish_reason:
                self._finish_reason, self._stopped_by = choice.finish_reason, choice.stopped_by
                if choice.finish_reason in FAILED_FINISHES:
                    self._failure = ForwardedRequestFailed(_NOT_FINISHED)
            if self._failure is not None:
                return
