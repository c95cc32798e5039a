"""The part of a trace that a node makes: its own span, the wait for a turn, and the engine's work, which goes on from there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from runner.engines.port import CHAT
from runner.errors import RequestRefused
from runner.parts import Parts
from runner.serving.request import Inference
from tests.fakes.engines.scripted_server import ScriptedEngine, drop, run_engine
from tests.fakes.runners.parts import assembled
from tests.fakes.traces import Remembered, name_context, parent_of, told
from tests.fakes.waiting import eventually

GATEWAYS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "the secret of the prompt"
ANSWER = {
    "choices": [{"message": {"content": SECRET}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 5, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 4}},
}  # fmt: skip


@pytest.fixture
async def engine() -> AsyncIterator[ScriptedEngine]:
    async with run_engine() as made:
        yield made


@pytest.fixture
async def parts(tmp_path: Path, engine: ScriptedEngine) -> AsyncIterator[Parts]:
    """A node in front of the engine, one request at a time."""
    async with assembled(tmp_path, "--backend", engine.url, "--max-concurrent", "1") as made:
        await eventually(lambda: made.pool.registry.ready_ids() == ["alpha", "beta"], "the server's models are known")
        yield made


def ask(**headers: str) -> Inference:
    body = b'{"model":"alpha","messages":[{"role":"user","content":"%b"}]}' % SECRET.encode()
    sent = {"content-type": "application/json", **headers}
    return Inference("POST", CHAT, sent, body, "alpha", "t1", on_socket=True, request_id="req_1")


async def serve(parts: Parts, request: Inference) -> None:
    async with parts.serving.open(request):
        pass


async def test_a_traced_request_is_a_wait_and_a_call_of_the_engine_which_goes_on_with_the_trace(
    parts: Parts, engine: ScriptedEngine
) -> None:
    seen, asked, may_answer = Remembered(), list[str | None](), asyncio.Event()
    parts.serving.traces = seen.traces

    async def answer(request: web.Request, _body: bytes) -> web.StreamResponse:
        asked.append(request.headers.get("traceparent"))
        await may_answer.wait()
        return web.json_response(ANSWER)

    engine.handler = answer
    ahead = asyncio.create_task(serve(parts, ask()))  # of a gateway that does not keep its trace
    await eventually(lambda: asked)
    traced = asyncio.create_task(serve(parts, ask(traceparent=GATEWAYS)))
    await eventually(lambda: parts.budget.depth)
    may_answer.set()
    await asyncio.gather(ahead, traced)

    wait, call, node = seen.spans
    assert asked[0] is None
    assert asked[1] is not None
    assert asked[1].startswith(name_context(call))
    assert node.context is not None
    assert (parent_of(wait), parent_of(call), parent_of(node)) == (*[node.context.span_id] * 2, 0xB7AD6B7169203331)
    names = ("gen_ai.operation.name", "gen_ai.response.finish_reasons", "gen_ai.usage.input_tokens")
    assert told(call, *names, "gen_ai.usage.cache_read.input_tokens") == ("chat", ("stop",), 5, 4)
    assert told(node, "muster.request.id", "muster.tenant", "muster.outcome") == ("req_1", "t1", "success")
    assert "secret" not in "\n".join(span.to_json() for span in seen.spans)


async def test_an_engine_that_breaks_off_is_the_error_of_its_span_and_the_nodes(parts: Parts, engine: ScriptedEngine) -> None:
    seen = Remembered()
    parts.serving.traces = seen.traces

    async def break_off(request: web.Request, _body: bytes) -> web.StreamResponse:
        return drop(request)

    engine.handler = break_off
    own = replace(ask(), on_socket=False)  # on its own port the node begins a trace
    with pytest.raises(RequestRefused) as raised:
        await serve(parts, own)
    call, node = seen.spans
    assert told(call, "error.type") == told(node, "error.type") == (raised.value.code,)
    assert node.parent is None
