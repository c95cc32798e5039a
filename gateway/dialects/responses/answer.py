"""Pieces of a chat answer sorted into output items: what is thought, said and called."""

from __future__ import annotations

from dataclasses import dataclass

from core.limits import limits
from gateway.dialects.chat import ChatChoice, ChatMessage, FunctionPart, ToolCallPart
from gateway.dialects.responses.logprobs import render_logprobs
from gateway.dialects.responses.object import Status
from gateway.dialects.responses.output import REFUSAL, TEXT, THOUGHT, CallItem, EventLog, OutputItem, PartKind, SpokenItem
from gateway.dialects.responses.tools import ToolTable
from gateway.errors import StreamTooLarge
from wire.limits import WIRE


@dataclass(slots=True)
class _Call:
    """A call as the engine numbers it. ``item`` None: its name has not come yet, and ``early`` are its arguments so far."""

    engine_id: str | None
    early: list[str]
    name: str = ""
    item: CallItem | None = None


class AnswerItems:
    """The output of one answer. A thought or a message ends where another item begins; calls stay open to the end.

    ``stem``: what the ids of the items have in common. ``repeats_text``: see ``SpokenItem``.
    """

    def __init__(self, *, stem: str, table: ToolTable, log: EventLog, repeats_text: bool) -> None:
        self._stem = stem
        self._table = table
        self._log = log
        self._repeats_text = repeats_text
        self._items: list[OutputItem] = []
        self._spoken: SpokenItem | None = None
        self._latest: OutputItem | None = None
        self._calls: list[_Call] = []
        self._by_index: dict[int, _Call] = {}
        self._last_index = 0
        self._chars_left = limits().gateway.responses_answer_chars
        self._call_ids: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been said yet."""
        return not self._items

    @property
    def has_unnamed_call(self) -> bool:
        """Whether the engine began a call and never said of what."""
        return any(call.item is None for call in self._calls)

    @property
    def text(self) -> str:
        """All text of all messages."""
        return "".join(item.text for item in self._items if isinstance(item, SpokenItem) and item.kind is not THOUGHT)

    def take(self, choice: ChatChoice) -> None:
        """Take the next piece of the answer, or the whole of it. Raises StreamTooLarge."""
        said = choice.delta or choice.message
        if said is None:
            return
        thought = said.reasoning_content or said.reasoning
        if thought:
            self._say(THOUGHT, thought)
        if said.content:
            self._say(TEXT, said.content, choice.logprobs)
        elif choice.logprobs is not None and self._spoken is not None and not thought:
            self._spoken.add_logprobs(self._render_logprobs(choice.logprobs))
        if said.refusal:
            self._say(REFUSAL, said.refusal)
        if said.tool_calls:
            for part in said.tool_calls:
                self._take_call(part)

    def close(self, *, is_cut: bool) -> None:
        """Finish every item. ``is_cut``: the answer was stopped early, so the item that grew last is not whole."""
        if self.is_empty and not is_cut:
            self._say(TEXT, "")
        for item in self._items:
            item.close(Status.INCOMPLETE if is_cut and item is self._latest else Status.COMPLETED)

    def render(self) -> bytes:
        """Return ``output`` as JSON."""
        return b"[%b]" % b",".join([item.render() for item in self._items])

    def _say(self, kind: PartKind, text: str, logprobs: object = None) -> None:
        spoken = self._spoken
        if spoken is None or spoken.kind.item != kind.item:
            spoken = self._open_spoken(kind)
        self._latest = spoken
        self._count(len(text))
        spoken.say(kind, text, b"" if logprobs is None else self._render_logprobs(logprobs))

    def _render_logprobs(self, logprobs: object) -> bytes:
        rendered = render_logprobs(logprobs)
        self._count(len(rendered))
        return rendered

    def _open_spoken(self, kind: PartKind) -> SpokenItem:
        self._close_spoken()
        index = self._place_item()
        item_id = f"{kind.prefix}_{self._stem}_{index}"
        spoken = SpokenItem(kind, item_id=item_id, index=index, log=self._log, repeats_text=self._repeats_text)
        self._spoken = spoken
        self._items.append(spoken)
        return spoken

    def _place_item(self) -> int:
        """Return the index of the next item. Raises StreamTooLarge."""
        if len(self._items) >= WIRE.answer_calls:
            raise StreamTooLarge
        return len(self._items)

    def _count(self, chars: int) -> None:
        """Take so much of what has to be kept into account. Raises StreamTooLarge."""
        self._chars_left -= chars
        if self._chars_left < 0:
            raise StreamTooLarge

    def _close_spoken(self) -> None:
        spoken, self._spoken = self._spoken, None
        if spoken is not None:
            spoken.close(Status.COMPLETED)

    def _take_call(self, part: ToolCallPart) -> None:
        call = self._find_call(part)
        function = part.function
        if function is None:
            return
        if call.item is None and function.name:
            call.item = self._open_call(call, function.name)
            self._latest = call.item
        arguments = function.arguments
        if not arguments:
            return
        self._count(len(arguments))
        if call.item is None:
            call.early.append(arguments)
        else:
            call.item.add_arguments(arguments)
            self._latest = call.item

    def _find_call(self, part: ToolCallPart) -> _Call:
        """Return the call that a piece belongs to.

        Some engines leave the index out, or give every call the same one: a piece with a name of its own and another id
        begins another call, and so does the name alone without an index, or behind arguments that are whole.
        """
        index = self._last_index if part.index is None else part.index
        self._last_index = index
        call = self._by_index.get(index)
        if call is not None and call.item is not None and part.function is not None and part.function.name:
            is_other = part.id != call.engine_id if part.id else _begins_another(call, call.item, part.function)
            call = None if is_other or part.index is None else call
        if call is None:
            if len(self._calls) >= WIRE.answer_calls:
                raise StreamTooLarge
            call = _Call(part.id or None, [])
            self._by_index[index] = call
            self._calls.append(call)
        call.engine_id = call.engine_id or part.id or None
        return call

    def _open_call(self, call: _Call, name: str) -> CallItem:
        """Add an item for a call. Its id is settled here: one that comes later, or a second time, does not count."""
        self._close_spoken()
        index = self._place_item()
        call_id = call.engine_id
        if call_id is None or call_id in self._call_ids:
            call_id = f"call_{self._stem}_{index}"
        self._call_ids.add(call_id)
        call.name = name
        item = CallItem(self._table.find(name), call_id=call_id, stem=self._stem, index=index, log=self._log)
        self._items.append(item)
        for piece in call.early:
            item.add_arguments(piece)
        return item


def _begins_another(call: _Call, item: CallItem, function: FunctionPart) -> bool:
    """Whether a name without an id begins another call: the one before is whole, and this does not merely repeat its name."""
    arguments = function.arguments
    is_repetition = function.name == call.name and not (arguments and not arguments.isspace())
    return not is_repetition and item.is_whole()


def number_calls(message: ChatMessage | None) -> None:
    """Give every call of a whole answer a number of its own: there, pieces are calls."""
    for n, part in enumerate((message.tool_calls if message is not None else None) or ()):
        part.index = n
