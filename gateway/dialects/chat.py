"""Chat completions as engines answer them, as far as other dialects need it: one decoder for chunks and whole answers.

Engines differ: reasoning is ``reasoning_content`` (llama.cpp, older vLLM) or ``reasoning`` (vLLM), ids come late or never,
errors arrive inside a stream. Source: OpenAI API reference, "Chat" and "Chat streaming".
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from gateway.dialects.body import is_crowded
from wire.bridge import TokenCounts
from wire.limits import WIRE

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class ObjectScan:
    """Follows the pieces of a JSON object to its end, wherever they are cut, and keeps none of them."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "is_complete")

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False
        """Whether the object has ended; what follows may be white space only."""

    def feed(self, piece: str) -> str:
        """Take the next piece. Returns what of it lies behind the end of the object."""
        at = 0
        if self._is_escaped and piece:
            at, self._is_escaped = 1, False
        while not self.is_complete:
            found = (_IN_STRING if self._is_in_string else _OUTSIDE).search(piece, at)
            if found is None:
                return ""
            at = found.end()
            mark = found.group()
            if mark == "\\":
                at += 1
                if at > len(piece):
                    self._is_escaped = True
                    return ""
            elif mark == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                self.is_complete = self._depth == 0
        return piece[at:]


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


class PromptDetails(msgspec.Struct, gc=False):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int | None = None
    audio_tokens: int | None = None


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
        """Tokens of the prompt, cached ones among them."""
        return max(0, self.prompt_tokens or 0)

    @property
    def completion(self) -> int:
        """Tokens of the answer, thought ones among them."""
        return max(0, self.completion_tokens or 0)

    @property
    def cached(self) -> int:
        """Tokens of the prompt that came from a cache."""
        details = self.prompt_tokens_details
        return max(0, details.cached_tokens or 0) if details is not None else 0

    @property
    def thought(self) -> int | None:
        """Tokens of the answer that were thought; None = the engine does not say."""
        details = self.completion_tokens_details
        return None if details is None or details.reasoning_tokens is None else max(0, details.reasoning_tokens)

    def to_counts(self) -> TokenCounts:
        """Return the counts that are written down; their sum is ours, for clients reckon it too."""
        return TokenCounts(
            prompt_tokens=self.prompt, completion_tokens=self.completion, total_tokens=self.prompt + self.completion
        )


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
