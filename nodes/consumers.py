"""Node sockets: the Channels consumer of ``/v1/worker/connect``, for muster v1 and bridge v1.

Authentication failures are answered by close 1008 after the upgrade, as the worker protocol has it. A frame goes from the
server's parser to the stream it belongs to without a task switch, a thread or a channel layer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, assert_never
from urllib.parse import parse_qs

from channels.consumer import AsyncConsumer
from channels.exceptions import StopConsumer
from django.conf import settings
from django.db import DatabaseError, DataError, InterfaceError
from prometheus_client import Counter

from core.db.threads import run_upkeep
from nodes.channel import AUTH_FAILURES, CredentialCheck, CredentialRefused, NodeChannel, Registration
from nodes.errors import EnrolmentRefused, TooManySockets
from nodes.links.relay import SCOPE_FRAMES, FrameSource, RelayLink
from nodes.models import ProviderState
from nodes.services import sessions
from nodes.services.credentials import read_bearer
from nodes.session import (
    AnswerArrived,
    CertificateAsked,
    DataArrived,
    Effect,
    FrameDropped,
    GovernanceChanged,
    HeadArrived,
    HubAnswered,
    LoadReported,
    LogTold,
    ModelsChanged,
    ModeRequested,
    NodeLeaving,
    OperationReported,
    Registered,
    ServerSession,
    StreamEnded,
    TelemetryArrived,
    UsageReported,
)
from nodes.states import freshness_windows
from wire import bridge, clock
from wire.bridge import ProtocolError
from wire.contract import NodeMode
from wire.credentials import digest_credential
from wire.frames import HEADER_BYTES
from wire.ids import format_id
from wire.limits import WIRE

logger = logging.getLogger("muster.nodes")

SESSIONS = Counter("muster_worker_sessions_total", "Worker sessions opened", ["protocol"])
FRAMES_DROPPED = Counter("muster_worker_frames_dropped_total", "Late frames of streams that were over")

Scope = dict[str, Any]
"""An ASGI scope; the specification leaves its values open."""
Event = dict[str, Any]
"""An ASGI event."""
Told = OperationReported | GovernanceChanged | UsageReported | CertificateAsked | LogTold | HubAnswered
"""What a node says that the channel takes down."""
Control = Registered | LoadReported | ModelsChanged | TelemetryArrived | ModeRequested | NodeLeaving | Told
"""What a node says beside its streams."""


class Refused(Exception):
    """The socket is closed before it becomes a session."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class NodeConsumer(AsyncConsumer):  # type: ignore[misc]  # channels ships no types
    """One node socket, from its upgrade to its end: who opens it, register, heartbeats, commands, and the ends of streams.

    No channel layer has a part in it, no task is made for an event, and no thread looks after Django's connections. Once the
    node has registered, a server that is a ``FrameSource`` calls ``take_frame`` itself, and only the end comes as an event.
    """

    def __init__(self, channel: NodeChannel) -> None:
        self._channel = channel
        self._limits = channel.limits
        self._until_registered = ExitStack()
        self.protocol = ServerSession(channel.limits)
        self.link: RelayLink | None = None
        self.close_reason = ""
        """Why the socket is being closed from here; "" = it is not, and frames count."""

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Event]], send: Callable[[Event], Awaitable[None]]
    ) -> None:
        """Serve the socket until it closes. Raises TooManySockets instead of taking the upgrade."""
        self.scope, self.base_send = scope, send
        self.address = str((scope.get("client") or ("unknown", 0))[0])
        if self._channel.unregistered[self.address] >= self._limits.max_unregistered and not await self._is_known():
            AUTH_FAILURES.labels("too_many").inc()
            raise TooManySockets("Too many sockets of this address have yet to register; try again in a second.")
        with self._until_registered:
            self._until_registered.enter_context(self._channel.count_unregistered(self.address))
            try:
                await self._serve(receive)
            except asyncio.CancelledError:
                # Only a server that stops cancels sockets. The task ends here: the server would print a traceback for each.
                logger.warning("worker.cut_off address=%s; the gateway stops and did not wait any longer", self.address)

    async def _serve(self, receive: Callable[[], Awaitable[Event]]) -> None:
        try:
            await self.dispatch(await receive())
            if self.link is None:
                async with asyncio.timeout(self._limits.handshake_timeout_s):
                    first = await receive()
                await self.dispatch(first)
            while True:
                await self.dispatch(await receive())
        except StopConsumer:
            pass
        except TimeoutError:
            await self._close(1008, "no register frame in time")
        except ProtocolError as error:
            logger.warning("worker.protocol_error address=%s error=%s", self.address, error)
            await self._close(1002, "worker registration protocol error")
        except Refused as refusal:
            await self._close(refusal.code, refusal.reason)
        finally:
            self._leave()

    async def dispatch(self, message: Event) -> None:
        match message["type"]:
            case "websocket.receive":
                await self.websocket_receive(message)
            case "websocket.connect":
                await self.websocket_connect(message)
            case _:
                await self.websocket_disconnect(message)

    async def websocket_connect(self, _message: Event) -> None:
        """Take the upgrade and find out whose credential it carries. Raises Refused."""
        await self.send({"type": "websocket.accept"})
        try:
            credential = await self._channel.credentials.call(CredentialCheck(self.address, self._read_secret()))
        except CredentialRefused as refusal:
            raise Refused(1008, str(refusal)) from None
        except DatabaseError:
            logger.exception("worker.auth_unavailable")
            raise Refused(1013, "the control plane cannot check credentials now; try again") from None
        provider = credential.provider
        if provider.state != ProviderState.ENABLED or provider.name != (self._query("provider") or "local"):
            raise Refused(1008, "worker provider is unknown, disabled or not the credential's")
        self._channel.throttle.record_success(self.address)
        self.credential = credential
        if provider.max_models is not None and provider.max_models < self._limits.max_models:
            self.protocol.policy = replace(self._limits, max_models=provider.max_models)

    async def websocket_receive(self, message: Event) -> None:
        """Take a frame, of which the first registers the node. Raises ProtocolError and Refused before it has registered."""
        frame: str | bytes = message["text"] if message.get("bytes") is None else message["bytes"]
        link = self.link
        if link is None:
            link = await self._register(frame)
        else:
            self.take_frame(frame)
        source: FrameSource | None = self.scope.get("extensions", {}).get(SCOPE_FRAMES)
        if source is not None and source.take_over(self.take_frame):
            link.write_frame = source.write_frame

    async def websocket_disconnect(self, _message: Event) -> None:
        """Raise StopConsumer: nothing more comes."""
        raise StopConsumer

    def take_frame(self, frame: str | bytes) -> None:
        """Take one frame of a node that has registered. The DATA of a stream that had its HEAD goes straight to it."""
        link = self.link
        if self.close_reason or link is None:
            return
        now = clock.awake()
        was_stale, link.last_seen = now - link.last_seen >= link.windows.stale_s, now
        if was_stale:  # it may take work again, and work may be waiting
            self._channel.registry.announce(link)
        try:
            if isinstance(frame, str):
                effects = self.protocol.receive_text(frame)
            elif (stream := self.protocol.data_streams.get(frame[:HEADER_BYTES])) is not None:
                link.take_data(stream, frame[HEADER_BYTES:])
                return
            else:
                effects = self.protocol.receive_bytes(frame)
            for effect in effects:
                self._take_effect(link, effect)
        except ProtocolError as error:
            logger.warning("worker.protocol_error address=%s error=%s", self.address, error)
            self._kick(1002, "worker protocol error")

    def _take_effect(self, link: RelayLink, effect: Effect) -> None:
        match effect:
            case DataArrived():
                link.take_data(effect.stream, effect.data)
            case HeadArrived():
                link.take_head(effect)
            case AnswerArrived():
                link.take_whole(effect)
            case StreamEnded():
                link.take_end(effect)
            case FrameDropped():
                FRAMES_DROPPED.inc()
            case _:
                self._take_control(link, effect)

    def _take_control(self, link: RelayLink, effect: Control) -> None:
        # None of this is on the path of a request.
        match effect:
            case LoadReported():
                link.report_load(effect.load)
            case ModelsChanged():
                link.report_load(effect.load)
                self._route(link, frozenset(effect.models))
            case TelemetryArrived():
                if link.take_telemetry(effect.telemetry):
                    self._route(link, link.models)
            case ModeRequested():
                self._change_mode(link, effect)
            case NodeLeaving():
                link.node_draining = True
            case Registered():
                raise ProtocolError("register is sent once")
            case _:
                self._pass_on(link, effect)

    def _pass_on(self, link: RelayLink, effect: Told) -> None:
        match effect:
            case OperationReported():
                self._channel.take_status(link, effect.status)
            case GovernanceChanged():
                self._channel.take_report(link, effect.report)
            case UsageReported():
                self._channel.tickets.take_usage(link, effect.reports)
            case CertificateAsked():
                self._channel.tickets.take_certificate_request(link, effect.message)
            case LogTold():
                self._channel.questions.logs.take(link, effect.tail.query_id, effect.tail)
            case HubAnswered():
                self._channel.questions.hubs.take(link, effect.answer.query_id, effect.answer)
            case _:
                assert_never(effect)

    def _route(self, link: RelayLink, models: frozenset[str]) -> None:
        endpoints = link.find_endpoints(models)
        if models != link.models or endpoints != link.endpoints:
            link.has_news = True
            self._channel.registry.update_models(link, models, endpoints)

    def _change_mode(self, link: RelayLink, effect: ModeRequested) -> None:
        # The owner at the node decides, whatever the rows say that were read before.
        link.policy.reclaimed = effect.mode == NodeMode.SPARE_OFF.value
        if link.policy.reclaimed:
            link.policy.drain_deadline_at = clock.monotonic() + self._limits.reclaim_grace_s
        elif not link.policy.draining:
            link.policy.drain_deadline_at = None
        self._channel.registry.announce(link)
        link.wanted_mode, link.applied_row = effect, None
        self._channel.take_owner_wish(link, effect)

    # the credential

    async def _is_known(self) -> bool:
        throttle = self._channel.throttle
        # The good credentials are read for all sockets at once: a flood costs no query for each.
        async with self._channel.reading_good:
            if throttle.is_reading_due:
                with suppress(DatabaseError, InterfaceError):
                    await run_upkeep(throttle.read_good)
        return throttle.knows(digest_credential(read_bearer(self._read_secret())))

    def _read_secret(self) -> str:
        headers: dict[bytes, bytes] = dict(self.scope["headers"])
        secret = headers.get(b"x-worker-secret")
        if secret is not None:
            return secret.decode("latin-1").strip()
        bearer = headers.get(b"authorization", b"").decode("latin-1")
        if bearer.lower().startswith("bearer "):
            return bearer[7:].strip()
        return self._query("worker_secret") if settings.NODE_ALLOW_QUERY_SECRET else ""

    def _query(self, name: str) -> str:
        values = parse_qs(self.scope.get("query_string", b"").decode("latin-1")).get(name)
        return values[0] if values else ""

    # the registration

    async def _register(self, frame: str | bytes) -> RelayLink:
        if not isinstance(frame, str):
            raise ProtocolError("the first frame must be a text frame")
        (effect,) = self.protocol.receive_text(frame)
        if not isinstance(effect, Registered):
            raise ProtocolError("the first frame must be register")
        if effect.message.protocol_version is None and settings.NODE_REJECT_UNVERSIONED:
            raise Refused(1002, f"the worker names no protocol_version; this server wants {bridge.BRIDGE_V1}")
        request = sessions.SessionRequest(self.credential.pk, self.address, effect)
        try:
            return await self._channel.registrations.call(Registration(request, partial(self._connect, effect)))
        except EnrolmentRefused as error:
            raise Refused(1008, error.message) from None
        except DataError:
            raise ProtocolError("the registration holds a value that cannot be stored") from None
        except DatabaseError:
            logger.exception("worker.register_unavailable")
            raise Refused(1013, "the control plane cannot register workers now; try again") from None

    def _connect(self, effect: Registered, opened: sessions.OpenedSession, asked_at: float) -> RelayLink:
        channel = self._channel
        link = RelayLink(
            node_id=opened.node_id,
            node_name=opened.node_name,
            models=frozenset(effect.models),
            max_concurrent=effect.max_concurrent,
            session=self.protocol,
            send=self.base_send,
            kick=self._kick,
            on_drained=lambda: channel.registry.announce(link),
        )
        link.epoch = opened.epoch
        link.take_register(effect.message)
        link.policy.provider = self.credential.provider.name
        link.credential_id = self.credential.pk
        if not self.protocol.speaks_muster:
            link.windows = freshness_windows(self._limits, protocol=bridge.BRIDGE_V1)
        link.policy.cordoned = opened.cordoned
        link.policy.draining = opened.draining
        link.policy.reclaimed = opened.mode == NodeMode.SPARE_OFF.value
        link.link_id = opened.link_id
        if (wanted := channel.owner_wishes.get(opened.node_id)) is not None:  # said on a link that is gone, not stored yet
            link.wanted_mode, link.policy.reclaimed = wanted.effect, wanted.effect.mode == NodeMode.SPARE_OFF.value
        channel.keeper.welcome(link, asked_at=asked_at)
        self.link = link
        self._until_registered.close()
        link.send_message(self._acknowledge(effect, opened))
        if not (effect.models or self.protocol.speaks_muster):  # its backend did not answer when it was started
            link.send_message(bridge.ModelsRefresh(reason="no models"))
        if effect.message.ticket_url:
            channel.tickets.welcome(link, effect.message)
        SESSIONS.labels(effect.protocol).inc()
        logger.info("worker.connected node=%s protocol=%s models=%d", opened.node_name, effect.protocol, len(effect.models))
        channel.registry.add(link)
        channel.wake()
        return link

    def _acknowledge(self, effect: Registered, opened: sessions.OpenedSession) -> bridge.RegisterAck:
        ack = bridge.RegisterAck(
            worker_id=format_id("node", opened.node_id),
            models=list(effect.models),
            warnings=list(effect.warnings),
            protocol_version=effect.message.protocol_version or effect.protocol,  # as the worker writes it
        )
        if self.protocol.speaks_muster:
            ack.node_id = ack.worker_id
            ack.heartbeat_interval_s = self._limits.heartbeat_interval_s
            ack.window_bytes = WIRE.stream_window_bytes
            ack.gateways = self._channel.advertised_gateways
            ack.ticket_keys = self._channel.tickets.keyring.list_public()
            ack.time_ms = clock.unix_ms()
            ack.accepting = not (opened.cordoned or opened.draining or opened.mode == NodeMode.SPARE_OFF.value)
        return ack

    # the end

    def _kick(self, code: int, reason: str) -> None:
        """Close the socket beside, unless that is under way: the node was replaced, say, or stopped answering."""
        if not self.close_reason:
            self.close_reason = reason
            self._channel.run_beside(self._close(code, reason))

    async def _close(self, code: int, reason: str) -> None:
        if self.link is not None:
            self._channel.registry.remove(self.link, reason)
        try:
            short = reason.encode()[:120].decode(errors="ignore")  # RFC 6455 section 5.5 allows 123 bytes
            async with asyncio.timeout(2.0):
                await self.send({"type": "websocket.close", "code": code, "reason": short})
        except (OSError, RuntimeError, TimeoutError):
            logger.debug("worker.close_unsent address=%s", self.address)

    def _leave(self) -> None:
        link = self.link
        if link is None:
            return
        reason = self.close_reason or "the socket closed"
        link.outbox.stop()
        self._channel.registry.remove(link, "the connection to the node was lost")
        logger.info("worker.disconnected node=%s reason=%s", link.node_name, reason)
        # Beside, because a server that stops cancels the task of the socket.
        if not link.is_end_stored:
            self._channel.run_beside(self._channel.store_ends([link], reason))
