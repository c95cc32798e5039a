"""Facts of the node's models, loaded or not: what memory a load takes, how many replicas it may have, what it may set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.api.shapes import Shapes
from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import load_constraints
from runner.limits import MIB
from runner.parts import Parts
from runner.pool import Model
from runner.pool.loading import is_elsewhere
from wire.bridge import ModelFacts


async def list_facts(parts: Parts, shapes: Shapes, *, most: int) -> list[ModelFacts]:
    """Return what gateways are told of the models, loaded and configured ones first. Raises LedgerError.

    Models of the server given with ``--backend`` are left out: that server alone loads them.
    """
    models = [model for model in parts.pool.registry.models if model.definition.backend != "attached"]
    models.sort(key=lambda model: (not model.replicas, not model.definition.is_configured))
    return [await _describe(parts, shapes, model) for model in models[:most]]


async def estimate_memory(parts: Parts, shapes: Shapes, model: Model) -> tuple[int | None, str, int]:
    """Return bytes, where they come from in llm-pool's words, and for how many replicas they are. Raises LedgerError."""
    if model.memory_bytes is not None:
        return model.memory_bytes, "observed_load_delta", len(model.replicas)
    wanted = wanted_replicas(model)
    seen = await parts.ledger.observations(model.definition.backend)
    for observation in seen:
        if observation.model_id == model.model_id and observation.measured_bytes:
            return observation.measured_bytes * wanted, "observed_load_delta", wanted
    size = await _file_size(parts, shapes, model)
    return (None, "unavailable", wanted) if size is None else (size * wanted, "model_artifact_size", wanted)


def wanted_replicas(model: Model) -> int:
    """Return how many replicas a load makes: what the last one asked for, else what the settings say."""
    asked = model.overrides.get("replicas")
    return asked if isinstance(asked, int) else model.definition.replicas


def effective_inflight(model: Model) -> int:
    """Return the requests that one replica takes at once: what is wanted, within what its engine can."""
    if model.replicas:
        return min(replica.slots for replica in model.replicas)
    asked = model.overrides.get("target_inflight")
    return asked if isinstance(asked, int) else model.definition.target_inflight


def name_constraints(definition: ModelDefinition) -> dict[str, dict[str, Any]]:  # Any: JSON
    """Return the constraints of a load with the choices of an enum under llm-pool's name for them."""
    return {
        field: {"allowed_values" if name == "values" else name: value for name, value in limits.items()}
        for field, limits in load_constraints(definition).items()
    }


async def _describe(parts: Parts, shapes: Shapes, model: Model) -> ModelFacts:
    size, source, count = await estimate_memory(parts, shapes, model)
    definition = model.definition
    return ModelFacts(
        name=model.model_id,
        backend=definition.backend,
        state=model.state.value,
        replicas=wanted_replicas(model),
        loaded_replicas=sum(replica.supervisor.is_ready for replica in model.replicas),
        replica_max=definition.replica_max,
        target_inflight=effective_inflight(model),
        configured_target_inflight=definition.target_inflight,
        estimate_mb=None if size is None else -(-size // MIB),
        estimate_replicas=count,
        estimate_source=source,
        load_constraints=name_constraints(definition),
    )


async def _file_size(parts: Parts, shapes: Shapes, model: Model) -> int | None:
    registry, definition = parts.pool.registry, model.definition
    if is_elsewhere(definition):
        return None
    wanted = definition.model_path or definition.model_id
    found = next((entry for entry in registry.found if wanted in {entry.model_id, str(entry.path)}), None)
    if found is not None:
        return found.size_bytes
    path = Path(wanted)
    shape = await shapes.read(path) if definition.is_configured and path.is_absolute() else None
    return shape.weights_bytes if shape is not None else None
