"""What a request is does not depend on the packets it comes in. The protocol runs on a transport in memory."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from tests.fakes.broken_http import KINDS
from tests.fakes.examples import TIMES
from tests.fakes.server_door import error_of
from wire.limits import WIRE

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
        for _ in range(6):
            await asyncio.sleep(0)
    verdict.statuses = [int(status) for status in STATUS_RE.findall(wire.written)]
    verdict.last = wire.written.rpartition(b"\r\n\r\n")[2]
    protocol.connection_lost(None)
    await asyncio.sleep(0)
    return verdict


def split_everywhere(data: bytes) -> Iterator[list[bytes]]:
    """Yield the data in two pieces for each position (for some of a long one, and in the gate), and in many small ones."""
    step = max(1, len(data) // FEW_POSITIONS) if len(data) > 2000 or TIMES == 1 else 1
    for position in range(1, len(data), step):
        yield [data[:position], data[position:]]
    size = 1 if len(data) <= 2000 else 1024
    yield [data[start : start + size] for start in range(0, len(data), size)]


HEAD = b"POST /x HTTP/1.1\r\nhost: a\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\nauthorization: Bearer good\r\n\r\n2\r\nab\r\n0\r\n"
PLAIN = b"GET /y HTTP/1.1\r\nhost: a\r\n\r\n"

REFUSED = {
    "no host": (b"GET /x HTTP/1.1\r\naccept: */*\r\n\r\n", 400, "Host"),
    "two hosts": (HEAD + b"host: a\r\ncontent-length: 0\r\n\r\n", 400, "'host'"),
    "two keys": (HEAD + b"authorization: Bearer a\r\nAuthorization: Bearer b\r\n\r\n", 400, "'authorization'"),
    "two other keys": (HEAD + b"x-api-key: a\r\nX-Api-Key: b\r\n\r\n", 400, "'x-api-key'"),
    "two hosts of a socket": (
        (b"GET /v1/worker/connect HTTP/1.1\r\nhost: a\r\nhost: b\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"),
        400, "'host'",
    ),
    "HTTP/0.9": (b"GET /x\r\n\r\n", 505, "HTTP/0.9"),
    "HTTP/2.0": (b"GET /x HTTP/2.0\r\nhost: a\r\n\r\n", 505, "HTTP/2.0"),
    "HTTP/1.7": (b"GET /x HTTP/1.7\r\nhost: a\r\n\r\n", 400, "HTTP/1.1"),
    "a header of 70 KB": (HEAD + b"x-a: " + b"b" * 70_000 + b"\r\n\r\n", 431, "65536"),
    "7000 headers": (HEAD + b"x-a: b\r\n" * 9000 + b"\r\n", 431, "65536"),
    "a target of 70 KB": (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 431, "65536"),
    "70 KB of trailers": (CHUNKED + b"x-a: " + b"b" * 70_000 + b"\r\n\r\n", 431, "65536"),
    "a body behind an upgrade": (
        HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 28\r\n\r\n" + PLAIN, 400, "Upgrade",
    ),
}  # fmt: skip
SERVED = {
    "a trailer": (CHUNKED + b"x-a: b\r\n\r\n", 1),
    "a key in a trailer": (CHUNKED + b"authorization: Bearer other\r\n\r\n", 1),
    "another host in a trailer": (CHUNKED + b"host: b\r\n\r\n", 1),
    "a trailer before another request": (CHUNKED + b"authorization: Bearer other\r\n\r\n" + PLAIN, 2),
    "the same cookie twice": (HEAD + b"cookie: a=b\r\ncookie: a=b\r\ncontent-length: 2\r\n\r\nab", 1),
    "both kinds of keys": (HEAD + b"authorization: Bearer a\r\nx-api-key: b\r\ncontent-length: 0\r\n\r\n", 1),
    "HTTP/1.0 without a host": (b"GET /x HTTP/1.0\r\n\r\n", 1),
    "an upgrade that is ignored": (PLAIN[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n", 1),
    "60 KB of headers": (HEAD + b"x-a: " + b"b" * 60_000 + b"\r\ncontent-length: 100000\r\n\r\n" + b"c" * 100_000, 1),
    "60 KB of headers behind 100 KB of a body": (
        HEAD + b"content-length: 100000\r\n\r\n" + b"c" * 100_000 + HEAD + b"x-a: " + b"b" * 60_000 + b"\r\n\r\n", 2,
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
        start = CHUNKED if endless[0] == ord("x") else CHUNKED.removesuffix(b"0\r\n")
        pieces = [start + endless, *[b"b" * 8192] * (WIRE.request_head_bytes // 8192 + 2)]
        assert (await judge(pieces)).statuses == [431]
