"""What the TGI adapter makes of TGI's own ways, on a contract server written from them. It has not met a real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from runner.definitions.plan import LoadPlan
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    TOKENIZE,
    Call,
    FlushRequest,
    FlushResult,
    FlushScope,
    Health,
    Progress,
)
from runner.engines.tgi import TgiEngine
from runner.engines.tgi_launcher import build_command, build_environment, free_ports, lowest_given_port
from runner.errors import EngineError, EngineUnavailable, InvalidRequest, ModalityUnsupported, ModelQueueFull
from tests.fakes.engines.suite import ask, assert_gone, chat_call, first_bytes, process_tree
from tests.fakes.engines.tgi import CAUSE, SERVER, launched_plan

pytestmark = pytest.mark.timeout(180)

CALL = chat_call("tiny", "What is a lambda?", max_tokens=2)
KEY_VARIABLE = "TGI_KEY_OF_TEST"


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@contextlib.asynccontextmanager
async def foreign_server(model_id: str, *flags: str, key: str = "") -> AsyncIterator[str]:
    """Yield the URL of a server that is somebody else's."""
    port = free_ports(1)[0]
    command = [sys.executable, str(SERVER), "--hostname", "127.0.0.1", "--port", str(port), "--model-id", model_id, *flags]
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "API_KEY": key}, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    shards: list[psutil.Process] = []
    try:
        async with asyncio.timeout(30):
            while b"Connected" not in await process.stdout.readline():
                assert process.returncode is None
        shards = psutil.Process(process.pid).children()
        yield f"http://127.0.0.1:{port}"
    finally:
        for shard in shards:
            shard.kill()
        process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def loaded(plan: LoadPlan, client: aiohttp.ClientSession) -> AsyncIterator[TgiEngine]:
    engine = TgiEngine(plan, client)
    try:
        await asyncio.wait_for(engine.load(lambda _progress: None), 30)
        yield engine
    finally:
        await engine.unload(gently=False)


def foreign_plan(url: str, **options: object) -> LoadPlan:
    return LoadPlan("tiny", "tgi", options={"server_url": url, **options})


async def seen_by(engine: TgiEngine) -> dict[str, object]:
    found: list[dict[str, object]] = json.loads((await engine._server.ask("GET", "/seen"))[1])
    return found[-1]


async def test_a_server_of_somebody_elses_is_used_and_not_stopped(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "k1")
    async with foreign_server("tiny", key="k1") as url:
        async with loaded(foreign_plan(url, server_api_key_env=KEY_VARIABLE), client) as engine:
            assert json.loads(await ask(engine, CALL))["choices"]
            assert engine.pids == ()
            assert engine.capabilities.max_inflight == 128
            assert not engine.capabilities.isolates_tenants
            with pytest.raises(EngineError, match="not ours to stop"):
                await engine.unload(gently=True)
            assert await ask(engine, CALL)
            await engine.unload(gently=False)
            assert await engine.health() is Health.UNREACHABLE
        async with client.get(f"{url}/health") as response:
            assert response.status == 200


async def test_a_server_with_another_model_is_refused_by_name(client: aiohttp.ClientSession) -> None:
    async with foreign_server("org/other") as url:
        with pytest.raises(EngineError, match=r"serves org/other, not tiny: set server_model"):
            await TgiEngine(foreign_plan(url), client).load(lambda _progress: None)
        async with loaded(foreign_plan(url, server_model="org/other"), client) as engine:
            assert await ask(engine, CALL)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs server_url"),
        ({"server_url": "http://127.0.0.1:1"}, "does not answer 200"),
        ({"server_url": "http://127.0.0.1:1", "server_api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE .* is empty"),
    ],
)
async def test_a_server_that_cannot_be_used_is_explained(
    options: dict[str, object], words: str, client: aiohttp.ClientSession
) -> None:
    with pytest.raises(EngineError, match=words):
        await TgiEngine(LoadPlan("tiny", "tgi", options=options), client).load(lambda _progress: None)


async def test_the_base_model_is_called_tgi_and_adapters_by_their_name(client: aiohttp.ClientSession) -> None:
    async with (
        foreign_server("tiny", "--lora-adapters", "style") as url,
        loaded(foreign_plan(url, tgi_adapters=["style"]), client) as engine,
    ):
        await ask(engine, CALL)
        assert (await seen_by(engine))["model"] == "tgi"
        await ask(engine, chat_call("style", "hello", max_tokens=1))
        assert (await seen_by(engine))["model"] == "style"


async def test_errors_are_said_in_our_shape_and_overload_stays_429(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    async with loaded(launched_plan(tmp_path, overloaded=True), client) as engine:
        with pytest.raises(ModelQueueFull, match="Model is overloaded") as overloaded:
            await ask(engine, CALL)
        assert overloaded.value.status == 429
    async with foreign_server("tiny") as url, loaded(foreign_plan(url, tgi_adapters=["absent"]), client) as engine:
        with pytest.raises(InvalidRequest, match="must be strictly positive"):
            await ask(engine, chat_call("tiny", "hello", max_tokens=-1))
        with pytest.raises(EngineUnavailable, match="generation: Request failed"):
            await ask(engine, chat_call("absent", "hello"))
        assert await ask(engine, CALL)


async def test_other_paths_do_not_reach_it(client: aiohttp.ClientSession) -> None:
    async with foreign_server("tiny") as url, loaded(foreign_plan(url), client) as engine:
        for path in (EMBEDDINGS, "/generate", "/metrics"):
            with pytest.raises(ModalityUnsupported):
                await ask(engine, Call("POST", path, {}, b"{}"))
        counted = await ask(engine, Call("POST", "/tokenize", {"content-type": "application/json"}, b'{"inputs":"a b c"}'))
        assert len(json.loads(counted)) == 3
        completion = Call("POST", COMPLETIONS, {"content-type": "application/json"}, b'{"model":"tiny","prompt":"a"}')
        assert await ask(engine, completion)
        assert set(engine.capabilities.endpoints) == {CHAT, COMPLETIONS, TOKENIZE}
        assert engine.capabilities.needs_tidying
        assert engine.capabilities.version == "3.3.6-dev"


async def test_a_flush_says_that_there_is_none(client: aiohttp.ClientSession) -> None:
    async with foreign_server("tiny") as url, loaded(foreign_plan(url), client) as engine:
        outcome = await engine.flush(FlushRequest(FlushScope.ALL))
        assert outcome.result is FlushResult.NOT_SUPPORTED
        assert "unload and load" in outcome.detail


async def test_stats_come_from_the_metrics(client: aiohttp.ClientSession) -> None:
    async with foreign_server("tiny") as url, loaded(foreign_plan(url), client) as engine:
        async with engine.stream(chat_call("tiny", "hello", max_tokens=100_000, stream=True)) as response:
            await first_bytes(response)
            stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_used_tokens, stats.kv_total_tokens) == (1, 0, 100, 4096)


async def test_a_launcher_of_ours_tells_its_stages_and_goes_with_its_shards(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    reported: list[Progress] = []
    engine = TgiEngine(launched_plan(tmp_path), client)
    await engine.load(reported.append)
    assert [progress.stage for progress in reported][:4] == [
        "starting TGI", "checking the files", "files checked", "loading weights"
    ]  # fmt: skip
    assert engine.capabilities.isolates_tenants
    tree = process_tree(engine.pids)
    assert len(tree) == 3
    folder = engine._folder
    await engine.unload(gently=True)
    await assert_gone(tree)
    assert folder is not None
    assert not folder.exists()


async def test_a_launcher_of_ours_asks_others_for_a_key(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    async with loaded(launched_plan(tmp_path), client) as engine:
        body = {"model": "tgi", "messages": []}
        async with client.post(f"{engine._server.base_url}{CHAT}", json=body) as response:
            assert response.status == 401
        assert "API_KEY" not in " ".join(word for process in process_tree(engine.pids) for word in process.cmdline())


async def test_a_dead_shard_ends_the_launcher(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    async with loaded(launched_plan(tmp_path), client) as engine:
        tree = process_tree(engine.pids)
        os.kill(next(process for process in tree if "tgi-shard" in process.cmdline()).pid, signal.SIGKILL)
        await asyncio.wait_for(engine.wait_gone(), 30)
        await assert_gone(tree)


async def test_a_shard_that_cannot_start_gives_its_reason(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    engine = TgiEngine(launched_plan(tmp_path, fail=CAUSE), client)
    with pytest.raises(EngineError, match=r"could not load tiny: torch\.OutOfMemoryError: CUDA out of memory"):
        await engine.load(lambda _progress: None)


def test_the_ports_of_a_launcher_are_none_that_others_are_given_meanwhile() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    if (lowest := lowest_given_port()) > 21_000:
        assert all(20_000 <= port < lowest for port in ports)


def test_a_plan_becomes_the_launchers_flags() -> None:
    options = {"tgi_launcher": "/opt/launcher", "tgi_adapters": ["a", "b"]}
    plan = LoadPlan(
        "m", "tgi", Path("/models/m"), context_tokens=4096, slots=8, gpu_ids=(0, 2), quantization="awq", options=options
    )
    command = build_command(plan, [1, 2, 3], Path("/run/x"))
    pairs = dict(zip(command[1::2], command[2::2], strict=True))
    assert command[0] == "/opt/launcher"
    assert pairs["--model-id"] == "/models/m"
    assert pairs["--hostname"] == "127.0.0.1"
    assert (pairs["--max-total-tokens"], pairs["--max-input-tokens"]) == ("4096", "4095")
    assert (pairs["--num-shard"], pairs["--quantize"], pairs["--max-batch-size"]) == ("2", "awq", "8")
    assert pairs["--lora-adapters"] == "a,b"
    environment = build_environment(plan, "secret")
    assert environment["API_KEY"] == "secret"
    assert "secret" not in command
    assert (environment["PREFIX_CACHING"], environment["CUDA_VISIBLE_DEVICES"]) == ("0", "0,2")
