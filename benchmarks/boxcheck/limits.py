"""Refusals when the box is full or a tenant is too fast: their bodies and headers, beside those of the specification."""

from __future__ import annotations

import asyncio
import re
import time

from benchmarks.boxcheck.box import Box, require
from benchmarks.boxcheck.client import Reply, tenant
from benchmarks.boxcheck.models import FIRST
from benchmarks.boxcheck.workbench import Workbench
from benchmarks.errors import BenchmarkError

DEPTH = 2
RATE = 3
LONG_TOKENS = 1500
FILL_S = 10.0
LOAD = {"gguf_n_ctx": 2048}


async def run(bench: Workbench) -> None:
    """Fill the queue of the box, of a model and of a tenant; wait too long; ask too often."""
    environment = {"MAX_QUEUE_DEPTH": str(DEPTH), "TENANT_RATE_LIMIT_community-x": f"{RATE}req/min"}
    async with bench.open("box", environment=environment) as box:
        await box.client.load_whole(FIRST, overrides=LOAD)
        await _queue_full(bench, box)
        await _rate_limit(bench, box)
    fairness = {"pending_per_key": 1, "pending_per_executor": 2}
    settings = {"engine": {"fairness": fairness}}
    async with bench.open("caps", environment={"QUEUE_TIMEOUT_MS": "400"}, settings=settings) as box:
        await box.client.load_whole(FIRST, overrides=LOAD)
        await _model_caps(bench, box)


async def _queue_full(bench: Workbench, box: Box) -> None:
    section, client = bench.section, box.client
    async with client.open_stream(FIRST, tokens=LONG_TOKENS) as (seen, _):
        await require(lambda: bool(seen.body), "the slot was taken")
        waiting = [asyncio.create_task(client.chat(FIRST, headers=tenant(f"waiter-{n}"))) for n in range(DEPTH)]
        await _fill(box, DEPTH)
        refused = await client.chat(FIRST, headers=tenant("latecomer"))
    served = await asyncio.gather(*waiting)
    _show_reply(bench, "queue full", refused)
    error, retry = refused.error, refused.headers.get("retry-after", "")
    wanted = re.compile(rf"Queue depth {DEPTH}/{DEPTH}, retry in (\d+) seconds?\Z")
    text = wanted.match(str(error.get("message")))
    section.judge("a full queue answers 503 queue_full", passed=(refused.status, error.get("code")) == (503, "queue_full"))
    section.judge(
        "its message and Retry-After agree, as in the specification", passed=text is not None and text[1] == retry, shown=retry
    )
    section.judge(
        "queueDepth and avgWaitMs are numbers",
        passed=error.get("queueDepth") == DEPTH and isinstance(error.get("avgWaitMs"), int),
        shown=f"{error.get('queueDepth')}, {error.get('avgWaitMs')}",
    )
    section.judge("those who waited were served", passed=all(reply.status == 200 for reply in served))
    section.keep(queue_full=error)


async def _rate_limit(bench: Workbench, box: Box) -> None:
    section, client = bench.section, box.client
    within = [await client.chat(FIRST, headers=tenant("community-x")) for _ in range(RATE)]
    refused = await client.chat(FIRST, headers=tenant("community-x"))
    other = await client.chat(FIRST, headers=tenant("community-y"))
    _show_reply(bench, "rate limit", refused)
    error, retry = refused.error, refused.headers.get("retry-after", "")
    section.judge(
        "too many requests answer 429 rate_limit_exceeded",
        passed=(refused.status, error.get("code")) == (429, "rate_limit_exceeded"),
    )
    section.judge(
        "message, limit and remaining as in the specification",
        passed=(error.get("message"), error.get("limit"), error.get("remaining"))
        == (f"Tenant community-x exceeded {RATE} req/min", RATE, 0),
    )
    reset_at = error.get("resetAt")
    in_s = reset_at - time.time() if isinstance(reset_at, int) else None
    section.judge(
        "resetAt and Retry-After name the same moment, within the minute",
        passed=in_s is not None and retry.isdecimal() and 0 < in_s <= 61 and abs(in_s - int(retry)) <= 2,
        shown=f"in {in_s or 0:.0f} s, {retry} s",
    )
    section.judge(
        "requests within the limit, and those of other tenants, are served",
        passed=all(reply.status == 200 for reply in (*within, other)),
    )
    section.keep(rate_limit=error)


async def _model_caps(bench: Workbench, box: Box) -> None:
    """The caps of llm-pool: one waiting request for each tenant, two for the model; nobody waits longer than allowed."""
    section, client = bench.section, box.client
    async with client.open_stream(FIRST, tokens=LONG_TOKENS) as (seen, _):
        await require(lambda: bool(seen.body), "the slot was taken")
        waiting = [asyncio.create_task(client.chat(FIRST, headers=tenant(name))) for name in ("one", "two")]
        await _fill(box, 2)
        by_tenant, by_model = await asyncio.gather(
            client.chat(FIRST, headers=tenant("one")), client.chat(FIRST, headers=tenant("three"))
        )
        waited = await asyncio.gather(*waiting)
    cases = [
        ("tenant's queue full", by_tenant, 429, "fairness_key_queue_full"),
        ("model's queue full", by_model, 429, "executor_queue_full"),
        ("waited too long", waited[0], 503, "queue_timeout"),
    ]
    for title, reply, status, code in cases:
        _show_reply(bench, title, reply)
        section.judge(
            f"{title}: {status} {code} with Retry-After",
            passed=(reply.status, reply.error.get("code")) == (status, code)
            and reply.headers.get("retry-after", "").isdecimal(),
        )
        section.figures[code] = reply.error


async def _fill(box: Box, depth: int) -> None:
    """Return once so many requests wait. Raises BenchmarkError."""
    deadline = time.monotonic() + FILL_S
    while True:
        models = (await box.client.call("GET", "/v1/admin/models")).document["models"]
        if sum(int(entry["queue_depth"]) for entry in models) >= depth:
            return
        if time.monotonic() > deadline:
            raise BenchmarkError(f"{depth} requests waited within {FILL_S:g} s: they did not")


def _show_reply(bench: Workbench, title: str, reply: Reply) -> None:
    """Print a refusal as it came."""
    named = ("retry-after", "content-type", "x-queue-wait-ms", "x-cache-hit")
    bench.section.line(f"\n  {title}: HTTP {reply.status}")
    for name in named:
        if name in reply.headers:
            bench.section.line(f"    {name}: {reply.headers[name]}")
    bench.section.line(f"    {reply.body.decode(errors='replace')}")
