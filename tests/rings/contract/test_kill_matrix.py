"""kill -9 of every part, idle and in the middle of requests, on a stack of its own with the real local node.

Each row: every accepted request ends in exactly one state, and the system serves again once the part is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial

import psutil
import psycopg
import pytest
import pytest_asyncio

from tests.fakes.control_process import standing_still
from tests.fakes.http_client import Exchange, Reply
from tests.fakes.lab import OPEN_STATES, Lab, chat_body, unique
from tests.fakes.scripted_box import ScriptedWorker, delta_text
from tests.fakes.stack import Stack, run_stack
from tests.fakes.waiting import eventually, wait_until
from wire.ids import format_id

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FINAL_WITHIN_S = 60.0
SERVES_WITHIN_S = 60.0
"""On an idle machine it is less than ten."""
BACK_WITHIN_S = 60.0
OUTLASTS_S = BACK_WITHIN_S + SERVES_WITHIN_S + 30.0
"""So long a request of the load, and whoever asks, waits: longer than a part may take to be back and serve."""
ACCEPTED_WITHIN_S = 4.0
"""Longer than a machine stands still for, and less than the database has to be silent for to be taken for gone."""
LOAD_TOKENS = 50
KILLS = int(os.environ.get("MUSTER_TEST_KILLS", "2"))
"""All parts in turn: ``MUSTER_TEST_KILLS=200 ./muster test tests/rings/contract/test_kill_matrix.py -k how_often``."""

PARTS = {
    "node": ("-m runner", ), "gateway": ("controlplane.serve_gateway", ),
    "worker": ("controlplane.serve_worker", "controlplane.celery"), "valkey": ("valkey-server", "redis-server"),
    "postgres": ("bin/postgres", "postgres -D"), "control": ("controlplane.serve_control", ),
}  # fmt: skip


@pytest.fixture(scope="module")
def doomed_stack() -> Iterator[Stack]:
    waits = dict.fromkeys(("MUSTER_QUEUE_TIMEOUT_S", "MUSTER_NO_NODE_WAIT_S"), str(OUTLASTS_S))
    settings = {**waits, "MUSTER_ACCEPT_TIMEOUT_S": str(ACCEPTED_WITHIN_S)}
    with run_stack("doomed", settings, node=True) as running:
        yield running


@pytest_asyncio.fixture
async def doomed(doomed_stack: Stack) -> AsyncIterator[Lab]:
    """The lab on that stack; scripted workers share the demo credential."""
    corner = Lab(doomed_stack, doomed_stack.ready.worker_secret, doomed_stack.main)
    try:
        yield corner
    finally:
        await corner.close()


@dataclass
class Load:
    """Requests of every kind that were under way when the part died."""

    model: str
    worker: ScriptedWorker
    tasks: list[asyncio.Task[Reply]]
    stream: Exchange
    real: Exchange
    node: psutil.Process


async def start_load(lab: Lab) -> Load:
    """Have one stream begun, one plain request running and two waiting on a scripted worker, one on the real node."""
    model = await lab.model()
    worker = await lab.worker(model, name=unique("doomed"), max_concurrent=2)
    stream = await lab.open(model, "begun stream")
    job = await worker.job()
    await worker.chunk(job, delta_text(job, "begun"))
    await stream.until(b"begun")
    running, *queued = [chat_body(model, text) for text in ("running", "queued 0", "queued 1")]
    tasks = [lab.spawn(lab.post(running, within_s=OUTLASTS_S))]
    await worker.job()
    tasks += [lab.spawn(lab.post(body, within_s=OUTLASTS_S)) for body in queued]
    await lab.queued(2)
    # The tiny model would be done before anything can be killed, so its node is held while the request is on it.
    node = lab.stack.part(*PARTS["node"])
    node.suspend()
    real = await lab.open(lab.stack.ready.model, "Once upon a time", max_tokens=LOAD_TOKENS)

    async def assigned() -> bool:
        return (await lab.records(lab.stack.ready.model))[-1]["status"] in {"assigned", "running"}

    await eventually(assigned, what="the real node has a request")
    return Load(model, worker, tasks, stream, real, node)


async def end_load(lab: Lab, load: Load) -> None:
    """Let everything that can still finish do so."""

    async def answer_everything() -> None:
        for job in load.worker.jobs:
            if job.text == "begun stream":
                await load.worker.stream(job, ["whole"])
            else:
                await load.worker.answer(job)
        while True:
            await load.worker.answer(await load.worker.job(within_s=60))

    answering = asyncio.create_task(answer_everything())
    load.tasks.append(lab.spawn(load.stream.finish(within_s=60)))
    load.tasks.append(lab.spawn(load.real.finish(within_s=60)))
    await asyncio.gather(*load.tasks, return_exceptions=True)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


def describe(outcome: Reply) -> str:
    if outcome.status == 0 or not outcome.whole:
        return "connection lost"
    if outcome.status != 200:
        return f"{outcome.status} {outcome.error['code']}"
    if outcome.headers["content-type"].startswith("text/event-stream") and outcome.events[-1] != "[DONE]":
        return "200, error event"
    return "200"


def open_records(stack: Stack) -> int | None:
    """Return how many requests are in a state that is not final; None while the database is away."""
    query = "SELECT count(*) FROM gateway_requestrecord WHERE state = ANY(%s)"
    try:
        with psycopg.connect(stack.ready.database_url, connect_timeout=2) as database:
            row = database.execute(query, (list(OPEN_STATES),)).fetchone()
    except psycopg.OperationalError:
        return None
    return int(row[0]) if row else None


def check_that_none_is_doubled(stack: Stack, since: float) -> None:
    query = "SELECT id FROM gateway_requestrecord WHERE created_at >= to_timestamp(%s)"
    with psycopg.connect(stack.ready.database_url) as database:
        found = database.execute(query, (since,)).fetchall()
    assert len(set(found)) == len(found), "a request has two rows"


def kill(stack: Stack, part: str) -> None:
    """Kill a part and wait until another process is in its place."""
    victim = stack.part(*PARTS[part])
    orphans = victim.children(recursive=True)
    os.kill(victim.pid, signal.SIGKILL)

    def replaced() -> psutil.Process | None:
        found = stack.find_part(*PARTS[part])
        return found if found is not None and found.pid != victim.pid else None

    wait_until(replaced, within_s=BACK_WITHIN_S, what=f"{part} was started again")
    _, left = psutil.wait_procs(orphans, timeout=30)
    assert not left, f"{part} left processes behind: {left}"


async def serves(lab: Lab) -> bool:
    try:
        reply = await lab.post(chat_body(lab.stack.ready.model, "Hi", max_tokens=4), within_s=15)
    except (OSError, TimeoutError):
        return False
    return reply.status == 200 and reply.whole


@pytest.mark.parametrize("when", ["idle", "mid-request"])
@pytest.mark.parametrize("part", ["node", "gateway", "worker", "valkey", "postgres", "control"])
async def test_after_kill_9_every_request_has_one_final_state_and_the_system_serves_again(
    doomed: Lab, part: str, when: str
) -> None:
    lab = doomed
    await eventually(lambda: serves(lab), what="the stack serves before the kill", within_s=SERVES_WITHIN_S, pause_s=0.2)
    since = time.time()
    load = await start_load(lab) if when == "mid-request" else None
    await asyncio.to_thread(kill, lab.stack, part)
    if load is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            load.node.resume()
    await eventually(lambda: serves(lab), within_s=SERVES_WITHIN_S, what=f"serving after {part} is back", pause_s=0.1)
    if load is not None:
        await end_load(lab, load)
    await asyncio.to_thread(
        wait_until, lambda: open_records(lab.stack) == 0, within_s=FINAL_WITHIN_S,
        what=f"no open request after {part} was killed",
    )  # fmt: skip
    await asyncio.to_thread(check_that_none_is_doubled, lab.stack, since)
    if load is not None:
        records = await lab.records(load.model)
        # Only the process that holds the connections takes its requests with it; the rest is not on their way.
        expected = "interrupted" if part == "gateway" else "completed"
        assert [record["status"] for record in records] == [expected] * 4
        if part == "node":
            asked = [row for row in await lab.records(lab.stack.ready.model) if row["max_tokens"] == LOAD_TOKENS]
            assert (asked[-1]["status"], asked[-1]["attempts"] > 1) == ("completed", True)


@dataclass
class KillRun:
    """What the kills of one part came to. All but ``kills``, ``requests`` and ``serving_s`` has to be empty."""

    part: str
    kills: int = 0
    requests: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    serving_s: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        times = " / ".join(f"{pick(self.serving_s):.1f}" for pick in (min, statistics.median, max))
        faults = f"{len(self.lost):>6}{len(self.doubled):>9}{len(self.wrong):>15}"
        return f"{self.part:<10}{self.kills:>6}{self.requests:>10}{faults}   {times}"


async def ask_until(lab: Lab, stop: asyncio.Event, replies: list[Reply], *, streams: bool) -> None:
    while not stop.is_set():
        body = chat_body(lab.stack.ready.model, "Once upon a time", stream=streams, max_tokens=LOAD_TOKENS)
        with contextlib.suppress(OSError):
            replies.append(await lab.post(body, within_s=OUTLASTS_S))


def has_many(replies: list[Reply], number: int) -> bool:
    return len(replies) >= number


def has_whole(reply: Reply) -> bool:
    """Whether a client has all of an answer: of a stream its last event."""
    if reply.status != 200:
        return False
    is_stream = reply.headers["content-type"].startswith("text/event-stream")
    return bool(reply.events) and reply.events[-1] == "[DONE]" if is_stream else reply.whole


def judge(run: KillRun, replies: list[Reply], rows: list[tuple[uuid.UUID, str]]) -> None:
    states: dict[str, str] = {}
    for row_id, state in rows:
        name = format_id("req", row_id)
        if name in states:
            run.doubled.append(name)
        states[name] = state
        if state in OPEN_STATES:
            run.lost.append(name)
    for reply in replies:
        name = reply.headers.get("x-request-id", "") if reply.status else ""
        if reply.status == 503 or not name:
            continue  # nothing was promised
        state = states.get(name, "")
        if not state:
            run.lost.append(name)
        elif has_whole(reply) != (state == "completed") and not (state == "completed" and b'"finish_reason":"' in reply.body):
            run.wrong.append(f"{name} {state}: {describe(reply)}")
    run.requests += len(replies)


@pytest.mark.timeout(900 + 30 * KILLS)
async def test_no_request_is_lost_doubled_or_wrongly_ended_whatever_is_killed_how_often(
    doomed: Lab, request: pytest.FixtureRequest
) -> None:
    runs = {part: KillRun(part) for part in PARTS}
    for number in range(KILLS):
        run = runs[list(PARTS)[number % len(PARTS)]]
        await eventually(lambda: serves(doomed), what="the stack serves before the kill", within_s=SERVES_WITHIN_S, pause_s=0.1)
        stop, since, replies = asyncio.Event(), time.time(), list[Reply]()
        asking = [asyncio.create_task(ask_until(doomed, stop, replies, streams=place % 2 == 0)) for place in range(6)]
        enough = random.randint(3, 30)  # any moment will do
        await eventually(partial(has_many, replies, enough), what="requests are under way")
        started = time.monotonic()
        await asyncio.to_thread(kill, doomed.stack, run.part)
        await eventually(lambda: serves(doomed), within_s=SERVES_WITHIN_S, what=f"serving after {run.part}", pause_s=0.02)
        run.serving_s.append(time.monotonic() - started)
        run.kills += 1
        stop.set()
        await asyncio.gather(*asking)
        is_final = lambda: open_records(doomed.stack) == 0  # noqa: E731
        await asyncio.to_thread(wait_until, is_final, within_s=FINAL_WITHIN_S, what="every request is final")
        query = "SELECT id, state FROM gateway_requestrecord WHERE created_at >= to_timestamp(%s)"
        with psycopg.connect(doomed.stack.ready.database_url) as database:
            judge(run, replies, database.execute(query, (since,)).fetchall())
    found = [run for run in runs.values() if run.kills]
    lines = ["part       kills  requests  lost  doubled  wrongly ended   serves again after s (min / median / max)"]
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    assert capture is not None
    with capture.global_and_fixture_disabled():
        sys.stdout.write("\n" + "\n".join([*lines, *map(str, found)]) + "\n")
    assert [run for run in found if run.lost or run.doubled or run.wrong] == []


async def is_written(lab: Lab, model: str, state: str) -> bool:
    return [row["status"] for row in await lab.records(model)] == [state]


async def test_while_the_database_does_not_answer_new_requests_are_refused_and_streams_go_on(doomed: Lab) -> None:
    lab = doomed
    model = await lab.model()
    worker = await lab.worker(model, name="frozen-database", max_concurrent=4)
    stream = await lab.open(model, "begun")
    job = await worker.job()
    # With nothing under way, the next request's row is sent and its fate is unknown: the gateway has to close it later.
    await eventually(lambda: is_written(lab, model, "running"), what="the running stream's row")
    with standing_still(lab.stack.part(*PARTS["postgres"])):
        assert describe(await lab.ask(model, "new")) == "503 NO_AVAILABLE_NODE"
        await worker.cancelled(await worker.job())  # it was given to a node, and taken back when no row came of it
        assert describe(await lab.ask(model, "newer")) == "503 NO_AVAILABLE_NODE"
        await worker.chunk(job, delta_text(job, "still flowing"))
        await stream.until(b"still flowing")
        await worker.stream(job, [])
        assert (await stream.finish()).events[-1] == "[DONE]"
    records = await lab.final(model, 3, within_s=FINAL_WITHIN_S)
    assert records[0]["status"] == "completed"
    assert {record["status"] for record in records[1:]} <= {"rejected", "interrupted", "failed"}
    assert len(worker.jobs) == 2, "once a commit has failed, no node is asked before a row is there"
    await eventually(lambda: serves(lab), within_s=SERVES_WITHIN_S, what="serving again", pause_s=0.1)


async def test_while_valkey_does_not_answer_requests_are_served(doomed: Lab) -> None:
    lab = doomed
    model = await lab.model()
    worker = await lab.worker(model, name="frozen-valkey")
    with standing_still(lab.stack.part(*PARTS["valkey"])):
        for number in range(3):
            reply = lab.ask(model, f"{number}")
            await worker.answer(await worker.job())
            assert (await reply).status == 200
    records = await lab.final(model, 3)
    assert {record["status"] for record in records} == {"completed"}
