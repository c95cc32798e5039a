"""When a box calls itself unwell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from runner.admission import FairQueue, QueueLimits, WaitBudget
from runner.api.health import find_ailments
from runner.definitions.definition import ModelDefinition
from runner.parts import Parts, Phase
from runner.pool import Model, ModelEvent
from runner.telemetry import Reading


def make_model(*events: ModelEvent, error: str | None = None) -> Model:
    budget = WaitBudget(10)
    queue = FairQueue(slots=1, limits=QueueLimits(), budget=budget, weight_of=lambda _: 1.0)
    model = Model(ModelDefinition(model_id="m", backend="gguf"), queue, lambda: None)
    for event in events:
        model.apply(event, error=error if event is ModelEvent.FAIL else None)
    return model


def make_parts(*models: Model, phase: Phase = Phase.SERVING, waiting: int = 0, max_depth: int = 10) -> Parts:
    """Return the few parts that health is judged by."""
    budget = WaitBudget(max_depth)
    for _ in range(waiting):
        budget.add()
    pool = SimpleNamespace(registry=SimpleNamespace(models=list(models)))
    return cast("Parts", SimpleNamespace(phase=phase, pool=pool, budget=budget))


def make_reading(*, free_mb: int) -> Reading:
    return Reading(gpus=[], kind="gpu", total_mb=10_000, used_mb=10_000 - free_mb, free_mb=free_mb, driver_version=None, at=0.0)


LOADED = (ModelEvent.LOAD, ModelEvent.SERVE)
FAILED = (ModelEvent.LOAD, ModelEvent.FAIL)


def test_a_box_with_nothing_loaded_is_well() -> None:
    assert find_ailments(make_parts(), make_reading(free_mb=5000)) == []
    assert find_ailments(make_parts(make_model(*LOADED)), None) == []


@pytest.mark.parametrize(("phase", "reason"), [(Phase.STARTING, "starting"), (Phase.STOPPING, "stopping")])
def test_it_is_unwell_while_it_starts_or_stops(phase: Phase, reason: str) -> None:
    assert find_ailments(make_parts(phase=phase), None) == [f"the box is {reason}"]


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
        "ggml_backend_alloc: failed to allocate CUDA0 buffer",
        "std::bad_alloc", "mmap: Cannot allocate memory", "killed by the OOM killer",
    ],
)  # fmt: skip
def test_a_model_that_failed_for_lack_of_memory_is_named(error: str) -> None:
    parts = make_parts(make_model(*LOADED), make_model(*FAILED, error=error))
    assert find_ailments(parts, None) == [f"out of memory: m says {error}"]


def test_memory_that_is_nearly_gone_makes_it_unwell() -> None:
    assert find_ailments(make_parts(), make_reading(free_mb=200)) == []
    assert find_ailments(make_parts(), make_reading(free_mb=199)) == ["out of memory: 199 of 10000 MiB of the gpu are free"]


def test_a_failed_load_makes_it_unwell_only_while_no_other_model_serves_or_comes() -> None:
    failed = make_model(*FAILED, error="no room: bloom filter")
    assert find_ailments(make_parts(failed), None) == ["no model serves, m failed: no room: bloom filter"]
    assert find_ailments(make_parts(failed, make_model(ModelEvent.LOAD)), None) == []
    assert find_ailments(make_parts(failed, make_model(*LOADED)), None) == []


@pytest.mark.parametrize(("waiting", "max_depth", "is_well"), [(8, 10, True), (9, 10, False), (0, 0, True), (1, 1, False)])
def test_a_queue_that_is_nine_tenths_full_makes_it_unwell(waiting: int, max_depth: int, *, is_well: bool) -> None:
    assert (find_ailments(make_parts(waiting=waiting, max_depth=max_depth), None) == []) is is_well
