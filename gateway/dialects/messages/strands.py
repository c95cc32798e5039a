"""Content blocks of a streamed answer: opened, filled and closed one after the other, whatever order the engine speaks in.

A chat stream may mix pieces of several tool calls and of text; in a Messages stream one block is open at a time. Each thing
said gets a strand, in the order in which it began. The first strand is the open block; the others hold their pieces until it is
their turn, which is when the one before is whole. Tool calls are whole when their JSON is, texts when something follows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import StrEnum

from core.limits import limits
from gateway.dialects.chat import ToolCallPart
from gateway.dialects.messages import events
from gateway.dialects.messages.arguments import read_arguments
from gateway.dialects.object_scan import ObjectScan
from gateway.errors import ForwardedRequestFailed, StreamTooLarge
from wire.limits import WIRE


class Kind(StrEnum):
    """What a strand carries."""

    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"


class Strand:
    """One block to be. ``prefix`` is the beginning of its deltas once it is open."""

    __slots__ = ("call_id", "held", "is_closed", "kind", "name", "number", "prefix", "scan")

    def __init__(self, kind: Kind, number: int = 0) -> None:
        self.kind = kind
        self.number = number
        """Of a call: how many began before it."""
        self.held: list[str] = []
        self.prefix = b""
        self.is_closed = False
        self.call_id = ""
        self.name = ""
        self.scan: ObjectScan | None = None
        """Of a call whose arguments have begun to be an object."""

    @property
    def is_whole(self) -> bool:
        """Whether the next strand may take over."""
        return self.kind is not Kind.CALL or (self.scan is not None and self.scan.is_complete)


class Strands:
    """The blocks of one answer. ``make_id`` names a call whose engine did not."""

    def __init__(self, make_id: Callable[[int], str]) -> None:
        self._make_id = make_id
        self._strands: deque[Strand] = deque()
        self._by_index: dict[int, Strand] = {}
        self._by_id: dict[str, Strand] = {}
        self._last_call: Strand | None = None
        self._limits = limits().gateway
        self._held_chars = 0
        self._next_index = 0
        self.has_calls = False
        """Whether the answer calls tools."""
        self.has_cut_calls = False
        """Whether the arguments of one ended before their JSON did."""
        self.open_kind: Kind | None = None
        """What the open block is while nothing else waits: a piece of that kind may go out at once, behind ``prefix``."""
        self.prefix = b""

    @property
    def is_empty(self) -> bool:
        """Whether no block was opened, and none will be."""
        return not self._next_index and not self._strands

    def add(self, kind: Kind, text: str) -> bytes:
        """Take a piece of text or thinking; return the events that may go out. Raises StreamTooLarge."""
        strand = self._strands[-1] if self._strands else None
        if strand is None or strand.kind is not kind:
            strand = self._begin(Strand(kind))
        self._hold(strand, text)
        return self._advance()

    def add_call(self, part: ToolCallPart) -> bytes:
        """Take a piece of a tool call; return the events that may go out. Raises ForwardedRequestFailed."""
        strand = self._find_call(part)
        if not strand.call_id and part.id and part.id not in self._by_id:
            strand.call_id = part.id
            self._by_id[part.id] = strand
        function = part.function
        if function is None:
            return self._advance()
        if function.name and not strand.name:
            strand.name = function.name
        if function.arguments:
            if strand.scan is not None and strand.prefix and self.open_kind is Kind.CALL:
                piece = _scan(strand.scan, function.arguments)
                return strand.prefix + events.encode(piece) + events.DELTA_END if piece else b""
            self._take_arguments(strand, function.arguments)
        return self._advance()

    def finish(self) -> bytes:
        """Return what is still held, and the end of every block. Raises ForwardedRequestFailed."""
        out = [self._advance()]
        while self._strands:
            out += [self._close(self._strands.popleft()), self._advance()]
        return b"".join(out)

    def _begin(self, strand: Strand) -> Strand:
        """Put a strand behind the others. Raises StreamTooLarge."""
        if len(self._strands) >= self._limits.strands or strand.number >= WIRE.answer_calls:
            raise StreamTooLarge
        self._strands.append(strand)
        return strand

    def _find_call(self, part: ToolCallPart) -> Strand:
        """Return the strand that a piece belongs to. Engines leave the index out, or give every call the same."""
        by_id = self._by_id.get(part.id or "", self._last_call)
        strand = by_id if part.index is None else self._by_index.get(part.index)
        if strand is None or _begins_another(strand, part):
            number = self._last_call.number + 1 if self._last_call is not None else 0
            strand = self._last_call = self._begin(Strand(Kind.CALL, number))
        if part.index is not None:
            self._by_index[part.index] = strand
        return strand

    def _take_arguments(self, strand: Strand, piece: str) -> None:
        """Follow arguments that begin like an object; hold any others, which are made into one at their end."""
        if strand.scan is None and not strand.held:
            piece = piece.lstrip()
            if piece.startswith("{"):
                strand.scan = ObjectScan()
        if strand.scan is not None:
            piece = _scan(strand.scan, piece)
        if piece:
            self._hold(strand, piece)

    def _hold(self, strand: Strand, piece: str) -> None:
        strand.held.append(piece)
        self._held_chars += len(piece)

    def _advance(self) -> bytes:
        """Write what the open strand holds, and open the next while the open one is whole. Raises StreamTooLarge."""
        strands = self._strands
        out = []
        while strands:
            out.append(self._write(strands[0]))
            if len(strands) == 1 or not strands[0].is_whole:
                break
            out.append(self._close(strands.popleft()))
        if self._held_chars > self._limits.held_chars:
            raise StreamTooLarge
        self.open_kind = strands[0].kind if len(strands) == 1 else None
        self.prefix = strands[0].prefix if strands else b""
        return b"".join(out)

    def _write(self, strand: Strand) -> bytes:
        """Open a strand's block if that is possible by now, and write what it holds."""
        if strand.kind is Kind.CALL and not (strand.name and (strand.call_id or strand.scan)):
            return b""
        out = b"" if strand.prefix else self._open(strand)
        if not strand.held or (strand.kind is Kind.CALL and strand.scan is None):
            return out
        text = "".join(strand.held)
        self._held_chars -= len(text)
        strand.held = []
        if not text:
            return out
        return out + strand.prefix + events.encode(text) + events.DELTA_END

    def _open(self, strand: Strand) -> bytes:
        index = self._next_index
        self._next_index += 1
        match strand.kind:
            case Kind.TEXT:
                strand.prefix = events.make_text_prefix(index)
                return events.render_text_start(index)
            case Kind.THINKING:
                strand.prefix = events.make_thinking_prefix(index)
                return events.render_thinking_start(index)
            case Kind.CALL:
                self.has_calls = True
                strand.call_id = strand.call_id or self._make_id(strand.number)
                strand.prefix = events.make_arguments_prefix(index)
                return events.render_call_start(index, strand.call_id, strand.name)

    def _close(self, strand: Strand) -> bytes:
        """Return the end of a block, opened now if it was not. Raises ForwardedRequestFailed for a call nobody can make."""
        strand.is_closed = True
        held = "".join(strand.held)
        self._held_chars -= len(held)
        strand.held = []
        out = b""
        if strand.kind is Kind.CALL and not strand.name:
            if not (held or strand.call_id):
                return b""
            raise ForwardedRequestFailed("The engine sent a tool call without the name of the tool.")
        if not strand.prefix:
            out = self._open(strand)
        index = self._next_index - 1
        if strand.kind is Kind.THINKING:
            out += events.render_signature(index)
        elif strand.scan is not None:
            self.has_cut_calls |= not strand.scan.is_complete
        elif strand.kind is Kind.CALL:
            out += strand.prefix + events.encode(bytes(read_arguments(held)).decode()) + events.DELTA_END
        return out + events.render_block_stop(index)


def _scan(scan: ObjectScan, piece: str) -> str:
    """Return the part of a piece that belongs to the object. Raises ForwardedRequestFailed when there is more."""
    rest = scan.feed(piece)
    if rest and not rest.isspace():
        raise ForwardedRequestFailed("The engine sent more arguments of a tool call after their end.")
    return piece[: len(piece) - len(rest)]


def _begins_another(strand: Strand, part: ToolCallPart) -> bool:
    """Whether a piece begins a new call though its index, or its lack of one, is that of an earlier call."""
    name = part.function.name if part.function is not None else None
    if not name or (part.id and part.id == strand.call_id):
        return False
    if strand.is_closed or strand.is_whole:
        arguments = part.function.arguments if part.function is not None else None
        is_repetition = name == strand.name and not (arguments and not arguments.isspace())
        return bool(part.id) or part.index is None or not is_repetition
    if not (part.id and strand.call_id):
        return False
    has_nothing = not strand.held and strand.scan is None
    return part.index is None or (has_nothing and name != strand.name)
