"""Tool calls as careless engines say them, in both translated dialects: what was called must come out, or a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects import SURFACES
from gateway.dialects.translation import AnswerContext
from tests.unit.gateway.messages_reader import read_message
from tests.unit.gateway.responses_reader import read_stream

PATHS = ("/v1/messages", "/v1/responses")
Part = dict[str, Any]
Called = list[tuple[str, Any]]


def piece(name: str | None = None, arguments: object = None, *, index: int | None = 0, **more: object) -> Part:
    """Return a piece of a call, with just the keys that are given."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {**({"index": index} if index is not None else {}), **more, "function": function}


def open_answer(path: str, *, stream: bool) -> Any:
    """Return the translator of a fresh answer on a path."""
    asked = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9} if path == PATHS[0] else {"input": "x"}
    surface = SURFACES[path]
    assert surface.translate is not None
    request = surface.parse(json.dumps({"model": "m", "stream": stream, **asked}).encode(), {})
    return surface.translate(request).open_answer(AnswerContext(request_id="req_1", model="m", created=1))


def read_calls(path: str, said: bytes, *, stream: bool) -> Called:
    """Return names and arguments of the calls in an answer."""
    if path == PATHS[0]:
        message = read_message(said) if stream else json.loads(said)
        return [(block["name"], block["input"]) for block in message["content"] if block["type"] == "tool_use"]
    response = read_stream(said).response if stream else json.loads(said)
    return [(item["name"], json.loads(item["arguments"])) for item in response["output"] if item["type"] == "function_call"]


def stream_calls(path: str, *chunks: list[Part]) -> Called:
    """Return the calls that a stream of these pieces makes."""
    deltas = [({"role": "assistant", "content": ""}, None), *(({"tool_calls": parts}, None) for parts in chunks)]
    translator = open_answer(path, stream=True)
    said = b""
    for delta, finish in (*deltas, ({}, "tool_calls")):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        said += translator.feed(b"data: " + json.dumps({"id": "c", "choices": [choice]}).encode() + b"\n\n")
    said += translator.feed(b"data: [DONE]\n\n") + translator.finish()
    assert translator.failure is None
    return read_calls(path, said, stream=True)


@pytest.mark.parametrize("path", PATHS)
def test_arguments_as_an_object_are_what_their_text_would_be(path: str) -> None:
    asked = {"b": [1, {"c": "d"}], "a": None}
    assert stream_calls(path, [piece("f", asked, id="c1")]) == [("f", asked)]
    message = {"role": "assistant", "content": None, "tool_calls": [piece("f", asked, id="c1")]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    translator = open_answer(path, stream=False)
    said = translator.translate_whole(json.dumps({"id": "c", "choices": [choice]}).encode())
    assert translator.failure is None
    assert read_calls(path, said, stream=False) == [("f", asked)]


@pytest.mark.parametrize("path", PATHS)
def test_whole_calls_under_one_index_without_ids_are_told_apart(path: str) -> None:
    expected = [("f", {"a": 1}), ("g", {"b": "}{"}), ("g", {"b": 2})]
    parts = [piece(name, json.dumps(arguments)) for name, arguments in expected]
    assert stream_calls(path, parts) == expected
    assert stream_calls(path, *([part] for part in parts)) == expected


@pytest.mark.parametrize("path", PATHS)
def test_a_second_call_under_the_same_index_may_come_in_pieces(path: str) -> None:
    pieces = [piece("f", '{"a":1}'), piece("g", ""), piece(None, '{"b"'), piece(None, ":2}")]
    assert stream_calls(path, *([part] for part in pieces)) == [("f", {"a": 1}), ("g", {"b": 2})]


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_is_repeated_with_every_piece_is_one_call(path: str) -> None:
    pieces = [piece("f", text) for text in ('{"a', '":"}', '{"', "}", "")]
    assert stream_calls(path, *([part] for part in pieces)) == [("f", {"a": "}{"})]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("index", [1, 3, 7])
def test_a_call_whose_index_skips_some_is_the_next_call(path: str, index: int) -> None:
    pieces = [piece("f", "{}", id="c1"), piece("g", '{"b":', index=index, id="c2"), piece(None, "2}", index=index)]
    assert stream_calls(path, *([part] for part in pieces)) == [("f", {}), ("g", {"b": 2})]
