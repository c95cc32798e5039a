"""A chat engine on paper: chunks of a stream, and what a translator makes of them however they are cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from gateway.dialects.messages import MessagesTranslator
from gateway.dialects.translation import AnswerContext

DONE = b"data: [DONE]\n\n"
REQUEST_ID = "req_0193a5c2"


def open_answer(model: str = "qwen") -> MessagesTranslator:
    """Return the translator of a fresh attempt."""
    return MessagesTranslator(AnswerContext(request_id=REQUEST_ID, model=model, created=1_763_769_600))


def write_event(value: object) -> bytes:
    """Return a value as one event."""
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def chunk(finish: str | None = None, **delta: object) -> bytes:
    """Return a chunk with one choice."""
    return write_event(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "engine-name",
            "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
        }
    )


def call(index: int | None, arguments: str | None = None, *, name: str | None = None, call_id: str | None = None) -> bytes:
    """Return a chunk with a piece of one tool call, with just the keys that are given."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    part: dict[str, Any] = {"index": index} if index is not None else {}
    if call_id is not None:
        part |= {"id": call_id, "type": "function"}
    return chunk(tool_calls=[{**part, "function": function}])


def usage(prompt: int = 11, completion: int = 7, **details: object) -> bytes:
    """Return the chunk that an engine was asked for with ``include_usage``."""
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **details}
    return write_event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "choices": [], "usage": counts})


def translate(pieces: Iterable[bytes]) -> tuple[bytes, MessagesTranslator]:
    """Feed pieces and finish; return all that came out."""
    translator = open_answer()
    out = b"".join([translator.feed(piece) for piece in pieces])
    return out + translator.finish(), translator


def say(*chunks: bytes, finish: str = "stop") -> tuple[bytes, MessagesTranslator]:
    """Translate a whole stream: the chunks, a finish_reason, usage, the end."""
    return translate([chunk(role="assistant", content=""), *chunks, chunk(finish), usage(), DONE])
