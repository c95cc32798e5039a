"""uvicorn's HTTP protocol with what it leaves out: deadlines for requests, a handle on the connection, a close that waits.

The handle lets the relay hear of a lost client by a call instead of a waiting task, close a connection after an error
event, and reset one whose client does not read. A request that is answered while its body is still on the way leaves a
connection that takes and forgets the rest for a while: closed at once, it would be reset by the first bytes that come, and
the reset destroys the answer before the client has read it (RFC 9112, section 9.6).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from core.limits import limits
from gateway.client import SCOPE_HANDLE
from wire.contract import ErrorCode
from wire.http_head import TOO_LARGE, HeadFault, find_head_fault, find_size_fault
from wire.limits import WIRE

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _TooManyWaiting(Exception):
    """Ends the parsing of a connection; what was taken of it is still answered."""


class _HeadRefused(Exception):
    """Ends the parsing of a connection whose next request is answered with ``_fault``."""


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
            self._protocol.read_ahead(0)  # a large body may have stopped the reading with its last piece

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
        is_early = cycle.more_body
        if is_early or not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        if status != 204:
            parts.append(b"content-length: %d\r\n" % len(body))
        parts.append(b"\r\n")
        if cycle.scope["method"] != "HEAD":
            parts.append(body)
        cycle.transport.write(b"".join(parts))
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if is_early or (self._protocol.is_deaf and not self._protocol.pipeline):
            self._protocol.begin_linger()
        elif not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


class GatewayHttpProtocol(HttpToolsProtocol):
    """One client connection."""

    header_timeout_s: ClassVar[float] = 10.0
    body_timeout_s: ClassVar[float] = 60.0

    watching: set[Handle]
    is_lost: bool
    is_deaf: bool
    """Whether what still comes is thrown away: nothing of it will be answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection; the clock for the first request runs from here."""
        super().connection_made(transport)
        self.watching = set()
        self.is_lost = False
        self._handle: Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._headers_open = self._body_open = False
        self._header_bytes = self._read_bytes = 0
        self._is_mixed = False
        """Whether the last read holds more than a part of one head, or of chunk sizes and trailers."""
        self._fault: HeadFault | None = None
        self._limits = limits().gateway
        self.is_deaf = self._is_lingering = False
        self._forgotten_bytes = self._ahead_bytes = 0
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
            if handle.cycle is not None:
                handle.cycle.disconnected = True
            if handle.callback is not None:
                handle.callback()

    def on_message_begin(self) -> None:
        """A request begins: its headers have to arrive in time."""
        super().on_message_begin()
        self._handle = Handle(self)
        self.scope["extensions"] = {SCOPE_HANDLE: self._handle}  # type: ignore[dict-item]
        self._headers_open = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
        """The headers arrived; bind the handle to this request's cycle."""
        self._headers_open = False
        self._stop_timer()
        is_upgrade = self.parser.should_upgrade()
        self._fault = find_head_fault(self.parser.get_http_version(), self.headers, is_upgrade=is_upgrade)
        if self._header_bytes + self._read_bytes > WIRE.request_head_bytes:
            self._fault = find_size_fault(self.url, self.headers) or self._fault
        if self._fault is not None:
            raise _HeadRefused
        self._header_bytes = 0
        self._is_mixed = True
        super().on_headers_complete()
        if not is_upgrade:
            self.headers = []  # for trailers, which the parser adds here; they are no headers, and nobody reads them
        if len(self.pipeline) > self._limits.server_pipelined:
            self.pipeline.popleft()
            self.pipeline[0][0].keep_alive = False
            self.is_deaf = True
            raise _TooManyWaiting
        if self._handle is not None:
            self._handle.cycle = self.cycle
        self._body_open = True

    def on_body(self, body: bytes) -> None:
        """A part of the body arrived."""
        self._header_bytes = 0
        self._is_mixed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body arrived, and its trailers."""
        self._is_mixed = True
        if self.headers and (fault := find_size_fault(b"", self.headers)):
            self._fault = fault
            raise _HeadRefused
        self._body_open = False
        self._stop_timer()
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; what is still to come of a request has to arrive in time. Most requests come whole and need no timer."""
        if self.is_deaf:
            self._forget(data)
            return
        self._read_bytes = len(data)
        self._is_mixed = False
        super().data_received(data)
        if self.is_lost or self.is_deaf:
            return
        if self.flow.read_paused and self.watching:
            self.read_ahead(len(data))
        if not (self._headers_open or self._body_open):
            self._expect_next()
            return
        if not self._is_mixed:
            self._header_bytes += len(data)
            if self._header_bytes > WIRE.request_head_bytes and not self.transport.is_closing():
                self._send_fault(TOO_LARGE)
                return
        if self._timer is None:
            self._start_timer()

    def on_response_complete(self) -> None:
        """An answer is out; another request may be served, unless this one was refused before it had come."""
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        self._ahead_bytes = 0
        if self._body_open:  # the next request's, which was not read while this one was answered
            self._start_timer()
        super().on_response_complete()

    def read_ahead(self, size_bytes: int) -> None:
        """Go on reading behind the request that is served, of which ``size_bytes`` more have come, up to a bound."""
        self._ahead_bytes += size_bytes
        if self.is_deaf or self._ahead_bytes <= self._limits.server_ahead_bytes:
            self.flow.resume_reading()

    def begin_linger(self) -> None:
        """Send no more behind what was written, and forget what still comes, until the client closes or a bound is reached."""
        if self.transport.is_closing():
            return
        self._stop_timer()
        self._unset_keepalive_if_required()
        self.is_deaf = self._is_lingering = True
        self._headers_open = self._body_open = False
        cycle = self.cycle
        if cycle is not None:
            cycle.body = bytearray()
            cycle.waiting_for_100_continue = False
            if not cycle.response_complete:  # its application waits for a body that nobody will hand to it
                cycle.disconnected = True
                cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        until = self.loop.time() + self._limits.server_linger_s
        self._timer = self.loop.call_later(self._limits.server_linger_idle_s, self._watch_linger, until, 0)

    def shutdown(self) -> None:
        """The server stops: nobody who was refused is waited for."""
        if self._is_lingering:
            self._end_linger()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection ends; one whose client never took its answer is reset, or it would linger."""
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            super().timeout_keep_alive_handler()

    def send_400_response(self, msg: str) -> None:
        """Malformed HTTP gets the contract's envelope, not plain text."""
        if self.is_deaf:  # it was us who stopped the parser
            self._headers_open = False
            self._stop_timer()
            if self.watching:
                self.flow.resume_reading()
            return
        if self._fault is not None:
            self._send_fault(self._fault)
            return
        self._send_error(400, "Bad Request", f"{msg} Send a well-formed HTTP/1.1 request.", ErrorCode.BAD_REQUEST)

    def _forget(self, data: bytes) -> None:
        self._forgotten_bytes += len(data)
        if self._forgotten_bytes > self._limits.server_linger_bytes:
            self._end_linger()

    def _watch_linger(self, until: float, seen_bytes: int) -> None:
        """End the waiting when nothing came since the last look, at which ``seen_bytes`` had come, or when time is up."""
        self._timer = None
        if self._forgotten_bytes == seen_bytes or self.loop.time() >= until:
            self._end_linger()
            return
        self._timer = self.loop.call_later(self._limits.server_linger_idle_s, self._watch_linger, until, self._forgotten_bytes)

    def _end_linger(self) -> None:
        if self.transport.get_write_buffer_size() > 0:
            self.transport.abort()
        else:
            self.transport.close()

    def _expect_next(self) -> None:
        """Let an idle connection end in time: bytes that begin no request have stopped its clock."""
        is_idle = self.cycle is not None and self.cycle.response_complete and not self.transport.is_closing()
        if is_idle and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _start_timer(self) -> None:
        self._stop_timer()
        seconds = self.body_timeout_s if self._body_open else self.header_timeout_s
        self._timer = self.loop.call_later(seconds, self._take_receipt_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take_receipt_timeout(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # it is we who keep it waiting
            self._start_timer()
            return
        what = "body" if self._body_open else "headers"
        self._send_error(408, "Request Timeout", f"The request {what} did not arrive in time.", ErrorCode.BAD_REQUEST)

    def _send_fault(self, fault: HeadFault) -> None:
        self._send_error(fault.status, fault.phrase, fault.message, ErrorCode.BAD_REQUEST)

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
        self.begin_linger()
