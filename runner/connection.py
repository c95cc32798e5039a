"""One gateway: dialling, the session on its socket, and dialling again. What streams do is the host's business."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
import struct
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn, Protocol, assert_never, cast
from urllib.parse import quote

import aiohttp
from aiohttp._websocket.helpers import websocket_mask
from aiohttp.http_websocket import WebSocketWriter

from runner.bridge import BridgeSession
from runner.errors import AuthRefused, NameInUse, SessionLost
from runner.limits import ConnectionLimits, limits
from runner.relay import Relay
from runner.session import Cancelled, ClientSession, Credited, Effect, Instruction, Notice, Opened, Outlet, Reply
from wire import clock
from wire.bridge import (
    MUSTER_V1,
    NAME_TAKEN,
    GracefulShutdown,
    Message,
    ModelFacts,
    ModelsRefresh,
    ModelsUpdate,
    NodeNotice,
    Ping,
    Pong,
    ProtocolError,
    Register,
    RegisterAck,
    Telemetry,
)
from wire.frames import End

log = logging.getLogger(__name__)

_FINAL_TEXT, _FINAL_BINARY = 0x81, 0x82
_MASKED, _SIZES_OF_2, _SIZES_OF_8 = 0x80, 126, 127
_HEAD, _HEAD_OF_2, _HEAD_OF_8 = struct.Struct(">BBI"), struct.Struct(">BBHI"), struct.Struct(">BBQI")


class Host(Protocol):
    """The node as a connection sees it. Nothing here may block."""

    def describe(self) -> Register:
        """Return the registration of a new session."""

    def take_sample(self) -> Awaitable[Telemetry]:
        """Return a fresh reading."""

    def list_models(self) -> ModelsUpdate:
        """Return the models to declare."""

    def refresh_models(self) -> None:
        """Have the engine's models looked at now."""

    def greet(self, link: GatewayLink, ack: RegisterAck) -> None:
        """Take note of an accepted registration."""

    def hear_mode(self, *, is_reclaimed: bool, drain_s: int | None) -> None:
        """Take note of what the control plane says: whether the owner has taken this node back, and when a drain ends."""

    def hear_time(self, server_ms: int) -> None:
        """Take note of the server's clock, in Unix milliseconds."""

    def instruct(self, link: GatewayLink, instruction: Instruction) -> None:
        """Do or answer what the control plane says about operations; answers go to ``link``."""

    @property
    def load(self) -> int:
        """Requests being served: for all gateways, and on the node's own port."""

    @property
    def is_leaving(self) -> bool:
        """Whether new requests are refused."""

    @property
    def relay(self) -> Relay:
        """What serves streams."""


class GatewaySocket(aiohttp.ClientWebSocketResponse):
    """The WebSocket of a session, and the outlet of its streams. Nobody waits for what is posted."""

    def __init__(self, reader: Any, writer: WebSocketWriter, *rest: Any, **options: Any) -> None:  # Any: aiohttp's own business
        super().__init__(reader, writer, *rest, **options)
        self._transport = writer.transport
        self._draw_key = partial(random.Random().getrandbits, 32)  # noqa: S311  # as aiohttp does it
        self._bounds = limits().connection
        self._parts: list[bytes | bytearray] = []
        self._posted_bytes = 0
        self._room_bytes = self._bounds.outbox_bytes
        self._wanting_room: list[Callable[[], None]] = []
        self._is_behind = asyncio.Event()
        self.has_room = True

    @property
    def waiting_bytes(self) -> int:
        return self._posted_bytes + self._transport.get_write_buffer_size()

    def post(self, frame: str | bytes) -> None:
        """Send one message; on a connection that broke it is dropped, and ``watch_room`` says so."""
        if self._transport.is_closing():
            self._is_behind.set()
            return
        if isinstance(frame, str):
            first, frame = _FINAL_TEXT, frame.encode()
        else:
            first = _FINAL_BINARY
        # A masked frame of RFC 6455, section 5.2; those of control are made by aiohttp.
        size = len(frame)
        if size < _SIZES_OF_2:
            head = _HEAD.pack(first, _MASKED | size, self._draw_key())
        elif size < 1 << 16:
            head = _HEAD_OF_2.pack(first, _MASKED | _SIZES_OF_2, size, self._draw_key())
        else:
            head = _HEAD_OF_8.pack(first, _MASKED | _SIZES_OF_8, size, self._draw_key())
        masked = bytearray(frame)
        websocket_mask(head[-4:], masked)
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts += (head, masked)
        self._posted_bytes += len(head) + size
        if self._posted_bytes > self._room_bytes:
            self._look()

    def when_room(self, go_on: Callable[[], None]) -> None:
        """Call back, once, when streams may send again."""
        self._wanting_room.append(go_on)
        self._is_behind.set()

    async def watch_room(self) -> NoReturn:
        """Let streams go on once the gateway has read what waits for it. Raises SessionLost when it does not read at all."""
        while not self._transport.is_closing():
            await self._is_behind.wait()
            self._is_behind.clear()
            self._look()
            while not self.has_room and not self._transport.is_closing():
                if self.waiting_bytes > self._bounds.outbox_bytes_max:
                    raise SessionLost("the gateway does not read what is sent to it")
                await asyncio.sleep(self._bounds.outbox_look_s)  # aiohttp tells nobody
                self._look()
            wanting, self._wanting_room = self._wanting_room, []
            for go_on in wanting:
                go_on()
        raise SessionLost("the connection broke: it is closing")

    async def wait_sent(self) -> None:
        """Return when the kernel has taken everything."""
        while self.waiting_bytes:  # noqa: ASYNC110  # the transport wakes nobody
            await asyncio.sleep(self._bounds.outbox_look_s)

    async def close(self, *, code: int = aiohttp.WSCloseCode.OK, message: bytes = b"") -> bool:
        self._flush()
        return await super().close(code=code, message=message)

    def _flush(self) -> None:
        # Everything that was posted since the loop last served everybody who was ready leaves in one write.
        parts, self._parts, self._posted_bytes = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))
        if not self.has_room or self._transport.get_write_buffer_size():
            self._look()

    def _look(self) -> None:
        # Until the next write, what the transport holds only shrinks: the room that is found now may be counted on.
        self._room_bytes = self._bounds.outbox_bytes - self._transport.get_write_buffer_size()
        self.has_room = self._posted_bytes <= self._room_bytes
        if not self.has_room:
            self._is_behind.set()


class _TextOutlet:
    """Says what streams post as text of bridge v1."""

    def __init__(self, ws: GatewaySocket, protocol: BridgeSession) -> None:
        self._ws = ws
        self._protocol = protocol

    @property
    def has_room(self) -> bool:
        return self._ws.has_room

    def post(self, frame: bytes) -> None:
        if text := self._protocol.say_frame(frame):
            self._ws.post(text)

    def when_room(self, go_on: Callable[[], None]) -> None:
        self._ws.when_room(go_on)


class GatewayLink:
    """The node's side of one gateway, for as long as the process lives. ``url`` is ``ws(s)://host[:port][/prefix]``."""

    def __init__(
        self,
        url: str,
        *,
        host: Host,
        client: aiohttp.ClientSession,
        token: str,
        provider: str,
        trust: ssl.SSLContext | None = None,
        speaks_bridge: bool = False,
    ) -> None:
        self.url = url
        self.speaks_bridge = speaks_bridge
        """Whether it is a server of ModelRelay, which is spoken to in bridge v1."""
        self._target = f"{url}/v1/worker/connect?provider={quote(provider, safe='')}"
        self._host = host
        self._client = client
        self._trust: ssl.SSLContext | bool = True if trust is None else trust
        self._token = token
        self._limits = limits().connection
        self._session: _Session | None = None
        self.wake = asyncio.Event()
        """Set = telemetry is sent soon, because something changed."""
        self.takes_usage = False
        """Whether the gateway of this session takes reports of tickets."""
        self.names_authorities = False
        """Whether it has told this node which internal CAs there are, and so takes requests for certificates."""
        self._last_said, self._said_at = "", 0.0

    def post(self, message: Message) -> None:
        """Send a message soon, if there is a session."""
        if self._session is not None and self._session.is_accepted:
            self._session.say(message)

    async def flush(self, limit_s: float) -> None:
        """Wait, at most ``limit_s``, until everything posted has been handed to the socket."""
        if self._session is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._session.flush()

    async def run(self, *, give_up_s: float | None = None) -> None:
        """Hold a session, and another one after each loss, until cancelled.

        ``give_up_s``: return once no session could be had for so many seconds.
        """
        bounds = self._limits
        backoff_s, last_seen_at = bounds.reconnect_first_s, clock.monotonic()
        while give_up_s is None or clock.monotonic() - last_seen_at < give_up_s:
            session = _Session(self, self._host, bounds)
            self._session = session
            is_refused = False
            try:
                await session.run(await self._dial())
            except NameInUse:
                is_refused = True
                self._complain(
                    f"another node is at work under this name and credential; start one of them with another --name or give it "
                    f"its own credential gateway={self.url}; retrying every {bounds.auth_retry_s:g} s"
                )
            except AuthRefused as refusal:
                is_refused = True
                self._complain(
                    f"gateway refuses this node's credential; check --token, it must be a worker credential "
                    f"gateway={self.url} answer={refusal}; retrying every {bounds.auth_retry_s:g} s"
                )
            except (SessionLost, ProtocolError) as loss:
                if session.is_accepted:
                    log.warning("session lost gateway=%s reason=%s", self.url, loss)
                else:
                    self._complain(
                        f"gateway not connected gateway={self.url} reason={loss}; "
                        f"retrying at least every {bounds.reconnect_max_s:g} s"
                    )
            finally:
                self._session, self.takes_usage, self.names_authorities = None, False, False
            if session.accepted_at is not None:
                self._last_said, last_seen_at = "", clock.monotonic()
                if clock.monotonic() - session.accepted_at >= bounds.healthy_after_s:
                    backoff_s = bounds.reconnect_first_s
            # Full jitter: nodes that lost the same gateway must not come back in step.
            await asyncio.sleep(bounds.auth_retry_s if is_refused else random.uniform(0, backoff_s))  # noqa: S311
            backoff_s = min(backoff_s * 2, bounds.reconnect_max_s)

    def accepted(self, ack: RegisterAck) -> None:
        log.info("gateway connected gateway=%s node=%s", self.url, ack.node_id or ack.worker_id)
        for warning in ack.warnings:
            log.warning("gateway warns gateway=%s warning=%s", self.url, warning)
        self._host.greet(self, ack)

    async def _dial(self) -> GatewaySocket:
        try:
            async with asyncio.timeout(self._limits.connect_s):
                socket = await self._client.ws_connect(
                    self._target,
                    headers={"x-worker-secret": self._token},
                    max_msg_size=self._limits.message_bytes,
                    compress=0,
                    autoping=False,
                    ssl=self._trust,
                    timeout=aiohttp.ClientWSTimeout(ws_close=1.0),
                )
                return cast("GatewaySocket", socket)  # the client was made to open these
        except aiohttp.WSServerHandshakeError as error:
            if error.status in {401, 403}:
                raise AuthRefused(f"HTTP {error.status}") from None
            raise SessionLost(f"the gateway answers HTTP {error.status} instead of a WebSocket") from None
        except aiohttp.ClientConnectorCertificateError as error:
            why = getattr(error.certificate_error, "verify_message", "") or error.certificate_error
            raise SessionLost(
                f"its certificate cannot be trusted: {why}; check name and date, or name its CA with --gateway-ca FILE"
            ) from None
        except TimeoutError:
            raise SessionLost(f"no connection within {self._limits.connect_s:.0f} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise SessionLost(f"cannot connect: {getattr(error, 'strerror', None) or error}") from None

    def _complain(self, text: str) -> None:
        now = clock.monotonic()
        # At once when it is new, then again for as long as it stays.
        if text != self._last_said or now - self._said_at >= self._limits.say_again_s:
            self._last_said, self._said_at = text, now
            log.error("%s", text)


class _Session:
    """One WebSocket from registration to loss."""

    def __init__(self, link: GatewayLink, host: Host, bounds: ConnectionLimits) -> None:
        self._link = link
        self._host = host
        self._relay = host.relay
        self._limits = bounds
        self._protocol: ClientSession | BridgeSession = BridgeSession() if link.speaks_bridge else ClientSession()
        self._socket: GatewaySocket | None = None
        self._leave_asked = asyncio.Event()
        self._leave_within_s = bounds.drain_s
        self._heartbeat_s = bounds.heartbeat_s
        self._told_facts: list[ModelFacts] | None = None
        self._heard_at = clock.awake()
        self._wake = link.wake
        self.accepted_at: float | None = None

    @property
    def is_accepted(self) -> bool:
        return self.accepted_at is not None

    def post(self, frame: str | bytes) -> None:
        # Nobody waits for it, and a broken connection ends the session elsewhere.
        if self._socket is not None:
            self._socket.post(frame)

    def say(self, message: Message) -> None:
        """Send a message, if the protocol of the session has it."""
        if text := self._protocol.encode(message):
            self.post(text)

    async def flush(self) -> None:
        if self._socket is not None:
            await self._socket.wait_sent()

    async def run(self, ws: GatewaySocket) -> None:
        """Serve the socket until it is lost; always raises SessionLost, AuthRefused or ProtocolError."""
        self._heard_at = clock.awake()
        self._socket = ws
        is_violation = False
        tasks: list[asyncio.Task[None]] = []
        try:
            self.post(self._protocol.register(self._host.describe()))
            work = (self._read(ws), ws.watch_room(), self._report(), self._watch_silence(), self._leave_politely())
            tasks = [asyncio.create_task(each) for each in work]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task in done:
                    await task
        except ProtocolError:
            is_violation = True
            raise
        finally:
            for stream in self._protocol.close():
                self._relay.abort(stream)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await ws.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR if is_violation else aiohttp.WSCloseCode.OK)

    async def _read(self, ws: GatewaySocket) -> None:
        outlet = _TextOutlet(ws, self._protocol) if isinstance(self._protocol, BridgeSession) else ws
        while True:
            message = await ws.receive()
            self._heard_at = clock.awake()
            if message.type is aiohttp.WSMsgType.BINARY:
                for effect in self._protocol.receive_bytes(message.data):
                    self._apply(effect, outlet)
            elif message.type is aiohttp.WSMsgType.TEXT:
                said = self._protocol.receive_text(message.data)
                if isinstance(said, list):
                    for effect in said:
                        self._apply(effect, outlet)
                else:
                    self._obey(said)
            elif message.type is aiohttp.WSMsgType.PING:
                await ws.pong(message.data)
            elif message.type is not aiohttp.WSMsgType.PONG:
                raise explain_close(message)

    def _apply(self, effect: Effect, outlet: Outlet) -> None:
        host = self._host
        match effect:
            case Credited(stream):
                self._relay.credit(stream)
            case Opened(stream, body) if self._leave_asked.is_set() or host.is_leaving:
                del body
                outlet.post(stream.end(End(error="busy", message="the node is draining", retryable=True)))
            case Opened(stream, body):
                self._relay.open(stream, body, outlet)
            case Cancelled(stream):
                self._relay.abort(stream)
            case Reply(frame):
                outlet.post(frame)
            case _:
                assert_never(effect)

    def _obey(self, notice: Notice) -> None:
        host = self._host
        match notice:
            case Ping():
                if notice.timestamp_unix_ms is not None:
                    host.hear_time(notice.timestamp_unix_ms)
                self.say(Pong(current_load=host.load, timestamp_unix_ms=notice.timestamp_unix_ms))
            case ModelsRefresh():
                host.refresh_models()
                self.say(host.list_models())
            case GracefulShutdown():
                log.info("gateway asks to leave gateway=%s reason=%s", self._link.url, notice.reason or "")
                drain_s = notice.drain_timeout_secs
                self._leave_within_s = self._limits.drain_s if drain_s is None else drain_s
                self._leave_asked.set()
            case NodeNotice():
                log.info("node status=%s mode=%s cordoned=%s", notice.status, notice.mode, notice.cordoned)
                host.hear_mode(is_reclaimed=notice.mode == "spare_off", drain_s=notice.drain_s)
            case RegisterAck():
                self.accepted_at = clock.monotonic()
                if notice.heartbeat_interval_s:
                    self._heartbeat_s = notice.heartbeat_interval_s
                self._link.accepted(notice)
            case _:
                host.instruct(self._link, notice)

    async def _report(self) -> None:
        while True:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the wake, and a session that was
            # lost would wait for this task for ever.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_s):
                    await self._wake.wait()
            self._wake.clear()
            if self.is_accepted:
                self.say(self._leave_out_known(await self._host.take_sample()))
                await asyncio.sleep(min(self._limits.report_gap_s, self._heartbeat_s))

    def _leave_out_known(self, sample: Telemetry) -> Telemetry:
        # What was told of the models already is left out: it may be as long as all the rest.
        if sample.memory is not None and sample.memory.models is not None:
            told, self._told_facts = self._told_facts, sample.memory.models
            if told == sample.memory.models:
                sample.memory.models = None
        return sample

    async def _watch_silence(self) -> None:
        """Raise SessionLost when the gateway does not accept in time, or later says nothing for too long."""
        # Each frame only moves a number: arming a timer for every chunk would cost more than this loop.
        # Seconds in which this process stood still count for nothing: what the gateway said meanwhile waits unread.
        clock.beat()
        limit_s = self._limits.bridge_silence_s if self._link.speaks_bridge else self._limits.silence_s
        ack_by = clock.awake() + self._limits.ack_s
        while (left_s := self._heard_at + limit_s - clock.awake()) > 0:
            if not self.is_accepted:
                left_s = min(left_s, ack_by - clock.awake())
                if left_s <= 0:
                    raise SessionLost(f"the registration was not answered within {self._limits.ack_s:g} s")
            await asyncio.sleep(min(left_s, self._limits.beat_s))
            clock.beat()
        raise SessionLost(f"nothing heard for {limit_s:g} s")

    async def _leave_politely(self) -> None:
        await self._leave_asked.wait()
        give_up_at = clock.monotonic() + self._leave_within_s
        while self._protocol.streams and clock.monotonic() < give_up_at:  # noqa: ASYNC110  # the protocol wakes nobody
            await asyncio.sleep(0.05)
        raise SessionLost("the gateway went away as announced")


def explain_close(message: aiohttp.WSMessage) -> SessionLost:
    """Return why a gateway ended a session, by the last message of its socket."""
    if message.type is not aiohttp.WSMsgType.CLOSE:
        return SessionLost("the connection broke" if message.data is None else f"the connection broke: {message.data}")
    code, reason = message.data, str(message.extra or "")
    if code == aiohttp.WSCloseCode.POLICY_VIOLATION and "rate limited" not in reason:
        return NameInUse(reason) if reason == NAME_TAKEN else AuthRefused(reason or "close code 1008")
    if code == aiohttp.WSCloseCode.PROTOCOL_ERROR and "registration" in reason:
        spoken = "it is of an earlier release, or a server of ModelRelay, which takes --protocol bridge-v1"
        return SessionLost(f"the gateway does not take {MUSTER_V1}: {spoken} (code {code} {reason})")
    return SessionLost(f"closed with code {code} {reason}".rstrip())
