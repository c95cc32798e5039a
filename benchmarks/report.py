"""Prints the figures, ratios first, with the floors and goals they meet or miss; writes everything measured as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import Figures, Sample, Verdict
from benchmarks.plan import TITLES, FloorKind, System
from benchmarks.processes import CorePlan

_FORMAT = 1
_NEIGHBOURS_ABOVE = 0.05


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table."""

    heading: str
    render: Callable[[Figures], str]


def _number(digits: int, read: Callable[[Figures], float | None], *, suffix: str = "") -> Callable[[Figures], str]:
    def render(figures: Figures) -> str:
        value = read(figures)
        return "–" if value is None else f"{value:,.{digits}f}{suffix}"

    return render


_COLUMNS = (
    Column("request\n× nginx", _number(2, lambda f: f.request_ratio)),
    Column("chunk\n× nginx", _number(2, lambda f: f.chunk_ratio)),
    Column("request\n× passed", _number(2, lambda f: f.request_passed_ratio)),
    Column("chunk\n× passed", _number(2, lambda f: f.chunk_passed_ratio)),
    Column("added TTFB\n× nginx", _number(2, lambda f: f.first_byte_ratio)),
    Column("p99 +ms\n256 open", _number(2, lambda f: f.added_p99_ms)),
    Column("p50 +ms\n256 at once", _number(1, lambda f: f.opened_p50_ms)),
    Column("p95\n", _number(1, lambda f: f.opened_p95_ms)),
    Column("p99\n", _number(1, lambda f: f.opened_p99_ms)),
    Column("misplaced\nchunks", _number(0, lambda f: f.misplaced)),
    Column("µs per\nrequest", _number(1, lambda f: f.request_us)),
    Column("µs per\nchunk", _number(1, lambda f: f.chunk_us)),
    Column("added TTFB\np50, µs", _number(0, lambda f: f.added_first_byte_us)),
    Column("+ms, engine\nneeds 5 ms", _number(2, lambda f: f.engine_added_ms)),
    Column("chunks\nper read", _number(2, lambda f: f.chunks_per_read)),
    Column("transit\np99, µs", _number(0, lambda f: f.transit_p99_us)),
    Column("database\nµs/request", _number(1, lambda f: f.database_us)),
    Column("RSS\nMB", _number(0, lambda f: f.rss_mb)),
    Column("serves\nagain, s", _number(2, lambda f: f.start_s)),
)


def render_table(figures: dict[System, Figures]) -> str:
    """Return the table of all systems."""
    headings = [column.heading.split("\n") for column in _COLUMNS]
    rows = [[TITLES[own.system], *(column.render(own) for column in _COLUMNS)] for own in figures.values()]
    rows = [["", *(h[0] for h in headings)], ["", *(h[1] for h in headings)], *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS) + 1)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    lines.insert(2, "─" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines)


def render_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return a table of one line per floor and system: the figure, its floor and goal, and how far the goal is."""
    rows = [["", "figure", "floor", "goal", "distance", ""]]
    for verdict in verdicts:
        floor = verdict.floor
        word = {True: "PASS", False: "FAIL" if floor.is_binding else "over", None: "skip"}[verdict.passed]
        value = "errors" if verdict.value is None and verdict.passed is False else _render_value(verdict)
        goal = "–" if floor.goal is None else f"{floor.goal:g}"
        what = f"{floor.title}  ({TITLES[verdict.system]})"
        rows.append([word, value, f"{floor.limit:g}", goal, _render_distance(verdict.goal_ratio), what])
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = ["  ".join([*(cell.rjust(width) for cell, width in zip(row[:5], widths, strict=True)), row[5]]) for row in rows]
    return "\n".join(line.rstrip() for line in lines) if verdicts else ""


def _render_distance(goal_ratio: float | None) -> str:
    if goal_ratio is None:
        return "–"
    return "met" if goal_ratio <= 1 else f"{goal_ratio:.2f} × goal"


def render_problems(figures: dict[System, Figures]) -> str:
    """Return what went wrong: why figures are missing from the table, or not to be trusted."""
    lines = []
    busiest = max((own.neighbour_share for own in figures.values()), default=0.0)
    if busiest > _NEIGHBOURS_ABOVE:
        lines.append(
            f"Other programs took up to {busiest:.0%} of the measured core: times, most of all p99, are worse than the truth."
        )
    for own in figures.values():
        if own.is_merged:
            lines.append(
                f"{TITLES[own.system]}: {own.chunks_per_read:.2f} chunks came per read, so its figure per chunk is too good "
                "and not judged; something else used the machine, or the gateway did not keep up"
            )
        for measure, problems in own.problems.items():
            lines.append(f"{TITLES[own.system]}, {measure}: no figure, because")
            lines += [f"    {problem}" for problem in problems[:5]]
    return "\n".join(lines)


def write_json(
    path: Path,
    *,
    figures: dict[System, Figures],
    verdicts: Sequence[Verdict],
    samples: Sequence[Sample],
    cores: CorePlan,
    arguments: dict[str, Any],
) -> None:
    """Write the run: the machine, the figures, the verdicts and every sample."""
    document = {
        "format": _FORMAT,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "pinned": asdict(cores) if cores.is_pinned else None,
        "arguments": arguments,
        "figures": {system.value: asdict(own) for system, own in figures.items()},
        "floors": [
            {
                "figure": v.floor.figure,
                "system": v.system.value,
                "limit": v.floor.limit,
                "goal": v.floor.goal,
                "goal_ratio": v.goal_ratio,
                "is_binding": v.floor.is_binding,
                "value": v.value,
                "passed": v.passed,
            }
            for v in verdicts
        ],
        "samples": [
            {
                "system": s.system.value,
                "measure": s.measure.value,
                "round": s.round_number,
                "cpu_s": s.cpu_s,
                "cpu_us": s.cpu_us,
                "main_thread_cpu_s": s.main_thread_cpu_s,
                "database_cpu_s": s.database_cpu_s,
                "neighbour_share": s.neighbour_share,
                "rss_bytes": s.rss_bytes,
                "problems": s.load.find_problems(),
                "load": msgspec.to_builtins(s.load),
            }
            for s in samples
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=1))


def describe_machine() -> dict[str, Any]:
    """Return what a reader needs to know of the machine."""
    return {
        "cpu": _read_cpu_name(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def _render_value(verdict: Verdict) -> str:
    value = verdict.value
    if value is None:
        return "–"
    return f"{value:.0f}" if verdict.floor.kind is FloorKind.COUNT else f"{value:.2f}"


def _read_cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
