"""The client's side of one HTTP exchange: its headers, its body, and ordered writing that notices when it left.

The scope carries the line to the client (``SCOPE_LINE``): it writes to the socket, reports the client's loss by a call and can
abort. An ASGI server's own ``send`` and a task that watches ``receive`` would cost each request more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from core.limits import GatewayLimits
from gateway.errors import BodyTooLarge, ClientLeft, ClientTooSlow, GatewayError
from gateway.values import Header, HeaderView

Scope = dict[str, Any]
"""An ASGI scope; the specification leaves its values open."""
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
T = TypeVar("T")

SCOPE_LINE = "muster.line"


class Line(Protocol):
    """Where one response is written, and what may be done with the connection beyond ASGI.

    What is put after the peer went, or after ``stop``, is forgotten.
    """

    @property
    def is_blocked(self) -> bool:
        """Whether the peer does not keep up: something waits that was put while the line was full."""

    @property
    def is_dead(self) -> bool:
        """Whether what is put is forgotten."""

    @property
    def waiting_bytes(self) -> int:
        """Put since the line was full, and not known to be taken."""

    def begin(
        self, *, limit_bytes: int, timeout_s: float, on_stuck: Callable[[str], None], on_drained: Callable[[], None]
    ) -> None:
        """Set what waits at most, and for how long nothing may be taken; ``on_stuck`` is called once when either is passed.

        ``on_drained`` is called when the peer has taken what waited.
        """

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """Put status and headers; a body without ``content-length`` is chunked."""

    def write(self, data: bytes) -> None:
        """Put body bytes."""

    def finish(self, data: bytes) -> None:
        """Put the last body bytes."""

    def stop(self) -> None:
        """Write nothing more and forget what waits."""

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Write a whole response in one piece; nothing was written for this request before."""

    def set_lost_callback(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called once when the peer is gone."""

    def close_after_response(self) -> None:
        """Do not keep the connection for another request."""

    def abort(self) -> None:
        """Reset the connection at once."""


class ClientConnection:
    """One request of one client. ``wait`` is the only way to block on its behalf: it ends when the client leaves."""

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        *,
        limits: GatewayLimits,
        headers: HeaderView | None = None,
        body: bytes | None = None,
    ) -> None:
        self.scope = scope
        self.headers = HeaderView(scope["headers"]) if headers is None else headers
        # The whole request body, where the server has it already: it knows the bound too.
        self._body = body
        self._receive = receive
        self._limits = limits
        self.line: Line = scope["extensions"][SCOPE_LINE]
        self._waiting: asyncio.Future[Any] | None = None  # of whatever type the current wait has
        self._gone: GatewayError | None = None
        self.on_gone: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        # What was said while nothing may be said yet (``hold``).
        self._held: list[Callable[[], None]] | None = None
        self._held_bytes = 0
        self._permission: asyncio.Future[None] | None = None
        # Why what was held is never said; whoever waits next is told.
        self._failure: GatewayError | None = None
        self.line.begin(
            limit_bytes=limits.max_buffer_bytes,
            timeout_s=limits.client_write_s,
            on_stuck=self._take_stuck,
            on_drained=self._take_drained,
        )
        self.common: tuple[Header, ...] = ()
        """Headers of every answer to this client."""
        self.started = False
        self.finished = False
        self.tail = b"\n\n"
        """The body bytes written last."""

    @property
    def address(self) -> str:
        return str((self.scope.get("client") or ("unknown", 0))[0])

    @property
    def is_gone(self) -> bool:
        return self._gone is not None

    @property
    def is_blocked(self) -> bool:
        """Whether the client reads slower than the answer comes, or much of it is held back."""
        return self.line.is_blocked or self._held_bytes > self._limits.hold_bytes

    async def read_body(self, limit: int | None = None) -> bytes:
        """Return the whole request body, of at most ``limit`` bytes. Raises BodyTooLarge, ClientLeft.

        The server watches the deadline of the body.
        """
        if self._body is not None:
            return self._body
        limit = self._limits.max_body_bytes if limit is None else limit
        declared = self.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > limit):
            self.close_after_response()
            raise BodyTooLarge(f"The body has {declared[:20]} bytes; at most {limit} are accepted.")
        event = await self._receive_body()
        if not event.get("more_body", False):
            body: bytes = event.get("body", b"")
            if len(body) > limit:
                raise BodyTooLarge(f"The body is larger than the {limit} bytes that are accepted.")
            return body
        parts = [event.get("body", b"")]
        size = len(parts[0])
        while event.get("more_body", False):
            event = await self._receive_body()
            parts.append(event.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                self.close_after_response()
                raise BodyTooLarge(f"The body is larger than the {limit} bytes that are accepted.")
        return b"".join(parts)

    def watch(self) -> None:
        """Notice from here on when the client leaves. Call once the body was read."""
        self.line.set_lost_callback(self._take_lost)

    def unwatch(self) -> None:
        """Stop watching; the connection may carry another request."""
        self.on_gone = None
        self.line.set_lost_callback(None)

    async def wait(self, future: asyncio.Future[T]) -> T:
        """Return the result of a future, never of a task. Raises ClientLeft once the client is gone, or why ``hold`` failed."""
        if (error := self._gone or self.settle()) is not None:
            future.cancel()
            raise error
        self._waiting = future
        try:
            return await future
        finally:
            self._waiting = None

    async def wait_for_work(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what ``work`` comes to. Raises what it raises, and ClientLeft once the client is gone; it ends then."""
        loop = asyncio.get_running_loop()
        task, ended = loop.create_task(work), loop.create_future()

        def end(done: asyncio.Task[T]) -> None:
            _ = done.cancelled() or done.exception()  # nobody else asks for it once the client is gone
            if not ended.done():
                ended.set_result(None)

        task.add_done_callback(end)
        try:
            await self.wait(ended)
            return task.result()
        finally:
            task.cancel()

    def hold(self, permission: asyncio.Future[None]) -> None:
        """Keep back whatever is said until ``permission`` is done.

        When it fails, what was said is forgotten, as if nothing had been; ``wait`` or ``drain`` raises its error, once.
        """
        self._held, self._permission = [], permission
        permission.add_done_callback(self._take_permission)

    def settle(self) -> GatewayError | None:
        """Take what ``hold`` came to, if that is known; return why nothing may be said of what was held, once."""
        if self._permission is not None and self._permission.done():
            self._take_permission(self._permission)
        failure, self._failure = self._failure, None
        return failure

    def start(self, status: int, headers: Sequence[Header]) -> None:
        self.started = True
        if self._held is not None:
            self._held.append(partial(self.line.start, status, [*headers, *self.common]))
        else:
            self.line.start(status, [*headers, *self.common] if self.common else headers)

    def write(self, data: bytes) -> None:
        self.tail = data
        if self._held is not None:
            self._held.append(partial(self.line.write, data))
            self._held_bytes += len(data)
        else:
            self.line.write(data)

    def finish(self, data: bytes = b"") -> None:
        self.finished = True
        if self._held is not None:
            self._held.append(partial(self.line.finish, data))
            self._held_bytes += len(data)
        else:
            self.line.finish(data)

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Send a whole response, in one write unless a part of an answer waits."""
        self.started = self.finished = True
        if self._held is not None:
            self._held.append(partial(self._respond, status, headers, body))
            self._held_bytes += len(body)
        else:
            self._respond(status, headers, body)

    def close_after_response(self) -> None:
        self.line.close_after_response()

    def abort(self) -> None:
        """Reset the connection: the only honest end of a response that was cut."""
        self._let_go()
        self.line.abort()

    async def drain(self) -> None:
        """Wait until the server has taken everything written. Raises ClientLeft, ClientTooSlow, what ``hold`` came to.

        An ASGI server cuts a response whose application returns while a part of it still waits here.
        """
        if (failure := self.settle()) is not None:
            raise failure
        while self._held is not None or self.line.is_blocked:
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_drained = lambda drained=drained: None if drained.done() else drained.set_result(None)
            try:
                await self.wait(drained)
            finally:
                self.on_drained = None

    # inside

    async def _receive_body(self) -> dict[str, Any]:
        event = await self._receive()
        if event["type"] == "http.disconnect":
            raise ClientLeft
        return event

    def _respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        if not self.line.is_blocked and not self.line.is_dead:
            self.line.respond(status, [*headers, *self.common] if self.common else headers, body)
            return
        self.line.start(status, [*headers, *self.common, (b"content-length", b"%d" % len(body))])
        self.line.finish(body)

    def _take_permission(self, permission: asyncio.Future[None]) -> None:
        if self._permission is None:
            return
        held, self._held, self._held_bytes, self._permission = self._held, None, 0, None
        if held is None or permission.cancelled():
            return  # the client left
        error = permission.exception()
        if error is None:
            for say in held:
                say()
            if not self.line.is_blocked:
                self._take_drained()
            return
        assert isinstance(error, GatewayError)
        self.started = self.finished = False
        if self._waiting is None:
            self._failure = error
        elif not self._waiting.done():
            self._waiting.set_exception(error)
        elif self._waiting is not permission:  # whoever waits for that is told by it
            self._failure = error

    def _let_go(self) -> None:
        self._held, self._held_bytes = None, 0
        self.line.stop()

    def _take_lost(self) -> None:
        self._leave(ClientLeft())

    def _take_stuck(self, reason: str) -> None:
        del reason
        self._leave(ClientTooSlow())
        self.abort()

    def _take_drained(self) -> None:
        if self.on_drained is not None:
            self.on_drained()

    def _leave(self, error: GatewayError) -> None:
        if self._gone is not None:
            return
        self._gone = error
        self._let_go()
        if self.on_gone is not None:
            self.on_gone()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)


_PROXY_HEADERS = (
    "forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-port", "x-forwarded-proto", "x-forwarded-server",
    "x-original-forwarded-for", "x-real-ip", "cf-connecting-ip", "true-client-ip",
)  # fmt: skip


def came_directly(scope: Mapping[str, Any], headers: Mapping[str, str]) -> bool:
    """Whether a request (``scope``: of ASGI) comes from a program on this machine and nothing says that it was passed on.

    A proxy that hides that it is one cannot be seen.
    """
    # The peer of the connection, whatever a header says; none is a socket of this machine.
    client = scope.get("client")
    if client and not _is_loopback(str(client[0])):
        return False
    # nginx speaks HTTP/1.0 to what stands behind it unless told otherwise.
    if scope.get("http_version") == "1.0" or any(name in headers for name in _PROXY_HEADERS):
        return False
    # A proxy may keep the name that its caller asked for, and a page may have made its own name lead here.
    host = _read_host(headers.get("host", ""))
    return not host or host == "localhost" or _is_loopback(host)


def _is_loopback(text: str) -> bool:
    try:
        address = ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _read_host(value: str) -> str:
    try:
        return urlsplit(f"//{value}").hostname or value
    except ValueError:
        return value
