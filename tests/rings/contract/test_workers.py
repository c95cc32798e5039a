"""Bridge v1 workers: who may connect, which of them gets a request and when, and what becomes of it when one side leaves.

The relay's behaviour contract numbers its sentences. Those that the dispatcher, a session or the keeper can break alone are
tested there (tests/unit/gateway, tests/unit/nodes, tests/system/nodes): 8, 10, 14, 15, 26 to 31, 34 and 35. What a client or a
worker sees of the others on real sockets is here and in ``test_answers``, ``test_catalogue`` and ``test_two_gateways``.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from functools import partial

import pytest
from websockets.exceptions import WebSocketException

from tests.fakes.http_client import (
    BUSY_TEXT,
    DELETED_TEXT,
    DISABLED_TEXT,
    EXHAUSTED_TEXT,
    TIMED_OUT_TEXT,
    assert_failure,
    assert_stream_failure,
)  # fmt: skip
from tests.fakes.lab import UNHEARD, Lab, answer_in_turn, chat_body, heard_in_time, unique
from tests.fakes.scripted_worker import PROTOCOL, ScriptedWorker, delta_text
from tests.fakes.waiting import eventually
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.asyncio

REFUSED = (1008, "worker authentication failed")
BLOCKED = (1008, "worker authentication temporarily rate limited")


# registration


def wrong_secret() -> str:
    """Return a well-formed worker credential that no one issued."""
    return mint_credential(CredentialKind.WORKER).text


async def test_a_worker_is_acknowledged_with_the_name_and_the_models_that_the_gateway_took(lab: Lab) -> None:
    """Rows 25, 26, 29."""
    model, name = await lab.model(), unique("worker") + "x" * 500
    worker = await lab.dial(secret=lab.secret)
    ack = await worker.register([f"  {model} ", model, "", "   "], name=name, max_concurrent=0)
    assert list(ack)[:3] == ["type", "worker_id", "models"]
    assert (ack["models"], ack["protocol_version"]) == ([model], PROTOCOL)
    assert any("name" in warning and "truncated" in warning for warning in ack["warnings"]), ack
    assert set(ack) <= {"type", "worker_id", "models", "warnings", "protocol_version"}
    rows = (await lab.admin("GET", "/admin/workers")).json["workers"]
    (row,) = [row for row in rows if row["worker_id"] == ack["worker_id"]]
    assert name.startswith(row["worker_name"])
    assert len(row["worker_name"]) < len(name)
    assert row["max_concurrent"] == 1
    assert (await lab.ask_through(worker, model)).status == 200


async def is_blocked_after_three_failures(lab: Lab, address: str, secret: str) -> bool:
    """Return whether that secret is turned away after three wrong ones; not if it comes half a second late, after the block."""
    welcome = await register_from(lab, address, lab.secret)  # ends the run of failures of a round before
    if welcome.close_code is not None:
        return False
    for _ in range(3):
        worker = await lab.dial(secret=wrong_secret(), local_host=address)
        assert await worker.closed() == REFUSED
    worker = await register_from(lab, address, secret)
    return (worker.close_code, worker.close_reason) == BLOCKED


async def register_from(lab: Lab, address: str, secret: str) -> ScriptedWorker:
    """Return a worker that has dialled from that address and was acknowledged or turned away."""
    worker = await lab.dial(secret=secret, local_host=address)
    try:
        await worker.register([unique("m")], name=unique("worker"))
    except (AssertionError, WebSocketException):
        await worker.closed()
    return worker


async def test_wrong_secrets_of_one_address_are_slowed_down_for_a_while_and_good_ones_are_not(
    hasty_lab: Lab, second_address: str
) -> None:
    """Rows 32, 33."""
    lab = hasty_lab
    address = second_address.replace("0.2", "0.3")
    blocked = partial(is_blocked_after_three_failures, lab, address, wrong_secret())
    await eventually(blocked, "an address that showed three wrong secrets is blocked")
    good = await register_from(lab, address, lab.secret)
    assert good.kinds[0] == "register_ack", "a good secret is let in, whatever others showed from its address"

    async def is_looked_at() -> bool:
        worker = await register_from(lab, address, wrong_secret())
        return (worker.close_code, worker.close_reason) == REFUSED

    await eventually(is_looked_at, "the block is over", pause_s=0.1)


# which worker, and when


async def test_requests_queue_while_every_slot_is_taken_and_are_served_first_come_first_served(lab: Lab) -> None:
    """Rows 6, 7, 16."""
    one, two = await lab.model(), await lab.model()
    worker = await lab.worker(one, two)
    replies = [lab.ask(one, "running")]
    job = await worker.job()
    assert await lab.queue_depth() == 0
    for number, model in enumerate([one, two, two, one], start=1):
        replies.append(lab.ask(model, f"queued {number}"))
        await lab.queued(number)
    assert len(worker.jobs) == 1
    await worker.answer(job)
    await answer_in_turn(worker, [f"queued {number}" for number in range(1, 5)])
    assert [(await reply).status for reply in replies] == [200] * 5


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


async def test_a_worker_that_does_not_answer_pings_is_asked_then_let_go_and_gets_nothing(hasty_lab: Lab) -> None:
    """Rows 12, 13."""
    await eventually(lambda: is_asked_and_expired(hasty_lab), "a worker is asked before it is given up")


async def is_asked_and_expired(lab: Lab) -> bool:
    """Check it with fresh workers. False: the gateway stood still for the whole window before it could ask."""
    model, name = await lab.model(), unique("silent")
    silent = await lab.worker(model, name=name, max_concurrent=8, answers_pings=False)
    assert await silent.closed() == (1000, UNHEARD)
    await lab.let_go_of(name)
    live = await lab.worker(model)
    assert (await lab.ask_through(live, model)).status == 200
    assert not silent.jobs
    return "ping" in silent.kinds


@heard_in_time
async def test_a_request_that_waits_too_long_for_a_slot_is_504_streamed_or_not(hasty_lab: Lab) -> None:
    """Rows 18, 46."""
    await eventually(lambda: time_out_in_line(hasty_lab), "two requests wait for as long as they may")


async def time_out_in_line(lab: Lab) -> bool:
    """Check it with fresh names. False: this machine stood still until the request before them, or the worker, was given up."""
    model = await lab.model()
    worker = await lab.worker(model)
    running = lab.ask(model, "running")
    job = await worker.job()
    replies = await asyncio.gather(*(lab.ask(model, stream=stream) for stream in (False, True)))
    await worker.answer(job)
    if (await running).status != 200 or "NODE_STALE" in {reply.error["code"] for reply in replies}:
        return False
    for reply in replies:
        assert_failure(reply, 504, "REQUEST_TIMEOUT", TIMED_OUT_TEXT)
    assert len(worker.jobs) == 1
    records = [(record["status"], record["error_code"]) for record in await lab.final(model, 3)]
    assert sorted(records, key=str) == [("completed", None), *[("failed", "REQUEST_TIMEOUT")] * 2]
    return True


async def test_a_full_queue_refuses_at_once_streamed_or_not(lab: Lab) -> None:
    """Rows 19, 47."""
    model = await lab.model(max_queue=2)
    worker = await lab.worker(model)
    lab.ask(model, "running")
    await worker.job()
    waiting = [lab.ask(model, f"queued {number}") for number in range(2)]
    await lab.queued(2)
    for stream in (False, True):
        assert_failure(await lab.ask(model, "too many", stream=stream), 503, "NO_AVAILABLE_NODE", BUSY_TEXT)
    assert not any(task.done() for task in waiting)


async def test_a_finish_dispatches_the_next_in_line_at_once(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    replies = [lab.ask(model, f"{number}") for number in range(10)]
    delays = []
    job = await worker.job()
    await lab.queued(9)
    for _ in range(9):
        await worker.answer(job)
        await replies[int(job.text)]  # the finish has been heard, however busy the machine is
        started = time.perf_counter()
        job = await worker.job()
        delays.append(time.perf_counter() - started)
    await worker.answer(job)
    assert {(await reply).status for reply in replies} == {200}
    assert statistics.median(delays) < 0.050, delays


# clients that leave


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


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
async def test_a_client_that_leaves_is_told_to_the_worker_and_its_slot_is_used_at_once(lab: Lab, stream: bool) -> None:
    """Rows 20, 21."""
    model = await lab.model()
    worker = await lab.worker(model)
    exchange = await lab.open(model, stream=stream)
    late = await worker.job()
    if stream:
        await worker.chunk(late, delta_text(late, "begun"))
        await exchange.until(b"begun")
    waiting = lab.ask(model, "next", stream=True)
    await lab.queued(1)
    exchange.leave()
    assert (await worker.cancelled(late))["reason"] == "client_disconnect"
    # The worker says nothing about the cancelled request before it has the next one, as a real one does.
    job = await worker.job()
    await worker.chunk(late, delta_text(late, "LATE"))
    await worker.stream(job, ["clean"])
    await worker.complete(late, body="LATE")
    answered = await waiting
    assert (answered.status, answered.events[-1], b"LATE" in answered.body) == (200, "[DONE]", False)
    assert (await lab.ask_through(worker, model)).status == 200, "the socket still works"
    assert len(worker.cancels(late)) == 1
    assert [record["status"] for record in await lab.final(model, 3)] == ["cancelled", "completed", "completed"]


async def test_a_cancel_never_overtakes_its_request(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model, max_concurrent=64)
    for number in range(30):
        exchange = await lab.open(model, f"hit and run {number}", stream=False)
        exchange.leave()
    last = lab.ask(model, "last")
    await eventually(lambda: any(job.text == "last" for job in worker.jobs), what="the last request arrived")
    await worker.answer(next(job for job in worker.jobs if job.text == "last"))
    assert (await last).status == 200

    async def settled() -> bool:
        records = await lab.records(model)
        return not any(record["status"] in {"queued", "assigned", "running"} for record in records)

    await eventually(settled, what="every record is final")

    def is_each_cancelled() -> bool:
        started = {job.id for job in worker.jobs if job.text != "last"}
        return {frame["request_id"] for frame in worker.of_kind("cancel")} == started

    await eventually(is_each_cancelled, what="each one that reached the worker was cancelled")
    seen: set[str] = set()
    for frame in worker.frames:
        if frame["type"] == "request":
            seen.add(frame["request_id"])
        if frame["type"] == "cancel":
            assert frame["request_id"] in seen


# workers that die or leave


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


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "plain"])
async def test_repeated_worker_disconnects_stop_requeueing_after_the_max_attempts(lab: Lab, stream: bool) -> None:
    """Rows 24, 50."""
    model = await lab.model()
    workers = [await lab.worker(model) for _ in range(5)]
    reply = lab.ask(model, "poison", stream=stream)
    left = list(workers)
    while len(left) > 1:
        worker = await lab.first_with_job(left)
        worker.die()
        left.remove(worker)
    assert_failure(await reply, 503, "REQUEST_INTERRUPTED", EXHAUSTED_TEXT)
    assert sum(len(worker.jobs) for worker in workers) == 4
    (record,) = await lab.final(model)
    assert (record["attempts"], record["error_code"]) == (4, "REQUEST_INTERRUPTED")


async def test_worker_loss_after_the_first_byte_is_one_error_event_and_no_done(lab: Lab) -> None:
    model = await lab.model()
    dying = await lab.worker(model)
    standby_model_reply = await lab.open(model, "stream")
    job = await dying.job()
    standby = await lab.worker(model)
    await dying.chunk(job, delta_text(job, "begun"))
    await standby_model_reply.until(b"begun")
    dying.die()
    got = await standby_model_reply.finish()
    assert_stream_failure(got, "REQUEST_INTERRUPTED")
    assert got.body.count(b"begun") == 1
    (record,) = await lab.final(model)
    assert (record["status"], record["error_code"], record["attempts"]) == ("interrupted", "REQUEST_INTERRUPTED", 1)
    assert not standby.jobs


async def test_a_worker_that_is_lost_behind_its_closing_event_has_answered(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = await lab.open(model, "stream")
    job = await worker.job()
    await worker.chunk(job, delta_text(job, "whole"))
    await reply.until(b"whole")
    await worker.chunk(job, "data: [DONE]\n\n")
    await worker.close()
    got = await reply.finish()
    assert (got.events.count("[DONE]"), got.events[-1], got.whole) == (1, "[DONE]", True)
    (record,) = await lab.final(model)
    assert (record["status"], record["error_code"], record["attempts"]) == ("completed", None, 1)


async def test_graceful_shutdown_stops_new_assignments_and_disconnects_after_in_flight_completion(lab: Lab) -> None:
    model = await lab.model()
    name = unique("leaving")
    leaving = await lab.worker(model, name=name, max_concurrent=4)
    running = lab.ask(model, "running")
    job = await leaving.job()
    node = await lab.node(name)
    lab.operate("nodes.services.drain_node", node_id={"$id": node["node_id"]}, reason="maintenance", timeout_s=60)
    notice = await leaving.frame("graceful_shutdown")
    assert notice["reason"] == "maintenance"
    assert 0 < notice["drain_timeout_secs"] <= 60
    other = await lab.worker(model)
    following = lab.ask(model, "after the drain")
    await other.answer(await other.job())
    assert (await following).status == 200
    await leaving.answer(job)
    assert (await running).status == 200
    assert await leaving.closed() == (1000, "graceful shutdown complete")
    assert len(leaving.jobs) == 1


async def test_graceful_shutdown_times_out_in_flight_work_that_does_not_finish_before_deadline(lab: Lab) -> None:
    model = await lab.model()
    name = unique("leaving")
    leaving = await lab.worker(model, name=name)
    running = lab.ask(model, "never finishes")
    job = await leaving.job()
    node = await lab.node(name)
    lab.operate("nodes.services.drain_node", node_id={"$id": node["node_id"]}, reason="maintenance", timeout_s=0.5)
    cancel = await leaving.cancelled(job)
    assert cancel["reason"] == "graceful_shutdown"
    assert await leaving.closed() == (1000, "graceful shutdown timed out")
    assert_failure(await running, 503, "REQUEST_INTERRUPTED")
    (record,) = await lab.final(model)
    assert (record["status"], record["error_code"]) == ("interrupted", "REQUEST_INTERRUPTED")


# providers


async def provider_with_secret(lab: Lab) -> tuple[str, str]:
    """Return a fresh provider and an enrolment credential of it."""
    provider = unique("provider")
    lab.operate("nodes.services.create_provider", name=provider)
    _, secret = lab.operate("nodes.services.create_credential", name=unique("c"), provider_name=provider, max_nodes=9)
    return provider, str(secret)


async def test_disabled_provider_http_boundary_returns_sanitized_disabled_message(lab: Lab) -> None:
    provider, secret = await provider_with_secret(lab)
    model = await lab.model()
    worker = await lab.worker(model, secret=secret, provider=provider)
    assert (await lab.ask_through(worker, model)).status == 200
    lab.operate("nodes.services.disable_provider", name=provider)
    refused = await eventually(lambda: lab.refused_through(worker, model), what="the gateway knows")
    assert_failure(refused, 503, "NO_AVAILABLE_NODE", DISABLED_TEXT)
    at_once = await lab.post(chat_body(model), within_s=8)  # less than a request waits for a node
    assert_failure(at_once, 503, "NO_AVAILABLE_NODE", DISABLED_TEXT)


async def test_provider_deletion_drains_queued_requests_with_explicit_errors_and_closes_workers(lab: Lab) -> None:
    """Rows 5, 51."""
    provider, secret = await provider_with_secret(lab)
    model = await lab.model()
    worker = await lab.worker(model, secret=secret, provider=provider)
    lab.ask(model, "running")
    await worker.job()
    queued = []
    for number in range(2):
        queued.append(lab.ask(model, f"queued {number}"))
        await lab.queued(number + 1)
    lab.operate("nodes.services.delete_provider", name=provider)
    for reply in queued:
        assert_failure(await reply, 503, "NO_AVAILABLE_NODE", DELETED_TEXT)
    await worker.closed()
    assert len(worker.jobs) == 1
