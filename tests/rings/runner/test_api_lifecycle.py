"""The model-runner API of the real program with the real llama.cpp: a model's whole life, and what is refused."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from tests.fakes.engines.scripted_server import ScriptedEngine, run_engine
from tests.fakes.runners.process import NO_KEEP_ALIVE, ApiBox, open_api_box, run_api_box
from tests.fakes.waiting import DEADLINE_S, eventually
from wire.optoken.verifier import Operation

pytestmark = pytest.mark.timeout(180)

LONG = "Explain the gateway and how it works in detail please. " * 8
SPEC_NUMBERS = {"x-cache-hit", "x-cache-tokens-reused", "x-queue-wait-ms", "x-gpu-time-ms"}


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiBox]:
    """One node for the tests of this file; each leaves nothing loaded that it did not ensure."""
    folder = tmp_path_factory.mktemp("api")
    with run_api_box(folder, models=("a", "b", "team/c")) as running:
        yield running


def chat(box: ApiBox, model: str, text: str = LONG, **more: Any) -> httpx.Response:
    headers = more.pop("headers", {})
    body = {"model": model, "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": text}], **more}
    return box.client.post("/v1/chat/completions", json=body, headers=headers)


def test_a_load_is_polled_until_it_is_completed_and_an_unload_gives_the_memory_back(box: ApiBox) -> None:
    box.ensure_unloaded("a")
    reply = box.load("a")
    task = reply.json()
    assert (reply.status_code, task["status"], task["progress"], task["modelId"]) == (202, "loading", 0.0, "a")
    assert box.load("a").json()["taskId"] == task["taskId"]
    done = box.finish_load(reply)
    assert (done["status"], done["modelId"]) == ("completed", "a")
    assert all(isinstance(done[name], int) and done[name] for name in ("gpuMemoryUsedMB", "predictedMemoryMB", "loadTimeMs"))
    again = box.load("a")
    assert (again.status_code, again.json()["alreadyLoaded"], again.json()["taskId"]) == (200, True, task["taskId"])
    listed = box.client.get("/v1/models").json()
    assert ("a" in listed["models"], listed["models"]) == (True, [entry["id"] for entry in listed["data"]])
    gone = box.unload("a").json()
    assert (gone["modelId"], gone["kvCacheFlushed"], gone["memoryAfterMB"]) == ("a", True, 0)
    assert gone["gpuMemoryFreedMB"] == gone["memoryBeforeMB"] > 0
    refused = chat(box, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_not_loaded")
    assert set(refused.headers) >= SPEC_NUMBERS
    assert box.unload("a").json()["wasLoaded"] is False


def test_a_chat_reply_has_the_headers_of_the_specification_from_real_numbers(box: ApiBox) -> None:
    box.ensure_loaded("a")
    assert box.flush("all").status_code == 200
    cold = chat(box, "a", headers={"X-Tenant-ID": "t1", "X-Request-ID": "call-1"})
    assert (cold.status_code, cold.headers["x-request-id"], set(cold.headers) >= SPEC_NUMBERS) == (200, "call-1", True)
    warm = chat(box, "a", headers={"X-Tenant-ID": "t1", "X-Cache-Mode": "prefix", "X-Priority": "high"})
    reused = int(warm.headers["x-cache-tokens-reused"])
    assert reused == warm.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
    other = chat(box, "a", headers={"X-Tenant-ID": "t2"})
    assert [reply.headers["x-cache-hit"] for reply in (cold, warm, other)] == ["false", "true", "false"]


def test_operations_without_a_good_token_are_refused_in_the_same_words(box: ApiBox) -> None:
    spent = box.token(Operation.MODEL_LOAD, "b")
    assert box.client.post("/v1/models/load", json={"modelId": "b", "verifiedOpToken": spent}).status_code in {200, 202}
    tokens: list[object] = [
        None, "", {}, "eyJ", spent, box.token(Operation.MODEL_UNLOAD, "b"), box.token(Operation.MODEL_LOAD, "a"),
        box.token(Operation.MODEL_LOAD, "b", signers=("ann", "ann")),
        {**box.token(Operation.MODEL_LOAD, "b"), "signature": "0" * 64},
    ]  # fmt: skip
    refusals = [box.client.post("/v1/models/load", json={"modelId": "b", "verifiedOpToken": token}) for token in tokens]
    refusals.append(box.client.post("/v1/models/unload", json={"modelId": "b"}))
    refusals.append(box.client.post("/v1/cache/flush", json={"scope": "all"}))
    refusals.append(box.client.post("/v1/admin/models/b/load", json={}))
    assert {reply.status_code for reply in refusals} == {403}
    assert {reply.json()["error"]["message"] for reply in refusals[:-1]} == {refusals[-1].json()["detail"]["message"]}
    box.finish_load(box.load("b"))
    box.ensure_unloaded("b")


def test_bodies_paths_and_methods_that_are_no_good_are_refused_in_json(box: ApiBox) -> None:
    def post(path: str, body: bytes, media_type: str = "application/json") -> tuple[int, str]:
        reply = box.client.post(path, content=body, headers={"content-type": media_type})
        return reply.status_code, reply.json()["error"]["message"]

    for path in ("/v1/models/load", "/v1/chat/completions"):
        twice = "The request body is not valid JSON: an object has the same name twice."
        assert post(path, b'{"model":"a","model":"b"}') == (400, twice)
        assert post(path, b"[" * 100_000)[0] == 400
        assert post(path, b'{"model":"a"}', "text/plain")[0] == 415
    assert post("/v1/models/load", b" " * (8 << 20) + b"{}")[0] == 413
    wrong = box.client.post("/v1/chat/completions", json={"model": "a"}, headers={"X-Priority": "urgent"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "X-Priority")
    for path, status, code in (("/v2/nothing", 404, "not_found"), ("/v1/models/load/load-nothing", 404, "unknown_task")):
        missing = box.client.get(path)
        assert (missing.status_code, missing.json()["error"]["code"]) == (status, code)
    assert box.client.get("/v1/models/load").headers["allow"] == "POST"


def test_llm_pools_admin_lists_loads_and_unloads_with_its_own_words(box: ApiBox) -> None:
    box.ensure_unloaded("team/c")
    token, path = box.token(Operation.MODEL_LOAD, "team/c"), "/v1/admin/models/team/c"
    row = box.client.post(f"{path}/load", json={"gguf_n_ctx": 768, "gguf_type_k": None, "verifiedOpToken": token})
    refused = row.json()["detail"]
    assert (row.status_code, refused["code"], refused["model"]) == (400, "invalid_load_request", "team/c")
    row = box.client.post(f"{path}/load", json={"gguf_n_ctx": 768, "verifiedOpToken": token})
    body = row.json()
    assert (row.status_code, body["runtime_state"], body["is_loaded"]) == (200, "loaded", True)
    assert (body["replicas"], body["loaded_replicas"], body["load_override"]) == (1, 1, {"gguf_n_ctx": 768})
    assert body["load_constraints"]["gguf_type_k"]["allowed_values"][0] == "f32"
    assert body["load_recommendations"]["kv_cache"]["recommended_pairs"][0]["gguf_type_k"] == "f16"
    listed = {entry["name"]: entry for entry in box.client.get("/v1/admin/models").json()["models"]}
    assert listed["team/c"].keys() == body.keys()
    fresh = {"gguf_n_ctx": 512, "verifiedOpToken": box.token(Operation.MODEL_LOAD, "team/c")}
    again = box.client.post(f"{path}/load", json=fresh)
    assert (again.status_code, again.json()["detail"]["code"]) == (409, "load_conflict")
    assert {"gpus", "models", "error"} == set(box.client.get("/v1/admin/gpu-memory").json())
    gone = box.client.post(f"{path}/unload", json={"verifiedOpToken": box.token(Operation.MODEL_UNLOAD, "team/c")})
    assert (gone.status_code, gone.json()["runtime_state"], gone.json()["load_override"]) == (200, "unloaded", {})


CHAT = "/v1/chat/completions"
BODY: dict[str, object] = {"model": "alpha", "messages": []}
EVENT = b'data: {"choices":[{"delta":{"content":"hello"}}]}\n\n'


@asynccontextmanager
async def serve(
    tmp_path: Path, engine: ScriptedEngine, *options: str, env: dict[str, str] | None = None
) -> AsyncIterator[tuple[ApiBox, httpx.AsyncClient]]:
    """Yield a node in front of ``engine`` whose models are ready, and a client of it."""
    async with (
        open_api_box(tmp_path, "--backend", engine.url, *options, env=env) as box,
        httpx.AsyncClient(base_url=box.url, timeout=DEADLINE_S, trust_env=False, limits=NO_KEEP_ALIVE) as client,
    ):

        async def is_ready() -> bool:
            # A node whose server does not list its models in time serves without them at first.
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


async def say_nothing(_request: web.Request, _body: bytes) -> web.StreamResponse:
    await asyncio.Event().wait()
    return web.Response()


async def test_a_client_that_leaves_frees_the_engine_also_while_it_waits(tmp_path: Path) -> None:
    async with run_engine() as engine, serve(tmp_path, engine, "--max-concurrent", "1") as (_, client):
        engine.handler = stream_for_ever
        async with client.stream("POST", CHAT, json={**BODY, "stream": True}) as reply:
            chunks = reply.aiter_raw()
            assert await anext(chunks) == EVENT
            waiting = asyncio.create_task(client.post(CHAT, json=BODY))
            await depth_is(client, 1)
            waiting.cancel()
            await depth_is(client, 0)
            assert not engine.gone.is_set()
        await asyncio.wait_for(engine.gone.wait(), DEADLINE_S)
        engine.handler = say_nothing
        silent = asyncio.create_task(client.post(CHAT, json=BODY))  # before a byte of the answer
        engine.gone.clear()
        await eventually(lambda: len(engine.seen) == 2, "the engine has the next")
        silent.cancel()
        await asyncio.wait_for(engine.gone.wait(), DEADLINE_S)


async def test_audio_reaches_the_engine_byte_for_byte_and_keys_and_cookies_of_the_client_stay_here(tmp_path: Path) -> None:
    key, path = "the-key-of-this-node", "/v1/audio/transcriptions"
    async with run_engine() as engine, serve(tmp_path, engine, "--api-key", key) as (_, client):
        client.headers.update({"Authorization": f"Bearer {key}", "Cookie": "a=b", "X-Request-ID": "r-1"})
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
