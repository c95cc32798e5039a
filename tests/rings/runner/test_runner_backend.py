"""The real runner in front of somebody else's OpenAI-compatible server: what passes, what does not, what breaks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from tests.fakes.engines.scripted_server import run_engine
from tests.fakes.runners.process import run_box
from tests.fakes.scripted_gateway import run_gateway
from wire import bridge, frames
from wire.limits import WIRE

pytestmark = pytest.mark.timeout(180)

EURO = 'data: {"choices":[{"delta":{"content":"€"}}]}\n\n'.encode()
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":6,"total_tokens":11}}\n\n'
STREAMED: dict[str, object] = {"model": "alpha", "stream": True, "messages": []}


def event_stream() -> web.StreamResponse:
    """Return an empty event stream."""
    return web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Set-Cookie": "a=b"})


async def test_the_servers_key_is_added_and_a_wrong_one_is_explained_until_it_is_right(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_engine() as engine:
        engine.key = "sk-right"
        wrong = ["--backend", engine.url, "--backend-key", "sk-later"]
        async with run_box(tmp_path, gateway.url, *wrong) as process:
            box = await gateway.accept()

            def last_error() -> str:
                said = [message.last_error for message in box.messages if isinstance(message, bridge.Telemetry)]
                return (said[-1] if said else None) or ""

            async with asyncio.timeout(30), box.news:
                await box.news.wait_for(lambda: "refuses the key (HTTP 401)" in last_error())
            assert box.models() == []
            assert "sk-later" not in process.log_text()
            engine.key = "sk-later"
            await box.declares("alpha", "beta")
            async with asyncio.timeout(30), box.news:
                await box.news.wait_for(lambda: not last_error())
            headers = {"content-type": "application/json", "authorization": "Bearer client", "x-request-id": "r1"}
            await (await box.open(b"{}", headers=headers)).finish()
            _, seen, _ = engine.seen[0]
            assert (seen["authorization"], seen["x-request-id"]) == ("Bearer sk-later", "r1")
            assert seen["accept-encoding"] == "identity"


async def test_bodies_and_paths_pass_byte_for_byte(tmp_path: Path) -> None:
    body = b'{ "model":"alpha",\n "x": 1.50, "x": "\\u00e9", "unknown": [ ] }'
    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        answer = await (await box.open(body, path="/v1/embeddings?dim=3")).finish()
        assert (answer.status, answer.json()["ok"]) == (200, True)
        assert engine.seen[0][0] == "/v1/embeddings?dim=3"
        assert engine.seen[0][2] == body
        refused = await (await box.open(body, path="/admin/shutdown")).finish()
        assert refused.status == 400
        assert b'"code":"invalid_request"' in refused.body
        assert len(engine.seen) == 1


async def test_a_stream_is_cut_between_events_and_the_usage_chunk_stays_here(tmp_path: Path) -> None:
    async def answer(request: web.Request, body: bytes) -> web.StreamResponse:
        assert b'"include_usage":true' in body
        response = event_stream()
        await response.prepare(request)
        await response.write(EURO + EURO[:40])
        await response.write(EURO[40:45])
        await response.write(EURO[45:] + USAGE)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        engine.handler = answer
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        result = await (await box.open(STREAMED)).finish()
    assert result.body == EURO + EURO + b"data: [DONE]\n\n"
    assert all(piece.endswith(b"\n\n") for piece in result.pieces)
    assert result.end.usage == bridge.TokenCounts(prompt_tokens=5, completion_tokens=6, total_tokens=11)
    assert "set-cookie" not in result.headers


async def test_a_server_that_is_gone_is_withdrawn_and_declared_again_when_it_is_back(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        await engine.stop()
        end = await (await box.open(STREAMED)).expect_end()
        assert end.error in {"engine_failed", "busy"}, "the second when the box has noticed before"
        assert end.retryable
        await box.declares()
        await engine.start()
        await box.declares("alpha", "beta")


async def test_an_answer_without_credit_is_not_read_from_the_server(tmp_path: Path) -> None:
    written = 0
    total = 64 * 1024 * 1024

    async def pour(request: web.Request, _body: bytes) -> web.StreamResponse:
        nonlocal written
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await response.prepare(request)
        while written < total:
            await response.write(bytes(256 * 1024))
            written += 256 * 1024
        return response

    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        engine.handler = pour
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        stream = await box.open({"model": "alpha"}, window_bytes=100_000, deadline_ms=170_000)
        received = 0
        while received < 100_000:
            frame = await stream.next()
            received += len(frame.payload) if frame.kind == frames.DATA else 0
        pongs = sum(isinstance(message, bridge.Pong) for message in box.messages)
        await box.expect(bridge.Pong, skip=pongs + 2)
        assert stream.frames.empty()
        assert written < total / 2
        answer_bytes = received
        await stream.credit(1 << 30)
        while (frame := await stream.next()).kind == frames.DATA:
            assert len(frame.payload) <= WIRE.frame_payload_bytes
            answer_bytes += len(frame.payload)
    assert answer_bytes == total


MANAGING = (
    "/v1/models/load", "/v1/models/unload", "/v1/cache/flush", "/v1/admin/models/alpha/unload", "/v1/admin/settings/reload",
    "/v1/model/load", "/v1/model/unload", "/v1/download", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/v1/model/unload?x=1", "/v1/chat/completions/../../model/unload", "/v1//model/unload", "/slots/0?action=erase", "/sleep",
)  # fmt: skip


async def test_paths_that_manage_an_engine_do_not_pass_also_with_forged_headers(tmp_path: Path) -> None:
    forged = {
        "content-type": "application/json", "x-http-method-override": "DELETE", "x-original-url": "/v1/model/unload",
        "x-rewrite-url": "/v1/model/unload", "x-admin-key": "admin",
    }  # fmt: skip
    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        for path in MANAGING:
            answer = await (await box.open({"model": "alpha"}, path=path, headers=forged)).finish()
            assert answer.status == 400, path
        assert engine.seen == []
        assert (await (await box.open({"model": "alpha"}, headers=forged)).finish()).status == 200
        ((path, headers, _),) = engine.seen
        assert path == "/v1/chat/completions"
        assert not (forged.keys() - {"content-type"}) & {name.lower() for name in headers}
