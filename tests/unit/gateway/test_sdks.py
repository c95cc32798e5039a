"""The official Python SDKs as judges: their own requests go in, their own readers and types take what comes out."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from conformance.events import read_stream
from gateway.dialects import SURFACES
from gateway.dialects.messages import to_chat_body
from gateway.dialects.responses import (
    ResponsesTranslator,
    list_input_items,
    read_responses_body,
    translate_responses,
)
from gateway.dialects.responses.compaction import pack_summary
from gateway.dialects.translation import AnswerContext, AnswerTranslator
from gateway.errors import (
    BadRequest,
    ContextTooLong,
    EngineRefused,
    ForwardedRequestFailed,
    GatewayError,
    RateLimited,
)
from gateway.keeping import plan_keeping
from gateway.values import Caller, InferenceRequest
from tests.fakes.chat_engine import (
    CONTEXT,
    DONE,
    MESSAGES,
    RESPONSES,
    Json,
    call,
    chunk,
    cut,
    open_answer,
    read_said,
    run,
    say_request,
)

PATCH = '*** Begin Patch\n+"ü"\n*** End Patch\n'
TOOLS: list[Any] = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "mail", "description": "d", "tools": [{"type": "function", "name": "send"}]},
    {"type": "web_search"},
]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2}}
RICH = [
    chunk({"role": "assistant", "content": ""}), chunk({"reasoning_content": "hm"}), chunk({"content": "I will "}),
    chunk({"content": "look."}), chunk(call(0, "", name="look", id="a")), chunk(call(1, "", name="apply_patch", id="b")),
    chunk(call(0, '{"x":')), chunk(call(1, json.dumps({"input": PATCH}))), chunk(call(0, "1}")),
    chunk(call(2, "{}", name="mail__send", id="c")), chunk({}, "tool_calls"), chunk(usage=USAGE), b"data: [DONE]\n\n",
]  # fmt: skip
_events: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)


def stream_of(request: httpx2.Request, chunks: list[bytes]) -> bytes:
    return run("/v1/responses", chunks, _open(request))[0]


def _read(request: httpx2.Request) -> InferenceRequest:
    return SURFACES[request.url.path].parse(request.content, {})


def _open(request: httpx2.Request) -> AnswerTranslator:
    surface = SURFACES[request.url.path]
    assert surface.translate is not None
    return surface.translate(_read(request)).open_answer(CONTEXT)


def connect(answer: Callable[[httpx2.Request], bytes], kind: str = "text/event-stream") -> openai.OpenAI:
    def handle(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": kind}, content=answer(request))

    transport = httpx2.MockTransport(handle)
    return openai.OpenAI(
        api_key="x", base_url="http://gateway/v1", max_retries=0, http_client=httpx2.Client(transport=transport)
    )


def test_the_sdks_stream_helper_puts_the_answer_together_and_sends_it_back_as_it_is() -> None:
    with connect(lambda request: stream_of(request, RICH)).responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        names = [event.type for event in stream]
        response = stream.get_final_response()
    assert (names[0], names[-1], response.output_text) == ("response.created", "response.completed", "I will look.")
    items: list[Any] = [item.to_dict() for item in response.output]
    thought, message, *calls = items
    assert (thought["type"], thought["content"][0]["text"], message["type"]) == ("reasoning", "hm", "message")
    assert [(call["type"], call["name"], call.get("arguments", call.get("input"))) for call in calls] == [
        ("function_call", "look", '{"x":1}'), ("custom_tool_call", "apply_patch", PATCH), ("function_call", "send", "{}"),
    ]  # fmt: skip
    assert ([call["call_id"] for call in calls], calls[2]["namespace"]) == (["a", "b", "c"], "mail")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (7, 2)
    seen: list[httpx2.Request] = []

    def note(request: httpx2.Request) -> bytes:
        seen.append(request)
        return stream_of(request, [chunk({"content": "ok"}, "stop")])

    given: list[Any] = [{"role": "user", "content": "hi"}, thought, message, *calls]
    given += [{"type": "function_call_output", "call_id": call_id, "output": "1"} for call_id in ("a", "c")]
    given.append({"type": "custom_tool_call_output", "call_id": "b", "output": "done"})
    with connect(note).responses.stream(model="m", input=given, tools=TOOLS) as stream:
        assert stream.get_final_response().output_text == "ok"
    said = json.loads(translate_responses(_read(seen[0])).body)["messages"][1]
    assert (said["content"], said["reasoning_content"]) == ("I will look.", "hm")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["look", "apply_patch", "mail__send"]


def test_every_event_and_object_fits_the_published_types() -> None:
    """The SDK itself does not check what it reads."""
    request = httpx2.Request(
        "POST", "http://gateway/v1/responses", json={"model": "m", "input": "hi", "stream": True, "tools": TOOLS}
    )
    refused = [chunk({"refusal": "No."}), chunk({}, "content_filter")]
    broken = [*RICH[:8], b"data: {\n\n"]
    for chunks in (RICH, refused, broken):
        for event in (json.loads(event.data) for event in read_stream(stream_of(request, chunks)).events):
            _events.validate_python(event)
            if "response" in event:
                Response.model_validate(event["response"])


def test_a_compaction_is_what_the_sdk_reads() -> None:
    usage = b'{"prompt_tokens":40,"completion_tokens":6}'
    body = b'{"choices":[{"message":{"content":"short"},"finish_reason":"stop"}],"usage":%b}' % usage
    client = connect(lambda request: _open(request).translate_whole(body), "application/json")
    found = client.responses.compact(model="m", input="x")
    assert (found.object, found.id, found.created_at) == ("response.compaction", "resp_ab12", 1_795_000_000)
    assert (found.usage.input_tokens, found.usage.output_tokens) == (40, 6)
    assert [item.type for item in found.output] == ["message", "compaction"]
    last = found.output[-1]
    assert last.type == "compaction"
    assert "short" not in last.encrypted_content  # clients pass it on unread


def read_message(chunks: list[bytes]) -> dict[str, Any]:
    """Return the message that Anthropic's SDK puts together of a stream."""
    data, _ = run(MESSAGES, chunks)
    transport = httpx2.MockTransport(
        lambda _request: httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=data)
    )
    with httpx2.Client(transport=transport) as http:
        client = anthropic.Anthropic(api_key="key", base_url="http://gateway.invalid", http_client=http, max_retries=0)
        with client.messages.stream(model="m", max_tokens=5, messages=[{"role": "user", "content": "a"}]) as stream:
            return stream.get_final_message().to_dict()


def test_anthropics_sdk_reads_what_the_model_said() -> None:
    message = read_message(RICH)
    assert message["stop_reason"] == "tool_use"
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use", "tool_use"]
    assert (message["content"][0]["thinking"], message["content"][1]["text"]) == ("hm", "I will look.")
    assert [block["input"] for block in message["content"][2:]] == [{"x": 1}, {"input": PATCH}, {}]
    assert (message["usage"]["input_tokens"], message["usage"]["output_tokens"]) == (5, 3)


both = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
COMPACT = "/v1/responses/compact"
HELLO: list[Json] = [{"role": "user", "content": "hello"}]
WHOLE = b'{"choices":[{"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'


@both
@pytest.mark.parametrize("size", [1000, 65_536])
def test_one_event_may_be_larger_than_what_is_usually_held(path: str, size: int) -> None:
    words = json.dumps({"text": "word \u00e9\n" * 100_000})
    stream = chunk({"content": "a"}) + chunk(call(0, words, name="f", id="c1")) + chunk(finish="tool_calls") + DONE
    data, failure = run(path, cut(stream, size))
    said = read_said(path, data)
    assert (failure, said.text) == (None, "a")
    assert [json.loads(arguments) for _, _, arguments in said.calls] == [json.loads(words)]


def test_names_that_are_left_out_fit_into_a_header_and_are_few() -> None:
    tools = [{"type": "plain"}, {"type": "plain"}]
    tools += [{"type": f"kind\r\n: ☃ {'x' * 100} {number % 40}"} for number in range(100)]
    ignored = say_request(MESSAGES, tools=tools).ignored
    assert ignored[0] == "tools.plain"
    assert len(ignored) == len(set(ignored)) <= 32
    assert all(len(name) <= 64 and name.isascii() and name.isprintable() and " " not in name for name in ignored)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ForwardedRequestFailed(), "server_error"),
        (ContextTooLong(), "context_length_exceeded"),
        (RateLimited(), "rate_limit_exceeded"),
        (EngineRefused("busy", status=429), "rate_limit_exceeded"),
        (EngineRefused("no such parameter", status=400), "invalid_prompt"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.status}" if isinstance(value, GatewayError) else value,
)
def test_a_stream_that_broke_ends_with_the_failed_response(error: GatewayError, code: str) -> None:
    translator = open_answer(RESPONSES)
    assert isinstance(translator, ResponsesTranslator)
    translator.feed(chunk({"reasoning": "hm"}) + chunk({"content": "par"}))
    event = json.loads(translator.fail(error).rpartition(b"data: ")[2])
    response, param = event["response"], "input" if isinstance(error, ContextTooLong) else None
    assert (event["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": code, "message": error.message, "type": error.type, "param": param}
    assert [item["status"] for item in response["output"]] == ["completed", "in_progress"]
    assert response["output"][1]["content"][0]["text"] == "par"
    assert translator.failure is error
    assert translator.fail(error) == translator.finish() == translator.feed(chunk({"content": "a"})) == b""
    assert translator.kept is None


def list_kept(given: object, **more: object) -> list[Json]:
    body = json.dumps({"model": "m", "input": given, **more}).encode()
    return [json.loads(item) for item in list_input_items(body)]


def test_items_are_kept_with_an_id_and_a_type_and_tools_without_their_credentials() -> None:
    own = {"type": "message", "id": "msg_own", "role": "user", "content": [{"type": "input_text", "text": "authorization: x"}]}
    plain = {"type": "function", "name": "send", "parameters": {"properties": {"headers": {}, "authorization": {}}}}
    secret = {"type": "mcp", "server_label": "tracker", "authorization": "s3cret", "headers": {"X-Api-Key": "s3cret"}}
    kept = list_kept(
        [
            {"role": "assistant", "content": "ok"},
            own,
            {"type": "function_call_output", "call_id": "c", "output": "1"},
            {"type": "item_reference", "id": "msg_old"},
            {"id": "msg_older"},
            {"type": "from_the_future"},
            {"type": "tool_search_output", "call_id": "c1", "tools": [secret, plain, "odd"]},
        ]
    )
    kinds = ["message", "message", "function_call_output", "from_the_future", "tool_search_output"]
    assert [item["type"] for item in kept] == kinds
    assert [item["id"].partition("_")[0] for item in kept] == ["msg", "msg", "fco", "item", "tso"]
    assert kept[0]["content"] == [{"type": "output_text", "text": "ok", "annotations": []}]
    assert kept[1] == {**own, "status": "completed"}
    assert kept[4]["tools"] == [{"type": "mcp", "server_label": "tracker"}, plain, "odd"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model":"m","input":NaN}', b"[" * 100_000])
def test_a_body_that_cannot_be_read_is_a_bad_request_to_every_reader(body: bytes) -> None:
    for read in (read_responses_body, list_input_items, to_chat_body):
        with pytest.raises(BadRequest):
            read(body)


async def test_the_id_of_a_kept_answer_does_not_follow_from_that_of_its_request() -> None:
    request_id = "req_0199f6a2c0de7000a000000000000001"
    caller = Caller(uuid.uuid4(), "k", "acme", 60, frozenset(), stores_responses=True)
    request = SURFACES[RESPONSES].parse(b'{"model":"m","input":"x"}', {})
    names = []
    for _ in range(2):
        plan = await plan_keeping(caller, request, request_id)
        assert plan is not None
        answers = [plan.translate(request).open_answer(AnswerContext(request_id, "m", 1)).translate_whole(WHOLE) for _ in "ab"]
        first, again = (str(json.loads(answer)["id"]) for answer in answers)
        assert first == again, "every attempt of one request gives the same"
        assert first.startswith("resp_")
        assert len(first) >= 5 + 32
        assert request_id.removeprefix("req_") not in first
        names.append(first)
    assert len(set(names)) == 2


def compact(summary: str, given: object) -> list[Json]:
    """Return the output of a compaction."""
    surface = SURFACES[COMPACT]
    assert surface.translate is not None
    translation = surface.translate(surface.parse(json.dumps({"model": "m", "input": given}).encode(), {}))
    message = {"role": "assistant", "content": summary}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
    output: list[Json] = json.loads(translation.open_answer(AnswerContext("req_1", "m", 1)).translate_whole(body))["output"]
    return output


@pytest.mark.parametrize("summary", ["Somebody asks about λ.", 'quotes " and \\ and\nlines', "🦆" * 5000])
def test_the_output_of_a_compaction_is_the_input_of_the_next_request(summary: str) -> None:
    output = compact(summary, [*HELLO, {"role": "assistant", "content": "hi"}])
    assert output[-1]["encrypted_content"] == pack_summary(summary)
    assert base64.b64encode(summary.encode()).decode() in output[-1]["encrypted_content"]
    asked = {"model": "m", "input": [*output, {"role": "user", "content": "Go on."}]}
    request = SURFACES[RESPONSES].parse(json.dumps(asked).encode(), {})
    assert request.path == "/v1/chat/completions"  # engines that speak Responses would not know the item
    (turn,) = json.loads(say_request(RESPONSES, **asked).body)["messages"]
    assert turn == {"role": "user", "content": f"hello\n\nSummary of the conversation so far:\n{summary}\n\nGo on."}
    assert compact("shorter", output)[-1]["encrypted_content"] == pack_summary("shorter")
