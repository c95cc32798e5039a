"""Inference over the box's own port, in front of a server that does what a test says: queue, limits, leaving, breaking off."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from aiohttp import web

from tests.fakes.engines.scripted_server import ScriptedEngine, run_engine
from tests.fakes.runners.process import NO_KEEP_ALIVE, ApiBox, open_api_box
from tests.fakes.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.timeout(180)

CHAT = "/v1/chat/completions"
BODY: dict[str, object] = {"model": "alpha", "messages": []}
EVENT = b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'


class Gate:
    """An engine whose answers wait until the test opens it; ``order`` is who came."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.order: list[str] = []

    async def answer(self, _request: web.Request, body: bytes) -> web.StreamResponse:
        self.order.append(json.loads(body).get("user", ""))
        await self.open.wait()
        usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6, "prompt_tokens_details": {"cached_tokens": 3}}
        return web.json_response({"choices": [], "usage": usage})


@asynccontextmanager
async def serve(
    tmp_path: Path, engine: ScriptedEngine, *options: str, env: dict[str, str] | None = None
) -> AsyncIterator[tuple[ApiBox, httpx.AsyncClient]]:
    """Yield a box in front of ``engine`` whose models are ready, and a client of it."""
    async with (
        open_api_box(tmp_path, "--backend", engine.url, *options, env=env) as box,
        httpx.AsyncClient(base_url=box.url, timeout=DEADLINE_S, trust_env=False, limits=NO_KEEP_ALIVE) as client,
    ):

        async def is_ready() -> bool:
            # A box whose server does not list its models in time serves without them at first.
            return bool((await client.get("/health")).json()["modelsLoaded"] == len(engine.models))

        await eventually(is_ready)
        yield box, client


async def depth_is(client: httpx.AsyncClient, depth: int) -> None:
    """Return when so many requests wait."""

    async def is_reached() -> bool:
        return bool((await client.get("/health")).json()["queueDepth"] == depth)

    await eventually(is_reached, f"the queue has {depth}")


async def stream_for_ever(request: web.Request, _body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(EVENT)
    await asyncio.Event().wait()
    return response


async def test_a_client_that_leaves_frees_the_engine_also_while_it_waits(tmp_path: Path) -> None:
    async with run_engine() as engine, serve(tmp_path, engine, "--max-concurrent", "1") as (_, client):
        engine.handler = stream_for_ever
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as reply:
            assert await anext(reply.aiter_raw()) == EVENT
            waiting = asyncio.create_task(client.post(CHAT, json=BODY))
            await depth_is(client, 1)
            waiting.cancel()
            await depth_is(client, 0)
            assert not engine.gone.is_set()
        await asyncio.wait_for(engine.gone.wait(), DEADLINE_S)
        engine.handler = Gate().answer
        silent = asyncio.create_task(client.post(CHAT, json=BODY))  # before a byte of the answer
        engine.gone.clear()
        await eventually(lambda: len(engine.seen) == 2, "the engine has the next")
        silent.cancel()
        await asyncio.wait_for(engine.gone.wait(), DEADLINE_S)


async def test_audio_reaches_the_engine_byte_for_byte_and_keys_and_cookies_of_the_client_stay_here(tmp_path: Path) -> None:
    key, path = "the-key-of-this-node", "/v1/audio/transcriptions"
    async with run_engine() as engine, serve(tmp_path, engine, "--api-key", key) as (_, client):
        client.headers |= {"Authorization": f"Bearer {key}", "Cookie": "a=b", "X-Request-ID": "r-1"}
        sound = bytes(range(256)) * 4000
        reply = await client.post(path + "?dim=3", data={"model": "alpha"}, files={"file": ("a.wav", sound)})
        assert reply.status_code == 200
        ((asked, seen, body),) = engine.seen
        assert (asked, seen["x-request-id"], sound in body) == (path + "?dim=3", "r-1", True)
        assert seen["content-type"].startswith("multipart/form-data; boundary=")
        assert not {"authorization", "cookie", "x-api-key"} & set(seen)
        missing = await client.post(path, data={"language": "en"}, files={"file": ("a.wav", sound)})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
        assert (await client.post(path, json=BODY)).status_code == 415
        assert len(engine.seen) == 1


async def test_a_node_in_a_hurry_tells_streams_that_it_goes(tmp_path: Path) -> None:
    async with run_engine() as engine, serve(tmp_path, engine) as (box, client):
        engine.handler = stream_for_ever
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as reply:
            chunks = reply.aiter_raw()
            assert await anext(chunks) == EVENT
            box.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "stopping: " in box.log_text(), "it leaves")
            box.process.send_signal(signal.SIGTERM)
            rest = b"".join([chunk async for chunk in chunks])
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "unavailable"
        assert await asyncio.to_thread(box.process.wait, DEADLINE_S) == 0
        assert "Traceback" not in box.log_text()


async def test_a_full_queue_and_a_spent_rate_are_refused_in_the_words_of_the_specification(tmp_path: Path) -> None:
    env = {"MAX_QUEUE_DEPTH": "1", "TENANT_RATE_LIMIT_meagre": "2req/min"}
    async with run_engine() as engine, serve(tmp_path, engine, "--max-concurrent", "1", env=env) as (_, client):
        gate = Gate()
        engine.handler = gate.answer
        held = [asyncio.create_task(client.post(CHAT, json=BODY))]
        await eventually(lambda: gate.order, "the engine has the first")
        held.append(asyncio.create_task(client.post(CHAT, json=BODY)))
        await depth_is(client, 1)
        refused = await client.post(CHAT, json=BODY)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["queueDepth"]) == (503, "queue_full", 1)
        assert error["message"].startswith("Queue depth 1/1, retry in ")
        assert (int(refused.headers["retry-after"]) >= 1, refused.headers["x-queue-wait-ms"]) == (True, "0")
        health = await client.get("/health")
        assert (health.status_code, health.json()["reasons"]) == (503, ["the queue is saturated: 1 of 1 requests wait"])
        gate.open.set()
        first, second = await asyncio.gather(*held)
        assert (first.status_code, second.status_code, int(second.headers["x-queue-wait-ms"]) > 0) == (200, 200, True)
        answers = [await client.post(CHAT, json=BODY, headers={"X-Tenant-ID": "meagre"}) for _ in range(3)]
        limited = answers[-1].json()["error"]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert (limited["code"], limited["limit"], limited["remaining"]) == ("rate_limit_exceeded", 2, 0)
        assert 0 < limited["resetAt"] - time.time() < 62
        metrics = (await client.get("/metrics")).text
        assert 'muster_runner_refusals_total{code="queue_full"} 1.0' in metrics
        assert 'vllm_requests_total{model="alpha",status="refused",tenant="meagre"} 1.0' in metrics
