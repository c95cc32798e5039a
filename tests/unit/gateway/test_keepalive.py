from __future__ import annotations

import asyncio

from gateway.keepalive import KeepAlive
from tests.fakes.asgi_client import MemoryClient

PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def start(client: MemoryClient) -> KeepAlive:
    keepalive = KeepAlive(client.connection, extra=[(b"x-request-id", b"req_1")], every_s=0.01)
    keepalive.start()
    return keepalive


async def test_a_stream_without_an_answer_begins_with_a_comment_and_goes_on_with_them() -> None:
    client = MemoryClient()
    keepalive = start(client)
    await client.wait(lambda: client.body.count(b": ping\n\n") >= 3)
    keepalive.stop()
    assert client.status == 200
    assert client.headers["content-type"].startswith("text/event-stream")
    assert client.headers["x-request-id"] == "req_1"
    assert set(client.body.split(b"\n\n")) == {b": ping", b""}


async def test_silence_is_filled_between_events_and_never_inside_one() -> None:
    client = MemoryClient()
    keepalive = start(client)
    keepalive.event = PING
    client.connection.start(200, [(b"content-type", b"text/event-stream")])
    client.connection.write(b"data: 1\n\n")
    await client.wait(lambda: PING in client.body)
    client.connection.write(b'data: {"half')
    ticks = asyncio.get_running_loop().time() + 0.05
    await client.wait(lambda: asyncio.get_running_loop().time() > ticks)
    assert client.body.endswith(b'data: {"half')
    client.connection.write(b'":1}\n\n')
    length = len(client.body)
    await client.wait(lambda: len(client.body) > length)
    keepalive.stop()
    assert client.body[length:].startswith(PING)


async def test_nothing_follows_the_end_of_an_answer() -> None:
    client = MemoryClient()
    keepalive = start(client)
    client.connection.start(200, [])
    client.connection.finish(b"data: [DONE]\n\n")
    ticks = asyncio.get_running_loop().time() + 0.03
    await client.wait(lambda: asyncio.get_running_loop().time() > ticks)
    keepalive.stop()
    assert client.body == b"data: [DONE]\n\n"


async def test_a_client_that_left_gets_nothing() -> None:
    client = MemoryClient()
    client.connection.watch()
    keepalive = start(client)
    client.leave()
    ticks = asyncio.get_running_loop().time() + 0.03
    await client.wait(lambda: asyncio.get_running_loop().time() > ticks)
    keepalive.stop()
    assert client.events == []
