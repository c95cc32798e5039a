"""Tools, and the choice among them, as chat completions take them.

Tools that run on Anthropic's servers, and those whose schema only Anthropic's models were taught, are left out: agents send
them to every model and do without when nothing comes of it.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw

from gateway.dialects.messages.schema import (
    LeftOut,
    Message,
    Tool,
    ToolChange,
    ToolChoice,
    decode_as,
    is_absent,
    is_object,
)
from gateway.errors import BadRequest

_CUSTOM = frozenset({None, "custom", "function"})
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_tools_decoder = msgspec.json.Decoder(list[Tool] | None)
_choice_decoder = msgspec.json.Decoder(ToolChoice | None)
_change_decoder = msgspec.json.Decoder(ToolChange)


def translate_tools(raw: Raw, messages: list[Message], ignored: LeftOut) -> dict[str, object]:
    """Return, by name, the function tools in effect at the end of the conversation. Raises BadRequest."""
    tools: dict[str, object] = {}
    declared = [] if is_absent(raw) else decode_as(_tools_decoder, raw, "tools") or []
    for number, tool in enumerate(declared):
        _declare(tools, tool, f"tools[{number}]", ignored)
    for number, message in enumerate(messages):
        if message.role == "system" and isinstance(message.content, list):
            _apply_changes(tools, message, f"messages[{number}].content", ignored)
    return tools


def translate_choice(raw: Raw, tools: dict[str, object], ignored: LeftOut) -> dict[str, object]:
    """Return ``tool_choice`` and ``parallel_tool_calls``, as far as the request says either. Raises BadRequest."""
    choice = None if is_absent(raw) else decode_as(_choice_decoder, raw, "tool_choice")
    if choice is None:
        return {}
    wanted: object = _CHOICES.get(choice.type)
    if choice.type == "tool":
        if not choice.name:
            raise BadRequest("The field 'tool_choice.name' is required.", param="tool_choice.name")
        wanted = {"type": "function", "function": {"name": choice.name}}
    if wanted is None:
        raise BadRequest("The field 'tool_choice.type' must be auto, any, tool or none.", param="tool_choice.type")
    if not tools or (choice.type == "tool" and choice.name not in tools):
        if choice.type != "none":
            ignored.note("tool_choice")  # it is about a tool that was left out
        return {}
    fields: dict[str, object] = {"tool_choice": wanted}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _declare(tools: dict[str, object], tool: Tool, path: str, ignored: LeftOut) -> None:
    has_schema = is_object(tool.input_schema)
    if tool.type not in _CUSTOM and not (has_schema and tool.name):
        ignored.note(f"tools.{tool.type}")
        return
    if not tool.name:
        raise BadRequest(f"The field '{path}.name' is required.", param=f"{path}.name")
    if not has_schema:
        raise BadRequest(f"The field '{path}.input_schema' is required and must be an object.", param=f"{path}.input_schema")
    if not is_absent(tool.input_examples):
        ignored.note("tools.input_examples")
    function: dict[str, object] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    tools[tool.name] = {"type": "function", "function": function}


def _apply_changes(tools: dict[str, object], message: Message, path: str, ignored: LeftOut) -> None:
    """Apply ``tool_addition`` and ``tool_removal`` blocks. A tool added by name was declared, and is offered from the start."""
    for number, block in enumerate(message.content if isinstance(message.content, list) else ()):
        if block.type not in {"tool_addition", "tool_removal"}:
            continue
        inner = f"{path}[{number}].tool"
        if is_absent(block.tool):
            raise BadRequest(f"The field '{inner}' is required.", param=inner)
        change = decode_as(_change_decoder, block.tool, inner)
        if block.type == "tool_removal":
            tools.pop(change.name or "", None)
        elif change.definition is not None:
            _declare(tools, change.definition, f"{inner}.definition", ignored)
