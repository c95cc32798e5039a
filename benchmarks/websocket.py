"""A WebSocket client (RFC 6455) just big enough for a scripted node, and cheap, so that the node never limits a run."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import struct
from collections.abc import Callable
from typing import cast

from benchmarks.errors import BenchmarkError

TEXT, BINARY, CLOSE, PING, PONG = 0x1, 0x2, 0x8, 0x9, 0xA
_FIN = 0x80
_MASKED = 0x80
# Clients must mask (section 5.3). A key of zeros leaves the payload as it is and costs this side nothing; the server
# unmasks as ever. Unpredictable keys guard browsers behind bad caches, which a benchmark on loopback does not have.
_MASK = b"\0\0\0\0"
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_MAX_HEAD_BYTES = 16 * 1024


class WebSocketClient(asyncio.Protocol):
    """One connection. ``on_message(is_text, payload)`` is called for every whole message."""

    def __init__(self, *, host: str, path: str, headers: dict[str, str], on_message: Callable[[bool, bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[str] = loop.create_future()
        self._key = base64.b64encode(os.urandom(16))
        lines = [f"GET {path} HTTP/1.1", f"Host: {host}", "Upgrade: websocket", "Connection: Upgrade"]
        lines += [f"Sec-WebSocket-Key: {self._key.decode()}", "Sec-WebSocket-Version: 13"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        self._hello = ("\r\n".join(lines) + "\r\n\r\n").encode()
        self._on_message = on_message
        self._buffer = bytearray()
        self._parts: list[bytes] = []
        self._parts_are_text = False
        self._close_reason = "connection lost"
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the upgrade request."""
        # A cast: uvloop's transports do not inherit from asyncio's classes.
        self._transport = cast("asyncio.WriteTransport", transport)
        self._transport.write(self._hello)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell those who wait."""
        if not self.opened.done():
            self.opened.set_exception(BenchmarkError(f"the WebSocket was not opened: {exc or self._close_reason}"))
        if not self.closed.done():
            self.closed.set_result(self._close_reason)

    def data_received(self, data: bytes) -> None:
        """Parse the answer to the upgrade, then frames."""
        self._buffer += data
        if self.opened.done() or self._finish_handshake():
            self._parse_frames()

    def send(self, opcode: int, payload: bytes) -> None:
        """Send one message as one frame and one write."""
        size = len(payload)
        if size < 126:
            head = bytes((_FIN | opcode, _MASKED | size))
        elif size < 1 << 16:
            head = struct.pack(">BBH", _FIN | opcode, _MASKED | 126, size)
        else:
            head = struct.pack(">BBQ", _FIN | opcode, _MASKED | 127, size)
        if self._transport is not None:
            self._transport.write(head + _MASK + payload)

    def _finish_handshake(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD_BYTES:
                self._abort("the answer to the upgrade has no end")
            return False
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        accept = base64.b64encode(hashlib.sha1(self._key + _GUID, usedforsecurity=False).digest())
        if not head.startswith(b"HTTP/1.1 101") or accept not in head:
            self._abort(head.split(b"\r\n", 1)[0].decode(errors="replace"))
            return False
        self.opened.set_result(None)
        return True

    def _abort(self, reason: str) -> None:
        self._close_reason = reason
        if self._transport is not None:
            self._transport.abort()

    def _parse_frames(self) -> None:
        buffer, position = self._buffer, 0
        while len(buffer) - position >= 2:
            first, size = buffer[position], buffer[position + 1] & 0x7F
            start = position + 2
            if size == 126:
                start += 2
            elif size == 127:
                start += 8
            if len(buffer) < start:
                break
            if size > 125:
                size = int.from_bytes(buffer[position + 2 : start], "big")
            if len(buffer) < start + size:
                break
            payload = bytes(buffer[start : start + size])
            position = start + size
            self._take_frame(first, payload)
        del buffer[:position]

    def _take_frame(self, first: int, payload: bytes) -> None:
        opcode = first & 0x0F
        if opcode == PING:
            self.send(PONG, payload)
        elif opcode == CLOSE:
            code = int.from_bytes(payload[:2], "big")
            self._abort(f"closed by the server with {code} {payload[2:].decode(errors='replace')}")
        elif opcode in {0, TEXT, BINARY}:
            if opcode:
                self._parts_are_text = opcode == TEXT
            if first & _FIN and not self._parts:
                self._on_message(self._parts_are_text, payload)
                return
            self._parts.append(payload)
            if first & _FIN:
                whole = b"".join(self._parts)
                self._parts.clear()
                self._on_message(self._parts_are_text, whole)
