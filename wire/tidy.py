"""Chat streams put right for strict clients: engines send chunks that the published schema does not allow. Pure.

OpenAI's own SDKs join the pieces of a tool call by adding texts, so an ``id`` that is null, empty or said again breaks them.
Their helpers want a role in the first delta. What is in order goes out byte for byte.
Source: OpenAI API reference, "Chat streaming".
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any  # chunks are JSON

import msgspec

from wire.events import EventCutter
from wire.limits import WIRE
from wire.unreadable import UNREADABLE

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class _Call:
    """A tool call as the client knows it. ``engine_id``: what the engine calls it, empty = it never said."""

    index: int
    engine_id: str
    name: str


@dataclass(slots=True)
class _Choice:
    """One of ``n`` answers. ``calls`` by the engine's own index of them, the newest of each."""

    has_role: bool = False
    calls: dict[int, _Call] = field(default_factory=dict)
    count: int = 0


class ChatTidier:
    """The events of one chat stream. Bytes may be cut anywhere; whole events come out."""

    __slots__ = ("_choices", "_cutter")

    def __init__(self) -> None:
        self._cutter = EventCutter()
        self._choices: dict[int, _Choice] = {}

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine's stream; return those for the client."""
        return self._tidy(self._cutter.feed(data))

    def finish(self) -> bytes:
        """Return what is left at the end: part of an event, as it is."""
        return self._cutter.finish()

    def _tidy(self, events: bytes) -> bytes:
        if b"data:" not in events:
            return events
        if b"\r" in events:
            events = events.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        return b"\n\n".join([self._tidy_event(event) for event in events.split(b"\n\n")])

    def _tidy_event(self, event: bytes) -> bytes:
        if not event.startswith(b"data:") or b"\n" in event or not event[5:].lstrip().startswith(b"{"):
            return event
        try:
            chunk = _decode(event[5:])
        except UNREADABLE:
            return event
        return b"data: " + _encode(chunk) if self._change(chunk) else event

    def _change(self, chunk: dict[str, Any]) -> bool:
        """Put a chunk right in place; return whether anything was changed."""
        if "error" in chunk:
            return False
        choices = chunk.get("choices")
        if choices is None and isinstance(chunk.get("usage"), dict):
            chunk["choices"] = []
            return True
        changed = False
        for choice in choices if isinstance(choices, list) else []:
            delta = choice.get("delta") if isinstance(choice, dict) else None
            index = choice.get("index", 0) if isinstance(choice, dict) else 0
            if (
                isinstance(delta, dict)
                and isinstance(index, int)
                and (index in self._choices or len(self._choices) < WIRE.answer_choices)
            ):
                changed |= self._change_delta(self._choices.setdefault(index, _Choice()), delta)
        return changed

    def _change_delta(self, choice: _Choice, delta: dict[str, Any]) -> bool:
        changed = False
        if not choice.has_role:
            choice.has_role = True
            if not delta.get("role"):
                delta["role"], changed = "assistant", True
        elif "role" in delta:
            # The engine says it again, or null.
            del delta["role"]
            changed = True
        if "tool_calls" not in delta:
            return changed
        calls = delta["tool_calls"]
        if not calls:
            # The list is null or empty, which hides the text from some clients (litellm#29286).
            del delta["tool_calls"]
            return True
        if isinstance(calls, dict):
            # Older TGI sends the one call itself.
            calls = delta["tool_calls"] = [calls]
            changed = True
        for position, call in enumerate(calls if isinstance(calls, list) else []):
            if isinstance(call, dict):
                changed |= _change_call(choice, call, position)
        return changed


def _change_call(choice: _Choice, call: dict[str, Any], position: int) -> bool:
    """Put one piece of a tool call right; return whether it was wrong."""
    before = _encode(call)
    given, said = call.get("index"), call.get("id")
    named: str = said if isinstance(said, str) else ""
    function = call.get("function")
    if not isinstance(function, dict):
        function = call["function"] = {}
    named_as = function.get("name")
    name: str = named_as if isinstance(named_as, str) else ""
    key = given if isinstance(given, int) else _guess_index(choice, named=named, name=name, position=position)
    known = choice.calls.get(key)
    is_new = known is None or bool(named and known.engine_id and named != known.engine_id)
    if is_new and choice.count < WIRE.answer_calls:
        known = choice.calls[key] = _Call(choice.count, named, name)
        choice.count += 1
        call["id"] = named or f"call_{secrets.token_hex(12)}"
        call["type"] = call.get("type") or "function"
    elif known is not None:
        # The first piece of the call has said them: the SDKs would add the texts up.
        for wrong in ("id", "type"):
            call.pop(wrong, None)
        if not name or name == known.name:
            function.pop("name", None)
    if known is not None:
        call["index"] = known.index
    arguments = function.get("arguments")
    if isinstance(arguments, dict | list):
        function["arguments"] = _encode(arguments).decode()
    elif arguments is None and (is_new or "arguments" in function):
        function["arguments"] = ""
    return _encode(call) != before


def _guess_index(choice: _Choice, *, named: str, name: str, position: int) -> int:
    """Return the engine's index of a piece that has none."""
    for index, call in choice.calls.items():
        if named and call.engine_id == named:
            return index
    # A piece with a new id or a name begins a call; one without belongs to the newest.
    if named or name or not choice.calls:
        return choice.count
    return max(choice.calls) if position == 0 else position
