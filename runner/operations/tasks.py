"""Lifecycle operations: checked, carried out once they are let in, answered in the words of the model-runner specification."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from runner.definitions.plan import Progress
from runner.definitions.settings import SettingsChange
from runner.engines.port import FlushRequest, FlushResult, FlushScope
from runner.errors import InvalidRequest, RunnerError, Unavailable, UnknownTask, WrongState
from runner.ledger import Ledger, LedgerError, OpRow, TaskRow, TaskState
from runner.limits import MIB, limits
from runner.operations.bodies import FlushBody, LoadBody, ReloadBody, Reply, UnloadBody
from runner.operations.desired_state import PARAM
from runner.operations.executions import CUT_OFF, Begun, Ending, Executions
from runner.operations.gate import Gate
from runner.operations.outcomes import failure_fields, flush_fields, load_result, reload_fields
from runner.operations.receipts import Clerk
from runner.pool import LoadOrder, Model, ModelState, Pool
from wire import clock
from wire.optoken import Operation

log = logging.getLogger(__name__)


Done = TypeVar("Done")
OnBegin = Callable[[], None]


def _tell_nobody() -> None:
    """Nobody follows an operation that came over HTTP."""


async def _begin(on_begin: OnBegin, work: Awaitable[Done]) -> Done:
    on_begin()
    return await work


@dataclass(frozen=True, slots=True)
class LoadView:
    """How a load that runs goes on. ``fraction`` 0.0 to 1.0; None = cannot be told."""

    stage: str
    fraction: float | None
    eta_s: float | None


class Operations:
    """``params`` of each call is the decoded request body without its token: what a token may bind."""

    def __init__(self, pool: Pool, gate: Gate, ledger: Ledger, clerk: Clerk) -> None:
        self._pool = pool
        self._ledger = ledger
        self._clerk = clerk
        self._executions = Executions(self, gate, ledger, clerk)
        self._tasks: dict[str, TaskRow] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._news: dict[str, asyncio.Event] = {}
        self._task_of: dict[str, str] = {}
        self._starting = 0
        self._is_closing = False

    @property
    def is_stopping(self) -> bool:
        """Whether no operation is let in any more."""
        return self._executions.is_stopping

    def refuse_new(self) -> None:
        """Let no operation in any more; what runs goes on."""
        self._executions.is_stopping = True

    async def recover(self) -> None:
        """Close the tasks that an earlier process left unfinished."""
        for row in await self._ledger.interrupt_tasks(clock.unix_s()):
            log.warning("load was interrupted by the end of the runner task=%s model=%s", row.task_id, row.model_id)

    async def close(self) -> None:
        """Cancel the loads under way and wait for them; unloads and flushes may go on for a while."""
        self._is_closing = True
        self.refuse_new()
        await self._cancel_loads()
        await self._executions.close()
        await self._cancel_loads()  # one that was let in before the end may have begun since

    async def _cancel_loads(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # The operations. What a token has let in is carried out to its end, also when the caller leaves meanwhile.

    # ``on_begin`` is called, and must not block, once nothing can refuse an operation any more but itself.

    async def load(self, body: LoadBody, params: Mapping[str, object], *, on_begin: OnBegin = _tell_nobody) -> Reply:
        """Start a load: 202 with its task; 200 when the model is loaded already. Raises RequestRefused."""
        overrides = _overrides(body)
        if body.keepLoaded and self._clerk.identity is None:
            raise InvalidRequest(
                "To keep a model loaded the node needs a place to remember it: start it with --data DIR.", param=PARAM
            )
        model = self._pool.registry.find_or_plan(body.modelId)
        self._pool.loader.check(model, overrides)
        if body.evictModel is not None:
            self._pool.registry.find(body.evictModel)
        return await self._executions.run(
            body.verifiedOpToken,
            Operation.MODEL_LOAD,
            body.modelId,
            params,
            lambda: _begin(on_begin, self._start_load(body, overrides)),
        )

    async def unload(self, body: UnloadBody, params: Mapping[str, object], *, on_begin: OnBegin = _tell_nobody) -> Reply:
        """Unload a model and answer when it is gone. Raises RequestRefused, EngineError."""
        if body.modelId not in self._ledger.desired_fences:  # else its files may be gone, and it must not be desired for ever
            self._pool.registry.find(body.modelId)
        return await self._executions.run(
            body.verifiedOpToken, Operation.MODEL_UNLOAD, body.modelId, params, lambda: _begin(on_begin, self._unload(body))
        )

    async def flush(self, body: FlushBody, params: Mapping[str, object], *, on_begin: OnBegin = _tell_nobody) -> Reply:
        """Flush what the scope names and say for each model what came of it. Raises RequestRefused."""
        self._flush_targets(body)
        return await self._executions.run(
            body.verifiedOpToken, Operation.CACHE_FLUSH, body.modelId, params, lambda: _begin(on_begin, self._flush(body))
        )

    async def reload_settings(
        self, body: ReloadBody, read_again: Callable[[], Awaitable[SettingsChange]], *, on_begin: OnBegin = _tell_nobody
    ) -> Reply:
        """Have ``read_again`` take over the settings files and say what that changed. Raises RequestRefused.

        A model that is loaded and would change, or a file that cannot be used, ends the operation: that is its signed outcome.
        """

        async def read() -> Reply:
            return Reply(200, reload_fields(await read_again()))

        return await self._executions.run(
            body.verifiedOpToken, Operation.SETTINGS_RELOAD, None, {}, lambda: _begin(on_begin, read())
        )

    async def load_again(self, body: LoadBody) -> dict[str, object]:
        """Load a model that is to stay loaded, and return its task once that has ended. Raises RequestRefused, LedgerError.

        This is no new run of an operation: it needs no token and has no receipt. The caller has verified what was approved.
        """
        if self.is_stopping:
            raise Unavailable("The box is shutting down.", retry_after_s=5)
        overrides = _overrides(body)
        self._pool.loader.check(self._pool.registry.find_or_plan(body.modelId), overrides)
        try:
            begun = await self._start_load(body, overrides)
        except RunnerError as error:
            self._pool.loader.note_refusal(body.modelId, error)
            raise
        if isinstance(begun, Begun):
            return await self.wait(begun.task_id)
        return {**begun.body, "status": "completed"}  # somebody else has loaded it, or is about to

    async def find(self, op_id: str, use: int) -> OpRow | None:
        """Return one use of an approval as it was booked here, None when it never was. Raises LedgerError."""
        return await self._executions.find(op_id, use)

    def describe_now(self, model_id: str | None) -> dict[str, object]:
        """Return what the box has loaded at this moment: a model's state, and the names of all that are ready."""
        registry = self._pool.registry
        states = {model.model_id: model.state.value for model in registry.models}
        state = "all" if model_id is None else states.get(model_id, "unknown")
        return {"modelId": model_id, "state": state, "loaded": registry.ready_ids()}

    # Tasks

    async def read_task(self, task_id: str) -> dict[str, object]:
        """Return a load task as JSON members. Raises UnknownTask."""
        row = self._tasks.get(task_id) or await self._ledger.read_task(task_id)
        if row is None:
            raise UnknownTask(f"There is no load task {task_id!r} here; the newest 1000 are kept.")
        return self._show(row)

    async def wait(self, task_id: str) -> dict[str, object]:
        """Return a load task once it has ended. Raises UnknownTask."""
        running = self._running.get(task_id)
        if running is not None:
            await asyncio.shield(asyncio.gather(running, return_exceptions=True))
        return await self.read_task(task_id)

    def view(self, task_id: str) -> LoadView | None:
        """Return how a load goes on, None when it has ended."""
        row = self._tasks.get(task_id)
        if row is None or task_id not in self._running:
            return None
        load = next((model.load for model in self._pool.registry.models if model.model_id == row.model_id), None)
        return LoadView(row.stage, row.fraction, None if load is None else load.eta_s())

    async def wait_news(self, task_id: str, *, within_s: float) -> None:
        """Return when a load has something new to say, or has ended, or after so many seconds."""
        if task_id in self._running:
            news = self._news.setdefault(task_id, asyncio.Event())
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the news.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await news.wait()

    def _tell_news(self, task_id: str) -> None:
        news = self._news.pop(task_id, None)
        if news is not None:
            news.set()

    def _show(self, row: TaskRow) -> dict[str, object]:
        shown: dict[str, object] = {
            "taskId": row.task_id,
            "status": row.state.value,
            "modelId": row.model_id,
            "stage": row.stage,
        }
        if row.state is TaskState.LOADING:
            load = self._pool.registry.find(row.model_id).load
            eta = load.eta_s() if load is not None else None
            shown |= {"progress": round(row.fraction or 0.0, 3), "eta": None if eta is None else round(eta)}
        else:
            shown["progress"] = 1.0 if row.state is TaskState.COMPLETED else round(row.fraction or 0.0, 3)
        if row.error:
            shown["error"] = row.error
        return {**shown, **row.result, "startedAt": int(row.started_at)}

    async def _start_load(self, body: LoadBody, overrides: Mapping[str, object]) -> Reply | Begun:
        if len(self._running) + self._starting >= limits().operations.loads:
            raise WrongState(f"{limits().operations.loads} loads are under way; wait for one to end.")
        self._starting += 1
        try:
            return await self._begin_load(body, overrides)
        finally:
            self._starting -= 1

    async def _begin_load(self, body: LoadBody, overrides: Mapping[str, object]) -> Reply | Begun:
        registry = self._pool.registry
        registry.define(registry.find_or_plan(body.modelId).definition)
        order = await self._pool.loader.order(body.modelId, overrides=overrides, evict=body.evictModel)
        if isinstance(order, Model):
            return await self._already(order)
        task_id = f"load-{secrets.token_hex(8)}"
        row = TaskRow(
            task_id=task_id, model_id=order.model.model_id, state=TaskState.LOADING, stage="waiting", fraction=0.0,
            started_at=clock.unix_s(),
        )  # fmt: skip
        self._tasks[task_id], self._task_of[row.model_id] = row, task_id
        try:
            # Written before it begins, so that a runner killed from here on finds it and says "interrupted".
            await self._ledger.save_task(row)
        except BaseException:
            self._pool.loader.call_off(order)
            del self._tasks[task_id], self._task_of[row.model_id]
            raise
        self._running[task_id] = task = asyncio.create_task(self._carry_out(order, task_id))
        task.add_done_callback(_report_failure)
        return Begun(task_id, Reply(202, self._show(row)))

    async def _already(self, model: Model) -> Reply | Begun:
        task_id = self._task_of.get(model.model_id)
        if model.state is ModelState.LOADING and task_id is not None:
            # Nothing may wait between this look and the caller's note that it follows the task.
            if task_id in self._running:
                return Begun(task_id, Reply(202, self._show(self._tasks[task_id])))
            return Reply(202, await self.read_task(task_id))
        memory = model.memory_bytes
        return Reply(
            202 if model.state is ModelState.LOADING else 200,
            {
                "taskId": task_id, "status": "loading" if model.state is ModelState.LOADING else "completed",
                "modelId": model.model_id, "gpuMemoryUsedMB": None if memory is None else memory // MIB,
                "loadTimeMs": None if model.load_s is None else round(model.load_s * 1000), "alreadyLoaded": True,
                "evicted": None,
            },
        )  # fmt: skip

    async def _carry_out(self, order: LoadOrder, task_id: str) -> None:
        """Carry a load out and say how it ended, whatever happens."""
        saved_at = clock.monotonic()

        def note(progress: Progress) -> None:
            nonlocal saved_at
            before = self._tasks[task_id]
            row = replace(before, stage=progress.stage, fraction=progress.fraction)
            self._tasks[task_id] = row
            self._tell_news(task_id)
            if row.stage != before.stage or clock.monotonic() - saved_at >= limits().operations.task_save_gap_s:
                saved_at = clock.monotonic()
                saves.add(save := asyncio.create_task(self._save(row)))
                save.add_done_callback(saves.discard)

        saves: set[asyncio.Task[bool]] = set()
        changes: dict[str, Any] = {
            "state": TaskState.FAILED, "error": "it failed in an unexpected way; the log of this box says how",
            "result": {"code": "model_load_failed"},
        }  # fmt: skip
        try:
            result = await self._pool.loader.carry_out(order, note)
            changes = {"state": TaskState.COMPLETED, "stage": "ready", "fraction": 1.0, "result": load_result(result)}
        except RunnerError as error:
            changes |= {"error": str(error), "result": failure_fields(error)}
        except asyncio.CancelledError:
            state = TaskState.INTERRUPTED if self._is_closing else TaskState.FAILED
            changes = {"state": state, "error": "the load was cancelled", "result": {}}
            raise
        finally:
            row = replace(self._tasks[task_id], finished_at=clock.unix_s(), **changes)
            await self._end(row, saves, unloaded=order.progress.evicted)

    async def _end(self, row: TaskRow, saves: set[asyncio.Task[bool]], *, unloaded: str) -> None:
        """Say the last word on a load, and write it down after everything that was said before it."""
        try:
            ending = replace(_ending(row, self._show(row)), unloaded=unloaded)
            if receipt := await self._executions.end_task(row.task_id, ending):
                row = replace(row, result={**row.result, "receipt": receipt})
            self._tasks[row.task_id] = row
            if self._task_of.get(row.model_id) == row.task_id and row.state is not TaskState.COMPLETED:
                del self._task_of[row.model_id]
            await asyncio.gather(*saves)
            if await self._save(row):
                del self._tasks[row.task_id]  # else this process alone knows how it ended
        finally:
            del self._running[row.task_id]
            self._tell_news(row.task_id)

    async def _save(self, row: TaskRow) -> bool:
        """Return whether a task is on disk; a load does not end because its progress cannot be written."""
        try:
            await self._ledger.save_task(row)
        except LedgerError as error:
            log.warning("load task was not written down task=%s error=%s", row.task_id, error)
            return False
        return True

    # Steps of unload and flush

    async def _unload(self, body: UnloadBody) -> Reply:
        known = any(model.model_id == body.modelId for model in self._pool.registry.models)
        if not known:
            return Reply(200, {"modelId": body.modelId, "gpuMemoryFreedMB": 0, "kvCacheFlushed": True, "wasLoaded": False})
        result = await self._pool.unloader.unload(body.modelId, force=body.force)
        self._task_of.pop(body.modelId, None)
        return Reply(
            200,
            {
                "modelId": result.model_id, "gpuMemoryFreedMB": max(0, result.before_bytes - result.after_bytes) // MIB,
                "kvCacheFlushed": True, "memoryBeforeMB": result.before_bytes // MIB,
                "memoryAfterMB": result.after_bytes // MIB, "requestsCut": result.cut, "wasLoaded": result.was_loaded,
            },
        )  # fmt: skip

    def _flush_targets(self, body: FlushBody) -> list[Model]:
        needed = {FlushScope.MODEL: "modelId", FlushScope.TENANT: "tenantId", FlushScope.TAG: "tag"}.get(body.scope)
        if needed is not None and not getattr(body, needed):
            raise InvalidRequest(f"The scope {body.scope!s} needs {needed}.", param=needed)
        if body.modelId is not None:  # also with "all": the token names this model and no other
            return [self._pool.registry.find(body.modelId)]
        return [model for model in self._pool.registry.models if model.is_ready]

    async def _flush(self, body: FlushBody) -> Reply:
        request = FlushRequest(body.scope, tenant=body.tenantId, tag=body.tag)
        # Of several, one may have been unloaded while the others were flushed; then nothing is left in it.
        outcomes = [
            (model.model_id, await self._pool.unloader.flush(model, request))
            for model in self._flush_targets(body)
            if model.is_ready or body.modelId is not None
        ]
        entries = [outcome.entries_removed for _, outcome in outcomes if outcome.entries_removed is not None]
        freed = [outcome.memory_freed_mb for _, outcome in outcomes if outcome.memory_freed_mb is not None]
        done = {FlushResult.FLUSHED, FlushResult.RELOADED, FlushResult.NOTHING_KEPT}
        return Reply(
            200,
            {
                # With nothing loaded nothing is kept either.
                "flushed": all(outcome.result in done for _, outcome in outcomes),
                "entriesRemoved": sum(entries) if entries else None, "memoryFreedMB": sum(freed) if freed else None,
                "models": [flush_fields(model_id, outcome) for model_id, outcome in outcomes],
            },
        )  # fmt: skip


def _ending(row: TaskRow, shown: dict[str, object]) -> Ending:
    """Return how the operation behind a load ended."""
    match row.state:
        case TaskState.COMPLETED:
            return Ending("succeeded", 200, shown)
        case TaskState.INTERRUPTED:
            return CUT_OFF
        case _:
            return Ending("failed", 200, shown)


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("load failed unexpectedly", exc_info=error)


def _overrides(body: LoadBody) -> dict[str, object]:
    """Return the overrides of a load: the backend's own fields and those of the specification that were given."""
    named = {
        "quantization": body.quantization, "maxContextLength": body.maxContextLength,
        "gpuMemoryBudgetMB": body.gpuMemoryBudgetMB,
    }  # fmt: skip
    return {**body.overrides, **{name: value for name, value in named.items() if value is not None}}
