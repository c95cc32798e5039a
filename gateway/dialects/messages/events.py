"""Events of a Messages stream as bytes, and the parts of an answer that streamed and whole ones share.

Source: Anthropic API reference, "Streaming messages". Only texts go through an encoder; the rest are templates.
"""

from __future__ import annotations

import msgspec

from gateway.dialects.chat import ChatUsage

_encoder = msgspec.json.Encoder()
encode = _encoder.encode

UNSIGNED = "unsigned"
"""Signature of every thinking block: no engine signs, and some clients send back only what is signed."""
RAW_ARGUMENTS_KEY = "INVALID_JSON"
"""Where the text of arguments stands that are no JSON object; Anthropic's guide to fine-grained tool streaming names it so."""

MESSAGE_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTA_END = b"}}\n\n"
_START = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_TEXT_BLOCK = b'{"type":"text","text":""}'
_THINKING_BLOCK = b'{"type":"thinking","thinking":"","signature":""}'


def render_message_start(message_id: str, model: str, usage: ChatUsage | None) -> bytes:
    """Return the first event. Counts that the engine has not said yet are 0; ``message_delta`` has the final ones."""
    message: dict[str, object] = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": make_usage(usage) | {"output_tokens": 0},
    }
    return b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n' % encode(message)


def render_text_start(index: int) -> bytes:
    """Return the event that opens a text block."""
    return _START % (index, _TEXT_BLOCK)


def render_thinking_start(index: int) -> bytes:
    """Return the event that opens a thinking block."""
    return _START % (index, _THINKING_BLOCK)


def render_call_start(index: int, call_id: str, name: str) -> bytes:
    """Return the event that opens a ``tool_use`` block."""
    return _START % (index, encode({"type": "tool_use", "id": call_id, "name": name, "input": {}}))


def make_text_prefix(index: int) -> bytes:
    """Return a text delta up to its text, which goes between this and ``DELTA_END`` as a JSON string."""
    return _DELTA % (index, b"text_delta", b"text")


def make_thinking_prefix(index: int) -> bytes:
    """As ``make_text_prefix``, for thinking."""
    return _DELTA % (index, b"thinking_delta", b"thinking")


def make_arguments_prefix(index: int) -> bytes:
    """As ``make_text_prefix``, for a piece of the input of a tool."""
    return _DELTA % (index, b"input_json_delta", b"partial_json")


def render_signature(index: int) -> bytes:
    """Return the last delta of a thinking block."""
    return _DELTA % (index, b"signature_delta", b"signature") + encode(UNSIGNED) + DELTA_END


def render_block_stop(index: int) -> bytes:
    """Return the event that closes a block."""
    return _STOP % index


def render_message_delta(stop_reason: str, stop_sequence: str | None, usage: ChatUsage | None) -> bytes:
    """Return the event with the reason of the end and the final counts."""
    return b'event: message_delta\ndata: {"type":"message_delta","delta":%b,"usage":%b}\n\n' % (
        encode({"stop_reason": stop_reason, "stop_sequence": stop_sequence}),
        encode(make_usage(usage)),
    )


def make_usage(usage: ChatUsage | None) -> dict[str, object]:
    """Return ``usage`` of a message, in tokens. ``input_tokens`` is without those read from a cache; an engine counts all."""
    if usage is None:
        usage = ChatUsage()
    cached, thought = usage.cached, usage.thought
    counts: dict[str, object] = {
        "input_tokens": max(0, usage.prompt - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion,
    }
    return counts if thought is None else counts | {"output_tokens_details": {"thinking_tokens": thought}}
