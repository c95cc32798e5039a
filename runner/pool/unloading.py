"""Unloading and flushing: let requests finish or cut them, have the engines go, and see that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from dataclasses import dataclass

from runner.engines.port import FlushOutcome, FlushRequest, FlushResult, FlushScope
from runner.errors import AttachedModel, EngineError, ModelLoading, ModelNotLoaded, ModelUnloading
from runner.limits import limits
from runner.pool.capacity import Capacity
from runner.pool.models import Model, Registry, Replica
from runner.pool.states import ModelEvent, ModelState

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnloadResult:
    """What an unload freed: bytes of the model's processes before and after; ``cut`` requests were ended by it."""

    model_id: str
    before_bytes: int
    after_bytes: int
    cut: int
    was_loaded: bool


class Unloader:
    """``drain_s`` bounds how long a gentle unload waits for what runs."""

    def __init__(self, registry: Registry, *, capacity: Capacity, drain_s: float) -> None:
        self._registry = registry
        self._capacity = capacity
        self._drain_s = drain_s
        self._running: dict[str, asyncio.Task[UnloadResult]] = {}
        self._forced: dict[str, asyncio.Event] = {}

    async def unload(self, model_id: str, *, force: bool = False) -> UnloadResult:
        """Unload a model and see that it is gone; a second call while one runs waits for the same end.

        Raises UnknownModel, AttachedModel, ModelLoading (unless forced), EngineError when it does not go.
        """
        model = self._registry.find(model_id)
        running = self._running.get(model_id)
        if running is None:
            if model.definition.backend == "attached":
                raise AttachedModel(model_id)
            if model.state is ModelState.LOADING and not force:
                raise ModelLoading(f"{model_id} is being loaded; wait for it, or unload it with force.", retry_after_s=5)
            if model.state is ModelState.UNLOADED:
                return UnloadResult(model_id, 0, 0, 0, was_loaded=False)
            self._forced[model_id] = forced = asyncio.Event()
            self._running[model_id] = running = asyncio.create_task(self._unload(model, forced))
            running.add_done_callback(lambda done: self._forget(model_id, done))
        if force:
            self._forced[model_id].set()
        return await asyncio.shield(running)

    async def flush(self, model: Model, request: FlushRequest) -> FlushOutcome:
        """Clear what the replicas of a loaded model keep between requests; nothing is granted meanwhile.

        One flush after another. Raises ModelNotLoaded, ModelUnloading when an unload or load comes first, EngineError.
        """
        async with model.flush_lock:
            if not model.is_ready:
                raise ModelNotLoaded(f"{model.model_id} is {model.state}, so there is nothing to flush.")
            model.flush_task = work = asyncio.create_task(self._flush(model, request))
            try:
                await asyncio.wait({work})
            finally:
                model.flush_task = None
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            if work.cancelled():
                raise ModelUnloading(f"{model.model_id} was unloaded or loaded anew before the flush had ended.")
            return work.result()

    async def _flush(self, model: Model, request: FlushRequest) -> FlushOutcome:
        model.queue.pause()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(model.queue.wait_idle(), limits().engines.flush_idle_s)
            outcomes = [await self._flush_replica(model, replica, request) for replica in list(model.replicas)]
        finally:
            model.queue.resume()
        return _join(outcomes)

    async def close(self) -> None:
        """Unload everything, killing what does not go."""
        for model in self._registry.models:
            if model.load_task is not None:
                model.load_task.cancel()
        unloads = list(self._running.values())
        for unload in unloads:
            unload.cancel()
        await asyncio.gather(*unloads, return_exceptions=True)
        supervisors = {replica.supervisor for model in self._registry.models for replica in model.replicas}
        await asyncio.gather(*(supervisor.unload(gently=True) for supervisor in supervisors), return_exceptions=True)

    def _forget(self, model_id: str, done: asyncio.Task[UnloadResult]) -> None:
        del self._running[model_id], self._forced[model_id]
        if not done.cancelled() and (error := done.exception()) is not None:
            log.error("model was not unloaded model=%s error=%s", model_id, error)

    async def _unload(self, model: Model, forced: asyncio.Event) -> UnloadResult:
        while model.load_task is not None:
            model.load_task.cancel()
            await asyncio.gather(model.load_task, return_exceptions=True)
        # Nothing has waited since: from here on nobody loads or flushes it.
        model.apply(ModelEvent.UNLOAD)
        model.load, model.reserved_bytes = None, 0
        try:
            return await self._take_away(model, forced)
        except BaseException as error:
            model.apply(ModelEvent.FAIL, error=str(error) or "the unload was cut off")
            raise

    async def _take_away(self, model: Model, forced: asyncio.Event) -> UnloadResult:
        model.queue.cancel_waiting(ModelUnloading(f"{model.model_id} is being unloaded."))
        await end_flush(model)
        before = await self._memory_of(model)
        await _wait_any(model.queue.wait_idle(), forced.wait(), limit_s=self._drain_s)
        cut = model.active
        roots = [pid for replica in model.replicas for pid in replica.supervisor.engine.pids]
        await stop_replicas(model, gently=not forced.is_set())
        await _wait_any(model.queue.wait_idle(), limit_s=limits().engines.cut_s)
        after = await self._capacity.measure_roots(roots)
        model.predicted_bytes, model.loaded_at, model.overrides, model.plan = None, None, {}, None
        model.apply(ModelEvent.VANISH)
        log.info("model unloaded model=%s freed_mb=%s", model.model_id, (before - after) >> 20)
        return UnloadResult(model.model_id, before, after, cut, was_loaded=True)

    async def _memory_of(self, model: Model) -> int:
        for replica in model.replicas:
            await self._capacity.measure(replica)
            await self._capacity.learn_again(replica)
        return model.memory_bytes or 0

    async def _flush_replica(self, model: Model, replica: Replica, request: FlushRequest) -> FlushOutcome:
        engine = replica.supervisor.engine
        outcome = await engine.flush(request)
        wide = request.scope in {FlushScope.ALL, FlushScope.MODEL}
        if (
            outcome.result is not FlushResult.NOT_SUPPORTED
            or not wide
            or not engine.pids
            or not engine.capabilities.prefix_caching
        ):
            return outcome
        if model.active:
            return FlushOutcome(FlushResult.REFUSED_BUSY, "the engine can only be reloaded, and requests run on it")
        await replica.supervisor.unload(gently=True)
        try:
            await replica.supervisor.load(model.show_progress)
        except EngineError:
            replica.supervisor.keep_trying(model.show_progress)  # it served before: a flush must not take it away for good
            raise
        return FlushOutcome(FlushResult.RELOADED, "the engine was reloaded")


async def end_flush(model: Model) -> None:
    """Have a flush that is under way end where it stands, with nothing half loaded."""
    if model.flush_task is not None:
        model.flush_task.cancel()
        await asyncio.gather(model.flush_task, return_exceptions=True)


async def _wait_any(*events: Coroutine[None, None, object], limit_s: float) -> None:
    """Return when one of them is over, or the limit."""
    waits = [asyncio.create_task(event) for event in events]
    try:
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def stop_replicas(model: Model, *, gently: bool) -> None:
    """Unload every replica; those that refuse stay in the list. Raises EngineError with the first refusal."""
    kept, refusal = [], None
    for replica in model.replicas:
        try:
            await replica.supervisor.unload(gently=gently)
        except EngineError as error:
            kept.append(replica)
            refusal = refusal or error
    model.replicas = kept
    if refusal is not None:
        raise refusal


def _join(outcomes: list[FlushOutcome]) -> FlushOutcome:
    """Return one outcome for all replicas: the least that was reached, the sums of what was counted."""
    order = [
        FlushResult.REFUSED_BUSY,
        FlushResult.NOT_SUPPORTED,
        FlushResult.RELOADED,
        FlushResult.FLUSHED,
        FlushResult.NOTHING_KEPT,
    ]
    worst = min(outcomes, key=lambda outcome: order.index(outcome.result))
    entries = [outcome.entries_removed for outcome in outcomes if outcome.entries_removed is not None]
    freed = [outcome.memory_freed_mb for outcome in outcomes if outcome.memory_freed_mb is not None]
    return FlushOutcome(worst.result, worst.detail, sum(entries) if entries else None, sum(freed) if freed else None)
