"""Tools of a request as chat functions, and their names back: a chat engine knows functions alone.

Custom tools (free text, such as Codex's apply_patch) become functions with one text argument, the tools of a namespace
functions with a flat name, a search for tools that the client itself carries out a function too. What OpenAI's servers
would carry out (web search, file search, code interpreter …) is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from gateway.dialects.responses.checks import field_error, kind_of, need_list, need_object, need_text, read_text, show_name
from wire.unreadable import UNREADABLE

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
        """Return the chat function that stands for a tool, also for one this request does not have."""
        return self._flat.get(tool) or _join_name(tool)

    def name_choice(self, choice: dict[str, object], where: str) -> str | None:
        """Return the chat function that an entry of a choice names; None when no tool of the request is meant."""
        kind = kind_of(choice)
        namespace = read_text(choice, "namespace", where)
        if kind == "function":
            tool = ToolName(CallKind.FUNCTION, need_text(choice, "name", where), namespace)
        elif kind == "custom":
            tool = ToolName(CallKind.CUSTOM, need_text(choice, "name", where), namespace)
        elif kind == SEARCH_TOOL:
            tool = ToolName(CallKind.SEARCH, SEARCH_TOOL)
        else:
            return None
        return self._flat.get(tool)

    def _add_namespace(self, tool: dict[str, object], where: str) -> None:
        name = need_text(tool, "name", where)
        about = read_text(tool, "description", where)
        for n, value in enumerate(need_list(tool.get("tools"), f"{where}.tools")):
            path = f"{where}.tools[{n}]"
            if not self._add_one(need_object(value, path), path, namespace=name, about=about):
                self.ignored.append(path)

    def _add_one(self, tool: dict[str, object], where: str, *, namespace: str, about: str) -> bool:
        """Add a tool if a chat function can stand for it."""
        kind = kind_of(tool)
        if kind == "function":
            named = ToolName(CallKind.FUNCTION, need_text(tool, "name", where), namespace)
            function = _describe_function(tool, where)
        elif kind == "custom":
            named = ToolName(CallKind.CUSTOM, need_text(tool, "name", where), namespace)
            function = _describe_custom(tool, where)
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
    """Leave out what is not allowed: engines do not know the field."""
    mode = choice.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise field_error("tool_choice.mode", "must be auto or required")
    where = "tool_choice.tools"
    entries = [need_object(value, f"{where}[{n}]") for n, value in enumerate(need_list(choice.get("tools"), where))]
    allowed = {table.name_choice(entry, f"{where}[{n}]") for n, entry in enumerate(entries)}
    functions = [function for flat, function in table.functions.items() if flat in allowed]
    if mode == "required" and not functions:
        raise field_error(where, "names no tool of the request that can be called here")
    return functions, mode if functions else None


def unwrap_input(arguments: str) -> str:
    """Return the text of a custom tool's call from the arguments of the function that stands for it.

    Models err: the only text under another name counts too, and what is no such object is taken as it is.
    """
    try:
        value = msgspec.json.decode(arguments)
    except UNREADABLE:
        return arguments
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        given = value.get(INPUT_ARGUMENT, next(iter(value.values())) if len(value) == 1 else None)
        if isinstance(given, str):
            return given
    return arguments


def wrap_input(text: str) -> str:
    """Return the arguments that say a custom tool's text."""
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
