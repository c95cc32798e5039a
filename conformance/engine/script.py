"""What the engine obeys: directives in the last message of the user, such as ``[[thinking]] [[slow:2]] What is new?``.

A directive that does not exist is refused with 400, so that a misspelt one never passes for a plain answer.

==================== ===============================================================================================
What is said
-------------------- -----------------------------------------------------------------------------------------------
tools                One tool call. With a tool's result as the last message: a text about that result instead.
parallel_tools       Two calls, one after the other.
interleaved_tools    Two calls whose arguments come in turns.
whole_tools          One call whose arguments come in one piece, with its name.
text_then_tools      A text, then a call.
nasty_arguments      One call with arguments full of quotes, escapes, brackets and characters of four bytes.
empty_tool_calls     A text; every piece also has ``tool_calls: []``.
thinking             Thoughts as ``reasoning_content``, then a text or a call. ``thinking:reasoning`` names them as vLLM does.
refusal              A refusal in place of a text.
length               The text is cut off by the token limit.
stop_sequence        The text ends at the first of the request's stop sequences (``stop_reason`` says which, as vLLM does).
logprobs             Log probabilities, also when the request does not ask for them.
cached               Some of the prompt's tokens come from a cache, and usage says so.
echo                 The text is JSON: ``path``, ``query``, ``headers`` and ``body`` as they reached the engine.
number:N             The text is the number N.
-------------------- -----------------------------------------------------------------------------------------------
How it is said
-------------------- -----------------------------------------------------------------------------------------------
slow:S               Nothing at all for S seconds, then the answer, or the error.
pause:S              In a stream, S seconds of silence after the first piece.
pace:MS              In a stream, MS milliseconds between two pieces.
endless:KEY          The answer does not end: a stream goes on and on, an unstreamed answer never comes.
gone:KEY             The text is ``left`` once the client of ``endless:KEY`` has left, else ``here``, or ``unknown``.
crlf                 Event lines end in CR LF, and no blank follows ``data:``.
split_events         Events are cut into pieces that are sent one by one.
comments             Comment lines between the events.
no_usage             No usage, whoever asks.
usage_in_finish      The usage is in the chunk with the finish_reason, not in one of its own.
-------------------- -----------------------------------------------------------------------------------------------
What goes wrong
-------------------- -----------------------------------------------------------------------------------------------
error_400            400 with OpenAI's error object; its code is a number. ``error_400:messages``: as vLLM says it on Messages.
error_400_context    400 in the words of llama.cpp for a prompt that does not fit; ``:vllm`` and ``:openai`` in theirs,
                     ``:answer`` in vLLM's for a prompt that leaves too little for the answer.
error_404            As error_400; so for the three below.
error_429            With Retry-After: 7.
error_500
error_503            With Retry-After: 1, for a gateway may let all others wait so long.
html_error           502 with a page of HTML.
detail_error         422 with ``{"detail": [...]}``, as FastAPI says it.
text_error           400 with ``{"error": "words"}``.
empty_error          500 with no body.
error_in_stream      Two pieces, then an error as an event, then the end (whole answer: a 500).
cut                  The connection is reset: after two pieces of a stream, inside an unstreamed body.
no_finish            A stream whose connection closes in order, but without its closing event.
garbage              An event that is not JSON (whole answer: a body that is not).
==================== ===============================================================================================
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any  # request bodies are JSON

_DIRECTIVE = re.compile(r"\[\[([a-z_0-9]+)(?::([^\]]*))?\]\]")

DIRECTIVES = frozenset({
    "tools", "parallel_tools", "interleaved_tools", "whole_tools", "text_then_tools", "nasty_arguments", "empty_tool_calls",
    "thinking", "refusal", "length", "stop_sequence", "logprobs", "cached", "echo", "number",
    "slow", "pause", "pace", "endless", "gone", "crlf", "split_events", "comments", "no_usage", "usage_in_finish",
    "error_400", "error_400_context", "error_404", "error_429", "error_500", "error_503", "html_error", "detail_error",
    "text_error", "empty_error", "error_in_stream", "cut", "no_finish", "garbage",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Script:
    """The directives of one request, each with its argument, empty when it has none."""

    arguments: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        """Whether the directive was given. A name that does not exist is a mistake in the engine."""
        assert name in DIRECTIVES, name
        return name in self.arguments

    def argument(self, name: str) -> str:
        """Return the argument of a directive; empty when it has none, or was not given."""
        return self.arguments.get(name, "")

    def seconds(self, name: str) -> float:
        """Return the argument as a number, 0 when the directive was not given."""
        return float(self.arguments.get(name) or 0)


def read_script(text: str) -> Script:
    """Return the directives in a text. Raises ValueError naming one that does not exist, or whose number is none."""
    arguments = {match[1]: match[2] or "" for match in _DIRECTIVE.finditer(text)}
    unknown = arguments.keys() - DIRECTIVES
    if unknown:
        raise ValueError(f"no such directive: {', '.join(sorted(unknown))}")
    for name in arguments.keys() & {"slow", "pause", "pace", "number"}:
        float(arguments[name])
    return Script(arguments)


def find_prompt(body: Mapping[str, Any]) -> str:
    """Return the text that may hold directives: the last message of the user, or ``prompt``, ``input`` or ``query``."""
    for name in ("messages", "input"):
        turns = body.get(name)
        if isinstance(turns, list) and turns and isinstance(turns[0], dict):
            asked = [text for turn in turns if turn.get("role") == "user" and (text := _read_text(turn.get("content")))]
            return asked[-1] if asked else ""
    for name in ("prompt", "input", "query"):
        if body.get(name):
            return _read_text(body[name])
    return ""


def _read_text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = (part if isinstance(part, str) else part.get("text", "") if isinstance(part, dict) else "" for part in content)
        return "\n".join(part for part in parts if isinstance(part, str) and part)
    return ""


def ends_with_result(body: Mapping[str, Any]) -> bool:
    """Return whether the last turn is a tool's result, upon which a model no longer calls that tool."""
    turns = body.get("messages") or body.get("input")
    if not isinstance(turns, list) or not turns or not isinstance(turns[-1], dict):
        return False
    last = turns[-1]
    if last.get("role") == "tool" or last.get("type") == "function_call_output":
        return True
    content = last.get("content")
    return isinstance(content, list) and any(isinstance(part, dict) and part.get("type") == "tool_result" for part in content)


TEXT_PIECES = ("Hello", " from the engine", ": grü", "ße, 你", "好, 🦙", "!")
TEXT = "".join(TEXT_PIECES)
THOUGHT_PIECES = ("The user ", "greets; ", "I greet back.")
THOUGHT = "".join(THOUGHT_PIECES)
REFUSAL_PIECES = ("I cannot ", "help with that.")
REFUSAL = "".join(REFUSAL_PIECES)
CUT_SHORT = "Hello from the"
BEFORE_STOP = "One, two, "

ARGUMENTS = ('{"city": "Par', 'is", "unit"', ': "celsius"}')
OTHER_ARGUMENTS = ('{"zone"', ': "Europe/Par', 'is"}')
NASTY = (
    '{"code": "if (a[\\"x\\"] == {}) { return \'\\\\n\'; }\\n\\t// \\u00fc 🦙 }]", "deep": [[{"a": [1, 2.5e-3, null]}], "]}"]}'
)
CALL_ID, OTHER_CALL_ID = "call_7Qz1", "call_9Xk2"
TOOL, OTHER_TOOL = "get_weather", "get_time"

PROMPT_TOKENS, CACHED_TOKENS = 17, 5
"""Of the prompt's tokens, ``CACHED_TOKENS`` come from a cache when the script says ``cached``."""


class Ending(StrEnum):
    """Why an answer ends, in chat's own words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call and the pieces of its arguments; ``whole``: the arguments come with the name."""

    id: str
    name: str
    pieces: tuple[str, ...]
    whole: bool = False

    @property
    def arguments(self) -> str:
        """All of the arguments."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Speech:
    """One answer. Its parts come in this order: thoughts, refusal or text, calls."""

    thoughts: tuple[str, ...] = ()
    pieces: tuple[str, ...] = ()
    refusal: tuple[str, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    interleaved: bool = False
    ending: Ending = Ending.STOP
    stopped_at: str | None = None
    cached: int = 0

    @property
    def completion_tokens(self) -> int:
        """One for each piece, which is how the engine counts."""
        arguments = sum(len(call.pieces) for call in self.calls)
        return len(self.thoughts) + len(self.pieces) + len(self.refusal) + arguments


def compose(script: Script, body: Mapping[str, Any], echo: Mapping[str, Any], said: str | None) -> Speech:
    """Return what to say to a request. ``echo``: the request as it came; ``said``: a text decided elsewhere."""
    if said is not None:
        return Speech(pieces=(said,))
    if called := [speech for name, speech in _CALLS.items() if name in script]:
        if ends_with_result(body):
            return Speech(pieces=("The tool ", "has answered."))
        return replace(called[0], thoughts=THOUGHT_PIECES if "thinking" in script else ())
    cached = CACHED_TOKENS if "cached" in script else 0
    if "echo" in script:
        return Speech(pieces=tuple(_cut(json.dumps(echo, ensure_ascii=False), 400)))
    if "number" in script:
        return Speech(pieces=(script.argument("number"),))
    if "refusal" in script:
        return Speech(refusal=REFUSAL_PIECES)
    if "length" in script:
        return Speech(pieces=tuple(_cut(CUT_SHORT, 5)), ending=Ending.LENGTH)
    if "stop_sequence" in script:
        return Speech(pieces=tuple(_cut(BEFORE_STOP, 4)), stopped_at=_first_stop(body))
    thoughts = THOUGHT_PIECES if "thinking" in script else ()
    return Speech(thoughts=thoughts, pieces=TEXT_PIECES, cached=cached)


_FIRST = ToolCall(CALL_ID, TOOL, ARGUMENTS)
_PAIR = (_FIRST, ToolCall(OTHER_CALL_ID, OTHER_TOOL, OTHER_ARGUMENTS))
# What the directives that call tools have the engine say, in the order in which they are looked for.
_CALLS = {
    "parallel_tools": Speech(calls=_PAIR, ending=Ending.TOOL_CALLS),
    "interleaved_tools": Speech(calls=_PAIR, interleaved=True, ending=Ending.TOOL_CALLS),
    "whole_tools": Speech(calls=(ToolCall(CALL_ID, TOOL, ("".join(ARGUMENTS),), whole=True),), ending=Ending.TOOL_CALLS),
    "nasty_arguments": Speech(calls=(ToolCall(CALL_ID, TOOL, tuple(NASTY)),), ending=Ending.TOOL_CALLS),
    "text_then_tools": Speech(pieces=TEXT_PIECES, calls=(_FIRST,), ending=Ending.TOOL_CALLS),
    "tools": Speech(calls=(_FIRST,), ending=Ending.TOOL_CALLS),
}


def _first_stop(body: Mapping[str, Any]) -> str | None:
    asked = body.get("stop") or body.get("stop_sequences")
    if isinstance(asked, list):
        return str(asked[0]) if asked else None
    return asked if isinstance(asked, str) else None


def _cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


CONTEXT_TOKENS, ASKED_TOKENS = 4096, 5312
FITTING_TOKENS, ANSWER_TOKENS = 3000, 2048
"""Of a prompt that fits, and of an answer that does not fit behind it."""
REASON = "the engine's own words"
"""In every error that has words: a client must get to read them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that is an error."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def find_failure(script: Script) -> Failure | None:
    """Return the error the script asks for instead of an answer, or None."""
    if "error_400_context" in script:
        return _context_failure(script.argument("error_400_context"))
    if script.argument("error_400") == "messages":
        foreign = {"type": "error", "error": {"type": "BadRequestError", "message": REASON}}
        return Failure(400, json.dumps(foreign).encode())
    for status in (400, 404, 429, 500, 503):
        if f"error_{status}" in script:
            headers = {429: {"retry-after": "7"}, 503: {"retry-after": "1"}}.get(status, {})
            return Failure(status, _openai(REASON, status), headers=headers)
    if "html_error" in script:
        page = f"<html><head><title>502 Bad Gateway</title></head><body><h1>{REASON}</h1></body></html>"
        return Failure(502, page.encode(), "text/html")
    if "detail_error" in script:
        detail = [{"loc": ["body", "temperature"], "msg": REASON, "type": "value_error"}]
        return Failure(422, json.dumps({"detail": detail}).encode())
    if "text_error" in script:
        return Failure(400, json.dumps({"error": REASON}).encode())
    if "empty_error" in script:
        return Failure(500, b"", "text/plain")
    return None


def stream_error() -> dict[str, Any]:
    """Return the object that an engine puts into a stream it cannot go on with (vLLM; llama.cpp's is the same but for code)."""
    return {"error": {"message": REASON, "type": "server_error", "param": None, "code": 500}}


def _openai(message: str, status: int, **more: Any) -> bytes:
    # In OpenAI's own error object ``code`` is a text; with vLLM and llama.cpp alike it is a number.
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status, **more}
    return json.dumps({"error": error}).encode()


def _context_failure(dialect: str) -> Failure:
    if dialect == "openai":
        text = (
            f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, your messages resulted in"
            f" {ASKED_TOKENS} tokens. Please reduce the length of the messages."
        )
        return Failure(400, _openai(text, 400, code="context_length_exceeded", param="messages"))
    if dialect == "vllm":
        text = (
            f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, you requested 64 output tokens and your"
            f" prompt contains at least {ASKED_TOKENS} input tokens, for a total of at least {ASKED_TOKENS + 64} tokens. Please"
            " reduce the length of the input prompt or the number of requested output tokens."
        )
        return Failure(400, _openai(text, 400, type="BadRequestError", param="input_tokens"))
    if dialect == "answer":
        text = (
            f"You passed {FITTING_TOKENS} input tokens and requested {ANSWER_TOKENS} output tokens. However, the model's"
            f" context length is only {CONTEXT_TOKENS} tokens, resulting in a maximum input length of"
            f" {CONTEXT_TOKENS - ANSWER_TOKENS} tokens. Please reduce the length of the input prompt."
        )
        return Failure(400, _openai(text, 400, type="BadRequestError", param="input_tokens"))
    text = f"request ({ASKED_TOKENS} tokens) exceeds the available context size ({CONTEXT_TOKENS} tokens), try increasing it"
    numbers = {"n_prompt_tokens": ASKED_TOKENS, "n_ctx": CONTEXT_TOKENS}
    return Failure(400, _openai(text, 400, type="exceed_context_size_error", **numbers))
