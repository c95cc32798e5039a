"""What our adapters make of the ways of vLLM, TGI and TabbyAPI, on servers written from those; tests/rings/vllm runs vLLM."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from runner.api.metrics import show_series
from runner.definitions.plan import LoadPlan, Progress
from runner.engines.http_engine import HttpEngine
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    TOKENIZE,
    Call,
    Engine,
    FlushRequest,
    FlushResult,
    FlushScope,
    Health,
)
from runner.engines.tabby import make_tabby
from runner.engines.tgi import build_command, build_environment, free_ports, lowest_given_port, make_tgi
from runner.engines.vllm import make_vllm
from runner.errors import EngineError, EngineUnavailable, InvalidRequest, ModalityUnsupported, ModelQueueFull
from tests.fakes.engines.cases import BLOCKS_QUESTION as QUESTION
from tests.fakes.engines.cases import (
    contract_model,
    contract_plan,
    contract_python,
    folder_of,
    foreign_plan,
    foreign_server,
    launched_plan,
    vllm_of,
)
from tests.fakes.engines.suite import ask, assert_gone, chat_call, client_session, first_bytes, process_tree, served
from tests.fakes.engines.suite import openai_cached_tokens as cached
from tests.fakes.engines.tabbyapi import TabbyContract, keys_in_environment, tabby_plan
from tests.fakes.limits import set_runner_limits
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)

CALL = chat_call("tiny", QUESTION, max_tokens=1)
LONG = chat_call("tiny", "hello", max_tokens=100_000, stream=True)
ALL = FlushRequest(FlushScope.ALL)


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with client_session() as session:
        yield session


def ignore(_progress: Progress) -> None:
    """Take no note of progress."""


async def is_idle(engine: Engine) -> bool:
    return (await engine.stats()).running == 0


async def told_by(engine: HttpEngine, path: str) -> Any:  # JSON
    """Return what its contract server tells of itself."""
    return json.loads((await engine.server.ask("GET", path))[1])


# vLLM


@pytest.fixture
def vllm_python(tmp_path: Path) -> Iterator[None]:
    """Have the adapter find the contract server."""
    with contract_python(tmp_path):
        yield


with_vllm = pytest.mark.usefixtures("vllm_python")


def vllm(
    folder: Path, *, slots: int = 2, gpu_ids: tuple[int, ...] = (), options: dict[str, object] | None = None, **faults: object
) -> contextlib.AbstractAsyncContextManager[HttpEngine]:
    """Return a loaded adapter over a server with these faults."""
    plan = contract_plan(contract_model(folder / "model", **faults), slots=slots, gpu_ids=gpu_ids, options=options)
    return served(make_vllm, plan)


@with_vllm
async def test_a_load_that_is_cancelled_while_vllm_hangs_leaves_nothing(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    engine, stages = make_vllm(contract_plan(contract_model(tmp_path / "model", hang=True)), client), list[str]()
    loading = asyncio.create_task(engine.load(lambda progress: stages.append(progress.stage)))
    await eventually(lambda: "setting up the KV cache" in stages, "the server is up and hangs")
    tree, folder = process_tree(engine.pids), folder_of(engine)
    assert len(tree) == 3, "subreaper, server, worker"
    assert folder is not None
    assert folder.stat().st_mode & 0o777 == 0o700, "its socket lies in a folder of ours alone"
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await assert_gone(tree)
    assert not folder.exists()


@with_vllm
async def test_salt_and_priority_are_ours_whatever_the_client_says(tmp_path: Path) -> None:
    async with vllm(tmp_path) as engine:
        text = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1, "cache_salt": "mine", "priority": -99})
        sly = text.replace("cache_salt", "cache\\u005fsalt", 1).encode()
        headers = {"content-type": "application/json", "X-Vllm-Priority": "-99", "x-request-id": "other"}
        await ask(engine, Call("POST", COMPLETIONS, headers, sly, tenant="alpha", priority="low"))
        request = (await told_by(engine, "/seen"))[-1]
        assert (request["body"]["priority"], len(request["body"]["cache_salt"])) == (10, 64)
        assert (request["headers"]["x-vllm-priority"], "x-request-id" in request["headers"]) == ("10", False)
        with pytest.raises(InvalidRequest):
            await ask(engine, Call("POST", COMPLETIONS, {}, text.encode("utf-16"), tenant="alpha"))


@with_vllm
async def test_paths_that_are_not_for_clients_do_not_reach_vllm(tmp_path: Path) -> None:
    async with vllm(tmp_path) as engine:
        for path in ("/sleep?level=2", "/reset_prefix_cache", "/v1/load_lora_adapter", f"{CHAT}/../../sleep", EMBEDDINGS):
            with pytest.raises(ModalityUnsupported):
                await ask(engine, Call("POST", path, {}, b"{}"))


@with_vllm
async def test_a_flush_is_refused_while_a_request_runs_although_vllm_answers_200(tmp_path: Path) -> None:
    async with vllm(tmp_path) as engine:
        async with engine.stream(LONG) as response:
            await first_bytes(response)
            assert (await engine.flush(ALL)).result is FlushResult.REFUSED_BUSY
        await eventually(partial(is_idle, engine))
        outcome = await engine.flush(ALL)
        assert outcome.result is FlushResult.FLUSHED
        assert "of a prompt of 33 tokens, 32 were reused before and none after" in outcome.detail
    async with vllm(tmp_path, lies=True) as engine:
        with pytest.raises(EngineError, match="still reuses 32 tokens"):
            await engine.flush(ALL)


@with_vllm
async def test_waiting_requests_are_served_by_priority(tmp_path: Path) -> None:
    async with vllm(tmp_path, slots=1) as engine:

        async def waits(count: int) -> bool:
            return (await engine.stats()).waiting == count

        async with engine.stream(LONG) as response:
            await first_bytes(response)
            tasks = []
            for waiting, priority in enumerate(("low", "normal", "high"), 1):
                call = replace(CALL, priority=priority)  # type: ignore[arg-type]  # one of the three words
                tasks.append(asyncio.create_task(ask(engine, call)))
                await eventually(partial(waits, waiting))
        await asyncio.gather(*tasks)
        # The order in which the server let them in, of which answers that come in the same moment tell nothing.
        _, high, normal, low = await told_by(engine, "/begun")
        assert high < normal < low, "the lower the number, the sooner"


@with_vllm
async def test_stats_and_series_come_from_the_metrics_and_the_log(tmp_path: Path) -> None:
    async with vllm(tmp_path, options={"vllm_kv_cache_memory_bytes": 67_108_864}) as engine:
        await ask(engine, CALL)
        shown = {family.name: family for family in show_series([("tiny", 0, await engine.read_metrics())])}
        first_token = shown["vllm:time_to_first_token_seconds"]
        assert first_token.type == "histogram"
        assert {(sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value for sample in first_token.samples} == {
            ("bucket", "0.001"): 0.0, ("bucket", "+Inf"): 1.0, ("count", None): 1.0, ("sum", None): 0.5,
        }  # fmt: skip
        (preempted,) = shown["vllm:num_preemptions"].samples
        assert (preempted.labels, preempted.value) == ({"model": "tiny", "replica": "0", "engine": "0"}, 3.0)
        assert shown["vllm:request_success"].samples[0].labels["finished_reason"] == "stop"
        assert ("vllm:num_requests_waiting" in shown, "vllm:num_preemptions_created" in shown) == (True, False)
        await ask(engine, CALL)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_total_tokens, stats.kv_bytes) == (0, 0, 65_536, 67_108_864)
        assert (stats.kv_used_tokens, stats.weights_bytes) == (48, 1024**3 // 4)
    assert await engine.read_metrics() == ""


@with_vllm
async def test_adapters_load_and_unload_while_the_model_serves_and_find_nothing_of_a_predecessor(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    async with vllm(tmp_path, options={"vllm_lora": {"style": str(adapter)}}) as engine:
        call = chat_call("style", QUESTION, max_tokens=1)
        await ask(engine, call)
        assert cached(await ask(engine, call)) > 0
        with pytest.raises(EngineError, match=r"HTTP 400\): The lora adapter 'style' has already been loaded"):
            await vllm_of(engine).load_lora("style", adapter)
        await vllm_of(engine).unload_lora("style")
        with pytest.raises(AssertionError, match="does not exist"):
            await ask(engine, call)
        with pytest.raises(EngineError, match="HTTP 404"):
            await vllm_of(engine).unload_lora("style")
        await vllm_of(engine).load_lora("style", adapter)
        assert cached(await ask(engine, call)) == 0


@with_vllm
async def test_sleep_is_offered_on_a_gpu_only_and_a_sleeping_model_refuses(tmp_path: Path) -> None:
    options: dict[str, object] = {"vllm_enable_sleep_mode": True}
    async with vllm(tmp_path, options=options) as engine:
        with pytest.raises(EngineError, match="needs a GPU"):
            await vllm_of(engine).sleep()
    async with vllm(tmp_path, gpu_ids=(0,), options=options) as engine:
        await vllm_of(engine).sleep(2)
        with pytest.raises(EngineUnavailable):
            await ask(engine, CALL)
        await vllm_of(engine).wake()
        assert await ask(engine, CALL)


@with_vllm
async def test_a_dead_worker_is_seen_at_once_and_ends_the_server(tmp_path: Path) -> None:
    async with vllm(tmp_path) as engine:
        tree, gone = process_tree(engine.pids), asyncio.create_task(engine.wait_gone())
        next(process for process in tree if "VLLM::EngineCore" in process.cmdline()).kill()

        async def is_ill() -> bool:
            return await engine.health() is not Health.OK

        await eventually(is_ill)
        await asyncio.wait_for(gone, 30)
        await assert_gone(tree)


@with_vllm
async def test_what_a_model_takes_and_gives_is_read_off_it(tmp_path: Path) -> None:
    async with vllm(tmp_path, options={"vllm_task": "embed"}) as engine:
        assert (engine.capabilities.endpoints, engine.capabilities.vision_input) == ((EMBEDDINGS, TOKENIZE), False)
        body = b'{"model":"tiny","input":"a b"}'
        assert await ask(engine, Call("POST", EMBEDDINGS, {"content-type": "application/json"}, body))
        with pytest.raises(ModalityUnsupported):
            await ask(engine, CALL)
        assert (await engine.flush(ALL)).result is FlushResult.NOTHING_KEPT
    model = contract_model(tmp_path / "seeing")
    (model / "config.json").write_text('{"vision_config": {}}')
    async with served(make_vllm, contract_plan(model)) as engine:
        assert engine.capabilities.vision_input


# TGI


async def test_a_tgi_of_somebody_elses_is_used_and_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGI_KEY_OF_TEST", "k1")
    async with foreign_server("org/other", key="k1") as url:
        plan = foreign_plan(url, server_api_key_env="TGI_KEY_OF_TEST", server_model="org/other")
        async with served(make_tgi, plan) as engine:
            assert json.loads(await ask(engine, CALL))["choices"]
            able = engine.capabilities
            assert (engine.pids, able.max_inflight, able.isolates_tenants, able.needs_tidying) == ((), 128, False, True)
            assert (set(able.endpoints), able.version) == ({CHAT, COMPLETIONS, TOKENIZE}, "3.3.6-dev")
            with pytest.raises(EngineError, match="not ours to stop"):
                await engine.unload(gently=True)
            assert await ask(engine, CALL)
            for path in (EMBEDDINGS, "/generate", "/metrics"):
                with pytest.raises(ModalityUnsupported):
                    await ask(engine, Call("POST", path, {}, b"{}"))
            outcome = await engine.flush(ALL)
            assert (outcome.result, "unload and load" in outcome.detail) == (FlushResult.NOT_SUPPORTED, True)
            async with engine.stream(LONG) as response:
                await first_bytes(response)
                stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.kv_used_tokens, stats.kv_total_tokens) == (1, 0, 100, 4096)
            await engine.unload(gently=False)
            assert await engine.health() is Health.UNREACHABLE
        async with served(make_tgi, plan):
            pass  # it is still there


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs server_url"),
        ({"server_url": "http://127.0.0.1:1"}, "does not answer 200"),
        ({"server_url": "http://127.0.0.1:1", "server_api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE .* is empty"),
        ({"server_url": None}, r"serves org/other, not tiny: set server_model"),
    ],
)
async def test_a_tgi_of_no_use_is_explained(options: dict[str, object], words: str, client: aiohttp.ClientSession) -> None:
    async with foreign_server("org/other") as url:
        options = {name: value or url for name, value in options.items()}
        with pytest.raises(EngineError, match=words):
            await make_tgi(LoadPlan("tiny", "tgi", options=options), client).load(ignore)


async def test_errors_of_tgi_are_said_in_our_shape_and_overload_stays_429(tmp_path: Path) -> None:
    async with served(make_tgi, launched_plan(tmp_path, overloaded=True)) as engine:
        with pytest.raises(ModelQueueFull, match="Model is overloaded") as overloaded:
            await ask(engine, CALL)
        assert overloaded.value.status == 429
    async with (
        foreign_server("tiny", "--lora-adapters", "style") as url,
        served(make_tgi, foreign_plan(url, tgi_adapters=["style", "absent"])) as engine,
    ):
        with pytest.raises(InvalidRequest, match="must be strictly positive"):
            await ask(engine, chat_call("tiny", "hello", max_tokens=-1))
        with pytest.raises(EngineUnavailable, match="generation: Request failed"):
            await ask(engine, chat_call("absent", "hello"))
        for name, told in (("tiny", "tgi"), ("style", "style")):
            await ask(engine, chat_call(name, "hello", max_tokens=1))
            assert (await told_by(engine, "/seen"))[-1]["model"] == told


async def test_our_launcher_tells_its_stages_asks_for_a_key_and_goes(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    engine, reported = make_tgi(launched_plan(tmp_path), client), list[Progress]()
    for ends in ("told", "a shard dies"):
        await engine.load(reported.append)
        tree, folder = process_tree(engine.pids), folder_of(engine)
        assert (len(tree), engine.capabilities.isolates_tenants) == (3, True)
        async with client.post(f"{engine.server.base_url}{CHAT}", json={"model": "tgi", "messages": []}) as response:
            assert response.status == 401
        assert "API_KEY" not in " ".join(word for process in tree for word in process.cmdline())
        if ends == "told":
            await engine.unload(gently=True)
        else:
            os.kill(next(process for process in tree if "tgi-shard" in process.cmdline()).pid, signal.SIGKILL)
            await asyncio.wait_for(engine.wait_gone(), 30)
            await engine.unload(gently=False)
        await assert_gone(tree)
        assert folder is not None
        assert not folder.exists()
    stages = [progress.stage for progress in reported]
    assert stages[:4] == ["starting TGI", "checking the files", "files checked", "loading weights"]


def test_a_plan_becomes_the_launchers_flags_and_ports_that_nobody_is_given_meanwhile() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    if (lowest := lowest_given_port()) > 21_000:
        assert all(20_000 <= port < lowest for port in ports)
    plan = LoadPlan(
        "m", "tgi", Path("/models/m"), context_tokens=4096, slots=8, gpu_ids=(0, 2), quantization="awq",
        options={"tgi_launcher": "/opt/launcher", "tgi_adapters": ["a", "b"]},
    )  # fmt: skip
    command, environment = build_command(plan, [1, 2, 3], Path("/run/x")), build_environment(plan, "secret")
    assert dict(zip(command[1::2], command[2::2], strict=True)).items() >= {
        "--model-id": "/models/m", "--hostname": "127.0.0.1", "--max-total-tokens": "4096", "--max-input-tokens": "4095",
        "--num-shard": "2", "--quantize": "awq", "--max-batch-size": "8", "--lora-adapters": "a,b",
    }.items()  # fmt: skip
    assert (command[0], "secret" in command, environment["API_KEY"]) == ("/opt/launcher", False, "secret")
    assert (environment["PREFIX_CACHING"], environment["CUDA_VISIBLE_DEVICES"]) == ("0", "0,2")


# TabbyAPI


@pytest.fixture
def keys() -> Iterator[None]:
    """Have the variables that the plans name."""
    with keys_in_environment():
        yield


with_keys = pytest.mark.usefixtures("keys")


@with_keys
async def test_the_settings_of_the_plan_reach_tabby_and_requests_carry_the_key_and_not_the_admin_key() -> None:
    options: dict[str, Any] = {"exllama_cache_size": 8192, "exllama_cache_quant": "8"}
    call = chat_call("alias", "Hi", stream=True, max_tokens=2)
    call = replace(call, headers={**call.headers, "authorization": "Bearer of-the-client"})
    async with (
        TabbyContract().serve() as server,
        served(make_tabby, tabby_plan(server.url, "alias", server_model="tiny", **options)) as engine,
        engine.stream(call) as response,
    ):
        assert (response.status, server.asked_by_admin) == (200, 0)
    assert server.loads == [{"model_name": "tiny", "max_seq_len": 4096, "cache_size": 8192, "cache_mode": "8,8"}]
    assert server.asked[0]["model"] == "tiny"


@with_keys
async def test_a_model_of_somebody_else_is_neither_thrown_out_nor_taken_for_ours(client: aiohttp.ClientSession) -> None:
    async with TabbyContract(loaded="other").serve() as server:
        engine = make_tabby(tabby_plan(server.url), client)
        with pytest.raises(EngineError, match=r"'other'.*evict"):
            await engine.load(ignore)
        await engine.unload(gently=True)
        assert (server.loaded, server.loads) == ("other", [])
        server.loaded = None
        await engine.load(ignore)
        with pytest.raises(EngineError, match="context of 4096"):
            await make_tabby(tabby_plan(server.url, context_tokens=2048), client).load(ignore)
        await make_tabby(tabby_plan(server.url), client).load(ignore)
        assert len(server.loads) == 1, "what is there already is taken as it is"
        server.loaded = "other"
        assert await engine.health() is Health.SILENT
        await engine.unload(gently=True)
        assert server.loaded == "other"


@with_keys
async def test_a_load_outlives_its_connection_and_is_undone_when_it_is_cancelled(client: aiohttp.ClientSession) -> None:
    async with TabbyContract(cuts_load_stream=True, module_s=0.1).serve() as server:
        engine = make_tabby(tabby_plan(server.url), client)
        await asyncio.wait_for(engine.load(ignore), 30)
        assert (server.loaded, await engine.health()) == ("tiny", Health.OK)
    async with TabbyContract(module_s=0.1).serve() as server:
        engine, heard = make_tabby(tabby_plan(server.url), client), list[Progress]()
        loading = asyncio.create_task(engine.load(heard.append))
        await eventually(lambda: heard and heard[-1].fraction)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(loading, 30)
    assert (len(server.loads), server.loaded) == (1, None)


@with_keys
async def test_a_tabby_that_keeps_the_model_is_an_error(client: aiohttp.ClientSession) -> None:
    set_runner_limits(engines={"tabby_unload_s": 0.2})
    async with TabbyContract(keeps_model=True).serve() as server:
        engine = make_tabby(tabby_plan(server.url), client)
        await engine.load(ignore)
        with pytest.raises(EngineError, match="still holds tiny"):
            await engine.unload(gently=True)
        server.keeps_model = False
        await engine.unload(gently=True)
    assert server.loaded is None


async def test_a_wrong_key_is_said_without_showing_it(client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    async with TabbyContract().serve() as server:
        with pytest.raises(EngineError, match="TEST_TABBY_KEY"):
            await make_tabby(tabby_plan(server.url), client).load(ignore)
        for name in ("TEST_TABBY_KEY", "TEST_TABBY_ADMIN_KEY"):
            monkeypatch.setenv(name, "a-wrong-key")
        with pytest.raises(EngineError, match="server_api_key_env") as caught:
            await make_tabby(tabby_plan(server.url), client).load(ignore)
        assert "wrong" not in str(caught.value)
