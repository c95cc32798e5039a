"""Loads and unloads of models, and flushes of what they keep."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

import msgspec

from runner.definitions.fields import GPU_BACKENDS, ModelDefinition
from runner.definitions.plan import (
    CONTEXT_FIELDS,
    Cluster,
    LoadPlan,
    Progress,
    Report,
    asked_gpus,
    check_overrides,
    choose_gpus,
    find_conflicts,
    make_plan,
)
from runner.engines.port import Engine, FlushOutcome, FlushRequest, FlushResult, FlushScope
from runner.engines.supervisor import Supervisor
from runner.errors import (
    AttachedModel,
    CorruptModel,
    EngineError,
    InvalidLoadRequest,
    LoadConflict,
    ModelLoading,
    ModelNotLoaded,
    ModelUnloading,
    RunnerError,
    WrongState,
)
from runner.library.files import WHISPER_SIZES
from runner.limits import limits
from runner.pool.capacity import Capacity, Prediction
from runner.pool.models import LoadProgress, Model, ModelEvent, ModelState, Registry, Replica
from runner.telemetry import Reading
from wire import clock

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
                # Not wait_for, which in Python 3.11 swallows a cancellation that comes as the last request ends: an unload
                # would then wait for the whole flush, a reload of the engine included.
                async with asyncio.timeout(limits().engines.flush_idle_s):
                    await model.queue.wait_idle()
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
        is_wide = request.scope in {FlushScope.ALL, FlushScope.MODEL}
        can_reload = is_wide and engine.pids and engine.capabilities.prefix_caching
        if outcome.result is not FlushResult.NOT_SUPPORTED or not can_reload:
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
    # For all replicas: the least that was reached, and the sums of what was counted.
    order = [
        FlushResult.REFUSED_BUSY, FlushResult.NOT_SUPPORTED, FlushResult.RELOADED, FlushResult.FLUSHED,
        FlushResult.NOTHING_KEPT,
    ]  # fmt: skip
    worst = min(outcomes, key=lambda outcome: order.index(outcome.result))
    entries = [outcome.entries_removed for outcome in outcomes if outcome.entries_removed is not None]
    freed = [outcome.memory_freed_mb for outcome in outcomes if outcome.memory_freed_mb is not None]
    return FlushOutcome(worst.result, worst.detail, sum(entries) if entries else None, sum(freed) if freed else None)


ELSEWHERE = frozenset({"llama_server", "tabbyapi", "tgi", "comfyui", "openai_compatible"})
"""Backends that are servers of somebody else's."""
CHECKPOINTS_DIR = Path("/opt/comfyui/models/checkpoints")
"""Where the model-runner specification has ComfyUI's checkpoints."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load that was accepted: memory is reserved and the state is ``loading`` until ``carry_out`` has ended, or ``call_off``.

    ``progress`` tells it from a later load of the same model.
    """

    model: Model
    progress: LoadProgress
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


class Loader:
    """``make_engine`` gives an adapter for a plan. ``defaults`` are the environment's VLLM_* words."""

    def __init__(
        self, registry: Registry, *, capacity: Capacity, unloader: Unloader, make_engine: Callable[[LoadPlan], Engine],
        threads: int, gpu_ids: tuple[int, ...], defaults: Mapping[str, str],
    ) -> None:  # fmt: skip
        self._registry = registry
        self._capacity = capacity
        self._unloader = unloader
        self._threads = threads
        self._gpu_ids = gpu_ids
        self._defaults = defaults
        self._make_engine = make_engine
        self.failed_loads = 0

    def check(self, model: Model, overrides: Mapping[str, object]) -> None:
        """Raise what can be told of a load without looking at files or memory.

        These are AttachedModel, ModelUnloading and InvalidLoadRequest.
        """
        _refuse_attached(model)
        _refuse_unloading(model)
        check_overrides(model.definition, overrides)

    async def order(
        self, model_id: str, *, overrides: Mapping[str, object], evict: str | None = None, cluster: Cluster | None = None
    ) -> LoadOrder | Model:
        """Check a load and reserve its memory; returns the model itself when it is loaded, or being loaded, as asked for.

        ``cluster``: the replica is over several nodes, of which this is one.

        Raises LoadConflict when it is loaded otherwise, UnknownModel, AttachedModel, ModelUnloading, InvalidLoadRequest,
        InsufficientMemory, WrongState for settings that changed meanwhile, ModelLoading for an ``evict`` that is on its way in,
        and RunnerError for damaged files.
        """
        model = self._registry.find(model_id)
        _refuse_attached(model)
        definition = model.definition
        wanted = check_overrides(definition, overrides)
        if _is_there(model):
            return _refuse_other_load(model, wanted, overrides, cluster)
        _refuse_unloading(model)
        if cluster is not None:
            _refuse_cluster(definition, count_replicas(definition, wanted))
        evictee = self._registry.find(evict) if evict is not None and evict != model_id else None
        path = await self._locate(definition)
        must_fetch = path is None and not is_elsewhere(model.definition)
        plan = await self._plan(definition, wanted, path, cluster)
        replicas = count_replicas(definition, wanted)
        prediction = await self._capacity.predict(plan) if not must_fetch else Prediction(None, None, None)
        reading = await self._capacity.read()
        # From here to the end nothing waits: two loads that race for the same memory are decided one after the other.
        model = self._registry.find(model_id)  # meanwhile it may have been forgotten, and another be known by its name
        if _is_there(model):
            return _refuse_other_load(model, wanted, overrides, cluster)
        _refuse_unloading(model)
        self._refuse_held_gpus(plan)
        if model.definition != definition:
            raise WrongState(f"The settings of {model_id} changed while its load was checked; load it again.")
        if evictee is not None:
            _refuse_eviction(evictee)
        self._reserve(model, plan, prediction, replicas=replicas, reading=reading, evictee=evictee)
        model.overrides, model.load = dict(wanted), LoadProgress(expected_s=prediction.expected_s)
        model.apply(ModelEvent.LOAD)
        return LoadOrder(model, model.load, plan, replicas, prediction, evictee, must_fetch)

    def call_off(self, order: LoadOrder) -> None:
        if order.model.load is order.progress:
            self._fail(order.model, "the load was called off before it began")

    async def carry_out(self, order: LoadOrder, report: Report) -> LoadResult:
        """Load every replica, or none. Raises EngineError or another RunnerError; the memory is given back then.

        WrongState: the model was unloaded by force before this began.
        """
        model, began = order.model, clock.monotonic()
        if model.load is not order.progress:
            raise WrongState(f"The load of {model.model_id} was ended before it began.")
        model.load_task = asyncio.current_task()

        def tell(progress: Progress) -> None:
            model.show_progress(progress)
            report(progress)

        try:
            plan, prediction = await self._fetch(order, tell)
            evicted = await self._evict(order, tell)
            await self._start_replicas(order, plan, tell)
            load_s = clock.monotonic() - began
            for replica in model.replicas:
                await self._capacity.measure(replica)
                await self._capacity.learn(replica, prediction, load_s=load_s / max(1, order.replicas))
            model.serve(load_s=load_s)
        except BaseException as error:
            await self._give_up(model, error)
            raise
        finally:
            model.load_task = None
        return LoadResult(
            model.model_id, order.replicas, load_s, model.memory_bytes, model.predicted_bytes,
            evicted.model_id if evicted is not None else None,
        )  # fmt: skip

    def start_wanted(self, model: Model, plan: LoadPlan) -> None:
        """Load, in the background and until it serves, a model that the owner's settings switch on."""
        progress = model.load = LoadProgress()
        model.plan = plan
        model.apply(ModelEvent.LOAD)

        def follow() -> None:
            # A later load of the model may be under way while this one is being ended: that one says itself how it went.
            if model.state is not ModelState.LOADING or model.load is not progress:
                model.engines_changed()
            elif supervisor.is_ready:
                model.serve(load_s=clock.monotonic() - progress.started_at)
            elif supervisor.last_error is not None:
                model.load = None
                model.apply(ModelEvent.FAIL, error=supervisor.last_error)

        supervisor = Supervisor(self._make_engine(plan), silent_s=limits().engines.silent_s, on_change=follow)
        model.replicas = [Replica(plan, supervisor)]
        supervisor.keep_trying(model.show_progress)

    def note_refusal(self, model_id: str, error: RunnerError) -> None:
        """Have a model that the owner's settings switch on, and whose load was refused, say so."""
        for model in self._registry.models:  # it may have been taken out of the settings meanwhile
            if model.model_id == model_id and model.state is ModelState.UNLOADED:
                model.apply(ModelEvent.LOAD)
                self._fail(model, str(error))

    async def _locate(self, definition: ModelDefinition) -> Path | None:
        if is_elsewhere(definition):
            return None
        if definition.is_configured and definition.model_path is not None:
            # The owner's own settings may name any place on the node; what a request names is resolved by the library.
            given = PurePath(definition.model_path)
            if given.is_absolute():
                return Path(given)
        find = self._registry.library.find
        found = await asyncio.to_thread(find, definition.model_path or definition.model_id, revision=definition.revision)
        if found is None and (repo := _whisper_repo(definition)) is not None:
            return await asyncio.to_thread(find, repo, revision=definition.revision)
        return found

    async def _plan(
        self, definition: ModelDefinition, wanted: Mapping[str, object], path: Path | None, cluster: Cluster | None
    ) -> LoadPlan:
        asked = asked_gpus(wanted)
        reading = await self._capacity.read() if definition.device != "cpu" else None
        held = self._find_held_gpus()
        given, found = self._gpu_ids, reading.engine_ids if reading is not None else ()
        if not asked and (free := tuple(index for index in given or found if index not in held)):
            given = free if given else ()
            found = free if not given else found
        gpu_ids = choose_gpus(
            definition, given=given, found=found, asked=asked,
            free_mb=reading.free_of_gpus if reading is not None else None,
        )  # fmt: skip
        return make_plan(
            definition, overrides=wanted, path=path, threads=self._threads, gpu_ids=gpu_ids, defaults=self._defaults,
            cluster=cluster,
        )  # fmt: skip

    def _find_held_gpus(self) -> dict[int, str]:
        """Return the GPUs that this node gives to replicas over several nodes, each with the model."""
        return {
            index: model.model_id
            for model in self._registry.models
            if model.plan is not None and model.plan.cluster is not None and _is_there(model)
            for index in model.plan.gpu_ids
        }

    def _refuse_held_gpus(self, plan: LoadPlan) -> None:
        held = self._find_held_gpus()
        taken = [index for index in plan.gpu_ids if index in held]
        # llama.cpp takes whatever it finds where no GPU is named for it.
        if plan.backend in GPU_BACKENDS and not plan.gpu_ids and plan.options.get("device") != "cpu":
            taken = list(held)
        if taken:
            raise WrongState(
                f"{plan.model_id} would be on GPU {', '.join(map(str, taken))}, which {held[taken[0]]} holds for a replica "
                "over several nodes; name other GPUs (gpus), or unload that one."
            )

    async def _evict(self, order: LoadOrder, tell: Report) -> Model | None:
        if order.evictee is None:
            return None
        tell(Progress(f"unloading {order.evictee.model_id}", 0.0))
        await self._unloader.unload(order.evictee.model_id)
        order.progress.evicted = order.evictee.model_id
        return order.evictee

    async def _fetch(self, order: LoadOrder, tell: Report) -> tuple[LoadPlan, Prediction]:
        definition = order.model.definition
        if definition.backend == "comfyui" and definition.model_path:
            await self._place_checkpoint(definition, tell)
        if not order.must_fetch:
            return order.plan, order.prediction
        wanted = _whisper_repo(definition) or definition.model_path or definition.model_id
        path = await self._registry.library.fetch(wanted, revision=definition.revision, report=tell)
        if not definition.is_configured:
            definition = await self._recognise(order.model)
        plan = await self._plan(definition, order.model.overrides, path, order.plan.cluster)
        prediction = await self._capacity.predict(plan)
        reading = await self._capacity.read()
        self._reserve(order.model, plan, prediction, replicas=order.replicas, reading=reading, evictee=order.evictee)
        return plan, prediction

    def _reserve(
        self, model: Model, plan: LoadPlan, prediction: Prediction, *, replicas: int, reading: Reading, evictee: Model | None
    ) -> None:
        reserved = self._capacity.decide(
            model, plan, prediction, replicas=replicas, reading=reading, models=self._registry.models, evictee=evictee,
            found=self._registry.found,
        )  # fmt: skip
        model.reserved_bytes, model.predicted_bytes, model.plan = reserved, reserved or None, plan
        model.files_quantization = prediction.shape.quantization if prediction.shape else None

    async def _place_checkpoint(self, definition: ModelDefinition, tell: Report) -> None:
        assert definition.model_path is not None
        given = definition.options.get("comfyui_checkpoints_dir")
        folder = Path(str(given)) if given else CHECKPOINTS_DIR
        if not await asyncio.to_thread(folder.is_dir):
            if given:
                raise EngineError(f"comfyui_checkpoints_dir: there is no folder {folder}")
            # Without a folder in the settings and without that of ComfyUI's images the server is elsewhere, and has the file or
            # not.
            return
        await self._registry.library.place(definition.model_path, folder, revision=definition.revision, report=tell)

    async def _recognise(self, model: Model) -> ModelDefinition:
        """Give a model that was fetched the backend that its files are for. Raises CorruptModel for files that are for none."""
        for entry in await self._registry.discover():
            if entry.model_id == model.model_id:
                if entry.problem is not None:
                    raise CorruptModel(f"{model.model_id} was fetched and cannot be loaded: {entry.problem}")
                model.definition = msgspec.structs.replace(model.definition, backend=entry.backend)
        return model.definition

    async def _start_replicas(self, order: LoadOrder, plan: LoadPlan, tell: Report) -> None:
        model, count = order.model, order.replicas
        await end_flush(model)
        # Those of a model that failed go on trying by themselves.
        await stop_replicas(model, gently=False)
        for index in range(count):

            def tell_share(progress: Progress, index: int = index) -> None:
                done = None if progress.fraction is None else (index + progress.fraction) / count
                tell(Progress(progress.stage if count == 1 else f"replica {index + 1} of {count}: {progress.stage}", done))

            engine, silent_s = self._make_engine(plan), limits().engines.silent_s
            # A replica over several nodes is over when one of them is lost: people approve the next.
            supervisor = Supervisor(
                engine, silent_s=silent_s, on_change=model.engines_changed,
                on_end=None if plan.cluster is None else model.end_replica,
            )  # fmt: skip
            model.replicas.append(Replica(plan, supervisor))
            await supervisor.load(tell_share)

    async def _give_up(self, model: Model, error: BaseException) -> None:
        was_cancelled = isinstance(error, asyncio.CancelledError)
        words = "the load was cancelled" if was_cancelled else str(error) or type(error).__name__
        try:
            await stop_replicas(model, gently=False)
        except EngineError as refusal:
            words = f"{words}; and the engine did not go: {refusal}"
        finally:
            self._fail(model, words)

    def _fail(self, model: Model, words: str) -> None:
        model.reserved_bytes, model.load = 0, None
        if model.state is ModelState.LOADING:
            self.failed_loads += 1
            model.apply(ModelEvent.FAIL, error=words)


@dataclass(frozen=True, slots=True)
class Pool:
    """The parts that share one set of models."""

    registry: Registry
    loader: Loader
    unloader: Unloader
    capacity: Capacity


def _whisper_repo(definition: ModelDefinition) -> str | None:
    named = definition.model_path or definition.model_id
    return WHISPER_SIZES.get(named) if definition.backend == "whisper" else None


def is_elsewhere(definition: ModelDefinition) -> bool:
    """Return whether the weights are no files of ours, because a server of somebody else's holds them."""
    return definition.backend in ELSEWHERE and "tgi_launcher" not in definition.options


def _is_there(model: Model) -> bool:
    return model.state in {ModelState.LOADED, ModelState.LOADING}


def _refuse_other_load(
    model: Model, wanted: Mapping[str, object], given: Mapping[str, object], cluster: Cluster | None
) -> Model:
    """Return a model that is there as ``wanted``. Raises LoadConflict otherwise; ``given``: the names that the caller used."""
    held = model.plan.cluster if model.plan is not None else None
    if cluster is not None or held is not None:
        where = "on this node alone" if held is None else f"over several nodes, with {held.head.name} as head"
        raise LoadConflict(f"{model.model_id} is {model.state} {where}; nothing was changed. Unload it first.")
    if model.plan is None:
        return model
    told = model.replicas[0].context_tokens if model.replicas else None
    found = find_conflicts(
        model.plan, wanted, replicas=count_replicas(model.definition, model.overrides), context_tokens=told,
        files=model.files_quantization,
    )  # fmt: skip
    if not found:
        return model
    context_field = CONTEXT_FIELDS.get(model.definition.backend)
    named = {"maxContextLength" if name == context_field and name not in given else name: pair for name, pair in found.items()}
    words = ", ".join(f"{name} {_say(held)} instead of {_say(asked)}" for name, (held, asked) in named.items())
    raise LoadConflict(
        f"{model.model_id} is {model.state} with {words}; nothing was changed. Unload it before it is loaded otherwise.",
        details={"conflicts": [{"name": name, "inForce": held, "asked": asked} for name, (held, asked) in named.items()]},
    )


def _refuse_cluster(definition: ModelDefinition, replicas: int) -> None:
    if definition.backend != "vllm":
        raise InvalidLoadRequest(
            f"members: {definition.model_id} runs on {definition.backend}; only vLLM spreads a replica over nodes.",
            param="members",
        )
    if replicas > 1:
        raise InvalidLoadRequest("members: a load over several nodes makes one replica; leave replicas at 1.", param="members")


def _say(value: object) -> str:
    return "nothing set" if value is None else str(value)


def _refuse_attached(model: Model) -> None:
    if model.definition.backend == "attached":
        raise AttachedModel(model.model_id)


def _refuse_eviction(evictee: Model) -> None:
    _refuse_attached(evictee)
    if evictee.state is ModelState.LOADING:
        raise ModelLoading(f"{evictee.model_id} is being loaded, so it cannot be evicted; wait for it.", retry_after_s=5)


def _refuse_unloading(model: Model) -> None:
    if model.state is ModelState.UNLOADING:
        raise ModelUnloading(f"{model.model_id} is being unloaded; load it when that has ended.", retry_after_s=5)


def count_replicas(definition: ModelDefinition, wanted: Mapping[str, object]) -> int:
    """Return how many replicas a load makes: what its overrides ask for, else what the settings say."""
    asked = wanted.get("replicas")
    return asked if isinstance(asked, int) else definition.replicas
