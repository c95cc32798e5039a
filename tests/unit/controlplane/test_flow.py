"""The two halves of flow control, without a socket."""

from __future__ import annotations

import asyncio

import pytest

from controlplane.daphne_server.flow import PausingQueue, WriteGate
from core.limits import limits


class Transport:
    """Notes whether it is read from."""

    def __init__(self) -> None:
        self._is_paused = False

    def is_paused(self) -> bool:
        return self._is_paused

    def pauseProducing(self) -> None:  # noqa: N802  # Twisted's interface
        self._is_paused = True

    def resumeProducing(self) -> None:  # noqa: N802  # Twisted's interface
        self._is_paused = False


async def is_open(gate: WriteGate) -> bool:
    try:
        async with asyncio.timeout(0.01):
            await gate.wait_open()
    except TimeoutError:
        return False
    return True


async def test_a_gate_is_closed_while_the_transport_is_full() -> None:
    gate = WriteGate()
    assert await is_open(gate)
    gate.pauseProducing()
    assert not await is_open(gate)
    gate.resumeProducing()
    assert await is_open(gate)


async def test_nobody_waits_at_the_gate_of_a_lost_connection() -> None:
    gate = WriteGate()
    gate.pauseProducing()
    waiting = asyncio.create_task(gate.wait_open())
    gate.stopProducing()
    await asyncio.wait_for(waiting, 30)
    gate.pauseProducing()
    assert await is_open(gate)


async def test_a_client_is_held_back_above_the_high_mark_and_let_go_at_the_low_one() -> None:
    transport = Transport()
    queue = PausingQueue(transport)
    for number in range(limits().console.inbox_high):
        queue.put_nowait({"number": number})
    assert not transport.is_paused()
    queue.put_nowait({"number": limits().console.inbox_high})
    assert transport.is_paused()
    taken = []
    while transport.is_paused():
        taken.append((await queue.get())["number"])
    assert taken == list(range(limits().console.inbox_high + 1 - limits().console.inbox_low))


@pytest.mark.parametrize("extra", [0, 200])
async def test_bytes_that_were_read_already_are_still_delivered(extra: int) -> None:
    queue = PausingQueue(Transport())
    total = limits().console.inbox_high + 1 + extra
    for number in range(total):
        queue.put_nowait({"number": number})
    assert [(await queue.get())["number"] for _ in range(total)] == list(range(total))
