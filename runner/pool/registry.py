"""The models the box knows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runner.admission import FairQueue
from runner.definitions.definition import Backend, ModelDefinition
from runner.definitions.plan import LoadPlan
from runner.engines.supervisor import Supervisor
from runner.errors import ModelFailed, UnknownModel
from runner.library import FoundModel, Library
from runner.library.ids import WHISPER_SIZES
from runner.pool.model import Model, Replica
from runner.pool.states import ModelEvent, ModelState


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
        """Models among the files that cannot be loaded, and why."""
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
            raise UnknownModel(f"There is no model {model_id!r} on this box. GET /v1/capabilities lists what can be loaded.")
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
        return Model(definition, self._make_queue(definition), _tell_nobody)

    def ready_ids(self) -> list[str]:
        """Return the models that can be served now."""
        return [model.model_id for model in self._models.values() if model.is_ready]

    def available_ids(self) -> list[str]:
        """Return the models that could be loaded."""
        free = {ModelState.UNLOADED, ModelState.FAILED}
        return [model.model_id for model in self._models.values() if model.state in free]

    def define(self, definition: ModelDefinition) -> Model:
        """Add a model, or give one that is not loaded a new definition."""
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


def _tell_nobody() -> None:
    """Nobody follows a model that is not known yet."""
