"""An engine's HTTP server: where it listens, the exchange of a call, short questions with an answer in JSON, a health check."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import ssl
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import TracebackType
from typing import Generic, Self, TypeVar, cast
from urllib.parse import urlsplit

import aiohttp
import httptools
import msgspec
from aiohttp.client_reqrep import ConnectionKey
from multidict import CIMultiDict, CIMultiDictProxy

from runner.engines.port import Call, Health
from runner.errors import EngineError, EngineSilent
from runner.limits import limits
from wire.unreadable import UNREADABLE

Answer = TypeVar("Answer")


class Listing(msgspec.Struct, Generic[Answer]):
    """The answer of ``/v1/models``."""

    data: list[Answer]


# Hop-by-hop headers (RFC 9110 section 7.6.1), credentials, what the runner itself acts on, what some servers take for another
# path or method than those that were checked, and ``x-conversation-id``, which makes llama.cpp go on after its client has left.
NOT_TO_ENGINE = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "expect", "host", "content-length", "accept-encoding", "authorization", "cookie",
    "x-api-key", "x-worker-secret", "forwarded", "x-conversation-id", "x-tenant-id", "x-priority",
    "x-cache-mode", "x-cache-tag", "x-admin-key", "x-http-method", "x-http-method-override", "x-method-override",
    "x-original-url", "x-rewrite-url",
})  # fmt: skip


class HttpResponse:
    """One call and its answer: read with ``read`` or ``readany``, or given to a callback with ``pipe``.

    Entering it sends the call, over ``connection`` where one is given, and waits for the head of the answer. Leaving it lets
    go of the connection.
    """

    def __init__(self, server: HttpServer, head: bytes, body: bytes, connection: _Connection | None = None) -> None:
        self._server = server
        self._call = (head, body)
        self.status = 0
        self._fields: CIMultiDict[str] = CIMultiDict()
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._whole: bytes | None = None
        self._error: Exception | None = None
        self._is_over = False
        self.take: Callable[[bytes], None] | None = None
        """Who gets the bytes of the body at once."""
        self._most_held = math.inf

    async def __aenter__(self) -> Self:
        self._connection = connection = self._connection or self._server.take_idle() or await self._server.connect()
        self._most_held = connection.piece_bytes
        connection.send(self, *self._call)
        self._call = (b"", b"")  # a large one is not kept for as long as its answer lasts
        try:
            while not self.status and not self._is_over:
                await self._wait()
            if not self.status:
                self._raise_error()
        except BaseException:
            self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What serving reads, as ``port.Response`` says

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        return CIMultiDictProxy(self._fields)

    @property
    def content_type(self) -> str:
        return self._fields.get("content-type", "application/octet-stream").partition(";")[0].strip().lower()

    @property
    def content_length(self) -> int | None:
        told = self._fields.get("content-length", "")
        return int(told) if told.isdecimal() else None

    @property
    def content(self) -> HttpResponse:
        return self

    async def read(self) -> bytes:
        if self._whole is None:
            self.resume()  # nobody but the caller bounds what is held now
            self._most_held = math.inf
            while not self._is_over:
                await self._wait()
            self._raise_error()
            self._whole = self._take_held()
        return self._whole

    async def readany(self) -> bytes:
        while not self._held and not self._is_over:
            await self._wait()
        if self._held:
            self.resume()
            return self._take_held()
        self._raise_error()
        return b""

    async def pipe(self, take: Callable[[bytes], None]) -> None:
        """Call ``take`` with the body as it comes, until its end. Raises aiohttp.ClientError, after what came before."""
        self.take = take
        self.resume()
        if self._held:
            take(self._take_held())  # which may pause
        while not self._is_over:
            await self._wait()
        self._raise_error()

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()

    # What the connection reports

    def take_header(self, name: str, value: str) -> None:
        self._fields.add(name, value)

    def forget_headers(self) -> None:
        self._fields.clear()

    def take_head(self, status: int) -> None:
        self.status = status
        self._wake()

    def hold(self, data: bytes) -> None:
        """Keep bytes of the body, those of one read at once, until they are asked for."""
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > self._most_held:
            self.pause()
        self._wake()

    def end(self, error: Exception | None) -> None:
        self._is_over, self._error, self._connection = True, error, None
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        await self._waiter

    def _take_held(self) -> bytes:
        held, self._held, self._held_bytes = self._held, [], 0
        return held[0] if len(held) == 1 else b"".join(held)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


# A client of our own (RFC 9112): a general one spends more on one piece of an answer than the rest of the runner does. It is
# not the gateway's (``nodes.links.http1``), which is faster for what that needs: requests whole in one write, answers that
# repeat their heads. Engines get bodies of many megabytes in pieces, listen on Unix sockets, and are read by whoever asked.
class _Connection(asyncio.Protocol):
    """One connection to an engine, one request at a time. ``on_idle`` hears that it can carry another."""

    def __init__(self, on_idle: Callable[[_Connection], None]) -> None:
        self._on_idle = on_idle
        self.loop = asyncio.get_running_loop()
        self._head_bytes = limits().engines.head_bytes
        self.piece_bytes = limits().engines.piece_bytes
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._response: HttpResponse | None = None
        self._parts: list[bytes] = []
        self.on_body = self._parts.append  # httptools calls it with each piece; kept until the read is parsed
        self._seen_bytes = 0
        self._ends_by_close = self._is_complete = self._is_kept = self._is_paused = self._is_full = False
        self._rest: memoryview | None = None
        """What of a large request is still to be written."""
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's do not inherit from asyncio's classes

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._rest = None
        if self._response is None:
            return
        if self._response.status and self._ends_by_close and exc is None:
            self._finish(None)
        elif self._response.status:
            self._finish(aiohttp.ClientPayloadError("the engine closed the connection before its answer was whole"))
        elif isinstance(exc, OSError):
            self._finish(aiohttp.ClientOSError(exc.errno or errno.EIO, exc.strerror or str(exc)))
        else:
            self._finish(aiohttp.ServerDisconnectedError())

    def data_received(self, data: bytes) -> None:
        response = self._response
        if response is None or self._parser is None:
            self.close()  # nobody asked
            return
        error: Exception | None = None
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as broken:
            error = aiohttp.ClientPayloadError(f"the engine sent malformed HTTP: {broken}")
        if self._parts:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
            self._parts.clear()
            if response.take is not None:
                response.take(body)
            else:
                response.hold(body)
        if error is not None:
            self.close()
            self._finish(error)
        elif self._is_complete:
            is_kept = self._is_kept and self.is_open and self._rest is None
            self._finish(None)
            if is_kept:
                self.resume()  # whoever read the answer may have left it paused
                self._on_idle(self)
            else:
                self.close()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._write_rest()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, response: HttpResponse, head: bytes, body: bytes) -> None:
        assert self._transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._response = response
        self._seen_bytes, self._ends_by_close, self._is_complete = 0, False, False
        if len(body) <= self.piece_bytes:  # a larger body would hold up the loop in one write
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._rest = memoryview(body)
            self._write_rest()

    def pause(self) -> None:
        if self._transport is not None and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    def abandon(self) -> None:
        self._response = None
        self.close()  # which is what makes an engine stop

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _write_rest(self) -> None:
        while self._rest is not None and not self._is_full and self._transport is not None and self.is_open:
            piece, rest = self._rest[: self.piece_bytes], self._rest[self.piece_bytes :]
            self._rest = rest if len(rest) else None
            self._transport.write(piece)

    def _finish(self, error: Exception | None) -> None:
        response, self._response = self._response, None
        if response is not None:
            response.end(error)

    # httptools calls these

    def on_header(self, name: bytes, value: bytes) -> None:
        self._seen_bytes += len(name) + len(value)
        if self._is_complete:
            raise httptools.HttpParserError("an answer follows that nobody asked for")
        if self._seen_bytes > self._head_bytes:
            raise httptools.HttpParserError("its head is too large")
        if self._response is not None and not self._response.status:  # else a trailer
            self._response.take_header(name.decode("latin-1"), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        response, parser = self._response, self._parser
        assert response is not None
        assert parser is not None
        status = parser.get_status_code()
        if status < 200:  # an interim answer: the one that counts follows
            response.forget_headers()
            return
        headers = response.headers
        is_framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
        self._ends_by_close = not is_framed and status not in {204, 304}
        response.take_head(status)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self._is_complete = self._response is not None and bool(self._response.status)
        self._is_kept = self._parser.should_keep_alive()  # the parser forgets it afterwards


class HttpServer:
    """An engine's HTTP server. ``base_url`` ends before ``/v1``; both fields are set once it is known where it listens."""

    def __init__(self) -> None:
        self._socket = ""
        self._base_url = ""
        self._host = self._path = ""
        self._port = 0
        self._is_tls = False
        self._fixed = b""
        self._idle: list[_Connection] = []
        self._sweeper: asyncio.TimerHandle | None = None
        self.headers: Mapping[str, str] = {}

    @property
    def base_url(self) -> str:
        """Where it listens, empty = nowhere yet."""
        return self._base_url

    @base_url.setter
    def base_url(self, url: str) -> None:
        self.close()
        parts = urlsplit(url)
        self._base_url, self._host, self._path = url, parts.hostname or "", parts.path.rstrip("/")
        self._is_tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._is_tls else 80)
        self._fixed = _say_header("Host", parts.netloc.rpartition("@")[2]) + b"Accept-Encoding: identity\r\n"

    def listen_on(self, socket: str, base_url: str) -> None:
        self._socket, self.base_url = socket, base_url

    def leave(self) -> None:
        """Forget where it listens, and close the connections that no answer is read from."""
        self._socket = self.base_url = ""

    def close(self) -> None:
        """Close the connections that no answer is read from."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        while self._idle:
            self._idle.pop().close()

    def send(self, call: Call, *, path: str | None = None, body: bytes | None = None) -> HttpResponse:
        """Send a call, with another path or body where the adapter had to change them. Raises aiohttp.ClientError, OSError.

        Leaving the context closes the connection unless the answer was read to its end, which is what makes an engine stop.
        """
        payload = call.body if body is None else body
        lines = [f"{call.method} {self._path}{path or call.path} HTTP/1.1\r\n".encode("ascii"), self._fixed]
        lines += [_say_header(name, value) for name, value in call.headers.items() if name.lower() not in NOT_TO_ENGINE]
        lines += [_say_header(name, value) for name, value in self.headers.items()]
        lines.append(b"Content-Length: %d\r\n\r\n" % len(payload) if payload or call.method == "POST" else b"\r\n")
        return HttpResponse(self, b"".join(lines), payload)

    def take_idle(self) -> _Connection | None:
        """Return a connection that is open and waits for a request, the newest first; None when there is none."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self) -> _Connection:
        """Open a connection. Raises aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError."""
        if not self._base_url:  # asyncio would take no host for this machine
            raise aiohttp.ClientConnectionError("it is not known where the engine listens")
        loop = asyncio.get_running_loop()
        make = partial(_Connection, partial(self._put_idle, self._base_url))
        try:
            async with asyncio.timeout(limits().engines.connect_s):
                if self._socket:
                    _, connection = await loop.create_unix_connection(make, self._socket)
                else:
                    context = _trusted() if self._is_tls else None
                    _, connection = await loop.create_connection(make, self._host, self._port, ssl=context)
        except TimeoutError:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {self._base_url} in time") from None
        except OSError as error:
            key = ConnectionKey(self._host, self._port, self._is_tls, True, None, None, None)
            raise aiohttp.ClientConnectorError(key, error) from None
        return connection

    def _put_idle(self, base_url: str, connection: _Connection) -> None:
        if base_url != self._base_url:  # it has moved since
            connection.close()
            return
        loop = connection.loop
        connection.idle_since = loop.time()
        self._idle.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(limits().engines.keepalive_s, self._sweep)

    def _sweep(self) -> None:
        self._sweeper = None
        keepalive_s, kept = limits().engines.keepalive_s, []
        for connection in self._idle:
            if connection.is_open and connection.loop.time() - connection.idle_since < keepalive_s:
                kept.append(connection)
            else:
                connection.close()
        self._idle = kept
        if kept:
            oldest = kept[0]
            self._sweeper = oldest.loop.call_at(oldest.idle_since + keepalive_s, self._sweep)

    async def ask(
        self, method: str, path: str, *, body: object = None, timeout_s: float | None = None,
        headers: Mapping[str, str] | None = None, answer_bytes: int | None = None,
    ) -> tuple[int, bytes]:  # fmt: skip
        """Ask something short; return status and body.

        Raises EngineError when no answer comes, or one of more than ``answer_bytes``, EngineSilent when it is merely late.
        ``timeout_s``: longest wait, infinite = none, None = ``question_s`` of the limits.
        """
        wait_s = limits().engines.question_s if timeout_s is None else timeout_s
        most = limits().engines.answer_bytes if answer_bytes is None else answer_bytes
        data, sent = b"", {"Accept": "application/json", **self.headers, **(headers or {})}
        if body is not None:
            data, sent["Content-Type"] = msgspec.json.encode(body), "application/json"
        lines = [f"{method} {self._path}{path} HTTP/1.1\r\n".encode("ascii"), self._fixed]
        lines += [*(_say_header(name, value) for name, value in sent.items()), b"Content-Length: %d\r\n\r\n" % len(data)]
        answer = bytearray()
        try:
            async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                # A new connection: one that is idle may be closed by the engine at this moment, which must not count as ill.
                async with HttpResponse(self, b"".join(lines), data, await self.connect()) as response:
                    while piece := await response.readany():
                        answer += piece
                        if len(answer) > most:
                            raise EngineError(f"{path} answers with more than {most} bytes")
                    return response.status, bytes(answer)
        except TimeoutError:
            raise EngineSilent(f"{path} was not answered within {wait_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{path} was not answered: {error}") from None

    async def ask_for(self, path: str, kind: type[Answer]) -> Answer | None:
        """Return what ``GET path`` tells; None when that is not 200 with JSON of this kind. Raises EngineError as ``ask``."""
        status, body = await self.ask("GET", path)
        with contextlib.suppress(EngineError):
            return read_answer(body, kind, "") if status == 200 else None
        return None

    async def read_metrics(self) -> str:
        """Return ``/metrics`` as text, empty when it is not answered with 200 in time."""
        try:
            status, text = await self.ask("GET", "/metrics")
        except EngineError:
            return ""
        return text.decode("utf-8", "replace") if status == 200 else ""

    async def check(self, path: str = "/health") -> Health:
        """Ask ``path`` once: 200 is health, another answer or none in time is silence, no connection is unreachable."""
        try:
            status, _ = await self.ask("GET", path, timeout_s=2.0)
        except EngineSilent:
            return Health.SILENT
        except EngineError:
            return Health.UNREACHABLE
        return Health.OK if status == 200 else Health.SILENT


def read_answer(body: bytes, kind: type[Answer], otherwise: str) -> Answer:
    """Return an answer in JSON. Raises EngineError that says ``otherwise`` where it is of another kind."""
    try:
        return msgspec.json.decode(body, type=kind)
    except UNREADABLE:
        raise EngineError(otherwise) from None


def _say_header(name: str, value: str) -> bytes:
    line = f"{name}: {value}\r\n"
    if line.count("\r") > 1 or line.count("\n") > 1 or "\0" in line:
        # A value of a client's with a line end in it would be a header of its own to the engine.
        raise ValueError(f"the header {name[:40]!a} holds the end of a line")
    return line.encode()


@cache
def _trusted() -> ssl.SSLContext:
    return ssl.create_default_context()
