"""The official Python SDKs as judges: their own requests go in, their own readers and types take what comes out."""

from __future__ import annotations

import json
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
from gateway.dialects.responses import render_failed_response, translate_responses
from gateway.dialects.translation import AnswerTranslator
from gateway.errors import NoAvailableNode
from gateway.values import InferenceRequest
from tests.fakes.chat_engine import CONTEXT, MESSAGES, call, chunk, run, write_event

PATCH = '*** Begin Patch\n+"ü"\n*** End Patch\n'
TOOLS: list[Any] = [
    {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False},
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "mail", "description": "d", "tools": [{"type": "function", "name": "send"}]},
    {"type": "web_search"},
]
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 2}}
RICH = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning_content": "hm"}),
    chunk({"content": "I will "}),
    chunk({"content": "look."}),
    chunk(call(0, "", name="look", id="a")),
    chunk(call(1, "", name="apply_patch", id="b")),
    chunk(call(0, '{"x":')),
    chunk(call(1, json.dumps({"input": PATCH}))),
    chunk(call(0, "1}")),
    chunk(call(2, "{}", name="mail__send", id="c")),
    chunk({}, "tool_calls"),
    chunk(usage=USAGE),
    b"data: [DONE]\n\n",
]
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


def test_the_sdks_stream_helper_puts_the_answer_together() -> None:
    with connect(lambda request: stream_of(request, RICH)).responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        names = [event.type for event in stream]
        response = stream.get_final_response()
    assert names[0] == "response.created"
    assert names[-1] == "response.completed"
    assert response.output_text == "I will look."
    thought, message, look, patch, send = response.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert thought.content[0].text == "hm"
    assert message.type == "message"
    assert look.type == "function_call"
    assert (look.call_id, look.name, look.arguments) == ("a", "look", '{"x":1}')
    assert patch.type == "custom_tool_call"
    assert (patch.call_id, patch.name, patch.input) == ("b", "apply_patch", PATCH)
    assert send.type == "function_call"
    assert (send.name, send.namespace) == ("send", "mail")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.input_tokens_details.cached_tokens) == (7, 2)


def test_the_snapshots_of_the_helper_grow_with_the_deltas() -> None:
    with connect(lambda request: stream_of(request, RICH)).responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        grown = [
            event for event in stream if event.type in {"response.output_text.delta", "response.function_call_arguments.delta"}
        ]
    assert [getattr(event, "snapshot", None) for event in grown] == ["I will ", "I will look.", '{"x":', '{"x":1}', "{}"]


def test_what_the_sdk_got_can_be_sent_back_as_it_is() -> None:
    client = connect(lambda request: stream_of(request, RICH))
    with client.responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        output = stream.get_final_response().output
    seen: list[httpx2.Request] = []

    def note(request: httpx2.Request) -> bytes:
        seen.append(request)
        return stream_of(request, [chunk({"content": "ok"}, "stop")])

    given: list[Any] = [{"role": "user", "content": "hi"}, *[item.to_dict() for item in output]]
    given += [{"type": "function_call_output", "call_id": call_id, "output": "1"} for call_id in ("a", "c")]
    given.append({"type": "custom_tool_call_output", "call_id": "b", "output": "done"})
    with connect(note).responses.stream(model="m", input=given, tools=TOOLS) as stream:
        assert stream.get_final_response().output_text == "ok"
    said = json.loads(translate_responses(_read(seen[0])).body)["messages"][1]
    assert (said["content"], said["reasoning_content"]) == ("I will look.", "hm")
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["look", "apply_patch", "mail__send"]


def test_a_structured_answer_is_parsed_into_its_type() -> None:
    class Point(pydantic.BaseModel):
        x: int

    chunks = [chunk({"content": '{"x"'}), chunk({"content": ":7}"}, "stop")]
    with connect(lambda request: stream_of(request, chunks)).responses.stream(
        model="m", input="hi", text_format=Point
    ) as stream:
        parsed = stream.get_final_response().output_parsed
    assert parsed == Point(x=7)


def test_a_plain_loop_over_a_stream_meets_known_events_alone() -> None:
    client = connect(lambda request: stream_of(request, RICH))
    kinds = {type(event).__name__ for event in client.responses.create(model="m", input="hi", tools=TOOLS, stream=True)}
    assert not {name for name in kinds if not name.endswith("Event")}


def test_an_unstreamed_answer_is_a_response() -> None:
    body = json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}], "usage": USAGE}
    )
    client = connect(lambda request: _open(request).translate_whole(body.encode()), "application/json")
    response = client.responses.create(model="m", input="hi")
    assert (response.output_text, response.status, response.error) == ("Hello.", "completed", None)


def test_an_answer_cut_short_ends_the_helper_with_what_there_is() -> None:
    chunks = [chunk({"content": "Hel"}), chunk({}, "length")]
    with connect(lambda request: stream_of(request, chunks)).responses.stream(model="m", input="hi") as stream:
        last = list(stream)[-1]
    assert last.type == "response.incomplete"
    assert last.response.incomplete_details is not None
    assert last.response.incomplete_details.reason == "max_output_tokens"
    assert last.response.output_text == "Hel"


@pytest.mark.parametrize("begun", [True, False], ids=["after-some-text", "before-anything"])
def test_a_failure_reaches_the_caller_as_the_failed_response(*, begun: bool) -> None:
    def answer(request: httpx2.Request) -> bytes:
        if begun:
            return stream_of(request, [*RICH[:4], b'data: {"error":{"message":"the GPU is gone","code":500}}\n\n'])
        error = NoAvailableNode("the GPU is gone")
        return render_failed_response(error, response_id="resp_1", model="m", created=1, body=request.content)

    with connect(answer).responses.stream(model="m", input="hi", tools=TOOLS) as stream:
        last = list(stream)[-1]
        with pytest.raises(RuntimeError, match=r"response\.completed"):
            stream.get_final_response()
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert (last.response.error.code, last.response.error.message) == ("server_error", "the GPU is gone")


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


# Anthropic's


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


def test_anthropics_sdk_raises_when_the_stream_breaks() -> None:
    with pytest.raises(anthropic.APIStatusError, match="out of memory"):
        read_message([*RICH[:4], write_event({"error": {"message": "out of memory", "code": 500}})])
