"""The gateway's own application behind its own server: whose address a request and a worker socket have."""

from __future__ import annotations

import json
import zlib
from ipaddress import ip_network
from typing import Any, cast

import httpx
import pytest
import uvicorn
from pytest_django import Settings
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError
from websockets.frames import Frame, Opcode

from controlplane.gateway_server.server import GatewayApp, make_config
from gateway.runtime import GatewayRuntime
from tests.system.gateway_server.serving import run_server
from wire.client_address import TrustedProxies

Scope = dict[str, Any]


class Runtime:
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
    app = GatewayApp(cast("GatewayRuntime", Runtime()), show_client)
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


async def test_without_proxies_a_header_changes_nothing(settings: Settings) -> None:
    settings.TRUSTED_PROXIES = TrustedProxies(())
    assert await ask(["203.0.113.9"]) == ("127.0.0.1", "127.0.0.1")


async def test_a_worker_socket_is_never_compressed(settings: Settings) -> None:
    """A message of some kilobytes could otherwise become gigabytes in the gateway's memory."""
    settings.TRUSTED_PROXIES = TrustedProxies(())
    app = GatewayApp(cast("GatewayRuntime", Runtime()), wait_for_message)
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
