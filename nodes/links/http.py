"""Nodes and peers that are called over HTTP: a node with a public URL, and a node on another gateway's socket."""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from urllib.parse import quote

from core.limits import limits
from nodes.addresses import make_trust
from nodes.links.http1 import Connection, ConnectionPool
from nodes.links.port import EndKind, Link, LinkEnd, Sink
from nodes.session import OpenRequest
from wire.bridge import GpuInfo, TokenCounts
from wire.engine_errors import EngineErrorObject, read_error_body
from wire.events import EventCutter
from wire.frames import End
from wire.usage import StreamReader, ask_for_usage, read_token_counts

USAGE_COMMENT = b": muster-usage "
"""Begins the last event of a peer's answer: a comment with the token counts, which never reaches the client."""
END_HEADER = "x-muster-end"
"""A peer gateway's word for why it could not start a stream: ``busy`` or ``gone``."""
_PRINTABLE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")
_SECONDS_RE = re.compile(r"[0-9]{1,9}\Z")
_UNAVAILABLE = int(HTTPStatus.SERVICE_UNAVAILABLE)  # a member takes ten times as long to look up
_COMPLETE = LinkEnd(kind=EndKind.COMPLETE)
_QUEUE_FULL = "queue_full"
"""The error code of the model-runner API for a node whose own queue is full."""


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """Where an HTTP link sends requests. ``address`` was resolved and checked once; nothing resolves it again."""

    scheme: str
    host: str
    address: str
    port: int
    base_path: str = ""
    headers: dict[str, str] = field(default_factory=dict, repr=False)


class PeerReader:
    """Event stream of another gateway: whole events out, but for the comment in which it says the token counts."""

    __slots__ = ("_cutter", "_usage")

    def __init__(self) -> None:
        self._cutter = EventCutter()
        self._usage: TokenCounts | None = None

    def feed(self, data: bytes) -> bytes:
        """Take bytes; return what may go out now."""
        return self._take_counts(self._cutter.feed(data))

    def finish(self) -> bytes:
        return self._take_counts(self._cutter.finish())

    def usage(self) -> TokenCounts | None:
        return self._usage

    def _take_counts(self, events: bytes) -> bytes:
        if USAGE_COMMENT not in events:
            return events
        # The comment stands at the beginning of a line; what models say may hold the same bytes elsewhere.
        start = 0 if events.startswith(USAGE_COMMENT) else events.rfind(b"\n" + USAGE_COMMENT) + 1
        if not events.startswith(USAGE_COMMENT, start):
            return events
        said, _, rest = events[start + len(USAGE_COMMENT) :].partition(b"\n\n")
        self._usage = read_token_counts(said)
        return events[:start] + rest


class HttpStream:
    """One request on an HTTP link; also the handler of its response."""

    __slots__ = (
        *("_asked", "_connection", "_link", "_paused", "_reader", "_refusal", "_refusal_head", "_request", "_retried"),
        *("_task", "_usage", "_window", "finished", "sink"),
    )

    def __init__(self, link: HttpLink, request: bytes, sink: Sink, *, asked: bool) -> None:
        self._link = link
        self._request = request
        self._asked = asked
        self._reader: StreamReader | PeerReader | None = None
        self._refusal_head: dict[str, str] | None = None
        """Of a 503 that is held back until it is known whether the node's queue is full."""
        self._refusal = b""
        self._usage: TokenCounts | None = None
        self._connection: Connection | None = None
        self._task: asyncio.Task[None] | None = None
        self._window = link.window_bytes
        self._paused = False
        self._retried = False
        self.finished = False
        self.sink = sink

    def start(self) -> None:
        connection = self._link.pool.take_idle()
        if connection is not None:
            self._connection = connection
            connection.send_request(self._request, self)
        else:
            self._task = asyncio.get_running_loop().create_task(self._dial())

    def cancel(self, reason: str) -> None:
        """Close the connection: that is how an HTTP engine learns that nobody listens."""
        if self.finished:
            return
        self._finish()
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.abandon()

    def grant(self, amount: int) -> None:
        """Read on once the client has taken enough."""
        self._window += amount
        if self._paused and self._window > 0 and self._connection is not None:
            self._paused = False
            self._connection.resume()

    def fail(self, kind: EndKind, message: str) -> None:
        if self.finished:
            return
        connection, task = self._connection, self._task
        self._finish()
        if task is not None:
            task.cancel()
        if connection is not None:
            connection.abandon()
        self.sink.on_end(LinkEnd(kind=kind, message=message, retryable=True))

    # ResponseHandler

    def on_response_head(self, status: int, headers: dict[str, str]) -> None:
        """Pass on the head, or hold it back until it is known what it means."""
        refusal = headers.get(END_HEADER) if self._link.is_peer else None
        if refusal is not None:
            connection = self._connection
            self._finish()
            if connection is not None:
                connection.abandon()
            kind = EndKind.BUSY if refusal == "busy" else EndKind.LINK_LOST
            self.sink.on_end(LinkEnd(kind=kind, message="the other gateway could not start it", retryable=True))
            return
        if status == _UNAVAILABLE and not self._link.is_peer:
            self._refusal_head = headers
            return
        if headers.get("content-type", "").startswith("text/event-stream"):
            self._reader = PeerReader() if self._link.is_peer else StreamReader(drops_usage=self._asked)
        self.sink.on_head(status, headers)

    def on_response_data(self, data: bytes) -> None:
        """Pass on bytes; stop reading when the client is too far behind."""
        if self.finished:
            return
        self._window -= len(data)
        if self._window <= 0 and not self._paused and self._connection is not None:
            self._paused = True
            self._connection.pause()
        if self._refusal_head is not None:
            self._refusal += data
            if len(self._refusal) > limits().nodes.http_refusal_bytes:
                self._pass_refusal()
            return
        kept = self._reader.feed(data) if self._reader is not None else data
        if kept:
            self.sink.on_data(kept)

    def on_response_end(self, error: str | None) -> None:
        """Pass on the end; a kept connection that turned out dead gets one fresh try."""
        if self.finished:
            return
        connection = self._connection
        head_seen = connection is not None and connection.head_seen
        if error is not None and connection is not None and connection.used and not head_seen and not self._retried:
            self._retried = True
            self._connection = None
            self._task = asyncio.get_running_loop().create_task(self._dial())
            return
        self._finish()
        head = self._refusal_head
        if head is not None and error is None and ("retry-after" in head or _is_queue_full(self._refusal)):
            retry_after_s = _read_retry_after(head.get("retry-after", ""))
            message = "the node is busy"
            self.sink.on_end(LinkEnd(kind=EndKind.BUSY, message=message, retryable=True, retry_after_s=retry_after_s))
            return
        if head is not None:
            self._pass_refusal()
        if error is None:
            self._pass_rest()
            detail = End(usage=self._usage) if self._usage is not None else None
            self.sink.on_end(LinkEnd(kind=EndKind.COMPLETE, detail=detail))
        elif self._link.is_peer:
            self.sink.on_end(LinkEnd(kind=EndKind.LINK_LOST, message=error, retryable=True))
        else:
            self.sink.on_end(LinkEnd(kind=EndKind.ENGINE_FAILED, message=error, retryable=not head_seen))

    def on_response_whole(self, status: int, headers: dict[str, str], body: bytes) -> None:
        """Pass on a usual answer at once, and any other as if it had come in parts."""
        if self.finished:
            return
        is_stream = headers.get("content-type", "").startswith("text/event-stream")
        if is_stream or self._link.is_peer or status == _UNAVAILABLE:
            self.on_response_head(status, headers)
            if body:
                self.on_response_data(body)
            self.on_response_end(None)
        else:
            self._finish()
            self.sink.on_whole(status, headers, body, _COMPLETE)

    def _pass_refusal(self) -> None:
        head, self._refusal_head = self._refusal_head, None
        body, self._refusal = self._refusal, b""
        self.sink.on_head(_UNAVAILABLE, head or {})
        if body:
            self.sink.on_data(body)

    def _pass_rest(self) -> None:
        if self._reader is not None:
            if rest := self._reader.finish():
                self.sink.on_data(rest)
            self._usage = self._reader.usage()

    async def _dial(self) -> None:
        try:
            connection = await self._link.pool.connect()
        except (OSError, TimeoutError) as error:
            self._task = None
            if not self.finished:
                self._finish()
                message = f"cannot connect: {str(error) or type(error).__name__}"
                self.sink.on_end(LinkEnd(kind=EndKind.ENGINE_FAILED, message=message, retryable=True))
            return
        self._task = None
        if self.finished:
            connection.close()
            return
        self._connection = connection
        if not connection.is_open:
            self.on_response_end("the upstream closed the connection at once")
            return
        connection.send_request(self._request, self)

    def _finish(self) -> None:
        self.finished = True
        self._link.forget_stream(self)


class HttpLink(Link):
    """A node called over HTTP, or one on another gateway's socket (``is_peer``)."""

    __slots__ = ("_extra", "_gpus", "_host_line", "_streams", "_usual", "pool", "target", "window_bytes")

    def __init__(
        self,
        *,
        node_id: uuid.UUID,
        node_name: str,
        models: frozenset[str],
        max_concurrent: int,
        target: HttpTarget,
        connect_s: float,
        is_peer: bool = False,
        authorities: str = "",
    ) -> None:
        super().__init__(node_id=node_id, node_name=node_name, models=models, max_concurrent=max_concurrent)
        self.target = target
        self.is_peer, self.reports_usage = is_peer, True
        self.window_bytes = 512 * 1024
        self.pool = ConnectionPool(address=target.address, port=target.port, server_name=target.host, connect_s=connect_s)
        self.trust(authorities)
        self._streams: dict[HttpStream, None] = {}
        self._host_line = f"host: {target.host}:{target.port}\r\n"
        self._extra = ""
        self._gpus: Sequence[GpuInfo] = ()
        self._usual: tuple[dict[str, str], tuple[str, str, str], bytes] | None = None
        """What was rendered last of what requests have in common."""
        self.take_headers(target)

    @property
    def gpus(self) -> Sequence[GpuInfo]:
        return self._gpus

    def take_gpus(self, gpus: Sequence[GpuInfo]) -> None:
        """Take what the node said last of its GPUs."""
        self._gpus = gpus

    def trust(self, authorities: str) -> None:
        """Verify the node with these internal CAs (PEM) and those of this machine from the next connection on."""
        # A gateway has none of the nodes' certificates.
        self.pool.tls = make_trust("" if self.is_peer else authorities) if self.target.scheme == "https" else None

    def take_headers(self, target: HttpTarget) -> None:
        """Send the headers of ``target``, the same place, from now on; what runs goes on."""
        self.target = target
        self._extra = "".join(f"{name}: {value}\r\n" for name, value in target.headers.items())
        self._usual = None

    def open_stream(self, request: OpenRequest, sink: Sink) -> HttpStream:
        body, asked = request.body, False
        if request.is_streaming and not self.is_peer:
            body, asked = ask_for_usage(request.path, body)
        stream = HttpStream(self, self._render(request, body), sink, asked=asked)
        self._streams[stream] = None
        stream.start()
        return stream

    def forget_stream(self, stream: HttpStream) -> None:
        self._streams.pop(stream, None)

    def list_sinks(self) -> Sequence[Sink]:
        return [stream.sink for stream in self._streams]

    def end_streams(self, kind: EndKind, message: str, *, reason: str = "") -> None:
        # HTTP has no word for why a connection closes.
        for stream in list(self._streams):
            stream.fail(kind, message)

    def close(self, reason: str) -> None:
        self.closed = True
        self.pool.close()

    def _render(self, request: OpenRequest, body: bytes) -> bytes:
        usual = self._usual
        if usual is None or usual[0] is not request.headers or usual[1] != (request.path, request.tenant, request.priority):
            usual = self._usual = self._render_usual(request)
        lines = f"x-request-id: {request.request_id}\r\n"
        if self.is_peer:
            lines += f"x-muster-model: {_write_name(request.model)}\r\nx-muster-attempt: {request.attempt}\r\n"
            lines += f"x-muster-deadline-ms: {request.deadline_ms}\r\nx-muster-streaming: {int(request.is_streaming)}\r\n"
        return b"%b%bcontent-length: %d\r\n\r\n%b" % (usual[2], lines.encode("latin-1", "replace"), len(body), body)

    def _render_usual(self, request: OpenRequest) -> tuple[dict[str, str], tuple[str, str, str], bytes]:
        """Return the lines that requests of one client have in common, and what they depend on."""
        path = self.target.base_path + (f"/{self.node_id.hex}" if self.is_peer else "") + request.path
        lines = [f"POST {path} HTTP/1.1\r\n", self._host_line, self._extra]
        lines += [f"{name}: {value}\r\n" for name, value in request.headers.items()]
        if self.is_peer:
            lines.append(f"x-muster-tenant: {_write_name(request.tenant)}\r\nx-muster-priority: {request.priority}\r\n")
        elif request.tenant:
            lines.append(f"x-tenant-id: {_spell_tenant(request.tenant)}\r\nx-priority: {request.priority or 'normal'}\r\n")
        depends_on = (request.path, request.tenant, request.priority)
        return request.headers, depends_on, "".join(lines).encode("latin-1", "replace")


def _is_queue_full(body: bytes) -> bool:
    said = read_error_body(body)
    return said is not None and isinstance(said.error, EngineErrorObject) and said.error.code == _QUEUE_FULL


def _read_retry_after(text: str) -> float:
    # RFC 9110 allows a date as well, which stands for the usual pause here.
    return (
        min(max(1.0, float(text)), limits().nodes.full_retry_max_s) if _SECONDS_RE.match(text) else limits().nodes.full_retry_s
    )


@lru_cache(maxsize=1024)
def _spell_tenant(name: str) -> str:
    """Return a tenant's name as ``X-Tenant-ID`` carries it: printable ASCII, 128 characters at most, one value per tenant.

    Other characters are percent-encoded; of a name that is too long then the end is a part of its hash.
    """
    text = quote(name, safe=_PRINTABLE)
    if len(text) <= limits().nodes.http_tenant_chars:
        return text
    mark = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{text[: limits().nodes.http_tenant_chars - len(mark) - 1]}~{mark}"


def _write_name(name: str) -> str:
    # RFC 9110 leaves bytes beyond ASCII to those who agree on them: both sides read the name as UTF-8.
    return name.encode().decode("latin-1")
