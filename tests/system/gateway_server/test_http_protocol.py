"""The gateway's HTTP server: deadlines, limits, the connection handle, and requests that mean the same however split."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from core.limits import GatewayLimits
from gateway.errors import ClientTooSlow
from gateway.request.client import ClientConnection
from tests.fakes.examples import TIMES
from tests.fakes.request_bodies import KINDS
from tests.fakes.server_door import GET, Door, Scope, Visitor, error_of, handle_of, hello, serve, until
from tests.fakes.waiting import turns
from wire.limits import WIRE

POST = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", b"GET /x HT", b"GET /x HTTP/1.1\r\nhost: a\r\nx-long: ", POST % 10 + b"abc"])
async def test_headers_that_do_not_come_in_time_get_a_408_in_the_contracts_shape(sent: bytes) -> None:
    """And a body too, whose application hears that its client is gone."""
    seen: list[str] = []

    async def read(scope: Scope, receive: Any, send: Any) -> None:
        while (event := await receive())["type"] == "http.request" and event["more_body"]:
            pass
        seen.append(event["type"])

    async with serve(read, header_s=0.05, body_s=0.05) as door, door.visit() as visitor:
        await visitor.say(sent)
        status, headers, body = await visitor.answer()
        assert (status, headers["connection"], headers["content-type"]) == (408, "close", "application/json")
        assert (error_of(body)["retryable"], "body" in error_of(body)["message"]) == (True, b"POST" in sent)
        assert await visitor.rest() == b""
        if b"POST" in sent:
            await until(lambda: seen)
    assert seen == (["http.disconnect"] if b"POST" in sent else [])


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


async def test_pipelined_requests_are_answered_in_order_by_either_way_of_answering() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        await turns(1)
        if scope["path"] == "/1":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"/1"})
        else:
            handle_of(scope).respond(200, [], scope["path"].encode())

    async with serve(app) as door, door.visit() as visitor:
        await visitor.say(b"".join(b"GET /%d HTTP/1.1\r\nhost: a\r\n\r\n" % n for n in range(4)))
        assert [(await visitor.answer())[2] for _ in range(4)] == [b"/0", b"/1", b"/2", b"/3"]


TOTAL = 8 * 1024 * 1024


def _connection(scope: Scope, receive: Any, **timeouts: Any) -> ClientConnection:
    return ClientConnection(scope, receive, limits=GatewayLimits(max_buffer_bytes=2 * TOTAL, **timeouts))


async def test_a_client_that_reads_nothing_is_reset_and_told_as_too_slow() -> None:
    outcome: list[Exception] = []

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        client = _connection(scope, receive, client_write_s=0.1)
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


@pytest.mark.parametrize(
    ("first", "piece", "bounds"),
    [
        (DECLARED, b"", {"linger_idle_s": 0.05}),
        (DECLARED, b"a", {"linger_s": 0.2, "linger_idle_s": 0.05}),
        (CHUNKED, CHUNK, {"linger_bytes": 2_000_000}),
        (DECLARED, b"", {"linger_idle_s": 60.0}),
    ],
    ids=["nothing more", "a little for ever", "without end", "as the server stops"],
)
async def test_a_client_that_is_refused_is_waited_for_within_bounds(first: bytes, piece: bytes, bounds: dict[str, Any]) -> None:
    async with serve(refuse, **bounds) as door, door.visit() as visitor:
        await visitor.say(first)
        if piece != CHUNK:
            assert (await visitor.answer())[0] == 413
        if bounds.get("linger_idle_s") == 60.0:
            next(iter(door.server.server_state.connections)).shutdown()
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(30):
                while piece and door.server.server_state.connections:
                    await visitor.say(piece)
                    await turns(1)
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
    async with serve(hello, keep_alive_s=1) as door, door.visit() as visitor:
        await visitor.say(GET)
        assert (await visitor.answer())[2] == b"hello"
        await visitor.say(b"\r\n")  # blank lines keep no connection for ever
        assert await visitor.rest() == b""
        await until_closed(door)


HIGH_WATER_BYTES = 65_536
"""Of a body that nobody has asked for, uvicorn keeps this much before it stops reading."""
SIZES = [1000, HIGH_WATER_BYTES + 5000, 5_000_000]


@dataclass
class Service:
    """Reads each body, then watches for the client to leave, or answers when it may. ``served``: the sizes of the bodies."""

    served: list[int] = field(default_factory=list)
    watching: asyncio.Event = field(default_factory=asyncio.Event)
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        client = ClientConnection(scope, receive, limits=GatewayLimits())
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


async def send_declared(_service: Service, visitor: Visitor, body: bytes) -> None:
    await visitor.say(POST % len(body) + body)


async def send_chunked(_service: Service, visitor: Visitor, body: bytes) -> None:
    await visitor.say(b"POST /x HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
    for start in range(0, len(body), 50_000):
        piece = body[start : start + 50_000]
        await visitor.say(b"%x\r\n%b\r\n" % (len(piece), piece))
    await visitor.say(b"0\r\n\r\n")


async def send_with_leave(_service: Service, visitor: Visitor, body: bytes) -> None:
    await visitor.say(b"POST /x HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body))
    assert (await visitor.head())[0] == 100
    await visitor.say(body)


async def send_for_the_third_time(service: Service, visitor: Visitor, body: bytes) -> None:
    service.may_answer.set()
    for _ in range(2):
        await send_declared(service, visitor, body)
        assert (await visitor.answer())[2] == b"hello"
    service.may_answer.clear()
    service.watching.clear()
    await send_declared(service, visitor, body)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("send", "how"),
    [(send_declared, "close"), (send_chunked, "reset"), (send_with_leave, "reset"), (send_for_the_third_time, "close")],
)
async def test_a_client_is_missed_after_a_body_of_any_size_however_it_was_sent(send: Any, how: str, size: int) -> None:
    async with visit() as (service, visitor):
        await send(service, visitor, b"a" * size)
        await wait_for(service.watching)
        visitor.reset() if how == "reset" else visitor.writer.close()
        await wait_for(service.lost)
        assert service.served == [size] * (3 if send is send_for_the_third_time else 1)


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


Headers = list[tuple[bytes, bytes]]
STATUS_RE = re.compile(rb"^HTTP/1\.1 (\d{3}) ", re.MULTILINE)
FEW_POSITIONS = 6 * TIMES


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """The peer reads it as the end."""

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Nothing is read here; it is handed over."""

    resume_reading = pause_reading


@dataclass
class Verdict:
    """What came of some bytes: statuses of the answers, and the requests that the application saw."""

    statuses: list[int] = field(default_factory=list)
    seen: list[tuple[str, str, Headers, bytes]] = field(default_factory=list)
    last: bytes = b""


async def judge(pieces: list[bytes]) -> Verdict:
    """Feed the pieces, with time for the application between them, and say what came of them."""
    verdict = Verdict()

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            event = await receive()
            if event["type"] != "http.request":
                return
            body, more = body + event["body"], event["more_body"]
        verdict.seen.append((scope["method"], scope["path"], list(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    config = uvicorn.Config(
        app, ws=GatewayWebSocketProtocol, lifespan="off", interface="asgi3", log_config=None, access_log=False
    )
    wire, protocol = Wire(), GatewayHttpProtocol(config, ServerState(), {})
    protocol.connection_made(wire)
    for piece in pieces:
        protocol.data_received(piece)
        await turns(6)
    verdict.statuses = [int(status) for status in STATUS_RE.findall(wire.written)]
    verdict.last = wire.written.rpartition(b"\r\n\r\n")[2]
    protocol.connection_lost(None)
    await turns(1)
    return verdict


def split_everywhere(data: bytes) -> Iterator[list[bytes]]:
    """Yield the data in two pieces for each position (for some of a long one, and in the gate), and in many small ones."""
    step = max(1, len(data) // FEW_POSITIONS) if len(data) > 2000 or TIMES == 1 else 1
    for position in range(1, len(data), step):
        yield [data[:position], data[position:]]
    size = 1 if len(data) <= 2000 else 1024
    yield [data[start : start + size] for start in range(0, len(data), size)]


SPLIT_HEAD = b"POST /x HTTP/1.1\r\nhost: a\r\n"
SPLIT_CHUNKED = SPLIT_HEAD + b"transfer-encoding: chunked\r\nauthorization: Bearer good\r\n\r\n2\r\nab\r\n0\r\n"
SPLIT_PLAIN = b"GET /y HTTP/1.1\r\nhost: a\r\n\r\n"

REFUSED = {
    "no host": (b"GET /x HTTP/1.1\r\naccept: */*\r\n\r\n", 400, "Host"),
    "two hosts": (SPLIT_HEAD + b"host: a\r\ncontent-length: 0\r\n\r\n", 400, "'host'"),
    "two keys": (SPLIT_HEAD + b"authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400, "'authorization'"),
    "two other keys": (SPLIT_HEAD + b"x-api-key: a\r\nX-Api-Key: b\r\n\r\n", 400, "'x-api-key'"),
    "two hosts of a socket": (
        (b"GET /v1/worker/connect HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"),
        400, "'host'",
    ),
    "HTTP/0.9": (b"GET /x\r\n\r\n", 505, "HTTP/0.9"),
    "HTTP/2.0": (b"GET /x HTTP/2.0\r\nhost: a\r\n\r\n", 505, "HTTP/2.0"),
    "HTTP/1.7": (b"GET /x HTTP/1.7\r\nhost: a\r\n\r\n", 400, "HTTP/1.1"),
    "a header of 70 KB": (SPLIT_HEAD + b"x-a: " + b"b" * 70_000 + b"\r\n\r\n", 431, "65536"),
    "7000 headers": (SPLIT_HEAD + b"x-a: b\r\n" * 9000 + b"\r\n", 431, "65536"),
    "a target of 70 KB": (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431, "65536"),
    "70 KB of trailers": (SPLIT_CHUNKED + b"x-a: " + b"b" * 70_000 + b"\r\n\r\n", 431, "65536"),
    "a body behind an upgrade": (
        SPLIT_HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 28\r\n\r\n" + SPLIT_PLAIN, 400, "Upgrade",
    ),
}  # fmt: skip
SERVED = {
    "a trailer": (SPLIT_CHUNKED + b"x-a: b\r\n\r\n", 1),
    "a key in a trailer": (SPLIT_CHUNKED + b"authorization: Bearer other\r\n\r\n", 1),
    "another host in a trailer": (SPLIT_CHUNKED + b"host: b\r\n\r\n", 1),
    "a trailer before another request": (SPLIT_CHUNKED + b"authorization: Bearer other\r\n\r\n" + SPLIT_PLAIN, 2),
    "the same cookie twice": (SPLIT_HEAD + b"cookie: a=b\r\ncookie: a=b\r\ncontent-length: 2\r\n\r\nab", 1),
    "both kinds of keys": (SPLIT_HEAD + b"authorization: Bearer a\r\nx-api-key: b\r\ncontent-length: 0\r\n\r\n", 1),
    "HTTP/1.0 without a host": (b"GET /x HTTP/1.0\r\n\r\n", 1),
    "an upgrade that is ignored": (SPLIT_PLAIN[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n", 1),
    "60 KB of headers": (SPLIT_HEAD + b"x-a: " + b"b" * 60_000 + b"\r\ncontent-length: 100000\r\n\r\n" + b"c" * 100_000, 1),
    "60 KB of headers behind 100 KB of a body": (
        SPLIT_HEAD + b"content-length: 100000\r\n\r\n" + b"c" * 100_000 + SPLIT_HEAD + b"x-a: " + b"b" * 60_000 + b"\r\n\r\n",
        2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_head_with_two_readings_or_too_large_is_refused_wherever_it_is_split(name: str) -> None:
    data, status, said = REFUSED[name]
    for pieces in ([data], *split_everywhere(data)):
        verdict = await judge(pieces)
        assert (verdict.statuses[-1], len(verdict.seen)) == (status, 0), len(pieces[0])
        error = error_of(verdict.last)
        assert (error["code"], error["retryable"]) == ("BAD_REQUEST", False)
        assert said in error["message"]


@pytest.mark.parametrize("name", SERVED)
async def test_a_good_request_is_served_with_its_headers_alone_wherever_it_is_split(name: str) -> None:
    data, requests = SERVED[name]
    whole = await judge([data])
    assert whole.statuses == [200] * requests
    for _method, _path, headers, _body in whole.seen:
        assert (b"authorization", b"Bearer other") not in headers
        assert not {header for header, _ in headers} & {b"x-a"} or "60 KB" in name
    for pieces in split_everywhere(data):
        assert await judge(pieces) == whole, len(pieces[0])


@pytest.mark.parametrize("name", KINDS)
async def test_a_broken_request_is_the_same_wherever_it_is_split(name: str) -> None:
    data = KINDS[name]("mst_key", "model").data
    whole = await judge([data])
    for pieces in split_everywhere(data):
        again = await judge(pieces)
        assert (again.statuses, again.seen) == (whole.statuses, whole.seen), len(pieces[0])


async def test_trailers_and_chunk_extensions_without_end_are_refused() -> None:
    for endless in (b"x-a: ", b"5;x="):
        start = SPLIT_CHUNKED if endless[0] == ord("x") else SPLIT_CHUNKED.removesuffix(b"0\r\n")
        pieces = [start + endless, *[b"b" * 8192] * (WIRE.request_head_bytes // 8192 + 2)]
        assert (await judge(pieces)).statuses == [431]
