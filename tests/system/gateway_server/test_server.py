"""The gateway's server starts and stops within bounds; its worker socket carries large messages and cuts off idle readers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from ipaddress import ip_network
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
import websockets
from pytest_django import Settings
from websockets.asyncio.client import ClientConnection as WorkerConnection
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.frames import Frame, Opcode

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.server import GatewayApp, GatewayServer, make_config
from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from controlplane.launcher.ports import claim_port
from controlplane.tls import ServedCertificate, load_pair, make_context
from core.limits import GatewayLimits
from core.outbox import Outbox
from gateway.process import GatewayRuntime
from gateway.request.response import admit_programs, refuse_unknown_socket
from tests.fakes.control_process import free_port
from tests.fakes.limits import set_limits
from tests.fakes.server_door import GET, Scope, run_server, until
from tests.fakes.tls import Authority
from wire.client_address import TrustedProxies


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


Tls = tuple[ssl.SSLContext, ServedCertificate]


@asynccontextmanager
async def run(
    runtime: Runtime, app: Any, sockets: list[socket.socket] | None = None, *, tls: Tls | None = None, plain_port: int = 0
) -> AsyncIterator[tuple[GatewayServer, int]]:
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=GatewayHttpProtocol, lifespan="off", interface="asgi3", log_config=None,
        timeout_graceful_shutdown=20, ssl_context_factory=(lambda *_: tls[0]) if tls else None,
    )  # fmt: skip
    certificate = tls[1] if tls else None
    server = GatewayServer(config, cast("GatewayRuntime", runtime), certificate=certificate, plain_port=plain_port)
    async with run_server(server, sockets) as port:
        yield server, port


async def knock(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)


@pytest.mark.parametrize("grace_s", [60.0, 0.05], ids=["finishes", "is interrupted and told"])
async def test_a_running_stream_goes_on_for_the_grace_while_new_work_is_refused(grace_s: float) -> None:
    runtime = Runtime(grace_s=grace_s)
    app = Streams(runtime)
    async with run(runtime, app) as (server, port):
        idle, idle_out = await knock(port)
        idle_out.write(b"GET /x HT")  # a kept connection whose next request is on its way
        reader, writer = await knock(port)
        writer.write(GET)
        await app.started.wait()
        server.handle_exit(15, None)
        if grace_s > 1:
            await until(lambda: runtime.is_stopping)
            with pytest.raises(OSError, match=r".*"):
                await knock(port)
            idle_out.write(GET[9:])
            assert b"503" in await idle.readuntil(b"\r\n\r\n")
            app.go.set()
        async with asyncio.timeout(30):
            body = await reader.read()
        assert body.endswith(b"5\r\nfirst\r\n" + (b"4\r\nlast" if grace_s > 1 else b"3\r\ncut") + b"\r\n0\r\n\r\n")
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
            async with run(runtime, app, [inherited]) as (server, port):
                assert port == claimed
                reader, writer = await knock(port)
                writer.write(GET)
                await app.started.wait()
                server.handle_exit(15, None)
                await until(partial(getattr, runtime, "is_stopping"))
                with pytest.raises(OSError, match=r".*"):
                    await knock(port)
                app.go.set()
                async with asyncio.timeout(30):
                    assert (await reader.read()).endswith(b"4\r\nlast\r\n0\r\n\r\n")
                writer.close()


def open_tls(authority: Authority, folder: Path) -> Tls:
    context = make_context()
    certificate = ServedCertificate(authority.write_pair(folder, host="127.0.0.1"), partial(load_pair, context))
    certificate.open()
    return context, certificate


async def test_a_renewed_certificate_is_shown_to_who_comes_next_and_a_stream_goes_on(tmp_path: Path) -> None:
    runtime = Runtime()
    app, plain_port = Streams(runtime), free_port()
    authority = Authority()
    trust, tls = authority.make_trust(), open_tls(authority, tmp_path)

    async def see(port: int) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trust)
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True), reader, writer

    async with run(runtime, app, tls=tls, plain_port=plain_port) as (_, port):
        first, reader, writer = await see(port)
        writer.write(GET)
        await app.started.wait()
        authority.write_pair(tmp_path, host="127.0.0.1")
        assert tls[1].reload()
        second, _, other = await see(port)
        assert first != second
        app.go.set()
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"\r\n0\r\n\r\n")).endswith(b"4\r\nlast\r\n0\r\n\r\n")
        near, near_writer = await knock(plain_port)
        near_writer.write(GET)
        assert b"200 OK" in await near.readuntil(b"\r\n")
        for each in (writer, other, near_writer):
            each.close()


async def test_who_shakes_no_hands_is_cut_off(tmp_path: Path) -> None:
    set_limits(core={"tls_handshake_s": 0.1})
    runtime = Runtime()
    async with run(runtime, show_client, tls=open_tls(Authority(), tmp_path)) as (_, port):
        reader, writer = await knock(port)
        async with asyncio.timeout(30):
            assert await reader.read() == b""
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

    await GatewayApp(cast("GatewayRuntime", FailingRuntime()), show_client)({"type": "lifespan"}, receive, send)
    assert sent == [{"type": "lifespan.startup.failed", "message": "no database"}]


class IdleRuntime:
    """What the application starts and stops."""

    pipeline = SimpleNamespace(limits=GatewayLimits())

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


App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

MEGABYTE = 1024 * 1024


@asynccontextmanager
async def serve_socket(app: App) -> AsyncIterator[str]:
    """Serve ``app`` with our protocols; yields the URL of the socket."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, http=GatewayHttpProtocol, ws=GatewayWebSocketProtocol, lifespan="off", interface="asgi3",
        log_config=None, ws_max_size=64 * MEGABYTE, ws_per_message_deflate=False, timeout_graceful_shutdown=1,
    )  # fmt: skip
    async with run_server(uvicorn.Server(config)) as port:
        yield f"ws://127.0.0.1:{port}/v1/worker/connect"


def dial(url: str, **options: Any) -> connect:
    return connect(url, compression=None, max_size=64 * MEGABYTE, open_timeout=30, **options)


async def accept(receive: Any, send: Any) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})


async def fragments(client: WorkerConnection) -> list[str | bytes]:
    """Return the frames of the next message, as they came."""
    async with asyncio.timeout(30):
        return [part async for part in client.recv_streaming()]


async def read_all(client: WorkerConnection) -> None:
    """Read until the connection ends. Raises ConnectionClosed."""
    while True:
        await client.recv()


@pytest.mark.parametrize("size", [0, 1, MEGABYTE, MEGABYTE + 1, 3 * MEGABYTE + 3])
@pytest.mark.parametrize("kind", ["text", "bytes"])
async def test_no_frame_is_larger_than_a_worker_takes(size: int, kind: str) -> None:
    payload: str | bytes = "x" * size if kind == "text" else os.urandom(size)

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await accept(receive, send)
        await send({"type": "websocket.send", kind: payload})
        await receive()

    async with serve_socket(app) as url, dial(url) as client:
        parts = await fragments(client)
        assert len(parts) == max(1, -(-size // MEGABYTE))
        assert max(map(len, parts)) <= 16 * MEGABYTE
        joined = "".join(parts) if kind == "text" else b"".join(parts)  # type: ignore[arg-type]  # all of one kind
        assert joined == payload


@pytest.mark.parametrize("size", [10, 2 * MEGABYTE])
async def test_writing_to_a_worker_that_closed_is_a_refused_write_not_a_crash(size: int) -> None:
    stuck: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await accept(receive, send)
        while (await receive())["type"] != "websocket.disconnect":
            pass
        outbox = Outbox(send, limit_bytes=100 * MEGABYTE, timeout_s=30, on_stuck=stuck.put_nowait)
        outbox.put({"type": "websocket.send", "bytes": bytes(size)}, size)

    async with serve_socket(app) as url:
        async with dial(url):
            pass
        async with asyncio.timeout(30):
            assert "refused" in await stuck.get()


async def test_a_worker_that_reads_nothing_is_cut_off_by_a_close() -> None:
    closed, gone = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await accept(receive, send)
        outbox = Outbox(send, limit_bytes=100 * MEGABYTE, timeout_s=30, on_stuck=lambda reason: None)
        while not outbox.is_blocked:
            outbox.put({"type": "websocket.send", "bytes": bytes(MEGABYTE)}, MEGABYTE)
        outbox.stop()
        async with asyncio.timeout(30):
            await send({"type": "websocket.close", "code": 1011, "reason": "stuck"})
        closed.set()
        while (await receive())["type"] != "websocket.disconnect":
            pass
        gone.set()

    async with serve_socket(app) as url:
        client = await dial(url, ping_interval=None)
        client.transport.pause_reading()
        async with asyncio.timeout(30):
            await closed.wait()
            await gone.wait()
        client.transport.resume_reading()
        with pytest.raises(websockets.ConnectionClosed):
            await read_all(client)
        await client.close()


async def is_refused(url: str, **options: Any) -> tuple[int, dict[str, Any]]:
    """Dial where a socket must be refused; return the status and the error."""
    with pytest.raises(InvalidStatus) as caught:
        async with dial(url, **options):
            pass
    response = caught.value.response
    assert response.headers["content-type"] == "application/json"
    return response.status_code, json.loads(response.body)["error"]


async def test_a_page_of_another_origin_opens_no_socket_and_is_told_why_and_programs_and_own_pages_do() -> None:
    async with serve_socket(admit_programs(hold, {"https://own.example"})) as url:
        for origin in ("http://evil.example", "http://localhost:9", "null", "https://own.example.evil.example"):
            status, error = await is_refused(url, origin=origin)
            assert (status, "Send no Origin header" in error["message"]) == (403, True), origin
        for own in (None, "https://own.example", url.replace("ws://", "http://").removesuffix("/v1/worker/connect")):
            async with dial(url, origin=own) as client:
                await client.send("x")
    async with serve_socket(refuse_unknown_socket) as url:
        status, error = await is_refused(url)
    assert (status, error["code"], error["retryable"]) == (404, "NOT_FOUND", False)
    assert "/v1/worker/connect" in error["message"]


async def hold(scope: Scope, receive: Any, send: Any) -> None:
    await accept(receive, send)
    while (await receive())["type"] != "websocket.disconnect":
        pass
