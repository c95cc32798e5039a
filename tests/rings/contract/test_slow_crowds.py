"""A good client beside hundreds that send or read as slowly as they can."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from core.limits import GatewayLimits
from gateway.client import ClientConnection
from gateway.errors import ClientTooSlow
from tests.fakes.server_door import GET, Scope, Visitor, hello, serve

TRICKLING, STALLED = 500, 50
PIECE_BYTES = 64 * 1024
STALL = GET.replace(b"/x", b"/stall")


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Both ends of every connection are files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * (TRICKLING + STALLED)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} open files; the limit here is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_good_client_is_served_while_hundreds_trickle_and_stall_and_all_of_them_are_ended() -> None:
    too_slow = held_bytes = 0

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        nonlocal too_slow, held_bytes
        if scope["path"] != "/stall":
            await hello(scope, receive, send)
            return
        client = ClientConnection(scope, receive, send, limits=GatewayLimits(client_write_s=3.0))
        await client.read_body()
        client.watch()
        client.start(200, [])
        try:
            while True:
                client.write(b"x" * PIECE_BYTES)
                held_bytes = max(held_bytes, client.outbox.waiting_bytes)
                await client.drain()
        except ClientTooSlow:
            too_slow += 1
        client.unwatch()

    async with serve(app, header_s=6.0) as door, AsyncExitStack() as crowd, asyncio.timeout(120):
        good = await crowd.enter_async_context(door.visit())
        tricklers = [await crowd.enter_async_context(door.visit(b"GET /x HTTP/1.1\r\nx-slow: ")) for _ in range(TRICKLING)]
        stalled = [await crowd.enter_async_context(door.visit(STALL)) for _ in range(STALLED)]
        for visitor in stalled:
            visitor.reader._transport.pause_reading()  # type: ignore[attr-defined]
        answers = [asyncio.create_task(visitor.answer()) for visitor in tricklers]
        beside = 0
        while too_slow < STALLED or not all(answer.done() for answer in answers):
            await good.say(GET)
            assert (await good.answer())[2] == b"hello"
            beside += not any(answer.done() for answer in answers)
            for visitor in tricklers:
                trickle(visitor)
        assert beside > 0
        assert held_bytes <= PIECE_BYTES
        assert {(await answer)[0] for answer in answers} == {408}


def trickle(visitor: Visitor) -> None:
    """Send one byte more of a header that has no end."""
    if not visitor.writer.is_closing():
        visitor.writer.write(b"a")
