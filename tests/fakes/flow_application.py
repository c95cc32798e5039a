"""An ASGI application that sends without end and one that reads slowly, on our server: for the tests of flow control."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from typing import Any

from controlplane.daphne_server import FlowControlledServer
from tests.fakes.waiting import takes

CHUNK = b"x" * 16384


async def application(scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
    """Route by path: /endless, /slow, /sleep, /echo; a socket at /nowhere is answered with 404."""
    if scope["type"] == "http":
        await answer(scope["path"], receive, send)
    elif scope["type"] == "websocket":
        await receive()
        if scope["path"] == "/nowhere":
            assert "websocket.http.response" in scope["extensions"]
            await send({"type": "websocket.http.response.start", "status": 404, "headers": []})
            await send({"type": "websocket.http.response.body", "body": b"{}"})
            return
        await send({"type": "websocket.accept"})
        await (push_endlessly(send) if scope["path"] == "/endless" else read_slowly(receive))


async def answer(path: str, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    if path == "/sleep":
        print("working", flush=True)
        await takes(1)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
    while path == "/endless":
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    body = CHUNK * 64 if path == "/large" else f"read {size}".encode()
    await send({"type": "http.response.body", "body": body})


async def push_endlessly(send: Callable[..., Any]) -> None:
    while True:
        await send({"type": "websocket.send", "bytes": CHUNK})


async def read_slowly(receive: Callable[..., Any]) -> None:
    while (await receive())["type"] != "websocket.disconnect":
        await takes(0.2)


if __name__ == "__main__":
    port, options = sys.argv[1], json.loads(sys.argv[2])
    if files := options.pop("files", None):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    server = FlowControlledServer(application, host="127.0.0.1", port=int(port), **options)
    server.run()
    sys.exit(1 if server.listen_failure else 0)
