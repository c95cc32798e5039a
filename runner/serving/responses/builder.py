"""The answer: a chat completion, streamed or whole, as llm-pool's JSON or its events."""

from __future__ import annotations

import secrets

import msgspec

from runner.errors import EngineUnavailable
from runner.limits import limits
from runner.serving.responses.metrics import PoolMetrics
from wire.events import EventCutter
from wire.unreadable import UNREADABLE


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's own measurements; ``tokenize_ms`` is of our own text servers."""

    tokenize_ms: float | None = None
    prompt_ms: float | None = None
    predicted_ms: float | None = None


class _Failure(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    """One event of a chat stream, or a whole chat answer."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: _Failure | str | None = None


_decoder = msgspec.json.Decoder(_Chunk)


def make_response_id() -> str:
    """Return a new id of an answer."""
    return f"resp_{secrets.token_hex(12)}"


class ResponseBuilder:
    """Collects one answer. Streamed: ``begin``, ``feed`` …, then ``finish`` or ``fail``. Whole: ``take_answer``, ``to_json``.

    What ``begin``, ``feed``, ``finish`` and ``fail`` return goes to the client as it is (text/event-stream). After an error
    event nothing more comes out, so that there is never a ``response.completed`` behind it.
    """

    def __init__(self, *, model: str, response_id: str | None = None) -> None:
        self.response_id = response_id or make_response_id()
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.tokenize_ms: float | None = None
        self.generate_ms: float | None = None
        """Prompt and decoding as the engine measured them; None for engines that do not say."""
        self.has_failed = False
        self._model = model
        self._most_chars = limits().serving.text_chars
        self._parts: list[str] = []
        self._chars = 0
        self._is_whole = False
        self._is_over = False
        self._cutter = EventCutter()

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(self._parts)

    @property
    def has_text(self) -> bool:
        """Whether a first piece of output has come."""
        return self._chars > 0

    def begin(self) -> bytes:
        """Return the event ``response.created``."""
        started = {"id": self.response_id, "object": "response", "model": self._model, "output": [], "output_text": ""}
        return _event("response.created", {"response": started})

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine's event stream; return an ``response.output_text.delta`` for each piece of text in them.

        Returns an error event when the stream holds an error or is not a chat stream.
        """
        if self._is_over:
            return b""
        out = bytearray()
        for payload in _payloads(self._cutter.feed(data)):
            if payload == b"[DONE]":
                self._is_whole = True
                continue
            try:
                piece = self._take(_decoder.decode(payload))
            except UNREADABLE:
                return bytes(out) + self.fail(EngineUnavailable.code, "the engine sent what is not a chat stream")
            except EngineUnavailable as error:
                return bytes(out) + self.fail(error.code, error.message)
            if piece:
                out += _event("response.output_text.delta", {"id": self.response_id, "delta": piece})
        return bytes(out)

    def finish(self, metrics: PoolMetrics) -> bytes:
        """Return ``response.metrics`` and ``response.completed``; an error event when the engine broke off before the end."""
        if self._is_over:
            return b""
        rest = self.feed(b"\n\n")
        if self.has_failed:
            return rest
        if not self._is_whole:
            return rest + self.fail(EngineUnavailable.code, "the engine broke off before the end of the answer")
        self._is_over = True
        completed = _event("response.completed", {"response": self._envelope(metrics)})
        return rest + _event("response.metrics", {"id": self.response_id, "metrics": metrics}) + completed

    def fail(self, code: str, message: str) -> bytes:
        """Return an error event, the last thing that comes out; nothing when the answer is over already."""
        if self._is_over:
            return b""
        self._is_over = self.has_failed = True
        return _event("error", {"id": self.response_id, "error": {"code": code, "message": message}})

    def take_answer(self, body: bytes) -> None:
        """Take a whole chat answer. Raises EngineUnavailable for one that is an error, or no chat answer."""
        try:
            answer = _decoder.decode(body)
        except UNREADABLE:
            raise EngineUnavailable("the engine answered with what is not a chat completion") from None
        if answer.error is None and not any(choice.message for choice in answer.choices):
            raise EngineUnavailable("the engine answered without a message")
        self._take(answer)
        self._is_whole = self._is_over = True

    def to_json(self, metrics: PoolMetrics) -> bytes:
        """Return the answer as one JSON body; only after ``take_answer``."""
        assert self._is_whole, "there is no answer yet"
        return msgspec.json.encode(self._envelope(metrics))

    def to_events(self, metrics: PoolMetrics) -> bytes:
        """Return the answer as the events of a stream, all at once; only after ``take_answer``."""
        assert self._is_whole, "there is no answer yet"
        delta = _event("response.output_text.delta", {"id": self.response_id, "delta": self.text})
        measured = _event("response.metrics", {"id": self.response_id, "metrics": metrics})
        return self.begin() + delta + measured + _event("response.completed", {"response": self._envelope(metrics)})

    def _take(self, chunk: _Chunk) -> str:
        if chunk.error is not None:
            words = chunk.error if isinstance(chunk.error, str) else chunk.error.message
            raise EngineUnavailable(
                f"the engine failed: {words[: limits().engines.said_chars]}" if words else "the engine failed"
            )
        self._note_numbers(chunk)
        piece = ""
        for choice in chunk.choices:
            if choice.index != 0:
                continue
            message = choice.delta or choice.message
            piece += (message.content or "") if message is not None else ""
            self._is_whole = self._is_whole or choice.finish_reason is not None
        self._chars += len(piece)
        if self._chars > self._most_chars:
            raise EngineUnavailable(f"the engine wrote more than {self._most_chars} characters")
        if piece:
            self._parts.append(piece)
        return piece

    def _note_numbers(self, chunk: _Chunk) -> None:
        usage, timings = chunk.usage, chunk.timings
        if usage is not None:
            details = usage.prompt_tokens_details
            self.prompt_tokens = self.prompt_tokens if usage.prompt_tokens is None else usage.prompt_tokens
            self.output_tokens = self.output_tokens if usage.completion_tokens is None else usage.completion_tokens
            if details is not None and details.cached_tokens is not None:
                self.cached_tokens = details.cached_tokens
        if timings is not None and timings.predicted_ms is not None:
            self.tokenize_ms = timings.tokenize_ms
            self.generate_ms = (timings.prompt_ms or 0.0) + timings.predicted_ms

    def _envelope(self, metrics: PoolMetrics) -> dict[str, object]:
        text = self.text
        return {
            "id": self.response_id,
            "object": "response",
            "model": self._model,
            "output": [{"type": "output_text", "text": text}],
            "output_text": text,
            "metrics": metrics,
        }


def _payloads(events: bytes) -> list[bytes]:
    """Return the data of whole server-sent events, comments and empty ones left out."""
    found: list[bytes] = []
    lines: list[bytes] = []
    for line in [*events.splitlines(), b""]:
        if not line and lines:
            found.append(b"\n".join(lines))
            lines = []
        elif line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
    return found


def _event(name: str, fields: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
