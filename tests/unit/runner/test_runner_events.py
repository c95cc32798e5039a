"""Cutting event streams and taking usage out of them: no byte is lost, moved or sent before its event is whole."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.bridge import TokenCounts
from wire.events import EventCutter, find_boundary
from wire.limits import WIRE
from wire.usage import BodyReader, StreamReader, ask_for_usage

CHAT = "/v1/chat/completions"
STREAMS = st.lists(
    st.sampled_from([b"data: x", b"event: e", b": ping", b"\n", b"\n\n", b"\r\n", b"\r\n\r\n", b"\r", b"\xe2\x82\xac", b""])
).map(b"".join)


def chunk_of(text: str) -> bytes:
    """Return an OpenAI chunk with some text."""
    return b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()


USAGE = b'data: {"choices": [], "usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}\n\n'
DONE = b"data: [DONE]\n\n"


def cut_up(data: bytes, cuts: list[int]) -> list[bytes]:
    """Return ``data`` in pieces that end at ``cuts``."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    starts = [0, *places[:-1]]
    return [data[start:end] for start, end in zip(starts, places, strict=True)]


@given(STREAMS, st.lists(st.integers(0, 80)))
def test_the_cutter_keeps_every_byte_in_order_and_cuts_behind_blank_lines(data: bytes, cuts: list[int]) -> None:
    cutter = EventCutter()
    outs = [cutter.feed(piece) for piece in cut_up(data, cuts) if piece]
    assert b"".join([*outs, cutter.finish()]) == data
    sent = b""
    for out in outs:
        sent += out
        if out:
            assert find_boundary(sent) == len(sent)


@given(STREAMS, st.lists(st.integers(0, 80)))
def test_the_cutter_never_holds_a_finished_event(data: bytes, cuts: list[int]) -> None:
    cutter, seen, sent = EventCutter(), b"", b""
    for piece in cut_up(data, cuts):
        seen += piece
        sent += cutter.feed(piece)
        assert find_boundary(seen[len(sent) :]) == 0


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"\n", 0),
        (b"data: a\n", 0),
        (b"data: a\n\n", 9),
        (b"data: a\n\ndata: b\n", 9),
        (b"data: a\r\n\r\nx", 11),
        (b"data: a\r\n", 0),
        (b"data: a\r\rx", 9),
        (b"data: a\n\r\nx", 10),
    ],
)
def test_boundaries_follow_every_kind_of_line_end(data: bytes, expected: int) -> None:
    assert find_boundary(data) == expected


def test_an_endless_event_is_passed_on_instead_of_being_held() -> None:
    cutter = EventCutter()
    big = b"data: " + b"x" * WIRE.event_held_bytes
    assert cutter.feed(big) == big
    inside = [cutter.is_inside_event]
    assert cutter.feed(b"end\n\ndata: ") == b"end\n\n"
    inside.append(cutter.is_inside_event)
    assert inside == [True, False]
    assert cutter.finish() == b"data: "


@given(st.lists(st.integers(0, 400)), st.booleans(), st.booleans())
def test_the_usage_chunk_is_read_and_dropped_only_when_the_box_asked_for_it(cuts: list[int], drops: bool, crlf: bool) -> None:
    talk = chunk_of("a") + chunk_of('say \\"usage\\" and \\"choices\\":[]')
    data, kept = talk + USAGE + DONE, talk + DONE
    if crlf:
        data, kept = data.replace(b"\n", b"\r\n"), kept.replace(b"\n", b"\r\n")
    reader = StreamReader(drops_usage=drops)
    out = b"".join([*(reader.feed(piece) for piece in cut_up(data, cuts) if piece), reader.finish()])
    assert out == (kept if drops else data)
    assert reader.usage() == TokenCounts(prompt_tokens=3, completion_tokens=4, total_tokens=7)


def test_chunks_with_null_usage_or_filter_results_stay() -> None:
    first = b'data: {"choices":[],"usage":null,"prompt_filter_results":[]}\n\n'
    reader = StreamReader(drops_usage=True)
    assert reader.feed(first) == first
    assert reader.usage() is None


def test_usage_of_anthropic_and_responses_streams_is_understood() -> None:
    anthropic = StreamReader(drops_usage=False)
    anthropic.feed(b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"output_tokens":1}}}\n\n')
    anthropic.feed(b'event: message_delta\ndata: {"delta":{},"usage":{"output_tokens":5}}\n\n')
    assert anthropic.usage() == TokenCounts(prompt_tokens=9, completion_tokens=5, total_tokens=14)
    responses = StreamReader(drops_usage=False)
    responses.feed(
        b'data: {"type":"response.completed","response":{"usage":{"input_tokens":1,"output_tokens":2,"total_tokens":3}}}\n\n'
    )
    assert responses.usage() == TokenCounts(prompt_tokens=1, completion_tokens=2, total_tokens=3)


def test_usage_of_an_unstreamed_answer_is_read_up_to_a_size() -> None:
    answer = b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":2}}'
    reader = BodyReader(is_readable=True)
    assert b"".join([reader.feed(answer[:20]), reader.feed(answer[20:]), reader.finish()]) == answer
    assert reader.usage() == TokenCounts(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    large = BodyReader(is_readable=True)
    large.feed(b" " * (WIRE.usage_body_bytes + 1))
    large.feed(answer)
    assert large.usage() is None
    assert BodyReader(is_readable=False).usage() is None


@pytest.mark.parametrize("answer", [b"", b"not json", b"[]", b'{"usage":"much"}', b'{"usage":{"prompt_tokens":-1}}'])
def test_nonsense_is_no_usage(answer: bytes) -> None:
    reader = BodyReader(is_readable=True)
    reader.feed(answer)
    assert reader.usage() is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"model": "m"}'),
        (CHAT, b'{"stream": false}'),
        (CHAT, b'{"stream": true, "stream_options": {"include_usage": true}}'),
        (CHAT, b"not json"),
        (CHAT, b'[{"stream": true}]'),
        (CHAT, b'{"stream": "yes"}'),
        (CHAT, b"\xff"),
        ("/v1/messages", b'{"stream": true}'),
    ],
)
def test_a_body_is_left_alone_unless_it_is_a_stream_without_usage(path: str, body: bytes) -> None:
    assert ask_for_usage(path, body) == (body, False)


@pytest.mark.parametrize(
    "body",
    [
        b' {"model":"m","stream":true,"x":1e2}',
        b'{"stream":true,"stream_options":null}',
        b'{"stream":true,"stream_options":{"include_usage":false,"other":1}}',
        b'{"stream":true,"messages":[{"content":"\\"stream_options\\": hello"}]}',
    ],
)
def test_usage_is_asked_for_and_everything_else_stays(body: bytes) -> None:
    changed, drops = ask_for_usage(CHAT, body)
    assert drops
    before, after = json.loads(body), json.loads(changed)
    wanted = {**(before.pop("stream_options", None) or {}), "include_usage": True}
    assert after.pop("stream_options") == wanted
    assert after == before


def test_adding_the_option_changes_no_other_byte() -> None:
    body = b' {"stream" : true, "n":1.50, "n":2}'
    assert ask_for_usage(CHAT, body)[0] == b' {"stream_options":{"include_usage":true},"stream" : true, "n":1.50, "n":2}'
