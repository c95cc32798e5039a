"""Failover slots: what is held when a node misses a second heartbeat, for whom and for how long, and who gets it in the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from core.limits import GatewayLimits
from nodes.links.port import EndKind
from nodes.states import CONTINUATIONS, Windows
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import CHAT, REPLY, SSE, STREAM, Gateway, MemoryDatabase, Request, chunk
from tests.fakes.waiting import turns
from wire import clock

WINDOWS = Windows(stale_s=100.0, failover_s=200.0, offline_s=300.0)
RESUME: dict[str, Any] = {"stream": True, "x_pool_options": {"resume": True}}


class Fleet:
    """A gateway on a database in memory, whose nodes fall silent when the test says so."""

    def __init__(self, **limits: int) -> None:
        self.database = MemoryDatabase()
        self.gateway = Gateway(
            connect=self.database.connect, limits=GatewayLimits(no_node_wait_s=29.0, stream_ping_s=60.0, **limits)
        )
        self.failover = self.gateway.pipeline.failover

    def link(self, slots: int = 1, *, paths: set[str] | None = None) -> FakeLink:
        link = self.gateway.link(slots=slots, paths=paths)
        link.windows = WINDOWS
        return link

    def fall_silent(self, link: FakeLink, seconds: float = 250.0) -> None:
        """Let a node have been silent for so long, and the gateway look at it."""
        link.last_seen = clock.awake() - seconds
        self.gateway.dispatcher._keeper.tick()

    async def ask(self, link: FakeLink, **fields: Any) -> tuple[Request, FakeStream]:
        """Ask for something that only this node has room for."""
        before = len(link.streams)
        request = self.gateway.ask(**fields)
        await request.client.wait(lambda: len(link.streams) > before)
        return request, link.streams[-1]


@asynccontextmanager
async def fleet(**limits: int) -> AsyncIterator[Fleet]:
    """Open a fleet; when a test is over nobody holds anything in it any more."""
    made = Fleet(**limits)
    yield made
    made.gateway.dispatcher._keeper.tick()
    assert not made.failover.held
    assert [link.active for link in made.gateway.registry] == [0] * len(made.gateway.registry)
    assert made.gateway.dispatcher.depth == 0
    await made.gateway.records.stop()


async def test_a_request_gets_its_held_slot_at_once_when_its_node_is_given_up_however_many_others_wait() -> None:
    async with fleet() as here:
        first = here.link()
        request, _ = await here.ask(first)
        other = here.link()
        here.fall_silent(first, 150.0)
        assert (other.active, first.condition()) == (0, "stale"), "one missed heartbeat holds nothing"
        here.fall_silent(first)
        assert (other.active, other.streams) == (1, [])
        waiting = here.gateway.ask()
        await waiting.client.wait(lambda: here.gateway.dispatcher.depth)
        here.fall_silent(first, 350.0)
        await request.served(other, REPLY)
        await waiting.served(other, REPLY)
        assert (request.client.status, waiting.client.status) == (200, 200)


async def test_a_slot_is_given_back_when_the_node_is_heard_again() -> None:
    async with fleet() as here:
        first = here.link()
        request, stream = await here.ask(first)
        other = here.link()
        here.fall_silent(first)
        waiting = here.gateway.ask()
        await waiting.client.wait(lambda: here.gateway.dispatcher.depth)
        here.fall_silent(first, 0.0)
        await waiting.served(other, REPLY)
        assert other.active == 0
        stream.answer(REPLY)
        await request.done()


@pytest.mark.parametrize("end", ["answered", "left", "failed"])
async def test_a_slot_is_given_back_when_its_request_has_ended(end: str) -> None:
    async with fleet() as here:
        first = here.link()
        request, stream = await here.ask(first)
        other = here.link()
        here.fall_silent(first)
        assert other.active == 1
        if end == "answered":
            stream.answer(REPLY)
        elif end == "left":
            request.client.leave()
        else:  # its engine did, before the node was given up: the slot is used, and the request ends there
            stream.end(EndKind.ENGINE_FAILED, retryable=True)
            (await request.on(other)).answer(REPLY)
        await request.done()
        assert other.active == 0
        here.fall_silent(first, 0.0)


@pytest.mark.parametrize("is_given_up", [False, True])
async def test_a_slot_is_given_back_when_the_answer_is_there_though_its_client_reads_slowly(is_given_up: bool) -> None:
    async with fleet() as here:
        first = here.link()
        request, stream = await here.ask(first)
        other = here.link()
        here.fall_silent(first)
        request.client.reading.clear()
        stream.answer(REPLY + b" " * 300_000)
        await turns(5)
        assert (first.active, other.active, request.task.done()) == (0, 1, False)
        if is_given_up:
            here.gateway.registry.remove(first)
            here.fall_silent(other, 0.0)
        here.fall_silent(other, 0.0)
        assert (other.active, request.task.done()) == (0, False)
        request.client.reading.set()
        await request.done()
        assert request.client.status == 200


async def test_only_what_can_go_elsewhere_holds_a_slot() -> None:
    async with fleet() as here:
        first = here.link(3, paths={CHAT, CONTINUATIONS})
        begun, stream = await here.ask(first, stream=True)
        resumed, resumable = await here.ask(first, **RESUME)
        tools, called = await here.ask(first, **RESUME)
        for one in (stream, resumable):
            one.answer(STREAM[0], headers=SSE, ends=False)
        call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
        called.answer(chunk({"role": "assistant", "tool_calls": [call]}), headers=SSE, ends=False)
        mute, other = here.link(2, paths={CHAT}), here.link(3, paths={CHAT, CONTINUATIONS})
        here.fall_silent(first)
        assert [link.active for link in (mute, other)] == [0, 1], "one stream can go on, at one of the nodes"
        here.fall_silent(first, 350.0)
        further = await resumed.on(other)
        assert further.request.path == CONTINUATIONS
        further.answer(*STREAM[1:], headers=SSE)
        for request in (begun, resumed, tools):
            await request.done()
        assert b"[DONE]" in resumed.client.body
        assert b'"error"' in begun.client.body


async def test_no_more_slots_are_held_than_the_limit_says_and_none_that_others_wait_for() -> None:
    async with fleet(failover_slots=1) as here:
        first = here.link(2)
        (one, _), (two, _) = await here.ask(first), await here.ask(first)
        other = here.link(2)
        here.fall_silent(first)
        assert other.active == 1
        here.fall_silent(first, 0.0)
        assert other.active == 0
        for stream in list(first.streams):
            stream.answer(REPLY)
        await asyncio.gather(one.done(), two.done())


async def test_who_waits_comes_first_and_a_slot_moves_on_from_a_node_that_takes_nothing_new() -> None:
    async with fleet() as here:
        first, second = here.link(), here.link()
        (one, _), (two, there) = await here.ask(first), await here.ask(second)
        third = here.gateway.ask()
        await third.client.wait(lambda: here.gateway.dispatcher.depth)
        here.fall_silent(first)
        assert (second.active, len(here.failover.held)) == (1, 0)
        there.answer(REPLY)
        await two.done()
        await third.served(second, REPLY)
        here.fall_silent(first)
        assert second.active == 1
        last = here.link()
        second.policy.draining = True
        here.fall_silent(first)
        assert (second.active, last.active) == (0, 1)
        here.fall_silent(first, 350.0)
        await one.served(last, REPLY)


async def test_a_node_that_is_lost_while_it_is_held_is_of_no_use_and_the_request_waits_for_another() -> None:
    async with fleet() as here:
        first = here.link()
        request, _ = await here.ask(first)
        other = here.link()
        here.fall_silent(first)
        assert other.active == 1
        here.gateway.registry.remove(other)
        here.fall_silent(first, 350.0)
        await turns(5)
        assert other.streams == []
        await request.served(here.link(), REPLY)
