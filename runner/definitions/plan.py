"""The values a load is made of: what is to be loaded, how it goes on, what it took. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a load stands: a few words, and the share that is done, from 0.0 to 1.0 (None = cannot be told yet)."""

    stage: str
    fraction: float | None = None


Report = Callable[[Progress], None]
"""Is told how a load goes on; cheap, never raises."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What one replica is to be. ``options`` are the backend's own fields, already checked against its constraints.

    ``path``: weights on this machine, None for a server of somebody else's. ``context_tokens`` is per request, None = the
    model's own. ``slots``: requests served at once by this replica. ``memory_budget_mb``: upper limit for the replica.
    """

    model_id: str
    backend: str
    path: Path | None = None
    context_tokens: int | None = None
    slots: int = 1
    threads: int = 1
    gpu_ids: tuple[int, ...] = ()
    memory_budget_mb: int | None = None
    quantization: str | None = None
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observation:
    """What one replica really took once it was loaded: bytes of memory, predicted and measured, and seconds to load.

    ``plan_key`` tells loads of the same model with other settings apart. ``loaded_at`` is in Unix seconds.
    """

    backend: str
    model_id: str
    plan_key: str
    weights_bytes: int
    kv_bytes: int
    measured_bytes: int
    load_s: float
    loaded_at: float
