"""The official Python SDKs as judges: their own requests go in, their own readers and types take what comes out."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from conformance.exchange import read_stream
from gateway import errors
from gateway.dialects.chat import AnswerContext, AnswerTranslator
from gateway.dialects.messages_request import to_chat_body
from gateway.dialects.pool_meta import MetaStream, PoolMeta, add_meta
from gateway.dialects.refusal import ANTHROPIC_TYPES
from gateway.dialects.responses_answer import ResponsesTranslator
from gateway.dialects.responses_request import list_input_items, pack_summary, read_responses_body
from gateway.dialects.surface import SURFACES, Surface
from gateway.errors import ClientLeft, EngineRefused, GatewayError, InvalidApiKey, ModelNotAllowed, ModelUnknown
from gateway.request.stored import plan_storage
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
        (errors.ForwardedRequestFailed(), "server_error"),
        (errors.ContextTooLong(), "context_length_exceeded"),
        (errors.RateLimited(), "rate_limit_exceeded"),
        (errors.EngineRefused("busy", status=429), "rate_limit_exceeded"),
        (errors.EngineRefused("no such parameter", status=400), "invalid_prompt"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.status}" if isinstance(value, errors.GatewayError) else value,
)
def test_a_stream_that_broke_ends_with_the_failed_response(error: errors.GatewayError, code: str) -> None:
    translator = open_answer(RESPONSES)
    assert isinstance(translator, ResponsesTranslator)
    translator.feed(chunk({"reasoning": "hm"}) + chunk({"content": "par"}))
    event = json.loads(translator.fail(error).rpartition(b"data: ")[2])
    response, param = event["response"], "input" if isinstance(error, errors.ContextTooLong) else None
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
        with pytest.raises(errors.BadRequest):
            read(body)


async def test_the_id_of_a_kept_answer_does_not_follow_from_that_of_its_request() -> None:
    request_id = "req_0199f6a2c0de7000a000000000000001"
    caller = Caller(uuid.uuid4(), "k", "acme", 60, frozenset(), stores_responses=True)
    request = SURFACES[RESPONSES].parse(b'{"model":"m","input":"x"}', {})
    names = []
    for _ in range(2):
        plan = await plan_storage(caller, request, request_id)
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
    assert request.paths == ("/v1/chat/completions",)  # engines that speak Responses would not know the item
    (turn,) = json.loads(say_request(RESPONSES, **asked).body)["messages"]
    assert turn == {"role": "user", "content": f"hello\n\nSummary of the conversation so far:\n{summary}\n\nGo on."}
    assert compact("shorter", output)[-1]["encrypted_content"] == pack_summary("shorter")


EXPECTED = {
    400: ("invalid_request_error", "invalid_request_error"), 401: ("authentication_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"), 404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"), 413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"), 426: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"), 502: ("server_error", "api_error"), 503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"), 529: ("server_error", "overloaded_error"),
}  # fmt: skip
OPENAI_EXCEPTIONS = {
    400: openai.BadRequestError, 401: openai.AuthenticationError, 403: openai.PermissionDeniedError,
    404: openai.NotFoundError, 429: openai.RateLimitError, 500: openai.InternalServerError,
}  # fmt: skip
RESPONSES_CODES = {"server_error", "context_length_exceeded", "rate_limit_exceeded", "invalid_prompt"}
CODES_AGENTS_RETRY = {"server_error", "rate_limit_exceeded"}


def list_errors() -> Iterator[GatewayError]:
    """Yield one error of every class that a client may be told."""
    waiting: list[type[GatewayError]] = [GatewayError]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind is EngineRefused:
            yield from (EngineRefused("said by the engine", status=status) for status in EXPECTED)
        elif kind.__module__ == GatewayError.__module__ and not issubclass(kind, ClientLeft):
            yield kind("said by the test")


ERRORS = sorted(list_errors(), key=lambda error: (type(error).__name__, error.status))
each_error = pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error.status}")
OPENAI, ANTHROPIC = openai.OpenAI(api_key="k"), anthropic.Anthropic(api_key="k")
OF_CHAT, OF_MESSAGES, OF_RESPONSES = (SURFACES[f"/v1/{name}"] for name in ("chat/completions", "messages", "responses"))


def read_event(event: bytes) -> tuple[str, dict[str, object]]:
    """Return name and data of the one event that these bytes are."""
    head, _, data = event.rpartition(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    found: dict[str, object] = json.loads(data)
    return head.decode().removeprefix("event: ").strip(), found


@each_error
def test_each_dialect_says_an_error_in_its_shape_whole_and_in_a_stream(error: GatewayError) -> None:
    for surface in SURFACES.values():
        if surface is not OF_MESSAGES:
            said = json.loads(surface.render_error(error, "req_1"))["error"]
            assert {"message", "type", "param", "code"} <= set(said)
            assert (said["message"], said["type"]) == (error.message, EXPECTED[error.status][0])
            assert isinstance(said["code"], str)
            assert isinstance(said["param"], str | None)
    told = json.loads(OF_MESSAGES.render_error(error, "req_1"))
    assert (told["type"], told["request_id"]) == ("error", "req_1")
    assert told["error"]["type"] in ANTHROPIC_TYPES
    is_of_the_contract = isinstance(error, ModelNotAllowed)  # a model is known, and not for this key: 400
    assert told["error"]["type"] == EXPECTED[error.status][1] or is_of_the_contract
    assert error.message in told["error"]["message"]
    assert read_event(OF_CHAT.render_stream_error(error, "req_1")) == ("", json.loads(OF_CHAT.render_error(error, "req_1")))
    assert read_event(OF_MESSAGES.render_stream_error(error, "req_1")) == ("error", told)
    name, event = read_event(OF_RESPONSES.render_stream_error(error, "req_1"))
    assert (name, event["type"], event["message"]) == ("error", "error", error.message)


@each_error
def test_sdks_raise_what_the_status_means_and_show_the_words(error: GatewayError) -> None:
    request = httpx2.Request("POST", "http://gateway.test/v1")
    for client, surface in ((OPENAI, OF_CHAT), (ANTHROPIC, OF_MESSAGES)):
        reply = httpx2.Response(error.status, request=request, json=json.loads(surface.render_error(error, "req_1")))
        raised = client._make_status_error_from_response(reply)
        assert error.message in raised.message
        if client is OPENAI:
            assert isinstance(raised, OPENAI_EXCEPTIONS.get(min(error.status, 500), openai.APIStatusError))


@each_error
def test_a_response_that_failed_before_it_began_begins_and_fails(error: GatewayError) -> None:
    request = OF_RESPONSES.parse(b'{"model":"m","input":"x","stream":true}', {})
    events = OF_RESPONSES.render_first_error(error, "req_1", request).split(b"\n\n")[:-1]
    (_, created), (_, failed) = (read_event(event + b"\n\n") for event in events)
    assert [created["type"], failed["type"]] == ["response.created", "response.failed"]
    assert [created["sequence_number"], failed["sequence_number"]] == [0, 1]
    response = failed["response"]
    assert isinstance(response, dict)
    assert response["status"] == "failed"
    assert response["error"]["message"] == error.message
    assert response["error"]["code"] in RESPONSES_CODES
    is_tried_again = response["error"]["code"] in CODES_AGENTS_RETRY
    assert is_tried_again == (error.status >= 500 or error.status == 429)


@pytest.mark.parametrize("surface", SURFACES.values(), ids=lambda surface: surface.path)
def test_litellm_takes_a_wrong_key_and_an_unknown_model_for_what_they_are(surface: Surface) -> None:
    """Its client looks for ``invalid_request_error`` in the text of an error before it looks at the status."""
    for error, kind, code in (
        (InvalidApiKey(), "authentication_error", "INVALID_API_KEY"),
        (ModelUnknown("The model 'x' does not exist."), "not_found_error", "MODEL_NOT_ALLOWED"),
    ):
        text = surface.render_error(error, "req_1").decode()
        said = json.loads(text)["error"]
        assert (said["type"], said["code"]) == (kind, code)
        assert "invalid_request_error" not in text
    assert "Incorrect API key provided" in surface.render_error(InvalidApiKey(), "req_1").decode()


META = PoolMeta(
    gpu_id="node_1", node="box", model="m", asked_model="auto", queue_ms=1, inference_ms=2, ttfb_ms=None, attempts=1
)
CHUNK = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[]}\n\n'


def name_event(name: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps({"type": name, **fields}).encode())


WORDS = b'data: {"id":"c","choices":[{"delta":{"content":"it ends with data: [DONE] always"}}]}\n\n'
BEGUN = name_event("message_start", message={"id": "msg_1"}) + name_event("message_delta")
ECHO = name_event("response.created", response={"metadata": {"type": "response.completed"}})


@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [
        (CHUNK + CHUNK, DONE, b'data: {"id":"chatcmpl-1"'),
        (WORDS, DONE, b'data: {"id":"c"'),  # text that looks like the end is text
        (BEGUN, name_event("message_stop"), b"event: x_pool_meta\n"),
        (ECHO, name_event("response.completed", response={"id": "r"}), b"event: response.completed\n"),
    ],
    ids=["chat", "words", "messages", "responses"],
)
def test_the_pools_numbers_stand_once_before_the_end_wherever_a_stream_is_cut(first: bytes, last: bytes, shown: bytes) -> None:
    def feed(stream: bytes, place: int) -> bytes:
        meta = MetaStream(lambda: META)
        return meta.feed(stream[:place]) + meta.feed(stream[place:]) + meta.finish()

    for place in range(0, len(first + last), 7):
        out = feed(first + last, place)
        assert out.startswith(first + shown)
        assert [b"x_pool_meta" in event for event in out.split(b"\n\n")].count(True) == 1
        assert out.endswith(last if last == DONE else b"}\n\n")
    broken = first + b'data: {"error":{"message":"no"}}\n\n'
    assert feed(broken, 30) == broken
    assert json.loads(add_meta(b'{"id":"x"}', META))["x_pool_meta"]["node"] == "box"
    assert (add_meta(b"[1]", META), add_meta(b"RIFF\xff", META)) == (b"[1]", b"RIFF\xff")
