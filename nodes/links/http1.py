"""A small HTTP/1.1 client for the frame path: one request at a time on a connection, answers by callback.

A general client spends more on one chunk than the rest of the gateway does; this one calls the sink from
``data_received``. Requests carry a body of known length; answers may be chunked, sized or ended by close (RFC 9112).
No redirects, no cookies, no decompression: the caller never asks for any.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import httptools

from core.limits import limits

_HOP_HEADERS = frozenset({"connection", "content-length", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade"})
_CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
"""Stands for a remembered head before a chunked body."""
_WITHOUT_BODY = frozenset({204, 304})
_LENGTH = b"\r\ncontent-length: "


class ResponseHandler(Protocol):
    """Receives one response."""

    def on_response_head(self, status: int, headers: dict[str, str]) -> None:
        """Status and headers, names in lower case, repeated ones joined by a comma, those of the connection left out.

        Other responses may share the headers: nobody changes them.
        """

    def on_response_data(self, data: bytes) -> None:
        """Body bytes; a handler that gave the response up may still get some."""

    def on_response_end(self, error: str | None) -> None:
        """The response is whole (None), or what broke it. ``Connection.head_seen`` says how far it came."""

    def on_response_whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Take a response that came in one read: all that the other calls say."""


class _Head(NamedTuple):
    """A head that llhttp took, as its bytes ``before`` and ``after`` the digits of its content-length.

    Nothing after: the body behind it is chunked.
    """

    before: bytes
    after: bytes
    status: int
    headers: dict[str, str]


class HeadMemory:
    """Heads of one upstream's answers: within a second it sends the same ones again but for the length of the body.

    Only a head that llhttp took is remembered, and nothing else of it may differ, so nothing is found that llhttp would refuse.
    To leave out the date too would take as long as llhttp takes for all of a head.
    """

    def __init__(self) -> None:
        bounds = limits().nodes
        self._max_heads, self._max_bytes = bounds.http_kept_heads, bounds.http_kept_head_bytes
        self._heads: list[_Head] = []

    def find(self, data: bytes) -> tuple[_Head, int, int] | None:
        """Return the head that ``data`` begins with, its size, and the length of its body (-1: it is chunked)."""
        for head in self._heads:
            if data.startswith(head.before):
                start = len(head.before)
                if not head.after:
                    return head, start, -1
                stop = data.find(b"\r\n", start, start + 16)
                digits = data[start:stop]
                if data.startswith(head.after, stop) and digits.isdigit():
                    return head, stop + len(head.after), int(digits)
        return None

    def keep(self, data: bytes, status: int, headers: dict[str, str], *, is_chunked: bool) -> None:
        """Remember the head that ``data`` begins with, if it is of the usual kind; the oldest is forgotten for it."""
        before, after = data[: data.find(b"\r\n\r\n", 0, self._max_bytes) + 4], b""
        if not is_chunked:
            start = before.lower().find(_LENGTH) + len(_LENGTH)
            stop = before.find(b"\r\n", start)
            if start < len(_LENGTH):
                return
            before, after = before[:start], before[stop:]
        if before.startswith(b"HTTP/1.1 ") and status not in _WITHOUT_BODY:
            self._heads.insert(0, _Head(before, after, status, headers))
            del self._heads[self._max_heads :]


class Connection(asyncio.Protocol):
    """One connection to an upstream. ``on_idle`` is called when it can carry another request; ``call_soon`` is the loop's.

    A head that is remembered is read here, and a body of known length behind it. llhttp reads everything else, chunks too:
    it takes one apart in half the time in which Python finds its end.
    """

    def __init__(
        self,
        heads: HeadMemory,
        on_idle: Callable[[Connection], None],
        on_gone: Callable[[Connection], None],
        call_soon: Callable[..., object],
    ) -> None:
        self._head_limit = limits().nodes.http_head_bytes
        self._heads = heads
        self._on_idle = on_idle
        self._on_gone = on_gone
        self._call_soon = call_soon
        self._transport: asyncio.Transport | None = None
        self._handler: ResponseHandler | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._first = b""
        """The first read of a response, until its head is known."""
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._is_quiet = True
        """Whether llhttp has given neither head nor body since the last read began."""
        self._quiet_bytes = 0
        """Of the reads that came of late, all quiet: of an endless header httptools keeps every byte."""
        self._left = 0
        """Bytes still to come of a body that is read here."""
        self._until_close = False
        self._is_whole = self._keeps = False
        self._is_paused = False
        self.used = False
        self.head_seen = False
        self.idle_since = 0.0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast: uvloop's transports do not inherit from asyncio's classes.
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the running response, whole only if it was one that ends by close."""
        handler, self._handler = self._handler, None
        self._transport = None
        self._on_gone(self)
        if handler is not None:
            whole = self._until_close and exc is None
            handler.on_response_end(None if whole else "the upstream closed the connection before the response was whole")

    def data_received(self, data: bytes) -> None:
        """Take bytes of the running response; a malformed one closes the connection, and so does one that nobody asked for."""
        handler, parser = self._handler, self._parser
        if handler is None:
            self.close()
            return
        if parser is None:
            parser, data = self._read(handler, data)
            if parser is None:
                return
        self._is_quiet = True
        try:
            parser.feed_data(data)
            self._quiet_bytes = self._quiet_bytes + len(data) if self._is_quiet else 0
            if self._quiet_bytes > self._head_limit and not self._is_whole:
                raise httptools.HttpParserError("response headers are too large")
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._keeps = False
            if not self._is_whole:
                self._fail(error)
                return
        if self._is_whole:
            self._parser = None
            self._headers, self._header_bytes, self._quiet_bytes, self._is_whole = {}, 0, 0, False
            self._end(keeps=self._keeps)

    # the caller's side

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send_request(self, request: bytes, handler: ResponseHandler) -> None:
        """Write a whole request; ``handler`` hears the answer. The connection must be idle and open.

        It is written behind all that this turn of the loop does, together with those of others: an upstream that sleeps is
        woken once, and waking it takes a fifth of what a request costs.
        """
        assert self._transport is not None
        self._handler = handler
        self._until_close = self.head_seen = False
        self._call_soon(self._write, request)

    def _write(self, request: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(request)

    def pause(self) -> None:
        """Stop reading; TCP then holds the upstream back."""
        self._is_paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        self._is_paused = False
        if self._transport is not None:
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Drop the running response without telling its handler; the upstream sees a closed connection."""
        self._handler = None
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # what is read here

    def _read(self, handler: ResponseHandler, data: bytes) -> tuple[httptools.HttpResponseParser | None, bytes]:
        """Take a remembered head, and bytes of a body of known length; return what is left for llhttp, None = nothing."""
        if self._left:
            self._take_body(handler, data, self._left)
            return None, b""
        found = self._heads.find(data)
        if found is None:
            self._first = data
            self._parser = httptools.HttpResponseParser(self)
            return self._parser, data
        head, size, length = found
        self.head_seen = True
        if length == len(data) - size and not self._is_paused:
            self._handler, self.used = None, True
            if self.is_open:
                self._on_idle(self)
            else:
                self.close()
            handler.on_response_whole(head.status, head.headers, data[size:])
            return None, b""
        handler.on_response_head(head.status, head.headers)
        if length >= 0:
            self._take_body(handler, data[size:], length)
            return None, b""
        self._parser = httptools.HttpResponseParser(self)
        self._parser.feed_data(_CHUNKED_HEAD)
        return self._parser, data[size:]

    def _take_body(self, handler: ResponseHandler, data: bytes, length: int) -> None:
        """Take bytes of a body of which ``length`` are still to come."""
        self._left = max(0, length - len(data))
        surplus = data[length:]
        if body := data[:length] if surplus else data:
            handler.on_response_data(body)
        # Line ends behind a body mean nothing, to llhttp either.
        if not self._left:
            self._end(keeps=not surplus.strip(b"\r\n"))

    def _end(self, *, keeps: bool) -> None:
        """Tell the end of a whole response, unless its handler gave it up; then the connection is idle, or closes."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        self.used = True
        if keeps and self.is_open:
            if self._is_paused:
                self.resume()  # what comes while it is idle has to be seen
            self._on_idle(self)
        else:
            self.close()
        handler.on_response_end(None)

    # what llhttp reads

    def _fail(self, error: Exception) -> None:
        handler, self._handler = self._handler, None
        self.close()
        if handler is not None:
            handler.on_response_end(f"the upstream sent malformed HTTP: {error}")

    def on_message_begin(self) -> None:
        """Refuse what comes behind the response: nobody asked for it."""
        if self._is_whole:
            raise httptools.HttpParserError("more than one response")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header; a trailer is only counted."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self._head_limit:
            raise httptools.HttpParserError("response headers are too large")
        if not self.head_seen:
            key = name.decode("latin-1").lower()
            text = value.decode("latin-1")
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """Hand on the head, unless it is an interim response; remember it if it is of the usual kind."""
        parser, first, headers = self._parser, self._first, self._headers
        assert parser is not None
        if self.head_seen:
            return
        self._first = b""
        status = parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        self.head_seen, self._is_quiet = True, False
        coding, is_sized = headers.get("transfer-encoding", "").lower(), "content-length" in headers
        self._until_close = not is_sized and "chunked" not in coding and status not in _WITHOUT_BODY
        headers = {name: value for name, value in headers.items() if name not in _HOP_HEADERS}
        if (coding == "chunked" or (is_sized and not coding)) and parser.should_keep_alive():
            self._heads.keep(first, status, headers, is_chunked=not is_sized)
        if self._handler is not None:
            self._handler.on_response_head(status, headers)

    def on_body(self, data: bytes) -> None:
        self._is_quiet = False
        if self._handler is not None:
            self._handler.on_response_data(data)

    def on_message_complete(self) -> None:
        """Note that the response is whole, and whether the upstream takes another request."""
        if self.head_seen and self._parser is not None:
            self._is_whole, self._keeps = True, self._parser.should_keep_alive()


class ConnectionPool:
    """Idle connections to one address. ``server_name`` is checked by TLS while ``address`` is what is dialled."""

    tls: ssl.SSLContext | None = None
    """What new connections are verified with; None = they are in clear."""

    def __init__(self, *, address: str, port: int, server_name: str, connect_s: float, idle_s: float = 30.0) -> None:
        self._address = address
        self._port = port
        self._server_name = server_name
        self._connect_s = connect_s
        self._idle_s = idle_s
        self._heads = HeadMemory()
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    def take_idle(self) -> Connection | None:
        """Return an idle connection that is still open, newest first."""
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now - connection.idle_since < self._idle_s:
                return connection
            connection.close()
        return None

    async def connect(self) -> Connection:
        """Open a new connection. Raises OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self._connect_s):
            _transport, connection = await loop.create_connection(
                lambda: Connection(self._heads, self._put_idle, self._forget, loop.call_soon),
                self._address,
                self._port,
                ssl=self.tls,
                server_hostname=self._server_name if self.tls is not None else None,
            )
        self._open.add(connection)
        return connection

    def close(self) -> None:
        self._idle.clear()
        for connection in list(self._open):
            connection.close()

    def _put_idle(self, connection: Connection) -> None:
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
