"""One authenticated worker socket, from its first frame to its last.

A frame goes from ``receive`` to the stream it belongs to without a task switch, a thread or a Channels layer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, assert_never

from django.db import DatabaseError, DataError

from core.db.threads import run_in_database
from nodes.errors import EnrolmentRefused
from nodes.links.relay import RelayLink
from nodes.links.source import FrameSource
from nodes.metrics import FRAMES_DROPPED, SESSIONS
from nodes.models import NodeCredential
from nodes.services import sessions
from nodes.session import (
    BoxLeaving,
    DataArrived,
    FrameDropped,
    GovernanceChanged,
    HeadArrived,
    LoadReported,
    ModelsChanged,
    ModeRequested,
    OperationReported,
    Registered,
    ServerSession,
    StreamEnded,
    TelemetryArrived,
)
from wire import bridge, clock
from wire.bridge import ProtocolError
from wire.contract import NodeMode
from wire.frames import HEADER_BYTES
from wire.ids import format_id
from wire.limits import WIRE

if TYPE_CHECKING:
    from nodes.consumers.endpoint import WorkerEndpoint

logger = logging.getLogger("muster.nodes")

Scope = dict[str, Any]
"""An ASGI scope; the specification leaves its values open."""
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Word = (
    Registered
    | LoadReported
    | ModelsChanged
    | TelemetryArrived
    | ModeRequested
    | BoxLeaving
    | OperationReported
    | GovernanceChanged
)
"""What a box says beside the streams."""


class Refused(Exception):
    """The socket is closed before it becomes a session."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class BoxSession:
    """One authenticated socket."""

    def __init__(
        self,
        endpoint: WorkerEndpoint,
        send: Send,
        address: str,
        credential: NodeCredential,
        frames: FrameSource | None,
        *,
        on_registered: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        self.send = send
        self.frames = frames
        self._on_registered = on_registered
        self._is_broken = False
        self.address = address
        self.credential = credential
        self.protocol = ServerSession(endpoint.limits)
        self.link: RelayLink | None = None
        self.epoch = 0
        self.close_reason = "the socket closed"
        self._closing = False

    async def run(self, receive: Receive) -> None:
        """Register, then serve frames until the socket closes."""
        try:
            async with asyncio.timeout(self.endpoint.limits.handshake_timeout_s):
                first = await receive()
            if first["type"] != "websocket.receive":
                return
            await self._register(first)
            while not self._take_over():
                event = await receive()
                if event["type"] != "websocket.receive":
                    return
                self._take(event["text"] if event.get("bytes") is None else event["bytes"])
            await receive()  # from here on only a disconnect can come
        except TimeoutError:
            await self._close(1008, "no register frame in time")
        except ProtocolError as error:
            logger.warning("worker.protocol_error address=%s error=%s", self.address, error)
            registered = self.link is not None
            await self._close(1002, "worker protocol error" if registered else "worker registration protocol error")
        except Refused as refusal:
            await self._close(refusal.code, refusal.reason)
        finally:
            self._leave()

    def _take_over(self) -> bool:
        """Have the server call us with each frame and write ours at once, if it can and no frame waits before that."""
        if self.frames is None or self.link is None or not self.frames.take_over(self._take_directly):
            return False
        self.link.write_frame = self.frames.write_frame
        return True

    def _take_directly(self, frame: str | bytes) -> None:
        if self._closing or self._is_broken:
            return
        try:
            self._take(frame)
        except ProtocolError as error:
            self._is_broken = True
            logger.warning("worker.protocol_error address=%s error=%s", self.address, error)
            self._kick(1002, "worker protocol error")

    async def _register(self, event: dict[str, Any]) -> None:
        text = event.get("text")
        if text is None:
            raise ProtocolError("the first frame must be a text frame")
        (effect,) = self.protocol.receive_text(text)
        if not isinstance(effect, Registered):
            raise ProtocolError("the first frame must be register")
        async with self.endpoint.registering:
            asked_at = clock.monotonic()
            opened = await self._open_session(effect)
            self._connect(effect, opened, asked_at=asked_at)

    def _connect(self, effect: Registered, opened: sessions.OpenedSession, *, asked_at: float) -> None:
        link = RelayLink(
            node_id=opened.node_id,
            node_name=opened.node_name,
            models=frozenset(effect.models),
            max_concurrent=effect.max_concurrent,
            session=self.protocol,
            send=self.send,
            kick=self._kick,
            on_drained=lambda: self.endpoint.registry.announce(link),
        )
        link.epoch = self.epoch = opened.epoch
        link.take_register(effect.message)
        link.peer_address = self.address
        link.provider = link.policy.provider = self.credential.provider.name
        link.credential_id = self.credential.pk
        health = self.endpoint.limits
        if self.protocol.speaks_muster:
            link.stale_after_s, link.offline_after_s = health.stale_after_s, health.offline_after_s
        else:
            link.stale_after_s = link.offline_after_s = health.bridge_pong_window_s
        link.policy.cordoned = opened.cordoned
        link.policy.draining = opened.draining
        link.policy.reclaimed = opened.mode == NodeMode.SPARE_OFF.value
        link.link_id = opened.link_id
        if (wanted := self.endpoint.owner_words.get(opened.node_id)) is not None:  # said on a link that is gone, not stored yet
            link.wanted_mode, link.policy.reclaimed = wanted.effect, wanted.effect.mode == NodeMode.SPARE_OFF.value
        self.endpoint.keeper.welcome(link, asked_at=asked_at)
        self.link = link
        self._on_registered()
        link.send_message(self._acknowledge(effect, opened))
        SESSIONS.labels(effect.protocol).inc()
        logger.info("worker.connected node=%s protocol=%s models=%d", opened.node_name, effect.protocol, len(effect.models))
        self.endpoint.registry.add(link)
        self.endpoint.courier.wake()

    async def _open_session(self, effect: Registered) -> sessions.OpenedSession:
        request = sessions.SessionRequest(
            credential_id=self.credential.pk,
            worker_name=effect.name,
            models=effect.models,
            max_concurrent=effect.max_concurrent,
            protocol=effect.protocol,
            gateway_id=self.endpoint.gateway_id,
            live_nodes=frozenset(link.node_id for link in self.endpoint.registry if isinstance(link, RelayLink)),
            other_gateways=self.endpoint.keeper.other_gateways,
            peer_address=self.address,
            message=effect.message,
        )
        try:
            return await run_in_database(sessions.open_session, request)
        except EnrolmentRefused as error:
            raise Refused(1008, error.message) from None
        except DataError:
            raise ProtocolError("the registration holds a value that cannot be stored") from None
        except DatabaseError:
            logger.exception("worker.register_unavailable")
            raise Refused(1013, "the control plane cannot register workers now; try again") from None

    def _acknowledge(self, effect: Registered, opened: sessions.OpenedSession) -> bridge.RegisterAck:
        ack = bridge.RegisterAck(
            worker_id=format_id("node", opened.node_id),
            models=list(effect.models),
            warnings=list(effect.warnings),
            protocol_version=effect.protocol,
        )
        if self.protocol.speaks_muster:
            ack.node_id = ack.worker_id
            ack.heartbeat_interval_s = self.endpoint.limits.heartbeat_interval_s
            ack.window_bytes = WIRE.stream_window_bytes
            ack.gateways = self.endpoint.advertised_gateways
            ack.accepting = not (opened.cordoned or opened.draining or opened.mode == NodeMode.SPARE_OFF.value)
        return ack

    def _take(self, frame: str | bytes) -> None:
        """Take one frame. The DATA of a stream that had its HEAD goes straight to it. Raises ProtocolError."""
        link = self.link
        assert link is not None
        self._note_sign_of_life(link)
        if isinstance(frame, str):
            effects = self.protocol.receive_text(frame)
        elif (stream := self.protocol.data_streams.get(frame[:HEADER_BYTES])) is not None:
            link.take_data(stream, frame[HEADER_BYTES:])
            return
        else:
            effects = self.protocol.receive_bytes(frame)
        for effect in effects:
            match effect:
                case DataArrived():
                    link.take_data(effect.stream, effect.data)
                case HeadArrived():
                    link.take_head(effect)
                case StreamEnded():
                    link.take_end(effect)
                case FrameDropped():
                    FRAMES_DROPPED.inc()
                case _:
                    self._take_word(link, effect)

    def _take_word(self, link: RelayLink, effect: Word) -> None:
        """Take what the box says of itself; none of it is on the path of a request."""
        match effect:
            case LoadReported():
                link.report_load(effect.load)
            case ModelsChanged():
                link.report_load(effect.load)
                self._route(link, frozenset(effect.models))
            case TelemetryArrived():
                self._take_telemetry(link, effect.telemetry)
            case ModeRequested():
                self._change_mode(link, effect)
            case BoxLeaving():
                link.box_draining = True
            case OperationReported():
                self.endpoint.courier.take_status(link, effect.status)
            case GovernanceChanged():
                self.endpoint.courier.take_report(link, effect.report)
            case Registered():
                raise ProtocolError("register is sent once")
            case _:
                assert_never(effect)

    def _note_sign_of_life(self, link: RelayLink) -> None:
        now = clock.awake()
        was_stale, link.last_seen = now - link.last_seen >= link.stale_after_s, now
        if was_stale:  # it may take work again, and work may be waiting
            self.endpoint.registry.announce(link)

    def _take_telemetry(self, link: RelayLink, telemetry: bridge.Telemetry) -> None:
        if link.take_telemetry(telemetry):
            self._route(link, link.models)

    def _route(self, link: RelayLink, models: frozenset[str]) -> None:
        """Route by what the box declares from the next request on; what runs is left alone."""
        endpoints = link.find_endpoints(models)
        if models != link.models or endpoints != link.endpoints:
            link.has_news = True
            self.endpoint.registry.update_models(link, models, endpoints)

    def _change_mode(self, link: RelayLink, effect: ModeRequested) -> None:
        """The owner at the box decides: give it no work, or work again, from now on; write it down beside."""
        link.policy.reclaimed = effect.mode == NodeMode.SPARE_OFF.value
        if link.policy.reclaimed:
            link.policy.drain_deadline_at = clock.monotonic() + self.endpoint.limits.reclaim_grace_s
        elif not link.policy.draining:
            link.policy.drain_deadline_at = None
        self.endpoint.registry.announce(link)
        link.wanted_mode = effect
        self.endpoint.take_owner_word(link, effect)

    def _kick(self, code: int, reason: str) -> None:
        """Close the socket from outside of ``run``, e.g. when the node is replaced or stopped answering."""
        if self._closing:
            return
        self.close_reason = reason
        self.endpoint.run_beside(self._close(code, reason))

    async def _close(self, code: int, reason: str) -> None:
        if self._closing:
            return
        self._closing = True
        self.close_reason = reason
        if self.link is not None:
            self.endpoint.registry.remove(self.link, reason)
        try:
            short = reason.encode()[:120].decode(errors="ignore")  # RFC 6455 section 5.5 allows 123 bytes
            async with asyncio.timeout(2.0):
                await self.send({"type": "websocket.close", "code": code, "reason": short})
        except (OSError, RuntimeError, TimeoutError):
            logger.debug("worker.close_unsent address=%s", self.address)

    def _leave(self) -> None:
        """Let go of the link; its farewell is written beside, because a server that stops cancels the task of the socket."""
        link = self.link
        if link is None:
            return
        link.outbox.stop()
        self.endpoint.registry.remove(link, "the connection to the node was lost")
        logger.info("worker.disconnected node=%s reason=%s", link.node_name, self.close_reason)
        if not link.is_farewell_stored:
            self.endpoint.run_beside(self.endpoint.store_farewells([link], self.close_reason))
