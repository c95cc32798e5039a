"""Input items as chat messages: the items of one turn of the assistant become one message, in the order of the items.

Strict chat templates allow one system message, at the beginning, and want user and assistant to take turns. So leading
system and developer messages are joined to one, later ones are said by the user, and neighbours of one role are joined.
Source: OpenAI API reference, "Responses", input items.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from core.limits import limits
from gateway.errors import BadRequest
from wire.unreadable import UNREADABLE


def show_name(name: str) -> str:
    """Return a name a client gave, for an error text; long and unprintable ones are not repeated."""
    return f"'{name}'" if name and len(name) <= limits().gateway.fault_shown_chars and name.isprintable() else "another one"


def kind_of(fields: dict[str, object]) -> str:
    """Return the ``type`` of an item, a part or a tool; empty when it has none that is text."""
    kind = fields.get("type")
    return kind if isinstance(kind, str) else ""


def field_error(where: str, reason: str) -> BadRequest:
    return BadRequest(f"The field '{where}' {reason}.", param=where)


def need_text(fields: dict[str, object], name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise field_error(f"{where}.{name}", "is required" if value is None else "must be text")
    return value


def read_text(fields: dict[str, object], name: str, where: str) -> str:
    """Return a text that may be missing or null, then empty. Raises BadRequest for anything else."""
    return "" if fields.get(name) is None else need_text(fields, name, where)


def need_object(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise field_error(where, "must be an object")
    return value


def need_list(value: object, where: str) -> list[object]:
    if not isinstance(value, list):
        raise field_error(where, "must be a list")
    return value


Content = str | list[dict[str, object]]
"""Chat content: text alone as one string, which every engine takes, else a list of parts."""

_TEXT_TYPES = frozenset({"input_text", "output_text", "text"})
_DETAILS = {"low": "low", "high": "high", "auto": "auto", "original": "high"}
"""``original`` is newer than chat completions."""


def translate_content(content: object, where: str) -> Content:
    """Return what a user, a tool or the system said. ``where``: path of the field. Raises BadRequest naming the part."""
    if isinstance(content, str):
        return content
    if content is None:
        raise field_error(where, "is required")
    parts = [_translate_part(part, f"{where}[{n}]") for n, part in enumerate(need_list(content, where))]
    texts = [text for part in parts if isinstance(text := part.get("text"), str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def read_system_text(content: object, where: str) -> str:
    """Return what a system or developer message says; it has text alone. Raises BadRequest."""
    translated = translate_content(content, where)
    if isinstance(translated, str):
        return translated
    at = next(n for n, part in enumerate(translated) if part["type"] != "text")
    raise field_error(f"{where}[{at}].type", "must be input_text in a system or developer message")


def read_answer(content: object, where: str) -> tuple[str | None, str | None]:
    """Return text and refusal of an assistant's message, None where it has no such part. Raises BadRequest."""
    if isinstance(content, str):
        return content, None
    if content is None:
        raise field_error(where, "is required")
    texts: list[str] = []
    refusals: list[str] = []
    for n, value in enumerate(need_list(content, where)):
        path = f"{where}[{n}]"
        part = need_object(value, path)
        kind = kind_of(part)
        if kind == "refusal":
            refusals.append(need_text(part, "refusal", path))
        elif kind in _TEXT_TYPES:
            texts.append(need_text(part, "text", path))
        else:
            raise field_error(
                f"{path}.type", f"must be output_text or refusal in an assistant's message, not {show_name(kind)}"
            )
    return "".join(texts) if texts or not refusals else None, "".join(refusals) if refusals else None


def split_result(content: Content, call_id: str) -> tuple[str, list[dict[str, object]]]:
    """Return what a tool's message may say of its result, which is text, and the parts that the user has to show."""
    if isinstance(content, str):
        return content, []
    told = [str(part["text"]) for part in content if part["type"] == "text"]
    shown = [part for part in content if part["type"] != "text"]
    told.append(f"[{len(shown)} attached in the next user message]")
    title: dict[str, object] = {"type": "text", "text": f"Attached to the result of tool call {call_id}:"}
    return "\n".join(told), [title, *shown]


def join_contents(contents: list[Content]) -> Content:
    """Return several contents as one, with an empty line between texts."""
    if len(contents) == 1:
        return contents[0]
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return "\n\n".join(texts)
    joined: list[dict[str, object]] = []
    for content in contents:
        joined += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return joined


def _translate_part(value: object, where: str) -> dict[str, object]:
    part = need_object(value, where)
    kind = kind_of(part)
    if kind in _TEXT_TYPES:
        return {"type": "text", "text": need_text(part, "text", where)}
    if kind == "input_image":
        return _translate_image(part, where)
    if kind == "input_file":
        return _translate_file(part, where)
    if kind == "input_audio":
        return {"type": "input_audio", "input_audio": need_object(part.get("input_audio"), f"{where}.input_audio")}
    if kind == "refusal":
        return {"type": "text", "text": need_text(part, "refusal", where)}
    raise field_error(f"{where}.type", f"must be input_text, input_image, input_file or input_audio, not {show_name(kind)}")


def _translate_image(part: dict[str, object], where: str) -> dict[str, object]:
    if part.get("file_id") is not None and part.get("image_url") is None:
        raise field_error(f"{where}.file_id", "names a stored file, and none are stored here; send the image as image_url")
    image: dict[str, object] = {"url": need_text(part, "image_url", where)}
    detail = _DETAILS.get(read_text(part, "detail", where))
    if detail is not None:
        image["detail"] = detail
    return {"type": "image_url", "image_url": image}


def _translate_file(part: dict[str, object], where: str) -> dict[str, object]:
    if part.get("file_data") is None:
        for name in ("file_id", "file_url"):
            if part.get(name) is not None:
                raise field_error(
                    f"{where}.{name}", "names a file that is not fetched from here; send its content as file_data"
                )
    file: dict[str, object] = {"file_data": need_text(part, "file_data", where)}
    if part.get("filename") is not None:
        file["filename"] = need_text(part, "filename", where)
    return {"type": "file", "file": file}


INPUT_ARGUMENT = "input"
SEARCH_TOOL = "tool_search"
_MODES = frozenset({"auto", "none", "required"})
_NO_PARAMETERS: dict[str, object] = {"type": "object", "properties": {}}
_PLAIN_NAME = re.compile(r"[a-z0-9_]{1,40}\Z")


class CallKind(StrEnum):
    """The item a call of a tool is."""

    FUNCTION = "function_call"
    CUSTOM = "custom_tool_call"
    SEARCH = "tool_search_call"


_CALLS = {"function": CallKind.FUNCTION, "custom": CallKind.CUSTOM}
"""By the type of a tool."""


@dataclass(frozen=True, slots=True)
class ToolName:
    """A tool as the client named it. ``namespace`` empty = none."""

    kind: CallKind
    name: str
    namespace: str = ""


@dataclass(slots=True)
class ToolTable:
    """The functions of a chat request, and which tool each of them stands for."""

    functions: dict[str, dict[str, object]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    _tools: dict[str, ToolName] = field(default_factory=dict)
    _flat: dict[ToolName, str] = field(default_factory=dict)
    _namesakes: dict[str, int] = field(default_factory=dict)

    def add(self, tools: list[object], where: str) -> None:
        """Take a list of tools. ``where``: its path in the request. Raises BadRequest naming the tool at fault."""
        for n, value in enumerate(tools):
            path = f"{where}[{n}]"
            tool = need_object(value, path)
            kind = kind_of(tool)
            if kind == "namespace":
                self._add_namespace(tool, path)
            elif not self._add_one(tool, path, namespace="", about=""):
                self.ignored.append(f"{path}.{kind}" if _PLAIN_NAME.match(kind) else path)

    def find(self, flat: str) -> ToolName:
        """Return the tool a chat function stands for; a name nobody gave is a function of that name."""
        return self._tools.get(flat) or ToolName(CallKind.FUNCTION, flat)

    def flatten(self, tool: ToolName) -> str:
        return self._flat.get(tool) or _join_name(tool)

    def name_choice(self, choice: dict[str, object], where: str) -> str | None:
        """Return the chat function that an entry of a choice names; None when no tool of the request is meant."""
        kind = kind_of(choice)
        namespace = read_text(choice, "namespace", where)
        if kind == SEARCH_TOOL:
            return self._flat.get(ToolName(CallKind.SEARCH, SEARCH_TOOL))
        if kind not in _CALLS:
            return None
        return self._flat.get(ToolName(_CALLS[kind], need_text(choice, "name", where), namespace))

    def _add_namespace(self, tool: dict[str, object], where: str) -> None:
        name = need_text(tool, "name", where)
        about = read_text(tool, "description", where)
        for n, value in enumerate(need_list(tool.get("tools"), f"{where}.tools")):
            path = f"{where}.tools[{n}]"
            if not self._add_one(need_object(value, path), path, namespace=name, about=about):
                self.ignored.append(path)

    def _add_one(self, tool: dict[str, object], where: str, *, namespace: str, about: str) -> bool:
        kind = kind_of(tool)
        if kind in _CALLS:
            named = ToolName(_CALLS[kind], need_text(tool, "name", where), namespace)
            function = _describe_function(tool, where) if kind == "function" else _describe_custom(tool, where)
        elif kind == SEARCH_TOOL and tool.get("execution") == "client" and not namespace:
            named = ToolName(CallKind.SEARCH, SEARCH_TOOL)
            function = _describe_function(tool, where)
        else:
            return False
        if named in self._flat:
            return True
        if about:
            function["description"] = "\n\n".join(filter(None, (about, str(function.get("description", "")))))
        flat = self._make_unique(_join_name(named))
        self._flat[named] = flat
        self._tools[flat] = named
        self.functions[flat] = {"type": "function", "function": {"name": flat, **function}}
        return True

    def _make_unique(self, name: str) -> str:
        unique = name
        while unique in self._tools:
            self._namesakes[name] = n = self._namesakes.get(name, 1) + 1
            unique = f"{name}_{n}"
        return unique


def translate_choice(choice: str | dict[str, object] | None, table: ToolTable) -> tuple[list[dict[str, object]], object]:
    """Return the functions the engine may see, and its ``tool_choice`` (None = say nothing).

    Raises BadRequest for a choice that demands what is not there.
    """
    functions = list(table.functions.values())
    if isinstance(choice, dict):
        return _translate_named_choice(choice, table)
    if choice is not None and choice not in _MODES:
        raise field_error("tool_choice", f"must be auto, none, required or an object, not {show_name(choice)}")
    if choice == "required" and not functions:
        raise field_error("tool_choice", "demands a call, and the request has no tool that can be called here")
    return functions, choice if functions else None


def _translate_named_choice(choice: dict[str, object], table: ToolTable) -> tuple[list[dict[str, object]], object]:
    if kind_of(choice) == "allowed_tools":
        return _translate_allowed(choice, table)
    flat = table.name_choice(choice, "tool_choice")
    if flat is None:
        raise field_error("tool_choice", "names a tool that the request does not have, or that cannot be called here")
    return list(table.functions.values()), {"type": "function", "function": {"name": flat}}


def _translate_allowed(choice: dict[str, object], table: ToolTable) -> tuple[list[dict[str, object]], object]:
    mode = choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise field_error("tool_choice.mode", "must be auto or required")
    where = "tool_choice.tools"
    entries = [need_object(value, f"{where}[{n}]") for n, value in enumerate(need_list(choice.get("tools"), where))]
    allowed = {table.name_choice(entry, f"{where}[{n}]") for n, entry in enumerate(entries)}
    # Engines do not know the field, so they never hear of the other tools.
    functions = [function for flat, function in table.functions.items() if flat in allowed]
    if mode == "required" and not functions:
        raise field_error(where, "names no tool of the request that can be called here")
    return functions, mode if functions else None


def unwrap_input(arguments: str) -> str:
    try:
        value = msgspec.json.decode(arguments)
    except UNREADABLE:
        return arguments
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        # Models err: the only text under another name counts too.
        given = value.get(INPUT_ARGUMENT, next(iter(value.values())) if len(value) == 1 else None)
        if isinstance(given, str):
            return given
    return arguments


def wrap_input(text: str) -> str:
    return msgspec.json.encode({INPUT_ARGUMENT: text}).decode()


def _join_name(tool: ToolName) -> str:
    return f"{tool.namespace.rstrip('_')}__{tool.name.lstrip('_')}" if tool.namespace else tool.name


def _describe_function(tool: dict[str, object], where: str) -> dict[str, object]:
    function: dict[str, object] = {}
    if description := read_text(tool, "description", where):
        function["description"] = description
    parameters = tool.get("parameters")
    function["parameters"] = _NO_PARAMETERS if parameters is None else need_object(parameters, f"{where}.parameters")
    if isinstance(tool.get("strict"), bool):
        function["strict"] = tool["strict"]
    return function


def _describe_custom(tool: dict[str, object], where: str) -> dict[str, object]:
    lines = [read_text(tool, "description", where)]
    lines.append(f"To call it as a function, put the whole plain text into the argument '{INPUT_ARGUMENT}'.")
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        path = f"{where}.format"
        syntax, definition = read_text(form, "syntax", path), need_text(form, "definition", path)
        lines.append(f"The text must follow this grammar{f' ({syntax})' if syntax else ''}:\n{definition}")
    return {
        "description": "\n\n".join(filter(None, lines)),
        "parameters": {
            "type": "object",
            "properties": {INPUT_ARGUMENT: {"type": "string", "description": "The plain text the tool takes."}},
            "required": [INPUT_ARGUMENT],
            "additionalProperties": False,
        },
    }


Item = dict[str, object]

# What OpenAI's servers did in between: the answer that follows says what came of it.
_LEFT_OUT = frozenset({
    "code_interpreter_call", "file_search_call", "image_generation_call", "mcp_approval_request", "mcp_approval_response",
    "mcp_call", "mcp_list_tools", "web_search_call",
})  # fmt: skip
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
        # What only a user's message can hold of the results of tools; it follows behind the last of them.
        self._shown: list[Content] = []
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
    if kind in _CALLS.values():
        tool = ToolName(CallKind(kind), need_text(item, "name", where), read_text(item, "namespace", where))
        if tool.kind is CallKind.CUSTOM:
            return tool, wrap_input(need_text(item, "input", where))
        return tool, need_text(item, "arguments", where) or "{}"
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
