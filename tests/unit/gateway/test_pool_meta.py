"""What goes in front of the closing event of a stream, and what only looks like one."""

from __future__ import annotations

import json

import pytest

from gateway.dialects.pool_meta import MetaStream, PoolMeta, add_meta
from gateway.keeping import mark_unkept

META = PoolMeta(
    gpu_id="node_1", node="box", model="m", asked_model="auto", queue_ms=1, inference_ms=2, ttfb_ms=None, attempts=1
)
CHUNK = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[]}\n\n'


def feed(stream: bytes, cut: int) -> bytes:
    """Pass a stream in two pieces."""
    calls: list[PoolMeta] = []

    def measure() -> PoolMeta:
        calls.append(META)
        return META

    meta = MetaStream(measure)
    out = meta.feed(stream[:cut]) + meta.feed(stream[cut:]) + meta.finish()
    assert len(calls) <= 1
    return out


@pytest.mark.parametrize("cut", range(0, 2 * len(CHUNK) + 14, 7))
def test_a_chat_stream_gets_one_chunk_without_choices_before_done(cut: int) -> None:
    out = feed(CHUNK + CHUNK + b"data: [DONE]\n\n", cut)
    events = out.split(b"\n\n")
    assert out.startswith(CHUNK + CHUNK)
    assert events[3:] == [b"data: [DONE]", b""]
    chunk = json.loads(events[2].removeprefix(b"data: "))
    assert (chunk["id"], chunk["created"], chunk["choices"], chunk["x_pool_meta"]["gpu_id"]) == ("chatcmpl-1", 7, [], "node_1")


def test_messages_get_an_event_before_message_stop() -> None:
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    begin = b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1"}}\n\n'
    delta = b'event: message_delta\ndata: {"type":"message_delta"}\n\n'
    for cut in (0, 10, len(begin), len(begin + delta) + 3):
        out = feed(begin + delta + stop, cut)
        assert out.startswith(begin + delta + b"event: x_pool_meta\n")
        assert out.endswith(stop)


def test_responses_get_a_field_in_the_closing_object() -> None:
    first = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n'
    data = b'{"type":"response.completed","sequence_number":3,"response":{"id":"resp_1","output":[]}}'
    last = b"event: response.completed\ndata: " + data + b"\n\n"
    out = feed(first + last, len(first) + 5)
    assert out.startswith(first + b"event: response.completed\ndata: ")
    event = json.loads(out[len(first) :].partition(b"data: ")[2])
    assert (event["sequence_number"], event["response"]["id"], event["response"]["x_pool_meta"]["attempts"]) == (3, "resp_1", 1)


def test_a_stream_that_breaks_gets_nothing() -> None:
    stream = CHUNK + b'data: {"error":{"message":"no"}}\n\n'
    assert feed(stream, 30) == stream


def test_a_whole_answer_gets_a_field_and_what_is_no_object_stays() -> None:
    assert json.loads(add_meta(b'{"id":"x"}', META))["x_pool_meta"]["node"] == "box"
    assert add_meta(b"[1]", META) == b"[1]"
    assert add_meta(b"RIFF\xff", META) == b"RIFF\xff"


def test_text_that_looks_like_the_end_of_a_stream_is_text() -> None:
    first = b'data: {"id":"c","choices":[{"delta":{"content":"it ends with data: [DONE] always"}}]}\n\n'
    out = feed(first + b"data: [DONE]\n\n", 9)
    assert out.startswith(first)
    assert out.count(b"x_pool_meta") == 1
    assert out.endswith(b"}\n\ndata: [DONE]\n\n")


def test_an_echo_that_looks_like_the_closing_event_is_an_echo() -> None:
    first = (
        b'event: response.created\ndata: {"type":"response.created","response":{"metadata":{"type":"response.completed"}}}\n\n'
    )
    last = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n'
    out = feed(first + last, 9)
    assert out.startswith(first)
    assert out.count(b"x_pool_meta") == 1


@pytest.mark.parametrize("blanks", [b"", b" "], ids=["tight", "spaced"])
def test_an_unkept_answer_may_speak_of_data(blanks: bytes) -> None:
    response = {"id": "r", "store": True, "output": [{"text": "event: x\ndata: y"}], "ratio": 1.5}
    event = json.dumps({"type": "response.completed", "response": response}).encode()
    before = b'event: a\ndata: {"type":"a","text":"data: z"}\n\n'
    out = mark_unkept(before + b"event: response.completed\ndata:" + blanks + event + b"\n\n")
    assert out.startswith(before + b"event: response.completed\ndata: {")
    assert out.endswith(b"}\n\n")
    assert json.loads(out.rpartition(b"\ndata:")[2])["response"] == {**response, "store": False}
    assert json.loads(mark_unkept(json.dumps(response).encode())) == {**response, "store": False}
