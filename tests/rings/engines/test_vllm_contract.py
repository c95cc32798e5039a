"""What the vLLM adapter makes of vLLM's own ways, on a contract server made from them. tests/rings/vllm runs the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import psutil
import pytest

from runner.engines.exposition import show_series
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    TOKENIZE,
    Call,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    FlushScope,
    Health,
    Progress,
)
from runner.engines.vllm import VllmEngine
from runner.engines.vllm.command import PYTHON_VARIABLE
from runner.errors import EngineError, EngineUnavailable, InvalidRequest, ModalityUnsupported
from tests.fakes.engines.programs.vllm_contract import VERSION
from tests.fakes.engines.suite import ask, assert_gone, chat_call, first_bytes, openai_cached_tokens
from tests.fakes.engines.vllm import CAUSE, QUESTION, contract_model, contract_plan, contract_python
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)

CALL = chat_call("tiny", QUESTION, max_tokens=2)
LONG = chat_call("tiny", QUESTION, max_tokens=100_000, stream=True)


@pytest.fixture(autouse=True)
def _python(tmp_path: Path) -> Iterator[None]:
    with contract_python(tmp_path):
        yield


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


@contextlib.asynccontextmanager
async def loaded(
    folder: Path, *, slots: int = 2, gpu_ids: tuple[int, ...] = (), options: dict[str, object] | None = None, **faults: object
) -> AsyncIterator[VllmEngine]:
    """Yield a loaded adapter over a server with these faults; unload it at the end."""
    plan = contract_plan(contract_model(folder / "model", **faults), slots=slots, gpu_ids=gpu_ids, options=options)
    async with aiohttp.ClientSession() as session:
        engine = VllmEngine(plan, session)
        try:
            await asyncio.wait_for(engine.load(lambda _progress: None), 30)
            yield engine
        finally:
            await engine.unload(gently=False)


async def seen_by(engine: VllmEngine) -> dict[str, object]:
    """Return the last request as the server got it."""
    assert engine._server is not None
    found: list[dict[str, object]] = json.loads((await engine._server.ask("GET", "/seen"))[1])
    return found[-1]


def cached(body: bytes) -> int:
    return openai_cached_tokens(body)


async def test_a_load_tells_stages_and_shares_from_the_log_in_order(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    reported: list[Progress] = []
    engine = VllmEngine(contract_plan(contract_model(tmp_path / "model")), client)
    try:
        await engine.load(reported.append)
    finally:
        await engine.unload(gently=True)
    fractions = [progress.fraction or 0.0 for progress in reported]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    # vLLM writes the files it has read to standard error and the rest to standard output: either may be read first.
    assert any(progress.stage.startswith("loading weights") for progress in reported)


async def test_the_socket_lies_in_a_folder_of_ours_alone_and_goes_with_it(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        folder = engine._folder
        assert folder is not None
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_ISSOCK((folder / "s").stat().st_mode)
    assert not folder.exists()


async def test_a_failed_load_gives_the_cause_and_not_its_consequence(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    engine = VllmEngine(contract_plan(contract_model(tmp_path / "model", fail=CAUSE)), client)
    with pytest.raises(EngineError, match="shape mismatch") as caught:
        await engine.load(lambda _progress: None)
    assert "initialization failed" not in str(caught.value)
    assert not engine.pids
    assert engine._folder is None


async def test_a_load_that_is_cancelled_while_vllm_hangs_leaves_nothing(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    engine = VllmEngine(contract_plan(contract_model(tmp_path / "model", hang=True)), client)
    stages: list[str] = []
    loading = asyncio.create_task(engine.load(lambda progress: stages.append(progress.stage)))
    await eventually(lambda: "setting up the KV cache" in stages, "the server is up and hangs")
    tree = [psutil.Process(pid) for pid in engine.pids]
    tree += [child for process in tree for child in process.children(recursive=True)]
    assert len(tree) == 3, "warden, server, worker"
    folder = engine._folder
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await assert_gone(tree)
    assert folder is not None
    assert not folder.exists()


async def test_without_vllm_a_load_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = VllmEngine(contract_plan(contract_model(tmp_path / "model")), aiohttp.ClientSession.__new__(aiohttp.ClientSession))
    monkeypatch.setenv(PYTHON_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(EngineError, match=f"{PYTHON_VARIABLE} names .*nowhere"):
        await engine.load(lambda _progress: None)


async def test_salt_and_priority_are_ours_whatever_the_client_says(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        text = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1, "cache_salt": "mine", "priority": -99})
        sly = text.replace("cache_salt", "cache\\u005fsalt", 1).encode()
        headers = {"content-type": "application/json", "X-Vllm-Priority": "-99", "x-request-id": "other"}
        await ask(engine, Call("POST", COMPLETIONS, headers, sly, tenant="alpha", priority="low"))
        request = await seen_by(engine)
        body, got = request["body"], request["headers"]
        assert isinstance(body, dict)
        assert isinstance(got, dict)
        assert body["priority"] == 10
        assert len(body["cache_salt"]) == 64
        assert got["x-vllm-priority"] == "10"
        assert "x-request-id" not in got
        with pytest.raises(InvalidRequest):
            await ask(engine, Call("POST", COMPLETIONS, {}, text.encode("utf-16"), tenant="alpha"))


async def test_paths_that_are_not_for_clients_do_not_reach_the_server(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        for path in (
            "/sleep?level=2",
            "/reset_prefix_cache",
            "/v1/load_lora_adapter",
            "/v1/chat/completions/../../sleep",
            EMBEDDINGS,
        ):
            with pytest.raises(ModalityUnsupported):
                await ask(engine, Call("POST", path, {}, b"{}"))
        counted = await ask(engine, Call("POST", "/tokenize", {}, b'{"model":"tiny","prompt":"a b c"}'))
        assert json.loads(counted)["count"] == 3


async def test_a_flush_is_refused_while_a_request_runs_although_vllm_answers_200(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        async with engine.stream(LONG) as response:
            await first_bytes(response)
            outcome = await engine.flush(FlushRequest(FlushScope.ALL))
            assert outcome.result is FlushResult.REFUSED_BUSY
        await eventually(lambda: _is_idle(engine))
        assert (await engine.flush(FlushRequest(FlushScope.ALL))).result is FlushResult.FLUSHED


async def _is_idle(engine: VllmEngine) -> bool:
    return (await engine.stats()).running == 0


async def test_a_flush_that_vllm_only_claims_is_found_out(tmp_path: Path) -> None:
    async with loaded(tmp_path, lies=True) as engine:
        with pytest.raises(EngineError, match="still reuses 32 tokens"):
            await engine.flush(FlushRequest(FlushScope.MODEL))


async def test_a_flush_tells_what_it_has_seen(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        outcome = await engine.flush(FlushRequest(FlushScope.ALL))
        assert outcome.result is FlushResult.FLUSHED
        assert "of a prompt of 33 tokens, 32 were reused before and none after" in outcome.detail


async def test_a_flush_of_one_tenant_leaves_the_others_their_cache(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        calls = {name: replace(CALL, tenant=name) for name in ("alpha", "beta")}
        for call in calls.values():
            await ask(engine, call)
        outcome: FlushOutcome = await engine.flush(FlushRequest(FlushScope.TENANT, tenant="alpha"))
        assert outcome.result is FlushResult.FLUSHED
        assert cached(await ask(engine, calls["alpha"])) == 0
        assert cached(await ask(engine, calls["beta"])) > 0


async def test_a_flush_of_a_tag_leaves_the_tenants_other_entries(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        calls = {tag: replace(CALL, tenant="alpha", cache_tag=tag) for tag in ("", "one", "two")}
        for call in calls.values():
            await ask(engine, call)
        await engine.flush(FlushRequest(FlushScope.TAG, tenant="alpha", tag="one"))
        assert [cached(await ask(engine, call)) > 0 for call in calls.values()] == [True, False, True]
        await engine.flush(FlushRequest(FlushScope.TAG, tag="two"))
        assert [cached(await ask(engine, call)) > 0 for call in calls.values()] == [True, True, False]


async def test_waiting_requests_are_served_by_priority(tmp_path: Path) -> None:
    async with loaded(tmp_path, slots=1) as engine:
        async with engine.stream(LONG) as response:
            await first_bytes(response)
            tasks = []
            for waiting, priority in enumerate(("low", "normal", "high"), 1):
                call = replace(CALL, priority=priority)  # type: ignore[arg-type]  # one of the three words
                tasks.append(asyncio.create_task(ask(engine, call)))
                await eventually(lambda waiting=waiting: _waits(engine, waiting))  # type: ignore[misc]
        await asyncio.gather(*tasks)
        assert engine._server is not None
        # The order in which the server let them in, of which answers that come in the same moment tell nothing.
        _, high, normal, low = json.loads((await engine._server.ask("GET", "/begun"))[1])
        assert high < normal < low, "the lower the number, the sooner"


async def _waits(engine: VllmEngine, count: int) -> bool:
    return (await engine.stats()).waiting == count


async def test_stats_come_from_the_metrics_and_the_log(tmp_path: Path) -> None:
    async with loaded(tmp_path, options={"vllm_kv_cache_memory_bytes": 67_108_864}) as engine:
        await ask(engine, CALL)
        await ask(engine, CALL)
        stats = await engine.stats()
        assert (stats.running, stats.waiting, stats.kv_total_tokens, stats.kv_bytes) == (0, 0, 65_536, 67_108_864)
        assert stats.weights_bytes == 1024**3 // 4
        assert stats.cache_queried_tokens == 2 * 48
        assert stats.cache_hit_tokens == 32
        assert stats.kv_used_tokens == 48


async def test_adapters_load_and_unload_while_the_model_serves(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    async with loaded(tmp_path, options={"vllm_max_lora_rank": 8}) as engine:
        assert engine.capabilities.loads_lora
        await engine.load_lora("style", adapter)
        assert await ask(engine, chat_call("style", "hello", max_tokens=1))
        with pytest.raises(EngineError, match=r"HTTP 400\): The lora adapter 'style' has already been loaded"):
            await engine.load_lora("style", adapter)
        await engine.unload_lora("style")
        with pytest.raises(AssertionError, match="does not exist"):
            await ask(engine, chat_call("style", "hello", max_tokens=1))
        with pytest.raises(EngineError, match="HTTP 404"):
            await engine.unload_lora("style")


async def test_an_adapter_with_a_used_name_finds_nothing_of_its_predecessor(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"r": 8}')
    async with loaded(tmp_path, options={"vllm_lora": {"style": str(adapter)}}) as engine:
        call = chat_call("style", QUESTION, max_tokens=1)
        await ask(engine, call)
        assert cached(await ask(engine, call)) > 0
        await engine.unload_lora("style")
        await engine.load_lora("style", adapter)
        assert cached(await ask(engine, call)) == 0


async def test_sleep_is_offered_on_a_gpu_only_and_a_sleeping_model_refuses(tmp_path: Path) -> None:
    async with loaded(tmp_path, options={"vllm_enable_sleep_mode": True}) as engine:
        assert not engine.capabilities.sleeps
        with pytest.raises(EngineError, match="needs a GPU"):
            await engine.sleep()
    async with loaded(tmp_path, gpu_ids=(0,), options={"vllm_enable_sleep_mode": True}) as engine:
        assert engine.capabilities.sleeps
        await engine.sleep(2)
        with pytest.raises(EngineUnavailable):
            await ask(engine, CALL)
        await engine.wake()
        assert await ask(engine, CALL)


async def test_a_dead_worker_is_seen_at_once_and_ends_the_server(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        gone = asyncio.create_task(engine.wait_gone())
        workers = [p for p in psutil.Process(engine.pids[0]).children(recursive=True) if "VLLM::EngineCore" in p.cmdline()]
        os.kill(workers[0].pid, signal.SIGKILL)
        await eventually(lambda: _is_ill(engine))
        await asyncio.wait_for(gone, 30)


async def _is_ill(engine: VllmEngine) -> bool:
    return await engine.health() is not Health.OK


async def test_a_killed_server_takes_its_workers_along(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        tree = psutil.Process(engine.pids[0]).children(recursive=True)
        os.kill(tree[0].pid, signal.SIGKILL)
        await asyncio.wait_for(engine.wait_gone(), 30)
        await assert_gone(tree)


async def test_a_model_with_a_part_for_pictures_takes_them(tmp_path: Path, client: aiohttp.ClientSession) -> None:
    model = contract_model(tmp_path / "model")
    (model / "config.json").write_text('{"vision_config": {}}')
    engine = VllmEngine(contract_plan(model), client)
    try:
        await engine.load(lambda _progress: None)
        assert engine.capabilities.vision_input
    finally:
        await engine.unload(gently=False)
    async with loaded(tmp_path / "other") as plain:
        assert not plain.capabilities.vision_input


async def test_a_model_that_embeds_offers_that_alone(tmp_path: Path) -> None:
    async with loaded(tmp_path, options={"vllm_task": "embed"}) as engine:
        assert engine.capabilities.endpoints == (EMBEDDINGS, TOKENIZE)
        body = b'{"model":"tiny","input":"a b"}'
        assert await ask(engine, Call("POST", EMBEDDINGS, {"content-type": "application/json"}, body))
        with pytest.raises(ModalityUnsupported):
            await ask(engine, replace(CALL, path=CHAT))
        assert (await engine.flush(FlushRequest(FlushScope.ALL))).result is FlushResult.NOTHING_KEPT


async def test_the_server_says_which_version_it_is(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        assert engine.capabilities.version == VERSION


async def test_its_own_series_are_shown_as_those_of_the_model(tmp_path: Path) -> None:
    async with loaded(tmp_path) as engine:
        await ask(engine, CALL)
        shown = {family.name: family for family in show_series([("tiny", 0, await engine.read_metrics())])}
        first_token = shown["vllm:time_to_first_token_seconds"]
        assert first_token.type == "histogram"
        assert {(sample.name.rpartition("_")[2], sample.labels.get("le")): sample.value for sample in first_token.samples} == {
            ("bucket", "0.001"): 0.0, ("bucket", "+Inf"): 1.0, ("count", None): 1.0, ("sum", None): 0.5,
        }  # fmt: skip
        assert [(s.labels, s.value) for s in shown["vllm:num_preemptions"].samples] == [
            ({"model": "tiny", "replica": "0", "engine": "0"}, 3.0)
        ]
        assert shown["vllm:request_success"].samples[0].labels["finished_reason"] == "stop"
        assert "vllm:num_requests_waiting" in shown
        assert "vllm:num_preemptions_created" not in shown
    assert await engine.read_metrics() == ""
