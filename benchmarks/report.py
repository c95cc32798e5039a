"""Prints the figures, ratios first, with the floors and goals they meet or miss; writes everything measured as JSON."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.figures import NOT_MEASURED, Figures, Sample, Verdict
from benchmarks.plan import TITLES, Floor, System
from benchmarks.processes import CorePlan

_FORMAT = 2
_NEIGHBOURS_ABOVE = 0.05


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a figure of every system."""

    title: str
    figure: str
    digits: int

    def render(self, own: Figures) -> str:
        """Return the figure of one system, a dash when there is none."""
        value: float | None = getattr(own, self.figure)
        return "–" if value is None else f"{value:,.{self.digits}f}"


_ROWS = (
    Row("CPU per request, × nginx", "request_ratio", 2),
    Row("CPU per chunk, × nginx", "chunk_ratio", 2),
    Row("CPU per request, × passed through", "request_passed_ratio", 2),
    Row("CPU per chunk, × passed through", "chunk_passed_ratio", 2),
    Row("CPU per request, × 10 nodes and keys", "request_grown_ratio", 2),
    Row("CPU per request, × vllm-router", "request_peer_ratio", 2),
    Row("LiteLLM's CPU per request, × ours", "request_litellm_ratio", 0),
    Row("LiteLLM's CPU per chunk, × ours", "chunk_litellm_ratio", 0),
    Row("added TTFB at 1 stream, × nginx", "first_byte_ratio", 2),
    Row("misplaced chunks", "misplaced", 0),
    Row("CPU per request, µs", "request_us", 1),
    Row("database CPU per request, µs", "database_us", 1),
    Row("CPU per chunk, µs", "chunk_us", 1),
    Row("chunks per read", "chunks_per_read", 2),
    Row("transit of a chunk p99, µs", "transit_p99_us", 0),
    Row("added TTFB p50 at 1 stream, µs", "added_first_byte_us", 0),
    Row("added TTFB p50, engine needs 5 ms, ms", "engine_added_ms", 2),
    Row("added TTFB p99 at 256 streams, ms", "added_p99_ms", 2),
    Row("added TTFB p50, 256 at once, ms", "opened_p50_ms", 1),
    Row("added TTFB p95, 256 at once, ms", "opened_p95_ms", 1),
    Row("added TTFB p99, 256 at once, ms", "opened_p99_ms", 1),
    Row("RSS after the runs, MB", "rss_mb", 0),
    Row("serves again after kill -9, s", "start_s", 2),
    Row("registrations per s after a restart", "registrations_per_s", 0),
    Row("idle CPU of the gateway, ms per s", "idle_ms_per_s", 1),
    Row("idle CPU of everything, ms per s", "idle_all_ms_per_s", 1),
    Row("PSS of the gateway, MB", "pss_mb", 0),
    Row("PSS of everything, MB", "pss_all_mb", 0),
)


def render_table(figures: Mapping[System, Figures]) -> str:
    """Return the table: a column for each system under its short name, a row for each figure that any of them has."""
    names = [system.value.partition("-") for system in figures]
    rows = [["", *(part[place] for part in names)] for place in (0, 2) if any(part[place] for part in names)]
    heads = len(rows)
    for row in _ROWS:
        cells = [row.render(own) for own in figures.values()]
        if any(cell != "–" for cell in cells):
            rows.append([row.title, *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(figures) + 1)]
    lines = []
    for cells in rows:
        first, *others = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        lines.append("  ".join([cells[0].ljust(len(first)), *others]).rstrip())
    lines.insert(heads, "─" * (sum(widths) + 2 * len(figures)))
    return "\n".join(lines)


def render_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Return the floors in words: how many are met, then a line for each that was judged, the missed ones first.

    A line has the figure, its floor, its goal, and how many times the figure is off the goal.
    """
    if not verdicts:
        return ""
    judged = [verdict for verdict in verdicts if verdict.passed is not None]
    judged.sort(key=lambda verdict: (_ORDER.index(_tell(verdict)), -(verdict.goal_ratio or 0.0)))
    rows = [["", "figure", "floor", "goal", "", ""]]
    for verdict, systems in _join_equal(judged):
        sign = "≥" if verdict.floor.is_least else "≤"
        goal = "" if verdict.floor.goal is None else f"{sign} {verdict.floor.goal:.3g}"
        what = f"{verdict.floor.title}: {', '.join(systems) if len(systems) < 4 else f'{len(systems)} systems'}"
        if verdict.value is not None and verdict.floor.tie and verdict.passed and verdict.value > verdict.floor.limit:
            what += f" (a tie: within {verdict.floor.tie:.0%})"
        if verdict.floor.scale != 1:
            what += f" (floor and goal × {verdict.floor.scale:.2f})"
        value = verdict.reason if verdict.value is None else _render_value(verdict.value)
        distance = _render_distance(verdict.goal_ratio)
        rows.append([_tell(verdict), value, f"{sign} {verdict.floor.limit:.3g}", goal, distance, what])
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [_count(verdicts), ""]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:4], widths[1:4], strict=True))]
        lines.append("  ".join([*cells, row[4].ljust(widths[4]), row[5]]).rstrip())
    for reason in sorted({verdict.reason for verdict in verdicts if verdict.passed is None}):
        left = [verdict for verdict in verdicts if verdict.passed is None and verdict.reason == reason]
        told = (f"{verdict.floor.title} ({', '.join(systems)})" for verdict, systems in _join_equal(left))
        lines += ["", f"{'Not measured' if reason == NOT_MEASURED else f'Not judged, {reason}'}: {'; '.join(told)}"]
    return "\n".join(lines)


_MISSED, _OVER, _MET, _GOAL_MET = _ORDER = ("MISSED", "over", "met", "goal met")


def _tell(verdict: Verdict) -> str:
    if not verdict.passed:
        return _MISSED if verdict.floor.is_binding else _OVER
    return _GOAL_MET if verdict.goal_ratio is not None and verdict.goal_ratio <= 1 else _MET


def _count(verdicts: Sequence[Verdict]) -> str:
    floors = [verdict for verdict in verdicts if verdict.floor.is_binding]
    missed = sum(verdict.passed is False for verdict in floors)
    met, left = sum(verdict.passed is True for verdict in floors), sum(verdict.passed is None for verdict in floors)
    ratios = [verdict.goal_ratio for verdict in floors if verdict.goal_ratio is not None]
    near = sum(ratio <= 1 for ratio in ratios)
    furthest = f", the furthest figure is {_render_distance(max(ratios))}" if near < len(ratios) else ""
    goals = f" Goals: {near} of {len(ratios)} met{furthest}." if ratios else ""
    return f"Floors: {missed} missed, {met} met, {left} not judged.{goals}"


def _join_equal(verdicts: Sequence[Verdict]) -> list[tuple[Verdict, list[System]]]:
    """Return verdicts with the systems they are about: those of one floor with the same figure are said together."""
    joined: dict[tuple[Floor, float | None, bool | None], tuple[Verdict, list[System]]] = {}
    for verdict in verdicts:
        key = (verdict.floor, verdict.value, verdict.passed)
        joined.setdefault(key, (verdict, []))[1].append(verdict.system)
    return list(joined.values())


def _render_distance(goal_ratio: float | None) -> str:
    return f"{goal_ratio:.2f} × goal" if goal_ratio is not None and goal_ratio > 1 else ""


def _render_value(value: float) -> str:
    return f"{value:.0f}" if isinstance(value, int) or value >= 100 else f"{value:.2f}"


def render_completeness(figures: Mapping[System, Figures], absences: Mapping[System, str]) -> str:
    """Return in words whether everything that was asked for was measured; empty when it was."""
    spoilt = [f"{system} ({', '.join(own.problems)})" for system, own in figures.items() if own.problems]
    lines = [f"The run is not complete, because these had errors: {'; '.join(spoilt)}."] if spoilt else []
    lines += [f"{TITLES[system]} is not in this run: {reason}" for system, reason in absences.items()]
    return "\n".join(lines)


def render_problems(figures: Mapping[System, Figures]) -> str:
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
    figures: Mapping[System, Figures],
    absences: Mapping[System, str],
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
        "absent": {system.value: reason for system, reason in absences.items()},
        "floors": [
            {
                "figure": v.floor.figure,
                "system": v.system.value,
                "limit": v.floor.limit,
                "goal": v.floor.goal,
                "scale": v.floor.scale,
                "goal_ratio": v.goal_ratio,
                "is_least": v.floor.is_least,
                "is_binding": v.floor.is_binding,
                "value": v.value,
                "passed": v.passed,
                "reason": v.reason,
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


def _read_cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
