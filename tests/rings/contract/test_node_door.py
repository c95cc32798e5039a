"""Nodes on the running gateway's real sockets: bridge v1 workers, muster v1 boxes, and boxes that it calls over HTTP.

Who gets which request, and what becomes of it when a side leaves, ``tests/system/gateway/test_fleet*.py`` shows in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any  # REST bodies are JSON

import pytest
import pytest_asyncio

from tests.fakes.http_client import DELETED_TEXT, Reply, assert_failure, assert_stream_failure
from tests.fakes.lab import CHAT, Lab, unique
from tests.fakes.scripted_backend import ScriptedBackend, serve_backend
from tests.fakes.scripted_worker import PROTOCOL
from tests.fakes.waiting import eventually
from wire import frames
from wire.bridge import MemoryInfo, ReplicaInfo, Telemetry

pytestmark = pytest.mark.asyncio

AUDIO = "/v1/audio/transcriptions"


# bridge v1


async def test_a_worker_is_acknowledged_with_the_name_and_the_models_that_the_gateway_took(lab: Lab) -> None:
    model, name = await lab.model(), unique("worker") + "x" * 500
    worker = await lab.dial(secret=lab.secret)
    ack = await worker.register([f"  {model} ", model, "", "   "], name=name, max_concurrent=0)
    assert list(ack)[:3] == ["type", "worker_id", "models"]
    assert (ack["models"], ack["protocol_version"]) == ([model], PROTOCOL)
    assert any("name" in warning and "truncated" in warning for warning in ack["warnings"]), ack
    assert set(ack) <= {"type", "worker_id", "models", "warnings", "protocol_version"}
    rows = (await lab.admin("GET", "/admin/workers")).json["workers"]
    (row,) = [row for row in rows if row["worker_id"] == ack["worker_id"]]
    assert name.startswith(row["worker_name"])
    assert len(row["worker_name"]) < len(name)
    assert row["max_concurrent"] == 1
    assert (await lab.ask_through(worker, model)).status == 200


async def test_a_worker_that_is_drained_is_told_gets_nothing_new_and_is_let_go_when_it_is_done(lab: Lab) -> None:
    model, name = await lab.model(), unique("leaving")
    leaving = await lab.worker(model, name=name, max_concurrent=4)
    running = lab.ask(model, "running")
    job = await leaving.job()
    node = await lab.node(name)
    lab.operate("nodes.services.drain_node", node_id={"$id": node["node_id"]}, reason="maintenance", timeout_s=60)
    notice = await leaving.frame("graceful_shutdown")
    assert (notice["reason"], 0 < notice["drain_timeout_secs"] <= 60) == ("maintenance", True)
    await leaving.answer(job)
    assert (await running).status == 200
    assert await leaving.closed() == (1000, "graceful shutdown complete")


async def test_a_provider_that_is_deleted_sends_away_what_waits_and_closes_its_workers(lab: Lab) -> None:
    provider = unique("provider")
    lab.operate("nodes.services.create_provider", name=provider)
    _, secret = lab.operate("nodes.services.create_credential", name=unique("c"), provider_name=provider, max_nodes=9)
    model = await lab.model()
    worker = await lab.worker(model, secret=str(secret), provider=provider)
    lab.ask(model, "running")
    await worker.job()
    queued = []
    for number in range(2):
        queued.append(lab.ask(model, f"queued {number}"))
        await lab.queued(number + 1)
    lab.operate("nodes.services.delete_provider", name=provider)
    for reply in queued:
        assert_failure(await reply, 503, "NO_AVAILABLE_NODE", DELETED_TEXT)
    await worker.closed()
    assert len(worker.jobs) == 1


# muster v1


async def test_a_request_travels_as_binary_frames_with_meta_untouched_body_and_cache_words(lab: Lab) -> None:
    model = await lab.model(max_prompt_chars=3_000_000)
    box = await lab.box(model)
    wishes = {"x-cache-mode": "prefix", "x-cache-tag": "doc:42.v1_a-b"}
    sent = json.dumps({"model": model, "messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode()
    reply = lab.spawn(lab.post(sent, headers=lab.headers(wishes)))
    stream = await box.stream()
    assert (stream.attempt, bytes(stream.body)) == (1, sent)
    assert (stream.meta.path, stream.meta.method, stream.meta.model, stream.meta.is_streaming) == (CHAT, "POST", model, False)
    assert 0 < stream.meta.deadline_ms <= 300_000
    assert stream.meta.request_id.startswith("req_")
    assert wishes.items() <= stream.meta.headers.items()
    assert stream.meta.headers.keys() <= {"content-type", "x-request-id", *wishes}
    figures = {"x-cache-hit": "true", "x-cache-tokens-reused": "512", "x-queue-wait-ms": "3", "x-gpu-time-ms": "71"}
    await box.head(stream, headers=figures)
    await box.data(stream, b'{"ok":true}')
    await box.end(stream)
    got = await reply
    assert (got.status, got.body, got.request_id) == (200, b'{"ok":true}', stream.meta.request_id)
    assert figures.items() <= got.headers.items()


async def test_frames_of_another_attempt_or_stream_reach_nobody(lab: Lab) -> None:
    model = await lab.model()
    for wrong_stream, wrong_attempt in ((0, 1), (77, 0)):
        hostile = await lab.box(model)
        reply = lab.ask(model)
        stream = await hostile.stream()
        name = unique("honest")
        honest = await lab.box(model, name=name)
        where = (stream.id + wrong_stream, stream.attempt + wrong_attempt)
        head = frames.encode_json(frames.Head(status=200, headers={"content-type": "text/plain"}))
        await hostile.socket.send(frames.encode_frame(frames.HEAD, *where, head))
        await hostile.socket.send(frames.encode_frame(frames.DATA, *where, b"FORGED"))
        assert (await hostile.closed())[0] == 1002
        await honest.answer(await honest.stream(), b'{"genuine":true}')
        assert (await reply).body == b'{"genuine":true}'
        await honest.close()
        await lab.let_go_of(name)


async def test_a_recording_larger_than_a_json_body_may_be_travels_byte_for_byte(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, endpoints=(AUDIO,))
    head = '--edge\r\nContent-Disposition: form-data; name="'
    sound = os.urandom(40 * 1024 * 1024)
    body = (
        f'{head}file"; filename="a.wav"\r\n\r\n'.encode() + sound + f'\r\n{head}model"\r\n\r\n{model}\r\n--edge--\r\n'.encode()
    )
    kind = {"content-type": "multipart/form-data; boundary=edge"}
    reply = lab.spawn(lab.post(body, path=AUDIO, headers=lab.headers(kind), within_s=90))
    stream = await box.stream(within_s=60)
    assert bytes(stream.body) == body
    assert (stream.meta.model, stream.meta.path, stream.meta.is_streaming) == (model, AUDIO, False)
    await box.head(stream, content_type="text/plain; charset=utf-8")
    await box.data(stream, "Grüß Gott.\n".encode())
    await box.end(stream)
    got = await reply
    assert (got.status, got.body.decode()) == (200, "Grüß Gott.\n")
    (record,) = await lab.final(model)
    assert (record["endpoint"], record["prompt_tokens_est"], record["status"]) == (AUDIO, 0, "completed")


async def test_what_a_box_says_is_listed_for_operators(lab: Lab) -> None:
    model, name = await lab.model(), unique("box")
    box = await lab.box(model, name=name)
    half = ReplicaInfo(model="next", state="loading", engine="vllm", detail="reading weights", progress=0.5, eta_s=12.0)
    memory = MemoryInfo(total_mb=24_000, used_mb=9_000, weights_mb=7_000, kv_mb=1_000)
    loaded = ReplicaInfo(model=model, state="loaded", endpoints=[CHAT])
    await box.send(Telemetry(replicas=[loaded, half], available=["other"], memory=memory, queue_depth=2, avg_wait_ms=35))

    async def written() -> dict[str, Any] | None:
        row = await lab.node(name)
        return row if row["queue_depth"] == 2 else None

    row = await eventually(written, what="the report is listed")
    assert [(one["state"], one.get("progress")) for one in row["replicas"]] == [("loaded", None), ("loading", 0.5)]
    assert (row["available_models"], row["avg_wait_ms"], row["memory"]["weights_mb"]) == (["other"], 35, 7_000)


# over HTTP


@dataclass
class RegisteredNode:
    """A registered box and the credential that speaks for it."""

    lab: Lab
    token: str
    node_id: str
    model: str
    name: str

    async def heartbeat(self) -> Reply:
        """Send a heartbeat; the box keeps sending them only when a test says so."""
        body = {"node_id": self.node_id, "status": "available", "mode": "spare_on", "vram_free_mb": 73728}
        return await self.lab.control("POST", "/nodes/heartbeat", token=self.token, body=body)


async def register(lab: Lab, url: str) -> RegisteredNode:
    """Register a box with a credential and a model of its own."""
    model, name = await lab.model(), unique("direct")
    _, token = lab.operate("nodes.services.create_credential", name=name, provider_name="local")
    about: dict[str, object] = {"node_name": name, "owner_name": "JOY", "public_base_url": url, "current_model": model}
    about |= {"gpu_name": "RTX Pro 6000 Blackwell", "vram_total_mb": 98304, "agent_version": "0.1.0"}
    reply = await lab.control("POST", "/nodes/register", token=token, body=about)
    assert (reply.status, reply.json["reachable"], reply.json["accepted_model"]) == (200, True, model), reply
    return RegisteredNode(lab, token, reply.json["node_id"], model, name)


@pytest_asyncio.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    """An engine on loopback."""
    async with serve_backend() as running:
        yield running


async def test_a_registered_box_that_reports_itself_serves_requests(lab: Lab, backend: ScriptedBackend) -> None:
    node = await register(lab, backend.url)
    beat = await node.heartbeat()
    assert (beat.status, beat.json["effective_status"], beat.json["should_drain"]) == (200, "available", False)
    reply = await lab.ask(node.model, "over HTTP")
    assert reply.status == 200
    assert reply.json["choices"][0]["message"]["content"] == "direct"
    (seen,) = backend.calls
    assert seen.body["messages"][0]["content"] == "over HTTP"
    assert not {"authorization", "x-api-key", "cookie"} & set(seen.headers)
    streamed = await lab.ask(node.model, stream=True)
    assert streamed.events[-1] == "[DONE]"
    assert not any('"choices":[]' in data.replace(" ", "") for data in streamed.events)
    first, second = await lab.final(node.model, 2)
    assert (first["node_name"], second["node_name"]) == (node.name, node.name)
    assert (first["prompt_tokens"], first["completion_tokens"], first["tokens_estimated"]) == (11, 2, False)
    assert second["completion_tokens"] >= 1
    await node.heartbeat()
    row = await lab.node(node.name)
    assert (row["status"], row["mode"], row["current_model"]) == ("available", "spare_on", node.model)
    assert row["vram_free_mb"] == 73728


async def test_spare_off_gives_work_in_flight_the_grace_period_then_interrupts_it(lab: Lab, backend: ScriptedBackend) -> None:
    node = await register(lab, backend.url)
    await node.heartbeat()
    backend.hold.clear()
    exchange = await lab.open(node.model)
    await eventually(lambda: backend.calls, what="the engine works")
    await exchange.until(b"begun")
    body = {"mode": "spare_off", "reason": "owner_reclaim"}
    changed = await lab.control("POST", f"/nodes/{node.node_id}/mode", token=node.token, body=body)
    assert changed.json == {"node_id": node.node_id, "mode": "spare_off", "status": "draining"}
    assert_stream_failure(await exchange.finish(), "REQUEST_INTERRUPTED")
    await eventually(lambda: backend.gone == 1, what="the engine was told to stop")
    (record,) = await lab.final(node.model)
    assert (record["status"], record["error_code"]) == ("interrupted", "REQUEST_INTERRUPTED")
    lab.ask(node.model, "not on a reclaimed box")
    await lab.queued(1)
    assert len(backend.calls) == 1
