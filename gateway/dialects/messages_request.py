"""A request of ``/v1/messages`` said as one of ``/v1/chat/completions``. Pure.

Fields that chat engines may know go through as they are; what only Anthropic's own service does is left out by name, or
refused where the answer would mean something else without it. Source: Anthropic API reference, "Messages".
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from msgspec import Raw

from core.limits import limits
from gateway.dialects.body import read_fault, read_fields
from gateway.dialects.chat import Translation
from gateway.dialects.messages_answer import MessagesTranslator
from gateway.errors import BadRequest
from gateway.values import CHAT_PATH, InferenceRequest, WholeNumber, read_whole_number
from wire.unreadable import UNREADABLE

_Value = TypeVar("_Value")
_encoder = msgspec.json.Encoder()
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")


class Block(msgspec.Struct):
    """One content block of any type. What differs in shape between types stays JSON text."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: Raw = Raw()
    title: str | None = None
    context: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = Raw()
    tool_use_id: str | None = None
    content: Raw = Raw()
    is_error: bool | None = None
    tool_name: str | None = None
    tabs: Raw = Raw()
    tool: Raw = Raw()


class Message(msgspec.Struct):
    """One turn. ``clear_at``: when a system message after the first turn stops being shown."""

    role: str
    content: str | list[Block] | None = None
    clear_at: str | None = None
    output_config: Raw = Raw()


class Source(msgspec.Struct):
    """Where an image or a document is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Raw = Raw()


class Tool(msgspec.Struct):
    """A tool the client runs, or one that only Anthropic's servers have (no ``input_schema``)."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: Raw = Raw()
    strict: bool | None = None
    input_examples: Raw = Raw()


class ToolChange(msgspec.Struct):
    """What ``tool_addition`` and ``tool_removal`` blocks speak of: a tool by name, or a new one."""

    type: str
    name: str | None = None
    definition: Tool | None = None


class ToolChoice(msgspec.Struct):
    """Whether the model must, may or must not call a tool."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model thinks first, and for how many tokens."""

    type: str
    budget_tokens: WholeNumber | None = None


class OutputFormat(msgspec.Struct):
    """What an answer must look like."""

    type: str
    schema: Raw = Raw()


class OutputConfig(msgspec.Struct):
    """How hard to try, and in what form to answer."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Raw = Raw()


class Metadata(msgspec.Struct):
    """Whom a request is for."""

    user_id: str | None = None


def is_absent(raw: Raw) -> bool:
    return not raw or (len(raw) == len(b"null") and bytes(raw) == b"null")


def is_object(raw: Raw) -> bool:
    return memoryview(raw)[:1].tobytes() == b"{"


def decode_as(decoder: msgspec.json.Decoder[_Value], raw: Raw, name: str) -> _Value:
    """Return the value of the field ``name`` (a path such as ``messages[3].content``). Raises BadRequest naming its part."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        reason, path = read_fault(error)
        param = name + path
        raise BadRequest(f"The field '{param}' is not usable: {reason}.", param=param) from None
    except UNREADABLE as error:
        raise BadRequest(f"The field '{name}' is not valid JSON: {error}.", param=name) from None


class LeftOut:
    """Names of what a translation leaves out, each once, fit for a header however a client chose them."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def note(self, name: str) -> None:
        if len(self._names) < limits().gateway.ignored_names:
            self._names[_UNSAFE.sub("?", name[: limits().gateway.ignored_name_chars])] = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)


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
    for number, block in enumerate(message.content if isinstance(message.content, list) else ()):
        if block.type not in {"tool_addition", "tool_removal"}:
            continue
        inner = f"{path}[{number}].tool"
        if is_absent(block.tool):
            raise BadRequest(f"The field '{inner}' is required.", param=inner)
        change = decode_as(_change_decoder, block.tool, inner)
        if block.type == "tool_removal":
            tools.pop(change.name or "", None)
        # A tool that is added by name was declared, and is offered from the start.
        elif change.definition is not None:
            _declare(tools, change.definition, f"{inner}.definition", ignored)


Part = dict[str, object]
"""A part of a chat message: ``{"type": "text" | "image_url" | "file", …}``."""
SEPARATOR = "\n\n"
"""Between two blocks of text that become one."""
_SECRETS = ("encrypted_", "cache_control", "signature", "citations", "caller")
"""Keys of a server's result that mean nothing to another model."""
_SERVER_RESULTS = "_tool_result"
_source_decoder = msgspec.json.Decoder(Source)
_content_decoder = msgspec.json.Decoder(str | list[Block] | None)
_any_decoder = msgspec.json.Decoder()


def make_text(text: str) -> Part:
    return {"type": "text", "text": text}


def join_parts(parts: list[Part]) -> str | list[Part]:
    if any(part["type"] != "text" for part in parts):
        return [part for part in parts if part["type"] != "text" or part["text"]]
    # One text where it is all text: some templates know nothing else.
    return SEPARATOR.join(str(part["text"]) for part in parts if part["text"])


def read_content(raw: msgspec.Raw, path: str) -> list[Block]:
    """Return the blocks of a ``content`` field that may also be one text or absent. Raises BadRequest."""
    if is_absent(raw):
        return []
    content = decode_as(_content_decoder, raw, path)
    return [Block(type="text", text=content)] if isinstance(content, str) else content or []


def render_block(block: Block, path: str) -> list[Part]:
    """Return a block as parts of a chat message. Raises BadRequest naming what cannot be given to a chat engine."""
    match block.type:
        case "text":
            return [make_text(require_text(block.text, f"{path}.text"))]
        case "image":
            return [_render_image(block, path)]
        case "document":
            return _render_document(block, path)
        case "search_result":
            return _render_search_result(block, path)
        case "tool_reference":
            return [make_text(f"Tool available: {block.tool_name or block.name or ''}")]
        case "compaction":
            return _render_described(block.content, "Summary of the conversation so far", path)
        case "browser_state":
            return _render_described(block.tabs, "Open tabs", path)
        case kind if kind.endswith(_SERVER_RESULTS) and kind != "tool_result":
            return _render_described(block.content, f"Result of {kind.removesuffix(_SERVER_RESULTS)}", path)
    message = f"A block of type '{block.type[:80]}' cannot be given to this model."
    raise BadRequest(message, param=f"{path}.type")


def describe_call(block: Block, path: str) -> Part:
    said = describe(block.input, path)
    return make_text(f"[Called {block.name or block.type}]" + (f"\n{said}" if said else ""))


def describe(raw: msgspec.Raw, path: str) -> str:
    lines: list[str] = []
    # No recursion: clients choose the depth.
    waiting: list[tuple[str, object]] = [("", decode_as(_any_decoder, raw, path))] if not is_absent(raw) else []
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            is_binary = not str(value.get("media_type", "text/")).startswith("text/")
            told = ((name, part) for name, part in reversed(value.items()) if _is_told(name, part))
            waiting.extend((name, part) for name, part in told if not (is_binary and name == "data"))
        elif isinstance(value, list):
            waiting.extend((key, part) for part in reversed(value))
        elif value is not None and value != "":
            lines.append(f"{key}: {value}" if key else str(value))
    return "\n".join(lines)


def require_text(text: str | None, path: str) -> str:
    if text is None:
        raise BadRequest(f"The field '{path}' is required and must be text.", param=path)
    return text


def _is_told(key: str, value: object) -> bool:
    return not key.startswith(_SECRETS) and (key != "type" or not isinstance(value, str))


def _render_described(raw: msgspec.Raw, title: str, path: str) -> list[Part]:
    said = describe(raw, f"{path}.content")
    return [make_text(f"[{title}]\n{said}")] if said else []


def _render_image(block: Block, path: str) -> Part:
    source = _read_source(block, path)
    if source.type == "url":
        return {"type": "image_url", "image_url": {"url": require_text(source.url, f"{path}.source.url")}}
    if source.type == "base64":
        data = require_text(source.data, f"{path}.source.data")
        return {"type": "image_url", "image_url": {"url": f"data:{source.media_type or 'image/jpeg'};base64,{data}"}}
    raise _refuse_source(source, path, "base64, url")


def _render_document(block: Block, path: str) -> list[Part]:
    source = _read_source(block, path)
    about = [text for text in (block.title, block.context) if text]
    match source.type:
        case "text":
            return [make_text(SEPARATOR.join([*about, require_text(source.data, f"{path}.source.data")]))]
        case "content":
            inner = f"{path}.source.content"
            blocks = read_content(source.content, inner)
            return [make_text(text) for text in about] + [
                part for number, item in enumerate(blocks) for part in _render_flat(item, f"{inner}[{number}]")
            ]
        case "base64":
            media_type = source.media_type or "application/pdf"
            data = require_text(source.data, f"{path}.source.data")
            file = {"filename": block.title or "document.pdf", "file_data": f"data:{media_type};base64,{data}"}
            context = [make_text(block.context)] if block.context else []
            return [*context, {"type": "file", "file": file}]
    raise _refuse_source(source, path, "text, content, base64")


def _render_flat(block: Block, path: str) -> list[Part]:
    # The reference allows no documents here: each level would be read again.
    if block.type not in {"text", "image"}:
        raise BadRequest("The content of a document may have text and images only.", param=f"{path}.type")
    return render_block(block, path)


def _render_search_result(block: Block, path: str) -> list[Part]:
    texts = [item.text or "" for item in read_content(block.content, f"{path}.content")]
    source = describe(block.source, f"{path}.source")
    return [make_text("\n".join(text for text in (block.title, source, SEPARATOR.join(texts)) if text))]


def _read_source(block: Block, path: str) -> Source:
    if is_absent(block.source):
        raise BadRequest(f"The field '{path}.source' is required.", param=f"{path}.source")
    return decode_as(_source_decoder, block.source, f"{path}.source")


def _refuse_source(source: Source, path: str, usable: str) -> BadRequest:
    param = f"{path}.source.type"
    return BadRequest(
        f"A source of type '{source.type[:80]}' cannot be given to this model; use one of: {usable}.", param=param
    )


ChatMessage = dict[str, object]
# Claude Code's first block of ``system``: of no meaning to a model, and new each time, so no prefix would be found cached.
_BILLING_HEADER = "x-anthropic-billing-header:"
_SYSTEM_ROLES = frozenset({"system", "developer"})
_REMINDER = "<system-reminder>"
"""How Claude Code marks, within a user turn, what the user did not write."""
_UNTIL_NEXT_USER = "next_user_message"
_SILENT_BLOCKS = frozenset({"fallback"})
"""Not shown to a model by its own API either."""


class Turns:
    """Collects messages. ``ignored`` gets the names of what is left out."""

    def __init__(self, ignored: LeftOut) -> None:
        self._ignored = ignored
        self._system: list[str] = []
        self._messages: list[ChatMessage] = []
        self._said: list[Part] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[object] = []
        self._has_begun = False

    def finish(self) -> list[ChatMessage]:
        self._flush_answer()
        self._flush_user()
        system: list[ChatMessage] = []
        if self._system:
            system = [{"role": "system", "content": SEPARATOR.join(self._system)}]
        return system + self._messages

    def add_system(self, blocks: list[Block], path: str) -> None:
        for number, block in enumerate(blocks):
            if block.type != "text":
                raise BadRequest("The field 'system' may have blocks of text only.", param=f"{path}[{number}].type")
            text = require_text(block.text, f"{path}[{number}].text")
            if text.startswith(_BILLING_HEADER):
                text = text.partition("\n")[2]
            if text:
                self._system.append(text)

    def add_all(self, messages: list[Message]) -> None:
        """Take the ``messages`` field. Raises BadRequest."""
        last_user = max((number for number, message in enumerate(messages) if message.role == "user"), default=-1)
        for number, message in enumerate(messages):
            path = f"messages[{number}]"
            blocks = message.content
            if isinstance(blocks, str):
                blocks = [Block(type="text", text=blocks)]
            if message.role in _SYSTEM_ROLES:
                if message.clear_at != _UNTIL_NEXT_USER or number > last_user:
                    self._add_reminder(message, blocks or [], path)
                continue
            self._has_begun = True
            if blocks is None:
                raise BadRequest(f"The field '{path}.content' is required.", param=f"{path}.content")
            if message.role == "user":
                self._add_user(blocks, path)
            elif message.role == "assistant":
                self._add_assistant(blocks, path)
            else:
                raise BadRequest("The role of a message must be 'user', 'assistant' or 'system'.", param=f"{path}.role")

    def _add_reminder(self, message: Message, blocks: list[Block], path: str) -> None:
        """A system message: part of the first one while nobody has spoken, later a marked part of the user's turn."""
        if not is_absent(message.output_config):
            self._ignored.note("messages.output_config")
        texts = [block for block in blocks if block.type not in {"tool_addition", "tool_removal"}]
        if not self._has_begun:
            self.add_system(texts, f"{path}.content")
            return
        self._flush_answer()
        for number, block in enumerate(texts):
            text = require_text(block.text, f"{path}.content[{number}].text")
            if text:
                is_marked = text.lstrip().startswith(_REMINDER)
                self._said.append(make_text(text if is_marked else f"{_REMINDER}\n{text}\n</system-reminder>"))

    def _add_user(self, blocks: list[Block], path: str) -> None:
        self._flush_answer()
        seen: list[Part] = []
        said: list[Part] = []
        for number, block in enumerate(blocks):
            inner = f"{path}.content[{number}]"
            if block.type == "tool_result":
                seen += self._add_result(block, inner)
            else:
                said += render_block(block, inner)
        if not said and all(block.type != "tool_result" for block in blocks):
            said.append(make_text(""))  # somebody has to be there to answer
        self._said += seen + said

    def _add_result(self, block: Block, path: str) -> list[Part]:
        """Add what a tool returned, and return what of it only a user message can hold."""
        call = require_text(block.tool_use_id, f"{path}.tool_use_id")
        told: list[Part] = []
        shown: list[Part] = []
        for number, item in enumerate(read_content(block.content, f"{path}.content")):
            for part in render_block(item, f"{path}.content[{number}]"):
                (told if part["type"] == "text" else shown).append(part)
        if shown:
            told.append(make_text(f"[{len(shown)} attached in the next user message]"))
            shown.insert(0, make_text(f"Attached to the result of tool call {call}:"))
        text = str(join_parts(told))
        if block.is_error:
            text = f"The tool call failed:\n{text}" if text else "The tool call failed."
        self._messages.append({"role": "tool", "tool_call_id": call, "content": text})
        return shown

    def _add_assistant(self, blocks: list[Block], path: str) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[object] = []
        for number, block in enumerate(blocks):
            inner = f"{path}.content[{number}]"
            match block.type:
                case "text":
                    texts.append(require_text(block.text, f"{inner}.text"))
                case "thinking":
                    thoughts.append(block.thinking or "")
                case "tool_use":
                    calls.append(_make_call(block, inner))
                case _:
                    texts += self._tell_of_server(block, inner)
        self._append_answer("".join(texts), "".join(thoughts), calls)

    def _tell_of_server(self, block: Block, path: str) -> list[str]:
        # A conversation that began elsewhere must go on here.
        match block.type:
            case "server_tool_use" | "mcp_tool_use":
                parts = [describe_call(block, f"{path}.input")]
            case "compaction" | "search_result":
                parts = render_block(block, path)
            case kind if kind.endswith("_tool_result"):
                parts = render_block(block, path)
            case kind:
                if kind not in _SILENT_BLOCKS:
                    self._ignored.note(f"messages.{kind}")
                return []
        return [f"{part['text']}\n" for part in parts]

    def _append_answer(self, text: str, thought: str, calls: list[object]) -> None:
        if not (text or thought or calls):
            return
        self._flush_user()
        if self._calls:
            self._flush_answer()  # calls end a message
        if text:
            self._texts.append(text)
        self._thoughts.append(thought)
        self._calls += calls

    def _flush_answer(self) -> None:
        thought = "".join(self._thoughts)
        if not (self._texts or thought or self._calls):
            return
        message: ChatMessage = {"role": "assistant", "content": SEPARATOR.join(self._texts)}
        if thought:
            # Engines read one name or the other (vLLM renamed it), and none minds both.
            message["reasoning_content"] = message["reasoning"] = thought
        if self._calls:
            message["tool_calls"] = self._calls
        self._messages.append(message)
        self._texts, self._thoughts, self._calls = [], [], []

    def _flush_user(self) -> None:
        if self._said:
            self._messages.append({"role": "user", "content": join_parts(self._said)})
            self._said = []


def _make_call(block: Block, path: str) -> dict[str, object]:
    arguments = "{}" if is_absent(block.input) else bytes(block.input).decode()
    if not arguments.startswith("{"):
        raise BadRequest(f"The field '{path}.input' must be an object.", param=f"{path}.input")
    return {
        "id": require_text(block.id, f"{path}.id"),
        "type": "function",
        "function": {"name": require_text(block.name, f"{path}.name"), "arguments": arguments},
    }


_TRANSLATED = frozenset({
    "messages", "system", "tools", "tool_choice", "stop_sequences", "metadata", "thinking", "output_config", "output_format",
    "cache_control", "x_pool_options", "n", "mcp_servers",
})  # fmt: skip
"""Fields that are read below, or leave no trace."""
_LEFT_OUT = frozenset({
    "anthropic_beta", "anthropic_version", "betas", "billing_policy", "container", "context_management", "diagnostics",
    "fallback_credit_token", "fallbacks", "inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id",
})  # fmt: skip
_REFUSED = {
    "thread": "Conversations are not held here; send all their messages.",
    "compaction": "Conversations cannot be compacted here; ask for a summary in a message.",
}
_OF_AN_ANSWER = frozenset({"max_tokens", "stream", "stream_options"})
"""What a request that only counts tokens has no use for."""
_TOO_HARD = frozenset({"xhigh", "max"})
_TOP_EFFORT = "high"
"""The strongest that every engine knows which knows any."""
_NOTHING = Raw()
_EMPTY_LIST = Raw(b"[]")
_messages_decoder = msgspec.json.Decoder(list[Message])
_metadata_decoder = msgspec.json.Decoder(Metadata | None)
_thinking_decoder = msgspec.json.Decoder(Thinking | None, dec_hook=read_whole_number)
_config_decoder = msgspec.json.Decoder(OutputConfig | None)
_format_decoder = msgspec.json.Decoder(OutputFormat | None)
_stops_decoder = msgspec.json.Decoder(list[str] | None)
_options_decoder = msgspec.json.Decoder(dict[str, object] | None)
_list_decoder = msgspec.json.Decoder(list[Raw] | None)
_count_decoder = msgspec.json.Decoder(WholeNumber | None, dec_hook=read_whole_number)
_stream_decoder = msgspec.json.Decoder(bool | None)


def to_chat_body(body: bytes, *, is_counting: bool = False) -> tuple[bytes, tuple[str, ...]]:
    """Return the body of a chat request, and the names of the fields it leaves out.

    ``is_counting``: only for the size of its prompt, so nothing about the answer is in it. Raises BadRequest naming a field.
    """
    fields = _read_top(body)
    ignored = LeftOut()
    _check_unsupported(fields, ignored)
    messages = decode_as(_messages_decoder, fields.get("messages", _EMPTY_LIST), "messages")
    turns = Turns(ignored)
    turns.add_system(read_content(fields.get("system", _NOTHING), "system"), "system")
    turns.add_all(messages)
    tools = translate_tools(fields.get("tools", _NOTHING), messages, ignored)
    config = _read(_config_decoder, fields, "output_config") or OutputConfig()
    chat: dict[str, object] = {
        name: value
        for name, value in fields.items()
        if name not in _TRANSLATED and name not in _LEFT_OUT and not is_absent(value)
    }
    chat["messages"] = turns.finish()
    if tools:
        chat["tools"] = list(tools.values())
    chat |= translate_choice(fields.get("tool_choice", _NOTHING), tools, ignored)
    _add_thinking(chat, fields, config, ignored)
    if is_counting:
        chat = {name: value for name, value in chat.items() if name not in _OF_AN_ANSWER}
    else:
        _add_answering(chat, fields)
        _add_format(chat, fields, config)
    return _encoder.encode(chat), ignored.names


def _read(decoder: msgspec.json.Decoder[_Value], fields: dict[str, Raw], name: str) -> _Value | None:
    return decode_as(decoder, fields[name], name) if name in fields else None


def _read_top(body: bytes) -> dict[str, Raw]:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"The request body is not UTF-8: {error.reason}.") from None
    return read_fields(body)


def _check_unsupported(fields: dict[str, Raw], ignored: LeftOut) -> None:
    for name, why in _REFUSED.items():
        if not is_absent(fields.get(name, _NOTHING)):
            raise BadRequest(f"The field '{name}' is not supported. {why}", param=name)
    if _read(_list_decoder, fields, "mcp_servers"):
        message = "The field 'mcp_servers' is not supported: no server is called from here. Give their tools as 'tools'."
        raise BadRequest(message, param="mcp_servers")
    if _read(_count_decoder, fields, "n") not in {None, 1}:
        raise BadRequest("The field 'n' must be 1: a message has one answer.", param="n")
    for name, value in fields.items():
        if name in _LEFT_OUT and not is_absent(value):
            ignored.note(name)


def _add_thinking(chat: dict[str, object], fields: dict[str, Raw], config: OutputConfig, ignored: LeftOut) -> None:
    thinking = _read(_thinking_decoder, fields, "thinking") or Thinking("adaptive")
    is_off = thinking.type == "disabled"
    if is_off or thinking.type == "enabled":
        # Templates know ``enable_thinking``, and pass over what they do not know.
        asked = _read(_options_decoder, fields, "chat_template_kwargs") or {}
        chat["chat_template_kwargs"] = {"enable_thinking": not is_off, **asked}
    # llama.cpp alone reads a budget; vLLM's field for it makes models without a reasoning parser fail.
    if thinking.type == "enabled" and thinking.budget_tokens is not None:
        chat.setdefault("thinking_budget_tokens", thinking.budget_tokens)
    if not is_absent(config.task_budget):
        ignored.note("output_config.task_budget")
    if config.effort is None:
        return
    if is_off or config.effort in _TOO_HARD:
        ignored.note("output_config.effort")
    if not is_off:
        chat.setdefault("reasoning_effort", _TOP_EFFORT if config.effort in _TOO_HARD else config.effort)


def _add_answering(chat: dict[str, object], fields: dict[str, Raw]) -> None:
    if stops := _read(_stops_decoder, fields, "stop_sequences"):
        chat["stop"] = stops
    metadata = _read(_metadata_decoder, fields, "metadata")
    if metadata is not None and metadata.user_id:
        chat.setdefault("user", metadata.user_id)
    if _read(_stream_decoder, fields, "stream"):
        options = _read(_options_decoder, fields, "stream_options") or {}
        chat["stream_options"] = {**options, "include_usage": True}
    else:
        chat.pop("stream_options", None)


def _add_format(chat: dict[str, object], fields: dict[str, Raw], config: OutputConfig) -> None:
    wanted, path = config.format, "output_config.format"
    if wanted is None:
        wanted, path = _read(_format_decoder, fields, "output_format"), "output_format"
    if wanted is None:
        return
    if wanted.type != "json_schema":
        raise BadRequest(f"The field '{path}.type' must be json_schema.", param=f"{path}.type")
    if not is_object(wanted.schema):
        raise BadRequest(f"The field '{path}.schema' is required and must be an object.", param=f"{path}.schema")
    chat["response_format"] = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": wanted.schema, "strict": True},
    }


def translate_messages(request: InferenceRequest) -> Translation:
    """Return a request of ``/v1/messages`` as a chat request. Raises BadRequest naming the field that cannot be carried."""
    body, ignored = to_chat_body(request.body)
    return Translation(path=CHAT_PATH, body=body, open_answer=MessagesTranslator, ignored=ignored)
