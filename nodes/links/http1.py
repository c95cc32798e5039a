"""A small HTTP/1.1 client for the frame path: one request at a time on a connection, answers by callback.

A general client spends more on one chunk than the rest of the gateway does; this one calls the sink from
``data_received``. Requests carry a body of known length; answers may be chunked, sized or ended by close (RFC 9112).
No redirects, no cookies, no decompression: the caller never asks for any.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from core.limits import limits


class ResponseHandler(Protocol):
    """Receives one response."""

    def on_response_head(self, status: int, headers: dict[str, str]) -> None:
        """Status and headers, names in lower case, repeated ones joined by a comma."""

    def on_response_data(self, data: bytes) -> None:
        """Body bytes."""

    def on_response_end(self, error: str | None) -> None:
        """The response is whole (None), or what broke it. ``Connection.head_seen`` says how far it came."""


class Connection(asyncio.Protocol):
    """One connection to an upstream. ``on_idle`` is called when it can carry another request."""

    def __init__(self, on_idle: Callable[[Connection], None], on_gone: Callable[[Connection], None]) -> None:
        self._head_limit = limits().nodes.http_head_bytes
        self._on_idle = on_idle
        self._on_gone = on_gone
        self._transport: asyncio.Transport | None = None
        self._handler: ResponseHandler | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._until_close = False
        self.used = False
        self.head_seen = False
        self.idle_since = 0.0

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
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
        """Feed the parser; a malformed response closes the connection."""
        if self._parser is None or self._handler is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            handler, self._handler = self._handler, None
            self.close()
            if handler is not None:
                handler.on_response_end(f"the upstream sent malformed HTTP: {error}")

    # the caller's side

    @property
    def is_open(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    def send_request(self, request: bytes, handler: ResponseHandler) -> None:
        """Write a whole request; ``handler`` hears the answer. The connection must be idle and open."""
        assert self._transport is not None
        self._handler = handler
        self._parser = httptools.HttpResponseParser(self)
        self._headers = {}
        self._header_bytes = 0
        self._until_close = False
        self.head_seen = False
        self.resume()  # the response before may have ended while its reader was paused
        self._transport.write(request)

    def pause(self) -> None:
        """Stop reading; TCP then holds the upstream back."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None:
            self._transport.resume_reading()

    def abandon(self) -> None:
        """Drop the running response without telling its handler; the upstream sees a closed connection."""
        self._handler = None
        self.close()

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    # httptools callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > self._head_limit:
            raise httptools.HttpParserError("response headers are too large")
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """Hand on the head, unless it is an interim response."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:
            self._headers = {}
            return
        self.head_seen = True
        framed = "content-length" in self._headers or "chunked" in self._headers.get("transfer-encoding", "").lower()
        self._until_close = not framed and status not in (204, 304)
        if self._handler is not None:
            self._handler.on_response_head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """Hand on body bytes."""
        if self._handler is not None:
            self._handler.on_response_data(data)

    def on_message_complete(self) -> None:
        """Hand on the end and go idle, or close when the upstream wants that."""
        if not self.head_seen:
            return
        assert self._parser is not None
        handler, self._handler = self._handler, None
        keep = self._parser.should_keep_alive() and self.is_open
        self.used = True
        if keep:
            self._on_idle(self)
        else:
            self.close()
        if handler is not None:
            handler.on_response_end(None)


class ConnectionPool:
    """Idle connections to one address. ``server_name`` is checked by TLS while ``address`` is what is dialled."""

    def __init__(
        self, *, address: str, port: int, server_name: str, tls: ssl.SSLContext | None, connect_s: float, idle_s: float = 30.0
    ) -> None:
        self._address = address
        self._port = port
        self._server_name = server_name
        self._tls = tls
        self._connect_s = connect_s
        self._idle_s = idle_s
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
                lambda: Connection(self._put_idle, self._forget),
                self._address,
                self._port,
                ssl=self._tls,
                server_hostname=self._server_name if self._tls is not None else None,
            )
        self._open.add(connection)
        return connection

    def close(self) -> None:
        """Close every connection; running responses end as broken."""
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
