"""Requests and the nodes that may take them, through a whole gateway and whole runners on a virtual clock.

Who gets a request, who waits and for how long, and what becomes of both when a node or the gateway is told to stop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from django.db.models import F

from core.db.threads import run_upkeep
from core.limits import limits
from gateway.errors import (
    NoAvailableNode,
    NodeDraining,
    RequestInterrupted,
    ShuttingDown,
)
from nodes.links import LinkCondition
from nodes.models import Node as NodeRecord
from nodes.services import cordon_node, drain_node, uncordon_node, undrain_node
from tests.fakes.engine import CallState, EngineCall
from tests.fakes.fleet import Answer, Fleet, Node, Rows
from tests.fakes.limits import set_limits, set_runner_limits

pytestmark = [pytest.mark.django_db, pytest.mark.asyncio(loop_factories=["virtual"]), pytest.mark.timeout(120)]
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


async def test_a_request_that_a_full_node_sends_back_goes_to_another_one(fleet: Fleet) -> None:
    leaving = await fleet.add_node(slots=2)
    running, call = await fleet.begin_stream()
    leaving.link.down.stall()
    sent_back = fleet.ask()
    await fleet.settle()
    leaving.leave()
    await fleet.settle()
    other = await fleet.add_node()
    leaving.link.down.resume()
    assert (await serve(fleet, sent_back)).engine is other.engine
    assert [(row["state"], row["attempts"]) for row in [await sent_back.row()]] == [("completed", 2)]
    call.finish()
    assert (await running.row())["state"] == "completed"


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
