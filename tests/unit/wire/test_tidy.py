"""Sloppy chat chunks put right: read by OpenAI's own SDK, and left alone where they are in order."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest

from wire.tidy import ChatTidier


def chunk(delta: dict[str, Any] | None = None, *, finish: str | None = None, **more: Any) -> bytes:
    choices = [{"index": 0, "delta": delta or {}, "finish_reason": finish}]
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def call(arguments: object, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{**more, "function": {**more.get("function", {}), "arguments": arguments}}]}


DONE = b"data: [DONE]\n\n"
GOOD = [
    chunk({"role": "assistant", "content": None}),
    chunk({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": ""}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"a"'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": ":1}"}}]}),
    chunk(finish="tool_calls"),
]
LOOK = {"name": "look"}
TGI = {"index": 0, "id": "", "type": "function"}
SLOPPY: dict[str, list[bytes]] = {
    "null ids and names behind": [
        chunk({"content": ""}),
        chunk(call("", index=0, id="call_1", type="function", function=LOOK)),
        chunk(call('{"a"', index=0, id=None, type=None, function={"name": None})),
        chunk(call(":1}", index=0, id="", type="function", function={"name": ""})),
        chunk(finish="tool_calls"),
    ],
    "the id again and again": [
        chunk({"role": "assistant"}),
        chunk(call('{"a"', index=0, id="call_1", type="function", function=LOOK)),
        chunk(call(":1}", index=0, id="call_1", type="function", function=LOOK)),
        chunk(finish="tool_calls"),
    ],
    "no index": [
        chunk(call('{"a"', id="call_1", type="function", function=LOOK)),
        chunk(call(":1}", id=None)),
        chunk({"tool_calls": None}, finish="tool_calls"),
    ],
    "no id at all": [
        chunk(call('{"a"', index=0, id="", function=LOOK)),
        chunk(call(":1}", index=0, id="")),
        chunk({"tool_calls": []}, finish="tool_calls"),
    ],
    "no list (TGI)": [
        chunk({"role": "assistant", "tool_calls": {**TGI, "function": {"name": "look", "arguments": '{"a"'}}}),
        chunk({"role": "assistant", "tool_calls": {**TGI, "function": {"name": None, "arguments": ":1}"}}}),
        chunk(finish="tool_calls"),
    ],
    "an object": [chunk({"role": None, **call({"a": 1}, index=0, id="call_1", function=LOOK)}), chunk(finish="tool_calls")],
}


def tidy(stream: bytes, size: int = 1 << 20) -> bytes:
    tidier = ChatTidier()
    return b"".join(tidier.feed(stream[at : at + size]) for at in range(0, len(stream), size)) + tidier.finish()


def read(stream: bytes) -> Any:
    """Return what OpenAI's stream helper makes of a stream, which raises for what it cannot join."""
    reply = httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=stream)
    transport = httpx2.MockTransport(lambda _request: reply)
    with (
        openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=transport)) as client,
        client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}]) as events,
    ):
        return events.get_final_completion().choices[0].message


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
@pytest.mark.parametrize("chunks", SLOPPY.values(), ids=SLOPPY)
def test_the_sdk_reads_one_whole_call_out_of_sloppy_chunks(chunks: list[bytes], size: int) -> None:
    out = tidy(b"".join([*chunks, DONE]), size)
    message = read(out)
    (found,) = message.tool_calls
    assert (message.role, found.type, found.function.name) == ("assistant", "function", "look")
    assert json.loads(found.function.arguments) == {"a": 1}
    assert found.id
    assert out.count(b'"id":"call_') == 1
    assert out.endswith(DONE)


@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_what_is_in_order_goes_out_byte_for_byte(size: int) -> None:
    usage = b'data: {"id":"c", "choices":[],  "usage":{"prompt_tokens":1}}\n\n'
    stream = b"".join([b": ping\n\n", *GOOD, usage, b'data: {"error":{"message":"no"}}\n\n', b"data: {broken\n\n", DONE])
    assert tidy(stream, size) == stream


def test_two_calls_on_one_index_become_two() -> None:
    first, second = (call("{}", index=0, id=f"call_{n}", type="function", function={"name": f"f{n}"}) for n in (1, 2))
    message = read(
        tidy(b"".join([chunk({"role": "assistant"}), chunk(first), chunk(second), chunk(finish="tool_calls"), DONE]))
    )
    assert [(one.id, one.function.name) for one in message.tool_calls] == [("call_1", "f1"), ("call_2", "f2")]


def test_usage_without_choices_gets_them() -> None:
    out = tidy(b'data: {"id":"c","usage":{"prompt_tokens":1}}\n\n')
    assert json.loads(out[6:]) == {"id": "c", "usage": {"prompt_tokens": 1}, "choices": []}


def test_what_is_left_of_an_event_goes_out_as_it_is() -> None:
    assert tidy(b'data: {"choices":[{"del') == b'data: {"choices":[{"del'
