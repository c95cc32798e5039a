"""Whatever a model says, and however its engine and the network cut it up: the same message comes out, and goes back in.

The oracles are a reader of our own, which knows the API reference only, and Anthropic's Python SDK.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.messages import to_chat_body
from tests.unit.gateway.messages_engine import DONE, call, chunk, open_answer, translate, usage, write_event
from tests.unit.gateway.messages_reader import read_events, read_message

_WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ["\\", '"', '\\"', "\\u0041", "\u2028", "\r\n\r\n", "data: [DONE]\n\n", "😀", "\x00", "}", "{", "é"]
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3),
    max_leaves=8,
)
_DEEP = json.loads('{"a":' * 90 + "{}" + "}" * 90)
_ARGUMENTS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(_WORDS, _JSON, max_size=3) | st.just({}) | st.just(_DEEP)


@dataclass(frozen=True)
class Answer:
    """What a model said: the chat message, and its tool calls in the order in which they began."""

    thought: str
    text: str
    calls: list[tuple[str, str, str]]
    """Id, name and the text of the arguments."""
    chunks: list[bytes]

    @property
    def stream(self) -> bytes:
        """The whole event stream of the engine."""
        finish = "tool_calls" if self.calls else "stop"
        return b"".join([chunk(role="assistant", content=""), *self.chunks, chunk(finish), usage(), DONE])


def split(draw: st.DrawFn, value: str, most: int = 4) -> list[str]:
    """Return a text in a few pieces, none of them empty."""
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(value) - 1)), max_size=most)))
    return [piece for piece in map(value.__getitem__, map(slice, [0, *cuts], [*cuts, len(value)])) if piece]


def write_arguments(draw: st.DrawFn) -> str:
    """Return an object as some engine would write it."""
    value = draw(_ARGUMENTS)
    return json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))


@st.composite
def answers(draw: st.DrawFn, *, most_calls: int = 3) -> Answer:
    """An answer, and its chunks: thoughts before words, calls in a row or mixed with each other and with words."""
    thoughts, words = split(draw, draw(_WORDS)), split(draw, draw(_WORDS))
    name_of_thoughts = draw(st.sampled_from(["reasoning", "reasoning_content"]))
    queues = [[chunk(**{name_of_thoughts: piece}) for piece in thoughts] + [chunk(content=piece) for piece in words]]
    calls = []
    for number in range(draw(st.integers(0, most_calls))):
        arguments = write_arguments(draw)
        made = (f"call_{number}", f"tool_{number}", arguments)
        first, *rest = ["", *split(draw, arguments)] if draw(st.booleans()) else split(draw, arguments)
        calls.append(made)
        queues.append([call(number, first, name=made[1], call_id=made[0]), *[call(number, piece) for piece in rest]])
    chunks = list(_mix(draw, queues)) if draw(st.booleans()) else [piece for queue in queues for piece in queue]
    begun = [json.loads(piece[6:])["choices"][0]["delta"].get("tool_calls") for piece in chunks]
    order = [parts[0]["id"] for parts in begun if parts and "id" in parts[0]]
    return Answer("".join(thoughts), "".join(words), sorted(calls, key=lambda made: order.index(made[0])), chunks)


def _mix(draw: st.DrawFn, queues: list[list[bytes]]) -> Iterator[bytes]:
    waiting = [list(queue) for queue in queues if queue]
    while waiting:
        queue = waiting[draw(st.integers(0, len(waiting) - 1))]
        yield queue.pop(0)
        waiting = [queue for queue in waiting if queue]


def join(blocks: list[dict[str, Any]], kind: str) -> str:
    return "".join(block[kind] for block in blocks if block["type"] == kind)


def assert_says(message: dict[str, Any], answer: Answer) -> None:
    blocks = message["content"]
    assert join(blocks, "thinking") == answer.thought
    assert join(blocks, "text") == answer.text
    made = [(block["id"], block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
    assert made == [(call_id, name, json.loads(arguments)) for call_id, name, arguments in answer.calls]
    assert message["stop_reason"] == ("tool_use" if answer.calls else "end_turn")
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (11, 7)


@given(answers(), st.data())
@settings(max_examples=50, deadline=None)
def test_a_stream_cut_anywhere_says_what_the_model_said(answer: Answer, data: st.DataObject) -> None:
    stream = answer.stream
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream) - 1), max_size=20)))
    out, translator = translate(stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True))
    assert translator.failure is None
    assert_says(read_message(out), answer)


SMALL = Answer(
    "hm",
    'é😀"\\',
    [("c1", "f", '{"a":"\\ud83d\\ude00\\""}'), ("c2", "g", "{}")],
    [
        chunk(reasoning="hm"),
        chunk(content='é😀"\\'),
        call(0, '{"a":"\\ud83d', name="f", call_id="c1"),
        call(1, "", name="g", call_id="c2"),
        call(0, '\\ude00\\""}'),
        call(1, "{}"),
    ],
)


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_one_cut_at_every_byte_changes_nothing(line_end: bytes) -> None:
    stream = SMALL.stream.replace(b"\n", line_end)
    expected, _ = translate([stream])
    assert_says(read_message(expected), SMALL)
    for cut in range(1, len(stream)):
        out, _ = translate([stream[:cut], stream[cut:]])
        assert out == expected, f"cut at {cut}"
    bytewise, _ = translate(stream[at : at + 1] for at in range(len(stream)))
    assert bytewise == expected


@given(answers(most_calls=2))
@settings(max_examples=10, deadline=None)
def test_a_stream_in_single_bytes_is_the_same_stream(answer: Answer) -> None:
    stream = answer.stream
    out, _ = translate(stream[at : at + 1] for at in range(len(stream)))
    assert out == translate([stream])[0]


def test_a_truncated_stream_never_has_an_end_that_the_engine_did_not_say() -> None:
    stream = SMALL.stream
    said_at = stream.index(b'"finish_reason": "tool_calls"}]}') + len(b'"finish_reason": "tool_calls"}]}')
    for length in range(len(stream)):
        out, translator = translate([stream[:length]])
        has_end = length >= said_at
        assert (translator.failure is None) == has_end, f"cut at {length}"
        assert (b"message_stop" in out) == has_end
        assert (b"message_delta" in out) == has_end
        if out:
            read_message(out, is_whole=has_end)


@given(answers())
@settings(max_examples=40, deadline=None)
def test_what_was_said_goes_back_as_the_engine_said_it(answer: Answer) -> None:
    out, _ = translate([answer.stream])
    said = read_message(out)["content"]
    history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": said}, {"role": "user", "content": "b"}]
    body, ignored = to_chat_body(json.dumps({"model": "m", "max_tokens": 5, "messages": history}).encode())
    assert ignored == ()
    chat = json.loads(body)["messages"]
    if not (answer.thought or answer.text or answer.calls):
        assert [message["role"] for message in chat] == ["user"]
        return
    message = chat[1]
    assert message["content"] == answer.text
    assert message.get("reasoning_content", "") == message.get("reasoning", "") == answer.thought
    assert [
        (made["id"], made["function"]["name"], json.loads(made["function"]["arguments"]))
        for made in message.get("tool_calls", [])
    ] == [(call_id, name, json.loads(arguments)) for call_id, name, arguments in answer.calls]


@given(answers())
@settings(max_examples=40, deadline=None)
def test_a_whole_answer_says_what_the_stream_of_it_says(answer: Answer) -> None:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in answer.calls
    ]
    message = {"role": "assistant", "content": answer.text or None, "reasoning_content": answer.thought, "tool_calls": calls}
    counts = {"prompt_tokens": 11, "completion_tokens": 7}
    body = write_event({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": counts})[6:]
    assert_says(json.loads(open_answer().translate_whole(body)), answer)


@given(st.lists(st.binary(max_size=40) | answers(most_calls=1).map(lambda answer: answer.stream[:200]), max_size=4))
@settings(max_examples=40, deadline=None)
def test_no_bytes_make_a_translator_raise_or_speak_ill(pieces: list[bytes]) -> None:
    out, translator = translate(pieces)
    assert (b"message_stop" in out) == (translator.failure is None)
    read_events(out)


# The SDK


def read_with_sdk(data: bytes) -> dict[str, Any]:
    """Return the message that Anthropic's SDK puts together of a stream."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        del request
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)

    with httpx2.Client(transport=httpx2.MockTransport(answer)) as http:
        client = anthropic.Anthropic(api_key="key", base_url="http://gateway.invalid", http_client=http, max_retries=0)
        asked: list[anthropic.types.MessageParam] = [{"role": "user", "content": "a"}]
        with client.messages.stream(model="qwen", max_tokens=5, messages=asked) as stream:
            return stream.get_final_message().to_dict()


@given(answers())
@settings(max_examples=25, deadline=None)
def test_the_sdk_reads_what_the_model_said(answer: Answer) -> None:
    out, _ = translate([answer.stream])
    message = read_with_sdk(out)
    assert_says(message, answer)
    assert message["content"] == read_message(out)["content"]


def test_the_sdk_raises_when_the_stream_breaks() -> None:
    out, translator = translate([chunk(content="a"), write_event({"error": {"message": "out of memory", "code": 500}})])
    assert translator.failure is not None
    error = b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"out of memory"}}\n\n'
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        read_with_sdk(out + error)
