"""Token usage: asking an engine for it in streams, taking it out of answers. Pure.

OpenAI streams report usage only when ``stream_options.include_usage`` is set, in one extra chunk with empty
``choices``. When the client did not ask, whoever stands next to the engine (the node, or the gateway for a node it calls
over HTTP) asks in its stead and keeps that chunk to itself.
"""

from __future__ import annotations

import re

import msgspec

from wire.bridge import TokenCounts
from wire.events import EventCutter
from wire.limits import WIRE
from wire.unreadable import UNREADABLE

_ASKABLE = frozenset({"/v1/chat/completions", "/v1/completions"})
_EMPTY_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_LINE_END = re.compile(rb"\r\n|\n|\r")
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")


class PoolMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """``metrics`` of llm-pool's answers: milliseconds and token counts; None = unknown.

    backend ⊂ engine ⊂ pool: each outer timer covers the inner one.
    """

    backend_inference_wall_ms: float | None = None
    engine_total_wall_ms: float | None = None
    engine_outside_backend_wall_ms: float | None = None
    pool_total_wall_ms: float | None = None
    engine_queue_wait_ms: float | None = None
    engine_tokenize_ms: float | None = None
    gpu_time_to_first_token_ms: float | None = None
    gpu_generate_total_ms: float | None = None
    gpu_decode_after_first_token_ms: float | None = None
    engine_prompt_tokens: int | None = None
    engine_output_tokens: int | None = None
    engine_tokens_per_second: float | None = None


class _Asked(msgspec.Struct):
    stream_options: dict[str, object] | None = None
    stream: bool = False


class PromptDetails(msgspec.Struct, gc=False):
    """``prompt_tokens_details`` of chat, ``input_tokens_details`` of Responses."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """``usage`` as the API families say it; None = not said."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    input_tokens_details: PromptDetails | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    @property
    def prompt(self) -> int | None:
        """The whole prompt; ``input_tokens`` of Messages is without what was read from a cache or written to one."""
        if self.prompt_tokens is not None or self.input_tokens is None:
            return self.prompt_tokens
        return self.input_tokens + (self.cache_read_input_tokens or 0) + (self.cache_creation_input_tokens or 0)

    @property
    def completion(self) -> int | None:
        return self.completion_tokens if self.completion_tokens is not None else self.output_tokens

    @property
    def cached(self) -> int | None:
        details = self.prompt_tokens_details or self.input_tokens_details
        return details.cached_tokens if details is not None else self.cache_read_input_tokens

    def to_counts(self) -> TokenCounts | None:
        return count_tokens(self.prompt, self.completion, total=self.total_tokens, cached=self.cached)


def count_tokens(
    prompt: int | None, completion: int | None, *, total: int | None = None, cached: int | None = None
) -> TokenCounts | None:
    """Return the counts that are written down and charged; None = the engine did not say, and they are estimated.

    Without the prompt nobody can say. Without a completion there was none: embeddings have none.
    """
    if prompt is None or prompt < 0:
        return None
    # Comparisons take a fifth of what max and min do, and each answer comes here.
    completion = completion if completion is not None and completion > 0 else 0
    return TokenCounts(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion if total is None or total < 0 else total,
        cached_tokens=min(max(0, cached), prompt) if cached else 0,
    )


class _Carrier(msgspec.Struct):
    usage: Usage | None = None


class _Answer(msgspec.Struct):
    """Where the three API families put usage: top level, ``message`` (Anthropic), ``response`` (Responses)."""

    usage: Usage | None = None
    message: _Carrier | None = None
    response: _Carrier | None = None
    choices: list[msgspec.Raw] | None = None


_asked_decoder = msgspec.json.Decoder(_Asked)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_answer_decoder = msgspec.json.Decoder(_Answer)
_counts_decoder = msgspec.json.Decoder(TokenCounts)


def ask_for_usage(path: str, body: bytes) -> tuple[bytes, bool]:
    """Return the body to send and whether usage was added to it, in which case the usage chunk must be dropped.

    The body stays byte for byte as it is when it is not a streamed completion, not JSON, or asks for usage itself.
    """
    if path.partition("?")[0] not in _ASKABLE:
        return body, False
    try:
        asked = _asked_decoder.decode(body)
    except UNREADABLE:
        return body, False
    if not asked.stream or (asked.stream_options or {}).get("include_usage") is True:
        return body, False
    if asked.stream_options is None and b'"stream_options"' not in body:
        start = body.index(b"{") + 1
        return b'%b"stream_options":{"include_usage":true},%b' % (body[:start], body[start:]), True
    fields = _fields_decoder.decode(body)
    options = {**(asked.stream_options or {}), "include_usage": True}
    fields["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    return msgspec.json.encode(fields), True


class StreamReader:
    """Event stream of an engine: whole events out, the last usage remembered, the unasked-for usage chunk dropped.

    ``cutter`` is for who reads thousands of chunks in a second: while it holds nothing, whole events without the word
    ``"usage"`` need not be fed.
    """

    __slots__ = ("_drops_usage", "_first", "_last", "cutter")

    def __init__(self, *, drops_usage: bool) -> None:
        self.cutter = EventCutter()
        self._drops_usage = drops_usage
        self._first = b""
        self._last = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the engine; return what may go out now."""
        was_inside = self.cutter.is_inside_event
        out = self.cutter.feed(chunk)
        if b'"usage"' not in out:
            return out
        return self._note(out, is_whole=not was_inside)

    def finish(self) -> bytes:
        """Return what is left at the end of the stream."""
        rest = self.cutter.finish()
        return self._note(rest, is_whole=True) if b'"usage"' in rest else rest

    def usage(self) -> TokenCounts | None:
        """Return the usage seen, later fields over earlier ones; None when the engine reported none."""
        found: dict[str, int] = {}
        for event in self.noted_events():
            found |= _usage_fields(_parse_event(event))
        return _count_found(found)

    def noted_events(self) -> list[bytes]:
        """Return the events seen that carry usage, oldest first: an engine puts its other numbers beside it."""
        return [event for source in dict.fromkeys((self._first, self._last)) for event in _split_events(source)]

    def _note(self, out: bytes, *, is_whole: bool) -> bytes:
        if b"_tokens" in out:
            self._first = self._first or out
            self._last = out
        if not (self._drops_usage and is_whole and _EMPTY_CHOICES.search(out)):
            return out
        return b"".join(event for event in _split_events(out) if not _is_usage_chunk(event))


class BodyReader:
    """Unstreamed answer: bytes out as they come, usage read from a copy while that stays small."""

    __slots__ = ("_copy", "_is_readable")

    def __init__(self, *, is_readable: bool) -> None:
        self._copy = bytearray()
        self._is_readable = is_readable

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the engine; return them."""
        if self._is_readable:
            self._copy += chunk
            if len(self._copy) > WIRE.usage_body_bytes:
                self._is_readable = False
                self._copy.clear()
        return chunk

    def finish(self) -> bytes:
        """Return nothing: a body is never held back."""
        return b""

    def usage(self) -> TokenCounts | None:
        """Return the usage of the answer, or None."""
        return read_body_usage(bytes(self._copy)) if self._is_readable else None


def _split_events(data: bytes) -> list[bytes]:
    """Return whole events, each with its closing blank line; joined they are ``data`` again."""
    if b"\r" not in data:
        parts = data.split(b"\n\n")
        events = [part + b"\n\n" for part in parts[:-1]]
        return [*events, parts[-1]] if parts[-1] else events
    events, start = [], 0
    while match := _BLANK_LINE.search(data, start):
        events.append(data[start : match.end()])
        start = match.end()
    return [*events, data[start:]] if start < len(data) else events


def _parse_event(event: bytes) -> _Answer | None:
    """Return the JSON of an event's data lines, or None when it has none of interest."""
    if b'"usage"' not in event:
        return None
    lines = [line[5:].removeprefix(b" ") for line in _LINE_END.split(event) if line.startswith(b"data:")]
    return _parse_answer(b"\n".join(lines))


def _parse_answer(data: bytes) -> _Answer | None:
    try:
        return _answer_decoder.decode(data)
    except UNREADABLE:
        return None


def _is_usage_chunk(event: bytes) -> bool:
    answer = _parse_event(event)
    return answer is not None and answer.choices == [] and answer.usage is not None


def _usage_fields(answer: _Answer | None) -> dict[str, int]:
    if answer is None:
        return {}
    carriers = (answer.response, answer.message)
    usage = answer.usage or next((carrier.usage for carrier in carriers if carrier and carrier.usage), None)
    if usage is None:
        return {}
    named = {"prompt": usage.prompt, "completion": usage.completion, "total": usage.total_tokens, "cached": usage.cached}
    return {name: value for name, value in named.items() if value is not None and value >= 0}


def _count_found(found: dict[str, int]) -> TokenCounts | None:
    return count_tokens(found.get("prompt"), found.get("completion"), total=found.get("total"), cached=found.get("cached"))


def read_body_usage(body: bytes) -> TokenCounts | None:
    """Return the usage of a whole answer, or None."""
    return _count_found(_usage_fields(_parse_answer(body)))


def read_token_counts(data: bytes) -> TokenCounts | None:
    """Parse token counts that ``write_token_counts`` wrote; None when they are not."""
    try:
        return _counts_decoder.decode(data.strip())
    except UNREADABLE:
        return None


def write_token_counts(usage: TokenCounts) -> bytes:
    """Return token counts as JSON."""
    return msgspec.json.encode(usage)
