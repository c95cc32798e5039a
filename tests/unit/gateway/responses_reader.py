"""An independent reader of /v1/responses streams, strict where the published SDKs are; and how tests ask and answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from gateway.dialects.responses import ResponsesTranslator, translate_responses
from gateway.dialects.translation import AnswerContext
from gateway.values import InferenceRequest

LIFECYCLE = ("response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed")
ENDS = LIFECYCLE[2:]
OBJECT_KEYS = {
    "background",
    "completed_at",
    "created_at",
    "error",
    "frequency_penalty",
    "id",
    "incomplete_details",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "model",
    "object",
    "output",
    "parallel_tool_calls",
    "presence_penalty",
    "previous_response_id",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "service_tier",
    "status",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
    "usage",
}
Event = dict[str, Any]


@dataclass
class Grown:
    """An item put together from its events alone."""

    added: Event
    parts: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    open_part: int | None = None
    argument: str = ""
    final: Event | None = None


@dataclass
class Reading:
    """What a stream said. ``items`` by output index; ``end`` None: it has not ended."""

    events: list[Event] = field(default_factory=list)
    items: dict[int, Grown] = field(default_factory=dict)
    response_id: str = ""
    end: Event | None = None

    @property
    def names(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def response(self) -> Event:
        assert self.end is not None, "the stream has no end"
        response: Event = self.end["response"]
        return response

    @property
    def text(self) -> str:
        return "".join(
            text
            for _index, item in sorted(self.items.items())
            for text, kind in zip(item.parts, item.kinds, strict=True)
            if kind == "output_text"
        )


def split_events(stream: bytes) -> list[Event]:
    """Cut a stream into events; every one has a name, and data that say the same name."""
    assert stream == b"" or stream.endswith(b"\n\n"), "an event is not finished"
    events = []
    for block in stream.split(b"\n\n")[:-1]:
        name, _newline, data = block.partition(b"\n")
        assert name.startswith(b"event: "), block[:200]
        assert data.startswith(b"data: "), block[:200]
        assert b"\n" not in data, block[:200]
        event = json.loads(data[6:])
        assert event["type"] == name[7:].decode()
        events.append(event)
    return events


def read_stream(stream: bytes) -> Reading:
    """Read a whole stream or the beginning of one; an AssertionError says what a strict SDK would refuse."""
    reading = Reading()
    for number, event in enumerate(split_events(stream)):
        assert event["sequence_number"] == number
        assert reading.end is None, "something came after the end"
        assert (event["type"] == "response.created") == (number == 0)
        if event["type"] in LIFECYCLE:
            _read_lifecycle(reading, event)
        elif event["type"].startswith("response.output_item."):
            _read_item(reading, event)
        elif event["type"] != "response.metrics":
            _read_inside(reading.items[event["output_index"]], event)
        reading.events.append(event)
    return reading


def _read_lifecycle(reading: Reading, event: Event) -> None:
    response = event["response"]
    reading.response_id = reading.response_id or response["id"]
    assert response["id"] == reading.response_id
    assert set(response) - {"user", "output_text", "metrics"} == OBJECT_KEYS
    if event["type"] not in ENDS:
        assert (response["status"], response["output"], response["usage"]) == ("in_progress", [], None)
        return
    reading.end = event
    assert [_identify(item) for item in response["output"]] == [
        _identify(item.added) for _index, item in sorted(reading.items.items())
    ]
    if event["type"] == "response.failed":
        return
    for item, grown in zip(response["output"], (item for _index, item in sorted(reading.items.items())), strict=True):
        assert grown.final is not None, "an item is not finished"
        assert item == grown.final


def _identify(item: Event) -> tuple[str, str, str | None]:
    return item["type"], item["id"], item.get("call_id")


def _read_item(reading: Reading, event: Event) -> None:
    index, item = event["output_index"], event["item"]
    if event["type"] == "response.output_item.added":
        assert index == len(reading.items), "an output index is used twice, or left out"
        assert item["id"] not in {grown.added["id"] for grown in reading.items.values()}
        assert item["status"] == "in_progress"
        assert not any(item.get(name) for name in ("content", "arguments", "input"))
        reading.items[index] = Grown(item)
        return
    grown = reading.items[index]
    assert grown.final is None, "an item is finished twice"
    assert grown.open_part is None, "a part is not finished"
    assert _identify(item) == _identify(grown.added)
    assert item["status"] in {"completed", "incomplete"}
    if item["type"] in {"message", "reasoning"}:
        texts = [part.get("text", part.get("refusal")) for part in item["content"]]
        assert (texts, [part["type"] for part in item["content"]]) == (grown.parts, grown.kinds)
    elif item["type"] != "tool_search_call":
        assert item.get("arguments", item.get("input")) == grown.argument
    grown.final = item


def _read_inside(grown: Grown, event: Event) -> None:
    name = event["type"].removeprefix("response.")
    assert event["item_id"] == grown.added["id"]
    assert grown.final is None, "an item grows after its end"
    if name == "content_part.added":
        assert grown.open_part is None
        assert event["content_index"] == len(grown.parts)
        grown.open_part = len(grown.parts)
        grown.parts.append("")
        grown.kinds.append(event["part"]["type"])
    elif name == "content_part.done":
        assert event["content_index"] == grown.open_part
        part = event["part"]
        assert (part["type"], part.get("text", part.get("refusal"))) == (grown.kinds[-1], grown.parts[-1])
        grown.open_part = None
    elif name in {"function_call_arguments.delta", "custom_tool_call_input.delta"}:
        grown.argument += event["delta"]
    elif name in {"function_call_arguments.done", "custom_tool_call_input.done"}:
        assert event.get("arguments", event.get("input")) == grown.argument
        assert name.startswith("custom") or event["name"] == grown.added["name"]
    else:
        _read_text(grown, event, name)


def _read_text(grown: Grown, event: Event, name: str) -> None:
    kind, _dot, what = name.partition(".")
    assert (event["content_index"], kind) == (grown.open_part, grown.kinds[-1])
    assert grown.added["type"] == ("reasoning" if kind == "reasoning_text" else "message")
    if kind == "output_text":
        assert isinstance(event["logprobs"], list)
    if what == "delta":
        grown.parts[-1] += event["delta"]
    else:
        assert what == "done"
        assert event.get("text", event.get("refusal")) == grown.parts[-1]


def ask(**fields: object) -> InferenceRequest:
    """Return a request for /v1/responses with these fields beside the model and a short input."""
    body = json.dumps({"model": "m", "input": "hello", **fields}).encode()
    return InferenceRequest(
        endpoint="/v1/responses",
        model="m",
        is_streaming=fields.get("stream") is True,
        max_tokens=None,
        prompt_chars=5,
        body=body,
        headers={},
    )


def open_answer(**fields: object) -> ResponsesTranslator:
    """Return the translator of the answer to such a request."""
    opened = translate_responses(ask(**fields)).open_answer(
        AnswerContext(request_id="req_ab12", model="m", created=1_795_000_000)
    )
    assert isinstance(opened, ResponsesTranslator)
    return opened


def write_chunk(delta: Event | None = None, finish_reason: str | None = None, **more: object) -> bytes:
    """Return one event of a chat stream; without a delta it has no choice."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    choices = [] if delta is None else [choice]
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def write_call(index: int | None, arguments: str = "", *, name: str | None = None, call_id: str | None = None) -> Event:
    """Return the delta with the next piece of a tool call."""
    function = {"arguments": arguments, **({"name": name} if name is not None else {})}
    call = {"function": function, **({"index": index} if index is not None else {}), **({"id": call_id} if call_id else {})}
    return {"tool_calls": [call]}


def run_stream(translator: ResponsesTranslator, *chunks: bytes) -> Reading:
    """Feed whole chunks, end the stream, and read what came out; a failure is said as the relay would say it."""
    out = b"".join(translator.feed(chunk) for chunk in chunks) + translator.finish()
    if translator.failure is not None:
        out += translator.fail(translator.failure)
    return read_stream(out)
