"""Requests through a whole gateway and whole runners on a virtual clock: lost links, queues, clients that leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from core.limits import limits
from gateway.errors import QueueTimeout
from tests.fakes.engine import PROMPT_TOKENS, CallState
from tests.fakes.fleet import MESSAGES_PATH, Fleet, Rows

pytestmark = [
    pytest.mark.django_db,
    pytest.mark.asyncio(loop_factories=["virtual"]),
    pytest.mark.timeout(120),
]


@pytest.fixture
async def fleet(fleet_rows: Rows) -> AsyncIterator[Fleet]:
    async with Fleet(rows=fleet_rows) as made:
        yield made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", MESSAGES_PATH])
async def test_an_answer_goes_from_an_engine_to_a_client_and_its_record(fleet: Fleet, *, stream: bool, path: str) -> None:
    node = await fleet.add_node()
    answer = fleet.ask(stream=stream, path=path)
    call = await fleet.next_call(answer)
    call.emit(3)
    call.finish()
    row = await answer.row()
    assert (answer.status, answer.error_code) == (200, "")
    assert answer.pieces == [(call.ident, place) for place in range(3)]
    assert (row["state"], row["node_name"], row["attempts"]) == ("completed", node.name, 1)
    assert (row["prompt_tokens"], row["completion_tokens"]) == (PROMPT_TOKENS, 3)


async def test_a_wait_of_half_a_minute_takes_no_such_time_and_ends_to_the_second(fleet: Fleet) -> None:
    node = await fleet.add_node()
    began, first = time.monotonic(), fleet.ask()
    await fleet.next_call(first)
    second = fleet.ask()
    row = await second.row()
    assert (second.status, second.error_code) == (QueueTimeout.status, QueueTimeout.code)
    assert (row["state"], row["error_code"], row["attempts"]) == ("failed", QueueTimeout.code, 0)
    assert second.ended_at is not None
    assert second.ended_at - second.asked_at == pytest.approx(limits().gateway.queue_s)
    assert time.monotonic() - began < limits().gateway.queue_s
    assert node.engine.running == first.calls


async def test_a_client_that_leaves_frees_its_slot_and_stops_its_engine_at_once(fleet: Fleet) -> None:
    node = await fleet.add_node()
    first, second = fleet.ask(stream=True), fleet.ask(stream=True)
    call = await fleet.next_call(first)
    call.emit()
    await fleet.settle()
    first.leave()
    await fleet.settle()
    assert call.state is CallState.CANCELLED
    (later,) = node.engine.running
    assert later.number == second.number
    assert (await first.row())["state"] == "cancelled"


async def test_two_directions_of_a_link_stall_apart(fleet: Fleet) -> None:
    node = await fleet.add_node()
    answer = fleet.ask(stream=True)
    call = await fleet.next_call(answer)
    node.link.up.stall()
    call.emit(2)
    call.finish()
    await fleet.settle()
    assert answer.pieces == []
    node.link.resume()
    await asyncio.wait_for(answer.done(), 0.001)
    assert len(answer.pieces) == 2
