"""Requests through a whole gateway and whole runners on a virtual clock: lost links, queues, clients that leave."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db.models import F

from core.db.threads import run_upkeep
from core.limits import limits
from gateway.errors import (
    ForwardedRequestFailed,
    NoAvailableNode,
    NodeDraining,
    QueueTimeout,
    RequestInterrupted,
    RequestTimeout,
    RequeueExhausted,
    ShuttingDown,
)
from nodes.links import LinkCondition
from nodes.models import Node as NodeRecord
from nodes.services.drains import cordon_node, drain_node, uncordon_node, undrain_node
from runner.limits import limits as runner_limits
from tests.fakes.engine import CallState, EngineCall
from tests.fakes.fleet import CHAT_PATH, MESSAGES_PATH, Answer, Fleet, Node, Rows
from tests.fakes.limits import set_limits, set_runner_limits

pytestmark = [pytest.mark.django_db, pytest.mark.asyncio(loop_factories=["virtual"]), pytest.mark.timeout(120)]


BREAKS: list[tuple[Callable[[Node, EngineCall], None], str]] = [
    (lambda node, _call: node.link.cut(), RequestInterrupted.code),
    (lambda _node, call: call.fail(), ForwardedRequestFailed.code),
]


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES_PATH])
@pytest.mark.parametrize(("break_it", "code"), BREAKS, ids=["the link is lost", "the engine dies"])
async def test_no_other_node_is_asked_once_the_client_has_the_first_byte(
    fleet: Fleet, break_it: Callable[[Node, EngineCall], None], code: str, path: str
) -> None:
    await fleet.add_node()
    await fleet.add_node()
    answer, call = await fleet.begin_stream(path=path)
    node = fleet.find_node(call)
    break_it(node, call)
    row = await answer.row()
    assert (answer.status, answer.pieces, answer.calls) == (200, [(call.ident, 0)], [call])
    assert answer.client.body.count(b'"error":') == 1
    assert b"[DONE]" not in answer.client.body
    assert b"message_stop" not in answer.client.body
    state = RequestInterrupted.state if code == RequestInterrupted.code else ForwardedRequestFailed.state
    assert (row["state"], row["error_code"], row["attempts"], row["node_name"]) == (state, code, 1, node.name)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("break_it", "code"), BREAKS, ids=["the link is lost", "the engine dies"])
async def test_another_node_answers_when_the_first_was_lost_before_the_first_byte(
    fleet: Fleet, break_it: Callable[[Node, EngineCall], None], code: str, *, stream: bool
) -> None:
    del code
    await fleet.add_node()
    answer = fleet.ask(stream=stream)
    first = await fleet.next_call(answer)
    second = await fleet.add_node()
    break_it(fleet.nodes[0], first)
    await fleet.settle()
    (later,) = second.engine.running
    assert later.number == answer.number
    later.emit(2)
    later.finish()
    row = await answer.row()
    assert (answer.status, answer.error_code) == (200, "")
    assert answer.pieces == [(later.ident, 0), (later.ident, 1)]
    assert (row["state"], row["node_name"], row["attempts"]) == ("completed", second.name, 2)


@pytest.mark.parametrize("is_heard", [True, False], ids=["the socket says so", "it only falls silent"])
async def test_an_engine_stops_what_it_does_for_a_gateway_that_its_node_has_lost(fleet: Fleet, *, is_heard: bool) -> None:
    node = await fleet.add_node(slots=2)
    _, streamed = await fleet.begin_stream()
    plain = await fleet.next_call(fleet.ask())
    began = fleet.loop.time()
    if is_heard:
        node.link.cut()
    else:
        node.is_reachable = False
        node.link.stall()
    await fleet.until(lambda: not node.engine.running)
    assert {streamed.state, plain.state} == {CallState.CANCELLED}
    assert streamed.ended_at is not None
    assert streamed.ended_at - began <= (0 if is_heard else runner_limits().connection.silence_s)
    assert (node.queue.active, node.queue.depth) == (0, 0)


async def test_a_silent_node_is_given_up_and_what_it_had_goes_elsewhere_or_ends(fleet: Fleet) -> None:
    silent = await fleet.add_node(slots=2)
    begun, _ = await fleet.begin_stream()
    waiting = fleet.ask()
    unheard = await fleet.next_call(waiting)
    other = await fleet.add_node()
    silent.is_reachable = False
    silent.link.stall()
    unheard.emit()
    unheard.finish()
    cut_at, bounds = fleet.loop.time(), limits()
    await begun.done()
    assert cut_at + bounds.nodes.offline_after_s - 1.0 <= fleet.loop.time()
    assert fleet.loop.time() <= cut_at + bounds.nodes.offline_after_s + bounds.gateway.tick_s
    assert begun.error_code == RequestInterrupted.code
    await fleet.settle()
    (moved,) = other.engine.running
    assert moved.number == waiting.number
    moved.emit()
    moved.finish()
    before = [await begun.row(), await waiting.row()]
    assert [(row["state"], row["attempts"]) for row in before] == [("interrupted", 1), ("completed", 2)]
    assert waiting.pieces == [(moved.ident, 0)]
    silent.link.resume()
    silent.is_reachable = True
    await fleet.until(lambda: silent.gateway_link is not None)
    assert [await begun.row(), await waiting.row()] == before


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_told_to_the_node_and_its_slot_goes_to_the_next(fleet: Fleet, *, stream: bool) -> None:
    node = await fleet.add_node()
    first = fleet.ask(stream=stream)
    call = await fleet.next_call(first)
    if stream:
        call.emit()
    queued, second = fleet.ask(), fleet.ask()
    await fleet.until(lambda: fleet.runtime.dispatcher.depth == 2)
    queued.leave()
    first.leave()
    await fleet.settle()
    assert call.state is CallState.CANCELLED
    (later,) = node.engine.running
    assert (later.number, node.queue.active, node.queue.depth) == (second.number, 1, 0)
    call.emit(3)  # what a stopped engine had still to say
    later.emit()
    later.finish()
    rows = [await answer.row() for answer in (first, queued, second)]
    assert [(row["state"], row["attempts"]) for row in rows] == [("cancelled", 1), ("cancelled", 0), ("completed", 1)]
    assert second.pieces == [(later.ident, 0)]
    assert not queued.calls


async def test_a_request_that_runs_too_long_ends_to_the_second_and_its_engine_is_told(fleet_rows: Rows) -> None:
    set_limits(gateway={"request_s": 4.0})
    async with Fleet(rows=fleet_rows) as fleet:
        node = await fleet.add_node(slots=2)
        begun, _ = await fleet.begin_stream()
        plain = fleet.ask()
        await fleet.next_call(plain)
        for answer, status in ((begun, 200), (plain, RequestTimeout.status)):
            row = await answer.row()
            assert answer.ended_at is not None
            assert answer.ended_at - answer.asked_at == pytest.approx(4.0, abs=0.01)
            assert (answer.status, answer.error_code) == (status, RequestTimeout.code)
            assert (row["state"], row["error_code"], row["attempts"]) == ("failed", RequestTimeout.code, 1)
        assert [call.state for call in node.engine.calls] == [CallState.CANCELLED, CallState.CANCELLED]
        assert (node.queue.active, node.gateway_link.active) == (0, 0)


async def test_a_cancel_never_overtakes_its_request_and_what_comes_late_reaches_nobody(fleet: Fleet) -> None:
    node = await fleet.add_node(slots=3)
    node.link.down.stall()
    hasty = [fleet.ask() for _ in range(2)]
    await fleet.settle()
    for answer in hasty:
        answer.leave()
    node.link.down.resume()
    await fleet.settle()
    assert not node.engine.running
    left, call = await fleet.begin_stream()
    node.link.up.stall()
    call.emit(3)
    await fleet.settle()
    left.leave()
    await fleet.settle()
    node.link.up.resume()
    answer, later = await fleet.begin_stream()
    later.finish()
    assert (await answer.row())["state"] == "completed"
    assert (len(node.links), left.pieces) == (1, [(call.ident, 0)])
    assert [(await answer.row())["state"] for answer in (*hasty, left)] == ["cancelled"] * 3


async def test_a_stream_whose_answer_does_not_come_is_never_silent_for_long(fleet_rows: Rows) -> None:
    set_limits(gateway={"stream_ping_s": 1.0, "queue_s": 4.0})
    async with Fleet(rows=fleet_rows) as fleet:
        await fleet.add_node()
        began, waiting = fleet.ask(stream=True), fleet.ask(stream=True)
        call = await fleet.next_call(began)
        longest_s, seen, at = 0.0, 0, fleet.loop.time()
        while not waiting.is_over:
            await fleet.advance(0.1)
            if len(waiting.client.events) > seen:
                longest_s, seen, at = max(longest_s, fleet.loop.time() - at), len(waiting.client.events), fleet.loop.time()
        assert 0 < longest_s <= 1.0 + 0.1
        comments, _, error = waiting.client.body.partition(b"data: ")
        assert set(comments.split(b"\n\n")) == {b": ping", b""}
        assert (waiting.status, waiting.error_code, b"[DONE]" in error) == (200, QueueTimeout.code, False)
        call.emit()
        call.finish()
        await began.done()
        assert began.client.body.startswith(b": ping\n\n")
        assert began.pieces == [(call.ident, 0)]


@pytest.mark.parametrize("path", [CHAT_PATH, MESSAGES_PATH])
async def test_who_waits_in_the_queue_is_told_its_place_and_then_has_its_answer(fleet: Fleet, path: str) -> None:
    await fleet.add_node(slots=1)
    first = fleet.ask()
    running = await fleet.next_call(first)
    stream, whole = fleet.ask(stream=True, path=path), fleet.ask(path=path)
    await fleet.advance(4.9)
    assert stream.client.events == []
    await fleet.advance(0.2)
    assert stream.client.body == b": queued position=1 estimate_ms=0\n\n"
    assert stream.client.headers["x-queue-position"] == "1"
    running.finish()
    await first.done()
    call = await fleet.next_call(stream)
    await fleet.advance(5.5)
    assert stream.client.body.count(b": queued") == 1
    call.emit(2)
    call.finish()
    await stream.done()
    assert (stream.status, len(stream.pieces)) == (200, 2)
    (await fleet.next_call(whole)).finish()
    await whole.done()
    assert (whole.status, whole.client.headers["x-queue-position"]) == (200, "2")
    assert int(whole.client.headers["x-queue-wait-estimate-ms"]) >= 0
    assert (await first.row())["decision"] is None
    for request, position in ((stream, 1), (whole, 2)):
        decision = (await request.row())["decision"]
        assert (decision["reason"], decision["tier"], decision["position"]) == ("waited", "normal", position)


async def test_nobody_who_finds_a_slot_hears_of_a_queue_and_who_waits_in_vain_is_told_when_to_come_back(fleet: Fleet) -> None:
    await fleet.add_node(slots=1)
    first = fleet.ask()
    running = await fleet.next_call(first)
    second = fleet.ask()
    await fleet.advance(limits().gateway.queue_s + 0.1)
    await second.done()
    assert (second.status, second.error_code, second.client.headers["x-queue-position"]) == (504, QueueTimeout.code, "1")
    assert int(second.client.headers["retry-after"]) > 0
    running.finish()
    await first.done()
    assert "x-queue-position" not in first.client.headers


async def test_the_log_says_where_requests_went_and_which_waited_in_vain(
    fleet_rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="muster.records")
    async with Fleet(rows=fleet_rows) as fleet:
        node = await fleet.add_node(models=["tight"])
        call = await fleet.next_call(fleet.ask("tight"))
        waiting = [fleet.ask("tight") for _ in range(2)]
        await fleet.until(lambda: fleet.runtime.dispatcher.depth == 2)
        for _ in range(3):
            await fleet.ask("tight").done()
        await fleet.advance(2.0)
        await fleet.ask("tight").done()
        for answer in waiting:
            await answer.done()
        node.link.cut()
        await fleet.until(lambda: call.ended_at is not None)
        await fleet.settle()
    lines = [re.sub(r"request=\S+ ", "", record.getMessage()) for record in caplog.records]
    assert lines.count("queue.full model=tight waiting=2 refused=1") == 1
    assert lines.count("queue.full model=tight waiting=2 refused=3") == 1, "a flood has a line in a while"
    assert [line for line in lines if line.startswith("queue.timeout")] == ["queue.timeout model=tight waited_s=30.0"] * 2
    assert [line for line in lines if line.startswith("request.dispatched")] == [
        "request.dispatched node=n0 model=tight attempt=1 queue_ms=0"
    ]
    assert "request.requeued node=n0 model=tight reason=lost" in lines


async def test_a_client_that_does_not_read_is_closed_and_the_streams_beside_it_go_on(fleet_rows: Rows) -> None:
    set_limits(gateway={"client_write_s": 3.0})
    async with Fleet(rows=fleet_rows) as fleet:
        await fleet.add_node(slots=2)
        slow, flood = await fleet.begin_stream()
        good, live = await fleet.begin_stream()
        slow.client.reading.clear()
        flood.emit(120, text="x" * 16_000)
        await fleet.settle()
        assert flood.untaken > 40, "the node takes no more from its engine than the client's window holds"
        while flood.is_running:
            live.emit()
            await fleet.advance(0.5)
            assert len(good.pieces) == len(live.emitted)
        assert flood.ended_at is not None
        assert flood.ended_at - flood.began_at == pytest.approx(3.0, abs=0.1)
        live.finish()
        assert (await good.row())["state"] == "completed"
        assert (await slow.row())["state"] == "cancelled"
        assert slow.client.handle.aborted
        again, call = await fleet.begin_stream()
        call.finish()
        assert (await again.row())["state"] == "completed"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("status", "state"), [(400, "rejected"), (429, "failed"), (500, "failed"), (503, "failed")])
async def test_what_an_engine_refuses_reaches_the_client_as_it_is_and_goes_nowhere_else(
    fleet: Fleet, status: int, state: str, *, stream: bool
) -> None:
    await fleet.add_node()
    await fleet.add_node()
    answer = fleet.ask(stream=stream)
    call = await fleet.next_call(answer)
    call.refuse(status)
    row = await answer.row()
    assert (answer.status, answer.calls) == (status, [call])
    assert f"refused {call.ident}".encode() in answer.client.body
    assert answer.client.headers["content-type"] == "application/json"
    assert (row["state"], row["status_code"], row["attempts"]) == (state, status, 1)


async def test_a_request_that_four_nodes_were_lost_with_is_given_up(fleet: Fleet) -> None:
    for _ in range(5):
        await fleet.add_node()
    answer = fleet.ask()
    for count in range(1, 5):
        call = await fleet.next_call(answer, count=count)
        node = fleet.find_node(call)
        node.is_reachable = False
        node.link.cut()
    row = await answer.row()
    assert (answer.status, answer.error_code, len(answer.calls)) == (503, RequestInterrupted.code, 4)
    assert RequeueExhausted.default_message.encode() in answer.client.body
    assert answer.client.headers["retry-after"] == "5"
    assert (row["state"], row["error_code"], row["attempts"]) == ("interrupted", RequestInterrupted.code, 4)


async def test_wherever_a_link_breaks_client_and_record_say_the_same(fleet: Fleet) -> None:
    node = await fleet.add_node()
    states = []
    for count in range(6):
        await fleet.until(lambda: node.gateway_link is not None)
        answer, call = await fleet.begin_stream()
        node.link.up.stall()
        call.emit()
        call.finish()
        await fleet.settle()
        node.link.cut(let_through=count)
        row = await answer.row()
        is_whole = answer.client.body.rstrip().endswith(b"data: [DONE]")
        assert is_whole is (answer.error_code == "")
        assert (row["state"], row["error_code"] or "") == ("completed" if is_whole else "interrupted", answer.error_code)
        assert len(answer.pieces) == (2 if is_whole or count else 1)
        states.append(row["state"])
    assert set(states) == {"interrupted", "completed"}
    assert states == sorted(states, reverse=True)


IMPATIENT = {"max_latency_ms": 300}


async def serve(fleet: Fleet, answer: Answer) -> EngineCall:
    """Have an engine answer a request, and check that the client has the answer."""
    call = await fleet.next_call(answer)
    call.emit()
    call.finish()
    await answer.done()
    assert (answer.status, answer.pieces) == (200, [(call.ident, 0)])
    return call


async def assert_refused(
    answer: Answer, error: type[NoAvailableNode | RequestInterrupted], *, retry_after_s: int, state: str = ""
) -> None:
    """Check that the client is told so before any byte of an answer, and when to come back; ``state`` "" = the error's own."""
    row = await answer.row()
    assert (answer.status, answer.error_code) == (error.status, error.code)
    assert error.default_message.encode() in answer.client.body
    assert answer.client.headers["retry-after"] == str(retry_after_s)
    assert (row["state"], row["error_code"]) == (state or error.state, error.code)


async def age_drains(fleet: Fleet, seconds: float) -> None:
    """Let the time of drains pass: it is the database's, which no virtual clock turns."""

    def move() -> None:
        NodeRecord.objects.update(drain_deadline_at=F("drain_deadline_at") - timedelta(seconds=seconds))

    await run_upkeep(move)
    await fleet.advance(limits().gateway.sweep_s + limits().gateway.tick_s)


async def test_what_a_node_loads_is_served_at_once_and_what_it_unloads_no_more(fleet: Fleet) -> None:
    node = await fleet.add_node(slots=2)
    waiting = fleet.ask("tight")
    await fleet.settle()
    node.load("tight")
    call = await fleet.next_call(waiting)
    assert await list_models(fleet) == ["m", "tight"]
    node.unload("tight")
    await fleet.settle()
    assert await list_models(fleet) == ["m"]
    await assert_refused(fleet.ask("tight", x_pool_options=IMPATIENT), NoAvailableNode, retry_after_s=5)
    call.finish()
    assert (await waiting.row())["state"] == "completed"
    await serve(fleet, fleet.ask("m"))
    assert len(node.links) == 1
    node.link.cut()
    await fleet.settle()
    assert await list_models(fleet) == []


async def list_models(fleet: Fleet) -> list[str]:
    """Return what ``GET /v1/models`` lists."""
    answer = await fleet.call("/v1/models", method="GET")
    return [row["id"] for row in json.loads(answer.body)["data"]]


@pytest.mark.parametrize(("begin", "end"), [(cordon_node, uncordon_node), (drain_node, undrain_node)])
async def test_a_node_that_is_held_back_finishes_what_runs_and_stays_held_back_over_a_reconnect(
    fleet: Fleet, begin: Callable[..., object], end: Callable[..., object]
) -> None:
    node = await fleet.add_node("held", slots=2)
    node_id = node.gateway_link.node_id
    running, call = await fleet.begin_stream()
    await fleet.operate(begin, node_id=node_id, **({"reason": "maintenance"} if begin is drain_node else {}))
    await fleet.until(lambda: node.gateway_link.condition() is LinkCondition.DRAINING)
    await assert_refused(fleet.ask(x_pool_options=IMPATIENT), NodeDraining, retry_after_s=10)
    call.emit()
    call.finish()
    assert (await running.row())["state"] == "completed"
    node.link.cut()
    await fleet.until(lambda: len(node.links) > 1 and node.gateway_link is not None)
    await assert_refused(fleet.ask(x_pool_options=IMPATIENT), NodeDraining, retry_after_s=10)
    waiting = fleet.ask()
    await fleet.operate(end, node_id=node_id)
    await serve(fleet, waiting)
    assert len(node.engine.calls) == 2


@pytest.mark.parametrize("has_other", [True, False], ids=["another node is there", "no other node is there"])
async def test_what_outlives_a_drain_is_cut_and_what_was_not_begun_goes_elsewhere(fleet: Fleet, *, has_other: bool) -> None:
    node = await fleet.add_node(f"drained-{has_other}", slots=2)
    begun, streamed = await fleet.begin_stream()
    plain = fleet.ask()
    held = await fleet.next_call(plain)
    await fleet.operate(drain_node, node_id=node.gateway_link.node_id, reason="maintenance")
    await fleet.advance(limits().gateway.sweep_s * 3)
    assert [call.state for call in (streamed, held)] == [CallState.RUNNING] * 2
    other = await fleet.add_node() if has_other else None
    await age_drains(fleet, limits().nodes.drain_timeout_s)
    row = await begun.row()
    assert (begun.status, begun.error_code) == (200, RequestInterrupted.code)
    assert (row["state"], row["error_code"], row["attempts"]) == ("interrupted", RequestInterrupted.code, 1)
    assert [call.state for call in (streamed, held)] == [CallState.CANCELLED] * 2
    if other is None:
        await assert_refused(plain, RequestInterrupted, retry_after_s=5)
    else:
        assert (await serve(fleet, plain)).engine is other.engine
    assert node.is_running


async def test_an_owner_takes_a_node_back_and_lends_it_again(fleet: Fleet) -> None:
    node = await fleet.add_node("lent", slots=2)
    quick, quick_call = await fleet.begin_stream()
    slow, slow_call = await fleet.begin_stream()
    node.box.set_mode("spare_off")
    await fleet.settle()
    await assert_refused(fleet.ask(x_pool_options=IMPATIENT), NodeDraining, retry_after_s=10)
    quick_call.finish()
    assert (await quick.row())["state"] == "completed"
    await fleet.advance(limits().nodes.reclaim_grace_s / 2)
    assert slow_call.is_running
    await age_drains(fleet, limits().nodes.reclaim_grace_s)
    assert (slow.status, slow.error_code, slow_call.state) == (200, RequestInterrupted.code, CallState.CANCELLED)
    assert (await slow.row())["state"] == "interrupted"
    waiting = fleet.ask()
    await fleet.settle()
    assert not node.engine.running
    node.box.set_mode("spare_on")
    await serve(fleet, waiting)


async def test_what_a_leaving_runner_does_not_finish_in_time_is_cut(fleet_rows: Rows) -> None:
    set_runner_limits(connection={"drain_s": 3.0})
    async with Fleet(rows=fleet_rows) as fleet:
        leaving = await fleet.add_node()
        running, call = await fleet.begin_stream()
        left_at = fleet.loop.time()
        leaving.leave()
        row = await running.row()
        assert running.ended_at is not None
        assert running.ended_at - left_at == pytest.approx(3.0, abs=0.1)
        assert (running.error_code, call.state) == (RequestInterrupted.code, CallState.CANCELLED)
        assert (row["state"], row["attempts"]) == ("interrupted", 1)


async def crowd(fleet: Fleet) -> tuple[Node, Answer, EngineCall, Answer, Answer]:
    """Return a node, a stream with its call, a request without a byte of an answer, and one that waits."""
    node = await fleet.add_node(slots=2)
    begun, call = await fleet.begin_stream()
    plain = fleet.ask()
    await fleet.next_call(plain)
    queued = fleet.ask()
    await fleet.settle()
    assert fleet.runtime.dispatcher.depth == 1
    return node, begun, call, plain, queued


async def test_a_gateway_that_stops_lets_finish_what_runs_and_sends_away_what_waits(fleet: Fleet) -> None:
    node, begun, call, plain, queued = await crowd(fleet)
    stopping = fleet.loop.create_task(fleet.stop_gateway())
    await fleet.settle()
    await assert_refused(queued, ShuttingDown, retry_after_s=2)
    late = fleet.ask()
    await late.done()
    assert (late.status, late.error_code, late.calls) == (503, RequestInterrupted.code, [])
    await serve(fleet, plain)
    call.emit()
    call.finish()
    assert (await begun.row())["state"] == "completed"
    assert begun.pieces == [(call.ident, 0), (call.ident, 1)]
    await stopping
    await fleet.start_gateway()
    await fleet.until(lambda: node.gateway_link is not None)
    await serve(fleet, fleet.ask())
    assert node.is_running


async def test_what_outlives_the_grace_of_a_gateway_is_interrupted_and_told(fleet_rows: Rows) -> None:
    set_limits(gateway={"shutdown_grace_s": 3.0})
    async with Fleet(rows=fleet_rows) as fleet:
        node, begun, _, plain, _ = await crowd(fleet)
        stopped_at = fleet.loop.time()
        await fleet.stop_gateway()
        for answer in (begun, plain):
            row = await answer.row()
            assert (row["state"], row["error_code"]) == ("interrupted", RequestInterrupted.code)
            assert answer.error_code == RequestInterrupted.code
            assert answer.ended_at is not None
            assert answer.ended_at - stopped_at == pytest.approx(3.0, abs=0.1)
        assert (begun.status, plain.status) == (200, ShuttingDown.status)
        assert [call.state for call in node.engine.calls] == [CallState.CANCELLED] * 2
