"""Reads a profile of the gateway: where the time of one request or one chunk goes."""

from __future__ import annotations

import pstats
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Sample
from benchmarks.plan import TITLES, Measure

CALLS_SUFFIX = ".pstats"
SAMPLES_SUFFIX = ".stacks"
_SHOWN = 40
_OUTER = ("run_until_complete", "run_forever", "method 'poll'", "{method 'run' of", "profiled.py", "<frozen runpy>")


@dataclass(frozen=True, slots=True)
class Hotspot:
    """One function: its share of all time, alone and with what it calls, and calls per unit (None when not counted)."""

    name: str
    own_share: float
    total_share: float
    calls: float | None


def read_hotspots(path: Path, units: int) -> list[Hotspot]:
    """Return the functions of a profile, the dearest first. ``units`` is the number of requests or chunks in it."""
    spots = _read_calls(path, units) if path.suffix == CALLS_SUFFIX else _read_samples(path)
    return sorted(spots, key=lambda spot: spot.own_share, reverse=True)


def render_hotspots(sample: Sample, path: Path) -> str:
    """Return the dearest functions of one profiled run as text; microseconds are shares of the main thread's CPU."""
    is_chunks = sample.measure in {Measure.CHUNKS, Measure.OPEN_STREAMS}
    units = sample.load.chunks if is_chunks else sample.load.answered
    title = f"{TITLES[sample.system]}, {sample.measure}"
    if not units:
        return f"{title}: nothing was served"
    main_us = sample.main_thread_cpu_s * 1e6 / units
    other_us = max(0.0, sample.cpu_s - sample.main_thread_cpu_s) * 1e6 / units
    word = "chunk" if is_chunks else "request"
    lines = [
        f"{title}: {units:,} {word}s, {main_us:.1f} µs each in the main thread and {other_us:.1f} µs in others",
        f"  {'own µs':>8} {'share':>6} {'with callees':>12} {'calls':>7}  per {word}",
    ]
    for spot in read_hotspots(path, units)[:_SHOWN]:
        calls = "" if spot.calls is None else f"{spot.calls:.2f}"
        own_us, total_us = spot.own_share * main_us, spot.total_share * main_us
        lines.append(f"  {own_us:8.2f} {spot.own_share:6.1%} {total_us:12.2f} {calls:>7}  {spot.name}")
    return "\n".join(lines)


def _read_calls(path: Path, units: int) -> list[Hotspot]:
    stats = pstats.Stats(str(path)).stats  # type: ignore[attr-defined]  # typeshed leaves the attribute out
    rows = []
    for (file_name, line, name), (_primitive, calls, own_s, total_s, _callers) in stats.items():
        label = name if file_name == "~" else f"{'/'.join(Path(file_name).parts[-2:])}:{line} {name}"
        if not _is_outer(label):
            rows.append((label, calls, own_s, total_s))
    known_s = sum(own_s for _, _, own_s, _ in rows) or 1.0
    return [Hotspot(label, own_s / known_s, total_s / known_s, calls / units) for label, calls, own_s, total_s in rows]


def _read_samples(path: Path) -> list[Hotspot]:
    own: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        stack, _, number = line.rpartition(" ")
        if not stack:
            continue
        names = stack.split(";")
        own[names[-1]] += int(number)
        for name in set(names):
            total[name] += int(number)
    seen = sum(own.values()) or 1
    return [Hotspot(name, own[name] / seen, total[name] / seen, None) for name in total if not _is_outer(name)]


def _is_outer(label: str) -> bool:
    return any(word in label for word in _OUTER)
