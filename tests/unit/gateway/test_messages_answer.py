"""Unstreamed answers of chat engines as messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.errors import GatewayError
from tests.unit.gateway.messages_engine import open_answer


def whole(message: object, finish: object = "stop", **more: object) -> bytes:
    choice = {"index": 0, "message": message, "finish_reason": finish, **more}
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13, "prompt_tokens_details": {"cached_tokens": 2}}
    return json.dumps({"id": "chatcmpl-1", "model": "engine-name", "choices": [choice], "usage": usage}).encode()


def read(body: bytes) -> dict[str, Any]:
    translator = open_answer()
    message: dict[str, Any] = json.loads(translator.translate_whole(body))
    assert translator.failure is None
    assert translator.usage is not None
    assert (translator.usage.prompt_tokens, translator.usage.completion_tokens, translator.usage.total_tokens) == (9, 4, 13)
    return message


def call(arguments: object, *, name: str = "f", call_id: str | None = "c1") -> dict[str, object]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read_inputs(*calls: object) -> list[tuple[str, object]]:
    message = read(whole({"role": "assistant", "content": None, "tool_calls": list(calls)}, "tool_calls"))
    assert message["stop_reason"] == "tool_use"
    return [(block["id"], block["input"]) for block in message["content"]]


def fail(body: bytes) -> GatewayError:
    translator = open_answer()
    assert translator.translate_whole(body) == b""
    assert translator.failure is not None
    return translator.failure


def test_a_text_is_a_message() -> None:
    assert read(whole({"role": "assistant", "content": "Hello", "tool_calls": [], "refusal": None})) == {
        "id": "msg_0193a5c2",
        "type": "message",
        "role": "assistant",
        "model": "qwen",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": 4,
        },
    }


def test_thinking_text_and_calls_are_blocks_in_that_order() -> None:
    said = {
        "role": "assistant",
        "content": "Look",
        "reasoning": "hm",
        "tool_calls": [call('{"a": 1}'), call("{}", call_id="c2")],
    }
    message = read(whole(said))
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "unsigned"},
        {"type": "text", "text": "Look"},
        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "c2", "name": "f", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("arguments", "read_as"),
    [
        ('{"a": 1.0, "b": [true, null], "c": "\\ud83d\\ude00"}', {"a": 1.0, "b": [True, None], "c": "😀"}),
        ("", {}),
        (None, {}),
        ("null", {}),
        (" {} ", {}),
        ('{"a": ', {"INVALID_JSON": '{"a": '}),
        ("[1, 2]", {"INVALID_JSON": "[1, 2]"}),
        ("do it\n", {"INVALID_JSON": "do it\n"}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ('"word"', {"INVALID_JSON": '"word"'}),
    ],
)
def test_arguments_are_always_an_object(arguments: object, read_as: object) -> None:
    assert read_inputs(call(arguments)) == [("c1", read_as)]


def test_numbers_and_the_order_of_keys_stay_as_the_engine_wrote_them() -> None:
    arguments = '{"b":1.50,"a":123456789012345678901234567890}'
    body = open_answer().translate_whole(whole({"tool_calls": [call(arguments)]}))
    assert arguments.encode() in body


def test_ids_are_made_where_they_are_missing_or_taken() -> None:
    inputs = read_inputs(call("{}", call_id=None), call("{}", call_id="x"), call("{}", call_id="x"), call("{}", call_id=""))
    assert [call_id for call_id, _ in inputs] == ["toolu_0193a5c2_0", "x", "toolu_0193a5c2_2", "toolu_0193a5c2_3"]


def test_a_refusal_is_text_and_the_reason() -> None:
    message = read(whole({"content": None, "refusal": "I cannot."}))
    assert message["content"] == [{"type": "text", "text": "I cannot."}]
    assert message["stop_reason"] == "refusal"


def test_an_answer_of_nothing_has_one_empty_text() -> None:
    message = read(whole({"role": "assistant", "content": None}, "length"))
    assert (message["content"], message["stop_reason"]) == ([{"type": "text", "text": ""}], "max_tokens")


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_the_stop_sequence_is_named_when_the_engine_names_it(name: str) -> None:
    message = read(whole({"content": "a"}, **{name: "END"}))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


def test_an_answer_without_counts_says_zero() -> None:
    translator = open_answer()
    message = json.loads(translator.translate_whole(b'{"choices": [{"message": {"content": "a"}}]}'))
    assert message["usage"]["output_tokens"] == 0
    assert message["stop_reason"] == "end_turn"
    assert translator.usage is None


@pytest.mark.parametrize(
    "body",
    [
        b"", b"<html>", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"index": 0}]}', b"\xff", b"[" * 100_000,
        b'{"choices": [{"message": {"content": 5}}]}', b'{"choices": [{"index": 1, "message": {"content": "a"}}]}',
    ],
    ids=range(10),
)  # fmt: skip
def test_bytes_that_are_no_chat_answer_are_a_failure(body: bytes) -> None:
    assert fail(body).status == 502


def test_an_error_with_a_good_status_is_still_an_error() -> None:
    assert fail(b'{"error": {"message": "out of memory", "code": 500}}').message == "out of memory"
    assert fail(b'{"object": "error", "message": "worse"}').message == "worse"


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_engine_that_gave_up_is_a_failure(finish: str) -> None:
    assert fail(whole({"content": "a"}, finish)).status == 502
