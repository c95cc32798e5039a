"""The real runner in front of somebody else's OpenAI-compatible server: what passes, what does not, what breaks."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, cast  # Any: a host that is never asked

import aiohttp
import pytest
from aiohttp import web

from runner.connection import GatewayLink
from tests.fakes.engines.scripted_server import run_engine
from tests.fakes.limits import set_runner_limits
from tests.fakes.runners.process import PATIENT, run_box
from tests.fakes.scripted_gateway import ConnectedBox, run_gateway
from tests.fakes.waiting import eventually
from tests.unit.closed_port import closed_port
from wire import bridge, frames
from wire.limits import WIRE

pytestmark = pytest.mark.timeout(180)

EURO = 'data: {"choices":[{"delta":{"content":"€"}}]}\n\n'.encode()
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":6,"total_tokens":11}}\n\n'
STREAMED: dict[str, object] = {"model": "alpha", "stream": True, "messages": []}


def event_stream() -> web.StreamResponse:
    """Return an empty event stream."""
    return web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Set-Cookie": "a=b"})


async def test_models_of_the_server_are_declared_and_followed(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        engine.models = ["gamma"]
        await box.send(bridge.ModelsRefresh())
        await box.declares("gamma")


def name_engines(box: ConnectedBox) -> set[str]:
    """Return the engines that a box has named last."""
    reports: list[bridge.Register | bridge.Telemetry] = [box.register]
    reports += [message for message in box.messages if isinstance(message, bridge.Telemetry)]
    return {replica.engine for replica in reports[-1].replicas}


@pytest.mark.parametrize(("owner", "told"), [("llamacpp", "llama-server"), ("someone", "openai")])
async def test_gateways_are_told_of_a_llama_server_by_whom_its_models_belong_to(tmp_path: Path, owner: str, told: str) -> None:
    async with run_gateway() as gateway, run_engine() as engine:
        engine.owner = owner
        async with run_box(tmp_path, gateway.url, "--backend", engine.url):
            box = await gateway.accept()
            await box.declares("alpha", "beta")
            async with asyncio.timeout(30), box.news:
                await box.news.wait_for(lambda: name_engines(box) == {told})


async def test_the_servers_key_is_added_and_a_wrong_one_is_explained(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_engine() as engine:
        engine.key = "sk-right"
        async with run_box(tmp_path, gateway.url, "--backend", engine.url, "--backend-key", "sk-right"):
            box = await gateway.accept()
            await box.declares("alpha", "beta")
            headers = {"content-type": "application/json", "authorization": "Bearer client", "x-request-id": "r1"}
            await (await box.open(b"{}", headers=headers)).finish()
            _, seen, _ = engine.seen[0]
            assert (seen["authorization"], seen["x-request-id"]) == ("Bearer sk-right", "r1")
            assert seen["accept-encoding"] == "identity"
        wrong = ["--backend", engine.url, "--backend-key", "sk-wrong"]
        async with run_box(tmp_path, gateway.url, *wrong) as process:
            box = await gateway.accept()
            assert box.register.models == []
            await eventually(lambda: "refuses the key (HTTP 401)" in process.log_text(), "the reason is logged")
            assert "sk-wrong" not in process.log_text()


async def test_a_node_whose_server_is_away_says_so_to_its_gateway_until_it_is_back(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_engine() as engine:
        engine.key = "sk-right"
        async with run_box(tmp_path, gateway.url, "--backend", engine.url, "--backend-key", "sk-later"):
            box = await gateway.accept()

            def last_error() -> str | None:
                said = [message.last_error for message in box.messages if isinstance(message, bridge.Telemetry)]
                return said[-1] if said else None

            async with asyncio.timeout(30), box.news:
                await box.news.wait_for(lambda: "refuses the key (HTTP 401)" in (last_error() or ""))
            engine.key = "sk-later"
            await box.declares("alpha", "beta")
            async with asyncio.timeout(30), box.news:
                await box.news.wait_for(lambda: last_error() is None)


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


async def test_a_server_that_is_not_there_yet_is_found_later(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_engine() as engine:
        await engine.stop()
        wanted = ["--backend", engine.url, "--models", "mine"]
        async with run_box(tmp_path, gateway.url, *wanted, program=PATIENT) as process:
            box = await gateway.accept()
            assert box.register.models == []
            assert box.register.replicas[0].state == "failed"
            await eventually(lambda: "cannot use" in process.log_text(), "the reason is logged")
            await engine.start()
            await box.declares("mine")


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


async def log_of_a_link(caplog: pytest.LogCaptureFixture, *, say_again_s: float, at_least: int) -> list[str]:
    """Return what a link logs that dials a closed port until ``at_least`` lines are there, at most for two seconds."""
    set_runner_limits(connection={"reconnect_first_s": 0.01, "reconnect_max_s": 0.02, "say_again_s": say_again_s})
    nobody = cast("Any", None)
    caplog.set_level(logging.ERROR, "runner.connection")
    with closed_port() as port:
        async with aiohttp.ClientSession() as client:
            link = GatewayLink(f"ws://127.0.0.1:{port}", host=nobody, client=client, token="msw_x", provider="local")
            dialling = asyncio.create_task(link.run(give_up_s=2.0))
            while not dialling.done() and len(caplog.messages) < at_least:
                await asyncio.sleep(0.01)
            dialling.cancel()
            await asyncio.gather(dialling, return_exceptions=True)
    return caplog.messages


async def test_a_gateway_that_cannot_be_reached_is_said_at_once_and_again_while_it_stays_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = await log_of_a_link(caplog, say_again_s=0.1, at_least=3)
    assert len(said) >= 3
    assert "reason=cannot connect" in said[0]
    assert said[0].endswith("; retrying at least every 0.02 s")
    assert set(said) == {said[0]}


async def test_it_is_not_said_at_every_attempt(caplog: pytest.LogCaptureFixture) -> None:
    assert len(await log_of_a_link(caplog, say_again_s=60.0, at_least=2)) == 1
