"""Bodies of chat and completion requests: defaults, and refusals that name the field."""

from __future__ import annotations

import json

import pytest

from runner.engines.children.textserver.fields import parse_chat, parse_completion
from runner.engines.children.web import Refusal

MESSAGES: list[dict[str, object]] = [{"role": "user", "content": "Hi"}]


def chat_body(**fields: object) -> bytes:
    return json.dumps({"messages": MESSAGES, **fields}).encode()


def refused(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        parse_chat(body)
    return caught.value


def test_defaults_are_those_of_openai() -> None:
    fields = parse_chat(chat_body())
    sampling = fields.sampling(limit=100, asked=fields.most_tokens, scope="")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, 100)
    assert not fields.stream
    assert fields.stops == []


def test_null_means_the_default() -> None:
    fields = parse_chat(chat_body(temperature=None, stop=None, max_tokens=None, stream=None, n=None))
    assert fields.sampling(limit=7, asked=fields.most_tokens, scope="").temperature == 1.0


def test_a_completion_is_sixteen_tokens_long_unless_told() -> None:
    assert parse_completion(b'{"prompt": "a"}').most_tokens == 16
    assert parse_completion(b'{"prompt": ["a"], "max_tokens": 3}').most_tokens == 3


def test_more_tokens_than_fit_are_cut_to_what_fits() -> None:
    fields = parse_chat(chat_body(max_completion_tokens=5000))
    assert fields.sampling(limit=100, asked=fields.most_tokens, scope="").max_tokens == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 2.5), ("temperature", "hot"), ("top_p", 0), ("top_p", 1.1), ("top_k", -2), ("max_tokens", 0),
        ("repetition_penalty", 0), ("beam_size", 17), ("n", 2), ("stop", ""), ("stop", ["x"] * 17), ("seed", "one"),
        ("presence_penalty", 0.5), ("logit_bias", {"5": 1}), ("logprobs", True), ("response_format", {"type": "json_object"}),
        ("messages", []), ("messages", "Hi"), ("tool_choice", "required"), ("stream", "yes"),
    ],
)  # fmt: skip
def test_a_value_that_does_not_do_is_refused_by_name(field: str, value: object) -> None:
    refusal = refused(chat_body(**{field: value}))
    assert (refusal.status, refusal.param) == (400, field)
    assert "hot" not in refusal.message, "values of clients do not come back"


def test_zero_penalties_are_accepted_as_clients_send_them() -> None:
    assert parse_chat(chat_body(presence_penalty=0, frequency_penalty=0.0, logit_bias={})).n is None


def test_a_missing_field_is_named() -> None:
    assert refused(b"{}").param == "messages"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b'{"messages": [{"a":' + b"[" * 100_000])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    assert refused(body).code == "invalid_json"


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    fields = parse_chat(chat_body(messages=[{"role": "user", "content": parts}]))
    assert fields.messages[0]["content"] == "one two"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"content": "Hi"}, "messages[0].role"),
    ],
)
def test_a_message_that_no_text_model_takes_is_refused_by_place(message: dict[str, object], param: str) -> None:
    assert refused(chat_body(messages=[message])).param == param
