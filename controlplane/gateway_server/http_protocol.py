"""uvicorn's HTTP protocol with what it leaves out: a deadline for request headers, and a handle on the connection.

The handle lets the relay hear of a lost client by a call instead of a waiting task, close a connection after an error
event, and reset one whose client does not read.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from gateway.client import SCOPE_HANDLE
from wire.contract import ErrorCode

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_MAX_HEADER_BYTES = 64 * 1024


class Handle:
    """One request's hold on its connection (``gateway.client.ConnectionHandle``)."""

    __slots__ = ("_protocol", "callback", "cycle")

    def __init__(self, protocol: GatewayHttpProtocol) -> None:
        self._protocol = protocol
        self.cycle: RequestResponseCycle | None = None
        self.callback: Callable[[], None] | None = None

    def set_lost_callback(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called when the peer is gone; at once if it is gone already."""
        self.callback = callback
        if callback is None:
            self._protocol.watching.discard(self)
        elif self._protocol.is_lost:
            self.callback = None
            callback()
        else:
            self._protocol.watching.add(self)
            # A large body may have stopped the reading with its last piece, and who does not read never sees the end.
            self._protocol.flow.resume_reading()

    def close_after_response(self) -> None:
        """Do not keep the connection for another request."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def abort(self) -> None:
        """Reset the connection at once; what the peer did not take is thrown away."""
        transport = self._protocol.transport
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        transport.abort()

    def respond(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        """Write a whole response in one piece and close uvicorn's books on the request, as its ``send`` does in two."""
        cycle = self.cycle
        if cycle is None or cycle.disconnected or cycle.response_complete:
            return
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        if status != 204:
            parts.append(b"content-length: %d\r\n" % len(body))
        parts.append(b"\r\n")
        if cycle.scope["method"] != "HEAD":
            parts.append(body)
        cycle.transport.write(b"".join(parts))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


class GatewayHttpProtocol(HttpToolsProtocol):
    """One client connection."""

    header_timeout_s: ClassVar[float] = 10.0
    body_timeout_s: ClassVar[float] = 60.0

    watching: set[Handle]
    is_lost: bool

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection; the clock for the first request runs from here."""
        super().connection_made(transport)
        self.watching = set()
        self.is_lost = False
        self._handle: Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._headers_open = self._body_open = False
        self._header_bytes = 0
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # Nagle would hold the first token of a kept connection back until the client acknowledges.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timer = self.loop.call_later(self.header_timeout_s, self._take_receipt_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever serves this connection."""
        self.is_lost = True
        self._stop_timer()
        super().connection_lost(exc)
        watching, self.watching = self.watching, set()
        for handle in watching:
            if handle.callback is not None:
                handle.callback()

    def on_message_begin(self) -> None:
        """A request begins: its headers have to arrive in time."""
        super().on_message_begin()
        self._handle = Handle(self)
        self.scope["extensions"] = {SCOPE_HANDLE: self._handle}  # type: ignore[dict-item]
        self._headers_open = True

    def on_headers_complete(self) -> None:
        """The headers arrived; bind the handle to this request's cycle."""
        self._headers_open = False
        self._stop_timer()
        self._header_bytes = 0
        super().on_headers_complete()
        if self._handle is not None:
            self._handle.cycle = self.cycle
        self._body_open = True

    def on_message_complete(self) -> None:
        """The body arrived."""
        self._body_open = False
        self._stop_timer()
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; what is still to come of a request has to arrive in time. Most requests come whole and need no timer."""
        super().data_received(data)
        if self.is_lost or not (self._headers_open or self._body_open):
            return
        if self._headers_open:
            self._header_bytes += len(data)
            if self._header_bytes > _MAX_HEADER_BYTES and not self.transport.is_closing():
                message = f"The request headers have more than {_MAX_HEADER_BYTES} bytes."
                self._send_error(431, "Request Header Fields Too Large", message, ErrorCode.BAD_REQUEST)
                return
        if self._timer is None:
            seconds = self.body_timeout_s if self._body_open else self.header_timeout_s
            self._timer = self.loop.call_later(seconds, self._take_receipt_timeout)

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection ends; one whose client never took its answer is reset, or it would linger."""
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Malformed HTTP gets the contract's envelope, not plain text."""
        self._send_error(400, "Bad Request", f"{msg} Send a well-formed HTTP/1.1 request.", ErrorCode.BAD_REQUEST)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take_receipt_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        what = "body" if self._body_open else "headers"
        self._send_error(408, "Request Timeout", f"The request {what} did not arrive in time.", ErrorCode.BAD_REQUEST)

    def _send_error(self, status: int, phrase: str, message: str, code: ErrorCode) -> None:
        cycle = self.cycle
        is_answering = cycle is not None and (cycle.response_started if self._body_open else not cycle.response_complete)
        if is_answering or self.pipeline:
            self.transport.abort()  # an error in the middle of another answer would be taken for a part of it
            return
        error = {
            "code": code.value,
            "message": message,
            "retryable": status == 408,
            "type": "invalid_request_error",
            "param": None,
        }
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status} {phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
