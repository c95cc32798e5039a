"""A chat engine on paper: chunks of its streams, and what the gateway's translations make of them for a client."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any  # JSON

from conformance.exchange import read_stream
from conformance.readers import messages as messages_reader
from gateway.dialects.chat import AnswerContext, AnswerTranslator, FailingTranslator, Translation
from gateway.dialects.surface import SURFACES
from gateway.errors import GatewayError

Json = dict[str, Any]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
REQUEST_ID = "req_ab12"
CONTEXT = AnswerContext(REQUEST_ID, "m", 1_795_000_000, lambda: 0.0)
DONE = b"data: [DONE]\n\n"
ASKED: dict[str, Json] = {
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {"input": "x", "tools": [{"type": "function", "name": "f"}]},
}


def write_event(value: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(value, separators=(",", ":")).encode()


def chunk(delta: Json | None = None, finish: str | None = None, **more: object) -> bytes:
    return write_event({"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more})


def call(index: int, arguments: str = "", **more: str) -> Json:
    """Return the delta of a piece of a tool call. ``more``: its ``name`` and ``id``, where it has them."""
    function = {"arguments": arguments} | ({"name": more.pop("name")} if "name" in more else {})
    return {"tool_calls": [{"index": index, **more, "function": function}]}


def cut(stream: bytes, size: int) -> Iterator[bytes]:
    return (stream[at : at + size] for at in range(0, len(stream), size))


def say_request(path: str, **fields: object) -> Translation:
    surface = SURFACES[path]
    assert surface.translate is not None
    return surface.translate(surface.parse(json.dumps({"model": "m", **ASKED[path], **fields}).encode(), {}))


def open_answer(path: str, **fields: object) -> AnswerTranslator:
    return say_request(path, **{"stream": True, **fields}).open_answer(CONTEXT)


def run(path: str, pieces: Iterable[bytes], translator: AnswerTranslator | None = None) -> tuple[bytes, GatewayError | None]:
    """Do with an engine's stream what the relay does; return the client's stream and how it failed."""
    translator = translator or open_answer(path)
    out: list[bytes] = []
    for piece in pieces:
        out.append(translator.feed(piece))
        if translator.failure is not None:
            break
    else:
        out.append(translator.finish())
    failure = translator.failure
    if failure is not None:
        said = translator.fail(failure) if isinstance(translator, FailingTranslator) else b""
        out.append(said or SURFACES[path].render_stream_error(failure, REQUEST_ID))
    return b"".join(out), failure


@dataclass
class Said:
    """What a client heard. ``calls``: id, name and the text of the arguments; ``items``: as they may go back."""

    thought: str = ""
    text: str = ""
    refusal: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    reason: str = ""
    items: list[Json] = field(default_factory=list)


def read_message(message: Json) -> Said:
    said = Said(reason=message["stop_reason"], items=message["content"])
    for block in message["content"]:
        said.thought += block.get("thinking", "")
        said.text += block.get("text", "")
        if block["type"] == "tool_use":
            said.calls.append((block["id"], block["name"], json.dumps(block["input"])))
    return said


def read_response(response: Json) -> Said:
    said = Said(reason=response["status"], items=response["output"])
    for item in response["output"]:
        for part in item.get("content", ()):
            said.thought += part["text"] if part["type"] == "reasoning_text" else ""
            said.text += part["text"] if part["type"] == "output_text" else ""
            said.refusal += part.get("refusal", "")
        if "call_id" in item:
            said.calls.append((item["call_id"], item["name"], item.get("input", item.get("arguments"))))
    return said


def read_said(path: str, data: bytes) -> Said:
    stream = read_stream(data)
    if path == MESSAGES:
        heard = messages_reader.require_end(messages_reader.read_messages(stream))
        assert heard.delta is not None
        content: list[Json] = []
        for block in heard.blocks:
            start = block.start.members()
            match block.kind:
                case "tool_use":
                    content.append(start | {"input": json.loads(block.text or "{}")})
                case "thinking":
                    content.append(start | {"thinking": block.text, "signature": "s"})
                case _:
                    content.append(start | {"text": block.text})
        return read_message({"content": content, **heard.delta["delta"].members()})
    events = [json.loads(event.data) for event in stream.events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    grown: dict[str, str] = defaultdict(str)
    for event in events:
        grown[event.get("item_id", "")] += event.get("delta", "")
    for item in events[-1]["response"]["output"]:
        parts = "".join(part.get("text", part.get("refusal")) for part in item.get("content", ()))
        assert grown[item["id"]] == item.get("input", item.get("arguments", parts))
    return read_response(events[-1]["response"])


READERS: dict[str, Callable[[Json], Said]] = {MESSAGES: read_message, RESPONSES: read_response}
