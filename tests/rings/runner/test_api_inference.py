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


async def test_a_picture_for_a_model_that_cannot_see_is_a_bad_request_that_nobody_should_repeat(tmp_path: Path) -> None:
    words = "image input is not supported - hint: if this is unexpected, you may need to provide the mmproj"

    async def fail(_request: web.Request, _body: bytes) -> web.StreamResponse:
        return web.json_response({"error": {"message": words, "code": 500, "type": "server_error"}}, status=500)

    async with run_engine() as engine, serve(tmp_path, engine) as (_, client):
        engine.handler = fail
        for path in (CHAT, "/v1/messages", "/v1/responses"):
            for streams in (False, True):
                answer = await client.post(path, json={**BODY, "stream": streams})
                error = answer.json()["error"]
                assert answer.status_code == 400
                assert (error["type"], error["code"], error["retryable"]) == (
                    "invalid_request_error", "modality_unsupported", False,
                )  # fmt: skip
                assert error["message"] == words


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
        assert "avgWaitMs" in error
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-queue-wait-ms"] == "0"
        health = await client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unhealthy")
        assert health.json()["reasons"] == ["the queue is saturated: 1 of 1 requests wait"]
        assert (await client.get("/v1/capabilities")).json()["health"] == "unhealthy"
        gate.open.set()
        first, second = await asyncio.gather(*held)
        assert (first.status_code, second.status_code) == (200, 200)
        assert int(second.headers["x-queue-wait-ms"]) > 0
        assert (second.headers["x-cache-hit"], second.headers["x-cache-tokens-reused"]) == ("true", "3")
        tenant = {"X-Tenant-ID": "meagre"}
        answers = [await client.post(CHAT, json=BODY, headers=tenant) for _ in range(3)]
        limited = answers[-1].json()["error"]
        assert [answer.status_code for answer in answers] == [200, 200, 429]
        assert (limited["code"], limited["limit"], limited["remaining"]) == ("rate_limit_exceeded", 2, 0)
        assert limited["message"] == "Tenant meagre exceeded 2 req/min"
        assert 0 < limited["resetAt"] - time.time() < 62
        assert 0 < int(answers[-1].headers["retry-after"]) <= 60
        metrics = (await client.get("/metrics")).text
        assert 'muster_runner_refusals_total{code="queue_full"} 1.0' in metrics
        assert 'vllm_requests_total{model="alpha",status="refused",tenant="meagre"} 1.0' in metrics


async def test_high_priority_overtakes_those_that_wait(tmp_path: Path) -> None:
    async with run_engine() as engine, serve(tmp_path, engine, "--max-concurrent", "1") as (_, client):
        gate = Gate()
        engine.handler = gate.answer

        async def ask(user: str, priority: str, tenant: str) -> httpx.Response:
            headers = {"X-Priority": priority, "X-Tenant-ID": tenant}
            return await client.post(CHAT, json={**BODY, "user": user}, headers=headers)

        held = [asyncio.create_task(ask("first", "normal", "t1"))]
        await eventually(lambda: gate.order, "the engine has the first")
        for number, priority in enumerate(("low", "normal", "high"), start=1):
            held.append(asyncio.create_task(ask(priority, priority, f"other{number}")))
            await depth_is(client, number)
        gate.open.set()
        assert [reply.status_code for reply in await asyncio.gather(*held)] == [200] * 4
        assert gate.order == ["first", "high", "normal", "low"]


async def test_a_client_that_leaves_frees_the_engine_also_while_it_waits(tmp_path: Path) -> None:
    async with run_engine() as engine, serve(tmp_path, engine, "--max-concurrent", "1") as (_, client):

        async def stream(request: web.Request, _body: bytes) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(EVENT)
            await asyncio.Event().wait()
            return response

        engine.handler = stream
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as reply:
            chunks = reply.aiter_raw()
            assert await anext(chunks) == EVENT
            waiting = asyncio.create_task(client.post(CHAT, json=BODY))
            await depth_is(client, 1)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            await depth_is(client, 0)
            assert not engine.gone.is_set()
        await asyncio.wait_for(engine.gone.wait(), DEADLINE_S)
        engine.handler = Gate().answer

        async def both_are_counted() -> bool:
            return 'status="cancelled",tenant="anonymous"} 2.0' in (await client.get("/metrics")).text

        await eventually(both_are_counted)
        silent = asyncio.create_task(client.post(CHAT, json=BODY))  # before a byte of the answer
        engine.gone.clear()
        await eventually(lambda: len(engine.seen) == 2, "the engine has the next")
        silent.cancel()
        await asyncio.wait_for(engine.gone.wait(), DEADLINE_S)


@pytest.mark.parametrize(
    ("path", "start"),
    [(CHAT, "data: {"), ("/v1/messages", "event: error\ndata: {"), ("/v1/responses", "event: response.failed\ndata: {")],
)
async def test_an_engine_that_breaks_off_ends_the_stream_with_one_error_and_without_done(
    tmp_path: Path, path: str, start: str
) -> None:
    async with run_engine() as engine, serve(tmp_path, engine) as (_, client):

        async def break_off(request: web.Request, _body: bytes) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(EVENT)
            assert request.transport is not None
            request.transport.abort()
            return response

        engine.handler = break_off
        reply = await client.post(path, json={**BODY, "stream": True, "input": [{"role": "user", "content": "x"}]})
        *_, last, empty = reply.text.split("\n\n")
        assert (reply.status_code, empty) == (200, "")
        assert last.startswith(start)
        error = json.loads(last.partition("data: ")[2])
        assert "broke off" in str(error)
        assert "[DONE]" not in reply.text
        assert reply.text.count("broke off") == 1


async def test_audio_reaches_the_engine_byte_for_byte_with_the_model_of_its_form(tmp_path: Path) -> None:
    async with run_engine() as engine, serve(tmp_path, engine) as (_, client):
        sound = bytes(range(256)) * 4000
        form = {"model": "alpha", "language": "en"}
        reply = await client.post("/v1/audio/transcriptions", data=form, files={"file": ("a.wav", sound)})
        assert reply.status_code == 200
        path, headers, body = engine.seen[0]
        assert path == "/v1/audio/transcriptions"
        assert headers["content-type"].startswith("multipart/form-data; boundary=")
        assert sound in body
        missing = await client.post("/v1/audio/transcriptions", data={"language": "en"}, files={"file": ("a.wav", sound)})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")
        plain = await client.post("/v1/audio/transcriptions", json=BODY)
        assert plain.status_code == 415
        assert len(engine.seen) == 1


async def test_keys_and_cookies_of_the_client_stay_on_the_box(tmp_path: Path) -> None:
    key = "the-key-of-this-box"
    async with run_engine() as engine, serve(tmp_path, engine, "--api-key", key) as (_, client):
        headers = {"Authorization": f"Bearer {key}", "Cookie": "a=b", "X-Request-ID": "r-1"}
        reply = await client.post(f"{CHAT}?dim=3", json=BODY, headers=headers)
        assert reply.status_code == 200
        path, seen, _ = engine.seen[0]
        assert (path, seen["x-request-id"]) == (f"{CHAT}?dim=3", "r-1")
        assert not {"authorization", "cookie", "x-api-key"} & set(seen)


async def test_a_box_in_a_hurry_tells_streams_that_it_goes(tmp_path: Path) -> None:
    async with run_engine() as engine, serve(tmp_path, engine) as (box, client):

        async def stream(request: web.Request, _body: bytes) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(EVENT)
            await asyncio.Event().wait()
            return response

        engine.handler = stream
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as reply:
            chunks = reply.aiter_raw()
            assert await anext(chunks) == EVENT
            box.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "stopping: " in box.log_text(), "the box leaves")
            box.process.send_signal(signal.SIGTERM)
            rest = b"".join([chunk async for chunk in chunks])
        assert json.loads(rest.removeprefix(b"data: "))["error"]["code"] == "unavailable"
        assert await asyncio.to_thread(box.process.wait, DEADLINE_S) == 0
        assert "Traceback" not in box.log_text()
