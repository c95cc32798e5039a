"""Whether the box is well, in words, and ``GET /health``."""

from __future__ import annotations

import re

from runner.api.answers import HealthAnswer
from runner.limits import limits
from runner.parts import Parts, Phase
from runner.pool import Model, ModelState
from runner.queue import WaitBudget
from runner.telemetry import Reading
from wire import clock

_OUT_OF_MEMORY = re.compile(
    r"out of memory|outofmemory|\boom\b|cannot allocate memory|failed to allocate|unable to allocate|bad_alloc", re.IGNORECASE
)
_UNDER_WAY = frozenset({ModelState.LOADED, ModelState.LOADING, ModelState.UNLOADING})


def find_ailments(parts: Parts, reading: Reading | None) -> list[str]:
    """Return why the box should get no work, nothing when it is well."""
    match parts.phase:
        case Phase.STARTING:
            return ["the box is starting"]
        case Phase.STOPPING:
            return ["the box is stopping"]
        case Phase.SERVING:
            models = parts.pool.registry.models
            return [*_memory_ailments(models, reading), *_load_ailments(models), *_queue_ailments(parts.budget)]


async def read_health(parts: Parts) -> tuple[int, HealthAnswer]:
    """Return HTTP status and answer of ``GET /health``."""
    ailments = find_ailments(parts, await parts.look())
    ready = sum(model.is_ready for model in parts.pool.registry.models)
    answer = HealthAnswer(
        status="unhealthy" if ailments else "healthy",
        uptime=max(0, int(clock.unix_s() - parts.started_at)),
        models_loaded=ready,
        queue_depth=parts.budget.depth,
        reasons=ailments,
    )
    return (503 if ailments else 200), answer


def _memory_ailments(models: list[Model], reading: Reading | None) -> list[str]:
    found = [
        f"out of memory: {model.model_id} says {model.last_error}"
        for model in models
        if model.state is ModelState.FAILED and model.last_error and _OUT_OF_MEMORY.search(model.last_error)
    ]
    if reading is not None and reading.total_mb and reading.free_mb < limits().api.free_share * reading.total_mb:
        found.append(f"out of memory: {reading.free_mb} of {reading.total_mb} MiB of the {reading.kind} are free")
    return found


def _load_ailments(models: list[Model]) -> list[str]:
    failed = [model for model in models if model.state is ModelState.FAILED]
    if not failed or any(model.state in _UNDER_WAY for model in models):
        return []
    return [f"no model serves, {failed[0].model_id} failed: {failed[0].last_error or 'no reason was given'}"]


def _queue_ailments(budget: WaitBudget) -> list[str]:
    if budget.max_depth > 0 and budget.depth >= limits().api.saturated_share * budget.max_depth:
        return [f"the queue is saturated: {budget.depth} of {budget.max_depth} requests wait"]
    return []
