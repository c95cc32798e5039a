"""Ordered, bounded writing to an ASGI connection, on a real event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.daphne_server import PausingQueue, WriteGate
from core.limits import limits
from core.outbox import AsgiMessage, Outbox
from tests.fakes.examples import examples
from tests.fakes.waiting import eventually, turns


class Server:
    """The ASGI server's side of one connection: takes messages at once, or when ``ready`` is set again."""

    def __init__(self) -> None:
        self.taken: list[object] = []
        self.ready = asyncio.Event()
        self.ready.set()
        self.error: Exception | None = None
        self.cancelled = 0

    async def send(self, message: AsgiMessage) -> None:
        try:
            await self.ready.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        self.taken.append(message["n"])


class Events:
    """What the outbox called back."""

    def __init__(self) -> None:
        self.stuck: list[str] = []
        self.drained = 0

    def take_drained(self) -> None:
        self.drained += 1


def make_outbox(server: Server, events: Events, *, limit: int = 1000, timeout_s: float = 30.0) -> Outbox:
    return Outbox(
        server.send, limit_bytes=limit, timeout_s=timeout_s, on_stuck=events.stuck.append, on_drained=events.take_drained
    )


async def test_messages_are_taken_within_the_call_or_wait_in_order_and_draining_is_said_once() -> None:
    server, events = Server(), Events()
    outbox = make_outbox(server, events)
    for number in range(5):
        outbox.put({"n": number}, 10)
        assert server.taken == list(range(number + 1))
        assert not outbox.is_blocked
    assert (outbox.waiting_bytes, events.drained, events.stuck) == (0, 0, [])
    server.ready.clear()
    for number in range(5, 10):
        outbox.put({"n": number}, 10)
    assert (outbox.is_blocked, outbox.waiting_bytes, len(server.taken)) == (True, 50, 5)
    server.ready.set()
    await eventually(lambda: not outbox.is_blocked)
    assert server.taken == list(range(10))
    assert (outbox.waiting_bytes, events.drained) == (0, 1)
    outbox.put({"n": 10}, 10)
    assert server.taken[-1] == 10


async def test_more_than_the_limit_stops_the_outbox_once() -> None:
    server, events = Server(), Events()
    outbox = make_outbox(server, events, limit=100)
    server.ready.clear()
    outbox.put({"n": 0}, 30)
    await turns(1)
    for number in range(1, 20):
        outbox.put({"n": number}, 30)
    assert len(events.stuck) == 1
    assert outbox.dead
    assert outbox.waiting_bytes == 0
    server.ready.set()
    await eventually(lambda: server.cancelled)
    outbox.put({"n": 99}, 1)
    assert server.taken == []
    assert events.drained == 0


async def test_a_peer_that_takes_nothing_is_given_up_after_the_timeout() -> None:
    server, events = Server(), Events()
    outbox = make_outbox(server, events, timeout_s=0.01)
    server.ready.clear()
    outbox.put({"n": 0}, 1)
    outbox.put({"n": 1}, 1)
    await eventually(lambda: events.stuck)
    assert "0.01 s" in events.stuck[0]
    assert outbox.dead
    assert not outbox.is_blocked
    assert server.taken == []


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("closed")])
@pytest.mark.parametrize("late", [False, True])
async def test_a_refused_write_ends_the_outbox_and_is_told_once(error: Exception, *, late: bool) -> None:
    server, events = Server(), Events()
    outbox = make_outbox(server, events)
    server.error = error
    if late:
        server.ready.clear()
    outbox.put({"n": 0}, 1)
    outbox.put({"n": 1}, 1)
    server.ready.set()
    await eventually(lambda: events.stuck)
    assert len(events.stuck) == 1
    assert outbox.dead
    assert not outbox.is_blocked


async def test_stop_forgets_what_waits_and_tells_nobody() -> None:
    server, events = Server(), Events()
    outbox = make_outbox(server, events)
    server.ready.clear()
    outbox.put({"n": 0}, 1)
    outbox.put({"n": 1}, 1)
    outbox.stop()
    outbox.stop()
    assert outbox.dead
    assert not outbox.is_blocked
    await turns(1)
    server.ready.set()
    await turns(1)
    assert (server.taken, events.stuck, events.drained) == ([], [], 0)


async def test_a_server_that_yields_to_the_loop_is_waited_for() -> None:
    taken: list[object] = []

    async def send(message: AsgiMessage) -> None:
        await turns(1)
        taken.append(message["n"])

    outbox = Outbox(send, limit_bytes=100, timeout_s=30, on_stuck=lambda reason: None)
    for number in range(4):
        outbox.put({"n": number}, 1)
    await eventually(lambda: not outbox.is_blocked)
    assert taken == [0, 1, 2, 3]


async def test_an_error_thrown_into_a_waiting_server_reaches_its_handlers() -> None:
    seen: list[str] = []
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def send(message: AsgiMessage) -> None:
        try:
            await future
        except ConnectionResetError:
            seen.append("handled")

    outbox = Outbox(send, limit_bytes=100, timeout_s=30, on_stuck=seen.append)
    outbox.put({"n": 0}, 1)
    future.set_exception(ConnectionResetError())
    await eventually(lambda: not outbox.is_blocked)
    assert seen == ["handled"]


@examples(20)
@given(steps=st.lists(st.sampled_from(["put", "block", "open", "turn"]), max_size=60))
def test_every_message_arrives_once_and_in_order_whatever_the_server_does(steps: list[str]) -> None:
    async def play() -> None:
        server, events = Server(), Events()
        outbox = make_outbox(server, events, limit=10_000)
        count = 0
        act: dict[str, Callable[[], Awaitable[object] | None]] = {
            "block": server.ready.clear, "open": server.ready.set, "turn": lambda: turns(1),
        }  # fmt: skip
        for step in steps:
            if step == "put":
                outbox.put({"n": count}, 1)
                count += 1
            elif (waiting := act[step]()) is not None:
                await waiting
            assert server.taken == list(range(len(server.taken)))
        server.ready.set()
        await eventually(lambda: not outbox.is_blocked)
        assert server.taken == list(range(count))
        assert outbox.waiting_bytes == 0
        assert events.stuck == []

    asyncio.run(play())


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


async def test_a_gate_is_closed_while_the_transport_is_full_and_nobody_waits_when_it_is_lost() -> None:
    gate = WriteGate()
    assert await is_open(gate)
    gate.pauseProducing()
    assert not await is_open(gate)
    gate.resumeProducing()
    assert await is_open(gate)
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
    total = limits().console.inbox_high + 200  # bytes that were read already are still delivered
    for number in range(limits().console.inbox_high + 1, total):
        queue.put_nowait({"number": number})
    assert [(await queue.get())["number"] for _ in range(total - len(taken))] == list(range(len(taken), total))
