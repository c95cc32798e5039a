"""``./muster bench overload``: what callers get while five times as much is asked for as the nodes can do."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.muster import Muster
from benchmarks.plan import MODELS, System, find_path
from benchmarks.processes import plan_cores
from benchmarks.storage import open_storage
from benchmarks.upstream import Pace

SLOTS = 16
PACE = Pace(chunks=10, delay_us=50_000)
TIMES = 5
GOODPUT_FLOOR, REFUSAL_P99_S, GROWTH = 0.90, 0.050, 1.05
_WARM_UP_S = 5.0
_SETTLE_S = 60.0
"""A gateway looks for garbage rarely, so its memory grows for a minute of overload and then no more."""
_GIVE_UP_S = 60.0
_ENDS = b"data: [DONE]"


@dataclass(slots=True)
class Outcomes:
    """What became of the requests of one phase. Moments are time.monotonic() seconds, durations seconds."""

    answered_at: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def answered_per_s(self, began: float, ended: float) -> float:
        """Return how many answers ended per second of a span."""
        return sum(began <= moment < ended for moment in self.answered_at) / (ended - began)


class Callers:
    """Those who ask one gateway for streams, each on a connection of its own: the cheapest way to come and go."""

    def __init__(self, muster: Muster) -> None:
        self._port = muster.port
        messages = [{"role": "user", "content": "words " * 60}]
        body = json.dumps({"model": MODELS[System.RELAY], "max_tokens": 64, "stream": True, "messages": messages})
        head = (
            f"POST {find_path(System.RELAY)} HTTP/1.1", "host: localhost", "connection: close",
            "content-type: application/json", f"authorization: Bearer {muster.key}", f"content-length: {len(body)}",
        )  # fmt: skip
        self._request = "\r\n".join([*head, "", body]).encode()

    async def ask(self, outcomes: Outcomes) -> None:
        """Send one request and note what became of it."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(_GIVE_UP_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                try:
                    writer.write(self._request)
                    answer = await reader.read(-1)
                finally:
                    writer.close()
        except OSError as error:  # a timeout is one
            outcomes.problems.append(type(error).__name__)
            return
        head, _, _ = answer.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 503") and b"retry-after" in head:
            outcomes.refused_s.append(time.monotonic() - began)
        elif head.startswith(b"HTTP/1.1 200") and _ENDS in answer[-60:] and b'"error"' not in answer:
            outcomes.answered_at.append(time.monotonic())
        else:
            outcomes.problems.append(repr(answer[:200]))

    async def keep_busy(self, outcomes: Outcomes, seconds: float) -> None:
        """Have as many callers as slots ask again and again."""
        until = time.monotonic() + seconds

        async def one() -> None:
            while time.monotonic() < until:
                await self.ask(outcomes)

        await asyncio.gather(*(one() for _ in range(SLOTS)))

    async def overload(self, outcomes: Outcomes, seconds: float, *, per_s: float) -> None:
        """Ask at a rate that takes no notice of answers."""
        began, sent = time.monotonic(), 0
        async with asyncio.TaskGroup() as tasks:
            while (passed := time.monotonic() - began) < seconds:
                while sent < passed * per_s:
                    tasks.create_task(self.ask(outcomes))
                    sent += 1
                await asyncio.sleep(0.002)


async def measure(muster: Muster, seconds: float) -> list[tuple[bool, str]]:
    """Return what was demanded, each with whether it was met."""
    callers, calm, crowd = Callers(muster), Outcomes(), Outcomes()
    await callers.keep_busy(calm, _WARM_UP_S)
    began = time.monotonic()
    await callers.keep_busy(calm, 10.0)
    capacity = calm.answered_per_s(began, time.monotonic())
    print(f"capacity: {capacity:.1f} answers per second; now {TIMES * capacity:.0f} requests per second for {seconds:.0f} s")
    await callers.overload(Outcomes(), _SETTLE_S, per_s=TIMES * capacity)
    before = muster.gateway.rss_bytes()
    began = time.monotonic()
    await callers.overload(crowd, seconds, per_s=TIMES * capacity)
    goodput = crowd.answered_per_s(began, began + seconds) / capacity
    growth = muster.gateway.rss_bytes() / before
    muster.require_healthy()
    p99 = statistics.quantiles(crowd.refused_s, n=100)[98] if len(crowd.refused_s) > 1 else float("inf")
    total = len(crowd.answered_at) + len(crowd.refused_s) + len(crowd.problems)
    return [
        (goodput >= GOODPUT_FLOOR, f"goodput {goodput:.1%} of the capacity (at least {GOODPUT_FLOOR:.0%})"),
        (p99 <= REFUSAL_P99_S, f"{len(crowd.refused_s)} of {total} refused, p99 {p99 * 1000:.0f} ms (at most 50 ms)"),
        (growth <= GROWTH, f"memory × {growth:.3f} (at most × {GROWTH})"),
        (not crowd.problems, f"{len(crowd.problems)} neither answered whole nor refused {crowd.problems[:3] or ''}"),
    ]


def main(argv: Sequence[str]) -> int:
    """Measure and judge; 1 when a demand was missed, 2 when the benchmark could not run."""
    parser = argparse.ArgumentParser(prog="muster bench overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the overload lasts (default %(default)g)")
    seconds = parser.parse_args(argv).seconds
    cores = plan_cores(pin=True)
    try:
        with ExitStack() as stack:
            work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
            storage = stack.enter_context(open_storage(cores=cores.around))
            muster = Muster(
                storage=storage,
                upstream_url="",
                work_dir=work_dir,
                cores=cores,
                systems=[System.RELAY],
                slots=SLOTS,
                max_queue=SLOTS,
            )
            stack.callback(muster.stop)
            muster.set_pace(System.RELAY, PACE)
            verdicts = asyncio.run(measure(muster, seconds))
    except BenchmarkError as error:
        print(f"muster bench: {error}", file=sys.stderr)
        return 2
    for is_met, text in verdicts:
        print(f"{'PASS' if is_met else 'FAIL'}  {text}")
    return 0 if all(is_met for is_met, _ in verdicts) else 1
