"""The socket of a node, in memory: the server's endpoint with what it needs beside it, and the node's end of the line."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from asgiref.sync import sync_to_async

from gateway.refusing import admit_programs
from nodes.consumers import WorkerEndpoint
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.links.relay import RelayLink
from nodes.models import NodeCredential
from tests.fakes.limits import set_limits
from tests.fakes.nodes import make_credential
from tests.fakes.waiting import eventually
from wire import bridge

GATEWAY = uuid.UUID(int=1)


class Door:
    """A worker endpoint with its registry and keeper; further ``bounds`` are limits of nodes."""

    def __init__(self, *, gateway_id: uuid.UUID = GATEWAY, **bounds: float) -> None:
        set_limits(nodes={"auth_block_s": 600.0, **bounds})
        self.registry = LinkRegistry()
        self.keeper = LinkKeeper(self.registry, gateway_id=gateway_id, connect_s=1.0)
        self.endpoint = WorkerEndpoint(
            registry=self.registry, keeper=self.keeper, gateway_id=gateway_id, advertised_gateways=["http://gw"]
        )

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
        await eventually(lambda: not door.endpoint._beside, "nothing runs beside", pause_s=0.001)


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
async def linked(door: Door | None = None, **fields: Any) -> AsyncIterator[Linked]:
    """Have a node with a credential of its own register with ``hello(**fields)``, alone at the door."""
    _, secret = await enrol()
    found = door or Door()
    async with dial(found, secret) as socket:
        socket.say(hello(**fields))
        await socket.acknowledged()
        (link,) = found.links
        yield Linked(found, socket, link)
