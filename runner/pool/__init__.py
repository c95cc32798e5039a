"""The models of the node: what is known, what is loaded in how many replicas, what memory they hold, and their life."""

from dataclasses import dataclass

from runner.pool.capacity import Capacity
from runner.pool.loads import Loader, LoadOptions, LoadOrder, LoadResult, Unloader, UnloadResult
from runner.pool.models import LoadProgress, Model, Registry, Replica
from runner.pool.states import ModelEvent, ModelState

__all__ = [
    "Capacity", "LoadOptions", "LoadOrder", "LoadProgress", "LoadResult", "Loader", "Model", "ModelEvent", "ModelState", "Pool",
    "Registry", "Replica", "UnloadResult", "Unloader",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pool:
    """The parts that share one set of models."""

    registry: Registry
    loader: Loader
    unloader: Unloader
    capacity: Capacity
