"""Conversations of ``/v1/messages`` as chat messages that strict templates take, with nothing lost on the way."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from gateway.dialects.messages import to_chat_body
from gateway.errors import BadRequest

PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
USE = {"type": "tool_use", "id": "c1", "name": "f", "input": {"b": 1, "a": [2]}}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": [2]}'}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}, "citations": []}


def user(*blocks: object) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: object) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(content: object, **more: object) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "c1", "content": content, **more}


def translate(*messages: object) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    body, ignored = to_chat_body(json.dumps({"model": "m", "messages": messages}).encode())
    chat: list[dict[str, Any]] = json.loads(body)["messages"]
    return chat, ignored


def carry(*messages: object) -> list[dict[str, Any]]:
    chat, ignored = translate(*messages)
    assert ignored == ()
    return chat


def refuse(*messages: object) -> str | None:
    with pytest.raises(BadRequest) as caught:
        translate(*messages)
    return caught.value.param


# What a user says


def test_texts_of_one_turn_are_one_text() -> None:
    assert carry(user(text("a"), text(""), text("b"))) == [{"role": "user", "content": "a\n\nb"}]
    assert carry(user(text(""))) == [{"role": "user", "content": ""}]


def test_turns_of_one_side_in_a_row_are_one_turn() -> None:
    chat = carry(user(text("a")), {"role": "user", "content": "b"}, assistant(text("c")), assistant(text("d"), USE))
    assert chat == [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c\n\nd", "tool_calls": [CALL]},
    ]


def test_what_an_assistant_says_after_calls_is_a_message_of_its_own() -> None:
    assert carry(assistant(text("a"), USE), assistant(text("b"))) == [
        {"role": "assistant", "content": "a", "tool_calls": [CALL]},
        {"role": "assistant", "content": "b"},
    ]


def test_images_are_parts_in_their_place() -> None:
    by_url = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    assert carry(user(text("look"), PNG, text("and"), by_url)) == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "look"},
                PNG_PART,
                {"type": "text", "text": "and"},
                {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
            ],
        }
    ]


def document(source: object, **more: object) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


def test_a_document_of_text_is_text() -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "words"}
    assert carry(user(document(source))) == [{"role": "user", "content": "words"}]
    told = carry(user(document(source, title="T", context="C")))
    assert told == [{"role": "user", "content": "T\n\nC\n\nwords"}]
    assert carry(user(document({"type": "content", "content": "words"}))) == [{"role": "user", "content": "words"}]
    mixed = carry(user(document({"type": "content", "content": [text("words"), PNG]}, title="T")))
    assert [part["type"] for part in mixed[0]["content"]] == ["text", "text", "image_url"]


def test_a_pdf_is_a_file() -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}
    chat = carry(user(text("read"), document(source, title="a.pdf", context="from me")))
    assert chat[0]["content"] == [
        {"type": "text", "text": "read"},
        {"type": "text", "text": "from me"},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERg=="}},
    ]


def test_a_search_result_is_text_with_its_source() -> None:
    found = {"type": "search_result", "source": "https://x", "title": "T", "content": [text("one"), text("two")]}
    assert carry(user(found)) == [{"role": "user", "content": "T\nhttps://x\none\n\ntwo"}]


@pytest.mark.parametrize(
    ("block", "param"),
    [
        ({"type": "container_upload", "file_id": "file_1"}, "type"),
        ({"type": "some_new_kind", "text": "a"}, "type"),
        ({"type": "thinking", "thinking": "a", "signature": "s"}, "type"),
        (USE, "type"),
        ({"type": "image"}, "source"),
        ({"type": "image", "source": "x"}, "source"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "source.type"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}, "source.data"),
        ({"type": "image", "source": {"type": "url"}}, "source.url"),
        (document({"type": "url", "url": "https://x/a.pdf"}), "source.type"),
        (document({"type": "file", "file_id": "f"}), "source.type"),
        (document({"type": "content", "content": [document({"type": "text", "data": "x"})]}), "source.content[0].type"),
        ({"type": "text"}, "text"),
        ({"type": "tool_result", "content": "a"}, "tool_use_id"),
        (result(5), "content"),
        (result([{"type": "text", "text": 5}]), "content[0].text"),
        (result([{"type": "some_new_kind"}]), "content[0].type"),
    ],
    ids=range(17),
)
def test_what_a_chat_engine_cannot_see_is_refused_by_name(block: object, param: str) -> None:
    assert refuse(user(text("a")), assistant(text("b")), user(text("c"), block)) == f"messages[2].content[1].{param}"


# Tools


def test_calls_and_results_keep_their_ids_and_the_order_of_keys() -> None:
    chat = carry(user(text("go")), assistant(text("I "), text("do"), USE), user(result("done"), text("next")))
    assert chat == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I do", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "user", "content": "next"},
    ]


def test_results_come_before_what_the_user_says_with_them() -> None:
    second = {"type": "tool_use", "id": "c2", "name": "g", "input": {}}
    chat = carry(
        assistant(USE, second),
        user(text("before"), result("one"), text("between"), {**result([text("two")]), "tool_use_id": "c2"}),
    )
    assert [message["role"] for message in chat] == ["assistant", "tool", "tool", "user"]
    assert [message["content"] for message in chat] == ["", "one", "two", "before\n\nbetween"]
    assert [call["id"] for call in chat[0]["tool_calls"]] == ["c1", "c2"]


def test_results_over_several_turns_stay_together_behind_their_calls() -> None:
    chat = carry(assistant(USE), user(text("wait")), user(result("one")))
    assert [message["role"] for message in chat] == ["assistant", "tool", "user"]


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_result_is_an_empty_text(content: object) -> None:
    assert carry(assistant(USE), user(result(content)))[1] == {"role": "tool", "tool_call_id": "c1", "content": ""}
    absent = {"type": "tool_result", "tool_use_id": "c1"}
    assert carry(assistant(USE), user(absent))[1]["content"] == ""


def test_a_result_that_is_an_error_says_so() -> None:
    assert (
        carry(assistant(USE), user(result("no such file", is_error=True)))[1]["content"]
        == "The tool call failed:\nno such file"
    )
    assert carry(assistant(USE), user(result("", is_error=True)))[1]["content"] == "The tool call failed."
    assert carry(assistant(USE), user(result("fine", is_error=False)))[1]["content"] == "fine"


def test_an_image_in_a_result_is_shown_by_the_user() -> None:
    chat = carry(assistant(USE), user(result([text("a screenshot"), PNG]), text("what is it?")))
    assert chat[1] == {"role": "tool", "tool_call_id": "c1", "content": "a screenshot\n\n[1 attached in the next user message]"}
    assert chat[2] == {
        "role": "user",
        "content": [
            {"type": "text", "text": "Attached to the result of tool call c1:"},
            PNG_PART,
            {"type": "text", "text": "what is it?"},
        ],
    }


def test_tools_that_a_search_found_are_named_in_its_result() -> None:
    found = [{"type": "tool_reference", "tool_name": "Grep"}, {"type": "tool_reference", "tool_name": "Glob"}]
    assert carry(assistant(USE), user(result(found)))[1]["content"] == "Tool available: Grep\n\nTool available: Glob"


def test_the_state_of_a_browser_is_told() -> None:
    state = {"type": "browser_state", "tabs": [{"title": "T", "url": "https://x", "active": True}]}
    assert carry(assistant(USE), user(result([state])))[1]["content"] == "[Open tabs]\ntitle: T\nurl: https://x\nactive: True"


@pytest.mark.parametrize(
    ("use", "param"),
    [
        ({"type": "tool_use", "name": "f", "input": {}}, "id"),
        ({"type": "tool_use", "id": "c1", "input": {}}, "name"),
        ({"type": "tool_use", "id": "c1", "name": "f", "input": "x"}, "input"),
        ({"type": "tool_use", "id": "c1", "name": "f", "input": [1]}, "input"),
    ],
    ids=range(4),
)
def test_a_call_that_is_none_is_refused_by_name(use: object, param: str) -> None:
    assert refuse(assistant(text("a"), use)) == f"messages[0].content[1].{param}"


def test_a_call_without_input_has_empty_arguments() -> None:
    chat = carry(assistant({"type": "tool_use", "id": "c1", "name": "f"}))
    assert chat[0]["tool_calls"][0]["function"]["arguments"] == "{}"


# What the assistant said before


def test_thinking_goes_back_under_both_names() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    chat = carry(user(text("go")), assistant(thought, text("a"), {**thought, "thinking": "!"}, text("b")))
    assert chat[1] == {"role": "assistant", "content": "ab", "reasoning_content": "hm!", "reasoning": "hm!"}


def test_a_conversation_that_began_elsewhere_goes_on_here() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "EqQB"},
        text("Let me see. "),
        {"type": "server_tool_use", "id": "srv1", "name": "web_search", "input": {"query": "weather"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "srv1",
            "content": [{"type": "web_search_result", "title": "T", "url": "https://x", "encrypted_content": "Eq" * 50}],
        },
        {"type": "mcp_tool_use", "id": "m1", "name": "ask", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": [text("said")]},
        {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
        {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []},
        {"type": "some_new_kind", "payload": 5},
        {"type": "compaction", "content": "we talked", "encrypted_content": "Eq"},
        text("It rains."),
    ]
    chat, ignored = translate(user(text("go")), assistant(*blocks), user(text("thanks")))
    assert chat[1]["content"] == (
        "Let me see. [Called web_search]\nquery: weather\n[Result of web_search]\ntitle: T\nurl: https://x\n"
        "[Called ask]\n[Result of mcp]\ntext: said\n[Summary of the conversation so far]\nwe talked\nIt rains."
    )
    assert ignored == ("messages.redacted_thinking", "messages.mcp_tool_listing", "messages.some_new_kind")


def test_results_of_servers_are_told_without_what_nobody_can_read() -> None:
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}
    page = {"type": "web_fetch_result", "url": "https://x", "content": document(pdf, title="T")}
    chat = carry(assistant({"type": "web_fetch_tool_result", "tool_use_id": "s1", "content": page}))
    assert "JVBERg" not in chat[0]["content"]
    assert "title: T" in chat[0]["content"]
    run = {"type": "bash_code_execution_result", "stdout": "hi", "stderr": "", "return_code": 0, "content": []}
    chat = carry(assistant({"type": "bash_code_execution_tool_result", "tool_use_id": "s1", "content": run}))
    assert chat[0]["content"] == "[Result of bash_code_execution]\nstdout: hi\nreturn_code: 0\n"


@pytest.mark.parametrize(
    "content",
    ["", [], [{"type": "text", "text": ""}], [{"type": "web_search_tool_result", "tool_use_id": "t", "content": []}]],
    ids=["text", "blocks", "block", "nothing_to_tell"],
)
def test_a_user_who_said_nothing_is_a_turn_all_the_same(content: object) -> None:
    assert carry({"role": "user", "content": content}) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize("blocks", [[], [text("")], [{"type": "redacted_thinking", "data": "E"}]], ids=range(3))
def test_an_assistant_who_said_nothing_is_no_turn(blocks: list[object]) -> None:
    chat, _ = translate(user(text("a")), assistant(*blocks), user(text("b")))
    assert chat == [{"role": "user", "content": "a\n\nb"}]


def test_the_beginning_of_an_answer_stays_last() -> None:
    assert carry(user(text("name a colour")), assistant(text("The colour is")))[-1] == {
        "role": "assistant",
        "content": "The colour is",
    }


# System messages among the turns


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_after_the_first_turn_is_a_marked_part_of_a_user_turn(role: str) -> None:
    note = {"role": role, "content": [text("be brief")]}
    marked = "<system-reminder>\nbe brief\n</system-reminder>"
    assert carry(user(text("a")), note) == [{"role": "user", "content": f"a\n\n{marked}"}]
    assert carry(user(text("a")), assistant(text("b")), note, user(text("c")))[2:] == [
        {"role": "user", "content": f"{marked}\n\nc"}
    ]
    assert carry(assistant(USE), note, user(result("done")), note, assistant(text("b"))) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "user", "content": f"{marked}\n\n{marked}"},
        {"role": "assistant", "content": "b"},
    ]


def test_a_reminder_that_is_marked_already_is_not_marked_again() -> None:
    marked = "<system-reminder>\nbe brief\n</system-reminder>"
    assert carry(user(text("a")), {"role": "system", "content": marked})[0]["content"] == f"a\n\n{marked}"


def test_system_messages_before_the_first_turn_lead() -> None:
    body, _ = to_chat_body(
        json.dumps({
            "model": "m", "system": "one", "messages": [{"role": "system", "content": "two"}, user(text("a"))],
        }).encode()
    )  # fmt: skip
    assert json.loads(body)["messages"] == [{"role": "system", "content": "one\n\ntwo"}, {"role": "user", "content": "a"}]


def test_a_system_message_for_one_turn_is_gone_after_it() -> None:
    note = {"role": "system", "content": "be brief", "clear_at": "next_user_message"}
    assert carry(user(text("a")), note, assistant(text("b")), user(text("c")))[0]["content"] == "a"
    assert "be brief" in carry(user(text("a")), note)[0]["content"]


@pytest.mark.parametrize("turns", [1, 2, 5])
def test_after_the_system_message_user_and_assistant_take_turns(turns: int) -> None:
    note = {"role": "system", "content": "note"}
    messages = [
        note,
        user(text("a")),
        note,
        assistant(text("b")),
        note,
        note,
        user(text("c")),
        user(text("d")),
        assistant(text("e")),
    ]
    roles = [message["role"] for message in carry(*messages * turns)]
    assert roles[0] == "system"
    assert "system" not in roles[1:]
    assert all(first != second for first, second in pairwise(roles))


# Size


@pytest.mark.parametrize(
    ("message", "roles"),
    [
        (assistant(text("a")), ["assistant"]),
        (user(text("a")), ["user"]),
        ({"role": "system", "content": "a"}, ["system"]),
        (user(result("a")), ["tool"] * 5000),
    ],
    ids=range(4),
)
def test_long_conversations_are_carried_whole(message: object, roles: list[str]) -> None:
    chat = carry(*[message] * 5000)
    assert [message["role"] for message in chat] == roles
    assert sum(message["content"].count("a") for message in chat) == 5000


def test_deep_content_is_no_work() -> None:
    deep: object = "a"
    for _ in range(400):
        deep = [deep]
    chat = carry(assistant({"type": "web_search_tool_result", "tool_use_id": "s", "content": deep}))
    assert chat[0]["content"] == "[Result of web_search]\na\n"
