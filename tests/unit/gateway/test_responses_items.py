"""Which chat messages the items of a /v1/responses request become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.responses import translate_responses
from gateway.errors import BadRequest
from tests.unit.gateway.responses_reader import ask

Item = dict[str, Any]
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def say(*items: Item, **fields: object) -> list[dict[str, Any]]:
    """Return the messages that these items become."""
    messages: list[dict[str, Any]] = json.loads(translate_responses(ask(input=list(items), **fields)).body)["messages"]
    return messages


def refuse(*items: Item) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        say(*items)
    return caught.value


def user(content: object) -> Item:
    return {"role": "user", "content": content}


def call(call_id: str, name: str = "f", arguments: str = "{}") -> Item:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}


def output(call_id: str, said: object) -> Item:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


def think(text: str) -> Item:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def answer(text: str) -> Item:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}


def thought(text: str) -> dict[str, Any]:
    """Return a thought under both of the names that engines look for."""
    return {"reasoning_content": text, "reasoning": text}


def chat_call(call_id: str, name: str = "f", arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        (
            {"type": "input_image", "image_url": PIXEL, "detail": "low"},
            {"type": "image_url", "image_url": {"url": PIXEL, "detail": "low"}},
        ),
        (
            {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "original", "file_id": None},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "high"}},
        ),
        ({"type": "input_image", "image_url": PIXEL}, {"type": "image_url", "image_url": {"url": PIXEL}}),
        (
            {"type": "input_file", "file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"},
            {"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}},
        ),
        (
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
            {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
        ),
    ],
    ids=["image", "image-by-address", "image-without-detail", "file", "audio"],
)
def test_parts_are_carried(part: Item, expected: Item) -> None:
    content = [{"type": "input_text", "text": "look"}, part]
    assert say(user(content)) == [{"role": "user", "content": [{"type": "text", "text": "look"}, expected]}]


def test_text_alone_is_one_string() -> None:
    assert say(user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])) == [
        {"role": "user", "content": "a\nb"}
    ]
    assert say(user([])) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_image", "file_id": "file-1"}, "file_id"),
        ({"type": "input_image"}, "image_url"),
        ({"type": "input_image", "image_url": {"url": PIXEL}}, "image_url"),
        ({"type": "input_image", "image_url": PIXEL, "detail": 1}, "detail"),
        ({"type": "input_file", "file_id": "file-1"}, "file_id"),
        ({"type": "input_file", "file_url": "https://example.org/a.pdf"}, "file_url"),
        ({"type": "input_file"}, "file_data"),
        ({"type": "input_audio"}, "input_audio"),
        ({"type": "input_text"}, "text"),
        ({"type": "input_text", "text": 1}, "text"),
        ({"type": "input_video", "video": "x"}, "type"),
        ({"type": ["input_text"]}, "type"),
        ({}, "type"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_a_part_that_cannot_be_carried_is_named(part: Item, param: str) -> None:
    assert refuse(user("x"), user([{"type": "input_text", "text": "a"}, part])).param == f"input[1].content[1].{param}"


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "critic", "content": "x"}, "role"),
        ({"type": "message", "content": "x"}, "role"),
        ({"role": ["user"], "content": "x"}, "role"),
        ({"role": "user"}, "content"),
        ({"role": "user", "content": {"type": "input_text"}}, "content"),
        ({"role": "user", "content": ["x"]}, "content[0]"),
        ({"role": "assistant"}, "content"),
        ({"role": "assistant", "content": [{"type": "input_image", "image_url": PIXEL}]}, "content[0].type"),
        ({"role": "system", "content": [{"type": "input_image", "image_url": PIXEL}]}, "content[0].type"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "name"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "arguments"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "output"),
        ({"type": "function_call_output", "call_id": "c", "output": {"a": 1}}, "output"),
        ({"type": "custom_tool_call", "call_id": "c", "name": "f"}, "input"),
        ({"type": "reasoning", "content": "x"}, "content"),
        ({"type": "reasoning", "summary": [{"type": "summary_text"}]}, "summary[0].text"),
        ({"type": "item_reference", "id": "msg_1"}, "id"),
        ({"id": "msg_1"}, "id"),
        ({"type": "item_reference", "id": ["msg_1"]}, "id"),
        ({"type": "compaction", "encrypted_content": "x"}, "encrypted_content"),
        ({"type": "computer_call", "call_id": "c"}, "type"),
        ({"type": "computer_call_output", "call_id": "c"}, "type"),
        ({"type": "additional_tools", "tools": 1}, "tools"),
        ({"type": "from_the_future"}, "type"),
        ({"type": 7, "role": "user", "content": "x"}, "type"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_an_item_that_cannot_be_said_is_named(item: Item, param: str) -> None:
    assert refuse(user("x"), item).param == f"input[1].{param}"


def test_error_texts_repeat_no_long_names_of_clients() -> None:
    assert "z" * 61 not in refuse({"type": "z" * 61}).message


def test_leading_system_and_developer_messages_are_one_system_message() -> None:
    items = ({"role": "developer", "content": "a"}, {"role": "system", "content": [{"type": "input_text", "text": "b"}]})
    assert say(*items, user("x"), instructions="first") == [
        {"role": "system", "content": "first\n\na\n\nb"},
        {"role": "user", "content": "x"},
    ]


def test_a_later_system_message_is_said_by_the_user_for_strict_templates() -> None:
    assert say(user("x"), answer("y"), {"role": "developer", "content": "Now in Dutch."}, user("z")) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "y"},
        {"role": "user", "content": "Now in Dutch.\n\nz"},
    ]


def test_a_system_message_behind_the_first_question_stays_in_its_place() -> None:
    assert say(user("x"), {"role": "system", "content": "y"}) == [{"role": "user", "content": "x\n\ny"}]


def test_someone_is_there_to_answer_even_when_only_the_developer_spoke() -> None:
    assert say({"role": "developer", "content": "Say hi."}, instructions="Be brief.") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Say hi."},
    ]


def test_neighbouring_messages_of_the_user_are_one_turn() -> None:
    image = {"type": "input_image", "image_url": PIXEL}
    assert say(user("a"), user("b")) == [{"role": "user", "content": "a\n\nb"}]
    assert say(user("a"), user([image])) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": PIXEL}}]}
    ]


def test_the_items_of_one_turn_are_one_message_of_the_assistant() -> None:
    assert say(
        user("x"), think("hm"), answer("So."), call("c1"), call("c2", "g", '{"a": 1}'), output("c2", "2"), output("c1", "1")
    ) == [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "So.",
            **thought("hm"),
            "tool_calls": [chat_call("c1"), chat_call("c2", "g", '{"a": 1}')],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]


def test_calls_of_two_turns_stay_two_messages() -> None:
    assert say(user("x"), call("c1"), output("c1", "1"), think("more"), call("c2"), output("c2", "2"))[1:] == [
        {"role": "assistant", "content": None, "tool_calls": [chat_call("c1")]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "assistant", "content": None, **thought("more"), "tool_calls": [chat_call("c2")]},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
    ]


def test_two_messages_in_a_row_do_not_run_together() -> None:
    assert say(user("x"), answer("I will look."), answer("Found."))[1] == {
        "role": "assistant",
        "content": "I will look.\n\nFound.",
    }
    assert say(user("x"), answer("I will "), call("c"), answer("look."))[1]["content"] == "I will look."


def test_thoughts_are_read_from_content_or_summary_and_sealed_ones_count_for_nothing() -> None:
    summed: Item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "sum"}], "encrypted_content": "zzz"}
    sealed: Item = {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "zzz"}
    assert say(user("x"), summed, answer("y"))[1] == {"role": "assistant", "content": "y", **thought("sum")}
    assert say(user("x"), sealed, answer("y"))[1] == {"role": "assistant", "content": "y"}


def test_a_thought_without_a_message_is_a_turn_of_its_own() -> None:
    assert say(user("x"), think("hm"), user("go on"))[1] == {"role": "assistant", "content": "", **thought("hm")}


def test_a_refusal_goes_back_as_one() -> None:
    refusal = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert say(user("x"), refusal)[1] == {"role": "assistant", "content": None, "refusal": "No."}


def test_a_result_of_a_tool_is_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert say(call("c"), output("c", parts))[1]["content"] == "a\nb"


def test_an_image_in_a_result_is_shown_by_the_user() -> None:
    seen = [{"type": "input_text", "text": "here"}, {"type": "input_image", "image_url": PIXEL}]
    said = say(user("x"), call("c1"), call("c2"), output("c1", seen), output("c2", "2"), user("And?"), answer("A dot."))
    assert said[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "here\n[1 attached in the next user message]"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Attached to the result of tool call c1:"},
                {"type": "image_url", "image_url": {"url": PIXEL}},
                {"type": "text", "text": "And?"},
            ],
        },
        {"role": "assistant", "content": "A dot."},
    ]


def test_an_image_that_is_all_of_the_last_result_ends_the_conversation() -> None:
    said = say(user("x"), call("c1"), output("c1", [{"type": "input_image", "image_url": PIXEL}]))
    assert said[2] == {"role": "tool", "tool_call_id": "c1", "content": "[1 attached in the next user message]"}
    assert (said[3]["role"], said[3]["content"][1]["type"]) == ("user", "image_url")


def test_an_empty_argument_text_becomes_an_empty_object() -> None:
    assert say(call("c", arguments=""))[0]["tool_calls"] == [chat_call("c", arguments="{}")]


def test_calls_of_other_tools_are_said_as_functions() -> None:
    items: list[Item] = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": 'a\n"b"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "local_shell_call", "call_id": "c2", "id": "l2", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c2", "output": "a"},
        {"type": "shell_call", "call_id": "c3", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c3", "output": [{"stdout": "a"}]},
        {"type": "apply_patch_call", "call_id": "c4", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "c4", "status": "completed"},
        {"type": "tool_search_call", "call_id": "c5", "execution": "client", "arguments": {"query": "mail"}},
        {"type": "tool_search_output", "call_id": "c5", "tools": [{"type": "function", "name": "send"}]},
    ]
    said = say(*items)
    assert [(message["tool_calls"][0]["function"]["name"]) for message in said[::2]] == [
        "apply_patch",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
    ]
    assert [json.loads(message["tool_calls"][0]["function"]["arguments"]) for message in said[::2]] == [
        {"input": 'a\n"b"'},
        {"type": "exec", "command": ["ls"]},
        {"commands": ["ls"]},
        {"type": "delete_file", "path": "a"},
        {"query": "mail"},
    ]
    assert [message["tool_call_id"] for message in said[1::2]] == ["c1", "c2", "c3", "c4", "c5"]
    assert [message["content"] for message in said[1::2]] == [
        "done",
        "a",
        '[{"stdout":"a"}]',
        "completed",
        '{"tools":["send"]}',
    ]


def test_what_other_servers_did_in_between_is_left_out_and_listed() -> None:
    items = [user("x"), {"type": "web_search_call", "id": "ws_1", "status": "completed"}, answer("y")]
    translation = translate_responses(ask(input=items))
    assert translation.ignored == ("input[1].web_search_call",)
    assert [message["role"] for message in json.loads(translation.body)["messages"]] == ["user", "assistant"]


def test_history_comes_first_and_its_items_may_be_referred_to() -> None:
    history = [json.dumps(item).encode() for item in ({**user("x"), "id": "msg_1"}, answer("y"))]
    asked = ask(input=[{"type": "item_reference", "id": "msg_1"}, user("z")], instructions="Be brief.")
    messages = json.loads(translate_responses(asked, history=history, previous_response_id="resp_1").body)["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("system", "Be brief."),
        ("user", "x"),
        ("assistant", "y"),
        ("user", "z"),
    ]


def test_very_many_small_messages_are_one_turn() -> None:
    joined = say(*[user("a")] * 20_000)
    assert joined == [{"role": "user", "content": "\n\n".join(["a"] * 20_000)}]
