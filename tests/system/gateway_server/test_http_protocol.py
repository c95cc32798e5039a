"""The gateway's HTTP server on a real socket: deadlines, limits, the connection handle, and what a client is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controlplane.gateway_server.http_protocol import Handle
from core.limits import GatewayLimits
from gateway.client import ClientConnection
from gateway.errors import ClientTooSlow
from tests.system.gateway_server.doors import GET, Scope, error_of, handle_of, hello, serve, until

# receiving


@pytest.mark.parametrize("sent", [b"", b"GET /x HT", b"GET /x HTTP/1.1\r\nhost: a\r\nx-long: "])
async def test_headers_that_do_not_come_in_time_get_a_408_in_the_contracts_shape(sent: bytes) -> None:
    async with serve(hello, header_s=0.05) as door, door.visit() as visitor:
        await visitor.say(sent)
        status, headers, body = await visitor.answer()
        assert (status, headers["connection"], headers["content-type"]) == (408, "close", "application/json")
        assert error_of(body)["retryable"] is True
        assert await visitor.rest() == b""


async def test_the_deadline_of_headers_runs_again_for_the_next_request_on_a_connection() -> None:
    async with serve(hello, header_s=0.5) as door, door.visit(GET) as visitor:
        assert (await visitor.answer())[2] == b"hello"
        await visitor.say(b"GET /y HT")
        assert (await visitor.answer())[0] == 408


async def test_a_body_that_does_not_come_in_time_gets_a_408() -> None:
    seen: list[str] = []

    async def read(scope: Scope, receive: Any, send: Any) -> None:
        while (event := await receive())["type"] == "http.request" and event["more_body"]:
            pass
        seen.append(event["type"])

    async with serve(read, body_s=0.05) as door, door.visit() as visitor:
        await visitor.say(b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\nabc")
        status, _, body = await visitor.answer()
        assert status == 408
        assert "body" in error_of(body)["message"]
        await until(lambda: seen)
        assert seen == ["http.disconnect"]


async def test_a_long_answer_outlives_both_deadlines_once_the_request_is_whole() -> None:
    go = asyncio.Event()

    async def slow(scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        await go.wait()
        await hello(scope, receive_nothing, send)

    whole = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\nab"
    async with serve(slow, header_s=0.3, body_s=0.3) as door, door.visit(whole) as visitor:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await visitor.reader.read(1)
        go.set()
        assert (await visitor.answer())[2] == b"hello"


async def receive_nothing() -> None:
    return None


@pytest.mark.parametrize(
    "sent",
    [b"nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET /x HTTP/1.1\r\nbad header\r\n\r\n"],
)
async def test_malformed_http_gets_a_400_in_the_contracts_shape(sent: bytes) -> None:
    async with serve(hello) as door, door.visit() as visitor:
        await visitor.say(sent)
        status, headers, body = await visitor.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert error_of(body)["code"] == "BAD_REQUEST"
        assert await visitor.rest() == b""


async def test_headers_just_over_the_bound_are_told_so() -> None:
    async with serve(hello) as door, door.visit() as visitor:
        await visitor.say(b"GET /x HTTP/1.1\r\nx-long: ")
        await visitor.say(b"a" * (64 * 1024))
        status, _, body = await visitor.answer()
        assert status == 431
        assert error_of(body)["retryable"] is False


async def test_an_error_never_lands_in_the_middle_of_another_answer() -> None:
    streaming = asyncio.Event()

    async def stream(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data", "more_body": True})
        streaming.set()
        await asyncio.Event().wait()

    async with serve(stream, header_s=0.5) as door:
        for next_request in (b"GET /late HT", b"nonsense\r\n\r\n"):
            async with door.visit(GET) as visitor:
                assert (await visitor.head())[0] == 200
                await streaming.wait()
                await visitor.say(next_request)
                try:
                    assert await visitor.rest() == b"4\r\ndata\r\n"  # not whole: it has no last chunk
                except ConnectionResetError:
                    pass


# the handle


@pytest.mark.parametrize("how", ["fin", "rst"])
async def test_the_lost_callback_fires_when_the_client_goes(how: str) -> None:
    watching, lost = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        handle_of(scope).set_lost_callback(lost.set)
        watching.set()
        await lost.wait()

    async with serve(app) as door, door.visit() as visitor:
        await visitor.say(GET)
        async with asyncio.timeout(30):
            await watching.wait()
        visitor.reset() if how == "rst" else visitor.writer.close()
        async with asyncio.timeout(30):
            await lost.wait()


async def test_a_callback_set_after_the_client_went_fires_at_once_and_a_removed_one_never() -> None:
    done = asyncio.Event()
    calls: list[str] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        handle = handle_of(scope)
        handle.set_lost_callback(lambda: calls.append("removed"))
        handle.set_lost_callback(None)
        while (await receive())["type"] != "http.disconnect":
            pass
        handle.set_lost_callback(lambda: calls.append("late"))
        done.set()

    async with serve(app) as door:
        async with door.visit() as visitor:
            await visitor.say(GET)
        async with asyncio.timeout(30):
            await done.wait()
    assert calls == ["late"]


async def test_the_next_request_on_a_connection_has_a_handle_of_its_own() -> None:
    handles: list[Handle] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        handles.append(handle_of(scope))
        await hello(scope, receive, send)

    async with serve(app) as door, door.visit() as visitor:
        for _ in range(2):
            await visitor.say(GET)
            await visitor.answer()
    assert handles[0] is not handles[1]
    assert handles[0].cycle is not handles[1].cycle


async def test_abort_resets_the_connection() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        handle_of(scope).abort()

    async with serve(app) as door, door.visit() as visitor:
        await visitor.say(GET)
        with pytest.raises(ConnectionResetError):
            await visitor.rest()


async def test_close_after_response_ends_the_connection_in_order() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        handle_of(scope).close_after_response()
        await send({"type": "http.response.body", "body": b"abc"})

    async with serve(app) as door, door.visit() as visitor:
        await visitor.say(GET)
        await visitor.head()
        assert await visitor.rest() == b"3\r\nabc\r\n0\r\n\r\n"


@pytest.mark.parametrize(("method", "body"), [(b"GET", b"hello"), (b"HEAD", b"")])
async def test_a_response_in_one_piece_leaves_the_connection_usable(method: bytes, body: bytes) -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        handle_of(scope).respond(201, [(b"x-a", b"b")], b"hello")

    async with serve(app) as door, door.visit() as visitor:
        for _ in range(3):
            await visitor.say(GET.replace(b"GET", method))
            status, headers = await visitor.head()
            assert (status, headers["x-a"], headers["content-length"]) == (201, "b", "5")
            assert "date" in headers
            assert await visitor.reader.readexactly(len(body)) == body


async def test_a_response_in_one_piece_obeys_connection_close_and_old_clients() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        handle_of(scope).respond(204, [], b"")

    async with serve(app) as door:
        for request in (b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n"):
            async with door.visit() as visitor:
                await visitor.say(request)
                status, headers = await visitor.head()
                assert (status, headers["connection"]) == (204, "close")
                assert "content-length" not in headers
                assert await visitor.rest() == b""


async def test_pipelined_requests_are_answered_in_order_by_either_way_of_answering() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0)
        if scope["path"] == "/1":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"/1"})
        else:
            handle_of(scope).respond(200, [], scope["path"].encode())

    async with serve(app) as door, door.visit() as visitor:
        await visitor.say(b"".join(b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % n for n in range(4)))
        assert [(await visitor.answer())[2] for _ in range(4)] == [b"/0", b"/1", b"/2", b"/3"]


# clients that read slowly

TOTAL = 8 * 1024 * 1024


def _connection(scope: Scope, receive: Any, send: Any, **timeouts: Any) -> ClientConnection:
    return ClientConnection(scope, receive, send, limits=GatewayLimits(max_buffer_bytes=2 * TOTAL, **timeouts))


async def test_a_client_that_reads_late_gets_the_whole_answer() -> None:
    finished = asyncio.Event()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        client = _connection(scope, receive, send)
        await client.read_body()
        client.watch()
        client.start(200, [(b"content-type", b"text/event-stream")])
        for _ in range(TOTAL // 65536):
            client.write(b"x" * 65536)
        client.finish()
        assert client.is_blocked
        finished.set()
        await client.drain()
        client.unwatch()

    async with serve(app) as door, door.visit() as visitor:
        await visitor.say(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        async with asyncio.timeout(30):
            await finished.wait()
        await visitor.head()
        body = await visitor.rest()
    assert body.count(b"x") == TOTAL
    assert body.endswith(b"0\r\n\r\n")


async def test_a_client_that_reads_nothing_is_reset_and_told_as_too_slow() -> None:
    outcome: list[Exception] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        client = _connection(scope, receive, send, client_write_s=0.1)
        await client.read_body()
        client.watch()
        client.start(200, [])
        for _ in range(TOTAL // 65536):
            client.write(b"x" * 65536)
        try:
            await client.drain()
        except ClientTooSlow as error:
            outcome.append(error)
        client.unwatch()

    async with serve(app) as door, door.visit() as visitor:
        await visitor.say(GET)
        visitor.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: outcome)
        visitor.reader._transport.resume_reading()  # type: ignore[attr-defined]
        with pytest.raises(ConnectionResetError):
            await visitor.rest()
