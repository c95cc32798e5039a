"""Slots and the short queue of a box."""

from __future__ import annotations

import asyncio

import pytest

from runner.admission import Admission
from runner.errors import BoxBusy

pytestmark = pytest.mark.asyncio


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_slots_are_handed_over_in_order_of_arrival() -> None:
    admission, order = Admission(slots=1, queue_limit=3), list[int]()

    async def visit(number: int) -> None:
        await admission.enter()
        order.append(number)
        await asyncio.sleep(0)
        admission.leave()

    await asyncio.gather(*(visit(number) for number in range(4)))
    assert order == [0, 1, 2, 3]
    assert admission.active == 0


async def test_a_full_queue_refuses_at_once() -> None:
    admission = Admission(slots=1, queue_limit=1)
    await admission.enter()
    waiting = asyncio.create_task(admission.enter())
    await settle()
    with pytest.raises(BoxBusy, match="all 1 slots are taken"):
        await admission.enter()
    admission.leave()
    await waiting
    assert admission.active == 1


async def test_whoever_gives_up_waiting_takes_no_slot() -> None:
    admission = Admission(slots=1, queue_limit=2)
    await admission.enter()
    first, second = asyncio.create_task(admission.enter()), asyncio.create_task(admission.enter())
    await settle()
    first.cancel()
    await settle()
    admission.leave()
    await second
    assert admission.active == 1


async def test_a_slot_given_to_somebody_who_is_cancelled_in_the_same_tick_is_passed_on() -> None:
    admission = Admission(slots=1, queue_limit=2)
    await admission.enter()
    first, second = asyncio.create_task(admission.enter()), asyncio.create_task(admission.enter())
    await settle()
    admission.leave()
    first.cancel()
    await second
    assert first.cancelled()
    admission.leave()
    assert admission.active == 0


async def test_cancel_and_hand_over_in_the_other_order_lose_nothing() -> None:
    admission = Admission(slots=1, queue_limit=1)
    await admission.enter()
    waiting = asyncio.create_task(admission.enter())
    await settle()
    waiting.cancel()
    admission.leave()
    await settle()
    assert waiting.cancelled()
    assert admission.active == 0
