"""The worker socket's server on a real socket: large messages, a peer that closes or reads nothing."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from core.outbox import Outbox
from gateway.refusing import admit_programs, refuse_unknown_socket
from tests.fakes.server_door import run_server

Scope = dict[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

MEGABYTE = 1024 * 1024


@asynccontextmanager
async def serve(app: App) -> AsyncIterator[str]:
    """Serve ``app`` with our protocols; yields the URL of the socket."""
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        http=GatewayHttpProtocol,
        ws=GatewayWebSocketProtocol,
        lifespan="off",
        interface="asgi3",
        log_config=None,
        ws_max_size=64 * MEGABYTE,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=1,
    )
    async with run_server(uvicorn.Server(config)) as port:
        yield f"ws://127.0.0.1:{port}/v1/worker/connect"


def dial(url: str, **options: Any) -> connect:
    return connect(url, compression=None, max_size=64 * MEGABYTE, open_timeout=30, **options)


async def accept(receive: Any, send: Any) -> None:
    assert (await receive())["type"] == "websocket.connect"
    await send({"type": "websocket.accept"})


async def fragments(client: ClientConnection) -> list[str | bytes]:
    """Return the frames of the next message, as they came."""
    async with asyncio.timeout(30):
        return [part async for part in client.recv_streaming()]


async def read_all(client: ClientConnection) -> None:
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

    async with serve(app) as url, dial(url) as client:
        parts = await fragments(client)
        assert len(parts) == max(1, -(-size // MEGABYTE))
        assert max(map(len, parts)) <= 16 * MEGABYTE
        joined = "".join(parts) if kind == "text" else b"".join(parts)  # type: ignore[arg-type]  # all of one kind
        assert joined == payload


async def test_small_messages_keep_their_place_behind_a_large_one() -> None:
    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await accept(receive, send)
        outbox = Outbox(send, limit_bytes=100 * MEGABYTE, timeout_s=30, on_stuck=lambda reason: None)
        for number in range(3):
            outbox.put({"type": "websocket.send", "bytes": bytes(8 * MEGABYTE)}, 8 * MEGABYTE)
            outbox.put({"type": "websocket.send", "text": str(number)}, 1)
        await receive()

    async with serve(app) as url, dial(url) as client:
        for number in range(3):
            assert len(await client.recv()) == 8 * MEGABYTE
            assert await client.recv() == str(number)


@pytest.mark.parametrize("size", [10, 2 * MEGABYTE])
async def test_writing_to_a_worker_that_closed_is_a_refused_write_not_a_crash(size: int) -> None:
    stuck: asyncio.Queue[str] = asyncio.Queue()

    async def app(scope: Scope, receive: Any, send: Any) -> None:
        await accept(receive, send)
        while (await receive())["type"] != "websocket.disconnect":
            pass
        outbox = Outbox(send, limit_bytes=100 * MEGABYTE, timeout_s=30, on_stuck=stuck.put_nowait)
        outbox.put({"type": "websocket.send", "bytes": bytes(size)}, size)

    async with serve(app) as url:
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

    async with serve(app) as url:
        client = await dial(url, ping_interval=None)
        client.transport.pause_reading()
        async with asyncio.timeout(30):
            await closed.wait()
            await gone.wait()
        client.transport.resume_reading()
        with pytest.raises(websockets.ConnectionClosed):
            await read_all(client)
        await client.close()


async def test_an_unknown_socket_path_is_not_found_in_the_words_of_the_api() -> None:
    async with serve(refuse_unknown_socket) as url:
        with pytest.raises(InvalidStatus) as caught:
            async with dial(url):
                pass
    response = caught.value.response
    assert (response.status_code, response.headers["content-type"]) == (404, "application/json")
    error = json.loads(response.body)["error"]
    assert (error["code"], error["retryable"]) == ("NOT_FOUND", False)
    assert "/v1/worker/connect" in error["message"]


@pytest.mark.parametrize("origin", ["http://evil.example", "http://localhost:9", "null", "https://own.example.evil.example"])
async def test_a_page_of_another_origin_opens_no_socket_and_is_told_why(origin: str) -> None:
    async with serve(admit_programs(hold, {"https://own.example"})) as url:
        with pytest.raises(InvalidStatus) as caught:
            async with dial(url, origin=origin):
                pass
    response = caught.value.response
    assert response.status_code == 403
    assert "Send no Origin header" in json.loads(response.body)["error"]["message"]


async def test_programs_and_own_pages_open_the_socket() -> None:
    async with serve(admit_programs(hold, {"https://own.example"})) as url:
        for origin in (None, "https://own.example", url.replace("ws://", "http://").removesuffix("/v1/worker/connect")):
            async with dial(url, origin=origin) as client:
                await client.send("x")


async def hold(scope: Scope, receive: Any, send: Any) -> None:
    await accept(receive, send)
    while (await receive())["type"] != "websocket.disconnect":
        pass
