"""Counts of what was served, kept as plain numbers so that a box without a metrics reader pays next to nothing."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from runner.limits import limits

DURATION_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
WAIT_BOUNDS_S = (0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OTHER_TENANTS = "other"
"""What tenants beyond the first ``tenants`` of the limits are counted under: labels must not grow without bound."""


@dataclass(slots=True)
class Histogram:
    """Counts per upper bound in seconds, the last one for everything above."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    @property
    def count(self) -> int:
        """How many values were counted."""
        return sum(self.counts)


@dataclass(slots=True)
class ModelTally:
    """What one model served. Prompt and cached tokens make its cache hit rate."""

    durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BOUNDS_S))
    waits: Histogram = field(default_factory=lambda: Histogram(WAIT_BOUNDS_S))
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens that came from the cache, 0.0 to 1.0."""
        return min(1.0, self.cached_tokens / self.prompt_tokens) if self.prompt_tokens else 0.0


class Tally:
    """All counts of the process."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = {}
        """By model, tenant and status: success, error, refused or cancelled."""
        self.refusals: dict[str, int] = {}
        """By code, from whichever door; the codes are those of ``runner.errors``."""
        self.models: dict[str, ModelTally] = {}
        self._tenants: set[str] = set()

    def count(self, *, model: str, tenant: str, status: str) -> None:
        """Count a request that ended, or was refused."""
        if tenant not in self._tenants:
            if len(self._tenants) < limits().serving.tenants:
                self._tenants.add(tenant)
            else:
                tenant = OTHER_TENANTS
        key = (model, tenant, status)
        self.requests[key] = self.requests.get(key, 0) + 1

    def count_refusal(self, code: str) -> None:
        """Count a request that was not carried out, or broke off, by the code that its client was told."""
        self.refusals[code] = self.refusals.get(code, 0) + 1

    def of(self, model: str) -> ModelTally:
        """Return the tally of a model; call it for models that exist only."""
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelTally()
        return found
