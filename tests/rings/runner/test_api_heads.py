"""What the node's own HTTP port makes of heads with two readings, and of trailers."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from runner.api.server import _serve

HEAD = b"POST /x HTTP/1.1\r\nhost: a\r\n"
CHUNKED = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"


async def show_headers(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer with the names of the headers, once the body is there."""
    while (await receive()).get("more_body"):
        pass
    body = json.dumps(sorted(name.decode() for name, _ in scope["headers"])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def ask(data: bytes) -> tuple[int, str]:
    """Return status and body of what these bytes are answered with."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with _serve(show_headers, listener), asyncio.timeout(30):  # type: ignore[arg-type]  # ASGI's open dictionaries
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(data)
            answer = await reader.read()
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET /x HTTP/1.1\r\naccept: */*\r\n\r\n", "Host"),
        (HEAD + b"host: b\r\n\r\n", "'host'"),
        (HEAD + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n", "'authorization'"),
        (b"GET /x HTTP/2.0\r\nhost: a\r\n\r\n", "HTTP/2.0"),
        (HEAD + b"x-a: " + b"b" * 70_000 + b"\r\n\r\n", "65536"),
        (HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nab", "Upgrade"),
    ],
)
async def test_a_head_with_two_readings_is_refused_with_what_would_do(data: bytes, said: str) -> None:
    status, message = await ask(data)
    assert (status, said in message) == (400, True)


async def test_a_trailer_becomes_no_header() -> None:
    status, names = await ask(CHUNKED + b"authorization: Bearer key\r\n\r\n")
    assert (status, json.loads(names)) == (200, ["connection", "host", "transfer-encoding"])
