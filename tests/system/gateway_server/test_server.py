"""Starting and stopping: a running stream finishes, new requests are refused, and the end is bounded."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.server import GatewayApp, GatewayServer
from controlplane.launcher.ports import claim_port
from core.limits import GatewayLimits
from gateway.runtime import GatewayRuntime
from tests.system.gateway_server.serving import run_server

ROOT = Path(__file__).resolve().parents[3]
LATE_OR_NEVER = {
    "aiohttp", "celery", "daphne", "django.contrib.admin.forms", "gateway.admin", "governance.admin", "httpx", "jinja2",
    "nodes.admin", "rest_framework.views", "rich", "tokenizers", "unfold.admin",
}  # fmt: skip
"""What a gateway that was killed must not load before it serves again."""
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


async def test_an_idle_server_stops_at_once() -> None:
    runtime = Runtime(grace_s=600)
    async with serve(runtime, Streams(runtime)) as (server, _port):
        server.handle_exit(15, None)


# lifespan


class Started:
    """A runtime that starts or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[str] = []

    async def start(self) -> None:
        self.calls.append("start")
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        self.calls.append("stop")


async def live(app: GatewayApp, *events: str) -> list[dict[str, Any]]:
    incoming = iter([{"type": event} for event in events])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return next(incoming)

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    call = cast("Callable[[Scope, Any, Any], Awaitable[None]]", app)
    await call({"type": "lifespan"}, receive, send)
    return sent


def make_app(runtime: Started) -> GatewayApp:
    app = GatewayApp.__new__(GatewayApp)
    app.runtime = cast("GatewayRuntime", runtime)
    return app


async def test_the_runtime_lives_as_long_as_the_server() -> None:
    runtime = Started()
    sent = await live(make_app(runtime), "lifespan.startup", "lifespan.shutdown")
    assert [event["type"] for event in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert runtime.calls == ["start", "stop"]


async def test_a_runtime_that_cannot_start_keeps_the_server_from_listening(caplog: pytest.LogCaptureFixture) -> None:
    runtime = Started(OSError("no database"))
    with caplog.at_level(logging.CRITICAL):
        (event,) = await live(make_app(runtime), "lifespan.startup")
    assert event == {"type": "lifespan.startup.failed", "message": "no database"}
    assert runtime.calls == ["start"]


@pytest.mark.timeout(120)
def test_a_gateway_loads_nothing_before_it_serves_that_it_needs_late_or_never() -> None:
    program = (
        "import atexit, gc, sys; from controlplane.serve_gateway import main; "
        f"loaded = lambda: sorted({LATE_OR_NEVER!r} & set(sys.modules)); "
        "atexit.register(lambda: print(loaded(), gc.get_stats()[2]['collections'])); main()"
    )
    nowhere = {"DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "REDIS_URL": "redis://127.0.0.1:1/0"}
    environment = {**os.environ, **nowhere, "MUSTER_SECRET_KEY": "k" * 50, "MUSTER_ADMIN_PAGES": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program, "--port", "0"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "Application startup failed" in ended.stderr, "it was to be loaded, and to find no database"
    assert ended.stdout == "[] 0\n"
