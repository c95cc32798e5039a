"""Input items as chat messages: the items of one turn of the assistant become one message, in the order of the items.

Strict chat templates allow one system message, at the beginning, and want user and assistant to take turns. So leading
system and developer messages are joined to one, later ones are said by the user, and neighbours of one role are joined.
Source: OpenAI API reference, "Responses", input items.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

import msgspec

from gateway.dialects.responses.checks import field_error, kind_of, need_list, need_object, need_text, read_text, show_name
from gateway.dialects.responses.content import (
    Content,
    join_contents,
    read_answer,
    read_system_text,
    split_result,
    translate_content,
)
from gateway.dialects.responses.tools import SEARCH_TOOL, CallKind, ToolName, ToolTable, wrap_input

Item = dict[str, object]

_LEFT_OUT = frozenset(
    {
        "code_interpreter_call",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    }
)
"""What OpenAI's servers did in between: the answer that follows says what came of it."""
_TOOL_BRINGERS = frozenset({"additional_tools", "tool_search_output"})
_SYSTEM_ROLES = frozenset({"system", "developer"})


SUMMARY_MARK = "muster_summary_1:"
"""Before what our compaction items hold, which is base64 of UTF-8."""


def read_summary(item: Item, where: str) -> str:
    """Return what a compaction item says to the model. Raises BadRequest for an item that somebody else made."""
    packed = need_text(item, "encrypted_content", where)
    try:
        if not packed.startswith(SUMMARY_MARK):
            raise ValueError
        summary = base64.b64decode(packed.removeprefix(SUMMARY_MARK), validate=True).decode()
    except ValueError:  # binascii.Error and UnicodeDecodeError are
        raise field_error(
            f"{where}.encrypted_content", "cannot be read: it was not made by this gateway's /v1/responses/compact"
        ) from None
    return f"Summary of the conversation so far:\n{summary}"


def item_kind(item: Item) -> str:
    """Return the type of an item, which messages and references may leave out."""
    if item.get("type") is not None:
        return kind_of(item)
    return "message" if "role" in item else "item_reference"


def list_brought_tools(item: Item, where: str) -> list[object]:
    """Return the tools that an item adds to those of the request."""
    return need_list(item.get("tools"), f"{where}.tools") if item_kind(item) in _TOOL_BRINGERS else []


@dataclass(slots=True)
class _AssistantTurn:
    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    calls: list[dict[str, object]] = field(default_factory=list)
    last_kind: str = ""

    def to_message(self) -> dict[str, object]:
        message: dict[str, object] = {"role": "assistant", "content": "".join(self.texts) if self.texts else None}
        if self.refusals:
            message["refusal"] = "".join(self.refusals)
        if self.thoughts:
            # Engines read one name or the other (vLLM renamed it), and none minds both.
            message["reasoning_content"] = message["reasoning"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        elif message["content"] is None and not self.refusals:
            message["content"] = ""
        return message


class Transcript:
    """Collects items, then gives the messages. ``known_ids``: items that a reference may name, for they are there already."""

    def __init__(self, table: ToolTable, *, instructions: str, known_ids: frozenset[str] = frozenset()) -> None:
        self.ignored: list[str] = []
        self._table = table
        self._known_ids = known_ids
        self._instructions = instructions
        self._system: list[str] = []
        self._messages: list[dict[str, object]] = []
        self._user: list[Content] = []
        self._shown: list[Content] = []
        """What only a user's message can hold of the results of tools; it follows behind the last of them."""
        self._turn: _AssistantTurn | None = None

    def add(self, item: Item, where: str) -> None:
        """Take the next item; ``where``: its path in the request. Raises BadRequest naming what cannot be said in chat."""
        kind = item_kind(item)
        if kind == "message":
            self._add_message(item, where)
        elif kind == "reasoning":
            self._add_thought(item, where)
        elif kind.endswith("_call") and kind not in _LEFT_OUT:
            self._add_call(item, kind, where)
        elif kind.endswith("_output"):
            self._add_output(item, kind, where)
        elif kind == "item_reference":
            if need_text(item, "id", where) not in self._known_ids:
                raise field_error(
                    f"{where}.id",
                    "refers to an item that is not part of this conversation here; send the item itself "
                    "(clients do so when they ask with store false)",
                )
        elif kind == "compaction":
            self._add_user(read_summary(item, where))
        elif kind in _LEFT_OUT:
            self.ignored.append(f"{where}.{kind}")
        elif kind not in _TOOL_BRINGERS:
            raise field_error(f"{where}.type", f"must be an item that can be said to a chat model, not {show_name(kind)}")

    def close(self) -> list[dict[str, object]]:
        """Return the messages."""
        self._end_turns()
        system = [text for text in (self._instructions, *self._system) if text]
        if not self._messages and self._system:
            self._messages.append({"role": "user", "content": "\n\n".join(self._system)})  # templates want someone to answer
            system = [self._instructions] if self._instructions else []
        if not system:
            return self._messages
        return [{"role": "system", "content": "\n\n".join(system)}, *self._messages]

    def _add_message(self, item: Item, where: str) -> None:
        role = item.get("role")
        path = f"{where}.content"
        if role == "assistant":
            text, refusal = read_answer(item.get("content"), path)
            turn = self._open_turn()
            if text is not None:
                if turn.last_kind == "message":
                    turn.texts.append("\n\n")  # two messages, not one that a call or a thought interrupted
                turn.texts.append(text)
            if refusal is not None:
                turn.refusals.append(refusal)
            turn.last_kind = "message"
        elif role == "user":
            self._add_user(translate_content(item.get("content"), path))
        elif isinstance(role, str) and role in _SYSTEM_ROLES:
            text = read_system_text(item.get("content"), path)
            if self._messages or self._user or self._turn is not None:
                self._add_user(text)
            else:
                self._system.append(text)
        else:
            raise field_error(f"{where}.role", "must be user, assistant, system or developer")

    def _add_thought(self, item: Item, where: str) -> None:
        texts = _read_texts(item.get("content"), f"{where}.content") or _read_texts(item.get("summary"), f"{where}.summary")
        if texts:
            turn = self._open_turn()
            turn.thoughts += texts
            turn.last_kind = "reasoning"

    def _add_call(self, item: Item, kind: str, where: str) -> None:
        tool, arguments = _read_call(item, kind, where)
        turn = self._open_turn()
        function = {"name": self._table.flatten(tool), "arguments": arguments}
        turn.calls.append({"id": need_text(item, "call_id", where), "type": "function", "function": function})
        turn.last_kind = kind

    def _add_output(self, item: Item, kind: str, where: str) -> None:
        named = "id" if kind == "local_shell_call_output" and "call_id" not in item else "call_id"
        call = need_text(item, named, where)
        told, shown = split_result(_read_output(item, kind, where), call)
        self._end_turn()
        if self._user:
            self._end_turns()
        self._messages.append({"role": "tool", "tool_call_id": call, "content": told})
        if shown:
            self._shown.append(shown)

    def _add_user(self, content: Content) -> None:
        self._end_turn()
        self._user.append(content)

    def _open_turn(self) -> _AssistantTurn:
        if self._turn is None:
            self._end_turns()
            self._turn = _AssistantTurn()
        return self._turn

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._messages.append(turn.to_message())

    def _end_turns(self) -> None:
        self._end_turn()
        if self._shown or self._user:
            self._messages.append({"role": "user", "content": join_contents([*self._shown, *self._user])})
            self._shown, self._user = [], []


def _read_texts(value: object, where: str) -> list[str]:
    if value is None:
        return []
    parts = [need_object(part, f"{where}[{n}]") for n, part in enumerate(need_list(value, where))]
    return [text for n, part in enumerate(parts) if (text := need_text(part, "text", f"{where}[{n}]"))]


def _read_call(item: Item, kind: str, where: str) -> tuple[ToolName, str]:
    """Return the tool that an item calls, and the arguments as JSON text."""
    if kind == CallKind.FUNCTION:
        tool = ToolName(CallKind.FUNCTION, need_text(item, "name", where), read_text(item, "namespace", where))
        return tool, need_text(item, "arguments", where) or "{}"
    if kind == CallKind.CUSTOM:
        tool = ToolName(CallKind.CUSTOM, need_text(item, "name", where), read_text(item, "namespace", where))
        return tool, wrap_input(need_text(item, "input", where))
    if kind == CallKind.SEARCH:
        arguments = item.get("arguments")
        return ToolName(CallKind.SEARCH, SEARCH_TOOL), arguments if isinstance(arguments, str) else _encode(arguments)
    if kind in {"local_shell_call", "shell_call"}:
        return ToolName(CallKind.FUNCTION, kind.removesuffix("_call")), _encode(
            need_object(item.get("action"), f"{where}.action")
        )
    if kind == "apply_patch_call":
        return ToolName(CallKind.FUNCTION, "apply_patch"), _encode(need_object(item.get("operation"), f"{where}.operation"))
    raise field_error(f"{where}.type", f"must be an item that can be said to a chat model, not {show_name(kind)}")


def _read_output(item: Item, kind: str, where: str) -> Content:
    if kind == "tool_search_output":
        names = [tool.get("name") for tool in list_brought_tools(item, where) if isinstance(tool, dict)]
        return _encode({"tools": [name for name in names if isinstance(name, str)]})
    if kind in {"function_call_output", "custom_tool_call_output", "local_shell_call_output", "apply_patch_call_output"}:
        output = item.get("output")
        if output is None and kind == "apply_patch_call_output":
            return read_text(item, "status", where)
        return translate_content(output, f"{where}.output")
    if kind == "shell_call_output":
        return _encode(need_list(item.get("output"), f"{where}.output"))
    raise field_error(f"{where}.type", f"must be an item that can be said to a chat model, not {show_name(kind)}")


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()
