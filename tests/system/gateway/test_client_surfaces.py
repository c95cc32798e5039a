"""Requests that are translated, renamed, sent elsewhere or kept alive on their way, from their bytes to their record."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from core.limits import GatewayLimits
from gateway.dialects import SURFACES
from gateway.routing import Alias, Target
from gateway.values import Priority
from nodes.links import EndKind
from tests.fakes.pipeline import CHAT, MESSAGES, REPLY, RESPONSES, SSE, STREAM, Make


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


async def test_a_count_of_ours_is_never_below_what_the_engine_counted(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=MESSAGES, max_tokens=50)
    await request.served(link, json.dumps(AT_LEAST).encode(), status=400)
    assert "3585 + 512 > 4096" in request.error["message"]


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


async def test_a_fallback_answers_when_the_queue_is_too_long_for_the_client(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": (), "spare": ()})
    link, spare = gateway.link(), gateway.link("spare")
    busy = gateway.ask()
    stream = await busy.on(link)
    gateway.dispatcher.note_held("m", 60.0)
    options = {"max_latency_ms": 500, "fallback_models": ["spare"], "priority": "high"}
    request = gateway.ask(x_pool_options=options)
    other = await request.on(spare)
    assert "x_pool_options" not in json.loads(other.request.body)
    assert other.request.priority == ""  # a client cannot raise what its key has
    other.answer(REPLY)
    await request.done()
    meta = json.loads(request.client.body)["x_pool_meta"]
    assert (meta["node"], meta["model"], meta["asked_model"], meta["attempts"]) == (spare.node_name, "spare", "m", 1)
    patient = gateway.ask(x_pool_options={"fallback_models": ["spare"], "max_latency_ms": 3_600_000})
    stream.answer(REPLY)
    await busy.done()
    await patient.served(link, REPLY)
    assert (await patient.record("model"))[0] == "m"
    assert b"x_pool_meta" not in busy.client.body


@pytest.mark.parametrize(
    ("options", "unmatched"),
    [
        ({"prefer_gpu": "node", "fallback_models": ["spare"]}, None),
        ({"prefer_gpu": "x", "fallback_models": ["spare", "y", "auto"]}, {"prefer_gpu": "x", "fallback_models": ["y"]}),
    ],
)
async def test_a_client_is_told_what_it_named_that_is_nothing_here(
    make_gateway: Make, options: dict[str, object], unmatched: dict[str, object] | None
) -> None:
    gateway = make_gateway(models={"m": (), "spare": ()})
    link = gateway.link()
    if unmatched is None:
        options = {**options, "prefer_gpu": link.node_name}
    request = gateway.ask(x_pool_options=options)
    await request.served(link, REPLY)
    assert json.loads(request.client.body)["x_pool_meta"]["unmatched"] == unmatched


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
    link = gateway.link(paths={CHAT, "/v1/responses"})
    request = gateway.ask(surface=COMPACT, input="A long talk", x_pool_options={})
    stream = await request.on(link)
    assert stream.request.path == CHAT
    stream.answer(REPLY)
    await request.done()
    said = json.loads(request.client.body)
    assert (request.client.status, said["object"], said["output"][-1]["type"]) == (200, "response.compaction", "compaction")
    assert said["x_pool_meta"]["model"] == "m"
    assert await request.record("state", "endpoint", "prompt_tokens") == ("completed", "/v1/responses/compact", 3)
    after = gateway.ask(surface=SURFACES["/v1/responses"], input=[*said["output"], {"role": "user", "content": "Go on"}])
    stream = await after.on(link)
    assert (stream.request.path, b"Summary of the conversation" in stream.request.body) == (CHAT, True)
    stream.answer(REPLY)
    await after.done()


async def test_a_model_that_cannot_chat_cannot_compact_either_and_says_so(make_gateway: Make) -> None:
    gateway = make_gateway()
    gateway.link(paths={"/v1/embeddings"})
    request = gateway.ask(surface=COMPACT, input="A long talk")
    await request.done()
    assert (request.client.status, request.error["type"], request.error["code"]) == (404, "not_found_error", "NOT_FOUND")
    assert "/v1/responses/compact" in request.error["message"]
    assert "/v1/chat/completions" in request.error["message"]


SLOPPY = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}\n\n'
ENDED = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("options", [None, {}], ids=["plain", "with the pool's numbers"])
@pytest.mark.parametrize("tidy", [True, False])
async def test_chunks_of_a_model_that_is_to_be_tidied_are_put_right_whatever_node_they_come_from(
    make_gateway: Make, options: dict[str, object] | None, *, tidy: bool
) -> None:
    gateway = make_gateway(tidy=tidy)
    link = gateway.link()
    more: dict[str, Any] = {} if options is None else {"x_pool_options": options}
    request = gateway.ask(stream=True, **more)
    await request.served(link, SLOPPY[:30], SLOPPY[30:], ENDED, headers={"content-type": "text/event-stream"})
    body = request.client.body
    assert ((SLOPPY in body), b'"role":"assistant"' in body) == (not tidy, tidy)
    assert (b"x_pool_meta" in body) is (options is not None)
    assert body.endswith(b"data: [DONE]\n\n")
