"""Loads, unloads and flushes of real llama.cpp models through the pool: memory, races, failures, what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from runner.definitions.plan import Progress
from runner.errors import (
    EngineError,
    EngineUnavailable,
    InsufficientMemory,
    InvalidLoadRequest,
    ModelLoading,
    ModelUnloading,
    RequestRefused,
    RunnerError,
    UnknownModel,
)
from runner.parts import Parts
from runner.pool import LoadOrder, Model, ModelState
from tests.fakes.runners.parts import answer, ask, assembled, find, load, write_models
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    async with assembled(tmp_path) as made:
        yield made


def pids_of(model: Model) -> list[int]:
    return [pid for replica in model.replicas for pid in replica.supervisor.engine.pids]


def on_engine(model: Model, found: list[int], signum: signal.Signals) -> Callable[[Progress], None]:
    """Return what hears of a load and signals its engine's process as soon as that is there: ``load`` still waits for it."""

    def hear(_progress: Progress) -> None:
        if not found and (pids := pids_of(model)):
            os.kill(pids[0], signum)
            found.extend(pids)

    return hear


async def drain(chunks: AsyncIterator[bytes]) -> None:
    async for _ in chunks:
        pass


async def test_a_load_reports_progress_serves_and_is_measured(parts: Parts) -> None:
    heard: list[Progress] = []
    order = await parts.pool.loader.order("a", overrides={"gguf_n_ctx": 512})
    assert isinstance(order, LoadOrder)
    assert find(parts, "a").state is ModelState.LOADING
    result = await parts.pool.loader.carry_out(order, heard.append)
    assert [progress.stage for progress in heard]
    assert result.memory_bytes is not None
    assert result.memory_bytes > 10 * 1024 * 1024
    assert result.predicted_bytes is not None
    assert find(parts, "a").state is ModelState.LOADED
    assert await answer(parts, "a") == 0
    assert await parts.ledger.last_load_s("a", "no such plan") is None


async def test_what_a_load_took_makes_the_next_prediction_closer(parts: Parts) -> None:
    first = await load(parts, "a")
    unloaded = await parts.pool.unloader.unload("a")
    second = await load(parts, "b")
    assert first.memory_bytes
    # Not measured against the second load: shared pages are counted by share, so what that takes moves with what else runs.
    took = max(first.memory_bytes, unloaded.before_bytes)
    assert first.predicted_bytes != took
    assert second.predicted_bytes == took


async def test_unloading_frees_the_memory_and_the_process_and_can_be_repeated(parts: Parts) -> None:
    await load(parts, "a")
    pids = pids_of(find(parts, "a"))
    result = await parts.pool.unloader.unload("a")
    assert result.before_bytes > 10 * 1024 * 1024
    assert (result.after_bytes, result.was_loaded) == (0, True)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    again = await parts.pool.unloader.unload("a")
    assert (again.before_bytes, again.was_loaded) == (0, False)


async def test_a_gentle_unload_lets_a_running_answer_end_and_refuses_those_that_wait(parts: Parts) -> None:
    await load(parts, "a", target_inflight=1)
    async with parts.door.open(ask("a", tokens=200)) as running:
        assert running.chunks is not None
        chunks = running.chunks
        await anext(chunks)
        waiting = asyncio.create_task(answer(parts, "a", tenant="t2"))
        await eventually(lambda: find(parts, "a").queue.depth == 1, "the second one waits")
        unload = asyncio.create_task(parts.pool.unloader.unload("a"))
        with pytest.raises(ModelUnloading):
            await waiting
        with pytest.raises(ModelUnloading):
            await answer(parts, "a")
        rest = [chunk async for chunk in chunks]
        assert b"[DONE]" in rest[-1]
    assert (await unload).cut == 0


async def test_a_forced_unload_cuts_what_runs_and_says_how_much(parts: Parts) -> None:
    await load(parts, "a", gguf_n_ctx=2048)
    async with parts.door.open(ask("a", tokens=2000, is_weighty=True)) as running:
        assert running.chunks is not None
        chunks = running.chunks
        await anext(chunks)
        os.kill(pids_of(find(parts, "a"))[0], signal.SIGSTOP)  # so that the answer cannot end before it is cut
        unload = asyncio.create_task(parts.pool.unloader.unload("a", force=True))
        with pytest.raises(EngineUnavailable):
            await drain(chunks)
    assert (await asyncio.wait_for(unload, 30)).cut == 1
    assert find(parts, "a").state is ModelState.UNLOADED


async def test_two_loads_that_race_for_the_same_memory_one_wins_and_the_other_is_told_what_would_help(tmp_path: Path) -> None:
    async with assembled(tmp_path, "--memory-budget-mb", "70") as parts:
        loader = parts.pool.loader
        # Neither is carried out before both are decided: what a load takes may be less than what is set aside for it.
        results = await asyncio.gather(*(loader.order(name, overrides={}) for name in ("a", "b")), return_exceptions=True)
        won = [result for result in results if isinstance(result, LoadOrder)]
        lost = [result for result in results if isinstance(result, InsufficientMemory)]
        assert (len(won), len(lost)) == (1, 1)
        required, free = lost[0].details["requiredMB"], lost[0].details["freeMB"]
        assert isinstance(required, int)
        assert isinstance(free, int)
        assert required > free
        winner = (await loader.carry_out(won[0], lambda _: None)).model_id
        loser = "b" if winner == "a" else "a"
        assert find(parts, loser).state is ModelState.UNLOADED
        # What it was told does help: evicting the winner makes room.
        assert (await load(parts, loser, evict=winner)).evicted == winner
        assert find(parts, winner).state is ModelState.UNLOADED


async def test_a_load_that_cannot_fit_even_after_the_eviction_evicts_nothing(tmp_path: Path) -> None:
    async with assembled(tmp_path, "--memory-budget-mb", "70") as parts:
        await load(parts, "a", gguf_n_ctx=256)
        with pytest.raises(InsufficientMemory):
            await load(parts, "b", evict="a", replicas=1, gguf_n_ctx=1_000_000)
        assert find(parts, "a").state is ModelState.LOADED


async def test_a_damaged_file_is_refused_with_the_reason_and_gives_its_memory_back(tmp_path: Path) -> None:
    folder = write_models(tmp_path / "models", "cut")
    whole = (folder / "cut.gguf").read_bytes()
    async with assembled(tmp_path) as parts:
        (folder / "cut.gguf").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(RunnerError, match=r"cut\.gguf"):
            await load(parts, "cut")
        model = find(parts, "cut")
        assert model.state in {ModelState.UNLOADED, ModelState.FAILED}
        assert (model.replicas, model.reserved_bytes) == ([], 0)
        (folder / "cut.gguf").write_bytes(whole)
        assert (await load(parts, "cut")).model_id == "cut"


async def test_an_engine_killed_in_the_middle_of_its_load_leaves_a_failed_model_and_no_process(parts: Parts) -> None:
    order = await parts.pool.loader.order("a", overrides={})
    assert isinstance(order, LoadOrder)
    model, pids = order.model, list[int]()
    with pytest.raises(EngineError):
        await parts.pool.loader.carry_out(order, on_engine(model, pids, signal.SIGKILL))
    assert pids
    assert model.state is ModelState.FAILED
    assert model.last_error
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert (await load(parts, "a")).model_id == "a"


async def test_a_cancelled_load_leaves_nothing(parts: Parts) -> None:
    order = await parts.pool.loader.order("a", overrides={})
    assert isinstance(order, LoadOrder)
    model, pids = order.model, list[int]()
    loading = asyncio.create_task(parts.pool.loader.carry_out(order, on_engine(model, pids, signal.SIGSTOP)))
    await eventually(lambda: pids, "the engine process is there")
    with pytest.raises(ModelLoading):
        await parts.pool.unloader.unload("a")
    await parts.pool.unloader.unload("a", force=True)
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert model.state is ModelState.UNLOADED
    assert (model.replicas, model.reserved_bytes) == ([], 0)
    assert not any(psutil.pid_exists(pid) for pid in pids)


async def test_an_engine_that_dies_while_it_serves_is_withdrawn_and_comes_back(parts: Parts) -> None:
    await load(parts, "a")
    model = find(parts, "a")
    first = pids_of(model)
    os.kill(first[0], signal.SIGKILL)
    await eventually(lambda: model.state is ModelState.FAILED, "it is withdrawn")
    with pytest.raises(RequestRefused):
        await answer(parts, "a")
    await eventually(lambda: model.state is ModelState.LOADED, "it is back")
    assert pids_of(model) != first
    assert await answer(parts, "a") == 0
    assert model.replicas[0].supervisor.restarts >= 1


async def test_two_replicas_share_the_work_and_one_that_dies_leaves_the_other_serving(tmp_path: Path) -> None:
    settings = tmp_path / "data" / "settings.json"
    settings.parent.mkdir()
    settings.write_text(
        '{"engine": {"models": {"twin": {"backend": "gguf", "model_path": "a.gguf", "replicas": 2, "replica_max": 3}}}}'
    )
    async with assembled(tmp_path) as parts:
        result = await load(parts, "twin")
        model = find(parts, "twin")
        assert (result.replicas, len(pids_of(model)), model.slots) == (2, 2, 2)
        async with parts.door.open(ask("twin", tokens=50)) as one, parts.door.open(ask("twin", tenant="t2", tokens=50)) as two:
            assert [replica.active for replica in model.replicas] == [1, 1]
            for each in (one, two):
                assert each.chunks is not None
                assert [chunk async for chunk in each.chunks]
        os.kill(pids_of(model)[0], signal.SIGKILL)
        await eventually(lambda: model.slots == 1, "one replica is missed")
        assert model.state is ModelState.LOADED
        await answer(parts, "twin")
        with pytest.raises(InvalidLoadRequest) as refused:
            await load(parts, "b", replicas=99)
        assert refused.value.param == "replicas"


async def test_models_that_come_and_go_on_the_disk_are_known(parts: Parts, tmp_path: Path) -> None:
    write_models(tmp_path / "models", "late")
    await parts.discover(at_once=True)
    assert "late" in parts.pool.registry.available_ids()
    (tmp_path / "models" / "late.gguf").unlink()
    await parts.discover(at_once=True)
    with pytest.raises(UnknownModel):
        find(parts, "late")
