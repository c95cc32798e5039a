"""An HTTP client that shows its hands: reads as slowly as told, leaves when told, sends what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any  # bodies are JSON of either side
from urllib.parse import urlsplit

import h11

REPLY_WITHIN_S = 30.0
_CHUNK = 64 * 1024


@dataclass(frozen=True)
class Reply:
    """A response. ``whole`` is False when the connection ended before the response did."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    whole: bool = True

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found = self.json["error"]
        assert isinstance(found, dict)
        return found

    @property
    def request_id(self) -> str:
        return self.headers["x-request-id"]

    @property
    def events(self) -> list[str]:
        return read_events(self.body)


def read_events(body: bytes) -> list[str]:
    """Return the data of each event of an SSE body, comments left out."""
    found = []
    for block in body.decode().replace("\r\n", "\n").split("\n\n"):
        lines = [line.removeprefix("data:").removeprefix(" ") for line in block.split("\n") if line.startswith("data:")]
        if lines:
            found.append("\n".join(lines))
    return found


@dataclass
class Exchange:
    """One request on a connection of its own, and its response as far as it has been read."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    ended: bool = False
    whole: bool = False

    @classmethod
    async def open(
        cls, url: str, *, method: str = "POST", headers: Mapping[str, str] | None = None, body: bytes = b"",
        receive_buffer: int | None = None,
    ) -> Exchange:  # fmt: skip
        """Connect and send a request. ``receive_buffer`` shrinks the socket's own buffer, for slow readers."""
        parts = urlsplit(url)
        sock = socket.socket()
        sock.setblocking(False)
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        try:
            await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
        except BaseException:
            sock.close()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        reader, writer = await asyncio.open_connection(sock=sock, limit=receive_buffer or _CHUNK)
        exchange = cls(reader, writer, h11.Connection(h11.CLIENT))
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        named = {"host": parts.netloc, **(headers or {})}
        if body or method == "POST":
            named["content-length"] = str(len(body))
        await exchange._send(h11.Request(method=method, target=target, headers=list(named.items())))
        if body:
            await exchange._send(h11.Data(data=body))
        await exchange._send(h11.EndOfMessage())
        return exchange

    async def _send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        data = self.http.send(event)
        if data:
            self.writer.write(data)
            await self.writer.drain()

    async def _next(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED] | None:
        while True:
            try:
                event = self.http.next_event()
            except h11.RemoteProtocolError:
                return None
            if event is not h11.NEED_DATA:
                return event
            try:
                data = await self.reader.read(_CHUNK)
            except (ConnectionError, TimeoutError):
                return None
            self.http.receive_data(data)

    async def head(self) -> int:
        """Read up to the response's head and return its status; 0 when the connection ended instead."""
        while not self.status and not self.ended:
            event = await self._next()
            if isinstance(event, h11.Response):
                self.status = event.status_code
                self.headers = {name.decode().lower(): value.decode("latin-1") for name, value in event.headers}
            elif event is None or isinstance(event, h11.ConnectionClosed):
                self.ended = True
        return self.status

    async def chunk(self) -> bytes:
        """Return the next piece of the body, empty when there is no more (``whole`` says why)."""
        await self.head()
        while not self.ended:
            event = await self._next()
            if isinstance(event, h11.Data):
                self.body += event.data
                return bytes(event.data)
            if event is None or isinstance(event, (h11.EndOfMessage, h11.ConnectionClosed)):
                self.ended = True
                self.whole = isinstance(event, h11.EndOfMessage)
        return b""

    async def until(self, text: bytes) -> None:
        async with asyncio.timeout(REPLY_WITHIN_S):
            while text not in self.body:
                if not await self.chunk():
                    raise AssertionError(f"the response ended before {text!r}: {bytes(self.body)[-500:]!r}")

    async def finish(self, *, within_s: float = REPLY_WITHIN_S) -> Reply:
        try:
            async with asyncio.timeout(within_s):
                while await self.chunk():
                    pass
        finally:
            await self.close()
        return Reply(self.status, self.headers, bytes(self.body), self.whole)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await self.writer.wait_closed()

    def leave(self) -> None:
        """Go away in the middle, as a killed client does (TCP reset). Nothing when it is closed already."""
        if self.writer.is_closing():
            return
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def call(
    method: str, url: str, *, headers: Mapping[str, str] | None = None, body: bytes = b"", within_s: float = REPLY_WITHIN_S
) -> Reply:
    exchange = await Exchange.open(url, method=method, headers=headers, body=body)
    return await exchange.finish(within_s=within_s)
