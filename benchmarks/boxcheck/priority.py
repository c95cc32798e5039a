"""What a priority is worth on a saturated model, and that low ones are still served."""

from __future__ import annotations

import asyncio
import time
from statistics import median

from benchmarks.boxcheck.arithmetic import percentile
from benchmarks.boxcheck.box import Box
from benchmarks.boxcheck.client import tenant
from benchmarks.boxcheck.models import FIRST
from benchmarks.boxcheck.workbench import Workbench

TOKENS = 120
NORMAL_CLIENTS = 8
LOW_CLIENTS = 2
HIGH_EVERY_S = 1.0
STARVATION_S = 10.0
"""After this long a waiting request counts as one class higher (the node's own constant)."""


async def run(bench: Workbench) -> None:
    """Saturate one slot with normal requests, and ask beside them for high and low ones."""
    environment = {"MAX_QUEUE_DEPTH": "100", "QUEUE_TIMEOUT_MS": "120000"}
    async with bench.open(environment=environment) as box:
        await box.client.load_whole(FIRST, overrides={"gguf_n_ctx": 1024})
        waits = await _ask(bench, box)
    rows: list[list[object]] = [["priority", "answers", "wait p50, ms", "p95, ms", "worst, ms"]]
    for name, found in waits.items():
        rows.append([name, len(found), *([median(found), percentile(found, 0.95), max(found)] if found else [None] * 3)])
    section = bench.section
    section.table(rows)
    section.keep(wait_ms=waits, seconds=bench.options.priority_s)
    high, normal, low = waits["high"], waits["normal"], waits["low"]
    if not section.judge("requests of every class were served", passed=all([high, normal, low]), shown=f"{len(low)} low ones"):
        return
    section.judge(
        "a high request waits less than a normal one",
        passed=median(high) < median(normal) / 2,
        shown=f"{median(high):.0f} ms, {median(normal):.0f} ms",
    )
    section.judge(
        "a low request waits longer than a normal one",
        passed=median(low) > median(normal),
        shown=f"{median(low):.0f} ms, {median(normal):.0f} ms",
    )
    bound_s = STARVATION_S * 1.5
    section.judge(
        f"no low request starves: the longest wait is below {bound_s:g} s",
        passed=max(low) <= bound_s * 1000,
        shown=f"{max(low) / 1000:.1f} s",
    )


async def _ask(bench: Workbench, box: Box) -> dict[str, list[float]]:
    until = time.monotonic() + bench.options.priority_s
    waits: dict[str, list[float]] = {"high": [], "normal": [], "low": []}

    async def keep_asking(priority: str, pause_s: float) -> None:
        while time.monotonic() < until:
            reply = await box.client.chat(FIRST, tokens=TOKENS, headers=tenant("everybody", priority=priority))
            if reply.status == 200:
                waits[priority].append(reply.number("x-queue-wait-ms"))
            await asyncio.sleep(pause_s)

    work = asyncio.gather(
        *(keep_asking("normal", 0.0) for _ in range(NORMAL_CLIENTS)),
        *(keep_asking("low", 0.0) for _ in range(LOW_CLIENTS)),
        keep_asking("high", HIGH_EVERY_S),
    )
    while not work.done():
        done = sum(map(len, waits.values()))
        bench.progress.show(f"priority: {done} answers · {max(0.0, until - time.monotonic()):.0f} s left")
        await asyncio.wait([work], timeout=5.0)
    await work
    return waits
