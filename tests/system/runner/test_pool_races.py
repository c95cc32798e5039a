"""Loads, unloads and flushes that meet: whatever comes between two steps, nothing is left running, reserved or paused."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from runner.definitions.definition import ModelDefinition
from runner.engines.port import FlushOutcome, FlushRequest, FlushResult, FlushScope
from runner.errors import EngineError, InsufficientMemory, ModelLoading, RunnerError, SettingsConflict, UnknownModel, WrongState
from runner.pool import LoadOrder, Model, ModelState
from runner.telemetry import TreeMemory
from tests.fakes.engine import FakeEngine
from tests.fakes.runners.parts import Bench, assembled, find
from tests.fakes.waiting import eventually

FLUSH = FlushRequest(FlushScope.ALL)
HUGE = {"gguf_n_ctx": 200_000_000}
"""More than any machine of ours has memory for."""


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with assembled(tmp_path) as parts:
        yield Bench(parts)


def is_clean(model: Model) -> bool:
    return (model.state, model.replicas, model.reserved_bytes, model.load, model.load_task) == (
        ModelState.UNLOADED, [], 0, None, None,
    )  # fmt: skip


async def take_turn(model: Model, *, within_s: float = 0.05) -> None:
    """Fail unless a request is let in."""
    model.queue.leave(await model.queue.enter(tenant="t1", priority="normal", timeout_s=within_s))


async def test_a_load_that_is_forced_out_before_it_began_starts_nothing(bench: Bench) -> None:
    order = await bench.order("a")
    await bench.unloader.unload("a", force=True)
    assert is_clean(order.model)
    with pytest.raises(RunnerError):
        await bench.loader.carry_out(order, lambda _: None)
    assert (bench.engines, order.model.state) == ([], ModelState.UNLOADED)
    # Nor does it take the place of the next one.
    again = await bench.order("a")
    with pytest.raises(RunnerError):
        await bench.loader.carry_out(order, lambda _: None)
    await bench.loader.carry_out(again, lambda _: None)
    assert again.model.state is ModelState.LOADED


async def test_an_engine_that_does_not_go_leaves_a_failed_model_without_memory_that_can_be_unloaded_again(bench: Bench) -> None:
    def break_engine(engine: FakeEngine) -> None:
        engine.fails, engine.refuses_unload = EngineError("out of memory"), EngineError("the server keeps it")

    bench.prepare = break_engine
    order = await bench.order("b")
    with pytest.raises(EngineError, match="out of memory"):
        await bench.loader.carry_out(order, lambda _: None)
    assert (order.model.state, order.model.reserved_bytes, order.model.load) == (ModelState.FAILED, 0, None)
    assert "out of memory" in (order.model.last_error or "")
    bench.prepare = lambda _engine: None
    model = await bench.load("a")
    bench.engines[1].refuses_unload = sqlite3.OperationalError("nobody thought of it")
    with pytest.raises(sqlite3.OperationalError):
        await bench.unloader.unload("a")
    assert model.state is ModelState.FAILED
    bench.engines[1].refuses_unload = None
    await bench.unloader.unload("a")
    assert is_clean(model)


async def test_requests_are_let_in_again_after_an_unload_that_was_forced_while_it_waited(bench: Bench) -> None:
    model = await bench.load("a")
    turn = await model.queue.enter(tenant="t1", priority="normal", timeout_s=1)
    model.replicas[0].active += 1
    gentle = asyncio.create_task(bench.unloader.unload("a"))
    await eventually(lambda: model.state is ModelState.UNLOADING, "it waits for what runs")
    # A client that takes nothing of its answer notices nothing: the engine goes all the same, and does not come back.
    forced = asyncio.create_task(bench.unloader.unload("a", force=True))
    await eventually(lambda: not bench.engines[0].is_loaded, "the engine is gone")
    model.queue.leave(turn)
    assert await gentle == await forced
    assert (await forced).cut == 1
    assert bench.engines[0].steps.count("load") == 1
    await take_turn(await bench.load("a"))


async def test_a_load_of_a_wanted_model_that_does_not_start_replaces_it_and_is_completed(bench: Bench) -> None:
    def refuse(engine: FakeEngine) -> None:
        engine.fails = EngineError("no such file")

    model = find(bench.parts, "a")
    bench.prepare = refuse
    bench.loader.start_wanted(model, (await bench.order("b")).plan)
    await eventually(lambda: model.state is ModelState.FAILED, "the first start has failed")
    bench.prepare = lambda _engine: None
    result = await bench.loader.carry_out(await bench.order("a"), lambda _: None)
    assert (result.model_id, model.state) == ("a", ModelState.LOADED)
    assert [engine.is_loaded for engine in bench.engines] == [False, True]


async def test_two_flushes_are_carried_out_one_after_the_other_and_no_request_comes_between(bench: Bench) -> None:
    model = await bench.load("a")
    engine = bench.engines[0]
    engine.may_flush.clear()
    flushes = [asyncio.create_task(bench.unloader.flush(model, FLUSH)) for _ in range(2)]
    await eventually(lambda: "flush" in engine.steps, "the first flush is at it")
    waiting = asyncio.create_task(take_turn(model, within_s=30))
    await eventually(lambda: model.queue.depth == 1, "a request waits")
    for _ in range(20):
        await asyncio.sleep(0)
    assert engine.steps.count("flush") == 1
    engine.may_flush.set()
    assert [(await flush).result for flush in flushes] == [FlushResult.FLUSHED] * 2
    await waiting


async def test_an_unload_ends_a_flush_that_loads_the_engine_anew(bench: Bench) -> None:
    model = await bench.load("a")
    engine = bench.engines[0]
    engine.flushes = False
    engine.may_load.clear()
    flush: asyncio.Task[FlushOutcome] = asyncio.create_task(bench.unloader.flush(model, FLUSH))
    await eventually(lambda: engine.steps.count("load") == 2, "it is being loaded anew")
    await bench.unloader.unload("a")
    assert is_clean(model)
    with pytest.raises(WrongState):
        await flush
    engine.may_load.set()
    await asyncio.sleep(0)
    assert not engine.is_loaded
    await take_turn(await bench.load("a"))


async def test_an_engine_that_does_not_come_back_from_a_flush_is_tried_again(bench: Bench) -> None:
    model = await bench.load("a")
    engine = bench.engines[0]
    engine.flushes, engine.fails = False, EngineError("out of memory")
    with pytest.raises(EngineError):
        await bench.unloader.flush(model, FLUSH)
    assert (model.state, engine.is_loaded) == (ModelState.FAILED, False)
    engine.fails = None
    await eventually(lambda: model.state is ModelState.LOADED, "it is back")
    await take_turn(model)


async def test_a_model_that_is_being_loaded_cannot_be_evicted(bench: Bench) -> None:
    bench.prepare = lambda engine: engine.may_load.clear()
    loading = bench.start(await bench.order("a"))
    await eventually(lambda: bench.engines, "a is being loaded")
    with pytest.raises(ModelLoading):
        await bench.loader.order("b", overrides={}, evict="a")
    assert is_clean(find(bench.parts, "b"))
    bench.engines[0].may_load.set()
    await loading


async def test_what_a_dead_engine_held_is_not_counted_as_freed_by_its_eviction(bench: Bench) -> None:
    model = await bench.load("a")
    engine = bench.engines[0]
    everything = TreeMemory(host_bytes=1 << 60, gpu_bytes=None, pids=())
    model.replicas[0].memory = everything
    assert isinstance(await bench.loader.order("b", overrides=HUGE, evict="a"), LoadOrder)
    await bench.unloader.unload("b", force=True)
    engine.may_load.clear()
    engine.has_died.set()
    await eventually(lambda: model.state is ModelState.FAILED, "it is lost")
    with pytest.raises(InsufficientMemory):
        await bench.loader.order("b", overrides=HUGE, evict="a")
    assert is_clean(find(bench.parts, "b"))


async def test_a_model_that_vanished_or_changed_while_its_load_was_checked_is_not_loaded(bench: Bench, tmp_path: Path) -> None:
    registry = bench.parts.pool.registry
    ordering = asyncio.create_task(bench.loader.order("a", overrides={}))
    await asyncio.sleep(0)
    registry.define(ModelDefinition(model_id="a", backend="gguf", target_inflight=3))
    with pytest.raises(WrongState):
        await ordering
    assert is_clean(find(bench.parts, "a"))
    model = find(bench.parts, "b")
    (tmp_path / "models" / "b.gguf").unlink()
    ordering = asyncio.create_task(bench.loader.order("b", overrides={}))
    await asyncio.sleep(0)
    registry.forget("b")  # what a look through the files does in the end; it may last longer than the check
    with pytest.raises(UnknownModel):
        await ordering
    assert model.state is ModelState.UNLOADED
    await bench.parts.discover(at_once=True)
    with pytest.raises(UnknownModel):
        find(bench.parts, "b")


def write_settings(tmp_path: Path, name: str, model_path: str, **more: object) -> Path:
    path = tmp_path / "data" / "settings.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"engine": {"models": {name: {"backend": "gguf", "model_path": model_path, **more}}}}))
    return path


async def test_settings_that_change_a_model_on_its_way_out_or_loaded_without_them_are_refused(tmp_path: Path) -> None:
    write_settings(tmp_path, "mine", "a.gguf")
    async with assembled(tmp_path) as parts:
        bench = Bench(parts)
        model = await bench.load("mine")
        bench.engines[0].may_unload.clear()
        unload = asyncio.create_task(bench.unloader.unload("mine"))
        await eventually(lambda: model.state is ModelState.UNLOADING, "it is on its way out")
        write_settings(tmp_path, "mine", "b.gguf")
        with pytest.raises(SettingsConflict):
            await parts.reload_settings()
        bench.engines[0].may_unload.set()
        await unload
        assert (await parts.reload_settings()).updated == ("mine",)
        assert model.definition.model_path == "b.gguf"
        await bench.load("a")
        write_settings(tmp_path, "a", "b.gguf")
        with pytest.raises(SettingsConflict) as refused:
            await parts.reload_settings()
        assert refused.value.details == {"conflicts": ["engine.models.a"]}
        await bench.unloader.unload("a")
        assert (await parts.reload_settings()).added == ("a",)
        assert find(parts, "a").definition.model_path == "b.gguf"


async def test_a_model_that_the_settings_switch_on_and_that_does_not_fit_is_failed_with_the_reason(tmp_path: Path) -> None:
    write_settings(tmp_path, "big", "a.gguf", enabled=True)
    async with assembled(tmp_path, "--memory-budget-mb", "5") as parts:
        model = find(parts, "big")
        await eventually(lambda: model.state is ModelState.FAILED, "the load is refused")
        assert "MiB" in (model.last_error or "")


async def test_closing_ends_an_unload_that_waits(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        bench = Bench(parts)
        model = await bench.load("a")
        await model.queue.enter(tenant="t1", priority="normal", timeout_s=1)
        waiting = asyncio.create_task(bench.unloader.unload("a"))
        await eventually(lambda: model.state is ModelState.UNLOADING, "it waits for what runs")
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(waiting, 30)
    assert not bench.engines[0].is_loaded
