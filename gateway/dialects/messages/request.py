"""A request of ``/v1/messages`` said as one of ``/v1/chat/completions``. Pure.

Fields that chat engines may know go through as they are; what only Anthropic's own service does is left out by name, or
refused where the answer would mean something else without it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Raw

from gateway.dialects.body import read_fields
from gateway.dialects.messages.blocks import read_content
from gateway.dialects.messages.schema import (
    LeftOut,
    Message,
    Metadata,
    OutputConfig,
    OutputFormat,
    Thinking,
    decode_as,
    is_absent,
    is_object,
)
from gateway.dialects.messages.tools import translate_choice, translate_tools
from gateway.dialects.messages.turns import Turns
from gateway.errors import BadRequest
from gateway.whole_numbers import WholeNumber, read_whole_number

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
_Value = TypeVar("_Value")

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
_encoder = msgspec.json.Encoder()


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
    """Say whether and how hard to think.

    Templates know ``enable_thinking``, and pass over what they do not know; effort has a field of its own; a budget is read by
    llama.cpp alone, while vLLM's field for it makes models without a reasoning parser fail. ``adaptive`` says nothing.
    """
    thinking = _read(_thinking_decoder, fields, "thinking") or Thinking("adaptive")
    is_off = thinking.type == "disabled"
    if is_off or thinking.type == "enabled":
        asked = _read(_options_decoder, fields, "chat_template_kwargs") or {}
        chat["chat_template_kwargs"] = {"enable_thinking": not is_off, **asked}
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
    """Add what is about the answer: where it stops, its stream, and for whom it is."""
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
    """Say the schema of a structured answer as ``response_format``."""
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
