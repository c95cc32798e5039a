"""Lifecycle operations: checked, let in by the gate, carried out, answered in the words of the model-runner specification."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from runner.definitions.plan import Progress
from runner.engines.port import FlushRequest, FlushResult, FlushScope
from runner.errors import (
    InvalidRequest,
    OperationInterrupted,
    RunnerError,
    Unavailable,
    UnknownTask,
    WrongState,
)
from runner.ledger import Ledger, LedgerError, TaskRow, TaskState
from runner.ledger.approvals import INTERRUPTED
from runner.operations.gate import Admitted, Gate
from runner.operations.outcomes import MIB, failure_fields, flush_fields, load_result, refusal_outcome
from runner.pool import LoadOrder, Model, ModelState, Pool
from wire.optoken import Operation

log = logging.getLogger(__name__)

TASK_SAVE_GAP_S = 1.0
"""Progress is written to the ledger at most this often; a new stage and the last word always are."""
CLOSE_S = 10.0
"""How long an unload or flush may go on when the runner is told to end."""
MAX_LOADS = 8
"""Loads under way at once."""


class LoadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/models/load``. ``overrides`` are the backend's own fields; the others are those of the specification."""

    modelId: str  # noqa: N815  # names of the specification, here and below
    quantization: str | None = None
    maxContextLength: int | None = None  # noqa: N815
    gpuMemoryBudgetMB: int | None = None  # noqa: N815
    evictModel: str | None = None  # noqa: N815
    overrides: dict[str, object] = {}
    verifiedOpToken: Any = None  # noqa: N815  # Any: an object, its text, or base64url of it


class UnloadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/models/unload``. ``force`` ends what runs instead of waiting for it."""

    modelId: str  # noqa: N815
    force: bool = False
    verifiedOpToken: Any = None  # noqa: N815  # as above


class FlushBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/cache/flush``."""

    scope: FlushScope
    tenantId: str | None = None  # noqa: N815
    modelId: str | None = None  # noqa: N815
    tag: str | None = None
    verifiedOpToken: Any = None  # noqa: N815  # as above


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP status and a JSON object."""

    status: int
    body: dict[str, object]


class Operations:
    """``params`` of each call is the decoded request body without its token: what a token may bind."""

    def __init__(self, pool: Pool, gate: Gate, ledger: Ledger) -> None:
        self._pool = pool
        self._gate = gate
        self._ledger = ledger
        self._tasks: dict[str, TaskRow] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._task_of: dict[str, str] = {}
        self._governed: set[asyncio.Task[Reply]] = set()
        self._starting = 0
        self._is_closing = False
        self.is_stopping = False
        """No operation is let in any more."""

    async def recover(self) -> None:
        """Close the tasks that an earlier process left unfinished."""
        for row in await self._ledger.interrupt_tasks(time.time()):
            log.warning("load was interrupted by the end of the runner task=%s model=%s", row.task_id, row.model_id)

    async def close(self) -> None:
        """Cancel the loads under way and wait for them; unloads and flushes may go on for a while."""
        self._is_closing = self.is_stopping = True
        await self._cancel_loads()
        if self._governed:
            _, late = await asyncio.wait(self._governed, timeout=CLOSE_S)
            for each in late:
                each.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._cancel_loads()  # one that was let in before the end may have begun since

    async def _cancel_loads(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # The three operations. What a token has let in is carried out to its end, also when the caller leaves meanwhile.

    async def load(self, body: LoadBody, params: Mapping[str, object]) -> Reply:
        """Start a load: 202 with its task; 200 when the model is loaded already. Raises RequestRefused."""
        overrides = _overrides(body)
        model = self._pool.registry.find_or_plan(body.modelId)
        self._pool.loader.check(model, overrides)
        if body.evictModel is not None:
            self._pool.registry.find(body.evictModel)
        return await self._shielded(self._govern(
            body.verifiedOpToken, Operation.MODEL_LOAD, body.modelId, params, lambda: self._start_load(body, overrides)
        ))  # fmt: skip

    async def unload(self, body: UnloadBody, params: Mapping[str, object]) -> Reply:
        """Unload a model and answer when it is gone. Raises RequestRefused, EngineError."""
        self._pool.registry.find(body.modelId)
        return await self._shielded(self._govern(
            body.verifiedOpToken, Operation.MODEL_UNLOAD, body.modelId, params, lambda: self._unload(body)
        ))  # fmt: skip

    async def flush(self, body: FlushBody, params: Mapping[str, object]) -> Reply:
        """Flush what the scope names and say for each model what came of it. Raises RequestRefused."""
        self._flush_targets(body)
        return await self._shielded(self._govern(
            body.verifiedOpToken, Operation.CACHE_FLUSH, body.modelId, params, lambda: self._flush(body)
        ))  # fmt: skip

    async def _shielded(self, work: Coroutine[None, None, Reply]) -> Reply:
        task = asyncio.create_task(work)
        self._governed.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Reply]) -> None:
        self._governed.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RunnerError):
            log.critical("operation failed unexpectedly", exc_info=error)

    async def _govern(
        self, token: object, operation: Operation, model_id: str | None, params: Mapping[str, object],
        carry_out: Callable[[], Awaitable[Reply]],
    ) -> Reply:  # fmt: skip
        """Let an operation in, carry it out, and write down how it went."""
        if self.is_stopping:
            raise Unavailable("The box is shutting down.", retry_after_s=5)
        admitted = await self._gate.admit(token, operation=operation, model_id=model_id, params=params)
        if admitted.recorded is not None:
            return await self._repeat(admitted.recorded)
        outcome: dict[str, object] = {"status": 500, "body": {"error": {"code": "internal_error", "message": "See the log."}}}
        try:
            reply = await carry_out()
            outcome = {"status": reply.status, "body": reply.body}
        except asyncio.CancelledError:
            outcome = dict(INTERRUPTED)
            raise
        except LedgerError as error:
            log.error("operation ended, the ledger failed operation=%s error=%s", operation, error)  # noqa: TRY400
            refusal = Unavailable("The ledger of this box cannot be used, so the operation was not carried out.")
            outcome = refusal_outcome(refusal)
            raise refusal from None
        except RunnerError as error:
            outcome = refusal_outcome(error)
            raise
        finally:
            await self._record(admitted, outcome)
        return reply

    async def _record(self, admitted: Admitted, outcome: dict[str, object]) -> None:
        try:
            await self._gate.finish(admitted, outcome)
        except LedgerError as error:
            # It was done, and its token is spent: the caller must hear how it went even if nobody else will.
            log.error("outcome of an operation was not recorded operation=%s error=%s", admitted.operation, error)  # noqa: TRY400

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

    async def _start_load(self, body: LoadBody, overrides: Mapping[str, object]) -> Reply:
        if len(self._running) + self._starting >= MAX_LOADS:
            raise WrongState(f"{MAX_LOADS} loads are under way; wait for one to end.")
        self._starting += 1
        try:
            return await self._begin_load(body, overrides)
        finally:
            self._starting -= 1

    async def _begin_load(self, body: LoadBody, overrides: Mapping[str, object]) -> Reply:
        registry = self._pool.registry
        registry.define(registry.find_or_plan(body.modelId).definition)
        order = await self._pool.loader.order(body.modelId, overrides=overrides, evict=body.evictModel)
        if isinstance(order, Model):
            return await self._already(order)
        task_id = f"load-{secrets.token_hex(8)}"
        row = TaskRow(
            task_id=task_id, model_id=order.model.model_id, state=TaskState.LOADING, stage="waiting", fraction=0.0,
            started_at=time.time(),
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
        return Reply(202, self._show(row))

    async def _already(self, model: Model) -> Reply:
        task_id = self._task_of.get(model.model_id)
        if model.state is ModelState.LOADING and task_id is not None:
            return Reply(202, await self.read_task(task_id))
        memory = model.memory_bytes
        return Reply(
            202 if model.state is ModelState.LOADING else 200,
            {
                "taskId": task_id, "status": "loading" if model.state is ModelState.LOADING else "completed",
                "modelId": model.model_id, "gpuMemoryUsedMB": None if memory is None else memory // MIB,
                "loadTimeMs": None if model.load_s is None else round(model.load_s * 1000), "alreadyLoaded": True,
            },
        )  # fmt: skip

    async def _carry_out(self, order: LoadOrder, task_id: str) -> None:
        """Carry a load out and say how it ended, whatever happens."""
        saved_at = time.monotonic()

        def note(progress: Progress) -> None:
            nonlocal saved_at
            before = self._tasks[task_id]
            row = replace(before, stage=progress.stage, fraction=progress.fraction)
            self._tasks[task_id] = row
            if row.stage != before.stage or time.monotonic() - saved_at >= TASK_SAVE_GAP_S:
                saved_at = time.monotonic()
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
            await self._end(replace(self._tasks[task_id], finished_at=time.time(), **changes), saves)

    async def _end(self, row: TaskRow, saves: set[asyncio.Task[bool]]) -> None:
        """Say the last word on a load, and write it down after everything that was said before it."""
        self._tasks[row.task_id] = row
        if self._task_of.get(row.model_id) == row.task_id and row.state is not TaskState.COMPLETED:
            del self._task_of[row.model_id]
        try:
            await asyncio.gather(*saves)
            if await self._save(row):
                del self._tasks[row.task_id]  # else this process alone knows how it ended
        finally:
            del self._running[row.task_id]

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
        done = {FlushResult.FLUSHED, FlushResult.RELOADED}
        return Reply(
            200,
            {
                "flushed": bool(outcomes) and all(outcome.result in done for _, outcome in outcomes),
                "entriesRemoved": sum(entries) if entries else None, "memoryFreedMB": sum(freed) if freed else None,
                "models": [flush_fields(model_id, outcome) for model_id, outcome in outcomes],
            },
        )  # fmt: skip

    async def _repeat(self, recorded: Mapping[str, object]) -> Reply:
        """Answer an operation that was carried out before: the task as it stands now, else the same words again."""
        if recorded.get("state") == "interrupted":
            raise OperationInterrupted(
                "This operation was cut off by a restart of the box. See GET /v1/capabilities for what is loaded, "
                "then ask for a new token."
            )
        status, body = recorded.get("status"), recorded.get("body")
        shown = dict(body) if isinstance(body, dict) else {}
        task_id = shown.get("taskId")
        if isinstance(task_id, str) and status == 202:
            return Reply(200, {**await self.read_task(task_id), "repeated": True})
        return Reply(status if isinstance(status, int) else 200, {**shown, "repeated": True})


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
