"""A uvicorn server inside the test's own event loop, the gateway's HTTP protocol behind it, and clients on raw sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import uvicorn

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol, Handle
from gateway.request.client import SCOPE_LINE
from tests.fakes.limits import set_limits
from tests.fakes.waiting import eventually


@asynccontextmanager
async def run_server(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> AsyncIterator[int]:
    """Serve until the block ends; yields the port. Signals stay with the test runner."""
    task = asyncio.create_task(server._serve(sockets))
    try:
        await until(lambda: server.started or task.done())
        if not server.started:
            await task
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        async with asyncio.timeout(30):
            await task


Scope = dict[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"


class Door:
    """A running server and its port."""

    def __init__(self, server: uvicorn.Server, port: int, protocol: type[GatewayHttpProtocol]) -> None:
        self.server = server
        self.port = port
        self.protocol = protocol

    @asynccontextmanager
    async def visit(self, first: bytes = b"") -> AsyncIterator[Visitor]:
        """Open a connection; close it at the end. What is said ``first`` is there before the server's clock for it runs."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.sendall(first)
        connection.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            yield Visitor(reader, writer)
        finally:
            writer.close()


class Visitor:
    """A client on a raw socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(30):
            block = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status, *lines = block.rstrip("\r\n").split("\r\n")
        return int(status.split()[1]), dict(line.lower().split(": ", 1) for line in lines)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        status, headers = await self.head()
        return status, headers, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def rest(self) -> bytes:
        """Return everything until the server closes. Raises ConnectionResetError when it resets."""
        async with asyncio.timeout(30):
            return await self.reader.read()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@asynccontextmanager
async def serve(
    app: App, *, header_s: float = 10.0, body_s: float = 10.0, keep_alive_s: int = 60, linger_s: float = 30.0,
    linger_idle_s: float = 10.0, linger_bytes: int = 2**27,
) -> AsyncIterator[Door]:  # fmt: skip
    set_limits(
        gateway={"server_linger_s": linger_s, "server_linger_idle_s": linger_idle_s, "server_linger_bytes": linger_bytes}
    )

    class Protocol(GatewayHttpProtocol):
        header_timeout_s = header_s
        body_timeout_s = body_s

    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=Protocol, lifespan="off", interface="asgi3", log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=keep_alive_s, timeout_graceful_shutdown=1,
    )  # fmt: skip
    server = uvicorn.Server(config)
    async with run_server(server) as port:
        yield Door(server, port, Protocol)


def handle_of(scope: Scope) -> Handle:
    found = scope["extensions"][SCOPE_LINE]
    assert isinstance(found, Handle)
    return found


async def hello(scope: Scope, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
    await send({"type": "http.response.body", "body": b"hello"})


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition, pause_s=0.001)


def error_of(body: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"code", "message", "retryable", "type", "param"}
    return error


class MemoryTransport(asyncio.Transport):
    """A connection whose client reads at once. ``said``: what the server wrote; ``on_said`` hears of it."""

    def __init__(self) -> None:
        super().__init__({"peername": ("192.0.2.1", 40_000), "sockname": ("192.0.2.2", 443)})
        self.said = bytearray()
        self.on_said: Callable[[], None] | None = None
        self.is_over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.is_over, "nothing is written to a connection that is closed"
        self.said += data
        if self.on_said is not None:
            self.on_said()

    def close(self) -> None:
        self.is_over = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_over

    def pause_reading(self) -> None:
        """Everything was read before it was said."""

    resume_reading = write_eof = pause_reading

    def can_write_eof(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0
