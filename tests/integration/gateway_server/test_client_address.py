"""The gateway's own application behind its own server: whose address a request and a worker socket have."""

from __future__ import annotations

import json
from typing import Any, cast

import httpx
import pytest
import uvicorn
from pytest_django import Settings
from websockets.asyncio.client import connect

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.server import GatewayApp
from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from gateway.runtime import GatewayRuntime
from tests.integration.gateway_server.serving import run_server
from wire.client_address import TrustedProxies, parse_networks

Scope = dict[str, Any]


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
    config = uvicorn.Config(
        GatewayApp(cast("GatewayRuntime", None), show_client), host="127.0.0.1", port=0, http=GatewayHttpProtocol,
        lifespan="off", ws=GatewayWebSocketProtocol, interface="asgi3", log_config=None, proxy_headers=False,
    )  # fmt: skip
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
    settings.TRUSTED_PROXIES = TrustedProxies(parse_networks(proxies.split(",")))
    assert await ask(["6.6.6.6, 10.1.2.3", "203.0.113.9"]) == (seen, seen)


async def test_without_proxies_a_header_changes_nothing(settings: Settings) -> None:
    settings.TRUSTED_PROXIES = TrustedProxies(())
    assert await ask(["203.0.113.9"]) == ("127.0.0.1", "127.0.0.1")
