"""A node that dialled in: its socket, its session, and the streams that run over it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from core.limits import limits
from core.outbox import AsgiSend, Outbox
from nodes.links.port import EndKind, Link, LinkEnd, Sink
from nodes.reports import find_contexts, find_endpoints, find_engines
from nodes.session import AnswerArrived, HeadArrived, ModeRequested, OpenRequest, ServerSession, StreamEnded
from nodes.states import NodeRow
from wire import bridge, clock
from wire.frames import End
from wire.limits import WIRE

SCOPE_FRAMES = "muster.frames"
"""The key under which the extensions of a socket's scope carry a ``FrameSource``."""
_END_KINDS = {
    "": EndKind.COMPLETE,
    "cancelled": EndKind.LINK_LOST,
    "engine_failed": EndKind.ENGINE_FAILED,
    "busy": EndKind.BUSY,
    "timeout": EndKind.TIMEOUT,
}


class FrameSource(Protocol):
    """What a server may offer beyond ASGI: messages where they are parsed, and frames written without a queue."""

    def take_over(self, receiver: Callable[[str | bytes], None]) -> bool:
        """Have ``receiver`` called with each later message; False while earlier ones still wait."""

    def write_frame(self, frame: bytes) -> bool:
        """Write a binary message at once, behind all that was sent before; False = the line is not free, and it was not."""


class RelayStream:
    """One request on a relay link."""

    __slots__ = ("_granted", "_link", "is_last", "number", "sink")

    def __init__(self, link: RelayLink, number: int, sink: Sink, *, is_last: bool = False) -> None:
        self._link = link
        self._granted = 0
        self.number = number
        self.sink = sink
        self.is_last = is_last
        """Whether nobody else gets the request when the node loses it."""

    def cancel(self, reason: str) -> None:
        """Tell the node to stop and forget the stream; its late frames are dropped by the session."""
        self._link.cancel_stream(self.number, reason)

    def grant(self, amount: int) -> None:
        """Return credit to the node, in steps of half a window so that frames stay few."""
        self._granted += amount
        if self._granted >= WIRE.stream_window_bytes // 2:
            self._link.send_frames(self._link.session.grant_credit(self.number, self._granted))
            self._granted = 0


class RelayLink(Link):
    """The link of a node on a WebSocket. ``kick`` closes the socket with a code and a reason.

    ``on_drained`` is called when everything that waited for the node's line was taken: it may get new work again.
    """

    __slots__ = (
        "_full_bytes",
        "_kick",
        "_streams",
        "applied_row",
        "credential_id",
        "epoch",
        "governance",
        "has_news",
        "holds_certificate",
        "instance_id",
        "is_end_stored",
        "link_id",
        "linked_at",
        "looking",
        "mode_stored_at",
        "named_url",
        "offered_policy",
        "offered_size",
        "outbox",
        "ping_at",
        "ping_interval_s",
        "refresh_at",
        "registered_endpoints",
        "searches_hub",
        "session",
        "telemetry",
        "tells_log",
        "told_authorities",
        "told_ticket_keys",
        "wanted_mode",
        "write_frame",
    )  # fmt: skip

    def __init__(
        self,
        *,
        node_id: uuid.UUID,
        node_name: str,
        models: frozenset[str],
        max_concurrent: int,
        session: ServerSession,
        send: AsgiSend,
        kick: Callable[[int, str], None],
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(node_id=node_id, node_name=node_name, models=models, max_concurrent=max_concurrent)
        self.session = session
        self.reports_usage = self.carries_bytes = session.speaks_muster
        self.epoch = 0
        self.credential_id = 0
        self.link_id = uuid.UUID(int=0)
        """Names the link in the database; ``services.sessions.open_sessions`` gives it."""
        self.wanted_mode: ModeRequested | None = None
        """What the owner said at the node and the database does not know yet."""
        self.mode_stored_at = 0.0
        """clock.monotonic() seconds at which the database was seen to know it: rows read before may say something else."""
        self.instance_id = ""
        self.telemetry: bridge.Telemetry | None = None
        self.governance: bridge.NodeGovernance | None = None
        """How the node decides about operations; None = it takes none from here."""
        self.linked_at = clock.now()
        self.offered_policy = (-1, -1)
        """(version the node had, newest version) of the last offer in this session."""
        self.offered_size = 0
        """Entries of the last audit checkpoint that the node was offered in this session."""
        self.registered_endpoints: tuple[str, ...] = ()
        """API paths of every model whose replicas say nothing else; empty = any."""
        self.searches_hub = False
        """Whether the node answers a question for what its hub has."""
        self.tells_log = False
        """Whether the node answers a question for its log."""
        self.told_ticket_keys: tuple[str, ...] | None = None
        """The ticket keys that the node knows of, by id; None = it takes no tickets."""
        self.told_authorities: str | None = None
        """The internal CAs that the node knows of (PEM); None = it takes no certificates."""
        self.holds_certificate = False
        """Whether it shows one of them to clients, by its own word."""
        self.named_url = ""
        """Where the node says that clients reach it with a ticket."""
        self.looking = asyncio.Lock()
        """Held while that is looked at and what was found is written down."""
        self.has_news = False
        """Whether the node said something that the database does not know yet."""
        bounds = limits().nodes
        self.ping_interval_s = bounds.heartbeat_interval_s if session.speaks_muster else bounds.bridge_ping_interval_s
        self.ping_at = clock.monotonic() + self.ping_interval_s
        self.refresh_at = self.ping_at + bounds.bridge_refresh_s
        """clock.monotonic() seconds at which a bridge v1 worker is asked for its models again; others say them themselves."""
        self.applied_row: NodeRow | None = None
        """The row whose policy this link follows; None = the next that comes is applied."""
        self.is_end_stored = False
        """Whether the database knows that this link is over."""
        self._full_bytes = bounds.socket_full_bytes
        self.write_frame: Callable[[bytes], bool] | None = None
        """Writes a frame at once when the line is free (``FrameSource.write_frame``); None = each waits for its turn."""
        self._kick = kick
        self._streams: dict[int, RelayStream] = {}
        self.outbox = Outbox(
            send,
            limit_bytes=bounds.socket_buffer_bytes,
            timeout_s=bounds.socket_write_s,
            on_stuck=lambda reason: kick(1011, reason),
            on_drained=on_drained,
        )

    @property
    def has_clear_line(self) -> bool:
        """Whether little waits for the node's line."""
        return self.outbox.waiting_bytes < self._full_bytes

    def take_register(self, message: bridge.Register) -> None:
        """Take what the node said of itself when it came; what only muster v1 has is left out of a bridge v1 session."""
        self.instance_id = (message.instance_id or "")[:64]
        self.report_load(message.current_load)
        if not self.session.speaks_muster:
            return
        self.telemetry = bridge.Telemetry(
            current_load=message.current_load,
            gpus=message.gpus,
            replicas=message.replicas,
            available=message.available,
            memory=message.memory,
        )
        self.contexts, self.engines = find_contexts(message.replicas), find_engines(message.replicas)
        self.governance, self.tells_log = message.governance, message.tells_log
        self.searches_hub = message.searches_hub
        self.registered_endpoints = tuple(message.endpoints)
        self.endpoints = self.find_endpoints(self.models)
        self.has_news = True

    def take_telemetry(self, telemetry: bridge.Telemetry) -> bool:
        """Take what the node says of itself now; return whether it changed what it has of models."""
        before, self.telemetry = self.telemetry, telemetry
        if (
            telemetry.memory is not None
            and telemetry.memory.models is None
            and before is not None
            and before.memory is not None
        ):
            telemetry.memory.models = before.memory.models  # it says them again only when they change
        self.contexts, self.engines = find_contexts(telemetry.replicas), find_engines(telemetry.replicas)
        self.report_load(telemetry.current_load)
        is_news = before is None or (before.replicas, before.available) != (telemetry.replicas, telemetry.available)
        self.has_news = self.has_news or is_news
        return is_news

    def is_mode_known_since(self, moment: float) -> bool:
        """Whether rows read at that moment (clock.monotonic()) say what the owner said last."""
        return self.wanted_mode is None and self.mode_stored_at <= moment

    @property
    def gpus(self) -> Sequence[bridge.GpuInfo]:
        return self.telemetry.gpus if self.telemetry is not None else ()

    def is_called(self, name: str) -> bool:
        """Whether a client that prefers a node or GPU by this name means this node."""
        return super().is_called(name) or any(name in (gpu.name, f"gpu-{gpu.index}") for gpu in self.gpus)

    def find_endpoints(self, models: frozenset[str]) -> dict[str, frozenset[str]]:
        """Return the API paths of each model, from what the node said last."""
        replicas = self.telemetry.replicas if self.telemetry is not None else ()
        return find_endpoints(models, replicas=replicas, registered=self.registered_endpoints)

    def open_stream(self, request: OpenRequest, sink: Sink) -> RelayStream:
        """Send the request to the node. Raises UnicodeDecodeError for a body bridge v1 cannot carry."""
        number, frames = self.session.open_stream(request)
        stream = RelayStream(self, number, sink, is_last=request.is_last)
        self._streams[number] = stream
        self.send_frames(frames)
        return stream

    def cancel_stream(self, number: int, reason: str) -> None:
        """Stop a stream without telling its sink. Harmless when it is over."""
        if self._streams.pop(number, None) is not None:
            self.send_frames(self.session.cancel_stream(number, reason))

    def list_sinks(self) -> Sequence[Sink]:
        return [stream.sink for stream in self._streams.values()]

    def end_streams(self, kind: EndKind, message: str, *, reason: str = bridge.CANCEL_WORKER_DISCONNECT) -> None:
        """End every stream: the node is told (unless the socket is gone), each sink hears it once."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            if not self.closed:
                is_given_up = stream.is_last and reason == bridge.CANCEL_GRACEFUL_SHUTDOWN
                word = bridge.CANCEL_REQUEUE_EXHAUSTED if is_given_up else reason
                self.send_frames(self.session.cancel_stream(stream.number, word))
            stream.sink.on_end(LinkEnd(kind=kind, message=message, retryable=True))

    def close(self, reason: str, code: int = 1000) -> None:
        """Close the socket in good order."""
        self._kick(code, reason)

    def send_message(self, message: bridge.Message) -> None:
        self.send_frames([bridge.encode_message(message)])

    def send_frames(self, frames: list[str | bytes]) -> None:
        """Send frames in order, behind whatever was sent before."""
        outbox, write = self.outbox, self.write_frame
        for frame in frames:
            if isinstance(frame, str):
                outbox.put({"type": "websocket.send", "text": frame}, len(frame))
            elif write is None or outbox.is_blocked or outbox.dead or not write(frame):
                outbox.put({"type": "websocket.send", "bytes": frame}, len(frame))

    # what the node sent

    def take_head(self, effect: HeadArrived) -> None:
        stream = self._streams.get(effect.stream)
        if stream is not None:
            stream.sink.on_head(effect.status, effect.headers)

    def take_data(self, number: int, data: bytes) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            stream.sink.on_data(data)

    def take_whole(self, effect: AnswerArrived) -> None:
        """Pass all of an answer to its stream and forget it."""
        stream = self._streams.pop(effect.stream, None)
        if stream is not None:
            stream.sink.on_whole(effect.status, effect.headers, effect.data, _translate_end(effect.end))

    def take_end(self, effect: StreamEnded) -> None:
        stream = self._streams.pop(effect.stream, None)
        if stream is not None:
            stream.sink.on_end(_translate_end(effect.end))


def _translate_end(end: End) -> LinkEnd:
    kind = _END_KINDS.get(end.error, EndKind.ENGINE_FAILED)
    return LinkEnd(kind=kind, message=end.message, retryable=end.retryable or kind is EndKind.BUSY, detail=end)
