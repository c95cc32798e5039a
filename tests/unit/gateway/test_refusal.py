from __future__ import annotations

import json

import pytest

from gateway.dialects import SURFACES
from gateway.dialects.refusal import read_refusal, read_stream_failure
from gateway.errors import ContextTooLong, EngineRefused, RequestInterrupted

VLLM_CONTEXT = {
    "error": {
        "message": "This model's maximum context length is 4096 tokens. However, you requested 5,120 tokens in the messages.",
        "type": "BadRequestError",
        "param": None,
        "code": 400,
    }
}
LLAMA_CONTEXT = {
    "error": {
        "code": 400,
        "message": "the request exceeds the available context size, try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 700,
        "n_ctx": 512,
    }
}


@pytest.mark.parametrize(("body", "asked", "limit"), [(VLLM_CONTEXT, 5120, 4096), (LLAMA_CONTEXT, 700, 512)])
def test_a_context_that_is_too_small_has_its_own_code_and_the_words_that_claude_code_knows(
    body: dict[str, object], asked: int, limit: int
) -> None:
    raw = json.dumps(body).encode()
    error = read_refusal(400, raw)
    assert isinstance(error, ContextTooLong)
    assert (error.prompt_tokens, error.context_tokens) == (asked, limit)
    said = json.loads(SURFACES["/v1/chat/completions"].render_refusal(400, raw, "req_1"))["error"]
    assert (said["code"], said["type"]) == ("context_length_exceeded", "invalid_request_error")
    said = json.loads(SURFACES["/v1/messages"].render_refusal(400, raw, "req_1"))["error"]
    assert said["message"] == f"prompt is too long: {asked} tokens > {limit} maximum"
    assert said["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("status", "anthropic_type", "openai_type", "retryable"),
    [
        (400, "invalid_request_error", "invalid_request_error", False),
        (401, "authentication_error", "authentication_error", False),
        (404, "not_found_error", "not_found_error", False),
        (413, "request_too_large", "invalid_request_error", False),
        (429, "rate_limit_error", "rate_limit_error", True),
        (500, "api_error", "server_error", True),
        (503, "overloaded_error", "server_error", True),
        (529, "overloaded_error", "server_error", True),
    ],
)
def test_an_engines_refusal_keeps_status_and_words_in_each_dialect(
    status: int, anthropic_type: str, openai_type: str, *, retryable: bool
) -> None:
    body = b'{"error":{"message":"no","type":"t","code":7}}'
    error = read_refusal(status, body)
    assert isinstance(error, EngineRefused)
    assert (error.status, error.message, error.type, error.retryable) == (status, "no", openai_type, retryable)
    said = json.loads(SURFACES["/v1/messages"].render_refusal(status, body, "req_1"))
    assert (said["type"], said["error"]["type"], said["error"]["message"]) == ("error", anthropic_type, "no")
    assert said["request_id"] == "req_1"
    said = json.loads(SURFACES["/v1/chat/completions"].render_refusal(status, body, "req_1"))["error"]
    assert (said["message"], said["type"], said["param"]) == ("no", "t", None)
    assert isinstance(said["code"], str)


@pytest.mark.parametrize("code", [b'"text"', b"null"])
def test_an_error_in_openais_shape_passes_byte_for_byte(code: bytes) -> None:
    body = b'{"error":{"message":"no", "code":' + code + b'}, "more":1}'
    assert SURFACES["/v1/chat/completions"].render_refusal(400, body, "req_1") is body


def test_an_error_without_a_body_becomes_one_that_sdks_can_show() -> None:
    said = json.loads(SURFACES["/v1/chat/completions"].render_refusal(500, b"", "req_1"))["error"]
    assert said["message"] == "The engine answered with HTTP 500 and no reason."


def test_an_error_that_speaks_anthropic_passes_as_it_is() -> None:
    body = b'{"type":"error","error":{"type":"overloaded_error","message":"later"}}'
    assert SURFACES["/v1/messages"].render_refusal(529, body, "req_1") is body


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (b'{"message":"boom","code":503}', 503, "boom"),
        (b'"boom"', 502, "boom"),
        (b'{"message":"boom","code":"x"}', 502, "boom"),
        (b'{"message":"boom","code":true}', 502, "boom"),
        (b"null", 502, "The engine answered with HTTP 502 and no reason."),
        (b'{"message":null,"code":9}', 502, "The engine answered with HTTP 502 and no reason."),
        (b'{"message":[1],"type":[],"code":{}}', 502, "[1]"),
    ],
)
def test_an_error_inside_a_stream_is_read_in_any_shape(error: bytes, status: int, words: str) -> None:
    found = read_stream_failure(error)
    assert (found.status, found.message) == (status, words)


def test_a_long_page_is_cut_and_its_markup_left_out() -> None:
    error = read_refusal(502, b"<style>p{}</style><p>" + b"words " * 4000)
    assert len(error.message) <= 1000
    assert error.message.startswith("words words")


def test_an_engines_own_stream_that_broke_ends_as_the_response_it_had_begun() -> None:
    surface = SURFACES["/v1/responses"]
    response = {"id": "resp_x", "object": "response", "status": "in_progress", "output": []}
    created = {"type": "response.created", "sequence_number": 0, "response": response}
    first = b"event: response.created\ndata: " + json.dumps(created).encode() + b"\n\n"
    last = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number":41}\n\n'
    said = surface.render_broken(RequestInterrupted(), first=first, last=last)
    event = json.loads(said.removeprefix(b"event: response.failed\ndata: "))
    assert (event["type"], event["sequence_number"]) == ("response.failed", 42)
    assert (event["response"]["id"], event["response"]["status"]) == ("resp_x", "failed")
    assert event["response"]["error"]["code"] == "server_error"


@pytest.mark.parametrize("first", [b"", b"data: {", b'data: {"type":"error"}\n\n', b'data: {"type":"response.created"}\n\n'])
def test_a_stream_whose_beginning_says_nothing_goes_on_with_nothing(first: bytes) -> None:
    assert SURFACES["/v1/responses"].render_broken(RequestInterrupted(), first=first, last=b"data: x\n\n") == b""


def test_characters_are_not_taken_for_tokens() -> None:
    words = "The maximum context length is 2048 tokens. However, your prompt contains 108028 characters, about 30000 tokens."
    error = read_refusal(400, json.dumps({"error": {"message": words}}).encode())
    assert isinstance(error, ContextTooLong)
    assert (error.prompt_tokens, error.context_tokens) == (30000, 2048)
