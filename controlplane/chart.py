"""The chart of requests per minute: plain SVG geometry, so the page needs no drawing script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gateway.services.requests import Minute

WIDTH = 720
HEIGHT = 120
GAP = 2
NICE_STEPS = (1, 2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Bar:
    """One minute: what was served from the bottom, what was refused above it, what failed on top. Units of the view box."""

    x: float
    width: float
    good_y: float
    good_height: float
    refused_y: float
    refused_height: float
    fault_y: float
    fault_height: float
    label: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """Bars and the scale they are drawn to."""

    bars: tuple[Bar, ...]
    top: int
    starts_at: datetime
    ends_at: datetime
    width: int = WIDTH
    height: int = HEIGHT


def draw_minutes(minutes: Sequence[Minute]) -> BarChart:
    """Return the chart of at least one minute, oldest first."""
    top = round_up(max(minute.requests for minute in minutes))
    pitch = WIDTH / len(minutes)
    bars = []
    for index, minute in enumerate(minutes):
        scale = HEIGHT / top
        total, refused, failed = minute.requests * scale, minute.refused * scale, minute.failed * scale
        bars.append(
            Bar(
                x=round(index * pitch, 2),
                width=round(pitch - GAP, 2),
                good_y=round(HEIGHT - total + failed + refused, 2),
                good_height=round(total - failed - refused, 2),
                refused_y=round(HEIGHT - total + failed, 2),
                refused_height=round(refused, 2),
                fault_y=round(HEIGHT - total, 2),
                fault_height=round(failed, 2),
                label=f"{minute.starts_at:%H:%M} UTC: {minute.requests} requests, "
                f"{minute.refused} refused, {minute.failed} failed",
            )
        )
    return BarChart(bars=tuple(bars), top=top, starts_at=minutes[0].starts_at, ends_at=minutes[-1].starts_at)


def round_up(value: int) -> int:
    """Return the smallest of 5, 6, 8, 10, 20, 30, 40, 50, 60, 80, 100, 200, … that is not below ``value``."""
    scale = 1
    while True:
        for step in NICE_STEPS:
            if step * scale >= max(value, 5):
                return step * scale
        scale *= 10
