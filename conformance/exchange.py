"""HTTP/1.1 as a recording: one request, its answer write by write, and how the connection ended.

HTTP libraries hide what clients trip over: chunk boundaries, comments that arrive early, a connection that breaks off.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from conformance.fields import Field, read_json
from conformance.limits import LIMITS
from conformance.verdicts import Violation


@dataclass(frozen=True, slots=True)
class Ask:
    """A request; equal ones may share an answer. ``headers`` without host and content-length."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes that the server sent at once (an HTTP chunk, or what one read found), and when, in seconds after the request."""

    at_s: float
    data: bytes


@dataclass(slots=True)
class Answer:
    """A response. ``whole``: it ended as HTTP says; ``closed``: the server closed the connection after it or said so."""

    ask: Ask
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    head_at_s: float = 0.0
    whole: bool = False
    closed: bool = False

    @property
    def body(self) -> bytes:
        """All bytes of the body."""
        return b"".join(write.data for write in self.writes)

    @property
    def what(self) -> str:
        """The answer in a few words, for violations."""
        return f"{self.ask.method} {self.ask.path.partition('?')[0]}"

    @classmethod
    def of(cls, ask: Ask, status: int, headers: dict[str, str], body: bytes) -> Answer:
        """Return an answer that was received by other means."""
        return cls(ask, status, headers, [Write(0.0, body)], whole=True)

    def json(self) -> Field:
        """Return the body as JSON. Raises Violation."""
        return read_json(self.body, "reply")

    def header(self, name: str) -> str:
        """Return a header, empty when it is not there."""
        return self.headers.get(name, "")


class Connection:
    """A connection for one request after the other. ``keeps_acks_back``: ask the kernel to delay ACKs, where it can."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self.host = host
        self._http = h11.Connection(h11.CLIENT)
        self.keeps_acks_back = False

    @classmethod
    async def open(cls, base_url: str) -> Connection:
        """Connect to the server at ``base_url``. Raises OSError, TimeoutError."""
        parts = urlsplit(base_url)
        is_tls = parts.scheme == "https"
        async with asyncio.timeout(LIMITS.connect_s):
            reader, writer = await asyncio.open_connection(
                parts.hostname, parts.port or (443 if is_tls else 80), ssl=ssl.create_default_context() if is_tls else None
            )
        connected: socket.socket = writer.get_extra_info("socket")
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(reader, writer, parts.netloc)

    async def exchange(self, ask: Ask, *, leave: Callable[[Answer], bool] | None = None) -> Answer:
        """Send a request and record its answer, until ``leave`` says to stop after a write. Raises OSError."""
        headers = [("host", self.host), *ask.headers]
        is_chunked = any(name == "transfer-encoding" for name, _ in ask.headers)
        if not is_chunked and (ask.body or ask.method not in {"GET", "HEAD", "DELETE"}):
            headers.append(("content-length", str(len(ask.body))))
        data = self._http.send(h11.Request(method=ask.method, target=ask.path, headers=headers)) or b""
        data += (self._http.send(h11.Data(data=ask.body)) or b"") if ask.body else b""
        data += self._http.send(h11.EndOfMessage()) or b""
        began = asyncio.get_running_loop().time()
        self._writer.write(data)
        answer = Answer(ask)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()
        await self._record(answer, began, leave)
        return answer

    async def send_head(self, ask: Ask, *, claimed_bytes: int) -> tuple[int, dict[str, str], bytes]:
        """Send a request that claims to be longer than what is sent, and return what comes of it. Raises OSError."""
        headers = [("host", self.host), ("content-length", str(claimed_bytes)), *ask.headers]
        data = self._http.send(h11.Request(method=ask.method, target=ask.path, headers=headers)) or b""
        self._writer.write(data + (self._http.send(h11.Data(data=ask.body)) or b""))
        answer = Answer(ask)
        async with asyncio.timeout(LIMITS.refused_s):
            await self._record(answer, asyncio.get_running_loop().time(), None)
        return answer.status, answer.headers, answer.body

    async def _record(self, answer: Answer, began: float, leave: Callable[[Answer], bool] | None) -> None:
        pending = bytearray()
        while True:
            event = await self._next_event()
            now = asyncio.get_running_loop().time() - began
            if event is None:
                answer.closed = True
                break
            if isinstance(event, h11.Response):
                answer.status, answer.head_at_s = event.status_code, now
                answer.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                pending += event.data
                if event.chunk_end or "chunked" not in answer.header("transfer-encoding").lower():
                    answer.writes.append(Write(now, bytes(pending)))
                    pending.clear()
                    if leave is not None and leave(answer):
                        return
            elif isinstance(event, h11.EndOfMessage):
                answer.whole = True
                answer.closed = "close" in answer.header("connection").lower()
                break
        if pending:
            answer.writes.append(Write(asyncio.get_running_loop().time() - began, bytes(pending)))

    async def _next_event(self) -> h11.Event | None:
        """Return the next event of the answer, None when the connection ended before it or says what is not HTTP."""
        while True:
            try:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    self._keep_acks_back()
                    self._http.receive_data(await self._reader.read(LIMITS.read_bytes))
                    continue
            except (h11.RemoteProtocolError, ConnectionError, ssl.SSLError):
                return None
            if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                return None
            if isinstance(event, h11.InformationalResponse):
                continue
            assert isinstance(event, h11.Event)
            return event

    def _keep_acks_back(self) -> None:
        if self.keeps_acks_back and hasattr(socket, "TCP_QUICKACK"):
            connected: socket.socket = self._writer.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0)

    def reuse(self) -> None:
        """Make ready for the next request. Raises Violation when the server does not want one."""
        try:
            self._http.start_next_cycle()
        except h11.ProtocolError:
            raise Violation("the connection cannot be used again after the answer") from None

    async def sees_close(self) -> bool:
        """Return whether the server closes the connection now."""
        try:
            async with asyncio.timeout(LIMITS.close_s):
                return await self._reader.read(1) == b""
        except TimeoutError:
            return False
        except ConnectionError:
            return True

    async def close(self) -> None:
        """Close our side, in the middle of an answer if need be."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(LIMITS.connect_s):
                await self._writer.wait_closed()
