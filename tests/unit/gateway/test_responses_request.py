"""What of a /v1/responses request becomes which field of a chat completion, what is left out, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gateway.dialects.responses import list_input_items, read_responses_body, translate_responses
from gateway.errors import BadRequest
from tests.unit.gateway.responses_reader import ask

TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}


def say(**fields: object) -> dict[str, Any]:
    """Return the chat completion that a request becomes."""
    translation = translate_responses(ask(**fields))
    assert translation.path == "/v1/chat/completions"
    chat: dict[str, Any] = json.loads(translation.body)
    return chat


def list_ignored(**fields: object) -> tuple[str, ...]:
    return translate_responses(ask(**fields)).ignored


def refuse(**fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        translate_responses(ask(**fields))
    return caught.value


def test_a_plain_request_becomes_a_plain_chat() -> None:
    assert say() == {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


def test_a_stream_asks_the_engine_for_usage() -> None:
    chat = say(stream=True, stream_options={"include_obfuscation": False})
    assert chat["stream"] is True
    assert chat["stream_options"] == {"include_usage": True}


def test_instructions_are_the_leading_system_message() -> None:
    assert say(instructions="Be brief.")["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_output_tokens": 7}, {"max_tokens": 7}),
        ({"max_output_tokens": 7, "max_tokens": 9}, {"max_tokens": 7}),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.5, "top_p": 0.9}),
        ({"temperature": None, "max_output_tokens": None, "text": None, "tools": None, "include": None}, {}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"verbosity": "low"}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"a": 1}, "strict": True, "description": None}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": 1}, "strict": True}}},
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": {}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "response", "schema": {}}}},
        ),
        (
            {"include": ["message.output_text.logprobs"], "top_logprobs": 3},
            {"logprobs": True, "top_logprobs": 3},
        ),
        ({"top_logprobs": 3}, {}),
        ({"presence_penalty": 0.1, "frequency_penalty": 0.2}, {"presence_penalty": 0.1, "frequency_penalty": 0.2}),
        (
            {"seed": 1, "min_p": 0.1, "top_k": 5, "logit_bias": {"1": 2}, "chat_template_kwargs": {"x": [1]}, "stop": ["a"]},
            {"seed": 1, "min_p": 0.1, "top_k": 5, "logit_bias": {"1": 2}, "chat_template_kwargs": {"x": [1]}, "stop": ["a"]},
        ),
        ({"allow_remote": True}, {"allow_remote": True}),
        (
            {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "max_tool_calls": 2},
            {},
        ),
        ({"store": False, "background": False, "previous_response_id": "resp_1", "service_tier": "auto"}, {}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_fields_are_carried_under_their_chat_names(given: dict[str, Any], expected: dict[str, Any]) -> None:
    chat = say(**given)
    assert {name: chat[name] for name in chat if name not in {"model", "messages"}} == expected


def test_what_nothing_here_acts_on_is_left_out_and_listed() -> None:
    given: dict[str, Any] = {
        "client_metadata": {"turn": "1"},
        "context_management": [{"type": "compaction"}],
        "include": ["reasoning.encrypted_content", "file_search_call.results"],
        "messages": [{"role": "user", "content": "another"}],
        "n": 3,
        "reasoning": {"summary": "auto"},
        "service_tier": "priority",
        "truncation": "auto",
        "moderation": None,
    }
    assert sorted(list_ignored(**given)) == [
        "client_metadata",
        "context_management",
        "include.reasoning.encrypted_content",
        "messages",
        "n",
        "reasoning.summary",
        "service_tier",
        "truncation",
    ]
    assert set(say(**given)) == {"model", "messages"}


@pytest.mark.parametrize(("effort", "said"), [("minimal", "low"), ("xhigh", "high"), ("max", "high")])
def test_an_effort_that_not_every_engine_knows_becomes_the_nearest_that_all_do(effort: str, said: str) -> None:
    assert say(reasoning={"effort": effort})["reasoning_effort"] == said
    assert list_ignored(reasoning={"effort": effort}) == ("reasoning.effort",)


def test_no_effort_at_all_switches_thinking_off_where_templates_read_it() -> None:
    chat = say(reasoning={"effort": "none"}, chat_template_kwargs={"x": 1})
    assert chat["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    assert "reasoning_effort" not in chat
    assert say(reasoning={"effort": "none"}, chat_template_kwargs={"enable_thinking": True})["chat_template_kwargs"] == {
        "enable_thinking": True
    }
    assert list_ignored(reasoning={"effort": "none"}) == ()
    with pytest.raises(BadRequest) as caught:
        say(reasoning={"effort": "none"}, chat_template_kwargs="x")
    assert caught.value.param == "chat_template_kwargs"


def test_a_fully_understood_request_ignores_nothing() -> None:
    assert list_ignored(temperature=0.1, tools=[TOOL], metadata={}, truncation="disabled", stream=True) == ()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"source_lang_code": "en"}, "source_lang_code"),
        ({"target_lang_code": "nl"}, "target_lang_code"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": [1]}, "input[0]"),
        ({"instructions": ["a"]}, "instructions"),
        ({"temperature": "hot"}, "temperature"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"reasoning": "much"}, "reasoning"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"metadata": []}, "metadata"),
        ({"include": "all"}, "include"),
        ({"tools": {}}, "tools"),
        ({"decoding": {"temprature": 1}}, "decoding.temprature"),
        ({"decoding": {"stop": "a"}}, "decoding.stop"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_carried_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    error = refuse(**given)
    assert error.param == param
    assert error.status == 400


def test_a_refused_language_says_what_would_help() -> None:
    assert "a box that answers /v1/responses itself" in refuse(target_lang_code="nl").message


def test_an_unreadable_body_is_a_bad_request() -> None:
    for body in (b"", b"{", b"[]", b'{"model":"m","input":NaN}', b"[" * 100_000):
        with pytest.raises(BadRequest):
            read_responses_body(body)
        with pytest.raises(BadRequest):
            list_input_items(body)


def test_text_that_is_not_utf8_is_refused_before_it_is_said() -> None:
    request = msgspec.structs.replace(ask(), body=b'{"model":"m","input":"\xff"}')
    with pytest.raises(BadRequest):
        translate_responses(request)


def test_pool_decoding_wins_over_the_field_of_the_same_name() -> None:
    decoding = {"temperature": 0.1, "top_k": 1, "top_p": 1.0, "repetition_penalty": 1.1, "max_tokens": 9, "stop": ["x"]}
    chat = say(decoding={**decoding, "beam_size": 4}, temperature=0.9)
    assert {name: chat[name] for name in decoding} == decoding
    assert chat["repeat_penalty"] == 1.1
    assert "decoding" not in chat
    assert list_ignored(decoding={"beam_size": 4}) == ("decoding.beam_size",)


def test_what_policy_looks_at_is_read_in_one_go() -> None:
    fields = read_responses_body(
        b'{"model":"m","input":[{"role":"user","content":"x"}],"stream":true,"store":true,"background":true,'
        b'"previous_response_id":"resp_1","max_output_tokens":5,"conversation":{"id":"c"},"prompt":{"id":"p"}}'
    )
    assert (fields.model, fields.stream, fields.store, fields.background) == ("m", True, True, True)
    assert (fields.previous_response_id, fields.max_output_tokens) == ("resp_1", 5)
    assert bytes(fields.input) == b'[{"role":"user","content":"x"}]'
    assert fields.conversation is not None
    assert fields.prompt is not None
    assert not fields.uses_pool_fields


@pytest.mark.parametrize(
    "field",
    [{"decoding": {}}, {"allow_remote": False}, {"source_lang_code": "en"}, {"target_lang_code": "nl"}],
    ids="".join,
)
def test_pool_fields_are_noticed(field: dict[str, Any]) -> None:
    assert read_responses_body(ask(**field).body).uses_pool_fields
    assert not read_responses_body(ask(**dict.fromkeys(field)).body).uses_pool_fields


def test_every_limit_of_tokens_is_told_with_its_field() -> None:
    fields = read_responses_body(ask(max_output_tokens=5, decoding={"max_tokens": 9}).body)
    assert fields.token_limits == {"max_output_tokens": 5, "decoding.max_tokens": 9}
    assert read_responses_body(ask().body).token_limits == {}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"input":"x"}', "model"),
        (b'{"model":"m"}', "input"),
        (b'{"model":"m","input":null}', "input"),
        (b'{"model":"m","input":{}}', "input"),
        (b'{"model":"m","input": [ ] }', "input"),
        (b'{"model":"m","input":"x","store":"yes"}', "store"),
        (b'{"model":"m","input":"x","stream":1}', "stream"),
        (b'{"model":"m","input":"x","previous_response_id":7}', "previous_response_id"),
        (b'{"model":"m","input":"x","max_output_tokens":0}', "max_output_tokens"),
        (b'{"model":"m","input":"x","decoding":{"max_tokens":-1}}', "decoding.max_tokens"),
        (b'{"model":"m","input":"x","decoding":{"beams":1}}', "decoding.beams"),
    ],
)
def test_a_body_of_another_shape_is_refused_by_name(body: bytes, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_responses_body(body)
    assert caught.value.param == param


@pytest.mark.parametrize("name", ["previous_response_id", "conversation", "prompt"])
def test_input_may_be_missing_when_something_else_brings_it(name: str) -> None:
    assert not bytes(read_responses_body(json.dumps({"model": "m", name: "x"}).encode()).input)


def list_kept(given: object) -> list[dict[str, Any]]:
    return [json.loads(item) for item in list_input_items(ask(input=given).body)]


def test_text_is_kept_as_one_message_of_the_user() -> None:
    first, second = list_kept("hi")[0], list_kept("hi")[0]
    assert first.pop("id").startswith("msg_")
    assert first == {
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert second["id"] != list_kept("hi")[0]["id"]


def test_items_are_kept_with_an_id_and_a_type() -> None:
    kept = list_kept(
        [
            {"role": "assistant", "content": "ok"},
            {"type": "message", "id": "msg_own", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"type": "item_reference", "id": "msg_old"},
            {"id": "msg_older"},
            {"type": "from_the_future"},
        ]
    )
    assert [item["type"] for item in kept] == ["message", "message", "function_call_output", "from_the_future"]
    assert kept[0]["content"] == [{"type": "output_text", "text": "ok", "annotations": []}]
    assert kept[1]["id"] == "msg_own"
    assert [item["id"].partition("_")[0] for item in kept] == ["msg", "msg", "fco", "item"]


def test_kept_items_say_the_same_as_the_input_they_came_from() -> None:
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": "6 * 7?"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
        {"role": "assistant", "content": "42"},
    ]
    history = list_input_items(ask(input=given).body)
    again = translate_responses(ask(input="And 7 * 7?"), history=history)
    assert json.loads(again.body)["messages"] == say(input=[*given, {"role": "user", "content": "And 7 * 7?"}])["messages"]
