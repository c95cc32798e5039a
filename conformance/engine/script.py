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
error_503            With Retry-After: 7.
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

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any  # request bodies are JSON

_DIRECTIVE = re.compile(r"\[\[([a-z_0-9]+)(?::([^\]]*))?\]\]")

_SAID = {
    "tools", "parallel_tools", "interleaved_tools", "whole_tools", "text_then_tools", "nasty_arguments", "empty_tool_calls",
    "thinking", "refusal", "length", "stop_sequence", "logprobs", "cached", "echo", "number",
}  # fmt: skip
_HOW = {"slow", "pause", "pace", "endless", "gone", "crlf", "split_events", "comments", "no_usage", "usage_in_finish"}
_WRONG = {
    "error_400", "error_400_context", "error_404", "error_429", "error_500", "error_503", "html_error", "detail_error",
    "text_error", "empty_error", "error_in_stream", "cut", "no_finish", "garbage",
}  # fmt: skip
DIRECTIVES = frozenset(_SAID | _HOW | _WRONG)
TOOL_DIRECTIVES = frozenset(
    {"tools", "parallel_tools", "interleaved_tools", "whole_tools", "text_then_tools", "nasty_arguments"}
)


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
