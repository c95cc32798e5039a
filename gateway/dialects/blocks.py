"""Ordered content blocks of an answer, made of the pieces of an engine: which one is open, which wait, which are whole."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from typing import Protocol

from core.limits import limits
from gateway.dialects.chat import ToolCallPart
from gateway.errors import ForwardedRequestFailed, StreamTooLarge
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
        """Take the next piece; return what of it lies behind the end of the object."""
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


class BlockKind(StrEnum):
    """What a block carries."""

    TEXT = "text"
    THINKING = "thinking"
    CALL = "call"


class Block:
    """One content block. ``number``, of a call: how many calls began before it."""

    __slots__ = ("call_id", "held", "index", "is_bare", "kind", "name", "number", "scan", "unscanned")

    def __init__(self, kind: BlockKind, number: int = 0) -> None:
        self.kind = kind
        self.number = number
        self.index = -1
        """How many blocks were opened before it; -1 = it was not opened yet."""
        self.held: list[str] = []
        """Pieces that were not said yet."""
        self.call_id = ""
        """The engine's, unless that is another call's."""
        self.name = ""
        self.is_bare = True
        """Whether no arguments have come."""
        self.scan: ObjectScan | None = None
        """Of a call whose arguments may be said in pieces. ``unscanned``: pieces for it, read once somebody asks."""
        self.unscanned: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether another block may follow: of a call, whether its arguments so far are an object to its end."""
        if self.kind is not BlockKind.CALL:
            return True
        if self.scan is None:
            return False
        for piece in self.unscanned:
            self.scan.feed(piece)
        self.unscanned.clear()
        return self.scan.is_complete


class BlockRenderer(Protocol):
    """How a dialect says the blocks of an answer."""

    def take_arguments(self, block: Block, piece: str) -> str:
        """Return what of the next piece of a call's arguments is to be said. Raises ForwardedRequestFailed, StreamTooLarge."""

    def open(self, block: Block) -> None:
        """Say that a block begins; its index, and the name of a call, are settled. Raises StreamTooLarge."""

    def say(self, block: Block, pieces: list[str]) -> None:
        """Say the next pieces of an open block."""

    def close(self, block: Block) -> None:
        """Say that a block ends. ``block.held``: arguments that could not be said in pieces."""


class Blocks:
    """The blocks of one answer in their order, said by a renderer.

    ``is_sequential``: a block ends before the next one opens, so pieces of later blocks are held until the earlier are whole.
    Otherwise a call opens as soon as it has a name and stays open to the end, and only text and thinking end where another
    block opens. ``held_chars``: how much may be held. After an error nothing more can be added.
    """

    def __init__(self, renderer: BlockRenderer, *, is_sequential: bool, held_chars: int) -> None:
        self._renderer = renderer
        self._is_sequential = is_sequential
        self._held_most = held_chars
        self._queue_most = limits().gateway.waiting_blocks
        self._held_chars = 0
        self._calls = CallFinder(self._begin_call)
        self._queue: deque[Block] = deque()
        """The block that grows, and those that wait behind it."""
        self._left_open: list[Block] = []
        self._opened = self._unnamed = 0
        self.open_kind: BlockKind | None = None
        """What the last block is while nothing waits behind it: more text or thinking of that kind may be said at once."""

    @property
    def is_empty(self) -> bool:
        return not self._opened and not self._queue

    @property
    def has_unnamed_call(self) -> bool:
        """Whether a call that would be open with a name has none, where blocks are not sequential."""
        return self._unnamed > 0

    def add(self, kind: BlockKind, text: str) -> None:
        """Take a piece of text or thinking, empty to have such a block. Raises ForwardedRequestFailed or StreamTooLarge."""
        queue = self._queue
        if not queue or queue[-1].kind is not kind:
            self._place(Block(kind))
        self._hold(queue[-1], text)
        self._advance()

    def add_call(self, part: ToolCallPart) -> None:
        """Take a piece of a tool call. Raises ForwardedRequestFailed or StreamTooLarge."""
        block = self._calls.find(part)
        if block.index < 0 and block.name and not self._is_sequential:
            self._unnamed -= 1
            self._place(block)
            self._advance()
        arguments = part.function.arguments if part.function is not None else None
        if arguments and (piece := self._renderer.take_arguments(block, arguments)):
            block.is_bare = False
            if block.index < 0 or block.scan is None:
                self._hold(block, piece)
            else:
                self._renderer.say(block, [piece])
                if len(self._queue) == 1:
                    return  # nothing waits for the end of the block
        self._advance()

    def finish(self) -> None:
        """Close every block, those that waited opened before. Raises ForwardedRequestFailed or StreamTooLarge."""
        self._advance()
        for block in self._left_open:
            self._close(block)
        while self._queue:
            self._close(self._queue.popleft())
            self._advance()

    def _begin_call(self, number: int) -> Block:
        if number >= WIRE.answer_calls:
            raise StreamTooLarge
        block = Block(BlockKind.CALL, number)
        if self._is_sequential:
            self._place(block)
        else:
            self._unnamed += 1
        return block

    def _place(self, block: Block) -> None:
        if len(self._queue) >= self._queue_most:
            raise StreamTooLarge
        self._queue.append(block)

    def _hold(self, block: Block, piece: str) -> None:
        if piece:
            block.held.append(piece)
            self._held_chars += len(piece)

    def _advance(self) -> None:
        """Say what the first block holds, and open the next while that may follow. Raises as ``add`` does."""
        queue = self._queue
        while queue:
            block = queue[0]
            self._write(block)
            if len(queue) == 1 or (self._is_sequential and not block.is_whole):
                break
            queue.popleft()
            if self._is_sequential or block.kind is not BlockKind.CALL:
                self._close(block)
            else:
                self._left_open.append(block)
        if self._held_chars > self._held_most:
            raise StreamTooLarge
        self.open_kind = queue[0].kind if len(queue) == 1 else None

    def _write(self, block: Block) -> None:
        is_call = block.kind is BlockKind.CALL
        if block.index < 0:
            # Once arguments may be said, an id is made for a call without one.
            if is_call and self._is_sequential and not (block.name and (block.call_id or block.scan)):
                return
            self._open(block)
        if block.held and (block.scan or not is_call):
            self._renderer.say(block, self._release(block))

    def _open(self, block: Block) -> None:
        block.index = self._opened
        self._opened += 1
        self._renderer.open(block)

    def _close(self, block: Block) -> None:
        if block.kind is BlockKind.CALL and not block.name:
            if block.held or block.call_id:
                # Nobody can make such a call.
                raise ForwardedRequestFailed("The engine sent a tool call without the name of the tool.")
            return
        if block.index < 0:
            self._open(block)
        self._renderer.close(block)
        self._release(block)

    def _release(self, block: Block) -> list[str]:
        held, block.held = block.held, []
        self._held_chars -= sum(map(len, held))
        return held


class CallFinder:
    """Finds the call that a piece belongs to. Engines leave the index out, or give every call the same.

    ``begin`` makes the next call, given how many began before it.
    """

    __slots__ = ("_begin", "_by_id", "_by_index", "_last", "_unnumbered")

    def __init__(self, begin: Callable[[int], Block]) -> None:
        self._begin = begin
        self._by_index: dict[int, Block] = {}
        self._by_id: dict[str, Block] = {}
        self._last: Block | None = None
        self._unnumbered: Block | None = None
        """The call of the piece before, if that left the index out."""

    def find(self, part: ToolCallPart) -> Block:
        """Return the call of a piece, with what the piece says of id and name; a new one where it begins one."""
        call = self._by_id.get(part.id or "", self._last) if part.index is None else self._by_index.get(part.index)
        if call is None and self._unnumbered is not None and not (part.function is not None and part.function.name):
            call = self._unnumbered  # its first piece left the index out
        if call is None or _begins_another(call, part):
            call = self._last = self._begin(0 if self._last is None else self._last.number + 1)
        if part.index is not None:
            self._by_index[part.index] = call
        self._unnumbered = call if part.index is None else None
        if not call.call_id and part.id and part.id not in self._by_id:
            call.call_id = part.id
            self._by_id[part.id] = call
        if part.function is not None and part.function.name and not call.name:
            call.name = part.function.name
        return call


def _begins_another(call: Block, part: ToolCallPart) -> bool:
    """Whether a piece begins a new call though its index, or its lack of one, is that of an earlier call."""
    name = part.function.name if part.function is not None else None
    if not name or (part.id and part.id == call.call_id):
        return False
    if call.is_whole:
        arguments = part.function.arguments if part.function is not None else None
        is_repetition = name == call.name and not (arguments and not arguments.isspace())
        return bool(part.id) or part.index is None or not is_repetition
    if not (part.id and call.call_id):
        return False
    return part.index is None or (call.is_bare and name != call.name)
