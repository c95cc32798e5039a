"""Whether an engine's event stream is whole: by its closing event alone, wherever it is cut and however it comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.recorded_streams import (
    BARE_ERRORS,
    CHAT,
    COMPLETIONS,
    DONE,
    FAILURES,
    MESSAGES,
    RESPONSES,
    STREAMS,
    RecordedStream,
    choice,
    chunk,
    event,
    typed,
)
from wire.events import EndReader, StreamEnd, open_end_reader
from wire.limits import WIRE


def open_reader(path: str) -> EndReader:
    reader = open_end_reader(path)
    assert reader is not None
    return reader


def read(path: str, *pieces: bytes) -> tuple[bytes, StreamEnd]:
    """Feed a whole stream; return what may reach a client, and the verdict."""
    reader = open_reader(path)
    out = b"".join([reader.feed(piece) for piece in pieces]) + reader.finish()
    return out, reader.judge()


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: f"{stream.path} {stream.name}")
def test_a_stream_cut_anywhere_is_whole_once_its_closing_event_is_there(stream: RecordedStream) -> None:
    data = stream.data
    for cut in range(len(data) + 1):
        out, end = read(stream.path, data[:cut])
        assert end is (StreamEnd.WHOLE if cut >= stream.whole_at else StreamEnd.CUT), data[:cut]
        assert out.rstrip(b"\r\n") == data[: len(out.rstrip(b"\r\n"))]


@given(data=st.data(), stream=st.sampled_from(STREAMS))
def test_how_a_stream_is_cut_into_pieces_changes_nothing(data: st.DataObject, stream: RecordedStream) -> None:
    length = data.draw(st.integers(0, len(stream.data)), label="length")
    cuts = sorted(data.draw(st.lists(st.integers(0, length)), label="cuts"))
    pieces = [stream.data[start:end] for start, end in zip([0, *cuts], [*cuts, length], strict=True)]
    assert read(stream.path, *pieces) == read(stream.path, stream.data[:length])


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: f"{stream.path} {stream.name}")
def test_a_whole_stream_passes_byte_for_byte(stream: RecordedStream) -> None:
    assert read(stream.path, *stream.events) == (stream.data, StreamEnd.WHOLE)
    assert read(stream.path, *(stream.data[at : at + 1] for at in range(len(stream.data)))) == (stream.data, StreamEnd.WHOLE)


@pytest.mark.parametrize("done", [b"data: [DONE]", b"data: [DONE]\n", b"data:[DONE]\r\n", b'data: {"error":"boom"}'])
def test_an_event_that_lacks_only_its_blank_line_is_given_one(done: bytes) -> None:
    word = chunk(choice("a"))
    out, end = read(CHAT, word, done)
    assert out == word + done.rstrip() + b"\n\n"
    assert end is (StreamEnd.FAILED if b"error" in done else StreamEnd.WHOLE)


LAYOUTS = {
    "alone": lambda word, said: [said],
    "after a text": lambda word, said: [word, said],
    "in a frame behind a text": lambda word, said: [word + said],
    "in a frame before a text": lambda word, said: [said + word],
    "in a frame between texts": lambda word, said: [word + word + said + word],
    "cut within its name": lambda word, said: [word + said[:9], said[9:]],
    "byte by byte": lambda word, said: [(word + said)[at : at + 1] for at in range(len(word + said))],
    "before the end": lambda word, said: [word + said + DONE],
    "before frames of text": lambda word, said: [said, *[word] * 16],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
def test_an_engines_own_error_is_seen_wherever_in_a_frame_it_stands(path: str, layout: str) -> None:
    for said in FAILURES[CHAT if path == COMPLETIONS else path]:
        assert read(path, *LAYOUTS[layout](chunk(choice("a")), said))[1] is StreamEnd.FAILED, said


@pytest.mark.parametrize("said", BARE_ERRORS)
def test_a_bare_error_is_no_end_of_a_native_response(said: bytes) -> None:
    reader = open_reader(RESPONSES)
    reader.feed(said)
    assert reader.judge() is StreamEnd.CUT
    assert b"boom" in reader.error
    reader.feed(typed("response.failed", response={}))
    assert reader.judge() is StreamEnd.FAILED


@pytest.mark.parametrize(
    "said",
    [
        chunk(choice('{"finish_reason":"stop"}')),
        chunk(choice(tool_calls=[{"function": {"arguments": '{"finish_reason":"stop","x":"[DONE]"}'}}])),
        event({"choices": [], "echo": {"choices": [{"finish_reason": "stop"}]}}),
        event({"choices": [{"finish_reason": ""}], "error": None}),
        event({"choices": "finish_reason"}),
        event("[DONE]"),
        b'data: {"choices":[{"finish_reason":"stop"}]\n\n',
        b": [DONE]\n\n",
        b"x: [DONE]\n\n",
    ],
)
def test_words_of_an_ending_that_are_no_ending_end_nothing(said: bytes) -> None:
    assert read(CHAT, said)[1] is StreamEnd.CUT


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize("is_closed", [True, False])
@pytest.mark.parametrize(
    ("path", "said"),
    [
        (CHAT, chunk(choice("x" * 5 * WIRE.event_held_bytes, finish="stop"))),
        (CHAT, event({"choices": [{"finish_reason": "stop", "delta": {"content": "x" * 5 * WIRE.event_held_bytes}}]})),
        (RESPONSES, typed("response.completed", response={"output": "x" * 5 * WIRE.event_held_bytes})),
    ],
)
def test_a_closing_event_that_is_too_large_to_be_held_closes_once_it_is_whole(
    path: str, said: bytes, pieces: int, *, is_closed: bool
) -> None:
    size = -(-len(said) // pieces)
    frames = [said[at : at + size] for at in range(0, len(said), size)]
    if not is_closed:
        frames[-1] = frames[-1][:-9]
    out, end = read(path, *frames)
    assert end is (StreamEnd.WHOLE if is_closed else StreamEnd.CUT)
    assert out == said if is_closed else said.startswith(out)


def test_what_is_remembered_of_an_endless_stream_is_bounded() -> None:
    reader = open_reader(CHAT)
    for _ in range(200):
        reader.feed(chunk(choice("x" * 100)) * 300)
    assert len(reader.recent) < 200_000


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/audio/transcriptions", "/v1/embeddings", ""])
def test_streams_without_a_closing_event_are_not_judged(path: str) -> None:
    assert open_end_reader(path) is None
