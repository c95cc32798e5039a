"""A gateway that is told to stop lets finish what it can and refuses what comes."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.fakes.http_client import assert_failure, assert_stream_failure
from tests.fakes.lab import Lab, unique
from tests.fakes.scripted_worker import delta_text
from tests.fakes.stack import Gateway, Stack, answers
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio

STREAMS, CLOSED_WITHIN_S = 100, 30.0
SHUTDOWN_TEXT = "Service temporarily unavailable while workers shut down"


def start(stack: Stack, name: str, grace_s: str) -> Gateway:
    """Return a gateway of its own for one test."""
    return stack.gateway(name, {"MUSTER_SHUTDOWN_GRACE_S": grace_s, "MUSTER_NO_NODE_WAIT_S": "30"})


def answers_no_more(gateway: Gateway) -> bool:
    """Return whether the gateway takes nothing new; asked beside the event loop, on which workers have to be heard."""
    return not answers(gateway.url + "/health")


async def exit_status(gateway: Gateway) -> int:
    """Wait until the process has ended; a shell sees the signal as the cause, as it should."""
    assert gateway.process is not None
    return abs(await asyncio.to_thread(gateway.process.wait, 60))


async def test_sigterm_lets_requests_in_flight_finish_then_lets_go_of_the_workers(lab: Lab) -> None:
    gateway = start(lab.stack, "patient", "20")
    lab.gateway = gateway
    model = await lab.model(gateway)
    worker = await lab.worker(model, max_concurrent=2)
    stream = await lab.open(model, "stream")
    first = await worker.job()
    await worker.chunk(first, delta_text(first, "begun"))
    await stream.until(b"begun")
    plain = lab.ask(model, "plain")
    second = await worker.job()
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    # Closing the listener is the first thing it does.
    await eventually(lambda: asyncio.to_thread(answers_no_more, gateway), what="nothing new is taken")
    await worker.answer(second)
    assert (await plain).status == 200
    await worker.stream(first, ["end"])
    assert (await stream.finish()).events[-1] == "[DONE]"
    assert (await worker.closed())[0] in {1000, 1001, 1012}
    assert await exit_status(gateway) in {0, signal.SIGTERM}
    records = await lab.final(model, 2)
    assert [record["status"] for record in records] == ["completed", "completed"]


async def test_what_does_not_finish_within_the_grace_period_is_interrupted_and_recorded(lab: Lab) -> None:
    gateway = start(lab.stack, "curt", "0.5")
    lab.gateway = gateway
    model = await lab.model(gateway)
    worker = await lab.worker(model, max_concurrent=2)
    stream = await lab.open(model, "stream")
    job = await worker.job()
    await worker.chunk(job, delta_text(job, "begun"))
    await stream.until(b"begun")
    plain = lab.ask(model, "plain")
    await worker.job()
    queued = lab.ask(model, "queued")
    await lab.queued(1)
    assert gateway.process is not None
    gateway.process.send_signal(signal.SIGTERM)
    assert_failure(await queued, 503, "REQUEST_INTERRUPTED", SHUTDOWN_TEXT)
    assert_failure(await plain, 503, "REQUEST_INTERRUPTED", SHUTDOWN_TEXT)
    assert_stream_failure(await stream.finish(), "REQUEST_INTERRUPTED")
    assert await exit_status(gateway) in {0, signal.SIGTERM}
    records = await lab.final(model, 3)
    assert {record["status"] for record in records} == {"interrupted"}


async def test_an_answer_that_a_client_has_whole_is_completed_though_its_gateway_is_killed_that_moment(lab: Lab) -> None:
    gateway = start(lab.stack, "killed", "1")
    lab.gateway = gateway
    model = await lab.model(gateway, lab.stack.main)
    worker = await lab.worker(model, max_concurrent=2)
    plain, streamed = await lab.open(model, stream=False), await lab.open(model)
    for job in (await worker.job(), await worker.job()):
        if job.frame["is_streaming"]:
            await worker.stream(job, ["whole"], tokens=(3, 4))
        else:
            await worker.answer(job, "whole", tokens=(3, 4))
    await asyncio.gather(plain.until(b"finish_reason"), streamed.until(b"[DONE]"))
    assert gateway.process is not None
    gateway.process.kill()
    for record in await lab.final(model, 2, within_s=60):
        assert (record["status"], record["prompt_tokens"], record["completion_tokens"]) == ("completed", 3, 4)


async def test_a_hundred_streams_of_a_killed_gateway_are_closed_within_thirty_seconds_and_free_every_slot(lab: Lab) -> None:
    gateway = start(lab.stack, "busy-victim", "1")
    lab.gateway = gateway
    model = await lab.model(gateway, lab.stack.main)
    name = unique("busy")
    worker = await lab.worker(model, name=name, max_concurrent=STREAMS)
    streams = [await lab.open(model, f"stream {number}") for number in range(STREAMS)]
    for _ in streams:
        job = await worker.job()
        await worker.chunk(job, delta_text(job, "begun"))
    for stream in streams:
        await stream.until(b"begun")
    queued = lab.ask(model, "queued")
    await lab.queued(1)
    assert gateway.process is not None
    gateway.process.kill()
    async with asyncio.timeout(CLOSED_WITHIN_S):
        replies = await asyncio.gather(*(stream.finish() for stream in streams))
        records = await lab.final(model, STREAMS + 1, within_s=CLOSED_WITHIN_S)
    assert (await queued).status == 0
    assert not any(reply.whole for reply in replies)
    assert [record["status"] for record in records] == ["interrupted"] * (STREAMS + 1)
    lab.gateway = lab.stack.main
    again = await lab.worker(model, name=name, max_concurrent=STREAMS)
    asked = [lab.ask(model, f"again {number}") for number in range(STREAMS)]
    for job in [await again.job() for _ in asked]:  # the node has them all at once: no slot is still held for the dead
        await again.answer(job)
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}
