"""Slopes, shares, percentiles and errors of predictions. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line through measured points: ``slope`` per step, and how far it may be off (one standard error)."""

    slope: float
    standard_error: float


@dataclass(frozen=True, slots=True)
class Stay:
    """One request of a tenant in a slot, from ``began`` to ``ended`` in seconds of one clock."""

    tenant: str
    began: float
    ended: float


def fit_line(values: Sequence[float]) -> Line:
    """Return the least-squares line through ``(0, values[0]), (1, values[1]), …``. Raises ValueError for fewer than two."""
    count = len(values)
    if count < 2:
        raise ValueError("a line needs at least two values")
    middle, mean = (count - 1) / 2, fmean(values)
    spread = sum((step - middle) ** 2 for step in range(count))
    slope = sum((step - middle) * (value - mean) for step, value in enumerate(values)) / spread
    if count == 2:
        return Line(slope, 0.0)
    rest = sum((value - mean - slope * (step - middle)) ** 2 for step, value in enumerate(values))
    return Line(slope, math.sqrt(rest / (count - 2) / spread))


def leave_out_first(count: int, *, wanted: int) -> int:
    """Return how many of ``count`` values to leave out as warming up: ``wanted``, but never more than a third."""
    return min(wanted, count // 3)


def time_by_tenant(stays: Iterable[Stay], *, since: float, until: float) -> dict[str, float]:
    """Return the seconds of slot time of each tenant between ``since`` and ``until``; stays that reach beyond are cut."""
    seconds: dict[str, float] = {}
    for stay in stays:
        inside = min(stay.ended, until) - max(stay.began, since)
        if inside > 0:
            seconds[stay.tenant] = seconds.get(stay.tenant, 0.0) + inside
    return seconds


def shares(amounts: Mapping[str, float]) -> dict[str, float]:
    """Return each amount as a share of the sum, 0.0 to 1.0; all 0.0 when the sum is nothing."""
    total = sum(amounts.values())
    return {name: amount / total if total else 0.0 for name, amount in amounts.items()}


def relative_error(found: float, wanted: float) -> float:
    """Return how far ``found`` is from ``wanted`` as a share of it: -0.1 is a tenth too little. Raises ValueError at 0."""
    if wanted == 0:
        raise ValueError("nothing can be compared with 0")
    return (found - wanted) / wanted


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that ``share`` (0.0 to 1.0) of the values do not exceed, by nearest rank. Raises ValueError."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
