"""Refusing a request whose body is still on its way: the client gets to read why, within bounds (RFC 9112, section 9.6)."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

import pytest

from tests.system.gateway_server.doors import GET, Door, Scope, error_of, handle_of, hello, serve, until

PIECE = b"a" * 65_536
PIECES = 128
"""Together 8 MB: more than what a kernel keeps of a connection."""


async def refuse(scope: Scope, receive: Any, send: Any) -> None:
    """Refuse before anything of the body is asked for."""
    handle_of(scope).respond(413, [(b"x-a", b"b")], b"too large")


def head(*lines: bytes) -> bytes:
    return b"\r\n".join([b"POST /x HTTP/1.1", b"host: a", *lines, b"", b""])


DECLARED = head(b"content-length: %d" % (PIECES * len(PIECE)))
CHUNKED = head(b"transfer-encoding: chunked")
CHUNK = b"%x\r\n%b\r\n" % (len(PIECE), PIECE)


def send_all_then_read(port: int, first: bytes, piece: bytes, pieces: int, last: bytes = b"") -> bytes:
    """Do as most clients do: write the whole request, then read the answer up to the end of the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(first)
        for _ in range(pieces):
            connection.sendall(piece)
        connection.sendall(last)
        answer = b""
        while got := connection.recv(65_536):
            answer += got
        return answer


async def until_closed(door: Door) -> None:
    await until(lambda: not door.server.server_state.connections)


@pytest.mark.parametrize(
    ("first", "piece", "last"), [(DECLARED, PIECE, b""), (CHUNKED, CHUNK, b"0\r\n\r\n")], ids=["declared", "chunked"]
)
async def test_a_client_that_sends_all_before_it_reads_still_gets_the_refusal(first: bytes, piece: bytes, last: bytes) -> None:
    async with serve(refuse) as door:
        answer = await asyncio.to_thread(send_all_then_read, door.port, first, piece, PIECES, last)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b"\r\nconnection: close\r\n" in answer
        assert answer.endswith(b"\r\n\r\ntoo large")
        await until_closed(door)


async def test_a_refusal_in_the_middle_of_a_body_is_read_too() -> None:
    async def refuse_late(scope: Scope, receive: Any, send: Any) -> None:
        size = 0
        while size < 1_000_000:
            size += len((await receive())["body"])
        await refuse(scope, receive, send)

    async with serve(refuse_late) as door:
        answer = await asyncio.to_thread(send_all_then_read, door.port, CHUNKED, CHUNK, PIECES)
        assert answer.endswith(b"\r\n\r\ntoo large")


@pytest.mark.parametrize(
    ("first", "piece", "status"),
    [
        pytest.param(b"GET /x HTTP/1.1\r\nx-long: ", PIECE, 431, id="headers without end"),
        pytest.param(b"no HTTP\r\n\r\n", PIECE, 400, id="no HTTP"),
        pytest.param(CHUNKED + b"5\r\nhello\r\nzz\r\n", PIECE, 400, id="a broken chunk"),
    ],
)
async def test_what_is_no_http_is_told_so_however_long_it_goes_on(first: bytes, piece: bytes, status: int) -> None:
    async def wait_for_all(scope: Scope, receive: Any, send: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async with serve(wait_for_all) as door:
        answer = await asyncio.to_thread(send_all_then_read, door.port, first, piece, 32)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert error_of(answer.partition(b"\r\n\r\n")[2])["code"] == "BAD_REQUEST"


async def test_the_application_hears_at_once_that_a_broken_body_will_not_come() -> None:
    seen: list[str] = []

    async def read(scope: Scope, receive: Any, send: Any) -> None:
        while (event := await receive())["type"] == "http.request":
            pass
        seen.append(event["type"])
        handle_of(scope).respond(200, [], b"never")

    async with serve(read) as door, door.visit() as visitor:
        await visitor.say(head(b"transfer-encoding: chunked", b"expect: 100-continue") + b"zz\r\n")
        assert (await visitor.answer())[0] == 400
        await until(lambda: seen)
        assert await visitor.rest() == b""


async def test_a_client_that_neither_sends_nor_leaves_is_waited_for_a_short_time_only() -> None:
    async with serve(refuse, linger_idle_s=0.05) as door, door.visit() as visitor:
        await visitor.say(DECLARED)
        assert (await visitor.answer())[0] == 413
        await until_closed(door)


async def test_a_client_that_sends_a_little_for_ever_is_cut_off_in_the_end() -> None:
    async with serve(refuse, linger_s=0.2, linger_idle_s=0.05) as door, door.visit() as visitor:
        await visitor.say(DECLARED)
        assert (await visitor.answer())[0] == 413
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(30):
                while door.server.server_state.connections:
                    await visitor.say(b"a")
                    await asyncio.sleep(0.001)
        await until_closed(door)


async def test_a_client_that_sends_without_end_is_cut_off_at_a_number_of_bytes() -> None:
    async with serve(refuse, linger_bytes=2_000_000) as door, door.visit() as visitor:
        await visitor.say(CHUNKED)
        with pytest.raises(ConnectionError):  # noqa: PT012  # whichever write comes after the end
            async with asyncio.timeout(30):
                while True:
                    await visitor.say(CHUNK)
        await until_closed(door)


async def test_a_client_that_does_not_take_its_refusal_is_not_waited_for() -> None:
    async def refuse_at_length(scope: Scope, receive: Any, send: Any) -> None:
        handle_of(scope).respond(413, [], b"a" * 20_000_000)

    async with serve(refuse_at_length, linger_idle_s=0.05) as door:
        with socket.create_connection(("127.0.0.1", door.port)) as deaf:
            deaf.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(deaf, DECLARED)
            await until(lambda: door.server.server_state.connections)
            await until_closed(door)


async def test_a_client_that_waits_for_leave_to_send_is_refused_without_it_and_nothing_it_says_is_a_request() -> None:
    paths: list[str] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await refuse(scope, receive, send)

    async with serve(app) as door, door.visit() as visitor:
        await visitor.say(head(b"content-length: 37", b"expect: 100-continue"))
        status, headers, _ = await visitor.answer()
        assert (status, headers["connection"]) == (413, "close")
        await visitor.say(GET + GET)
        assert await visitor.rest() == b""
        visitor.writer.close()
        await until_closed(door)
    assert paths == ["/x"]


async def test_a_server_that_stops_does_not_wait_for_those_who_are_refused() -> None:
    async with serve(refuse, linger_idle_s=60.0) as door, door.visit() as visitor:
        await visitor.say(DECLARED)
        assert (await visitor.answer())[0] == 413
        protocol = next(iter(door.server.server_state.connections))
        protocol.shutdown()
        await until_closed(door)


async def test_a_refusal_of_a_request_that_came_whole_leaves_the_connection_open() -> None:
    async with serve(refuse) as door, door.visit() as visitor:
        for _ in range(2):
            await visitor.say(head(b"content-length: 5") + b"hello")
            status, headers, _ = await visitor.answer()
            assert status == 413
            assert "connection" not in headers


async def test_blank_lines_between_requests_do_not_keep_a_connection_for_ever() -> None:
    async with serve(hello, keep_alive_s=1) as door, door.visit() as visitor:
        await visitor.say(GET)
        assert (await visitor.answer())[2] == b"hello"
        await visitor.say(b"\r\n")
        assert await visitor.rest() == b""
        await until_closed(door)
