"""The models of a node: definition, state, replicas, queue; those of an attached server too."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from runner.definitions.fields import Backend, ModelDefinition
from runner.definitions.plan import LoadPlan, Observation, Progress
from runner.engines.port import Capabilities, FlushOutcome
from runner.engines.remote import OpenAIServer
from runner.engines.supervisor import Supervisor
from runner.errors import EngineError, ModelFailed, ReplicaUnloaded, RunnerError, UnknownModel
from runner.library.files import WHISPER_SIZES, FoundModel
from runner.library.library import Library
from runner.queue import FairQueue
from runner.telemetry.memory import TreeMemory
from wire import clock

log = logging.getLogger(__name__)

NO_CAPABILITIES = Capabilities(endpoints=())


class ModelState(StrEnum):
    """The five states of the llm-pool specification."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class ModelEvent(StrEnum):
    """What happens to a model."""

    LOAD = "load"
    """Somebody wants it; replicas are being started."""
    SERVE = "serve"
    """Every replica answers."""
    FAIL = "fail"
    """A load did not come about, or an unload could not be carried out."""
    LOSE = "lose"
    """No replica serves any more; their supervisors go on trying."""
    RECOVER = "recover"
    """At least one replica serves again."""
    UNLOAD = "unload"
    """It is to go."""
    VANISH = "vanish"
    """Every replica is known to be gone."""


class IllegalTransition(RunnerError):
    """The event cannot happen in this state."""


_S, _E = ModelState, ModelEvent
TRANSITIONS: dict[tuple[ModelState, ModelEvent], ModelState] = {
    (_S.UNLOADED, _E.LOAD): _S.LOADING,
    (_S.FAILED, _E.LOAD): _S.LOADING,
    (_S.LOADING, _E.SERVE): _S.LOADED,
    (_S.LOADING, _E.FAIL): _S.FAILED,
    (_S.LOADING, _E.UNLOAD): _S.UNLOADING,
    (_S.LOADED, _E.LOSE): _S.FAILED,
    (_S.LOADED, _E.UNLOAD): _S.UNLOADING,
    (_S.FAILED, _E.RECOVER): _S.LOADED,
    (_S.FAILED, _E.UNLOAD): _S.UNLOADING,
    (_S.UNLOADING, _E.VANISH): _S.UNLOADED,
    (_S.UNLOADING, _E.FAIL): _S.FAILED,
}


def next_state(state: ModelState, event: ModelEvent) -> ModelState:
    """Return the state after ``event``. Raises IllegalTransition."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a model that is {state} cannot {event}") from None


@dataclass(slots=True, eq=False)
class Replica:
    """One loaded copy. ``memory`` is its process tree as last measured, None = not yet, or a server of somebody else's."""

    plan: LoadPlan
    supervisor: Supervisor
    active: int = 0
    memory: TreeMemory | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    learnt: Observation | None = None
    """What was written down when it was loaded."""

    @property
    def capabilities(self) -> Capabilities:
        return self.supervisor.engine.capabilities

    @property
    def context_tokens(self) -> int | None:
        """Tokens of one request, prompt and answer: as the engine says, else as planned. None = not known."""
        told = self.capabilities.context_tokens
        return self.plan.context_tokens if told is None else told

    @property
    def slots(self) -> int:
        """Requests it takes at once: what the plan says, within what the engine can."""
        most = self.capabilities.max_inflight
        return self.plan.slots if most is None else min(self.plan.slots, most)


def sum_known(sizes: Iterable[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if known else None


@dataclass(slots=True)
class LoadProgress:
    """How a load goes on. ``fraction`` over all replicas; ``expected_s`` is how long the last load like it took.

    ``evicted``: the model that it has unloaded to make room, "" = none so far.
    """

    started_at: float = field(default_factory=clock.monotonic)
    stage: str = "waiting"
    fraction: float | None = None
    expected_s: float | None = None
    evicted: str = ""

    def eta_s(self) -> float | None:
        """Return the seconds that are left: by the last load like it, else by what is done so far; None = cannot be told."""
        elapsed = clock.monotonic() - self.started_at
        done = self.fraction or 0.0
        if self.expected_s is not None:
            return max(0.0, self.expected_s - elapsed, self.expected_s * (1 - done) if done else 0.0)
        return elapsed * (1 - done) / done if done >= 0.05 else None


class Model:
    """A model of the node. Only ``runner.pool`` changes it."""

    def __init__(self, definition: ModelDefinition, queue: FairQueue, on_change: Callable[[], None]) -> None:
        self.definition = definition
        # It outlives loads, so that fairness has a memory.
        self.queue = queue
        self._on_change = on_change
        self.state = ModelState.UNLOADED
        self.replicas: list[Replica] = []
        self.overrides: dict[str, object] = {}
        self.plan: LoadPlan | None = None
        """What it is loaded by, or being loaded by; None = it is not, or it is a model of the server given with --backend."""
        self.files_quantization: str | None = None
        self.load: LoadProgress | None = None
        self.load_task: asyncio.Task[object] | None = None
        self.last_error: str | None = None
        self.loaded_at: float | None = None
        self.load_s: float | None = None
        self.predicted_bytes: int | None = None
        self.reserved_bytes = 0
        self.flush_task: asyncio.Task[FlushOutcome] | None = None
        self.flush_lock = asyncio.Lock()

    @property
    def model_id(self) -> str:
        return self.definition.model_id

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests here: not of a replica that another node serves."""
        cluster = None if self.plan is None else self.plan.cluster
        return self.state is ModelState.LOADED and (cluster is None or cluster.is_head)

    @property
    def is_reserved(self) -> bool:
        """Whether this node only lends GPUs to a replica of it that another node serves."""
        return self.plan is not None and self.plan.is_reserved

    @property
    def capabilities(self) -> Capabilities:
        """What its engine can do; nothing while there is none."""
        return self.replicas[0].capabilities if self.replicas else NO_CAPABILITIES

    @property
    def slots(self) -> int:
        """Requests it takes at once over the replicas that serve."""
        return sum(replica.slots for replica in self.replicas if replica.supervisor.is_ready)

    @property
    def active(self) -> int:
        return sum(replica.active for replica in self.replicas)

    @property
    def memory_bytes(self) -> int | None:
        """Measured memory of its replicas, None = not measured."""
        return sum_known(replica.memory.held_bytes for replica in self.replicas if replica.memory is not None)

    def apply(self, event: ModelEvent, *, error: str | None = None) -> None:
        self.state = next_state(self.state, event)
        if error is not None:
            self.last_error = error
        elif event in {ModelEvent.SERVE, ModelEvent.RECOVER, ModelEvent.VANISH}:
            self.last_error = None
        self._on_change()

    def show_progress(self, progress: Progress) -> None:
        if self.load is not None:
            self.load.stage = progress.stage
            self.load.fraction = progress.fraction
            self._on_change()

    def serve(self, *, load_s: float) -> None:
        """Every replica answers, ``load_s`` seconds after the load began."""
        self.load, self.reserved_bytes = None, 0
        self.loaded_at, self.load_s = clock.unix_s(), load_s
        self.apply(ModelEvent.SERVE)
        self.engines_changed()
        log.info("model loaded model=%s replicas=%s seconds=%.2f", self.model_id, len(self.replicas), load_s)

    def engines_changed(self) -> None:
        """A supervisor's state changed: follow it, and offer as many slots as there are serving replicas."""
        supervisors = [replica.supervisor for replica in self.replicas]
        is_ready = any(supervisor.is_ready for supervisor in supervisors)
        error = next((supervisor.last_error for supervisor in supervisors if supervisor.last_error), None)
        if self.state is ModelState.LOADED and not is_ready:
            self.apply(ModelEvent.LOSE, error=error or "no replica serves")
        elif self.state is ModelState.FAILED and is_ready:
            self.apply(ModelEvent.RECOVER)
        elif self.state is ModelState.FAILED:
            self.last_error = error or self.last_error
        if self.state is ModelState.LOADED:
            self.queue.resize(max(1, self.slots))
        self._on_change()

    def end_replica(self, error: EngineError) -> None:
        """Let go of a replica over several nodes that is over: unloaded elsewhere, or lost with a member."""
        self.replicas, self.predicted_bytes, self.loaded_at = [], None, None
        if self.state is not ModelState.FAILED:  # an unload is under way, and says itself how it ends
            return
        if isinstance(error, ReplicaUnloaded):
            self.overrides, self.plan = {}, None
            self.apply(ModelEvent.UNLOAD)
            self.apply(ModelEvent.VANISH)
        else:
            self.last_error = str(error)
            self._on_change()
        log.warning("replica over several nodes ended model=%s reason=%s", self.model_id, error)

    def pick(self) -> Replica | None:
        """Return the serving replica with the most free room, or None."""
        ready = [replica for replica in self.replicas if replica.supervisor.is_ready]
        return min(ready, key=lambda replica: replica.active / max(1, replica.slots), default=None)


class Registry:
    """``make_queue`` gives a model its queue; ``on_change`` hears of every change."""

    def __init__(
        self, *, library: Library, make_queue: Callable[[ModelDefinition], FairQueue], on_change: Callable[[], None]
    ) -> None:
        self.library = library
        self._make_queue = make_queue
        self._on_change = on_change
        self._models: dict[str, Model] = {}
        self.found: list[FoundModel] = []
        """The model files as last looked through, damaged ones with their problem."""

    @property
    def problems(self) -> dict[str, str]:
        return {entry.model_id: entry.problem for entry in self.found if entry.problem is not None}

    @property
    def models(self) -> list[Model]:
        """Every model, configured ones first, in the order they became known."""
        return list(self._models.values())

    def find(self, model_id: str) -> Model:
        """Return a model. Raises UnknownModel, and ModelFailed for one whose files are there and cannot be used."""
        model = self._models.get(model_id)
        if model is None and (problem := self.problems.get(model_id)) is not None:
            raise ModelFailed(f"{model_id} cannot be loaded: {problem}")
        if model is None:
            raise UnknownModel(f"There is no model {model_id!r} on this node. GET /v1/capabilities lists what can be loaded.")
        return model

    def find_or_plan(self, model_id: str) -> Model:
        """Return a model; one that is not here but may be fetched is returned without becoming known.

        ``define`` its definition once somebody was allowed to load it. Raises UnknownModel.
        """
        size = WHISPER_SIZES.get(model_id)
        is_there = size is not None and size in self._models
        if model_id in self._models or not (is_there or self.library.can_fetch(size or model_id)):
            return self.find(model_id)
        # What it is shows when it is here; a single file can only be a GGUF.
        backend: Backend = "whisper" if size else "gguf" if model_id.endswith(".gguf") else "vllm"
        definition = ModelDefinition(model_id=model_id, backend=backend, is_configured=False)
        return Model(definition, self._make_queue(definition), lambda: None)

    def ready_ids(self) -> list[str]:
        return [model.model_id for model in self._models.values() if model.is_ready]

    def available_ids(self) -> list[str]:
        free = {ModelState.UNLOADED, ModelState.FAILED}
        return [model.model_id for model in self._models.values() if model.state in free]

    def define(self, definition: ModelDefinition) -> Model:
        model = self._models.get(definition.model_id)
        if model is None:
            model = Model(definition, self._make_queue(definition), self._on_change)
            self._models[definition.model_id] = model
            self._on_change()
        elif model.state in {ModelState.UNLOADED, ModelState.FAILED} and model.definition != definition:
            model.definition = definition
            self._on_change()
        return model

    def forget(self, model_id: str) -> None:
        """Drop a model that is not loaded; one that is stays."""
        model = self._models.get(model_id)
        if model is not None and model.state in {ModelState.UNLOADED, ModelState.FAILED} and not model.replicas:
            del self._models[model_id]
            self._on_change()

    async def discover(self) -> list[FoundModel]:
        """Look through the model files: new ones become known, vanished ones are forgotten. Returns what was found."""
        self.found = found = await asyncio.to_thread(self.library.discover)
        usable = {entry.model_id: entry for entry in found if entry.problem is None}
        for entry in usable.values():
            if entry.model_id not in self._models:
                self.define(ModelDefinition(model_id=entry.model_id, backend=entry.backend, is_configured=False))
        for model in self.models:
            if not model.definition.is_configured and model.model_id not in usable:
                self.forget(model.model_id)
        return found

    def attach(self, definition: ModelDefinition, plan: LoadPlan, supervisor: Supervisor, queue: FairQueue) -> None:
        """Offer a model of a server of somebody else's, ready as long as that answers; a model of ours by that name stays."""
        model = self.define(definition)
        if model.definition.backend != definition.backend:
            return
        model.queue = queue  # one for all models of the server: its slots are shared
        if model.state is ModelState.UNLOADED:
            model.replicas = [Replica(plan, supervisor)]
            model.apply(ModelEvent.LOAD)
        if model.state is not ModelState.LOADING:
            model.engines_changed()
        elif supervisor.is_ready:
            model.serve(load_s=0.0)
        elif supervisor.last_error is not None:
            model.apply(ModelEvent.FAIL, error=supervisor.last_error)

    def detach(self, model_id: str) -> None:
        """Withdraw a model that its server no longer lists; requests that run go on, those that wait hear it at their turn."""
        model = self._models.pop(model_id, None)
        if model is not None:
            # The queue is left alone: requests for the server's other models wait in it too.
            model.apply(ModelEvent.UNLOAD)
            model.apply(ModelEvent.VANISH)


class AttachedServer:
    """Follows one server. ``queue`` is shared by its models, because its slots are; ``given``: models named by the owner.

    ``translate`` and ``tidies``: as in the definitions of its models.
    """

    def __init__(
        self, registry: Registry, queue: FairQueue, *, url: str, key: str, given: Sequence[str], slots: int, silent_s: float,
        translate: tuple[str, ...] = (), tidies: bool = False,
    ) -> None:  # fmt: skip
        self._registry = registry
        self._queue = queue
        self._slots = slots
        self._translate = translate
        self._tidy = True if tidies else None
        self._server = OpenAIServer(url, key=key, given=given, on_models=self._follow)
        self.supervisor = Supervisor(self._server, silent_s=silent_s, on_change=self._follow)

    def start(self) -> None:
        """Begin to follow it; a server that is not there yet is asked again and again."""
        self._follow()
        self.supervisor.keep_trying(lambda _progress: None)

    def refresh(self) -> None:
        self.supervisor.check_soon()

    async def close(self) -> None:
        await self.supervisor.unload(gently=True)

    def _follow(self) -> None:
        wanted = self._server.models
        for model in self._registry.models:
            if model.definition.backend == "attached" and model.model_id not in wanted:
                self._registry.detach(model.model_id)
        plan = LoadPlan(model_id="", backend="attached", slots=self._slots)
        for name in wanted:
            definition = ModelDefinition(
                model_id=name, backend="attached", target_inflight=self._slots, translate=self._translate, tidy=self._tidy
            )
            self._registry.attach(definition, plan, self.supervisor, self._queue)
