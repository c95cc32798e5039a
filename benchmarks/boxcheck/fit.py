"""Memory that the node expects a load to take, beside what it then measures: at first, and after it has learnt."""

from __future__ import annotations

from benchmarks.boxcheck.arithmetic import relative_error
from benchmarks.boxcheck.isolation import ask_once, candidates
from benchmarks.boxcheck.workbench import Workbench

LOADS = 3
TOLERANCE = 0.15


async def run(bench: Workbench) -> None:
    """Load each tiny model three times on a node that starts with nothing learnt, and let it answer once each time.

    Judged by the memory after that answer: engines grow with their first requests, and that is what must fit.
    """
    section = bench.section
    rows: list[list[object]] = [["engine", "load", "predicted, MiB", "measured, MiB", "error", "after a request, MiB", "error"]]
    last: dict[str, float] = {}
    for candidate in candidates(bench):
        kept = []
        async with bench.open(candidate.engine) as box:
            for number in range(1, LOADS + 1):
                bench.progress.show(f"fit: {candidate.engine}, load {number} of {LOADS}")
                task = await box.client.load_whole(candidate.model, overrides=candidate.overrides)
                await ask_once(bench, box, candidate)
                used = (await box.client.unload(candidate.model)).document["memoryBeforeMB"]
                predicted, measured = task["predictedMemoryMB"], task["gpuMemoryUsedMB"]
                error, later = relative_error(predicted, measured), relative_error(predicted, used)
                title = "first (defaults)" if number == 1 else f"{number} (learnt)"
                rows.append([candidate.engine, title, predicted, measured, f"{error:+.0%}", used, f"{later:+.0%}"])
                kept.append({"predicted_mb": predicted, "measured_mb": measured, "error": error, "after_request_mb": used})
                last[candidate.engine] = later
        section.figures[candidate.engine] = kept
    section.table(rows)
    for engine, error in last.items():
        section.judge(
            f"{engine}: the learnt prediction is within {TOLERANCE:.0%} of what it takes once it serves",
            passed=abs(error) <= TOLERANCE,
            shown=f"{error:+.0%}",
        )
