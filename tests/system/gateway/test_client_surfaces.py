"""Requests that are translated, renamed or sent elsewhere, from their bytes to their record; and whose fault their end is."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from prometheus_client import REGISTRY

from core.limits import GatewayLimits
from gateway.dialects.surface import SURFACES, Surface
from gateway.routing import Alias, Target
from gateway.values import Priority, RequestOutcome, judge_outcome
from nodes.links import EndKind
from tests.fakes.pipeline import CHAT, MESSAGES, REPLY, RESPONSES, SSE, STREAM, Make
from wire.contract import RequestState


def read_events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(data) for data in re.findall(rb"^data: (\{.*)$", body, re.MULTILINE)]


AT_LEAST = {"error": {"message": (
    "This model's maximum context length is 4096 tokens. However, you requested 512 output tokens and your prompt contains at"
    " least 3585 input tokens, for a total of at least 4097 tokens."
), "type": "BadRequestError", "code": 400}}  # fmt: skip


@pytest.mark.parametrize("paths", [{CHAT}, {CHAT, "/v1/messages"}], ids=["translated", "native"])
@pytest.mark.parametrize("begun", [False, True], ids=["at once", "after signs of life"])
async def test_a_prompt_of_which_the_engine_says_only_that_it_is_too_long_is_counted(
    make_gateway: Make, *, paths: set[str], begun: bool
) -> None:
    gateway = make_gateway(limits=GatewayLimits(stream_ping_s=0.01 if begun else 30.0), max_prompt_chars=50_000)
    link = gateway.link(paths=paths)
    results = [{"type": "tool_result", "tool_use_id": "t", "content": "word " * 8000}]
    calls = [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    request = gateway.ask(surface=MESSAGES, max_tokens=50, stream=True, messages=turns)
    stream = await request.on(link)
    if begun:
        await request.client.wait(lambda: b": ping" in request.client.body)
    stream.answer(json.dumps(AT_LEAST).encode(), status=400)
    await request.done()
    said = request.client.body.rpartition(b"data: ")[2] if begun else request.client.body
    message = json.loads(said)["error"]["message"]
    assert message.startswith("prompt is too long: 10")
    assert message.endswith(" tokens > 4096 maximum")
    assert len(message) == len("prompt is too long: 10025 tokens > 4096 maximum")
    assert begun or (request.client.status, request.client.headers["x-muster-model"]) == (400, "m")
    assert request.client.is_whole
    assert await request.record("state", "error_code", "status_code") == ("rejected", "context_length_exceeded", 400)


async def test_an_alias_is_answered_by_its_target_at_a_lower_priority_and_the_record_has_both_names(make_gateway: Make) -> None:
    models, alias = {"m": (), "big": ()}, Alias("gpt-4o-mini", (Target("big"),))
    gateway = make_gateway(models=models, aliases=(alias,), priority=Priority.HIGH)
    link = gateway.link("big")
    request = gateway.ask(model="gpt-4o-mini", x_pool_options={"priority": "low"})
    stream = await request.on(link)
    assert (stream.request.model, json.loads(stream.request.body)["model"]) == ("big", "big")
    assert stream.request.priority == "low"
    stream.answer(REPLY)
    await request.done()
    assert request.client.headers["x-muster-model"] == "big"
    assert await request.record("model", "asked_model", "state") == ("big", "gpt-4o-mini", "completed")


async def test_a_fallback_answers_when_the_queue_is_too_long_for_the_client_who_is_told_what_it_named_in_vain(
    make_gateway: Make,
) -> None:
    gateway = make_gateway(models={"m": (), "spare": ()})
    link, spare = gateway.link(), gateway.link("spare")
    busy = gateway.ask()
    stream = await busy.on(link)
    gateway.dispatcher.note_held("m", 60.0)
    options = {"max_latency_ms": 500, "fallback_models": ["spare", "y", "auto"], "priority": "high", "prefer_gpu": "x"}
    request = gateway.ask(x_pool_options=options)
    other = await request.on(spare)
    assert "x_pool_options" not in json.loads(other.request.body)
    assert other.request.priority == ""  # a client cannot raise what its key has
    other.answer(REPLY)
    await request.done()
    meta = json.loads(request.client.body)["x_pool_meta"]
    assert (meta["node"], meta["model"], meta["asked_model"], meta["attempts"]) == (spare.node_name, "spare", "m", 1)
    assert meta["unmatched"] == {"prefer_gpu": "x", "fallback_models": ["y"]}
    named = {"fallback_models": ["spare"], "max_latency_ms": 3_600_000, "prefer_gpu": link.node_name}
    patient = gateway.ask(x_pool_options=named)
    stream.answer(REPLY)
    await busy.done()
    await patient.served(link, REPLY)
    assert (json.loads(patient.client.body)["x_pool_meta"]["unmatched"], await patient.record("model")) == (None, ("m",))
    assert b"x_pool_meta" not in busy.client.body


async def test_a_fallback_that_came_free_takes_over_when_the_wait_is_over(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()}, limits=GatewayLimits(queue_s=0.05, no_node_wait_s=0.02))
    link, spare = gateway.link(), gateway.link("spare")
    first, second = gateway.ask(), gateway.ask(model="spare")
    one, two = await first.on(link), await second.on(spare)
    waiting = gateway.ask()
    await waiting.client.wait(lambda: gateway.dispatcher.depth == 1)
    two.answer(REPLY)
    await second.done()
    await waiting.served(spare, REPLY)
    assert await waiting.record("model", "state") == ("spare", "completed")
    one.answer(REPLY)
    await first.done()


QUICK = GatewayLimits(stream_ping_s=0.01, no_node_wait_s=29.0)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"], ids=["translated", "native"])
async def test_no_ping_event_precedes_the_beginning_of_a_message(make_gateway: Make, path: str) -> None:
    gateway = make_gateway(limits=QUICK)
    link = gateway.link(paths={path})
    request = gateway.ask(surface=MESSAGES, stream=True, max_tokens=5)
    stream = await request.on(link)
    stream.answer(b": still reading\n\n", headers=SSE, ends=False)
    await request.client.wait(lambda: request.client.body.count(b"ping") >= 2)
    assert b"event:" not in request.client.body
    begun = b'event: message_start\ndata: {"type":"message_start"}\n\n' if path == "/v1/messages" else STREAM[0]
    stream.sink.on_data(begun)
    await request.client.wait(lambda: b"event: ping" in request.client.body)
    assert request.client.body.index(b"event: message_start") < request.client.body.index(b"event: ping")
    stream.end(EndKind.ENGINE_FAILED)
    await request.done()


@pytest.mark.parametrize(
    ("surface", "tools"),
    [
        (MESSAGES, [{"type": "web_search_20250305", "name": "web_search"}]),
        (
            RESPONSES,
            [{"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}],
        ),
    ],
    ids=["messages", "responses"],
)
async def test_tools_that_an_engine_refuses_as_they_are_do_not_cost_the_request(
    make_gateway: Make, surface: Any, tools: list[dict[str, object]]
) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, surface.path})
    request = gateway.ask(surface=surface, max_tokens=5, input="hi", tools=tools)
    stream = await request.on(link)
    assert stream.request.path == surface.path
    stream.answer(b'{"error":{"message":"1 validation error: tools"}}', status=400)
    stream = await request.on(link)
    assert stream.request.path == CHAT
    stream.answer(REPLY)
    await request.done()
    assert request.client.status == 200
    assert await request.record("state", "attempts") == ("completed", 2)


COMPACT = SURFACES["/v1/responses/compact"]


async def test_a_compaction_is_a_request_like_any_other(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, "/v1/responses", "/v1/pool/responses"})
    request = gateway.ask(surface=COMPACT, input="A long talk", x_pool_options={})
    stream = await request.on(link)
    assert stream.request.path == CHAT
    stream.answer(REPLY)
    await request.done()
    said = json.loads(request.client.body)
    assert (request.client.status, said["object"], said["output"][-1]["type"]) == (200, "response.compaction", "compaction")
    assert said["x_pool_meta"]["model"] == "m"
    assert await request.record("state", "endpoint", "prompt_tokens") == ("completed", "/v1/responses/compact", 3)
    later: list[dict[str, object]] = [{}, {"decoding": {}}]  # the second: runners answer it on a path of their own
    for fields in later:
        going_on = [*said["output"], {"role": "user", "content": "Go on"}]
        after = gateway.ask(surface=SURFACES["/v1/responses"], input=going_on, **fields)
        stream = await after.on(link)
        assert (stream.request.path, b"Summary of the conversation" in stream.request.body) == (CHAT, True)
        stream.answer(REPLY)
        await after.done()


HINT = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"
TOO_LONG = "This model's maximum context length is 4096 tokens. However, you requested 5120 tokens in the messages."


def fail(message: str, code: object = None) -> bytes:
    return json.dumps({"error": {"message": message, "type": "t", "code": code}}).encode()


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
    def count() -> tuple[float, float]:
        outcomes = REGISTRY.get_sample_value("muster_request_outcomes_total", {"outcome": outcome})
        return outcomes or 0.0, REGISTRY.get_sample_value("muster_request_errors_total", {"code": code}) or 0.0

    is_failed = code == "FORWARDED_REQUEST_FAILED"
    gateway, outcome = make_gateway(), "failed" if is_failed else "refused"
    before = count()
    request = gateway.ask(stream=status % 2 == 0)
    await request.served(gateway.link(), body, status=status)
    assert request.client.status == said
    assert await request.record("state", "status_code", "error_code") == ("failed" if is_failed else "rejected", said, code)
    assert count() == (before[0] + 1, before[1] + is_failed)


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


OUTCOMES: dict[RequestOutcome | None, tuple[tuple[str, int | None], ...]] = {
    None: (("queued", None), ("assigned", None), ("running", None)),
    RequestOutcome.SERVED: (("completed", 200),),
    RequestOutcome.FAILED: (("failed", 500), ("failed", 401), ("interrupted", 503), ("rejected", 503), ("rejected", None)),
    RequestOutcome.CANCELLED: (("cancelled", 499),),
    RequestOutcome.REFUSED: (("rejected", 400), ("rejected", 404), ("rejected", 429)),
}


def test_a_state_and_a_status_say_what_became_of_a_request() -> None:
    for outcome, ends in OUTCOMES.items():
        for state, status in ends:
            assert judge_outcome(RequestState(state), status) is outcome, (state, status)


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


SOMEWHERE = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = {"format": {"type": "json_schema", "schema": SCHEMA}}


def asked(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [HELLO, CALL, ask_about(*blocks)]}


@pytest.mark.parametrize(
    ("engine", "fields", "path", "said"),
    [
        ("llamacpp", asked(DOCUMENT), CHAT, b'"file_data"'),
        ("llama-server", asked(PLAIN), CHAT, b"A text"),
        ("llamacpp", asked(NESTED), CHAT, b'"file_data"'),
        ("llamacpp", asked(FOUND), CHAT, b"A text"),
        ("llamacpp", asked(PICTURE, {"type": "text", "text": 'a "document"'}), "/v1/messages", b'"image"'),
        ("vllm", asked(DOCUMENT), "/v1/messages", b'"document"'),
        ("", asked(DOCUMENT), "/v1/messages", b'"document"'),
        ("llamacpp", {"output_config": FORMAT}, CHAT, b'"response_format":{"type":"json_schema"'),
        ("vllm", {"output_config": FORMAT}, CHAT, b'"response_format":{"type":"json_schema"'),
        ("llamacpp", {"thinking": {"type": "disabled"}}, CHAT, b'"enable_thinking":false'),
        ("llamacpp", {"seed": 7}, CHAT, b'"seed":7'),
        ("llamacpp", {"metadata": {"user_id": "u"}, "top_k": 3}, "/v1/messages", b'"top_k"'),
        ("vllm", {"output_config": {"effort": "low"}}, "/v1/messages", b'"effort"'),
        ("", {"output_config": FORMAT}, "/v1/messages", b'"output_config"'),
        ("llamacpp", asked(SOMEWHERE), "", b""),
    ],
    ids=range(15),
)
async def test_what_an_engines_own_messages_would_leave_out_is_said_in_chat_or_refused(
    make_gateway: Make, engine: str, fields: dict[str, Any], path: str, said: bytes
) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT, "/v1/messages"})
    link.engines = {"m": frozenset({engine})} if engine else {}
    request = gateway.ask(surface=MESSAGES, **{"max_tokens": 5, "messages": [HELLO], **fields})
    if path:
        stream = await request.on(link)
        assert (stream.request.path, said in stream.request.body) == (path, True)
        stream.answer(fail(LLAMA_WORDS, 400), status=400)
    await request.done()
    assert (request.client.status, link.streams) == (400, [])
    assert path or request.error["param"] == "messages[2].content[1].source.type", "no words say it"


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
    gateway = make_gateway()
    request = gateway.ask(surface=surface, max_tokens=5, **fields)
    await request.served(gateway.link(paths={CHAT}), fail(words, 400), status=400)
    said = f"The {kind} in '{place}' cannot be given to this model. Its engine says: {words}"
    assert (request.client.status, request.error["param"], request.error["message"]) == (400, place, said)


async def test_a_model_that_cannot_chat_cannot_compact_either_and_says_so(make_gateway: Make) -> None:
    gateway = make_gateway()
    gateway.link(paths={"/v1/embeddings"})
    request = gateway.ask(surface=COMPACT, input="A long talk")
    await request.done()
    assert (request.client.status, request.error["type"], request.error["code"]) == (404, "not_found_error", "NOT_FOUND")
    assert "/v1/responses/compact" in request.error["message"]
    assert "/v1/chat/completions" in request.error["message"]
