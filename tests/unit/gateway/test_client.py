"""The client's side of one exchange: body limits and deadlines, ordered writing, and noticing that it left."""

from __future__ import annotations

import asyncio

import pytest

from gateway.client import ClientConnection
from gateway.errors import BodyTooLarge, ClientLeft, ClientTooSlow, RequestTimeout
from gateway.values import Limits, Timeouts
from tests.fakes.asgi_client import MemoryClient

SMALL = Limits(max_body_bytes=10, max_buffer_bytes=100)


async def test_a_body_in_parts_is_put_together() -> None:
    assert await MemoryClient(body=[b"ab", b"", b"cde"]).connection.read_body() == b"abcde"
    assert await MemoryClient(body=[b""]).connection.read_body() == b""


async def test_headers_are_read_by_lower_case_name_and_the_last_of_a_repeated_one_counts() -> None:
    scope = {"headers": [(b"x-a", b"1"), (b"x-a", b"\xe9")]}

    async def nothing(*_: object) -> None:
        raise AssertionError

    client = ClientConnection(scope, nothing, nothing, limits=SMALL, timeouts=Timeouts())  # type: ignore[arg-type]
    assert client.headers["x-a"] == "é"
    assert client.headers.get("x-b") is None
    assert dict(client.headers) == {"x-a": "é"}


@pytest.mark.parametrize("body", [[b"x" * 11], [b"x" * 10, b"x"], [b"x" * 4, b"x" * 4, b"x" * 4, b"never read"]])
async def test_a_body_over_the_limit_is_refused(body: list[bytes]) -> None:
    with pytest.raises(BodyTooLarge) as caught:
        await MemoryClient(body=body, limits=SMALL).connection.read_body()
    assert caught.value.status == 413


async def test_a_body_at_the_limit_is_taken() -> None:
    assert len(await MemoryClient(body=[b"x" * 6, b"x" * 4], limits=SMALL).connection.read_body()) == 10


async def test_a_caller_may_set_another_limit() -> None:
    assert len(await MemoryClient(body=[b"x" * 11], limits=SMALL).connection.read_body(12)) == 11
    with pytest.raises(BodyTooLarge):
        await MemoryClient(body=[b"x" * 7, b"x" * 7], limits=SMALL).connection.read_body(12)


async def test_a_declared_length_over_the_limit_is_refused_before_the_body_comes() -> None:
    client = MemoryClient(body=[], headers={"content-length": "11"}, limits=SMALL)
    with pytest.raises(BodyTooLarge):
        await client.connection.read_body()
    assert client.handle.closes


@pytest.mark.parametrize("length", ["", "ten", "-1", "²", "٣", "9" * 5000])
async def test_a_strange_declared_length_is_not_our_bug(length: str) -> None:
    client = MemoryClient(body=[b"ok"], limits=SMALL)
    client.connection.headers._raw[b"content-length"] = length.encode("latin-1", "replace")
    try:
        assert await client.connection.read_body() == b"ok"
    except BodyTooLarge:
        assert length.startswith("9")


async def test_a_body_that_does_not_come_in_time_is_a_timeout_on_a_plain_server() -> None:
    client = MemoryClient(body=[], timeouts=Timeouts(body_s=0.01), with_handle=False)
    with pytest.raises(RequestTimeout):
        await client.connection.read_body()


async def test_a_client_that_leaves_while_sending_is_noticed() -> None:
    client = MemoryClient(body=[])
    client.leave()
    with pytest.raises(ClientLeft):
        await client.connection.read_body()


@pytest.mark.parametrize("with_handle", [True, False])
async def test_a_wait_ends_at_once_when_the_client_leaves(*, with_handle: bool) -> None:
    client = MemoryClient(with_handle=with_handle)
    connection = client.connection
    await connection.read_body()
    connection.watch()
    gone: list[bool] = []
    connection.on_gone = lambda: gone.append(True)
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(client.leave)
    with pytest.raises(ClientLeft):
        await connection.wait(future)
    assert future.done()
    assert gone == [True]
    later: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(ClientLeft):
        await connection.wait(later)
    assert later.cancelled()
    connection.unwatch()


async def test_after_unwatch_nobody_is_told_and_no_task_is_left() -> None:
    for with_handle in (True, False):
        client = MemoryClient(with_handle=with_handle)
        await client.connection.read_body()
        before = asyncio.all_tasks()
        client.connection.watch()
        client.connection.unwatch()
        client.leave()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not client.connection.is_gone
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("with_handle", [True, False])
async def test_a_whole_response_has_its_length(*, with_handle: bool) -> None:
    client = MemoryClient(with_handle=with_handle)
    client.connection.respond(418, [(b"x-a", b"b")], b"teapot")
    assert (client.status, client.body, client.is_whole, client.headers["x-a"]) == (418, b"teapot", True, "b")
    if not with_handle:
        assert client.headers["content-length"] == "6"


async def test_drain_waits_for_a_client_that_reads_late() -> None:
    client = MemoryClient()
    connection = client.connection
    await connection.drain()
    connection.start(200, [])
    client.reading.clear()
    connection.write(b"a")
    connection.write(b"b")
    connection.finish()
    task = asyncio.create_task(connection.drain())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done()
    client.reading.set()
    await task
    assert client.body == b"ab"
    assert client.is_whole


async def test_drain_ends_when_the_client_leaves_or_takes_too_long() -> None:
    for patience, error in ((30.0, ClientLeft), (0.01, ClientTooSlow)):
        client = MemoryClient(timeouts=Timeouts(client_write_s=patience))
        client.connection.watch()
        client.reading.clear()
        client.connection.start(200, [])
        if error is ClientLeft:
            asyncio.get_running_loop().call_soon(client.leave)
        with pytest.raises(error):
            await client.connection.drain()
        assert client.connection.outbox.dead
        assert client.handle.aborted == (error is ClientTooSlow)


async def test_a_client_with_too_much_waiting_is_cut_off() -> None:
    client = MemoryClient(limits=SMALL)
    client.reading.clear()
    client.connection.start(200, [])
    for _ in range(11):
        client.connection.write(b"x" * 10)
    assert client.connection.is_gone
    assert client.handle.aborted
    assert client.events == []
