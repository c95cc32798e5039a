"""Stand-ins at the edge of the link code: a link to no node, a request and the sink that hears of it, the row of a node."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from itertools import count

from nodes.links.port import EndKind, Link, LinkEnd, Sink
from nodes.session import OpenRequest
from nodes.states import NodeRow
from tests.fakes.waiting import DEADLINE_S

_numbers = count(1)


class RequestSink:
    """What a request hears: everything in order, and heads, parts and ends apart; it holds links to the order of these."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.heads: list[tuple[int, dict[str, str]]] = []
        self.parts: list[bytes] = []
        self.ends: list[LinkEnd] = []
        self._changed = asyncio.Event()

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def kinds(self) -> list[EndKind]:
        return [end.kind for end in self.ends]

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        assert not self.heard
        self.heads.append((status, headers))
        self._note((status, headers))

    def on_data(self, data: bytes) -> None:
        assert self.heads
        assert not self.ends
        self.parts.append(data)
        self._note(data)

    def on_end(self, end: LinkEnd) -> None:
        self.ends.append(end)
        self._note(end.kind)

    def _note(self, what: object) -> None:
        self.heard.append(what)
        self._changed.set()

    async def wait(self, condition: Callable[[], object]) -> None:
        """Wait until what was heard fulfils a condition."""
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> LinkEnd:
        """Return the only end."""
        await self.wait(lambda: self.ends)
        (end,) = self.ends
        return end


def open_request(**changes: object) -> OpenRequest:
    """Return one attempt of a streamed request; ``changes`` replace fields."""
    values: dict[str, object] = {
        "request_id": "req_1", "attempt": 1, "model": "m", "path": "/v1/chat/completions", "body": b"{}", "headers": {},
        "is_streaming": True, "deadline_ms": 1000, "tenant": "t",
    }  # fmt: skip
    return OpenRequest(**{**values, **changes})  # type: ignore[arg-type]  # the fields of a request


class FakeStream:
    """One open request on a FakeLink; a test plays the box through it."""

    def __init__(self, link: FakeLink, request: OpenRequest, sink: Sink) -> None:
        self.link = link
        self.request = request
        self.sink = sink
        self.cancelled: str | None = None
        self.granted = 0

    def cancel(self, reason: str) -> None:
        if self in self.link.streams:
            self.link.streams.remove(self)
            self.cancelled = reason

    def grant(self, amount: int) -> None:
        self.granted += amount

    def answer(self, *parts: bytes, status: int = 200, headers: dict[str, str] | None = None, ends: bool = True) -> None:
        self.sink.on_head(status, headers if headers is not None else {"content-type": "application/json"})
        for part in parts:
            if self in self.link.streams:
                self.sink.on_data(part)
        if ends:
            self.end(EndKind.COMPLETE)

    def end(self, kind: EndKind, *, retryable: bool = False, retry_after_s: float | None = None) -> None:
        """End it, unless the gateway cancelled it before."""
        if self in self.link.streams:
            self.link.streams.remove(self)
            self.sink.on_end(LinkEnd(kind=kind, retryable=retryable, retry_after_s=retry_after_s))


class FakeLink(Link):
    """A link whose box is the test. It keeps the promise of the port: no sink call after end or cancel."""

    def __init__(self, *models: str, slots: int = 1, name: str = "", node_id: uuid.UUID | None = None) -> None:
        number = next(_numbers)
        super().__init__(
            node_id=node_id or uuid.UUID(int=number),
            node_name=name or f"node-{number}",
            models=frozenset(models or ("m",)),
            max_concurrent=slots,
        )
        self.streams: list[FakeStream] = []
        self.close_reasons: list[str] = []

    def open_stream(self, request: OpenRequest, sink: Sink) -> FakeStream:
        assert not self.closed, "nothing may be opened on a link that is gone"
        stream = FakeStream(self, request, sink)
        self.streams.append(stream)
        return stream

    def end_streams(self, kind: EndKind, message: str) -> None:
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.sink.on_end(LinkEnd(kind=kind, message=message, retryable=True))

    def close(self, reason: str) -> None:
        self.close_reasons.append(reason)


def make_row(node_id: uuid.UUID, **changes: object) -> NodeRow:
    """Return the row of a healthy, lent, connected node that serves ``m``; ``changes`` replace fields."""
    values: dict[str, object] = {
        "node_id": node_id, "name": "node", "provider": "local", "provider_state": "enabled", "is_direct": False,
        "public_base_url": "", "model_names": ("m",), "max_concurrent": 2, "mode": "spare_on", "cordoned": False,
        "draining": False, "drain_reason": "", "drain_remaining_s": None, "draining_since": None, "epoch": 1, "instance_id": "",
        "heartbeat_age_s": 1.0, "reported_status": "available", "is_accepting_jobs": True, "active_requests": 0,
        "connected": True, "gateway_id": None, "unreachable": "", "endpoints": {}, "carries_bytes": True, "contexts": {},
        "engines": {},
    }  # fmt: skip
    assert changes.keys() <= values.keys()
    return NodeRow(**{**values, **changes})  # type: ignore[arg-type]  # names and types stand above
