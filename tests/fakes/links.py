"""Stand-ins at the edge of the link code: a link to no box, and the sink of a request."""

from __future__ import annotations

import uuid
from itertools import count

from nodes.links.port import EndKind, Link, LinkEnd, Sink
from nodes.session import OpenRequest
from nodes.states import NodeRow

_numbers = count(1)


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
        """Send head and body, and the end too."""
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
        "node_id": node_id,
        "name": "node",
        "provider": "local",
        "provider_state": "enabled",
        "is_direct": False,
        "public_base_url": "",
        "model_names": ("m",),
        "max_concurrent": 2,
        "mode": "spare_on",
        "cordoned": False,
        "draining": False,
        "drain_reason": "",
        "drain_remaining_s": None,
        "draining_since": None,
        "epoch": 1,
        "instance_id": "",
        "heartbeat_age_s": 1.0,
        "reported_status": "available",
        "is_accepting_jobs": True,
        "active_requests": 0,
        "connected": True,
        "gateway_id": None,
        "unreachable": "",
        "endpoints": {},
        "carries_bytes": True,
        "contexts": {},
        "engines": {},
    }
    assert changes.keys() <= values.keys()
    return NodeRow(**{**values, **changes})  # type: ignore[arg-type]  # names and types stand above
