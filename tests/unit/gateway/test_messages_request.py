"""Requests of ``/v1/messages`` as chat requests: every field carried, left out by name, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.messages import MessagesTranslator, to_chat_body, translate_messages
from gateway.errors import BadRequest
from gateway.values import InferenceRequest

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "number"}}}
TOOL: dict[str, Any] = {"name": "f", "description": "does", "input_schema": SCHEMA}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "f", "description": "does", "parameters": SCHEMA}}


def translate(**fields: object) -> tuple[dict[str, Any], tuple[str, ...]]:
    body, ignored = to_chat_body(json.dumps({"model": "m", "max_tokens": 5, "messages": HELLO, **fields}).encode())
    return json.loads(body), ignored


def carry(**fields: object) -> dict[str, Any]:
    chat, ignored = translate(**fields)
    assert ignored == ()
    return chat


def refuse(**fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        translate(**fields)
    return caught.value


def test_a_request_becomes_a_chat_request() -> None:
    body = b'{"model":"m","max_tokens":5,"messages":[{"role":"user","content":"hello"}],"service_tier":"auto"}'
    request = InferenceRequest(
        endpoint="/v1/messages", model="m", is_streaming=False, max_tokens=5, prompt_chars=5, body=body, headers={}
    )
    translation = translate_messages(request)
    assert json.loads(translation.body) == {"model": "m", "max_tokens": 5, "messages": HELLO}
    assert (translation.path, translation.ignored) == ("/v1/chat/completions", ("service_tier",))
    assert translation.open_answer is MessagesTranslator


def test_fields_that_engines_may_know_go_through_as_they_are() -> None:
    knobs = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "seed": 7, "logit_bias": {"5": 1.5},
        "chat_template_kwargs": {"x": [1]}, "something_new": {"deep": None},
    }  # fmt: skip
    assert carry(**knobs) == {"model": "m", "max_tokens": 5, "messages": HELLO, **knobs}


def test_numbers_stay_as_they_were_written() -> None:
    body, _ = to_chat_body(b'{"model":"m","messages":[],"seed":123456789012345678901234567890,"temperature":1.50}')
    assert b'"seed":123456789012345678901234567890' in body
    assert b'"temperature":1.50' in body


def test_null_is_as_good_as_absent() -> None:
    nulls = dict.fromkeys((
        "system", "tools", "tool_choice", "stop_sequences", "metadata", "thinking", "output_config", "output_format", "stream",
        "stream_options", "temperature", "mcp_servers", "container", "n", "thread", "service_tier", "cache_control",
    ))  # fmt: skip
    assert carry(**nulls) == {"model": "m", "max_tokens": 5, "messages": HELLO}


def test_the_text_of_the_system_leads() -> None:
    assert carry(system="be kind")["messages"] == [{"role": "system", "content": "be kind"}, *HELLO]
    blocks = [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "be brief"}]
    assert carry(system=blocks)["messages"][0] == {"role": "system", "content": "be kind\n\nbe brief"}
    assert carry(system="")["messages"] == HELLO
    assert carry(system=[])["messages"] == HELLO


def test_the_billing_header_of_claude_code_does_not_reach_the_prompt() -> None:
    header = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;"
    blocks = [{"type": "text", "text": header}, {"type": "text", "text": "be kind"}]
    assert carry(system=blocks)["messages"][0]["content"] == "be kind"
    assert carry(system=f"{header}\nbe kind")["messages"][0]["content"] == "be kind"
    assert carry(system=header)["messages"] == HELLO


# Streams, stops, whom it is for


def test_a_stream_always_asks_for_usage() -> None:
    assert carry(stream=True)["stream_options"] == {"include_usage": True}
    asked = {"include_usage": False, "continuous_usage_stats": True}
    assert carry(stream=True, stream_options=asked)["stream_options"] == {**asked, "include_usage": True}


def test_no_stream_asks_for_none() -> None:
    assert carry(stream=False, stream_options={"include_usage": True}) == {
        "model": "m", "max_tokens": 5, "messages": HELLO, "stream": False,
    }  # fmt: skip


def test_stop_sequences_and_the_user_have_other_names() -> None:
    chat = carry(stop_sequences=["END", "\n\n"], metadata={"user_id": "u1", "other": 1})
    assert (chat["stop"], chat["user"]) == (["END", "\n\n"], "u1")
    assert not {"stop_sequences", "metadata"} & set(chat)
    assert "stop" not in carry(stop_sequences=[], metadata={})


# Tools


def test_tools_are_functions_and_their_schemas_stay_as_they_are() -> None:
    strict = {
        **TOOL,
        "name": "g",
        "strict": True,
        "type": "custom",
        "cache_control": {"type": "ephemeral"},
        "defer_loading": True,
    }
    bare = {"name": "h", "input_schema": {"type": "object"}}
    chat = carry(tools=[TOOL, strict, bare])
    assert chat["tools"] == [
        FUNCTION,
        {"type": "function", "function": {**FUNCTION["function"], "name": "g", "strict": True}},
        {"type": "function", "function": {"name": "h", "parameters": {"type": "object"}}},
    ]
    assert list(chat["tools"][0]["function"]["parameters"]["properties"]) == ["z", "a"]


def test_tools_of_anthropics_servers_are_left_out_by_name() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        TOOL,
        {"type": "mcp_toolset", "mcp_server_name": "x"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    chat, ignored = translate(tools=tools)
    assert chat["tools"] == [FUNCTION]
    assert ignored == ("tools.web_search_20250305", "tools.mcp_toolset", "tools.bash_20250124")


def test_a_tool_of_an_unknown_type_with_a_schema_is_a_function() -> None:
    assert carry(tools=[{**TOOL, "type": "some_new_kind"}])["tools"] == [FUNCTION]


def test_no_tools_are_no_field_and_no_choice() -> None:
    assert "tools" not in carry(tools=[])
    chat, ignored = translate(tools=[{"type": "web_search_20250305", "name": "web_search"}], tool_choice={"type": "any"})
    assert not {"tools", "tool_choice"} & set(chat)
    assert ignored == ("tools.web_search_20250305", "tool_choice")
    assert "tool_choice" not in carry(tool_choice={"type": "none"})


def test_a_choice_of_a_tool_that_was_left_out_is_left_out() -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    chat, ignored = translate(tools=[TOOL, search], tool_choice={"type": "tool", "name": "web_search"})
    assert "tool_choice" not in chat
    assert "tool_choice" in ignored


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_choices_have_other_names(choice: dict[str, Any], wanted: object) -> None:
    chat = carry(tools=[TOOL], tool_choice=choice)
    assert chat["tool_choice"] == wanted
    assert "parallel_tool_calls" not in chat
    assert carry(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})["parallel_tool_calls"] is False


def test_tools_change_as_the_conversation_says() -> None:
    new = {"name": "new", "input_schema": {"type": "object"}}
    changes = [
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": new}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "g"}},
        {"type": "text", "text": "tools changed"},
    ]
    chat = carry(tools=[TOOL, {**TOOL, "name": "g"}], messages=[*HELLO, {"role": "system", "content": changes}])
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["g", "new"]
    assert "tools changed" in chat["messages"][-1]["content"]


# Thinking and the form of an answer


@pytest.mark.parametrize("kind", ["adaptive", "between_tools", "some_new_kind"])
def test_thinking_as_the_model_likes_says_nothing(kind: str) -> None:
    assert carry(thinking={"type": kind}) == {"model": "m", "max_tokens": 5, "messages": HELLO}


def test_thinking_is_switched_by_the_variable_that_templates_read() -> None:
    chat = carry(thinking={"type": "enabled", "budget_tokens": 2048})
    assert (chat["chat_template_kwargs"], chat["thinking_budget_tokens"]) == ({"enable_thinking": True}, 2048)
    chat = carry(thinking={"type": "disabled"})
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}
    assert not {"thinking", "thinking_budget_tokens", "reasoning_effort"} & set(chat)


def test_what_the_caller_tells_the_template_counts_more() -> None:
    chat = carry(thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert chat["chat_template_kwargs"] == {"enable_thinking": True, "x": 1}


def test_effort_is_given_as_far_as_engines_know_it() -> None:
    assert carry(output_config={"effort": "low"})["reasoning_effort"] == "low"
    for effort in ("xhigh", "max"):
        chat, ignored = translate(output_config={"effort": effort})
        assert (chat["reasoning_effort"], ignored) == ("high", ("output_config.effort",))
    chat, ignored = translate(output_config={"effort": "high"}, thinking={"type": "disabled"})
    assert "reasoning_effort" not in chat
    assert ignored == ("output_config.effort",)


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_schema_for_the_answer_is_its_response_format(name: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    chat = carry(**{name: {"format": wanted} if name == "output_config" else wanted})
    assert chat["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
    }
    assert name not in chat


# What is left out, and what is refused


def test_what_only_anthropics_service_does_is_left_out_by_name() -> None:
    fields = {
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "container": "container_1",
        "inference_geo": "eu",
        "betas": ["x"],
        "output_config": {"task_budget": {"type": "tokens", "total": 5}},
    }
    chat, ignored = translate(**fields, cache_control={"type": "ephemeral"}, x_pool_options={"priority": "low"})
    assert chat == {"model": "m", "max_tokens": 5, "messages": HELLO}
    assert sorted(ignored) == sorted([*(name for name in fields if name != "output_config"), "output_config.task_budget"])


def test_names_that_are_left_out_fit_into_a_header_and_are_few() -> None:
    tools = [{"type": f"kind\r\n: ☃ {'x' * 100} {number % 40}"} for number in range(100)]
    tools += [{"type": "plain"}, {"type": "plain"}]
    _, ignored = translate(tools=tools[-2:] + tools[:-2])
    assert ignored[0] == "tools.plain"
    assert len(ignored) == len(set(ignored)) <= 32
    assert all(len(name) <= 64 and name.isascii() and name.isprintable() and " " not in name for name in ignored)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
        ({"n": 2}, "n"),
        ({"n": "1"}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [1]}, "stop_sequences[0]"),
        ({"metadata": {"user_id": 5}}, "metadata.user_id"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"system": [{"type": "text"}]}, "system[0].text"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL, {"input_schema": {}}]}, "tools[1].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": []}]}, "tools[0].input_schema"),
        ({"tools": [{"name": 5, "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {}}, "tool_choice.type"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": True}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": 1}}, "output_format.schema"),
        ({"chat_template_kwargs": 1, "thinking": {"type": "disabled"}}, "chat_template_kwargs"),
        ({"messages": {}}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "tool", "content": "a"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text"),
    ],
    ids=range(35),
)
def test_what_cannot_be_carried_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refuse(**fields)
    assert error.param == param
    assert error.status == 400
    assert error.message


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"a":1,"a":2}', b'{"system":"\xff"}', b'{"x":"\xff"}', b"[" * 100_000, b'{"x":' + b"[" * 100_000],
    ids=range(8),
)  # fmt: skip
def test_bodies_that_are_no_request_are_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        to_chat_body(body)


# Counting


def test_a_count_asks_for_the_prompt_only() -> None:
    fields = {
        "model": "m", "system": "be kind", "messages": HELLO, "tools": [TOOL], "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"}, "stream": True, "max_tokens": 5, "stop_sequences": ["x"],
        "metadata": {"user_id": "u"}, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    }  # fmt: skip
    body, ignored = to_chat_body(json.dumps(fields).encode(), is_counting=True)
    assert json.loads(body) == {
        "model": "m",
        "messages": [{"role": "system", "content": "be kind"}, *HELLO],
        "tools": [FUNCTION],
        "tool_choice": "required",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert ignored == ()


def test_whether_a_request_may_leave_the_node_is_said_in_chat_too() -> None:
    asked = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "allow_remote": True}
    body, ignored = to_chat_body(json.dumps(asked).encode())
    assert (json.loads(body)["allow_remote"], ignored) == (True, ())
