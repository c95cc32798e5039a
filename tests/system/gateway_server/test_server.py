"""Starting and stopping: a running stream finishes, new requests are refused, and the end is bounded."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from ipaddress import ip_network
from typing import Any, cast

import httpx
import pytest
import uvicorn
from pytest_django import Settings
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Frame, Opcode

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.server import GatewayApp, GatewayServer, make_config
from controlplane.launcher.ports import claim_port
from core.limits import GatewayLimits
from gateway.runtime import GatewayRuntime
from tests.fakes.server_door import run_server
from wire.client_address import TrustedProxies

Scope = dict[str, Any]
GET = b"GET /x HTTP/1.1\r\nhost: a\r\n\r\n"


class Runtime:
    """What the server asks of a gateway, without one."""

    def __init__(self, *, grace_s: float = 60.0) -> None:
        self.limits = GatewayLimits(shutdown_grace_s=grace_s)
        self.running_requests = 0
        self.is_stopping = False
        self.interrupted = asyncio.Event()

    def begin_stop(self) -> None:
        self.is_stopping = True

    def interrupt_running(self) -> None:
        self.interrupted.set()

    async def say_goodbye(self) -> None:
        """It has no nodes."""


class Streams:
    """An application whose streams run until a test lets them end, and which refuses work once it is stopping."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.go = asyncio.Event()
        self.started = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        await receive()
        if self.runtime.is_stopping:
            await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
            return
        self.runtime.running_requests += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        self.started.set()
        waiters = [asyncio.create_task(event.wait()) for event in (self.go, self.runtime.interrupted)]
        await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        for waiter in waiters:
            waiter.cancel()
        await send({"type": "http.response.body", "body": b"last" if self.go.is_set() else b"cut"})
        self.runtime.running_requests -= 1


@asynccontextmanager
async def serve(
    runtime: Runtime, app: Any, sockets: list[socket.socket] | None = None
) -> AsyncIterator[tuple[GatewayServer, int]]:
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=GatewayHttpProtocol,
        lifespan="off",
        interface="asgi3",
        log_config=None,
        timeout_graceful_shutdown=20,
    )
    server = GatewayServer(config, cast("GatewayRuntime", runtime))
    async with run_server(server, sockets) as port:
        yield server, port


async def visit(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_running_stream_finishes_while_new_work_is_refused() -> None:
    runtime = Runtime()
    app = Streams(runtime)
    async with serve(runtime, app) as (server, port):
        idle, idle_out = await visit(port)
        idle_out.write(b"GET /x HT")  # a kept connection whose next request is on its way
        reader, writer = await visit(port)
        writer.write(GET)
        await app.started.wait()
        server.handle_exit(15, None)
        await until(lambda: runtime.is_stopping)
        with pytest.raises(OSError, match=r".*"):
            await visit(port)
        idle_out.write(GET[9:])
        assert b"503" in await idle.readuntil(b"\r\n\r\n")
        app.go.set()
        async with asyncio.timeout(30):
            body = await reader.read()
        assert body.endswith(b"5\r\nfirst\r\n4\r\nlast\r\n0\r\n\r\n")
        writer.close()
        idle_out.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a child listen on a port that is held for it")
async def test_a_held_port_refuses_while_its_gateway_stops_and_is_served_again_by_the_next_one() -> None:
    claims: list[socket.socket] = []
    with ExitStack() as held:
        claimed = claim_port("127.0.0.1", 0, option="--gateway-port", held=held, claims=claims)
        for _ in range(2):
            runtime = Runtime()
            app = Streams(runtime)
            inherited = socket.socket(fileno=os.dup(claims[0].fileno()))
            async with serve(runtime, app, [inherited]) as (server, port):
                assert port == claimed
                reader, writer = await visit(port)
                writer.write(GET)
                await app.started.wait()
                server.handle_exit(15, None)
                await until(partial(getattr, runtime, "is_stopping"))
                with pytest.raises(OSError, match=r".*"):
                    await visit(port)
                app.go.set()
                async with asyncio.timeout(30):
                    assert (await reader.read()).endswith(b"4\r\nlast\r\n0\r\n\r\n")
                writer.close()


async def test_a_stream_that_outlives_the_grace_is_interrupted_and_told() -> None:
    runtime = Runtime(grace_s=0.05)
    app = Streams(runtime)
    async with serve(runtime, app) as (server, port):
        reader, writer = await visit(port)
        writer.write(GET)
        await app.started.wait()
        server.handle_exit(15, None)
        async with asyncio.timeout(30):
            assert (await reader.read()).endswith(b"3\r\ncut\r\n0\r\n\r\n")
        writer.close()


class FailingRuntime:
    """A runtime whose database is away."""

    async def start(self) -> None:
        raise OSError("no database")


async def test_a_runtime_that_cannot_start_keeps_the_server_from_listening() -> None:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(event: Any) -> None:
        sent.append(event)

    await GatewayApp(cast("GatewayRuntime", FailingRuntime()), show_client)({"type": "lifespan"}, receive, send)  # type: ignore[arg-type]
    assert sent == [{"type": "lifespan.startup.failed", "message": "no database"}]


class IdleRuntime:
    """What the application starts and stops."""

    async def start(self) -> None:
        """Nothing runs."""

    stop = start


async def show_client(scope: Scope, receive: Any, send: Any) -> None:
    """Answer with the address in the scope."""
    await receive()
    said = json.dumps(scope["client"][0])
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": said})
        await send({"type": "websocket.close"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": said.encode()})


async def ask(hops: list[str]) -> tuple[str, str]:
    """Return the addresses that routes see of a request and of a socket with these header lines."""
    app = GatewayApp(cast("GatewayRuntime", IdleRuntime()), show_client)
    config = make_config(app, host="127.0.0.1", port=0)
    headers = [("x-forwarded-for", hop) for hop in hops]
    async with run_server(uvicorn.Server(config)) as port:
        async with httpx.AsyncClient() as client:
            of_request = (await client.get(f"http://127.0.0.1:{port}/", headers=headers)).json()
        async with connect(f"ws://127.0.0.1:{port}/", additional_headers=headers, open_timeout=30) as socket:
            return of_request, json.loads(await socket.recv())


@pytest.mark.parametrize(
    ("proxies", "seen"), [("127.0.0.1", "203.0.113.9"), ("127.0.0.2", "127.0.0.1"), ("127.0.0.0/8,203.0.113.9", "10.1.2.3")]
)
async def test_a_trusted_proxy_names_the_client_of_requests_and_of_sockets(settings: Settings, proxies: str, seen: str) -> None:
    settings.TRUSTED_PROXIES = TrustedProxies([ip_network(text) for text in proxies.split(",")])
    assert await ask(["6.6.6.6, 10.1.2.3", "203.0.113.9"]) == (seen, seen)


async def test_a_worker_socket_is_never_compressed(settings: Settings) -> None:
    """A message of some kilobytes could otherwise become gigabytes in the gateway's memory."""
    settings.TRUSTED_PROXIES = TrustedProxies(())
    app = GatewayApp(cast("GatewayRuntime", IdleRuntime()), wait_for_message)
    config = make_config(app, host="127.0.0.1", port=0)
    async with run_server(uvicorn.Server(config)) as port:
        url = f"ws://127.0.0.1:{port}/v1/worker/connect"
        async with connect(url, compression="deflate", open_timeout=30) as plain:
            assert plain.response is not None
            assert "sec-websocket-extensions" not in plain.response.headers
            await plain.send("good")
            assert await plain.recv() == "4"
        async with connect(url, compression="deflate", open_timeout=30) as bomber:
            squeezed = zlib.compress(bytes(64 * 2**20), wbits=-15)
            frame = bytearray(Frame(Opcode.BINARY, squeezed).serialize(mask=True))
            frame[0] |= 0x40  # "this is compressed", which nobody agreed to
            bomber.transport.write(bytes(frame))
            with pytest.raises(ConnectionClosedError) as closed:
                await bomber.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1002


async def wait_for_message(scope: Scope, receive: Any, send: Any) -> None:
    """Answer a message with its length."""
    await receive()
    await send({"type": "websocket.accept"})
    message = await receive()
    if message["type"] == "websocket.receive":
        await send({"type": "websocket.send", "text": str(len(message.get("text") or message["bytes"]))})
