"""kill -9 of the engine and of the runner, in the middle of a load and of a stream: what is found, how soon it serves again."""

from __future__ import annotations

import asyncio
import time

import psutil

from benchmarks.boxcheck.box import GONE_S, Box, is_alive, require, wait_for
from benchmarks.boxcheck.client import BoxClient
from benchmarks.boxcheck.models import FIRST
from benchmarks.boxcheck.workbench import Workbench
from benchmarks.errors import BenchmarkError
from wire.optoken.verifier import Operation

LONG_TOKENS = 30_000
LOAD = {"gguf_n_ctx": 32_768}
SERVE_S = 60.0
STARTING_S = 10.0


async def run(bench: Workbench) -> None:
    """Kill four times."""
    for title, part in (
        ("engine, in the middle of a stream", _engine_in_stream),
        ("engine, in the middle of a load", _engine_in_load),
        ("runner, in the middle of a load", _runner_in_load),
        ("runner, in the middle of a stream", _runner_in_stream),
    ):
        bench.progress.show(f"kills: {title}")
        bench.section.line(f"\n  kill -9 of the {title}")
        async with bench.open(part.__name__.strip("_")) as box:
            await part(bench, box)


async def _engine_in_stream(bench: Workbench, box: Box) -> None:
    section, client = bench.section, box.client
    await client.load_whole(FIRST, overrides=LOAD)
    engines = box.engines()
    async with client.open_stream(FIRST, tokens=LONG_TOKENS) as (seen, reading):
        await _some_of(seen.body)
        killed_at = time.monotonic()
        _kill(engines)
        states = await _watch_states(client, reading)
        told_s = seen.ended_at - killed_at
    served_s = await _serves_again(box, since=killed_at)
    section.line(f"    the client got {len(seen.body)} bytes, then: {seen.ended} {seen.error}")
    section.line(f"    the model was {' → '.join(states)}")
    section.judge(
        "the client is told within a second", passed=seen.ended == "error event" and told_s < 1, shown=f"{told_s:.2f} s"
    )
    section.judge("the engine comes back by itself", passed=served_s < SERVE_S, shown=f"{served_s:.2f} s after the kill")
    section.judge("the killed process is gone", passed=not any(map(is_alive, engines)))
    section.keep(engine_in_stream={"ended": seen.ended, "told_s": told_s, "states": states, "serves_after_s": served_s})


async def _engine_in_load(bench: Workbench, box: Box) -> None:
    section, client = bench.section, box.client
    model, load = _slow_to_load(bench)
    task_id = str((await client.load(model, overrides=load)).document["taskId"])
    stage = await _in_the_middle(client, task_id, box)
    engines, killed_at = box.engines(), time.monotonic()
    _kill(engines)
    task = await client.wait_task(task_id)
    told_s = time.monotonic() - killed_at
    state, left = await client.state_of(model), box.engines()
    section.line(f"    {model} was at {stage!r}; the task: {task}")
    section.judge(
        "the task fails with a reason", passed=task["status"] == "failed" and bool(task.get("error")), shown=task["status"]
    )
    section.judge(
        "no process is left, the model is failed", passed=not left and state == "failed", shown=f"{state}, {told_s:.2f} s"
    )
    await client.load_whole(model, overrides=load)
    served_s = await _serves_again(box, model, since=killed_at)
    section.judge("a new load serves", passed=True, shown=f"{served_s:.2f} s after the kill")
    section.keep(
        engine_in_load={"task": task["status"], "error": task.get("error"), "told_s": told_s, "serves_after_s": served_s}
    )


async def _runner_in_load(bench: Workbench, box: Box) -> None:
    section, client = bench.section, box.client
    model, load = _slow_to_load(bench)
    body = {"modelId": model, "overrides": load, "verifiedOpToken": client.sign(Operation.MODEL_LOAD, model)}
    task_id = str((await client.call("POST", "/v1/models/load", body=body)).document["taskId"])
    stage = await _in_the_middle(client, task_id, box)
    engines, killed_at = box.engines(), time.monotonic()
    await box.kill()
    gone_s = await wait_for(lambda: not any(map(is_alive, engines)), limit_s=GONE_S)
    started_s = await box.start()
    client = box.client
    task = await client.read_task(task_id)
    replayed = await client.call("POST", "/v1/models/load", body=body)
    section.line(f"    {model} was at {stage!r}; the task after the restart: {task}")
    section.judge("no engine process outlives the runner", passed=gone_s is not None, shown=_in_s(gone_s))
    section.judge("the task says interrupted", passed=task["status"] == "interrupted", shown=task["status"])
    section.judge("the token of that load is spent", passed=replayed.status == 403, shown=f"HTTP {replayed.status}")
    state = await client.state_of(model)
    section.judge("the model is unloaded, nothing runs", passed=state == "unloaded" and not box.engines(), shown=state)
    await client.load_whole(model, overrides=load)
    served_s = await _serves_again(box, model, since=killed_at)
    section.judge(
        "the node serves again", passed=True, shown=f"{served_s:.2f} s after the kill, of which {started_s:.2f} s to start"
    )
    section.keep(
        runner_in_load={"task": task["status"], "engine_gone_s": gone_s, "start_s": started_s, "serves_after_s": served_s}
    )


async def _runner_in_stream(bench: Workbench, box: Box) -> None:
    section, client = bench.section, box.client
    await client.load_whole(FIRST, overrides=LOAD)
    engines = box.engines()
    async with client.open_stream(FIRST, tokens=LONG_TOKENS) as (seen, reading):
        await _some_of(seen.body)
        killed_at = time.monotonic()
        box.child.popen.kill()
        await asyncio.wait_for(asyncio.shield(reading), GONE_S)
        told_s = seen.ended_at - killed_at
    await box.kill()
    gone_s = await wait_for(lambda: not any(map(is_alive, engines)), limit_s=GONE_S)
    started_s = await box.start()
    await box.client.load_whole(FIRST, overrides=LOAD)
    served_s = await _serves_again(box, since=killed_at)
    section.line(f"    the client got {len(seen.body)} bytes, then: {seen.ended}")
    section.judge(
        "the client sees that the answer is not whole", passed=seen.ended == "cut", shown=f"{seen.ended}, {told_s:.2f} s"
    )
    section.judge("no engine process outlives the runner", passed=gone_s is not None, shown=_in_s(gone_s))
    section.judge(
        "the node serves again", passed=True, shown=f"{served_s:.2f} s after the kill, of which {started_s:.2f} s to start"
    )
    section.keep(
        runner_in_stream={"ended": seen.ended, "engine_gone_s": gone_s, "start_s": started_s, "serves_after_s": served_s}
    )


async def _some_of(body: bytearray) -> None:
    """Return once a few pieces of an answer are there. Raises BenchmarkError."""
    await require(lambda: len(body) > 2000, "the stream began")


def _slow_to_load(bench: Workbench) -> tuple[str, dict[str, object]]:
    """Return the model whose load leaves most time to be in the middle of, and its overrides."""
    return (FIRST, dict(LOAD)) if bench.models.ct2 is None else (bench.models.ct2, {})


async def _in_the_middle(client: BoxClient, task_id: str, box: Box) -> str:
    """Return the stage of a load once its process is at work: it starts its engine, or reads weights."""
    await require(lambda: bool(box.engines()), "the engine process was there")
    deadline = time.monotonic() + STARTING_S
    while True:
        task = await client.read_task(task_id)
        stage = str(task.get("stage"))
        if stage != "waiting" or time.monotonic() > deadline:
            return stage
        await asyncio.sleep(0.002)


async def _watch_states(client: BoxClient, reading: asyncio.Task[None]) -> list[str]:
    """Return the states that a model goes through until it is loaded again and its stream has ended."""
    states: list[str] = []
    deadline = time.monotonic() + SERVE_S
    while time.monotonic() < deadline:
        state = await client.state_of(FIRST)
        if not states or states[-1] != state:
            states.append(state)
        if reading.done() and "failed" in states and state == "loaded":
            break
        await asyncio.sleep(0.005)
    return states


async def _serves_again(box: Box, model: str = FIRST, *, since: float) -> float:
    """Return the seconds from ``since`` until a request was answered. Raises BenchmarkError."""
    deadline = time.monotonic() + SERVE_S
    while True:
        reply = await box.client.chat(model)
        if reply.status == 200:
            return reply.ended - since
        if time.monotonic() > deadline:
            raise BenchmarkError(f"nothing was served within {SERVE_S:g} s: {reply.status} {reply.body[:300]!r}")
        await asyncio.sleep(0.02)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        process.kill()


def _in_s(seconds: float | None) -> str:
    return "still there" if seconds is None else f"gone after {seconds:.2f} s"
