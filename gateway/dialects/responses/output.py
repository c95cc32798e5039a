"""Output items while they grow, and the events that tell of it: each is added, filled, done, and then in the final object.

Strict readers hold a stream to this: ids and types never change, an output index belongs to one item, every item is
finished. Calls that an engine interleaves stay open side by side under indexes of their own.
Source: OpenAI API reference, "Responses streaming"; openai-python 3 and openai-node 7, response accumulators.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from gateway.dialects.object_scan import ObjectScan
from gateway.dialects.responses.object import Status, write_event
from gateway.dialects.responses.tools import CallKind, ToolName, unwrap_input
from wire.unreadable import UNREADABLE

_encode = msgspec.json.Encoder().encode
_NO_ARGUMENTS = "{}"


class EventLog:
    """Numbers events and keeps them until they are taken. Silent: for answers that are not streamed, so none need be made."""

    __slots__ = ("_next", "_waiting", "is_silent")

    def __init__(self, *, is_silent: bool = False) -> None:
        self.is_silent = is_silent
        self._next = 1 if is_silent else 0
        self._waiting: list[bytes] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever said; a silent one is as good as full."""
        return self._next == 0

    def add(self, name: bytes, members: bytes) -> None:
        """Add an event. ``members``: what it has beside type and number, as JSON without braces."""
        if not self.is_silent:
            self._waiting.append(write_event(name, self._next, members))
            self._next += 1

    def add_delta(self, head: bytes, text: str) -> None:
        """Add the next piece of a text. ``head``: the event up to its number."""
        if not self.is_silent:
            self._waiting.append(b'%b%d,"delta":%b}\n\n' % (head, self._next, _encode(text)))
            self._next += 1

    def take(self) -> bytes:
        """Return what was added since the last time."""
        waiting = self._waiting
        if len(waiting) == 1:
            return waiting.pop()
        taken = b"".join(waiting)
        waiting.clear()
        return taken


class OutputItem(Protocol):
    """An item of the output."""

    @property
    def is_open(self) -> bool:
        """Whether it may still grow."""

    def close(self, status: Status) -> None:
        """Finish it; nothing happens when it is finished already."""

    def render(self) -> bytes:
        """Return the item as JSON."""


class PartKind(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A kind of content part, the item that holds it, and the names of its events."""

    part: bytes
    item: bytes
    prefix: str
    text_key: bytes
    delta: bytes
    done: bytes


TEXT = PartKind(
    part=b"output_text",
    item=b"message",
    prefix="msg",
    text_key=b"text",
    delta=b"response.output_text.delta",
    done=b"response.output_text.done",
)
REFUSAL = PartKind(
    part=b"refusal",
    item=b"message",
    prefix="msg",
    text_key=b"refusal",
    delta=b"response.refusal.delta",
    done=b"response.refusal.done",
)
THOUGHT = PartKind(
    part=b"reasoning_text",
    item=b"reasoning",
    prefix="rs",
    text_key=b"text",
    delta=b"response.reasoning_text.delta",
    done=b"response.reasoning_text.done",
)


@dataclass(slots=True)
class _Part:
    kind: PartKind
    head: bytes
    """A delta event up to its number."""
    where: bytes
    """The members that name the part in every other event."""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def render(self) -> bytes:
        text = _encode(self.text)
        if self.kind is not TEXT:
            return b'{"type":"%b","%b":%b}' % (self.kind.part, self.kind.text_key, text)
        return b'{"type":"output_text","annotations":[],"logprobs":[%b],"text":%b}' % (b",".join(self.logprobs), text)


class SpokenItem:
    """A message or a thought: parts of text, one after the other.

    ``repeats_text``: a message has its text beside its parts too, for readers of llm-pool's shape.
    """

    __slots__ = ("_head", "_index", "_item_id", "_log", "_parts", "_repeats_text", "_status", "kind", "part")

    def __init__(self, kind: PartKind, *, item_id: str, index: int, log: EventLog, repeats_text: bool) -> None:
        self.kind = kind
        self.part: _Part | None = None
        """The part that grows."""
        self._item_id = item_id
        self._index = index
        self._log = log
        self._repeats_text = repeats_text and kind.item == b"message"
        self._parts: list[_Part] = []
        self._status = Status.IN_PROGRESS
        if not log.is_silent:
            log.add(b"response.output_item.added", b'"output_index":%d,"item":%b' % (index, self.render()))

    @property
    def is_open(self) -> bool:
        """Whether it may still grow."""
        return self._status is Status.IN_PROGRESS

    @property
    def text(self) -> str:
        """What it says, refusals left out."""
        return "".join(part.text for part in self._parts if part.kind is not REFUSAL)

    def say(self, kind: PartKind, text: str, logprobs: bytes = b"") -> None:
        """Add text to its last part, or to a new one if that is of another kind. ``logprobs``: JSON without brackets."""
        part = self.part
        if part is None or part.kind is not kind:
            part = self._open_part(kind)
        part.pieces.append(text)
        if not logprobs:
            self._log.add_delta(part.head, text)
            return
        part.logprobs.append(logprobs)
        self._log.add(kind.delta, b'%b,"logprobs":[%b],"delta":%b' % (part.where, logprobs, _encode(text)))

    def add_logprobs(self, logprobs: bytes) -> None:
        """Note numbers of tokens that had no text of their own."""
        if logprobs and self.part is not None and self.part.kind is TEXT:
            self.part.logprobs.append(logprobs)

    def close(self, status: Status) -> None:
        """Finish it."""
        if self.is_open:
            self._close_part()
            self._status = status
            if not self._log.is_silent:
                self._log.add(b"response.output_item.done", b'"output_index":%d,"item":%b' % (self._index, self.render()))

    def render(self) -> bytes:
        """Return the item as JSON."""
        content = b",".join([part.render() for part in self._parts])
        head = b'{"id":%b,"type":"%b","status":"%b"' % (_encode(self._item_id), self.kind.item, self._status.encode())
        if self.kind.item == b"reasoning":
            return b'%b,"summary":[],"content":[%b]}' % (head, content)
        extra = b',"text":' + _encode(self.text) if self._repeats_text else b""
        return b'%b,"role":"assistant","content":[%b]%b}' % (head, content, extra)

    def _open_part(self, kind: PartKind) -> _Part:
        self._close_part()
        place = (_encode(self._item_id), self._index, len(self._parts))
        where = b'"item_id":%b,"output_index":%d,"content_index":%d' % place
        logprobs = b',"logprobs":[]' if kind is TEXT else b""
        head = b'event: %b\ndata: {"type":"%b",%b%b,"sequence_number":' % (kind.delta, kind.delta, where, logprobs)
        self.part = part = _Part(kind, head, where)
        self._log.add(b"response.content_part.added", b'%b,"part":%b' % (where, part.render()))
        self._parts.append(part)
        return part

    def _close_part(self) -> None:
        part, self.part = self.part, None
        if part is None or self._log.is_silent:
            return
        members = b'%b,"%b":%b' % (part.where, part.kind.text_key, _encode(part.text))
        if part.kind is TEXT:
            members += b',"logprobs":[%b]' % b",".join(part.logprobs)
        self._log.add(part.kind.done, members)
        self._log.add(b"response.content_part.done", b'%b,"part":%b' % (part.where, part.render()))


_CALL_PREFIXES = {CallKind.FUNCTION: "fc", CallKind.CUSTOM: "ctc", CallKind.SEARCH: "tsc"}


class CallItem:
    """A call of a tool. Only a function's arguments are told while they grow: the others have to be read as a whole first."""

    __slots__ = ("_call_id", "_head", "_index", "_item_id", "_log", "_pieces", "_scan", "_scanned", "_status", "_tool")

    def __init__(self, tool: ToolName, *, call_id: str, stem: str, index: int, log: EventLog) -> None:
        self._tool = tool
        self._call_id = call_id
        self._item_id = f"{_CALL_PREFIXES[tool.kind]}_{stem}_{index}"
        self._index = index
        self._log = log
        self._pieces: list[str] = []
        self._scan = ObjectScan()
        self._scanned = 0
        """How many pieces were scanned."""
        self._status = Status.IN_PROGRESS
        name = b"response.function_call_arguments.delta"
        place = (name, name, _encode(self._item_id), index)
        self._head = b'event: %b\ndata: {"type":"%b","item_id":%b,"output_index":%d,"sequence_number":' % place
        if not log.is_silent:
            log.add(b"response.output_item.added", b'"output_index":%d,"item":%b' % (index, self.render()))

    @property
    def is_open(self) -> bool:
        """Whether it may still grow."""
        return self._status is Status.IN_PROGRESS

    def is_whole(self) -> bool:
        """Whether its arguments so far are an object to its end."""
        for number in range(self._scanned, len(self._pieces)):
            self._scan.feed(self._pieces[number])
        self._scanned = len(self._pieces)
        return self._scan.is_complete

    def add_arguments(self, piece: str) -> None:
        """Add the next piece of the arguments, which is JSON text cut anywhere."""
        self._pieces.append(piece)
        if self._tool.kind is CallKind.FUNCTION:
            self._log.add_delta(self._head, piece)

    def close(self, status: Status) -> None:
        """Finish it. A whole call without arguments has an empty object of them: readers parse the text."""
        if not self.is_open:
            return
        if status is Status.COMPLETED and not "".join(self._pieces).strip():
            self.add_arguments(_NO_ARGUMENTS)
        self._status = status
        if self._log.is_silent:
            return
        members = b'"item_id":%b,"output_index":%d' % (_encode(self._item_id), self._index)
        if self._tool.kind is CallKind.FUNCTION:
            said = (members, _encode(self._tool.name), _encode("".join(self._pieces)))
            self._log.add(b"response.function_call_arguments.done", b'%b,"name":%b,"arguments":%b' % said)
        elif self._tool.kind is CallKind.CUSTOM:
            text = _encode(self._read_input())
            self._log.add(b"response.custom_tool_call_input.delta", b'%b,"delta":%b' % (members, text))
            self._log.add(b"response.custom_tool_call_input.done", b'%b,"input":%b' % (members, text))
        self._log.add(b"response.output_item.done", b'"output_index":%d,"item":%b' % (self._index, self.render()))

    def render(self) -> bytes:
        """Return the item as JSON."""
        tool = self._tool
        fields: dict[str, object] = {
            "id": self._item_id,
            "type": tool.kind.value,
            "status": self._status.value,
            "call_id": self._call_id,
        }
        if tool.kind is CallKind.SEARCH:
            fields |= {"execution": "client", "arguments": self._read_object()}
        else:
            fields["name"] = tool.name
            if tool.namespace:
                fields["namespace"] = tool.namespace
            if tool.kind is CallKind.CUSTOM:
                fields["input"] = self._read_input()
            else:
                fields["arguments"] = "".join(self._pieces)
        return _encode(fields)

    def _read_input(self) -> str:
        """Return a custom tool's text; nothing before the whole of it can be read."""
        return "" if self.is_open else unwrap_input("".join(self._pieces))

    def _read_object(self) -> object:
        try:
            return msgspec.json.decode("".join(self._pieces)) if self._pieces else {}
        except UNREADABLE:
            return {}
