"""The client's side of one HTTP exchange: its headers, its body, and ordered writing that notices when it left.

Works on any ASGI server. On ours, the scope carries a handle on the connection (``SCOPE_HANDLE``) that reports its loss
by a call and can abort it; elsewhere a task watches ``receive``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from core.limits import GatewayLimits
from core.outbox import Outbox
from gateway.errors import BodyTooLarge, ClientLeft, ClientTooSlow, GatewayError, RequestTimeout

Scope = dict[str, Any]
"""An ASGI scope; the specification leaves its values open."""
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Header = tuple[bytes, bytes]
T = TypeVar("T")

SCOPE_HANDLE = "muster.connection"


class ConnectionHandle(Protocol):
    """What our server lets an application do with a connection beyond ASGI."""

    def set_lost_callback(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called once when the peer is gone."""

    def close_after_response(self) -> None:
        """Do not keep the connection for another request."""

    def abort(self) -> None:
        """Reset the connection at once."""

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Write a whole response in one piece; nothing was written for this request before."""


class HeaderView(Mapping[str, str]):
    """The request's headers by lower-case name, decoded when asked for. Of a repeated header the last one counts."""

    __slots__ = ("_raw",)

    def __init__(self, raw: Iterable[Header]) -> None:
        self._raw = dict(raw)

    def __getitem__(self, name: str) -> str:
        return self._raw[name.encode("latin-1")].decode("latin-1")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.encode("latin-1") in self._raw

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._raw)

    def __len__(self) -> int:
        return len(self._raw)


class ClientConnection:
    """One request of one client. ``wait`` is the only way to block on its behalf: it ends when the client leaves."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, limits: GatewayLimits) -> None:
        self.scope = scope
        self.headers = HeaderView(scope["headers"])
        self._receive = receive
        self._limits = limits
        self._handle: ConnectionHandle | None = scope.get("extensions", {}).get(SCOPE_HANDLE)
        self._watcher: asyncio.Task[None] | None = None
        self._waiting: asyncio.Future[Any] | None = None  # of whatever type the current wait has
        self._gone: GatewayError | None = None
        self.on_gone: Callable[[], None] | None = None
        self.on_drained: Callable[[], None] | None = None
        self.outbox = Outbox(
            send,
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
        """Where the connection comes from."""
        return str((self.scope.get("client") or ("unknown", 0))[0])

    @property
    def is_gone(self) -> bool:
        """Whether nobody reads any more."""
        return self._gone is not None

    @property
    def is_blocked(self) -> bool:
        """Whether the client reads slower than the answer comes."""
        return self.outbox.is_blocked

    async def read_body(self, limit: int | None = None) -> bytes:
        """Return the whole request body, of at most ``limit`` bytes. Raises BodyTooLarge, ClientLeft, RequestTimeout."""
        limit = self._limits.max_body_bytes if limit is None else limit
        if self._handle is not None:
            return await self._collect_body(limit)  # the server watches the deadline of the body
        try:
            async with asyncio.timeout(self._limits.body_s):
                return await self._collect_body(limit)
        except TimeoutError:
            self.close_after_response()
            raise RequestTimeout("The request body did not arrive in time") from None

    async def _collect_body(self, limit: int) -> bytes:
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
        if self._handle is not None:
            self._handle.set_lost_callback(self._take_lost)
        else:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def unwatch(self) -> None:
        """Stop watching; the connection may carry another request."""
        self.on_gone = None
        if self._handle is not None:
            self._handle.set_lost_callback(None)
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def wait(self, future: asyncio.Future[T]) -> T:
        """Return the result of a future, never of a task. Raises ClientLeft as soon as the client is gone."""
        if self._gone is not None:
            future.cancel()
            raise self._gone
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

    def start(self, status: int, headers: Sequence[Header]) -> None:
        """Send status and headers."""
        self.started = True
        self.outbox.put({"type": "http.response.start", "status": status, "headers": [*headers, *self.common]}, 0)

    def write(self, data: bytes) -> None:
        """Send body bytes."""
        self.tail = data
        self.outbox.put({"type": "http.response.body", "body": data, "more_body": True}, len(data))

    def finish(self, data: bytes = b"") -> None:
        """Send the last body bytes."""
        self.finished = True
        self.outbox.put({"type": "http.response.body", "body": data, "more_body": False}, len(data))

    def respond(self, status: int, headers: Sequence[Header], body: bytes) -> None:
        """Send a whole response, in one write where the server lets us."""
        if self._handle is not None and not self.is_blocked and not self.outbox.dead:
            self.started = self.finished = True
            self._handle.respond(status, [*headers, *self.common] if self.common else headers, body)
            return
        self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        self.finish(body)

    def close_after_response(self) -> None:
        """Close the connection when the response is out."""
        if self._handle is not None:
            self._handle.close_after_response()

    def abort(self) -> None:
        """Reset the connection: the only honest end of a response that was cut."""
        self.outbox.stop()
        if self._handle is not None:
            self._handle.abort()

    async def drain(self) -> None:
        """Wait until the server has taken everything written. Raises ClientLeft, ClientTooSlow.

        An ASGI server cuts a response whose application returns while a part of it still waits here.
        """
        while self.outbox.is_blocked:
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

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.finished:
            self._take_lost()

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
        self.outbox.stop()
        if self.on_gone is not None:
            self.on_gone()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
