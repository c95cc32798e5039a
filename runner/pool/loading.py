"""Loading: check and reserve, then evict, fetch, start every replica or none, measure and learn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from runner.definitions.definition import ModelDefinition
from runner.definitions.overrides import check_overrides, make_plan
from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.port import Engine
from runner.engines.supervisor import Supervisor
from runner.errors import ModelUnloading, RunnerError
from runner.pool.capacity import Capacity, Prediction
from runner.pool.model import LoadProgress, Model, Replica
from runner.pool.registry import Registry
from runner.pool.states import ModelEvent, ModelState
from runner.pool.unloading import Unloader, stop_replicas

ELSEWHERE = frozenset({"llama_server", "tabbyapi", "tgi", "comfyui", "openai_compatible"})
"""Backends whose weights are not files of ours."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load that was accepted: memory is reserved and the state is ``loading`` until ``Pool.carry_out`` has ended."""

    model: Model
    plan: LoadPlan
    replicas: int
    prediction: Prediction
    evictee: Model | None
    must_fetch: bool


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a load came to. Bytes are measured, None when they cannot be; ``predicted_bytes`` is what was expected."""

    model_id: str
    replicas: int
    load_s: float
    memory_bytes: int | None
    predicted_bytes: int | None
    evicted: str | None


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How loads are made. ``defaults`` are the environment's VLLM_* words;"""

    threads: int = 1
    gpu_ids: tuple[int, ...] = ()
    silent_s: float = 10.0
    defaults: Mapping[str, str] = field(default_factory=dict)


class Loader:
    """``make_engine`` gives an adapter for a plan."""

    def __init__(
        self, registry: Registry, *, capacity: Capacity, unloader: Unloader, options: LoadOptions,
        make_engine: Callable[[LoadPlan], Engine],
    ) -> None:  # fmt: skip
        self._registry = registry
        self._capacity = capacity
        self._unloader = unloader
        self._options = options
        self._make_engine = make_engine
        self.failed_loads = 0

    def check(self, model: Model, overrides: Mapping[str, object]) -> None:
        """Raise what can be told of a load without looking at files or memory: ModelUnloading, InvalidLoadRequest."""
        _refuse_unloading(model)
        check_overrides(model.definition, overrides)

    async def order(self, model_id: str, *, overrides: Mapping[str, object], evict: str | None = None) -> LoadOrder | Model:
        """Check a load and reserve its memory; returns the model itself when it is loaded or being loaded already.

        Raises UnknownModel, ModelUnloading, InvalidLoadRequest, InsufficientMemory, and RunnerError for damaged files.
        """
        model = self._registry.find(model_id)
        if _is_there(model):
            return model
        _refuse_unloading(model)
        evictee = self._registry.find(evict) if evict is not None and evict != model_id else None
        wanted = check_overrides(model.definition, overrides)
        path = await self._locate(model.definition)
        must_fetch = path is None and model.definition.backend not in ELSEWHERE
        plan = self._plan(model.definition, wanted, path)
        replicas = _replicas(model.definition, wanted)
        prediction = await self._capacity.predict(plan) if not must_fetch else Prediction(None, None, None)
        reading = await self._capacity.read()
        # From here to the end nothing waits: two loads that race for the same memory are decided one after the other.
        if _is_there(model):
            return model
        _refuse_unloading(model)
        reserved = self._capacity.decide(
            model, plan, prediction, replicas=replicas, reading=reading, models=self._registry.models, evictee=evictee,
            found=self._registry.found,
        )  # fmt: skip
        model.reserved_bytes, model.predicted_bytes = reserved, reserved or None
        model.overrides, model.load = dict(wanted), LoadProgress(expected_s=prediction.expected_s)
        model.apply(ModelEvent.LOAD)
        return LoadOrder(model, plan, replicas, prediction, evictee, must_fetch)

    async def carry_out(self, order: LoadOrder, report: Report) -> LoadResult:
        """Load every replica, or none. Raises EngineError or another RunnerError; the memory is given back then."""
        model, began = order.model, time.monotonic()
        model.load_task = asyncio.current_task()

        def tell(progress: Progress) -> None:
            model.show_progress(progress)
            report(progress)

        try:
            evicted = await self._evict(order, tell)
            plan, prediction = await self._fetch(order, tell)
            await self._start_replicas(order, plan, tell)
        except BaseException as error:
            await self._give_up(model, error)
            raise
        finally:
            model.load_task = None
        load_s = time.monotonic() - began
        for replica in model.replicas:
            await self._capacity.measure(replica)
            await self._capacity.learn(replica, prediction, load_s=load_s / max(1, order.replicas))
        model.serve(load_s=load_s)
        return LoadResult(
            model.model_id, order.replicas, load_s, model.memory_bytes, model.predicted_bytes,
            evicted.model_id if evicted is not None else None,
        )  # fmt: skip

    def start_wanted(self, model: Model, plan: LoadPlan) -> None:
        """Load, in the background and until it serves, a model that the owner's settings switch on."""
        model.is_wanted = True
        model.load = LoadProgress()
        model.apply(ModelEvent.LOAD)
        supervisor = Supervisor(
            self._make_engine(plan), silent_s=self._options.silent_s, on_change=lambda: self._follow_wanted(model)
        )
        model.replicas = [Replica(plan, supervisor)]
        supervisor.keep_trying(model.show_progress)

    async def _locate(self, definition: ModelDefinition) -> Path | None:
        """Return where the weights are; None = they must be fetched, or are none of ours. Raises InvalidRequest."""
        if definition.backend in ELSEWHERE:
            return None
        if definition.is_configured and definition.model_path is not None:
            # The owner's own settings may name any place on the box; what a request names is resolved by the library.
            given = PurePath(definition.model_path)
            if given.is_absolute():
                return Path(given)
        find = self._registry.library.find
        return await asyncio.to_thread(find, definition.model_path or definition.model_id, revision=definition.revision)

    def _plan(self, definition: ModelDefinition, wanted: Mapping[str, object], path: Path | None) -> LoadPlan:
        options = self._options
        return make_plan(
            definition, overrides=wanted, path=path, threads=options.threads, gpu_ids=options.gpu_ids, defaults=options.defaults
        )

    async def _evict(self, order: LoadOrder, tell: Report) -> Model | None:
        if order.evictee is None:
            return None
        tell(Progress(f"unloading {order.evictee.model_id}", 0.0))
        await self._unloader.unload(order.evictee.model_id)
        return order.evictee

    async def _fetch(self, order: LoadOrder, tell: Report) -> tuple[LoadPlan, Prediction]:
        """Fetch the files when they are not here, then decide about the memory that only now is known."""
        if not order.must_fetch:
            return order.plan, order.prediction
        definition = order.model.definition
        wanted = definition.model_path or definition.model_id
        path = await self._registry.library.fetch(wanted, revision=definition.revision, report=tell)
        plan = self._plan(definition, order.model.overrides, path)
        prediction = await self._capacity.predict(plan)
        reading = await self._capacity.read()
        reserved = self._capacity.decide(
            order.model, plan, prediction, replicas=order.replicas, reading=reading, models=self._registry.models, evictee=None
        )
        order.model.reserved_bytes, order.model.predicted_bytes = reserved, reserved or None
        return plan, prediction

    async def _start_replicas(self, order: LoadOrder, plan: LoadPlan, tell: Report) -> None:
        model, count = order.model, order.replicas
        await stop_replicas(model, gently=False)
        for index in range(count):

            def tell_share(progress: Progress, index: int = index) -> None:
                done = None if progress.fraction is None else (index + progress.fraction) / count
                tell(Progress(progress.stage if count == 1 else f"replica {index + 1} of {count}: {progress.stage}", done))

            supervisor = Supervisor(self._make_engine(plan), silent_s=self._options.silent_s, on_change=model.engines_changed)
            model.replicas.append(Replica(plan, supervisor))
            await supervisor.load(tell_share)

    async def _give_up(self, model: Model, error: BaseException) -> None:
        """Leave nothing of a load that failed or was cancelled."""
        words = str(error) if isinstance(error, RunnerError) else "the load was cancelled"
        await stop_replicas(model, gently=False)
        model.reserved_bytes, model.load = 0, None
        if model.state is ModelState.LOADING:
            self.failed_loads += 1
            model.apply(ModelEvent.FAIL, error=words)

    def _follow_wanted(self, model: Model) -> None:
        supervisor = model.replicas[0].supervisor
        if model.state is ModelState.LOADING and supervisor.is_ready:
            model.serve(load_s=time.monotonic() - model.load.started_at if model.load is not None else 0.0)
        elif model.state is ModelState.LOADING and supervisor.last_error is not None:
            model.load = None
            model.apply(ModelEvent.FAIL, error=supervisor.last_error)
        else:
            model.engines_changed()


def _is_there(model: Model) -> bool:
    return model.state in {ModelState.LOADED, ModelState.LOADING}


def _refuse_unloading(model: Model) -> None:
    if model.state is ModelState.UNLOADING:
        raise ModelUnloading(f"{model.model_id} is being unloaded; load it when that has ended.", retry_after_s=5)


def _replicas(definition: ModelDefinition, wanted: Mapping[str, object]) -> int:
    asked = wanted.get("replicas")
    return asked if isinstance(asked, int) else definition.replicas
