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
from collections.abc import Callable, Container, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, Protocol, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from core.limits import limits
from gateway.request.client import SCOPE_LINE
from gateway.values import HeaderView
from wire.contract import ErrorCode
from wire.http_head import TOO_LARGE, HeadFault, find_head_fault, find_size_fault
from wire.limits import WIRE

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class _TooManyWaiting(Exception):
    """Ends the parsing of a connection; what was taken of it is still answered."""


class _HeadRefused(Exception):
    """Ends the parsing of a connection whose next request is answered with ``_fault``."""


BeginFast = Callable[["GatewayHttpProtocol", "KnownHead", bytes], bool]
"""``(connection, head, body)``; whether the request was taken."""
ServeKnown = Callable[[dict[str, Any], HeaderView, bytes], Coroutine[Any, Any, None]]
"""``(scope, headers, body)``; the values of an ASGI scope are open."""


class Fast(Protocol):
    """A request that is served without a task (``fast_path``)."""

    def take_lost(self) -> None:
        """The client is gone."""


class KnownHead:
    """A request head that llhttp took and that comes again. ``scope``: the ASGI scope without what differs by connection."""

    __slots__ = ("headers", "scope")

    def __init__(self, scope: Mapping[str, Any]) -> None:  # Any: an ASGI scope
        self.scope = {name: scope[name] for name in scope if name not in {"client", "server", "extensions", "state"}}
        self.headers = HeaderView(scope["headers"])


class KnownRequests:
    """Heads of requests that were answered with 200, by their bytes without the line of ``content-length``.

    A client sends the same head with every request, but for the length of the body. Whoever has no good key fills nothing
    here, and nothing is taken from here that llhttp did not take byte by byte, but for the digits of the length.

    ``paths``: those of which heads are remembered. ``serve``: answers a request by its ASGI scope, headers and body.
    ``begin``: takes a request before that, or says no.
    """

    def __init__(self, paths: Container[str], serve: ServeKnown, begin: BeginFast) -> None:
        self._paths = paths
        self.serve = serve
        self.begin = begin
        self._bounds = limits().gateway
        self._heads: dict[bytes, KnownHead] = {}

    def find(self, data: bytes) -> tuple[KnownHead, bytes] | None:
        """Return the head and the body of a whole request whose head is known, None for anything else."""
        end = data.find(b"\r\n\r\n", 0, self._bounds.known_head_bytes)
        split = _split_head(data, end)
        if split is None or len(data) != end + 4 + split[1] or split[1] > self._bounds.max_body_bytes:
            return None  # one that is too large is refused by who reads it in parts
        head = self._heads.get(split[0])
        return None if head is None else (head, data[end + 4 :])

    def learn(self, data: bytes, scope: Mapping[str, Any]) -> None:  # Any: an ASGI scope
        """Remember the head of a request, of which ``data`` begins with the bytes, unless something about it is unusual."""
        split = _split_head(data, data.find(b"\r\n\r\n", 0, self._bounds.known_head_bytes))
        if split is None or split[0] in self._heads or scope["path"] not in self._paths:
            return
        if scope["method"] != "POST" or scope["http_version"] != "1.1":
            return
        if not _UNUSUAL_HEADERS.isdisjoint(name for name, _ in scope["headers"]):
            return
        if len(self._heads) >= self._bounds.known_heads:
            self._heads.clear()
        self._heads[split[0]] = KnownHead(scope)


_LENGTHS = (b"\r\ncontent-length: ", b"\r\nContent-Length: ")
# A head with ``traceparent`` never comes again.
_UNUSUAL_HEADERS = frozenset({b"connection", b"expect", b"te", b"traceparent", b"trailer", b"transfer-encoding", b"upgrade"})


def _split_head(data: bytes, end: int) -> tuple[bytes, int] | None:
    """Return a head without the line of ``content-length``, and the length it says; None where it stands in another form."""
    for name in _LENGTHS:
        at = data.find(name, 0, end)
        if at > 0:
            stop = data.find(b"\r\n", at + len(name), end)
            number = data[at + len(name) : stop if stop > 0 else end]
            if not number.isdigit() or len(number) > 8:
                return None
            return data[:at] + data[stop:end] if stop > 0 else data[:at], int(number)
    return None


class KnownCycle:
    """uvicorn's books on a request whose head was known and whose body came with it: as much of its cycle as is looked at."""

    __slots__ = (
        "body", "default_headers", "disconnected", "keep_alive", "message_event", "more_body", "on_response",
        "response_complete", "response_started", "scope", "transport", "waiting_for_100_continue",
    )  # fmt: skip

    def __init__(self, protocol: GatewayHttpProtocol, scope: dict[str, Any]) -> None:  # Any: an ASGI scope
        self.scope = scope
        self.transport = protocol.transport
        self.default_headers = protocol.server_state.default_headers
        self.on_response = protocol.on_response_complete
        self.message_event = _NOBODY_WAITS
        self.body = b""
        self.keep_alive = True
        self.disconnected = self.more_body = self.response_started = self.response_complete = False
        self.waiting_for_100_continue = False


_NOBODY_WAITS = asyncio.Event()
"""Stands for the event of a body that has come."""


def _say_nothing() -> None:
    """Stand for the callback of a request that is over."""


class Handle:
    """The line of one response (``gateway.request.client.Line``), and its request's hold on the connection.

    Writing to the transport costs a third of what an ASGI event does; what it takes is bounded by ``begin``.
    """

    __slots__ = (
        "_has_body", "_is_chunked", "_limit_bytes", "_on_drained", "_on_stuck", "_protocol", "_seen_bytes", "_timeout_s",
        "_timer", "callback", "cycle", "is_blocked", "is_dead", "request", "waiting_bytes",
    )  # fmt: skip

    def __init__(self, protocol: GatewayHttpProtocol) -> None:
        self._protocol = protocol
        self.cycle: RequestResponseCycle | KnownCycle | None = None
        self.request = b""
        """The first bytes of a request that came whole: its head may be one to remember."""
        self.callback: Callable[[], None] | None = None
        self.is_blocked = self.is_dead = False
        self._is_chunked = self._has_body = True
        self._timer: asyncio.TimerHandle | None = None
        self.waiting_bytes = 0

    def begin(
        self, *, limit_bytes: int, timeout_s: float, on_stuck: Callable[[str], None], on_drained: Callable[[], None]
    ) -> None:
        self._limit_bytes, self._timeout_s = limit_bytes, timeout_s
        self._on_stuck, self._on_drained = on_stuck, on_drained

    def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        cycle = self.cycle
        if self.is_dead or cycle is None or cycle.disconnected or cycle.response_started:
            return
        self._note_start(cycle, status)
        cycle.waiting_for_100_continue = False
        self._has_body = cycle.scope["method"] != "HEAD" and status not in (204, 304)
        self._is_chunked = self._has_body
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
            if name == b"content-length":
                self._is_chunked = False
        if not cycle.keep_alive:
            parts.append(b"connection: close\r\n")
        parts.append(b"transfer-encoding: chunked\r\n\r\n" if self._is_chunked else b"\r\n")
        self._put(b"".join(parts))

    def write(self, data: bytes) -> None:
        cycle = self.cycle
        if not data or self.is_dead or not self._has_body or cycle is None or cycle.disconnected or cycle.response_complete:
            return
        self._put(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def finish(self, data: bytes) -> None:
        """Write the last body bytes, and close uvicorn's books on the request."""
        cycle = self.cycle
        if self.is_dead or cycle is None or cycle.disconnected or cycle.response_complete:
            return
        if self._is_chunked:
            self._put(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")
        elif data and self._has_body:
            self._put(data)
        self._end(cycle, is_early=False)

    def stop(self) -> None:
        self.is_dead, self.is_blocked = True, False
        self._stop_timer()

    def take_drained(self) -> None:
        if self.is_blocked:
            self.is_blocked, self.waiting_bytes = False, 0
            self._stop_timer()
            self._on_drained()

    def _put(self, data: bytes) -> None:
        protocol = self._protocol
        if protocol.flow.write_paused:
            self.waiting_bytes += len(data)
            if self.waiting_bytes > self._limit_bytes:
                self._fail("too many bytes wait for this peer")
                return
            if not self.is_blocked:
                self.is_blocked, protocol.writing = True, self
                self._seen_bytes = protocol.transport.get_write_buffer_size() + len(data)
                self._timer = protocol.loop.call_later(self._timeout_s, self._watch)
            else:
                self._seen_bytes += len(data)
        protocol.transport.write(data)

    def _watch(self) -> None:
        left_bytes = self._protocol.transport.get_write_buffer_size()
        if left_bytes >= self._seen_bytes:
            self._timer = None
            self._fail(f"the peer took nothing for {self._timeout_s:g} s")
            return
        self._seen_bytes = left_bytes
        self._timer = self._protocol.loop.call_later(self._timeout_s, self._watch)

    def _fail(self, reason: str) -> None:
        self.stop()
        self._on_stuck(reason)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

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
        self._note_start(cycle, status)
        self._end(cycle, is_early=is_early)

    def _note_start(self, cycle: RequestResponseCycle | KnownCycle, status: int) -> None:
        cycle.response_started = True
        known = self._protocol.known
        # Whoever has no good key is not answered with 200, and fills no memory.
        if self.request and status == 200 and known is not None:
            known.learn(self.request, cycle.scope)

    def _end(self, cycle: RequestResponseCycle | KnownCycle, *, is_early: bool) -> None:
        cycle.response_complete = True
        cycle.message_event.set()
        if is_early or (self._protocol.is_deaf and not self._protocol.pipeline):
            self._protocol.begin_linger()
        elif not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()


class GatewayHttpProtocol(HttpToolsProtocol):
    """One client connection."""

    # With uvicorn's these would be more than 30, and each one would be looked up in a dictionary.
    __slots__ = (
        "_ahead_bytes", "_body_open", "_fault", "_forgotten_bytes", "_handle", "_header_bytes", "_headers_open", "_idle_since",
        "_is_lingering", "_is_mixed", "_limits", "_next_known", "_read_bytes", "_timer", "_whole", "_worker", "fast",
        "is_deaf", "is_lost", "watching", "writing",
    )  # fmt: skip

    known: ClassVar[KnownRequests | None] = None
    """None = every request goes through ASGI."""
    header_timeout_s: ClassVar[float] = 10.0
    body_timeout_s: ClassVar[float] = 60.0

    watching: set[Handle]
    writing: Handle | None
    """Whose response waits for the peer to read."""
    is_lost: bool
    is_deaf: bool
    """Whether what still comes is thrown away: nothing of it will be answered."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.watching = set()
        self.writing = None
        self.is_lost = False
        self._handle: Handle | None = None
        self.fast: Fast | None = None
        """Who serves the request that is served without a task."""
        # Loop time since which nothing is served here; None = something is, or comes.
        self._idle_since: float | None = None
        self._worker: asyncio.Task[None] | None = None
        """Serves the requests whose head is known, one after the other."""
        self._next_known: asyncio.Future[tuple[KnownCycle, Coroutine[Any, Any, None]]] | None = None
        """What it waits for."""
        # The read that is parsed, while it may turn out to be one whole request.
        self._whole = b""
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
        self.is_lost = True
        self._stop_timer()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        if self._next_known is not None:
            self._next_known.cancel()
            self._next_known = None  # what is handed over now gets a task of its own
        super().connection_lost(exc)
        if self.fast is not None:
            self.fast.take_lost()
        watching, self.watching = self.watching, set()
        for handle in watching:
            if handle.cycle is not None:
                handle.cycle.disconnected = True
            if handle.callback is not None:
                handle.callback()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._handle = Handle(self)
        self.scope["extensions"] = {SCOPE_LINE: self._handle}  # type: ignore[dict-item]
        self._headers_open = True
        self._header_bytes = 0

    def on_headers_complete(self) -> None:
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
        self._header_bytes = 0
        self._is_mixed = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_mixed = True
        if self.headers and (fault := find_size_fault(b"", self.headers)):
            self._fault = fault
            raise _HeadRefused
        self._body_open = False
        self._stop_timer()
        if self._handle is not None:
            # Learnt from only if the read began with this request and holds nothing else.
            self._handle.request, self._whole = self._whole[: self._limits.known_head_bytes], b""
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse; what is still to come of a request has to arrive in time. Most requests come whole and need no timer."""
        if self.is_deaf:
            self._forget(data)
            return
        self._read_bytes = len(data)
        self._is_mixed = False
        self._whole = b""
        if self.known is not None and self._is_between():
            found = self.known.find(data)
            if found is not None:
                self._stop_timer()
                self._unset_keepalive_if_required()
                if not self.known.begin(self, *found):
                    self._begin_known(self.known, *found)
                return
            self._whole = data
        super().data_received(data)
        if self.is_lost or self.is_deaf:
            return
        if self.flow.read_paused and (self.watching or self.fast is not None):
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

    def resume_writing(self) -> None:
        super().resume_writing()
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.take_drained()

    def on_response_complete(self) -> None:
        """An answer is out; another request may be served, unless this one was refused before it had come."""
        if self._is_lingering:
            self.server_state.total_requests += 1
            return
        self._ahead_bytes = 0
        if self._body_open:  # the next request's, which was not read while this one was answered
            self._start_timer()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._begin_idle()

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
        """An idle connection ends; one whose client never took its answer is reset, or it would linger.

        The timer is not set anew with each request: it looks for how long the connection has been idle.
        """
        self.timeout_keep_alive_task = None
        if self._idle_since is None:
            return
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        elif self.transport.get_write_buffer_size() > 0:
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

    def _is_between(self) -> bool:
        cycle = self.cycle
        is_free = (cycle is None or cycle.response_complete) and not (self._headers_open or self._body_open or self.pipeline)
        return is_free and not self.transport.is_closing()

    def _begin_known(self, known: KnownRequests, head: KnownHead, body: bytes) -> None:
        handle = Handle(self)
        scope = {**head.scope, "client": self.client, "server": self.server, "extensions": {SCOPE_LINE: handle}}
        cycle = handle.cycle = self.cycle = KnownCycle(self, scope)  # type: ignore[assignment]
        self.serve_beside(cycle, known.serve(scope, head.headers, body))

    def serve_beside(self, cycle: KnownCycle, answering: Coroutine[Any, Any, None]) -> None:
        """Have the connection's own task answer the request of ``cycle``."""
        if self._next_known is not None:
            self._next_known.set_result((cycle, answering))
            self._next_known = None
        else:
            self._worker = self.loop.create_task(self._work(cycle, answering))
        assert self._worker is not None
        self.tasks.add(self._worker)

    async def _work(self, cycle: KnownCycle, answering: Coroutine[Any, Any, None]) -> None:
        own = cast("asyncio.Task[None]", asyncio.current_task())
        # A task for each request would cost more than reading it does.
        while True:
            try:
                await answering
            finally:
                if not cycle.response_complete and not cycle.disconnected:
                    self.transport.close()
                cycle.on_response = _say_nothing
                self.tasks.discard(own)
            if self.is_lost or self._worker is not own:  # the next request came before this one was put away
                return
            self._next_known = self.loop.create_future()
            cycle, answering = await self._next_known

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
        # Bytes that begin no request have stopped the clock of an idle connection.
        is_idle = self.cycle is not None and self.cycle.response_complete and not self.transport.is_closing()
        if is_idle and self._idle_since is None:
            self._begin_idle()

    def _begin_idle(self) -> None:
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _unset_keepalive_if_required(self) -> None:
        self._idle_since = None

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
