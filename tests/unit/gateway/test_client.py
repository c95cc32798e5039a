"""The client's side of one exchange: bodies, ordered writing, signs of life, who may call, and noticing that it left."""

from __future__ import annotations

import asyncio

import pytest
from pytest_django import Settings

from core.limits import GatewayLimits
from gateway.checks import check_settings
from gateway.cors import admit_origin, is_preflight
from gateway.errors import BodyTooLarge, ClientLeft, ClientTooSlow, RequestTimeout
from gateway.keepalive import KeepAlive
from gateway.views.nearness import came_directly
from tests.fakes.asgi_client import MemoryClient

SMALL = GatewayLimits(max_body_bytes=10, max_buffer_bytes=100)


@pytest.mark.parametrize("body", [[b"x" * 11], [b"x" * 10, b"x"], [b"x" * 4, b"x" * 4, b"x" * 4, b"never read"]])
async def test_a_body_over_the_limit_is_refused(body: list[bytes]) -> None:
    with pytest.raises(BodyTooLarge) as caught:
        await MemoryClient(body=body, limits=SMALL).connection.read_body()
    assert caught.value.status == 413
    assert await MemoryClient(body=[b"x" * 6, b"", b"y" * 4], limits=SMALL).connection.read_body() == b"xxxxxxyyyy"
    declared = MemoryClient(body=[], headers={"content-length": "11"}, limits=SMALL)
    with pytest.raises(BodyTooLarge):  # before any of it comes
        await declared.connection.read_body()
    assert declared.handle.closes


async def test_a_body_that_does_not_come_is_a_timeout_on_a_plain_server_or_a_client_that_left() -> None:
    with pytest.raises(RequestTimeout):
        await MemoryClient(body=[], limits=GatewayLimits(body_s=0.01), with_handle=False).connection.read_body()
    client = MemoryClient(body=[])
    client.leave()
    with pytest.raises(ClientLeft):
        await client.connection.read_body()


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


async def test_drain_ends_when_the_client_leaves_or_takes_too_long() -> None:
    for patience, error in ((30.0, ClientLeft), (0.01, ClientTooSlow)):
        client = MemoryClient(limits=GatewayLimits(client_write_s=patience))
        client.connection.watch()
        client.reading.clear()
        client.connection.start(200, [])
        if error is ClientLeft:
            asyncio.get_running_loop().call_soon(client.leave)
        with pytest.raises(error):
            await client.connection.drain()
        assert client.connection.outbox.dead
        assert client.handle.aborted == (error is ClientTooSlow)


async def test_a_client_that_leaves_ends_a_wait_for_work_and_the_work() -> None:
    client = MemoryClient()
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    client.connection.watch()
    waiting = asyncio.create_task(client.connection.wait_for_work(work()))
    await asyncio.sleep(0)
    client.leave()
    with pytest.raises(ClientLeft):
        await waiting
    async with asyncio.timeout(30):
        await ended.wait()


PING = b'event: ping\ndata: {"type": "ping"}\n\n'


def start(client: MemoryClient) -> KeepAlive:
    keepalive = KeepAlive(client.connection, extra=[(b"x-request-id", b"req_1")], every_s=0.01)
    keepalive.start()
    return keepalive


@pytest.mark.parametrize(("part", "rest"), [(b'data: {"half', b'":1}\n\n'), (b"event: message\n", b"data: 1\n\n")])
async def test_silence_is_filled_between_events_and_never_inside_one(part: bytes, rest: bytes) -> None:
    client = MemoryClient()
    keepalive = start(client)
    keepalive.event = PING
    client.connection.start(200, [(b"content-type", b"text/event-stream")])
    client.connection.write(b"data: 1\n\n")
    await client.wait(lambda: PING in client.body)
    client.connection.write(part)
    ticks = asyncio.get_running_loop().time() + 0.05
    await client.wait(lambda: asyncio.get_running_loop().time() > ticks)
    assert client.body.endswith(part)
    client.connection.write(rest)
    length = len(client.body)
    await client.wait(lambda: len(client.body) > length)
    keepalive.stop()
    assert client.body[length:].startswith(PING)


PAGE = "https://chat.example.com"


def test_an_origin_is_let_in_by_its_whole_name_or_by_a_star() -> None:
    assert admit_origin({"origin": PAGE}, ()) == ()
    for headers in ({}, {"origin": PAGE}):
        said = dict(admit_origin(headers, ["*"]))
        assert (said[b"access-control-allow-origin"], b"vary" in said) == (b"*", False)
    assert dict(admit_origin({"origin": PAGE}, [PAGE]))[b"access-control-allow-origin"] == PAGE.encode()
    for other in ("", "null", PAGE + ":8443", PAGE + ".evil.test", "http://chat.example.com", PAGE.upper()):
        assert admit_origin({"origin": other}, [PAGE]) == ((b"vary", b"Origin"),)
    asking = {"origin": PAGE, "access-control-request-method": "POST"}
    assert is_preflight("OPTIONS", asking)
    assert not is_preflight("POST", asking)
    assert not is_preflight("OPTIONS", {"origin": PAGE})


def test_an_origin_that_no_browser_sends_is_an_error_at_start(settings: Settings) -> None:
    for wrong in ("chat.example.com", PAGE + "/", "https://*.example.com", "https://Chat.example.com", "null"):
        settings.CORS_ORIGINS = ["http://localhost:3000", wrong]
        (error,) = check_settings(None)
        assert (error.id, wrong in error.msg) == ("gateway.E002", True)
    for right in ([], ["*"], [PAGE, "http://localhost:3000", "http://[::1]:8080", "app://obsidian.md"]):
        settings.CORS_ORIGINS = right
        assert check_settings(None) == []


def is_direct(address: str | None = "127.0.0.1", version: str = "1.1", **headers: str) -> bool:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return came_directly({"client": (address, 5) if address else None, "http_version": version}, named)


HERE = ("127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080", "")
ELSEWHERE = ("muster.example", "muster.example:443", "10.0.0.7", "localhost.evil.example", "[::1", "a@b:x")
PASSED_ON = ("x_forwarded_for", "forwarded", "via", "x_real_ip", "x_forwarded_proto", "x_forwarded_host", "cf_connecting_ip")


def test_only_a_program_on_this_machine_that_asks_for_it_and_was_not_passed_on_is_direct() -> None:
    for address in ("127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", None):
        for host in HERE:
            assert is_direct(address, host=host), (address, host)
    for address in ("10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1", "nonsense"):
        assert not is_direct(address, host=HERE[0]), address
    for name in PASSED_ON:  # even when it says nothing of whom
        assert not is_direct(host=HERE[0], **{name: ""}), name
    for host in ELSEWHERE:
        assert not is_direct(host=host), host
    assert not is_direct(version="1.0", host=HERE[0]), "as a proxy speaks to its upstream"
