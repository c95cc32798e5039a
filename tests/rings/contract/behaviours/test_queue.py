"""Rows 16 to 19: the queue."""

from __future__ import annotations

import pytest

from tests.fakes.http_client import BUSY_TEXT, TIMED_OUT_TEXT, assert_failure
from tests.fakes.lab import Lab, answer_in_turn, heard_in_time
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio


async def test_queued_requests_are_fifo_within_a_provider_among_compatible_models(lab: Lab) -> None:
    one, two = await lab.model(), await lab.model()
    worker = await lab.worker(one, two)
    replies = [lab.ask(one, "running")]
    job = await worker.job()
    for number, model in enumerate([one, two, two, one], start=1):
        replies.append(lab.ask(model, f"queued {number}"))
        await lab.queued(number)
    await worker.answer(job)
    await answer_in_turn(worker, [f"queued {number}" for number in range(1, 5)])
    assert [(await reply).status for reply in replies] == [200] * 5


async def test_canceling_a_queued_request_removes_it_before_dispatch(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    lab.ask(model, "running")
    job = await worker.job()
    leaving = await lab.open(model, "leaving", stream=False)
    await lab.queued(1)
    leaving.leave()
    await lab.queued(0)
    staying = lab.ask(model, "staying")
    await lab.queued(1)
    await worker.answer(job)
    await answer_in_turn(worker, ["staying"])
    assert (await staying).status == 200
    assert [found.text for found in worker.jobs] == ["running", "staying"]
    assert not worker.of_kind("cancel")
    records = await lab.final(model, 3)
    assert [record["status"] for record in records] == ["completed", "cancelled", "completed"]
    assert records[1]["attempts"] == 0


@heard_in_time
async def test_queued_request_times_out_after_waiting_for_worker_capacity(hasty_lab: Lab) -> None:
    await eventually(lambda: times_out_in_line(hasty_lab), what="a request waits for as long as it may")


async def times_out_in_line(lab: Lab) -> bool:
    """Check it with fresh names. False: this machine stood still until the request before it, or the worker, was given up."""
    model = await lab.model()
    worker = await lab.worker(model)
    running = lab.ask(model, "running")
    job = await worker.job()
    waiting = await lab.ask(model, "waiting")
    await worker.answer(job)
    if (await running).status != 200 or waiting.error["code"] == "NODE_STALE":
        return False
    assert_failure(waiting, 504, "REQUEST_TIMEOUT", TIMED_OUT_TEXT)
    assert len(worker.jobs) == 1
    records = await lab.final(model, 2)
    assert [(record["status"], record["error_code"]) for record in records] == [
        ("completed", None),
        ("failed", "REQUEST_TIMEOUT"),
    ]
    return True


async def test_queue_capacity_exhaustion_rejects_without_waiting_for_timeout(lab: Lab) -> None:
    model = await lab.model(max_queue=2)
    worker = await lab.worker(model)
    lab.ask(model, "running")
    await worker.job()
    waiting = [lab.ask(model, f"queued {number}") for number in range(2)]
    await lab.queued(2)
    refused = await lab.ask(model, "too many")
    assert not any(task.done() for task in waiting)
    assert_failure(refused, 503, "NO_AVAILABLE_NODE", BUSY_TEXT)
