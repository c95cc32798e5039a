"""Reads a profile of the gateway: where the time of one request or one chunk goes."""

from __future__ import annotations

import pstats
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Sample
from benchmarks.plan import TITLES, Measure

_WAITING = ("run_until_complete", "run_forever", "select.epoll", "method 'poll'", "{method 'run' of", "profiled.py")


@dataclass(frozen=True, slots=True)
class Hotspot:
    """One function: microseconds of its own and with what it calls, and calls, each per request or chunk."""

    name: str
    own_us: float
    total_us: float
    calls: float


def read_hotspots(path: Path, units: int) -> list[Hotspot]:
    """Return the functions of a profile, the dearest first. ``units`` is the number of requests or chunks in it."""
    stats = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]  # typeshed leaves the attribute out
    spots = []
    for (file_name, line, name), (_primitive, calls, own_s, total_s, _callers) in stats.items():
        label = name if file_name == "~" else f"{_shorten(file_name)}:{line} {name}"
        if not any(word in label for word in _WAITING):
            spots.append(Hotspot(label, own_s * 1e6 / units, total_s * 1e6 / units, calls / units))
    return sorted(spots, key=lambda spot: spot.own_us, reverse=True)


def render_hotspots(sample: Sample, path: Path, *, count: int = 30) -> str:
    """Return the dearest functions of one profiled run as text."""
    is_chunks = sample.measure in {Measure.CHUNKS, Measure.OPEN_STREAMS}
    units = sample.load.chunks if is_chunks else sample.load.answered
    if not units:
        return f"{TITLES[sample.system]}, {sample.measure}: nothing was served"
    spots = read_hotspots(path, units)
    known_us = sum(spot.own_us for spot in spots)
    word = "chunk" if is_chunks else "request"
    cost = f"{units:,} {word}s, {sample.cpu_us or 0:.1f} µs CPU each under the profiler"
    lines = [
        f"{TITLES[sample.system]}, {sample.measure}: {cost}",
        f"  {'own µs':>8} {'share':>6} {'with callees':>12} {'calls':>7}  per {word}",
    ]
    lines += [
        f"  {spot.own_us:8.2f} {spot.own_us / known_us:6.1%} {spot.total_us:12.2f} {spot.calls:7.2f}  {spot.name}"
        for spot in spots[:count]
    ]
    return "\n".join(lines)


def _shorten(file_name: str) -> str:
    parts = Path(file_name).parts
    return "/".join(parts[-2:])
