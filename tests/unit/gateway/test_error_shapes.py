"""Every error of the gateway in every dialect, whole and in a stream: SDKs choose the exception by status, type and shape."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import httpx2
import openai
import pytest

from gateway.dialects import SURFACES, Surface
from gateway.dialects.pool_meta import MetaStream, PoolMeta, add_meta
from gateway.dialects.refusal import ANTHROPIC_TYPES
from gateway.errors import ClientLeft, EngineRefused, GatewayError, InvalidApiKey, ModelNotAllowed, ModelUnknown
from gateway.keeping import mark_unkept

EXPECTED = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    502: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "timeout_error"),
    529: ("server_error", "overloaded_error"),
}
OPENAI_EXCEPTIONS = {
    400: openai.BadRequestError,
    401: openai.AuthenticationError,
    403: openai.PermissionDeniedError,
    404: openai.NotFoundError,
    429: openai.RateLimitError,
    500: openai.InternalServerError,
}
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
CHAT, MESSAGES, RESPONSES = (SURFACES[f"/v1/{name}"] for name in ("chat/completions", "messages", "responses"))


def read_event(event: bytes) -> tuple[str, dict[str, object]]:
    """Return name and data of the one event that these bytes are."""
    head, _, data = event.rpartition(b"data: ")
    assert data.endswith(b"\n\n")
    assert data.count(b"\n") == 2
    found: dict[str, object] = json.loads(data)
    return head.decode().removeprefix("event: ").strip(), found


@each_error
def test_openai_clients_find_message_type_param_and_code(error: GatewayError) -> None:
    for surface in SURFACES.values():
        if surface is MESSAGES:
            continue
        said = json.loads(surface.render_error(error, "req_1"))["error"]
        assert {"message", "type", "param", "code"} <= set(said)
        assert said["message"] == error.message
        assert said["type"] == EXPECTED[error.status][0]
        assert isinstance(said["code"], str)
        assert isinstance(said["param"], str | None)


@each_error
def test_anthropic_clients_find_type_message_and_the_id_of_the_request(error: GatewayError) -> None:
    said = json.loads(MESSAGES.render_error(error, "req_1"))
    assert (said["type"], said["request_id"]) == ("error", "req_1")
    assert said["error"]["type"] in ANTHROPIC_TYPES
    is_of_the_contract = isinstance(error, ModelNotAllowed)  # a model is known, and not for this key: 400
    assert said["error"]["type"] == EXPECTED[error.status][1] or is_of_the_contract
    assert error.message in said["error"]["message"]


@each_error
def test_sdks_raise_what_the_status_means_and_show_the_words(error: GatewayError) -> None:
    request = httpx2.Request("POST", "http://gateway.test/v1")
    body = json.loads(CHAT.render_error(error, "req_1"))
    reply = httpx2.Response(error.status, request=request, json=body)
    raised = OPENAI._make_status_error_from_response(reply)
    kind = OPENAI_EXCEPTIONS.get(min(error.status, 500), openai.APIStatusError)
    assert isinstance(raised, kind)
    assert error.message in raised.message
    told = json.loads(MESSAGES.render_error(error, "req_1"))
    answer = ANTHROPIC._make_status_error_from_response(httpx2.Response(error.status, request=request, json=told))
    assert error.message in answer.message


@each_error
def test_in_a_stream_each_dialect_has_one_event(error: GatewayError) -> None:
    assert read_event(CHAT.render_stream_error(error, "req_1")) == ("", json.loads(CHAT.render_error(error, "req_1")))
    assert read_event(MESSAGES.render_stream_error(error, "req_1")) == (
        "error",
        json.loads(MESSAGES.render_error(error, "req_1")),
    )
    name, said = read_event(RESPONSES.render_stream_error(error, "req_1"))
    assert (name, said["type"], said["message"]) == ("error", "error", error.message)


@each_error
def test_a_response_that_failed_before_it_began_begins_and_fails(error: GatewayError) -> None:
    request = RESPONSES.parse(b'{"model":"m","input":"x","stream":true}', {})
    events = RESPONSES.render_first_error(error, "req_1", request).split(b"\n\n")[:-1]
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


def feed(stream: bytes, cut: int) -> bytes:
    """Pass a stream in two pieces."""
    calls: list[PoolMeta] = []

    def measure() -> PoolMeta:
        calls.append(META)
        return META

    meta = MetaStream(measure)
    out = meta.feed(stream[:cut]) + meta.feed(stream[cut:]) + meta.finish()
    assert len(calls) <= 1
    return out


@pytest.mark.parametrize("cut", range(0, 2 * len(CHUNK) + 14, 7))
def test_a_chat_stream_gets_one_chunk_without_choices_before_done(cut: int) -> None:
    out = feed(CHUNK + CHUNK + b"data: [DONE]\n\n", cut)
    events = out.split(b"\n\n")
    assert out.startswith(CHUNK + CHUNK)
    assert events[3:] == [b"data: [DONE]", b""]
    chunk = json.loads(events[2].removeprefix(b"data: "))
    assert (chunk["id"], chunk["created"], chunk["choices"], chunk["x_pool_meta"]["gpu_id"]) == ("chatcmpl-1", 7, [], "node_1")


def test_messages_get_an_event_before_message_stop() -> None:
    stop = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    begin = b'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_1"}}\n\n'
    delta = b'event: message_delta\ndata: {"type":"message_delta"}\n\n'
    for cut in (0, 10, len(begin), len(begin + delta) + 3):
        out = feed(begin + delta + stop, cut)
        assert out.startswith(begin + delta + b"event: x_pool_meta\n")
        assert out.endswith(stop)


def test_responses_get_a_field_in_the_closing_object() -> None:
    first = b'event: response.created\ndata: {"type":"response.created","response":{"id":"resp_1"}}\n\n'
    data = b'{"type":"response.completed","sequence_number":3,"response":{"id":"resp_1","output":[]}}'
    last = b"event: response.completed\ndata: " + data + b"\n\n"
    out = feed(first + last, len(first) + 5)
    assert out.startswith(first + b"event: response.completed\ndata: ")
    event = json.loads(out[len(first) :].partition(b"data: ")[2])
    assert (event["sequence_number"], event["response"]["id"], event["response"]["x_pool_meta"]["attempts"]) == (3, "resp_1", 1)


def test_a_whole_answer_gets_a_field_and_what_is_no_object_stays() -> None:
    assert json.loads(add_meta(b'{"id":"x"}', META))["x_pool_meta"]["node"] == "box"
    assert add_meta(b"[1]", META) == b"[1]"
    assert add_meta(b"RIFF\xff", META) == b"RIFF\xff"


def test_text_that_looks_like_the_end_of_a_stream_is_text() -> None:
    first = b'data: {"id":"c","choices":[{"delta":{"content":"it ends with data: [DONE] always"}}]}\n\n'
    out = feed(first + b"data: [DONE]\n\n", 9)
    assert out.startswith(first)
    assert out.count(b"x_pool_meta") == 1
    assert out.endswith(b"}\n\ndata: [DONE]\n\n")


def test_an_echo_that_looks_like_the_closing_event_is_an_echo() -> None:
    first = (
        b'event: response.created\ndata: {"type":"response.created","response":{"metadata":{"type":"response.completed"}}}\n\n'
    )
    last = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"}}\n\n'
    out = feed(first + last, 9)
    assert out.startswith(first)
    assert out.count(b"x_pool_meta") == 1


@pytest.mark.parametrize("blanks", [b"", b" "], ids=["tight", "spaced"])
def test_an_unkept_answer_may_speak_of_data(blanks: bytes) -> None:
    response = {"id": "r", "store": True, "output": [{"text": "event: x\ndata: y"}], "ratio": 1.5}
    event = json.dumps({"type": "response.completed", "response": response}).encode()
    before = b'event: a\ndata: {"type":"a","text":"data: z"}\n\n'
    out = mark_unkept(before + b"event: response.completed\ndata:" + blanks + event + b"\n\n")
    assert out.startswith(before + b"event: response.completed\ndata: {")
    assert out.endswith(b"}\n\n")
    assert json.loads(out.rpartition(b"\ndata:")[2])["response"] == {**response, "store": False}
    assert json.loads(mark_unkept(json.dumps(response).encode())) == {**response, "store": False}
