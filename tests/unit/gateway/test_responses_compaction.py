"""A conversation made shorter: OpenAI's object, and an item that the next request may begin with."""

from __future__ import annotations

import base64
import json
from typing import Any

import httpx2
import openai
import pytest

from gateway.dialects import SURFACES, Surface
from gateway.dialects.responses.compaction import pack_summary, translate_compact
from gateway.dialects.translation import AnswerContext, Translation
from gateway.errors import BadRequest
from gateway.values import InferenceRequest

COMPACT, RESPONSES = SURFACES["/v1/responses/compact"], SURFACES["/v1/responses"]
CONTEXT = AnswerContext("req_0123", "m", 1_700_000_000)
USAGE = {"prompt_tokens": 40, "completion_tokens": 6, "total_tokens": 46}
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "What is a λ?"},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A function."}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "found"},
    {"role": "user", "content": [{"type": "input_text", "text": "And then?"}]},
]


def ask(surface: Surface = COMPACT, **fields: Any) -> InferenceRequest:
    request: InferenceRequest = surface.parse(json.dumps({"model": "m", **fields}).encode(), {})
    return request


def say(request: InferenceRequest, surface: Surface = COMPACT) -> Translation:
    """Return a request as a node gets it."""
    assert surface.translate is not None
    return surface.translate(request)


def answer(content: str | None, *, reason: str = "stop") -> bytes:
    message = {"role": "assistant", "content": content, "reasoning_content": "I think."}
    return json.dumps({"id": "c", "choices": [{"message": message, "finish_reason": reason}], "usage": USAGE}).encode()


def compact(summary: str = "Somebody asks about λ.", **fields: Any) -> dict[str, Any]:
    translation = say(ask(**{"input": TALK, **fields}))
    translator = translation.open_answer(CONTEXT)
    body = translator.translate_whole(answer(summary))
    assert translator.failure is None
    found: dict[str, Any] = json.loads(body)
    return found


def test_the_answer_is_what_openais_sdk_reads_users_messages_first() -> None:
    transport = httpx2.MockTransport(lambda _request: httpx2.Response(200, json=compact()))
    with openai.OpenAI(api_key="k", http_client=httpx2.Client(transport=transport)) as client:
        found = client.responses.compact(model="m", input="x")
    assert (found.object, found.id, found.created_at) == ("response.compaction", "resp_0123", 1_700_000_000)
    assert (found.usage.input_tokens, found.usage.output_tokens) == (40, 6)
    assert [item.type for item in found.output] == ["message", "message", "compaction"]
    assert found.output[-1].id == "cmp_0123"
    last = found.output[-1]
    assert last.type == "compaction"
    assert "λ" not in last.encrypted_content  # clients pass it on unread


def test_the_model_is_asked_for_the_summary_of_all_that_was_said() -> None:
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    form = {"format": {"type": "json_object"}}
    translation = say(ask(input=TALK, instructions="Be brief.", tools=tools, text=form))
    chat = json.loads(translation.body)
    assert translation.path == "/v1/chat/completions"
    assert [turn["role"] for turn in chat["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert "Summarise this conversation" in chat["messages"][-1]["content"]
    assert "And then?" in chat["messages"][-1]["content"]
    assert (chat["tool_choice"], "response_format" in chat, "stream" in chat) == ("none", False, False)


@pytest.mark.parametrize("summary", ["Somebody asks about λ.", 'quotes " and \\ and\nlines', "🦆" * 5000])
def test_the_output_is_the_input_of_the_next_request(summary: str) -> None:
    output = compact(summary)["output"]
    request = ask(RESPONSES, input=[*output, {"role": "user", "content": "Go on."}])
    assert request.path == "/v1/chat/completions"  # engines that speak Responses would not know the item
    (turn,) = json.loads(say(request, RESPONSES).body)["messages"]
    assert turn["role"] == "user"
    for words in ("What is a λ?", f"Summary of the conversation so far:\n{summary}", "Go on."):
        assert words in turn["content"]
    again = say(ask(input=output))
    assert summary in json.loads(again.body)["messages"][-1]["content"]


@pytest.mark.parametrize(
    "packed",
    ["gAAAAABopenai", "", "muster_summary_1:***", "muster_summary_1:" + base64.b64encode(b"\xff").decode(), 5, None],
)
def test_what_somebody_else_compacted_is_refused_by_its_field(packed: object) -> None:
    with pytest.raises(BadRequest) as caught:
        say(ask(RESPONSES, input=[{"type": "compaction", "encrypted_content": packed}]), RESPONSES)
    assert caught.value.param == "input[0].encrypted_content"


@pytest.mark.parametrize(
    ("fields", "param"), [({"stream": True}, "stream"), ({"store": True}, "store"), ({"input": []}, "input")]
)
def test_what_a_compaction_cannot_be_is_refused_by_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ask(**{"input": "x", **fields})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body", [answer(""), answer(None), answer("  \n"), b"{", b'{"choices":[]}', b'{"error":{"message":"no"}}']
)
def test_an_answer_without_a_summary_is_a_failure(body: bytes) -> None:
    translator = say(ask(input=TALK)).open_answer(CONTEXT)
    assert translator.translate_whole(body) == b""
    assert translator.failure is not None


def test_a_kept_conversation_is_compacted_with_its_history() -> None:
    history = [json.dumps({"id": "msg_1", "type": "message", "role": "user", "content": "Before"}).encode()]
    translation = translate_compact(ask(input="Now"), history=history, previous_response_id="resp_0")
    assert "Before" in json.loads(translation.body)["messages"][0]["content"]
    output = json.loads(translation.open_answer(CONTEXT).translate_whole(answer("s")))["output"]
    assert [item.get("id", "")[:4] for item in output] == ["msg_", "msg_", "cmp_"]
    assert output[-1]["encrypted_content"] == pack_summary("s")
