"""Lifecycle operations of a whole node without its doors: what is let in is done once, to its end, and written down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runner.api.metrics import write_metrics
from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import Cluster, Member, Observation
from runner.engines.port import CHAT, Capabilities, FlushRequest, FlushResult, FlushScope
from runner.errors import (
    EngineError,
    InsufficientMemory,
    LoadConflict,
    ModelLoading,
    OperationInterrupted,
    OpTokenRefused,
    ReplicaUnloaded,
    RunnerError,
    SettingsConflict,
    Unavailable,
    UnknownModel,
    WrongState,
)
from runner.ledger.database import FILE_NAME
from runner.ledger.ledger import Run, RunState
from runner.limits import limits
from runner.operations.gate import Gate, GateRules
from runner.operations.operation import FlushBody, LoadBody, Operations, Reply, UnloadBody
from runner.parts import Parts
from runner.pool.loads import Loader, LoadOrder, Pool, end_flush
from runner.pool.models import Model, ModelState
from runner.report import list_replicas
from runner.telemetry.memory import TreeMemory
from tests.fakes.engine import FakeEngine
from tests.fakes.limits import set_runner_limits
from tests.fakes.model_files import write_folder
from tests.fakes.runners.parts import Bench, assembled, find, write_models
from tests.fakes.waiting import eventually, turns
from wire.ids import new_uuid7
from wire.optoken.op_token import Binding, Grant, params_digest, sign_l0, sign_l1
from wire.optoken.verifier import Level, Operation

KEY = b"a key of the tests, 32 bytes long"
BODIES: dict[Operation, Any] = {
    Operation.MODEL_LOAD: LoadBody, Operation.MODEL_UNLOAD: UnloadBody, Operation.CACHE_FLUSH: FlushBody,
}  # fmt: skip


class Desk:
    """Operations over a bench of gated engines, and an approval for each; ``level`` L1: an approval can be shown again."""

    def __init__(self, parts: Parts, *, key_path: Path, level: Level = Level.L0) -> None:
        self.parts = parts
        self.bench = Bench(parts)
        pool = Pool(parts.pool.registry, self.bench.loader, parts.pool.unloader, parts.pool.capacity)
        gate = Gate(GateRules(key_path=key_path, level=level, min_signers=2, runner_id="box"), ledger=parts.ledger)
        self.operations = Operations(pool, gate, parts.ledger, parts.governance.identity)
        self.level = level
        self.fence = 0

    def approve(self, operation: Operation, fields: Mapping[str, object], *, op_id: str | None = None) -> dict[str, object]:
        """Return a fresh token for a body."""
        model_id = fields.get("modelId")
        assert model_id is None or isinstance(model_id, str)
        grant = Grant(operation, model_id, ["ann", "bob"], secrets.token_hex(16), int(time.time()))
        if self.level is Level.L0:
            return sign_l0(KEY, grant)
        self.fence += 1
        return sign_l1(KEY, grant, Binding(
            audience="box", params_digest=params_digest(fields), op_id=op_id or new_uuid7().hex, fence=self.fence,
            expires_at=int(time.time()) + 300,
        ))  # fmt: skip

    async def ask(
        self, operation: Operation, *, token: dict[str, object] | None = None, op_id: str | None = None, **fields: object
    ) -> Reply:
        """Have an operation done as the API does."""
        token = token or self.approve(operation, fields, op_id=op_id)
        body = msgspec.convert({**fields, "verifiedOpToken": token}, BODIES[operation])
        methods: dict[Operation, Callable[[Any, Mapping[str, object]], Awaitable[Reply]]] = {
            Operation.MODEL_LOAD: self.operations.load,
            Operation.MODEL_UNLOAD: self.operations.unload,
            Operation.CACHE_FLUSH: self.operations.flush,
        }
        return await methods[operation](body, fields)

    async def load(self, model_id: str, **fields: Any) -> Reply:
        return await self.ask(Operation.MODEL_LOAD, modelId=model_id, **fields)

    async def unload(self, model_id: str, **fields: Any) -> Reply:
        return await self.ask(Operation.MODEL_UNLOAD, modelId=model_id, **fields)

    async def flush(self, **fields: Any) -> Reply:
        return await self.ask(Operation.CACHE_FLUSH, **fields)

    async def read_load(self, reply: Reply) -> Run:
        found = await self.parts.ledger.find_load(str(reply.body["taskId"]))
        assert found is not None
        return found

    async def finish(self, reply: Reply) -> dict[str, object]:
        """Return the task of a load when it has ended."""
        task_id = reply.body["taskId"]
        assert isinstance(task_id, str)
        return await self.operations.wait(task_id)


@asynccontextmanager
async def desk_of(tmp_path: Path, *options: str, level: Level = Level.L0) -> AsyncIterator[Desk]:
    key_path = tmp_path / "op.key"
    key_path.touch(mode=0o600)
    key_path.write_bytes(KEY + b"\n")
    async with assembled(tmp_path, *options) as parts:
        desk = Desk(parts, key_path=key_path, level=level)
        try:
            yield desk
        finally:
            await desk.operations.close()


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    async with desk_of(tmp_path) as made:
        yield made


@contextlib.contextmanager
def full_disk(tmp_path: Path) -> Iterator[None]:
    """Neither loads nor observations can be written meanwhile; spent tokens can."""
    other = sqlite3.connect(tmp_path / "data" / FILE_NAME, isolation_level=None, timeout=30)
    other.execute("CREATE TRIGGER full_tasks BEFORE UPDATE ON operations BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    other.execute("CREATE TRIGGER full_seen BEFORE INSERT ON observations BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    try:
        yield
    finally:
        other.execute("DROP TRIGGER full_tasks")
        other.execute("DROP TRIGGER full_seen")
        other.close()


async def test_an_unload_a_load_and_a_flush_go_on_when_their_caller_leaves(desk: Desk) -> None:
    async def leave(work: asyncio.Task[Reply]) -> None:
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    desk.bench.prepare = lambda engine: engine.may_load.clear()
    loading, model = asyncio.create_task(desk.load("a")), find(desk.parts, "a")
    await eventually(lambda: model.state is ModelState.LOADING, "the load is let in")
    if not loading.done():
        await leave(loading)
    await eventually(lambda: desk.bench.engines, "the engine is started")
    engine = desk.bench.engines[0]
    engine.may_load.set()
    await eventually(lambda: model.state is ModelState.LOADED, "it is loaded")
    engine.may_flush.clear()
    flushing = asyncio.create_task(desk.flush(scope="all"))
    await eventually(lambda: "flush" in engine.steps, "the flush is at it")
    await leave(flushing)
    waiting = asyncio.create_task(take_turn(model, within_s=30))
    engine.may_flush.set()
    await waiting
    engine.may_unload.clear()
    unloading = asyncio.create_task(desk.unload("a"))
    await eventually(lambda: "unload" in engine.steps, "the engine is told to unload")
    await leave(unloading)
    engine.may_unload.set()
    await eventually(lambda: model.state is ModelState.UNLOADED, "it is gone")


async def test_a_load_becomes_a_task_that_is_on_disk_and_ends_completed(desk: Desk) -> None:
    desk.bench.prepare = lambda engine: engine.may_load.clear()
    reply = await desk.load("a")
    assert (reply.status, reply.body["status"], reply.body["progress"]) == (202, "loading", 0.0)
    row = await desk.read_load(reply)
    assert (row.state, row.outcome) == (RunState.RUNNING, None)
    await eventually(lambda: desk.bench.engines, "the engine is started")
    assert (await desk.load("a")).body["taskId"] == reply.body["taskId"]
    desk.bench.engines[0].may_load.set()
    done = await desk.finish(reply)
    assert (done["status"], done["progress"], done["replicas"]) == ("completed", 1.0, 1)
    row = await desk.read_load(reply)
    assert (row.state, row.ended_at is not None) == (RunState.SUCCEEDED, True)
    again = await desk.load("a")
    assert (again.status, again.body["alreadyLoaded"], again.body["taskId"]) == (200, True, reply.body["taskId"])


@pytest.mark.parametrize(
    ("error", "words"), [(EngineError("out of memory"), "out of memory"), (ZeroDivisionError("a bug"), "the log of this node")]
)
async def test_a_load_that_fails_ends_its_task_and_makes_room_for_another(desk: Desk, error: BaseException, words: str) -> None:
    def fail(engine: FakeEngine) -> None:
        engine.fails = error

    desk.bench.prepare = fail
    reply = await desk.load("a")
    done = await desk.finish(reply)
    assert (done["status"], done["code"]) == ("failed", "model_load_failed")
    assert words in str(done["error"])
    assert (await desk.read_load(reply)).state is RunState.FAILED
    model = find(desk.parts, "a")
    assert (model.state, model.reserved_bytes) == (ModelState.FAILED, 0)
    desk.bench.prepare = lambda _engine: None
    assert (await desk.finish(await desk.load("a")))["status"] == "completed"


async def test_an_approval_shown_again_gives_the_outcome_that_was_recorded(tmp_path: Path) -> None:
    async with desk_of(tmp_path, level=Level.L1) as desk:
        op_id = new_uuid7().hex
        first = await desk.ask(Operation.MODEL_LOAD, op_id=op_id, modelId="a")
        await desk.finish(first)
        again = await desk.ask(Operation.MODEL_LOAD, op_id=op_id, modelId="a")
        assert (again.status, again.body["taskId"], again.body["status"]) == (200, first.body["taskId"], "completed")
        assert again.body["repeated"] is True
        assert len(desk.bench.engines) == 1
        op_id = new_uuid7().hex
        gone = await desk.ask(Operation.MODEL_UNLOAD, op_id=op_id, modelId="a")
        assert (await desk.ask(Operation.MODEL_UNLOAD, op_id=op_id, modelId="a")).body == {**gone.body, "repeated": True}
        op_id = new_uuid7().hex
        with pytest.raises(RunnerError):
            await desk.ask(Operation.MODEL_LOAD, op_id=op_id, modelId="b", gpuMemoryBudgetMB=1)
        refused = await desk.ask(Operation.MODEL_LOAD, op_id=op_id, modelId="b", gpuMemoryBudgetMB=1)
        error = refused.body["error"]
        assert isinstance(error, dict)
        assert (refused.status, error["code"], error["type"], error["retryable"]) == (
            409, "insufficient_memory", "api_error", False,
        )  # fmt: skip


async def test_an_operation_that_the_box_cancels_on_its_way_out_is_recorded_as_interrupted(tmp_path: Path) -> None:
    set_runner_limits(operations={"close_s": 0.05})
    op_id = new_uuid7().hex
    async with desk_of(tmp_path, level=Level.L1) as desk:
        await desk.finish(await desk.load("a"))
        desk.bench.engines[0].may_flush.clear()
        flushing = asyncio.create_task(desk.ask(Operation.CACHE_FLUSH, op_id=op_id, scope="all"))
        await eventually(lambda: "flush" in desk.bench.engines[0].steps, "the flush is at it")
        await desk.operations.close()
        with pytest.raises(asyncio.CancelledError):
            await flushing
        with pytest.raises(Unavailable):
            await desk.load("b")
        desk.operations.is_stopping = False
        with pytest.raises(OperationInterrupted):
            await desk.ask(Operation.CACHE_FLUSH, op_id=op_id, scope="all")
        desk.bench.engines[0].may_flush.set()


async def test_a_refused_load_spends_its_token_and_says_why(tmp_path: Path) -> None:
    async with desk_of(tmp_path, "--memory-budget-mb", "5") as desk:
        token = desk.approve(Operation.MODEL_LOAD, {"modelId": "a"})
        with pytest.raises(InsufficientMemory) as refused:
            await desk.ask(Operation.MODEL_LOAD, token=token, modelId="a")
        assert refused.value.details["requiredMB"]
        with pytest.raises(OpTokenRefused):
            await desk.ask(Operation.MODEL_LOAD, token=token, modelId="a")
        with pytest.raises(InsufficientMemory) as refused:
            await desk.load("a", gpuMemoryBudgetMB=1)
        assert refused.value.details["freeMB"] == refused.value.details["gpuMemoryBudgetMB"] == 1
        assert "its gpuMemoryBudgetMB allows 1 MiB, of " in refused.value.message
        assert (find(desk.parts, "a").state, desk.bench.engines) == (ModelState.UNLOADED, [])


async def test_a_load_of_a_model_that_is_there_otherwise_is_refused_and_one_as_asked_for_changes_nothing(desk: Desk) -> None:
    desk.bench.prepare = lambda engine: engine.may_load.clear()
    reply = await desk.load("a", maxContextLength=1024, gpuMemoryBudgetMB=900)
    for is_done in (False, True):
        with pytest.raises(LoadConflict) as refused:
            await desk.load("a", maxContextLength=512, overrides={"target_inflight": 3})
        found = refused.value.details["conflicts"]
        assert isinstance(found, list)
        assert {entry["name"]: entry["asked"] for entry in found} == {"maxContextLength": 512, "target_inflight": 3}
        assert find(desk.parts, "a").state is (ModelState.LOADED if is_done else ModelState.LOADING)
        if not is_done:
            await eventually(lambda: desk.bench.engines, "the engine is started")
            desk.bench.engines[0].may_load.set()
            await desk.finish(reply)
    for same in (
        {"maxContextLength": 1024},
        {},
        {"quantization": "q8_0", "overrides": {"gguf_flash_attn": "auto", "replicas": 1}},
    ):
        again = await desk.load("a", **same)
        assert (again.status, again.body["alreadyLoaded"]) == (200, True)
    assert [engine.steps.count("load") for engine in desk.bench.engines] == [1]


async def test_a_load_that_cannot_be_written_down_is_not_begun(desk: Desk, tmp_path: Path) -> None:
    with full_disk(tmp_path), pytest.raises(Unavailable):
        await desk.load("a")
    model = find(desk.parts, "a")
    assert (model.state, model.reserved_bytes, model.load, desk.bench.engines) == (ModelState.FAILED, 0, None, [])
    desk.bench.prepare = lambda engine: engine.may_load.clear()
    reply = await desk.load("a")
    await eventually(lambda: desk.bench.engines, "the engine is started")
    with full_disk(tmp_path):
        desk.bench.engines[0].may_load.set()
        assert (await desk.finish(reply))["status"] == "completed"
        assert model.state is ModelState.LOADED
        assert (await desk.unload("a")).body["wasLoaded"] is True


async def test_a_forced_unload_ends_a_load_and_its_task_says_so(desk: Desk) -> None:
    desk.bench.prepare = lambda engine: engine.may_load.clear()
    reply = await desk.load("a")
    await eventually(lambda: desk.bench.engines, "the engine is started")
    assert (await desk.unload("a", force=True)).status == 200
    assert ((await desk.finish(reply))["status"], find(desk.parts, "a").state) == ("failed", ModelState.UNLOADED)


async def test_a_download_that_fails_evicts_nothing(desk: Desk) -> None:
    await desk.finish(await desk.load("a"))
    (desk.parts.pool.registry.library.find("b") or Path()).unlink()
    reply = await desk.load("b", evictModel="a")
    assert (await desk.finish(reply))["status"] == "failed"
    assert find(desk.parts, "a").state is ModelState.LOADED


async def test_no_more_loads_than_the_limit_run_even_when_they_come_at_once(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(limits().operations.loads + 4)]
    write_models(tmp_path / "models", *names)
    async with desk_of(tmp_path) as desk:
        desk.bench.prepare = lambda engine: engine.may_load.clear()
        replies = await asyncio.gather(*(desk.load(name, maxContextLength=256) for name in names), return_exceptions=True)
        begun = [reply for reply in replies if isinstance(reply, Reply)]
        refused = [reply for reply in replies if isinstance(reply, WrongState)]
        assert (len(begun), len(refused)) == (limits().operations.loads, 4)
        await eventually(lambda: len(desk.bench.engines) == limits().operations.loads, "they have begun")
        for engine in desk.bench.engines:
            engine.may_load.set()
        assert {(await desk.finish(reply))["status"] for reply in begun} == {"completed"}


async def test_a_flush_reaches_what_it_names_and_passes_over_what_keeps_nothing_or_goes_meanwhile(desk: Desk) -> None:
    def keep_nothing(engine: FakeEngine) -> None:
        engine.capabilities = Capabilities((CHAT,), keeps_nothing=True)

    async def flush(**scope: str) -> dict[str, str]:
        reply = await desk.flush(**scope)
        assert (reply.status, reply.body["flushed"]) == (200, True)
        models = reply.body["models"]
        assert isinstance(models, list)
        return {entry["modelId"]: entry["outcome"] for entry in models}

    assert await flush(scope="all") == {}, "nothing is loaded"
    await desk.finish(await desk.load("a"))
    desk.bench.prepare = keep_nothing
    await desk.finish(await desk.load("b"))
    for scope in ({"scope": "all"}, {"scope": "tenant", "tenantId": "t"}, {"scope": "tag", "tag": "s"}):
        assert await flush(**scope) == {"a": "flushed", "b": "nothing-kept"}
    assert await flush(scope="model", modelId="a") == await flush(scope="all", modelId="a") == {"a": "flushed"}
    first, second = desk.bench.engines
    assert (first.steps.count("flush"), second.steps.count("flush")) == (5, 3)
    first.may_flush.clear()
    flushing = asyncio.create_task(flush(scope="all"))
    await eventually(lambda: first.steps.count("flush") == 6, "the first is being flushed")
    await desk.unload("b")
    first.may_flush.set()
    assert await flushing == {"a": "flushed"}


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
    await turns(20)
    assert engine.steps.count("flush") == 1
    engine.may_flush.set()
    assert [(await flush).result for flush in flushes] == [FlushResult.FLUSHED] * 2
    await waiting


async def test_an_unload_that_comes_as_the_last_request_ends_ends_the_flush_that_waited_for_it(bench: Bench) -> None:
    model = await bench.load("a")
    bench.engines[0].may_flush.clear()
    for pause in range(6):
        turn = await model.queue.enter(tenant="t", priority="normal", timeout_s=1)
        flushing = asyncio.create_task(bench.unloader.flush(model, FLUSH))
        await turns(5)
        model.queue.leave(turn)
        await turns(pause)
        ending = asyncio.create_task(end_flush(model))
        await turns(20)
        has_ended = ending.done()
        bench.engines[0].may_flush.set()
        await asyncio.gather(ending, flushing, return_exceptions=True)
        bench.engines[0].may_flush.clear()
        assert has_ended, f"it swallowed its cancellation after {pause} turns, and the unload waits for all of it"


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
    await turns(1)
    registry.define(ModelDefinition(model_id="a", backend="gguf", target_inflight=3))
    with pytest.raises(WrongState):
        await ordering
    assert is_clean(find(bench.parts, "a"))
    model = find(bench.parts, "b")
    (tmp_path / "models" / "b.gguf").unlink()
    ordering = asyncio.create_task(bench.loader.order("b", overrides={}))
    await turns(1)
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


async def test_the_machine_has_been_read_before_a_gateway_is_told_of_it(tmp_path: Path) -> None:
    async with assembled(tmp_path) as parts:
        assert parts.reading is not None


# Replicas over several nodes

OWN, OTHER = "own#key", "other#key"


@dataclass
class Span:
    """A node with three GPUs, two of which it gives to a replica of ``big`` together with another node."""

    bench: Bench
    loader: Loader

    @property
    def model(self) -> Model:
        return find(self.bench.parts, "big")

    async def load(self, *, is_head: bool) -> FakeEngine:
        members = [Member(OWN, "10.0.0.1:1", (0, 1)), Member(OTHER, "10.0.0.2:1", (0, 1))]
        own = members[0]
        cluster = Cluster("op.1", "d", tuple(members if is_head else members[::-1]), own, b"", lambda message: message)
        order = await self.loader.order("big", overrides={"gpus": [0, 1]}, cluster=cluster)
        assert isinstance(order, LoadOrder)
        await self.loader.carry_out(order, lambda _: None)
        return self.bench.engines[-1]


@pytest.fixture
async def span(bench: Bench, tmp_path: Path) -> Span:
    parts = bench.parts
    folder = write_folder(tmp_path / "big", {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8})
    for name in ("big", "small"):
        parts.pool.registry.define(ModelDefinition(model_id=name, backend="vllm", model_path=str(folder)))
    # A measured load, so that the first guess of what vLLM takes does not decide whether it fits on this machine.
    await parts.ledger.add_observation(Observation("vllm", "x", "k", 0, 0, 1, 1.0, 1.0))
    loader = Loader(
        parts.pool.registry, capacity=parts.pool.capacity, unloader=parts.pool.unloader, make_engine=bench.make_engine,
        threads=1, gpu_ids=(0, 1, 2), defaults={},
    )  # fmt: skip
    return Span(bench, loader)


@pytest.mark.parametrize("is_head", [True, False])
async def test_a_replica_over_nodes_that_is_lost_ends_with_the_reason_and_is_not_loaded_again(
    span: Span, is_head: bool
) -> None:
    engine = await span.load(is_head=is_head)
    assert (span.model.state, span.model.is_ready, span.model.is_reserved) == (ModelState.LOADED, is_head, not is_head)
    [told] = [one for one in list_replicas(span.bench.parts.pool.registry.models) if one.model == "big"]
    assert (told.state, told.gpus, told.replica_id) == ("loaded" if is_head else "reserved", [0, 1], "op.1")
    metrics, _ = await write_metrics(span.bench.parts)
    role = "head" if is_head else "member"
    assert f'muster_runner_replica_nodes{{model="big",role="{role}"}} 2.0' in metrics.decode()
    engine.ends = EngineError("the connection to other ended")
    engine.die()
    await eventually(lambda: not span.model.replicas, "it is let go of")
    assert (span.model.state, span.model.last_error) == (ModelState.FAILED, "the connection to other ended")
    assert (engine.steps, len(span.bench.engines)) == (["load", "kill"], 1), "nobody approved another load"
    await span.load(is_head=is_head)
    assert span.model.state is ModelState.LOADED


async def test_a_replica_that_was_unloaded_on_another_node_is_unloaded_here(span: Span) -> None:
    engine = await span.load(is_head=False)
    engine.ends = ReplicaUnloaded("other unloaded it")
    engine.die()
    await eventually(lambda: span.model.state is ModelState.UNLOADED, "it is unloaded")
    assert (span.model.replicas, span.model.last_error, span.model.plan) == ([], None, None)
    assert not [one for one in list_replicas(span.bench.parts.pool.registry.models) if one.model == "big"]


async def test_gpus_that_are_lent_to_a_replica_are_for_no_other_load(span: Span) -> None:
    engine = await span.load(is_head=False)
    with pytest.raises(WrongState, match="would be on GPU 1, which big holds for a replica over several nodes"):
        await span.loader.order("small", overrides={"gpus": [1, 2]})
    order = await span.loader.order("small", overrides={})
    assert isinstance(order, LoadOrder)
    assert order.plan.gpu_ids == (2,), "what is left of the three"
    span.loader.call_off(order)
    with pytest.raises(LoadConflict, match="over several nodes, with other as head"):
        await span.loader.order("big", overrides={})
    engine.ends = ReplicaUnloaded("other unloaded it")
    engine.die()
    await eventually(lambda: span.model.state is ModelState.UNLOADED, "it is unloaded")
    free = await span.loader.order("small", overrides={"gpus": [1, 2]})
    assert isinstance(free, LoadOrder)
    assert free.plan.gpu_ids == (1, 2)


async def test_an_unload_that_meets_the_end_of_the_replica_ends_once(span: Span) -> None:
    engine = await span.load(is_head=True)
    engine.may_unload.clear()
    unloading = asyncio.create_task(span.bench.unloader.unload("big", force=True))
    await eventually(lambda: span.model.state is ModelState.UNLOADING, "the unload is at it")
    engine.ends = EngineError("the connection to other ended")
    engine.has_died.set()
    engine.may_unload.set()
    assert (await unloading).was_loaded
    assert (span.model.state, span.model.replicas) == (ModelState.UNLOADED, [])
