"""Thirty clients of three tenants with weights 1:2:4 on one model: what share of its slots each tenant gets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median

from benchmarks.boxcheck.arithmetic import Stay, percentile, relative_error, shares, time_by_tenant
from benchmarks.boxcheck.box import Box
from benchmarks.boxcheck.client import tenant
from benchmarks.boxcheck.models import FIRST
from benchmarks.boxcheck.parsing import read_metrics, sum_samples
from benchmarks.boxcheck.workbench import Workbench

WEIGHTS = {"small": 1.0, "middle": 2.0, "large": 4.0}
TOKENS = {"small": 240, "middle": 160, "large": 80}
"""The smaller a tenant's share, the longer its answers: were requests counted instead of time, the shares would be far off."""
CLIENTS_EACH = 10
SLOTS = 2
WARM_UP_S = 2.0
TOLERANCE = 0.10


@dataclass(slots=True)
class Served:
    """One answer: when it held a slot, how long it waited, and the engine's own time, both in milliseconds."""

    stay: Stay
    wait_ms: float
    gpu_ms: float


async def run(bench: Workbench) -> None:
    """Keep all clients asking, then add up."""
    environment = {f"TENANT_WEIGHT_{name}": f"{weight:g}" for name, weight in WEIGHTS.items()}
    environment |= {"MAX_QUEUE_DEPTH": "100", "QUEUE_TIMEOUT_MS": "120000"}
    async with bench.open(environment=environment) as box:
        await box.client.load_whole(FIRST, overrides={"target_inflight": SLOTS, "gguf_n_ctx": 1024})
        served, statuses, since, until = await _ask(bench, box)
        counted = read_metrics((await box.client.call("GET", "/metrics")).body.decode())
        _judge(bench, served, since=since, until=until)
        bench.section.judge(
            "every request was served",
            passed=set(statuses) == {200},
            shown=", ".join(f"{n} × {s}" for s, n in statuses.items()),
        )
        by_tenant = {name: sum_samples(counted, "vllm_requests_total", tenant=name, status="success") for name in WEIGHTS}
        answered = Counter(one.stay.tenant for one in served)
        bench.section.judge(
            "the metrics count the same requests per tenant",
            passed=all(by_tenant[name] == answered[name] for name in WEIGHTS),
            shown=", ".join(f"{name} {by_tenant[name]:.0f}" for name in WEIGHTS),
        )


async def _ask(bench: Workbench, box: Box) -> tuple[list[Served], Counter[int], float, float]:
    since = time.monotonic() + WARM_UP_S
    until = since + bench.options.fairness_s
    served: list[Served] = []
    statuses: Counter[int] = Counter()

    async def keep_asking(name: str) -> None:
        while time.monotonic() < until:
            reply = await box.client.chat(FIRST, tokens=TOKENS[name], headers=tenant(name))
            statuses[reply.status] += 1
            wait_ms = reply.number("x-queue-wait-ms")
            stay = Stay(name, reply.began + wait_ms / 1000, reply.ended)
            served.append(Served(stay, wait_ms, reply.number("x-gpu-time-ms")))

    clients = [asyncio.create_task(keep_asking(name)) for name in WEIGHTS for _ in range(CLIENTS_EACH)]
    work = asyncio.gather(*clients)
    while not work.done():
        left_s = max(0.0, until - time.monotonic())
        bench.progress.show(f"fairness: {len(clients)} clients, {len(served)} answers · {left_s:.0f} s left")
        await asyncio.wait([work], timeout=5.0)
    await work
    return served, statuses, since, until


def _judge(bench: Workbench, served: list[Served], *, since: float, until: float) -> None:
    due = shares(WEIGHTS)
    slot_s = time_by_tenant([one.stay for one in served], since=since, until=until)
    slot_shares = shares(slot_s)
    inside = [one for one in served if since <= one.stay.ended <= until]
    gpu_shares = shares({name: sum(one.gpu_ms for one in inside if one.stay.tenant == name) for name in WEIGHTS})
    rows: list[list[object]] = [
        [
            "tenant",
            "weight",
            "answers",
            "of tokens",
            "slot time, s",
            "share",
            "due",
            "off by",
            "engine time",
            "wait p50, ms",
            "p95",
        ]
    ]
    for name, weight in WEIGHTS.items():
        mine = [one for one in inside if one.stay.tenant == name]
        waits = [one.wait_ms for one in mine] or [0.0]
        rows.append([
            name, f"{weight:g}", len(mine), TOKENS[name], slot_s.get(name, 0.0), f"{slot_shares.get(name, 0.0):.1%}",
            f"{due[name]:.1%}", f"{relative_error(slot_shares.get(name, 0.0), due[name]):+.1%}", f"{gpu_shares[name]:.1%}",
            median(waits), percentile(waits, 0.95),
        ])  # fmt: skip
    bench.section.table(rows)
    bench.section.keep(
        seconds=until - since, slots=SLOTS, clients=CLIENTS_EACH * len(WEIGHTS), weights=WEIGHTS, slot_seconds=slot_s,
        slot_shares=slot_shares, engine_time_shares=gpu_shares, answers=Counter(one.stay.tenant for one in inside),
    )  # fmt: skip
    for name in WEIGHTS:
        off = relative_error(slot_shares.get(name, 0.0), due[name])
        bench.section.judge(
            f"slot time of {name} within {TOLERANCE:.0%} of its share", passed=abs(off) <= TOLERANCE, shown=f"{off:+.1%}"
        )
    busy = sum(slot_s.values()) / (until - since) / SLOTS
    bench.section.judge("the slots were always wanted", passed=busy >= 0.9, shown=f"{busy:.0%} of their time in use")
