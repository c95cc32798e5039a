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
    400: ("invalid_request_error", "invalid_request_error"), 401: ("authentication_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"), 404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"), 413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"), 429: ("rate_limit_error", "rate_limit_error"),
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
CHAT, MESSAGES, RESPONSES = (SURFACES[f"/v1/{name}"] for name in ("chat/completions", "messages", "responses"))


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
        if surface is not MESSAGES:
            said = json.loads(surface.render_error(error, "req_1"))["error"]
            assert {"message", "type", "param", "code"} <= set(said)
            assert (said["message"], said["type"]) == (error.message, EXPECTED[error.status][0])
            assert isinstance(said["code"], str)
            assert isinstance(said["param"], str | None)
    told = json.loads(MESSAGES.render_error(error, "req_1"))
    assert (told["type"], told["request_id"]) == ("error", "req_1")
    assert told["error"]["type"] in ANTHROPIC_TYPES
    is_of_the_contract = isinstance(error, ModelNotAllowed)  # a model is known, and not for this key: 400
    assert told["error"]["type"] == EXPECTED[error.status][1] or is_of_the_contract
    assert error.message in told["error"]["message"]
    assert read_event(CHAT.render_stream_error(error, "req_1")) == ("", json.loads(CHAT.render_error(error, "req_1")))
    assert read_event(MESSAGES.render_stream_error(error, "req_1")) == ("error", told)
    name, event = read_event(RESPONSES.render_stream_error(error, "req_1"))
    assert (name, event["type"], event["message"]) == ("error", "error", error.message)


@each_error
def test_sdks_raise_what_the_status_means_and_show_the_words(error: GatewayError) -> None:
    request = httpx2.Request("POST", "http://gateway.test/v1")
    for client, surface in ((OPENAI, CHAT), (ANTHROPIC, MESSAGES)):
        reply = httpx2.Response(error.status, request=request, json=json.loads(surface.render_error(error, "req_1")))
        raised = client._make_status_error_from_response(reply)
        assert error.message in raised.message
        if client is OPENAI:
            assert isinstance(raised, OPENAI_EXCEPTIONS.get(min(error.status, 500), openai.APIStatusError))


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


def name_event(name: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), json.dumps({"type": name, **fields}).encode())


DONE, WORDS = b"data: [DONE]\n\n", b'data: {"id":"c","choices":[{"delta":{"content":"it ends with data: [DONE] always"}}]}\n\n'
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
    def feed(stream: bytes, cut: int) -> bytes:
        meta = MetaStream(lambda: META)
        return meta.feed(stream[:cut]) + meta.feed(stream[cut:]) + meta.finish()

    for cut in range(0, len(first + last), 7):
        out = feed(first + last, cut)
        assert out.startswith(first + shown)
        assert [b"x_pool_meta" in event for event in out.split(b"\n\n")].count(True) == 1
        assert out.endswith(last if last == DONE else b"}\n\n")
    broken = first + b'data: {"error":{"message":"no"}}\n\n'
    assert feed(broken, 30) == broken
    assert json.loads(add_meta(b'{"id":"x"}', META))["x_pool_meta"]["node"] == "box"
    assert (add_meta(b"[1]", META), add_meta(b"RIFF\xff", META)) == (b"[1]", b"RIFF\xff")


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
