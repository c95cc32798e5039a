"""The first page of the admin: what runs, what the last hour looked like, and what needs attention."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from gateway.services.requests import OpenRequests, read_open_requests
from gateway.services.rollups import Metric, Series, Sums, read_series
from governance.alerts import ShownAlert, list_open_problems
from nodes.services.availability import FleetOverview, read_fleet


@dataclass(frozen=True, slots=True)
class Overview:
    fleet: FleetOverview
    open_requests: OpenRequests
    problems: tuple[ShownAlert, ...]


def read_overview() -> Overview:
    """Collect what the open page refreshes by itself; three queries, however many rows there are."""
    return Overview(fleet=read_fleet(), open_requests=read_open_requests(), problems=list_open_problems())


def count_live(overview: Overview) -> dict[str, int]:
    """Return the numbers that the open page refreshes by itself."""
    return {
        "nodes_online": overview.fleet.online,
        "nodes_total": len(overview.fleet.nodes),
        "queued": overview.open_requests.queued,
        "running": overview.open_requests.running,
    }


WIDTH = 720
HEIGHT = 120
GAP = 2
NICE_STEPS = (1, 2, 3, 4, 5, 6, 8)
_HOUR = timedelta(hours=1)
RANGES: dict[str, tuple[str, timedelta]] = {
    "15m": ("15 min", timedelta(minutes=15)),
    "1h": ("1 h", _HOUR),
    "6h": ("6 h", timedelta(hours=6)),
    "24h": ("24 h", timedelta(days=1)),
    "7d": ("7 d", timedelta(days=7)),
    "30d": ("30 d", timedelta(days=30)),
}
"""How far back a chart can go, by what its address says."""
_STEPS = {timedelta(minutes=1): "minute", timedelta(hours=1): "hour", timedelta(days=1): "day"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One step: what was served from the bottom, what was refused above it, what failed on top. Units of the view box."""

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
class Traffic:
    """Requests that ended within a range, and their chart. ``step``: what a bar stands for, in words."""

    range: str
    title: str
    total: Sums
    bars: tuple[Bar, ...]
    top: int
    step: str
    starts_at: datetime
    ends_at: datetime
    width: int = WIDTH
    height: int = HEIGHT

    @property
    def is_of_days(self) -> bool:
        return RANGES[self.range][1] >= timedelta(days=1)


def read_traffic(chosen: str) -> Traffic:
    """Return the requests of a range, of an hour where there is none of that name; one query."""
    name = chosen if chosen in RANGES else "1h"
    title, span = RANGES[name]
    return draw_traffic(name, title, read_series(span, metric=Metric.LATENCY))


def draw_traffic(name: str, title: str, series: Series) -> Traffic:
    top = round_up(max(sums.requests for _, sums in series.points))
    pitch = WIDTH / len(series.points)
    gap = min(GAP, pitch / 4)
    form = "%H:%M UTC" if series.step < _HOUR else "%Y-%m-%d %H:%M UTC"
    bars = []
    for index, (at, sums) in enumerate(series.points):
        scale = HEIGHT / top
        total, refused, failed = sums.requests * scale, sums.refused * scale, sums.failed * scale
        bars.append(
            Bar(
                x=round(index * pitch, 2),
                width=round(pitch - gap, 2),
                good_y=round(HEIGHT - total + failed + refused, 2),
                good_height=round(total - failed - refused, 2),
                refused_y=round(HEIGHT - total + failed, 2),
                refused_height=round(refused, 2),
                fault_y=round(HEIGHT - total, 2),
                fault_height=round(failed, 2),
                label=f"{at:{form}}: {sums.requests} requests, {sums.refused} refused, {sums.failed} failed",
            )
        )
    first, last = series.points[0][0], series.points[-1][0]
    return Traffic(name, title, series.total, tuple(bars), top, _name_step(series.step), first, last)


def _name_step(step: timedelta) -> str:
    if step in _STEPS:
        return _STEPS[step]
    minutes = round(step / timedelta(minutes=1))
    return f"{minutes} minutes" if minutes < 60 else f"{minutes // 60} hours"


def round_up(value: int) -> int:
    """Return the smallest of 5, 6, 8, 10, 20, 30, 40, 50, 60, 80, 100, 200, … that is not below ``value``."""
    scale = 1
    while True:
        for step in NICE_STEPS:
            if step * scale >= max(value, 5):
                return step * scale
        scale *= 10
