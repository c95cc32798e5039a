"""Rows 20 to 24: callers that leave and workers that die."""

from __future__ import annotations

import pytest

from tests.fakes.http_client import EXHAUSTED_TEXT, assert_failure
from tests.fakes.lab import Lab, unique
from tests.fakes.scripted_worker import delta_text

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
async def test_canceling_an_in_flight_request_emits_a_worker_cancel_signal(lab: Lab, stream: bool) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    exchange = await lab.open(model, stream=stream)
    job = await worker.job()
    if stream:
        await worker.chunk(job, delta_text(job, "begun"))
        await exchange.until(b"begun")
    exchange.leave()
    cancel = await worker.cancelled(job)
    assert cancel["reason"] == "client_disconnect"
    (record,) = await lab.final(model)
    assert record["status"] == "cancelled"
    assert len(worker.cancels(job)) == 1


async def test_late_worker_chunks_are_dropped_after_the_request_is_canceled(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    exchange = await lab.open(model)
    late = await worker.job()
    await worker.chunk(late, delta_text(late, "begun"))
    await exchange.until(b"begun")
    exchange.leave()
    await worker.cancelled(late)
    reply = lab.ask(model, "next", stream=True)
    job = await worker.job()
    await worker.chunk(late, delta_text(late, "LATE"))
    await worker.stream(job, ["clean"])
    await worker.complete(late, body="LATE")
    answered = await reply
    assert answered.status == 200
    assert b"LATE" not in answered.body
    assert answered.events[-1] == "[DONE]"
    again = lab.ask(model, "the socket still works")
    await worker.answer(await worker.job())
    assert (await again).status == 200
    records = await lab.final(model, 3)
    assert [record["status"] for record in records] == ["cancelled", "completed", "completed"]


async def test_disconnecting_a_worker_requeues_a_live_in_flight_request(lab: Lab) -> None:
    model = await lab.model()
    dying = await lab.worker(model)
    reply = lab.ask(model, "survivor")
    await dying.job()
    second = await lab.worker(model)
    dying.die()
    job = await second.job()
    assert job.text == "survivor"
    await second.answer(job, "from the second")
    assert (await reply).json["choices"][0]["message"]["content"] == "from the second"
    (record,) = await lab.final(model)
    assert (record["status"], record["attempts"]) == ("completed", 2)


async def test_disconnecting_a_worker_does_not_requeue_a_request_after_it_was_canceled(lab: Lab) -> None:
    model, name = await lab.model(), unique("dying")
    dying = await lab.worker(model, name=name)
    exchange = await lab.open(model, "left", stream=False)
    job = await dying.job()
    second = await lab.worker(model)
    exchange.leave()
    await dying.cancelled(job)
    dying.die()
    await lab.let_go_of(name)
    reply = lab.ask(model, "next")
    following = await second.job()
    assert following.text == "next"
    await second.answer(following)
    assert (await reply).status == 200
    assert len(second.jobs) == 1
    records = await lab.final(model, 2)
    assert [(record["status"], record["attempts"]) for record in records] == [("cancelled", 1), ("completed", 1)]


async def test_repeated_worker_disconnects_stop_requeueing_after_the_max_attempts(lab: Lab) -> None:
    model = await lab.model()
    workers = [await lab.worker(model) for _ in range(5)]
    reply = lab.ask(model, "poison")
    tried = []
    for _ in range(4):
        worker = await lab.first_with_job([one for one in workers if one not in tried])
        worker.die()
        tried.append(worker)
    assert_failure(await reply, 503, "REQUEST_INTERRUPTED", EXHAUSTED_TEXT)
    assert sum(len(worker.jobs) for worker in workers) == 4
    (record,) = await lab.final(model)
    assert record["attempts"] == 4
    assert record["error_code"] == "REQUEST_INTERRUPTED"
