"""A client that leaves while it is served is noticed, whatever it sent: reading goes on for as long as somebody watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.limits import GatewayLimits
from gateway.client import ClientConnection
from tests.system.gateway_server.doors import GET, Scope, Visitor, handle_of, serve, until

HIGH_WATER_BYTES = 65_536
"""Of a body that nobody has asked for, uvicorn keeps this much before it stops reading."""
SIZES = [1000, HIGH_WATER_BYTES + 5000, 200_000, 5_000_000]
POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"


@dataclass
class Service:
    """Reads each body, then watches for the client to leave, or answers when it may. ``served``: the sizes of the bodies."""

    served: list[int] = field(default_factory=list)
    watching: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        client = ClientConnection(scope, receive, send, limits=GatewayLimits())
        self.served.append(len(await client.read_body()))
        handle = handle_of(scope)
        handle.set_lost_callback(self.lost.set)
        self.watching.set()
        waits = [asyncio.create_task(event.wait()) for event in (self.lost, self.may_answer)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        handle.set_lost_callback(None)
        handle.respond(200, [], b"hello")


@asynccontextmanager
async def visit() -> AsyncIterator[tuple[Service, Visitor]]:
    service = Service()
    async with serve(service) as door, door.visit() as visitor:
        yield service, visitor
        service.lost.set()


async def wait_for(event: asyncio.Event) -> None:
    async with asyncio.timeout(30):
        await event.wait()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_a_client_is_missed_after_a_body_of_any_size(how: str, size: int) -> None:
    async with visit() as (service, visitor):
        await visitor.say(POST % size + b"a" * size)
        await wait_for(service.watching)
        visitor.reset() if how == "reset" else visitor.writer.close()
        await wait_for(service.lost)
        assert service.served == [size]


@pytest.mark.parametrize("size", SIZES)
async def test_a_client_is_missed_after_a_body_in_chunks(size: int) -> None:
    async with visit() as (service, visitor):
        pieces = [b"a" * min(50_000, size - start) for start in range(0, size, 50_000)]
        await visitor.say(b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
        for piece in pieces:
            await visitor.say(b"%x\r\n%b\r\n" % (len(piece), piece))
        await visitor.say(b"0\r\n\r\n")
        await wait_for(service.watching)
        visitor.writer.close()
        await wait_for(service.lost)
        assert service.served == [size]


@pytest.mark.parametrize("size", SIZES)
async def test_a_client_is_missed_that_had_waited_for_leave_to_send(size: int) -> None:
    async with visit() as (service, visitor):
        await visitor.say(b"POST /x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % size)
        assert (await visitor.head())[0] == 100
        await visitor.say(b"a" * size)
        await wait_for(service.watching)
        visitor.writer.close()
        await wait_for(service.lost)
        assert service.served == [size]


@pytest.mark.parametrize("size", SIZES)
async def test_a_client_is_missed_on_a_connection_that_was_used_before(size: int) -> None:
    async with visit() as (service, visitor):
        service.may_answer.set()
        for _ in range(2):
            await visitor.say(POST % size + b"a" * size)
            assert (await visitor.answer())[2] == b"hello"
        service.may_answer.clear()
        service.watching.clear()
        await visitor.say(POST % size + b"a" * size)
        await wait_for(service.watching)
        visitor.writer.close()
        await wait_for(service.lost)
        assert service.served == [size] * 3


@pytest.mark.parametrize("waiting", [GET, GET * 5, POST % 30_000 + b"a" * 30_000], ids=["a request", "five", "a body"])
@pytest.mark.parametrize("when", ["at once", "while it is served"])
async def test_a_client_is_missed_that_has_sent_its_next_request_already(when: str, waiting: bytes) -> None:
    async with visit() as (service, visitor):
        first = POST % 100_000 + b"a" * 100_000
        if when == "at once":
            await visitor.say(first + waiting)
            await wait_for(service.watching)
        else:
            await visitor.say(first)
            await wait_for(service.watching)
            await visitor.say(waiting)
        visitor.writer.close()
        await wait_for(service.lost)
        assert service.served == [100_000]


async def test_of_requests_without_number_a_few_are_answered_and_the_connection_is_closed_behind_them() -> None:
    async with visit() as (service, visitor):
        await visitor.say(GET)
        await wait_for(service.watching)
        sending = asyncio.create_task(visitor.say(GET * 200_000))  # 6 MB: more than what a kernel keeps
        await sending
        service.may_answer.set()
        answers = [await visitor.answer()]
        while "connection" not in answers[-1][1]:
            answers.append(await visitor.answer())
        assert await visitor.rest() == b""
        assert {status for status, _, _ in answers} == {200}
        assert len(answers) == len(service.served) == 65


async def test_a_client_is_missed_that_sent_requests_without_number() -> None:
    async with visit() as (service, visitor):
        await visitor.say(GET * 10_000)
        await wait_for(service.watching)
        await visitor.say(GET * 200_000)
        visitor.writer.close()
        await wait_for(service.lost)
        assert len(service.served) == 1


async def test_a_body_that_nobody_reads_yet_has_no_deadline() -> None:
    service = Service()
    async with serve(service, body_s=0.5) as door, door.visit() as visitor:
        await visitor.say(GET)
        await wait_for(service.watching)
        size = 5_000_000
        sending = asyncio.create_task(visitor.say(POST % size + b"a" * size))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.8):
                await asyncio.shield(sending)
        door.protocol.body_timeout_s = 30.0  # for what follows, which takes as long as the machine does
        service.may_answer.set()
        assert (await visitor.answer())[2] == b"hello"
        await sending
        assert (await visitor.answer())[2] == b"hello"
        await until(lambda: len(service.served) == 2)
        assert service.served == [0, size]
