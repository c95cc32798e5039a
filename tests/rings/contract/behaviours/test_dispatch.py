"""Rows 6 to 15: which worker gets a request, and when."""

from __future__ import annotations

import pytest

from tests.fakes.lab import UNHEARD, Lab, heard_in_time, unique
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio


async def test_request_for_supported_model_dispatches_immediately_without_queueing(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model, "now")
    job = await worker.job()
    assert await lab.queue_depth() == 0
    await worker.answer(job, "here")
    assert (await reply).json["choices"][0]["message"]["content"] == "here"
    (record,) = await lab.final(model)
    assert record["status"] == "completed"
    assert record["attempts"] == 1


async def test_request_queues_when_all_matching_workers_are_at_capacity(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    first = lab.ask(model, "first")
    job = await worker.job()
    second = lab.ask(model, "second")
    await lab.queued(1)
    assert len(worker.jobs) == 1
    await worker.answer(job)
    following = await worker.job()
    assert following.text == "second"
    await worker.answer(following)
    assert [(await first).status, (await second).status] == [200, 200]


async def test_selection_prefers_the_lowest_load_among_exact_model_matches(lab: Lab) -> None:
    model = await lab.model()
    loaded = await lab.worker(model, max_concurrent=4)
    for number in range(2):
        lab.ask(model, f"before {number}")
        await loaded.job()
    idle = await lab.worker(model, max_concurrent=4)
    lab.ask(model, "after 0")
    assert (await idle.job()).text == "after 0"
    lab.ask(model, "after 1")
    assert (await idle.job()).text == "after 1"
    assert len(loaded.jobs) == 2


async def test_models_update_immediately_changes_routing_without_worker_reconnect(lab: Lab) -> None:
    old, new = await lab.model(), await lab.model()
    worker = await lab.worker(old)
    waiting = lab.ask(new, "for the new model")
    await lab.queued(1)
    await worker.send({"type": "models_update", "models": [new], "current_load": 0})
    job = await worker.job()
    assert job.frame["model"] == new
    await worker.answer(job)
    assert (await waiting).status == 200
    lab.ask(old, "for the old model")
    await lab.queued(1)
    again = lab.ask(new, "again")
    job = await worker.job()
    assert job.text == "again"
    await worker.answer(job)
    assert (await again).status == 200
    assert [found.frame["model"] for found in worker.jobs] == [new, new]


async def test_equally_loaded_exact_matches_rotate_in_round_robin_order(lab: Lab) -> None:
    model = await lab.model()
    workers = [await lab.worker(model, max_concurrent=2) for _ in range(3)]
    served: list[int] = []

    def taken() -> int | None:
        """Return the number, from 1, of the worker that has a job no one has answered."""
        return next((i for i, one in enumerate(workers, 1) if len(one.jobs) > served.count(i)), None)

    for number in range(6):
        reply = lab.ask(model, f"turn {number}")
        index = await eventually(taken, what=f"turn {number} reached a worker")
        served.append(index)
        worker = workers[index - 1]
        await worker.answer(await worker.job())
        assert (await reply).status == 200
    assert sorted(served[:3]) == [1, 2, 3]
    assert served[3:] == served[:3]


@heard_in_time
async def test_pong_updates_live_load_used_for_selection(hasty_lab: Lab) -> None:
    lab = hasty_lab
    model = await lab.model()
    name = unique("busy-elsewhere")
    busy = await lab.worker(model, name=name, max_concurrent=4)
    idle = await lab.worker(model, max_concurrent=4)
    busy.load = 3

    async def reported() -> bool:
        row = await lab.listed_worker(name)
        return row is not None and row["reported_load"] == 3

    await eventually(reported, what="the pong's load is known")
    for number in range(3):
        reply = lab.ask(model, f"turn {number}")
        await idle.answer(await idle.job())
        assert (await reply).status == 200
    assert not busy.jobs


async def test_stale_workers_are_expired_after_the_pong_window(hasty_lab: Lab) -> None:
    await eventually(lambda: is_asked_and_expired(hasty_lab), what="a worker is asked before it is given up")


async def is_asked_and_expired(lab: Lab) -> bool:
    """Check it with a fresh worker. False: the gateway stood still for the whole window before it could ask."""
    name = unique("silent")
    silent = await lab.worker(await lab.model(), name=name, answers_pings=False)
    assert await silent.closed() == (1000, UNHEARD)
    await lab.let_go_of(name)
    return "ping" in silent.kinds


@heard_in_time
async def test_stale_workers_are_not_selected_for_new_requests(hasty_lab: Lab) -> None:
    lab = hasty_lab
    model = await lab.model()
    silent = await lab.worker(model, max_concurrent=8, answers_pings=False)
    live = await lab.worker(model, max_concurrent=8)
    await silent.closed()
    for number in range(3):
        reply = lab.ask(model, f"turn {number}")
        await live.answer(await live.job())
        assert (await reply).status == 200
    assert not silent.jobs


async def test_idle_workers_without_the_exact_requested_model_remain_ineligible(lab: Lab) -> None:
    model = await lab.model()
    other = model + "-large"
    await lab.allow(other)
    busy = await lab.worker(model)
    idle = await lab.worker(other, max_concurrent=4)
    lab.ask(model, "first")
    job = await busy.job()
    second = lab.ask(model, "second")
    await lab.queued(1)
    assert not idle.jobs
    await busy.answer(job)
    await busy.answer(await busy.job())
    assert (await second).status == 200
    assert not idle.jobs


async def test_workers_without_the_exact_requested_model_do_not_receive_the_request(lab: Lab) -> None:
    model = await lab.model()
    other = model + "-large"
    await lab.allow(other)
    wrong = await lab.worker(other, max_concurrent=4)
    right = await lab.worker(model, max_concurrent=4)
    for number in range(4):
        reply = lab.ask(model, f"turn {number}")
        await right.answer(await right.job())
        assert (await reply).status == 200
    assert not wrong.jobs
