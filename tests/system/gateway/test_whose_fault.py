"""Whose fault the end of a request is, and what of the engine's words is kept."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from prometheus_client import REGISTRY

from gateway.dialects import SURFACES, Surface
from gateway.values import RequestOutcome, judge_outcome
from tests.fakes.pipeline import CHAT, MESSAGES, RESPONSES, Make
from wire.contract import RequestState

HINT = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
TOO_LONG = "This model's maximum context length is 4096 tokens. However, you requested 5120 tokens in the messages."


def fail(message: str, code: object = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "code": code}}).encode()


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.mark.parametrize(
    ("status", "body", "said", "code"),
    [
        (400, fail("temperature must be at least 0"), 400, "BAD_REQUEST"),
        (400, fail(TOO_LONG), 400, "context_length_exceeded"),
        (413, fail("too large"), 413, "BAD_REQUEST"),
        (403, fail("say so", "remote_not_allowed"), 403, "BAD_REQUEST"),
        (500, fail(HINT, 500), 400, "BAD_REQUEST"),
        (401, fail("wrong key"), 401, "FORWARDED_REQUEST_FAILED"),
        (404, fail("no such model"), 404, "FORWARDED_REQUEST_FAILED"),
        (429, fail("busy"), 429, "FORWARDED_REQUEST_FAILED"),
        (500, fail("out of memory"), 500, "FORWARDED_REQUEST_FAILED"),
    ],
)
async def test_what_the_caller_did_wrong_is_refused_and_everything_else_failed(
    make_gateway: Make, status: int, body: bytes, said: int, code: str
) -> None:
    is_failed = code == "FORWARDED_REQUEST_FAILED"
    gateway, outcome = make_gateway(), "failed" if is_failed else "refused"
    before = count("muster_request_outcomes_total", outcome=outcome), count("muster_request_errors_total", code=code)
    request = gateway.ask(stream=status % 2 == 0)
    await request.served(gateway.link(), body, status=status)
    assert request.client.status == said
    assert await request.record("state", "status_code", "error_code") == ("failed" if is_failed else "rejected", said, code)
    after = count("muster_request_outcomes_total", outcome=outcome), count("muster_request_errors_total", code=code)
    assert after == (before[0] + 1, before[1] + is_failed)


@pytest.mark.parametrize("paths", [None, {CHAT}], ids=["as it is", "translated"])
@pytest.mark.parametrize("surface", [SURFACES[CHAT], MESSAGES, RESPONSES], ids=["chat", "messages", "responses"])
async def test_a_picture_for_a_model_that_cannot_see_is_a_bad_request_in_each_dialect(
    make_gateway: Make, surface: Surface, paths: set[str] | None
) -> None:
    gateway = make_gateway()
    link = gateway.link(paths=paths)
    fields: dict[str, Any] = {"input": "hi"} if surface is RESPONSES else {"max_tokens": 5}
    request = gateway.ask(surface=surface, **fields)
    await request.served(link, fail(HINT, 500), status=500)
    assert request.client.status == 400
    said = request.error
    assert (said["type"], said["retryable"], said["code"]) == ("invalid_request_error", False, "BAD_REQUEST")
    assert HINT in said["message"]
    assert await request.record("state", "status_code", "engine_error") == ("rejected", 400, HINT)


async def test_the_words_of_an_engine_are_kept_and_logged_without_those_of_the_prompt(
    make_gateway: Make, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = "the merger with Initech closes on the first of March"
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(messages=[{"role": "user", "content": prompt}])
    with caplog.at_level(logging.WARNING, logger="muster.gateway"):
        await request.served(link, fail(f"No template takes this: {prompt}"), status=500)
    assert await request.record("engine_error") == ("No template takes this:…",)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert request.client.headers["x-request-id"] in line
    assert "status=500" in line
    assert "No template takes this:" in line
    assert prompt not in caplog.text


@pytest.mark.parametrize("surface", [SURFACES[CHAT], MESSAGES], ids=["as it is", "translated"])
async def test_an_error_inside_a_stream_is_kept_too(make_gateway: Make, surface: Surface) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=surface, max_tokens=5, stream=True)
    oom = b'data: {"error":{"message":"CUDA out of memory","code":500}}\n\n'
    await request.served(link, oom, headers={"content-type": "text/event-stream"})
    assert await request.record("state", "engine_error") == ("failed", "CUDA out of memory")


@pytest.mark.parametrize(
    ("state", "status", "outcome"),
    [
        *((state, None, None) for state in ("queued", "assigned", "running")),
        ("completed", 200, RequestOutcome.SERVED),
        ("failed", 500, RequestOutcome.FAILED),
        ("failed", 401, RequestOutcome.FAILED),
        ("interrupted", 503, RequestOutcome.FAILED),
        ("cancelled", 499, RequestOutcome.CANCELLED),
        ("rejected", 400, RequestOutcome.REFUSED),
        ("rejected", 404, RequestOutcome.REFUSED),
        ("rejected", 429, RequestOutcome.REFUSED),
        ("rejected", 503, RequestOutcome.FAILED),
        ("rejected", None, RequestOutcome.FAILED),
    ],
)
def test_a_state_and_a_status_say_what_became_of_a_request(
    state: str, status: int | None, outcome: RequestOutcome | None
) -> None:
    assert judge_outcome(RequestState(state), status) is outcome


PDF = "JVBERi0xLjQ="
HELLO = {"role": "user", "content": "Hello"}
DOCUMENT = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": PDF}}
PLAIN = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A text"}}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PDF}}
FILE = {"type": "input_file", "filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
LLAMA_WORDS = "unsupported content[].type"
VLLM_WORDS = (
    "Unsupported chat content part type: 'file'. Supported types: audio_url, image_url, text. (parameter=type, value=file)"
)
TABBY_WORDS = "Input should be 'text' or 'image_url' in messages.1.content.2.type"


def ask_about(*blocks: dict[str, Any]) -> dict[str, Any]:
    """Return the second turn of a conversation."""
    return {"role": "user", "content": [{"type": "text", "text": "What is this?"}, *blocks]}


FOUND = {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "A text"}]}
NESTED = {"type": "tool_result", "tool_use_id": "t", "content": [DOCUMENT]}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}


@pytest.mark.parametrize(
    ("engine", "blocks", "path"),
    [
        ("llamacpp", [DOCUMENT], CHAT),
        ("llama-server", [PLAIN], CHAT),
        ("llamacpp", [NESTED], CHAT),
        ("llamacpp", [FOUND], CHAT),
        ("llamacpp", [PICTURE, {"type": "text", "text": 'a "document"'}], "/v1/messages"),
        ("vllm", [DOCUMENT], "/v1/messages"),
        ("", [DOCUMENT], "/v1/messages"),
    ],
    ids=range(7),
)
async def test_a_document_is_said_in_chat_to_an_engine_whose_messages_leave_it_out(
    make_gateway: Make, engine: str, blocks: list[dict[str, Any]], path: str
) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, "/v1/messages"})
    link.engines = {"m": frozenset({engine})} if engine else {}
    request = gateway.ask(surface=MESSAGES, max_tokens=5, messages=[HELLO, CALL, ask_about(*blocks)])
    stream = await request.on(link)
    assert stream.request.path == path
    if path == CHAT:
        assert (b'"file_data"' in stream.request.body) is (blocks in ([DOCUMENT], [NESTED]))
        assert (b"A text" in stream.request.body) is (blocks in ([PLAIN], [FOUND]))
    stream.answer(json.dumps({"error": {"message": LLAMA_WORDS, "code": 400}}).encode(), status=400)
    await request.done()
    assert request.client.status == 400


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("engine", "fields", "path", "said"),
    [
        ("llamacpp", {"output_config": FORMAT}, CHAT, b'"response_format":{"type":"json_schema"'),
        ("vllm", {"output_config": FORMAT}, CHAT, b'"response_format":{"type":"json_schema"'),
        ("llamacpp", {"thinking": {"type": "disabled"}}, CHAT, b'"enable_thinking":false'),
        ("llamacpp", {"seed": 7}, CHAT, b'"seed":7'),
        ("llamacpp", {"metadata": {"user_id": "u"}, "top_k": 3}, "/v1/messages", b'"top_k"'),
        ("vllm", {"output_config": {"effort": "low"}}, "/v1/messages", b'"effort"'),
        ("", {"output_config": FORMAT}, "/v1/messages", b'"output_config"'),
    ],
)
async def test_what_an_engines_own_messages_would_forget_is_said_in_chat(
    make_gateway: Make, engine: str, fields: dict[str, Any], path: str, said: bytes
) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, "/v1/messages"})
    link.engines = {"m": frozenset({engine})} if engine else {}
    request = gateway.ask(surface=MESSAGES, max_tokens=5, messages=[HELLO], **fields)
    stream = await request.on(link)
    assert stream.request.path == path
    assert said in stream.request.body
    stream.answer(b'{"error":{"message":"no"}}', status=400)
    await request.done()


async def test_a_document_that_can_be_said_in_no_words_is_refused_before_an_engine_leaves_it_out(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, "/v1/messages"})
    link.engines = {"m": frozenset({"llamacpp"})}
    somewhere = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
    request = gateway.ask(surface=MESSAGES, max_tokens=5, messages=[ask_about(somewhere)])
    await request.done()
    assert (request.client.status, request.error["param"]) == (400, "messages[0].content[1].source.type")
    assert link.streams == []


async def refuse(make: Make, surface: Surface, words: str, **fields: Any) -> dict[str, Any]:
    """Ask, have the engine refuse with these words, and return the error that the client gets."""
    gateway = make()
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=surface, max_tokens=5, **fields)
    stream = await request.on(link)
    stream.answer(json.dumps({"error": {"message": words, "type": "invalid_request_error", "code": 400}}).encode(), status=400)
    await request.done()
    assert request.client.status == 400
    error: dict[str, Any] = json.loads(request.client.body)["error"]
    return error


@pytest.mark.parametrize(
    ("words", "surface", "fields", "place", "kind"),
    [
        (LLAMA_WORDS, MESSAGES, {"messages": [HELLO, ask_about(PLAIN, DOCUMENT)]}, "messages[1].content[2]", "document"),
        (VLLM_WORDS, MESSAGES, {"messages": [HELLO, CALL, ask_about(NESTED)]}, "messages[2].content[1].content[0]", "document"),
        (TABBY_WORDS, RESPONSES, {"input": [HELLO, ask_about(FILE)]}, "input[1].content[1]", "file"),
    ],
    ids=["llama.cpp", "vLLM", "TabbyAPI"],
)
async def test_a_document_that_the_engine_cannot_read_is_named_by_its_field(
    make_gateway: Make, words: str, surface: Surface, fields: dict[str, Any], place: str, kind: str
) -> None:
    error = await refuse(make_gateway, surface, words, **fields)
    assert error["param"] == place
    assert error["message"] == f"The {kind} in '{place}' cannot be given to this model. Its engine says: {words}"
