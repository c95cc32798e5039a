"""Stand-ins at the edge of the link code: a link to no node, a request and the sink that hears of it, the row of a node."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async

from gateway.request.response import admit_programs
from nodes.channel import NodeChannel
from nodes.consumers import NodeConsumer
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.links.port import EndKind, Link, LinkEnd, Sink
from nodes.links.relay import RelayLink
from nodes.models import NodeCredential
from nodes.session import OpenRequest
from nodes.states import NodeRow, ProviderTerms
from tests.fakes.limits import set_limits
from tests.fakes.nodes import make_credential
from tests.fakes.waiting import DEADLINE_S, eventually
from wire import bridge, clock

_numbers = count(1)


class RequestSink(Sink):
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
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def ended(self) -> LinkEnd:
        await self.wait(lambda: self.ends)
        (end,) = self.ends
        return end


def open_request(**changes: object) -> OpenRequest:
    values: dict[str, object] = {
        "request_id": "req_1", "attempt": 1, "model": "m", "path": "/v1/chat/completions", "body": b"{}", "headers": {},
        "is_streaming": True, "deadline_ms": 1000, "tenant": "t",
    }  # fmt: skip
    return OpenRequest(**{**values, **changes})  # type: ignore[arg-type]  # the fields of a request


class FakeStream:
    """One open request on a FakeLink; a test plays the node through it."""

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
    """A link whose node is the test. It keeps the promise of the port: no sink call after end or cancel."""

    def __init__(self, *models: str, slots: int = 1, name: str = "", node_id: uuid.UUID | None = None) -> None:
        number = next(_numbers)
        super().__init__(
            node_id=node_id or uuid.UUID(int=number), node_name=name or f"node-{number}", models=frozenset(models or ("m",)),
            max_concurrent=slots,
        )  # fmt: skip
        self.streams: list[FakeStream] = []
        self.close_reasons: list[str] = []

    def open_stream(self, request: OpenRequest, sink: Sink) -> FakeStream:
        assert not self.closed, "nothing may be opened on a link that is gone"
        stream = FakeStream(self, request, sink)
        self.streams.append(stream)
        return stream

    def list_sinks(self) -> list[Sink]:
        return [stream.sink for stream in self.streams]

    def end_streams(self, kind: EndKind, message: str, *, reason: str = "") -> None:
        streams, self.streams = self.streams, []
        for stream in streams:
            stream.sink.on_end(LinkEnd(kind=kind, message=message, retryable=True))

    def close(self, reason: str) -> None:
        self.close_reasons.append(reason)


def make_row(node_id: uuid.UUID, **changes: object) -> NodeRow:
    """Return the row of a healthy, lent, connected node that serves ``m``; ``changes`` replace fields, or properties."""
    values: dict[str, object] = {
        "node_id": node_id, "name": "node", "provider": "local", "provider_state": "enabled", "is_direct": False,
        "public_base_url": "", "model_names": ("m",), "max_concurrent": 2, "mode": "spare_on", "cordoned": False,
        "draining": False, "drain_reason": "", "drain_deadline_at": None, "draining_since": None, "epoch": 1, "instance_id": "",
        "heard_at": clock.monotonic() - 1.0, "reported_status": "available", "is_accepting_jobs": True, "active_requests": 0,
        "connected": True, "gateway_id": None, "unreachable": "", "endpoints": {}, "protocol": "", "contexts": {},
        "engines": {}, "agent_session": None, "excluded": frozenset(), "gpus": (), "terms": ProviderTerms("local"),
        "allowed_by": "",
    }  # fmt: skip
    for name, moment, sign in (("heartbeat_age_s", "heard_at", -1), ("drain_remaining_s", "drain_deadline_at", 1)):
        if isinstance(seconds := changes.pop(name, None), float):
            changes[moment] = clock.monotonic() + sign * seconds
    assert changes.keys() <= values.keys()
    return NodeRow(**{**values, **changes})  # type: ignore[arg-type]  # names and types stand above


GATEWAY = uuid.UUID(int=1)


class Door:
    """The node sockets of a gateway, with their registry and keeper; further ``bounds`` are limits of nodes."""

    def __init__(self, *, gateway_id: uuid.UUID = GATEWAY, **bounds: float) -> None:
        set_limits(nodes={"auth_block_s": 600.0, **bounds})
        self.registry = LinkRegistry()
        self.keeper = LinkKeeper(self.registry, gateway_id=gateway_id, connect_s=1.0)
        self.channel = NodeChannel(self.keeper, advertised_gateways=["http://gw"])
        self.endpoint = NodeConsumer.as_asgi(channel=self.channel)

    @property
    def links(self) -> list[RelayLink]:
        return [link for link in self.registry if isinstance(link, RelayLink)]


class NodeSocket:
    """A node's end of the socket. ``sent``: the ASGI events of the server; ``messages``: what it said as text."""

    def __init__(self, *, headers: dict[str, str], query: str = "", address: str = "10.0.0.1") -> None:
        self.scope: dict[str, Any] = {
            "type": "websocket", "path": "/v1/worker/connect",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()], "query_string": query.encode(),
            "client": (address, 5000), "extensions": {"websocket.http.response": {}},
        }  # fmt: skip
        self.to_server: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.to_server.put_nowait({"type": "websocket.connect"})
        self.sent: list[dict[str, Any]] = []
        self.slow: asyncio.Event | None = None
        """Set it to an event, and the server's writes wait for that."""

    async def send(self, event: dict[str, Any]) -> None:
        """Be the server's ASGI send. Like a real server, it answers a close with a disconnect."""
        if self.slow is not None:
            await self.slow.wait()
        self.sent.append(event)
        if event["type"] == "websocket.close":
            self.to_server.put_nowait({"type": "websocket.disconnect", "code": event["code"]})

    @property
    def messages(self) -> list[bridge.ServerMessage]:
        return [bridge.decode_server_message(event["text"]) for event in list(self.sent) if event.get("text")]

    def say(self, message: bridge.Message | str | bytes) -> None:
        frame = bridge.encode_message(message) if isinstance(message, bridge.Message) else message
        key = "bytes" if isinstance(frame, bytes) else "text"
        self.to_server.put_nowait({"type": "websocket.receive", key: frame})

    def hang_up(self) -> None:
        """Be gone without a word."""
        self.to_server.put_nowait({"type": "websocket.disconnect", "code": 1006})

    async def closed(self) -> tuple[int, str]:
        await eventually(lambda: self.sent and self.sent[-1]["type"] == "websocket.close", pause_s=0.001)
        return self.sent[-1]["code"], self.sent[-1]["reason"]

    async def acknowledged(self) -> bridge.RegisterAck:
        await eventually(lambda: len(self.sent) > 1, "an acknowledgement", pause_s=0.001)
        ack = bridge.decode_server_message(self.sent[1].get("text", ""))
        assert isinstance(ack, bridge.RegisterAck)
        return ack


@asynccontextmanager
async def dial(door: Door, secret: str = "", **options: Any) -> AsyncIterator[NodeSocket]:
    """Open a socket; at the end it hangs up and the server must have let go."""
    headers = options.pop("headers", {"x-worker-secret": secret})
    socket = NodeSocket(headers=headers, **options)
    task = asyncio.ensure_future(admit_programs(door.endpoint, ())(socket.scope, socket.to_server.get, socket.send))
    try:
        yield socket
    finally:
        socket.hang_up()
        async with asyncio.timeout(30):
            await task
        await eventually(lambda: not door.channel._beside, "nothing runs beside", pause_s=0.001)


@sync_to_async
def enrol(name: str = "box", **changes: Any) -> tuple[NodeCredential, str]:
    return make_credential(name, **changes)


def hello(name: str = "rig", version: str = bridge.MUSTER_V1, **fields: Any) -> bridge.Register:
    values: dict[str, Any] = {"worker_name": name, "models": ["m"], "protocol_version": version, "max_concurrent": 2}
    if version == bridge.MUSTER_V1:
        values["instance_id"] = "i1"
    return bridge.Register(**{**values, **fields})


class Linked(NamedTuple):
    """A node that has registered."""

    door: Door
    socket: NodeSocket
    link: RelayLink


@asynccontextmanager
async def linked(**fields: Any) -> AsyncIterator[Linked]:
    """Have a node with a credential of its own register with ``hello(**fields)``, alone at the door."""
    _, secret = await enrol()
    door = Door()
    async with dial(door, secret) as socket:
        socket.say(hello(**fields))
        await socket.acknowledged()
        (link,) = door.links
        yield Linked(door, socket, link)
