"""Tools of a /v1/responses request as chat functions, the choice among them, and calls back under the client's names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.responses import translate_responses
from gateway.errors import BadRequest
from tests.unit.gateway.responses_reader import ask, open_answer, run_stream, write_call, write_chunk

Tool = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
PATCH: Tool = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
MAIL: Tool = {
    "type": "namespace",
    "name": "mcp__mail__",
    "description": "Letters.",
    "tools": [{"type": "function", "name": "send", "description": "Sends one.", "parameters": SCHEMA}],
}
SEARCH: Tool = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": SCHEMA}


def function(name: str, **more: object) -> Tool:
    return {"type": "function", "name": name, **more}


def say(*tools: Tool, **fields: object) -> dict[str, Any]:
    chat: dict[str, Any] = json.loads(translate_responses(ask(tools=list(tools), **fields)).body)
    return chat


def names(chat: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in chat.get("tools", [])]


def refuse(*tools: Tool, **fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        say(*tools, **fields)
    return caught.value


def call_back(name: str, arguments: str, *tools: Tool) -> dict[str, Any]:
    """Return the item that an engine's call of a function becomes."""
    reading = run_stream(
        open_answer(stream=True, tools=list(tools)),
        write_chunk(write_call(0, "", name=name, call_id="call_1")),
        *[write_chunk(write_call(0, piece)) for piece in arguments],
        write_chunk({}, "tool_calls"),
    )
    (item,) = reading.response["output"]
    whole: dict[str, Any] = item
    return whole


def test_functions_are_carried_with_all_they_have() -> None:
    assert say(function("f", description="d", parameters=SCHEMA, strict=True), function("g"))["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {}}}},
    ]


def test_what_others_would_carry_out_is_left_out_and_listed() -> None:
    tools = [
        {"type": "web_search"},
        function("f"),
        {"type": "file_search", "vector_store_ids": []},
        {"type": "Strange\r\nname"},
        {"type": "tool_search", "execution": "server"},
        {},
        {"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]},
    ]
    translation = translate_responses(ask(tools=tools))
    assert names(json.loads(translation.body)) == ["f"]
    assert translation.ignored == (
        "tools[0].web_search",
        "tools[2].file_search",
        "tools[3]",
        "tools[4].tool_search",
        "tools[5]",
        "tools[6].tools[0]",
    )


def test_a_custom_tool_is_a_function_with_one_text() -> None:
    (tool,) = say(PATCH)["tools"]
    assert tool["function"]["name"] == "apply_patch"
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert tool["function"]["description"].startswith("Edits files.")
    assert 'start: "x"' in tool["function"]["description"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (json.dumps({"input": '*** Begin\n"ü"\\ \U0001f600'}), '*** Begin\n"ü"\\ \U0001f600'),
        ('{"patch": "x"}', "x"),
        ('"x"', "x"),
        ("*** Begin", "*** Begin"),
        ('{"input": 7}', '{"input": 7}'),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": "x', '{"input": "x'),
        ("[]", "[]"),
    ],
)
def test_a_custom_tools_call_comes_back_as_its_text(arguments: str, text: str) -> None:
    item = call_back("apply_patch", arguments, PATCH)
    assert item.pop("id").startswith("ctc_")
    assert item == {
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "apply_patch",
        "input": text,
    }


def test_the_tools_of_a_namespace_have_flat_names_and_come_back_under_their_own() -> None:
    chat = say(MAIL)
    assert names(chat) == ["mcp__mail__send"]
    assert chat["tools"][0]["function"]["description"] == "Letters.\n\nSends one."
    item = call_back("mcp__mail__send", '{"a": 1}', MAIL)
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "send", "mcp__mail__")
    back = say(MAIL, input=[{**item, "type": "function_call"}])["messages"][0]["tool_calls"][0]["function"]
    assert back == {"name": "mcp__mail__send", "arguments": '{"a": 1}'}


def test_flat_names_never_meet() -> None:
    tools = [
        function("mcp__mail__send"),
        MAIL,
        {**MAIL, "name": "mcp__mail"},
        {**PATCH, "name": "mcp__mail__send"},
        {**MAIL, "name": "mcp__mail___"},
    ]
    flat = names(say(*tools))
    assert flat == ["mcp__mail__send", *(f"mcp__mail__send_{n}" for n in (2, 3, 4, 5))]
    found = [call_back(name, "{}", *tools) for name in flat]
    assert [(item["type"], item.get("namespace", "")) for item in found] == [
        ("function_call", ""),
        ("function_call", "mcp__mail__"),
        ("function_call", "mcp__mail"),
        ("custom_tool_call", ""),
        ("function_call", "mcp__mail___"),
    ]


def test_a_search_for_tools_that_the_client_carries_out_comes_back_as_one() -> None:
    assert names(say(SEARCH)) == ["tool_search"]
    item = call_back("tool_search", '{"query": "mail"}', SEARCH)
    assert item.pop("id").startswith("tsc_")
    assert item == {
        "type": "tool_search_call",
        "status": "completed",
        "call_id": "call_1",
        "execution": "client",
        "arguments": {"query": "mail"},
    }
    assert call_back("tool_search", "{broken", SEARCH)["arguments"] == {}


def test_tools_that_items_bring_join_those_of_the_request() -> None:
    items: list[Tool] = [
        {"type": "additional_tools", "role": "developer", "tools": [function("g"), function("f")]},
        {"role": "user", "content": "x"},
        {"type": "tool_search_call", "call_id": "c", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c", "tools": [MAIL]},
    ]
    assert names(say(function("f"), input=items)) == ["f", "g", "mcp__mail__send"]


def test_a_call_of_a_tool_nobody_gave_is_a_function_call() -> None:
    assert call_back("made_up", "{}", PATCH)["type"] == "function_call"


@pytest.mark.parametrize("mode", ["auto", "none", "required"])
def test_a_plain_choice_is_carried(mode: str) -> None:
    assert say(function("f"), tool_choice=mode)["tool_choice"] == mode


def test_without_tools_there_is_no_choice_to_carry() -> None:
    chat = say({"type": "web_search"}, tool_choice="auto", parallel_tool_calls=True)
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & chat.keys()


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "function", "name": "f"}, "f"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "function", "name": "send", "namespace": "mcp__mail__"}, "mcp__mail__send"),
        ({"type": "tool_search"}, "tool_search"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_named_choice_names_the_function(choice: Tool, name: str) -> None:
    assert say(function("f"), PATCH, MAIL, SEARCH, tool_choice=choice)["tool_choice"] == {
        "type": "function",
        "function": {"name": name},
    }


def test_allowed_tools_leave_the_others_out() -> None:
    allowed = [{"type": "function", "name": "g"}, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}]
    tools = [function("f"), function("g"), PATCH]
    chat = say(*tools, tool_choice={"type": "allowed_tools", "mode": "required", "tools": allowed}, parallel_tool_calls=False)
    assert names(chat) == ["g", "apply_patch"]
    assert (chat["tool_choice"], chat["parallel_tool_calls"]) == ("required", False)
    nothing = say(function("f"), tool_choice={"type": "allowed_tools", "mode": "auto", "tools": []})
    assert not {"tools", "tool_choice"} & nothing.keys()


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("always", "tool_choice"),
        (7, "tool_choice"),
        ({"type": "function", "name": "g"}, "tool_choice"),
        ({"type": "custom", "name": "f"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "web_search"}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "always", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": ["auto"], "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["f"]}, "tool_choice.tools[0]"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}, "tool_choice.tools"),
    ],
    ids=lambda value: json.dumps(value) if not isinstance(value, str) else "",
)
def test_a_choice_of_what_is_not_there_is_refused(choice: object, param: str) -> None:
    assert refuse(function("f"), tool_choice=choice).param == param


def test_a_call_that_is_demanded_of_nobody_is_refused() -> None:
    assert refuse({"type": "web_search"}, tool_choice="required").param == "tool_choice"


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "function"}, "tools[1].name"),
        ({"type": "function", "name": "g", "parameters": "x"}, "tools[1].parameters"),
        ({"type": "function", "name": "g", "description": 1}, "tools[1].description"),
        ({"type": "custom"}, "tools[1].name"),
        ({"type": "custom", "name": "c", "format": {"type": "grammar"}}, "tools[1].format.definition"),
        ({"type": "namespace", "tools": []}, "tools[1].name"),
        ({"type": "namespace", "name": "n"}, "tools[1].tools"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "function"}]}, "tools[1].tools[0].name"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_tool_that_is_no_tool_is_named(tool: Tool, param: str) -> None:
    assert refuse(function("f"), tool).param == param
