"""Hundreds of loads and unloads of two models: nothing may be left of any."""

from __future__ import annotations

import time
from statistics import median

from benchmarks.boxcheck.arithmetic import fit_line, leave_out_first, percentile
from benchmarks.boxcheck.box import GONE_S, Box, wait_for
from benchmarks.boxcheck.models import FIRST, SECOND
from benchmarks.boxcheck.workbench import Workbench

WARM_UP_CYCLES = 20
MAX_SLOPE_KB = 4.0
"""More than this per cycle would be a leak. Half a kilobyte is the ledger's file, whose pages SQLite keeps in memory."""
MIN_CYCLES_FOR_SLOPE = 40
"""With fewer, what the allocator keeps in the beginning is all that a line shows."""
KIB = 1024


async def run(bench: Workbench) -> None:
    """Load and unload, two models in turn, and look at what the runner holds."""
    count = bench.options.cycles
    async with bench.open() as box:
        await _cycle(box, SECOND)
        files_before, engines_before, ledger_before = box.open_files(), len(box.engines()), _ledger_kb(box)
        loads, unloads, sizes, left = [], [], [], []
        began = time.monotonic()
        for number in range(count):
            load_s, unload_s = await _cycle(box, (FIRST, SECOND)[number % 2])
            loads.append(load_s)
            unloads.append(unload_s)
            sizes.append(box.runner_rss_bytes() / KIB)
            left.append(len(box.engines()))
            left_s = (time.monotonic() - began) / (number + 1) * (count - number - 1)
            if number % max(1, count // 20) == 0 or number + 1 == count:
                bench.progress.show(f"cycles: {(number + 1) / count:4.0%} ({number + 1} of {count}) · {left_s:.0f} s left")
        files_after = files_before

        def is_clean() -> bool:
            nonlocal files_after
            files_after = box.open_files()  # a look at a file of the kernel's may have one open for a moment
            return not box.engines() and files_after <= files_before

        gone = await wait_for(is_clean, limit_s=GONE_S)
        ledger_after = _ledger_kb(box)
        bench.section.line(
            f"  the ledger's file went from {ledger_before:.0f} to {ledger_after:.0f} KB; it keeps the newest 1000 loads"
        )
        bench.section.keep(ledger_before_kb=ledger_before, ledger_after_kb=ledger_after)
        _judge(bench, loads=loads, unloads=unloads, sizes=sizes, files=(files_before, files_after))
        bench.section.judge(
            "no engine process is left",
            passed=gone is not None and not box.engines() and not box.strays() and not any(left),
            shown=f"{engines_before} before, at most {max(left)} after an unload, {len(box.engines())} at the end",
        )


def _ledger_kb(box: Box) -> float:
    return (box.data / "ledger.sqlite3").stat().st_size / KIB


async def _cycle(box: Box, model: str) -> tuple[float, float]:
    """Return the seconds of a load and of an unload."""
    began = time.monotonic()
    await box.client.load_whole(model)
    loaded = time.monotonic()
    reply = await box.client.unload(model)
    assert reply.status == 200, reply.body
    return loaded - began, time.monotonic() - loaded


def _judge(bench: Workbench, *, loads: list[float], unloads: list[float], sizes: list[float], files: tuple[int, int]) -> None:
    section, (files_before, files_after) = bench.section, files
    kept = sizes[leave_out_first(len(sizes), wanted=WARM_UP_CYCLES) :]
    section.table([
        ["", "median", "p95", "worst"],
        ["load, s", median(loads), percentile(loads, 0.95), max(loads)],
        ["unload, s", median(unloads), percentile(unloads, 0.95), max(unloads)],
        ["runner RSS, MB", median(sizes) / KIB, percentile(sizes, 0.95) / KIB, max(sizes) / KIB],
    ])  # fmt: skip
    section.keep(
        cycles=len(sizes), load_median_s=median(loads), unload_median_s=median(unloads), rss_kb=sizes,
        files_before=files_before, files_after=files_after,
    )  # fmt: skip
    if len(kept) >= 2:
        line = fit_line(kept)
        section.keep(slope_kb_per_cycle=line.slope, slope_standard_error=line.standard_error)
        shown = f"{line.slope:+.2f} ± {line.standard_error:.2f} KB per cycle over the last {len(kept)} of {len(sizes)}"
        if len(sizes) < MIN_CYCLES_FOR_SLOPE:
            section.line(f"  slope of the runner's RSS: {shown} (not judged: fewer than {MIN_CYCLES_FOR_SLOPE} cycles)")
        else:
            section.judge(
                f"RSS of the runner does not grow (slope ≤ {MAX_SLOPE_KB:g} KB)", passed=line.slope <= MAX_SLOPE_KB, shown=shown
            )
    section.judge(
        "no file descriptor is left open", passed=files_after <= files_before, shown=f"{files_before} → {files_after}"
    )
