"""Refusals when the node is full or a tenant is too fast: their bodies and headers, beside those of the specification."""

from __future__ import annotations

import asyncio
import re
import time
from functools import partial

from benchmarks.boxcheck.box import Box, require
from benchmarks.boxcheck.client import Reply, Streamed, tenant
from benchmarks.boxcheck.models import FIRST
from benchmarks.boxcheck.workbench import Workbench
from benchmarks.errors import BenchmarkError

DEPTH = 2
RATE = 3
LONG_TOKENS = 1500
TRIES = 20
"""The tiny model has answered LONG_TOKENS in a second or two, and a busy machine may stand still for as long: what comes of a
try counts only when the slot was taken all the while."""
LOAD = {"gguf_n_ctx": 2048}


async def run(bench: Workbench) -> None:
    """Fill the queue of the node, of a model and of a tenant; wait too long; ask too often."""
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
    section = bench.section
    refused, served = await _ask_while_full(box)
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


async def _ask_while_full(box: Box) -> tuple[Reply, list[Reply]]:
    """Return what one request too many is answered, and what those in the queue are. Raises BenchmarkError."""
    client = box.client
    for _ in range(TRIES):
        async with client.open_stream(FIRST, tokens=LONG_TOKENS) as (seen, reading):
            await require(partial(_has_begun, seen), "the slot was taken")
            waiting = [asyncio.create_task(client.chat(FIRST, headers=tenant(f"waiter-{n}"))) for n in range(DEPTH)]
            is_full = await _fill(box, DEPTH, reading)
            refused = await client.chat(FIRST, headers=tenant("latecomer"))
            is_full = is_full and await _count_waiting(box) == DEPTH
        served = await asyncio.gather(*waiting)
        if is_full:
            return refused, served
    raise BenchmarkError(f"{DEPTH} requests waited in one of {TRIES} tries until another one was answered: they did not")


async def _rate_limit(bench: Workbench, box: Box) -> None:
    section, client = bench.section, box.client
    within = [await client.chat(FIRST, headers=tenant("community-x")) for _ in range(RATE)]
    asked_at = time.time()
    refused = await client.chat(FIRST, headers=tenant("community-x"))
    heard_at = time.time()
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
    # The node said so at some moment between the two.
    least_s, most_s = (reset_at - heard_at, reset_at - asked_at) if isinstance(reset_at, int) else (0.0, 0.0)
    section.judge(
        "resetAt and Retry-After name the same moment, within the minute",
        passed=retry.isdecimal() and least_s <= 61 and most_s > 0 and least_s - 2 <= int(retry) <= most_s + 2,
        shown=f"in {most_s:.0f} s, {retry} s",
    )
    section.judge(
        "requests within the limit, and those of other tenants, are served",
        passed=all(reply.status == 200 for reply in (*within, other)),
    )
    section.keep(rate_limit=error)


async def _model_caps(bench: Workbench, box: Box) -> None:
    """The caps of llm-pool: one waiting request for each tenant, two for the model; nobody waits longer than allowed."""
    section = bench.section
    by_tenant, by_model, waited = await _ask_beyond_caps(box)
    cases = [
        ("tenant's queue full", by_tenant, 429, "fairness_key_queue_full"),
        ("model's queue full", by_model, 429, "executor_queue_full"),
        ("waited too long", waited, 503, "queue_timeout"),
    ]
    for title, reply, status, code in cases:
        _show_reply(bench, title, reply)
        section.judge(
            f"{title}: {status} {code} with Retry-After",
            passed=(reply.status, reply.error.get("code")) == (status, code)
            and reply.headers.get("retry-after", "").isdecimal(),
        )
        section.figures[code] = reply.error


async def _ask_beyond_caps(box: Box) -> tuple[Reply, Reply, Reply]:
    """Return what a tenant's second request and the model's third are answered, and one that waits. Raises BenchmarkError."""
    client = box.client
    for _ in range(TRIES):
        async with client.open_stream(FIRST, tokens=LONG_TOKENS) as (seen, reading):
            await require(partial(_has_begun, seen), "the slot was taken")
            waiting = [asyncio.create_task(client.chat(FIRST, headers=tenant(name))) for name in ("one", "two")]
            is_full = await _fill(box, 2, reading)
            by_tenant, by_model = await asyncio.gather(
                client.chat(FIRST, headers=tenant("one")), client.chat(FIRST, headers=tenant("three"))
            )
            is_full = is_full and await _count_waiting(box) == 2
            waited = await asyncio.gather(*waiting)
        if is_full and all(reply.status != 200 for reply in waited):
            return by_tenant, by_model, waited[0]
    raise BenchmarkError(f"two requests waited for as long as they may in one of {TRIES} tries: they did not")


def _has_begun(seen: Streamed) -> bool:
    return bool(seen.body)


async def _fill(box: Box, depth: int, reading: asyncio.Task[None]) -> bool:
    """Return whether so many requests wait before the stream that has the slot has been read."""
    while not reading.done():
        if await _count_waiting(box) >= depth:
            return True
    return False


async def _count_waiting(box: Box) -> int:
    """Return how many requests wait, as the node says."""
    models = (await box.client.call("GET", "/v1/admin/models")).document["models"]
    return sum(int(entry["queue_depth"]) for entry in models)


def _show_reply(bench: Workbench, title: str, reply: Reply) -> None:
    """Print a refusal as it came."""
    named = ("retry-after", "content-type", "x-queue-wait-ms", "x-cache-hit")
    bench.section.line(f"\n  {title}: HTTP {reply.status}")
    for name in named:
        if name in reply.headers:
            bench.section.line(f"    {name}: {reply.headers[name]}")
    bench.section.line(f"    {reply.body.decode(errors='replace')}")
