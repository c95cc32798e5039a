"""A number that is whole is one however it is written, on every surface and in every field; any other is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.dialects import SURFACES
from gateway.dialects.body import read_options
from gateway.dialects.messages import to_chat_body
from gateway.dialects.responses import translate_responses
from gateway.errors import BadRequest
from gateway.values import InferenceRequest

ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
    "/v1/responses": {"input": "hi"},
    "/v1/embeddings": {"input": "hi"},
    "/v1/rerank": {"query": "q", "documents": ["d"]},
    "/v1/images/generations": {"prompt": "p"},
}
LIMITS = [
    *[(path, field) for path in ASKED for field in ("max_tokens", "max_completion_tokens", "max_output_tokens")],
    ("/v1/responses", "decoding.max_tokens"),
]
WRITTEN = {"5": 5, "5.0": 5, "5e0": 5, "0.5e1": 5, "50E-1": 5, "1e3": 1000, "4294967296.0": 2**32}
NOT_WHOLE = ["1.5", "1e-3", '"5"', "true", "[]", "1e400"]


def write(path: str, field: str, number: str) -> bytes:
    """Return a body in which the field stands as it is written here."""
    body = {name: value for name, value in ASKED[path].items() if name != field}
    outer, _, inner = field.partition(".")
    value = f'{{"{inner}":{number}}}' if inner else number
    return json.dumps({"model": "m", **body}).encode()[:-1] + f',"{outer}":{value}}}'.encode()


def parse(path: str, field: str, number: str) -> InferenceRequest:
    return SURFACES[path].parse(write(path, field, number), {})


@pytest.mark.parametrize(("path", "field"), LIMITS)
@pytest.mark.parametrize("number", WRITTEN)
def test_a_limit_counts_as_the_number_it_is_and_the_bytes_stay_as_they_came(path: str, field: str, number: str) -> None:
    request = parse(path, field, number)
    due = WRITTEN[number] if path != "/v1/messages" or field == "max_tokens" else max(9, WRITTEN[number])
    assert request.max_tokens == due
    assert type(request.max_tokens) is int
    assert request.body == write(path, field, number)


@pytest.mark.parametrize(("path", "field"), LIMITS)
@pytest.mark.parametrize("number", NOT_WHOLE, ids=lambda number: str(number)[:9])
def test_what_is_not_whole_is_refused_with_its_field_named(path: str, field: str, number: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(path, field, number)
    assert caught.value.param == field
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(("path", "field"), LIMITS)
def test_a_number_of_thousands_of_digits_is_refused_by_its_outermost_field(path: str, field: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(path, field, "9" * 5000)
    assert caught.value.param == field.partition(".")[0]
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("path", ASKED)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "05", "5.", ".5", "0x5"])
def test_what_is_no_number_in_json_is_refused(path: str, number: str) -> None:
    with pytest.raises(BadRequest):
        parse(path, "max_tokens", number)


@pytest.mark.parametrize("path", ASKED)
def test_a_negative_number_with_a_point_is_negative(path: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(path, "max_tokens", "-1.0")
    assert caught.value.param == "max_tokens"


def test_options_of_the_pool_count_so_too() -> None:
    assert read_options(msgspec.Raw(b'{"max_latency_ms":3e3}')).max_latency_ms == 3000
    with pytest.raises(BadRequest) as caught:
        read_options(msgspec.Raw(b'{"max_latency_ms":0.5}'))
    assert caught.value.param == "x_pool_options.max_latency_ms"


@pytest.mark.parametrize("field", ["top_logprobs", "max_tool_calls", "decoding.top_k", "decoding.max_tokens"])
def test_a_translation_of_responses_says_whole_numbers_plainly(field: str) -> None:
    request = parse("/v1/responses", field, "3.0")
    request = msgspec.structs.replace(request, body=request.body[:-1] + b',"include":["message.output_text.logprobs"]}')
    said = json.loads(translate_responses(request).body)
    name = {"decoding.top_k": "top_k", "decoding.max_tokens": "max_tokens"}.get(field, field)
    assert name == "max_tool_calls" or (said[name] == 3 and type(said[name]) is int)
    with pytest.raises(BadRequest) as caught:
        translate_responses(msgspec.structs.replace(request, body=write("/v1/responses", field, "3.5")))
    assert caught.value.param == field


def test_a_translation_of_messages_says_whole_numbers_plainly() -> None:
    thinking = '{"type":"enabled","budget_tokens":1024.0}'
    said = json.loads(to_chat_body(write("/v1/messages", "thinking", thinking)[:-1] + b',"n":1.0}')[0])
    assert said["thinking_budget_tokens"] == 1024
    assert type(said["thinking_budget_tokens"]) is int
    with pytest.raises(BadRequest) as caught:
        to_chat_body(write("/v1/messages", "thinking", thinking.replace(".0", ".5")))
    assert caught.value.param == "thinking.budget_tokens"
