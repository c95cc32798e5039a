"""How bodies are read on every surface, and how errors are said."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects import SURFACES
from gateway.dialects.surface import Dialect
from gateway.errors import BadRequest, RateLimited, StreamTooLarge
from gateway.values import InferenceRequest

CHAT = "/v1/chat/completions"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
MEGABYTE = 1024 * 1024


def parse(fields: object, path: str = CHAT, headers: dict[str, str] | None = None) -> InferenceRequest:
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return SURFACES[path].parse(body, headers or {})


def chat(**fields: object) -> dict[str, object]:
    return {"model": "m", "messages": HELLO, **fields}


def refuse(fields: object, path: str = CHAT) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parse(fields, path)
    return caught.value


def test_what_policy_needs_is_read_and_the_bytes_stay_as_they_are() -> None:
    body = b' {"model":"m", "messages":[{"x":1}],"stream":true,"stream_options":{"include_usage":true},"max_tokens":7,"zz":{}} '
    request = parse(body)
    assert request.body is body
    assert (request.model, request.is_streaming, request.max_tokens) == ("m", True, 7)
    assert request.endpoint == CHAT


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None, "stream_options": None, "max_tokens": None}])
def test_absent_and_null_options_are_off(fields: dict[str, object]) -> None:
    request = parse(chat(**fields))
    assert (request.is_streaming, request.max_tokens) == (False, None)


def test_the_largest_token_limit_counts() -> None:
    assert parse(chat(max_tokens=5, max_completion_tokens=9)).max_tokens == 9
    assert parse({"model": "m", "input": "i", "max_output_tokens": 3}, "/v1/responses").max_tokens == 3
    assert parse(chat(max_tokens=10**40)).max_tokens == 10**40


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": HELLO}, "model"),
        ({"model": None, "messages": HELLO}, "model"),
        ({"model": 5, "messages": HELLO}, "model"),
        ({"model": "", "messages": HELLO}, "model"),
        ({"model": "x" * 201, "messages": HELLO}, "model"),
        ({"model": "a\x00b", "messages": HELLO}, "model"),
        ({"model": "a\nb", "messages": HELLO}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": None}, "messages"),
        ({"model": "m", "messages": "hi"}, "messages"),
        ({"model": "m", "messages": {}}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        (chat(stream="yes"), "stream"),
        (chat(stream=1), "stream"),
        (chat(max_tokens="5"), "max_tokens"),
        (chat(max_tokens=5.5), "max_tokens"),
        (chat(max_tokens=-1), "max_tokens"),
        (chat(max_completion_tokens=[]), "max_completion_tokens"),
        (chat(stream_options=[]), "stream_options"),
        (chat(stream_options={"include_usage": "x"}), "stream_options.include_usage"),
    ],
)
def test_a_bad_chat_request_names_the_field(fields: dict[str, object], param: str) -> None:
    error = refuse(fields)
    assert error.param == param
    assert (error.status, error.code, error.retryable) == (400, "BAD_REQUEST", False)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/messages", {"model": "m", "messages": HELLO}, "max_tokens"),
        ("/v1/messages", {"model": "m", "max_tokens": 5}, "messages"),
        ("/v1/embeddings", {"model": "m"}, "input"),
        ("/v1/completions", {"prompt": "x"}, "model"),
        ("/v1/responses", {"input": "x"}, "model"),
        ("/v1/images/generations", {"model": "m"}, "prompt"),
        ("/v1/images/generations", {"model": "m", "prompt": None}, "prompt"),
        ("/v1/images/generations", {"model": "m", "prompt": ""}, "prompt"),
        ("/v1/images/generations", {"model": "m", "prompt": ["a"]}, "prompt"),
        ("/v1/images/generations", {"prompt": "a llama"}, "model"),
    ],
)
def test_other_surfaces_name_the_field_too(path: str, fields: dict[str, object], param: str) -> None:
    assert refuse(fields, path).param == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  \n",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b'{"model":"m","messages":[1],"max_tokens":NaN}',
        b'{"model":"m","messages":[NaN]}',
        b'{"model":"m","messages":[1]} trailing',
        b"\xff\xfe{}",
        b'{"model":"\\ud800","messages":[1]}',
        b'{"model":"m","messages":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"model":"m","messages":["' + b"\xff" * 70_000 + b'"]}',
        b'{"model":"m","messages":["\\ud800' + b"a" * 70_000 + b'"]}',
        b"GET / HTTP/1.1",
    ],
    ids=lambda body: repr(body[:30]),
)
def test_what_is_no_json_object_is_a_bad_request(body: bytes) -> None:
    assert refuse(body).status == 400


@pytest.mark.parametrize("depth", [100, 400, 900])
def test_a_long_prompt_may_be_nested_as_deep_as_the_parser_takes(depth: int) -> None:
    body = b'{"model":"m","messages":' + b"[" * depth + b'"' + b"a" * 70_000 + b'"' + b"]" * depth + b"}"
    try:
        counted = parse(body).prompt_chars
    except BadRequest:
        return  # deeper than the parser goes, and said so
    assert counted == 70_000


@given(st.binary(max_size=200))
def test_no_body_raises_anything_but_a_bad_request(body: bytes) -> None:
    for surface in SURFACES.values():
        try:
            surface.parse(body, {})
        except BadRequest:
            pass


def test_errors_do_not_repeat_the_prompt() -> None:
    error = refuse({"model": "m", "messages": "my secret prompt", "max_tokens": "secret"})
    assert "secret" not in error.message


def test_only_the_headers_of_the_surface_travel_on() -> None:
    sent = {
        "authorization": "Bearer mst_x",
        "x-api-key": "k",
        "cookie": "c",
        "content-type": "application/json",
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "b",
        "openai-organization": "o",
        "accept-encoding": "gzip",
    }
    assert parse(chat(), CHAT, sent).headers == {"content-type": "application/json", "openai-organization": "o"}
    request = parse(chat(max_tokens=1), "/v1/messages", sent)
    assert request.headers.keys() == {"content-type", "anthropic-version", "anthropic-beta"}


def test_small_prompts_are_counted_with_their_json_and_never_too_low() -> None:
    request = parse(chat())
    assert len("hello") <= request.prompt_chars <= len(json.dumps(HELLO))


def test_a_long_prompt_counts_its_text_alone_without_images_and_files() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9 * MEGABYTE}}
    text = {"type": "text", "text": "é" * MEGABYTE}
    request = parse(chat(messages=[{"role": "user", "content": [text, image]}]))
    assert MEGABYTE <= request.prompt_chars <= MEGABYTE + 40


def test_anthropic_images_and_files_do_not_count() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "A" * MEGABYTE}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "b" * 70_000}]
    request = parse({"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}, "/v1/messages")
    assert 70_000 <= request.prompt_chars <= 70_100


def test_every_place_a_prompt_can_stand_counts() -> None:
    long = "a" * 100_000
    for path, fields in {
        CHAT: chat(messages=[{"role": "user", "content": long}]),
        "/v1/completions": {"model": "m", "prompt": [long]},
        "/v1/embeddings": {"model": "m", "input": long},
        "/v1/responses": {"model": "m", "input": [{"content": long}]},
        "/v1/messages": {"model": "m", "max_tokens": 1, "messages": HELLO, "system": long},
    }.items():
        assert 100_000 <= parse(fields, path).prompt_chars <= 100_100, path


LONG = "a" * 100_000
PARTS_WITH_TEXT: dict[str, dict[str, Any]] = {
    "text of a tool result": {"type": "tool_result", "tool_use_id": "t", "content": LONG},
    "parts of a tool result": {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": LONG}]},
    "input of a tool": {"type": "tool_use", "id": "t", "name": "n", "input": {"path": LONG}},
    "thinking": {"type": "thinking", "thinking": LONG, "signature": "s"},
    "document": {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": LONG}},
    "document of parts": {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": LONG}]}},
}


@pytest.mark.parametrize("name", sorted(PARTS_WITH_TEXT))
def test_every_part_of_messages_that_holds_text_counts(name: str) -> None:
    messages = [{"role": "user", "content": [PARTS_WITH_TEXT[name]]}]
    counted = parse({"model": "m", "max_tokens": 1, "messages": messages}, "/v1/messages").prompt_chars
    assert 100_000 <= counted <= 100_100


def test_an_image_in_a_tool_result_is_no_text() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * MEGABYTE}}
    messages = [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]}]
    assert parse({"model": "m", "max_tokens": 1, "messages": messages}, "/v1/messages").prompt_chars == 0


def test_a_prompt_that_nests_without_end_is_refused() -> None:
    nested = b'{"type":"tool_result","content":[' * 5000 + b"]}" * 5000
    body = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":[' + nested + b"]}]}"
    with pytest.raises(BadRequest):
        SURFACES["/v1/messages"].parse(body, {})


def test_a_32_mb_body_costs_a_few_calls_for_each_part_of_it() -> None:
    parts = 20_000
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 24 * MEGABYTE}}
    content = [image, *[{"type": "text", "text": "abc"}] * parts]
    body = json.dumps(chat(messages=[{"role": "user", "content": content}])).encode()
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        parse(body)
    finally:
        sys.setprofile(None)
    assert 0 < calls < 20 * parts, "reading must stay linear in the parts, and never walk the bytes of an image in Python"


# headers


@pytest.mark.parametrize("path", [path for path, surface in SURFACES.items() if not surface.is_form])
def test_cache_wishes_travel_and_credentials_tenants_and_priorities_do_not(path: str) -> None:
    wishes = {"x-cache-mode": "auto", "x-cache-tag": "a.b_c:d-1"}
    own = {"authorization": "x", "x-api-key": "x", "cookie": "x", "x-tenant-id": "x", "x-priority": "high"}
    body = chat(input="i", max_tokens=5, query="q", documents=["d"])
    if path in ("/v1/completions", "/v1/images/generations"):
        body["prompt"] = "p"
    assert parse(body, path, {**wishes, **own}).headers == wishes


@pytest.mark.parametrize(
    ("name", "value"),
    [("x-cache-mode", word) for word in ("", "PREFIX", "prefix ", "all")]
    + [("x-cache-tag", word) for word in ("", "x" * 65, "a b", "ä", "a/b", "a\n")],
)
def test_a_cache_wish_that_cannot_be_read_is_refused(name: str, value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(chat(), CHAT, {name: value})
    assert (caught.value.param or "").lower() == name


def test_the_longest_tag_is_taken() -> None:
    assert parse(chat(), CHAT, {"x-cache-tag": "x" * 64}).headers == {"x-cache-tag": "x" * 64}


def test_an_images_prompt_counts_as_text() -> None:
    assert parse({"model": "m", "prompt": "a llama", "n": 2}, "/v1/images/generations").prompt_chars == 7


# errors


def test_an_openai_error_has_the_contracts_fields() -> None:
    body = json.loads(SURFACES[CHAT].render_error(RateLimited(param="x"), "req_1"))
    assert body == {
        "error": {
            "code": "RATE_LIMITED",
            "message": "Rate limit exceeded.",
            "retryable": True,
            "type": "rate_limit_error",
            "param": "x",
        }
    }


def test_an_anthropic_error_has_its_own_shape_and_the_contracts_fields_too() -> None:
    body = json.loads(SURFACES["/v1/messages"].render_error(RateLimited(), "req_1"))
    assert body["type"] == "error"
    assert body["request_id"] == "req_1"
    assert body["error"]["type"] == "rate_limit_error"
    assert (body["error"]["code"], body["error"]["retryable"]) == ("RATE_LIMITED", True)


@pytest.mark.parametrize("path", SURFACES)
def test_a_stream_error_is_one_whole_event(path: str) -> None:
    event = SURFACES[path].render_stream_error(StreamTooLarge("line\nbreak"), "req_1")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n\n") == 1
    lines = event.decode().strip().split("\n")
    assert lines[-1].startswith("data: {")
    assert len(lines) == (1 if SURFACES[path].dialect is Dialect.OPENAI else 2)
    assert json.loads(lines[-1][6:])["error"]["message"] == "line\nbreak"
