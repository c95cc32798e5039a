"""What the engine says, apart from any API: thoughts, text, refusal and tool calls in pieces, an ending and token counts.

Requirements compare with these constants, so they stand here once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any  # request bodies are JSON

from conformance.engine.script import TOOL_DIRECTIVES, Script, ends_with_result

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
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def completion_tokens(self) -> int:
        """One for each piece, which is how the engine counts."""
        arguments = sum(len(call.pieces) for call in self.calls)
        return len(self.thoughts) + len(self.pieces) + len(self.refusal) + arguments


def compose(script: Script, body: Mapping[str, Any], echo: Mapping[str, Any], said: str | None) -> Speech:
    """Return what to say to a request. ``echo``: the request as it came; ``said``: a text decided elsewhere."""
    if said is not None:
        return Speech(pieces=(said,))
    if script.arguments.keys() & TOOL_DIRECTIVES:
        return _call_tools(script, body)
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


def _call_tools(script: Script, body: Mapping[str, Any]) -> Speech:
    if ends_with_result(body):
        return Speech(pieces=("The tool ", "has answered."))
    first = ToolCall(CALL_ID, TOOL, ARGUMENTS)
    pair = (first, ToolCall(OTHER_CALL_ID, OTHER_TOOL, OTHER_ARGUMENTS))
    if "parallel_tools" in script:
        return Speech(calls=pair, ending=Ending.TOOL_CALLS)
    if "interleaved_tools" in script:
        return Speech(calls=pair, interleaved=True, ending=Ending.TOOL_CALLS)
    if "whole_tools" in script:
        return Speech(calls=(ToolCall(CALL_ID, TOOL, ("".join(ARGUMENTS),), whole=True),), ending=Ending.TOOL_CALLS)
    if "nasty_arguments" in script:
        return Speech(calls=(ToolCall(CALL_ID, TOOL, tuple(NASTY)),), ending=Ending.TOOL_CALLS)
    text = TEXT_PIECES if "text_then_tools" in script else ()
    thoughts = THOUGHT_PIECES if "thinking" in script else ()
    return Speech(thoughts=thoughts, pieces=text, calls=(first,), ending=Ending.TOOL_CALLS)


def _first_stop(body: Mapping[str, Any]) -> str | None:
    asked = body.get("stop") or body.get("stop_sequences")
    if isinstance(asked, list):
        return str(asked[0]) if asked else None
    return asked if isinstance(asked, str) else None


def _cut(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
