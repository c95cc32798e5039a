"""Agent sessions: the socket and the HTTP fallback by which a foreign program on a node reports and is sent commands.

Source: central-server document, sections 1.1 and 1.3. Requests do not come this way: gateways call the node's endpoint.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from django.db import DatabaseError
from prometheus_client import Counter

from core.db.threads import run_in_database
from nodes.channel import AgentLine, CredentialCheck, CredentialRefused, NodeChannel
from nodes.consumers import NodeConsumer
from nodes.errors import InvalidNodeToken, SessionUnknown, TooManySockets
from nodes.models import Node, NodeCredential, Reach
from nodes.services.agents import (
    AgentReport,
    AgentStanding,
    end_agent_session,
    find_agent_session,
    list_loaded,
    read_telemetry,
    to_telemetry,
)
from nodes.session import ModelsChanged, TelemetryArrived
from nodes.states import freshness_windows
from wire import bridge, clock
from wire.agent import (
    METALYARD,
    METALYARD_RELAY,
    AgentCommand,
    AgentCommandStatus,
    AgentError,
    AgentHeartbeat,
    decode_message,
    encode,
)

logger = logging.getLogger("muster.nodes")

Event = dict[str, Any]
"""An ASGI event; the specification leaves its values open."""
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
HEARTBEATS = Counter("muster_agent_heartbeats_total", "Heartbeats of agents", ["way"])
_GOODBYES = frozenset({1000, 1001})
"""Close codes of RFC 6455 section 7.4.1 with which a program leaves on purpose."""


async def identify(channel: NodeChannel, token: str, *, address: str) -> NodeCredential:
    """Return the credential that an agent shows. Raises InvalidNodeToken, DatabaseError."""
    if not token:
        raise InvalidNodeToken("Send the node credential, or a JWT, as auth_token or as Authorization: Bearer.")
    try:
        return await channel.credentials.call(CredentialCheck(address, token))
    except CredentialRefused as refusal:
        raise InvalidNodeToken(f"The node credential is not valid: {refusal}.") from None


async def find_session(channel: NodeChannel, text: str, *, token: str, address: str) -> Node:
    """Return the node of a session. Its id is a secret of its agent; ``token``, where one is sent, must be of its credential.

    Raises SessionUnknown, InvalidNodeToken, DatabaseError.
    """
    credential = await identify(channel, token, address=address) if token else None
    try:
        node = await run_in_database(find_agent_session, _read_session_id(text))
    except SessionUnknown as error:
        if credential is None:  # nothing else says who it is
            raise InvalidNodeToken(error.message) from None
        raise
    if credential is not None and credential.pk != node.credential_id and credential.node_id != node.pk:
        raise InvalidNodeToken("The session belongs to another credential.")
    return node


def _read_session_id(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise SessionUnknown("A session id is a UUID, as the registration answered it. Register again.") from None


def open_socket(channel: NodeChannel, node: Node, scope: Event, send: Send) -> AgentSocket | RelayedAgent:
    """Return what serves the socket of a session: its agent takes requests over it, or at its endpoint.

    Raises TooManySockets.
    """
    is_relayed = node.reach == Reach.RELAY.value and node.presence.protocol in (METALYARD_RELAY, bridge.MUSTER_V1)
    return RelayedAgent(channel, node, scope, send) if is_relayed else AgentSocket(channel, node, send)


class Commands:
    """What an agent is told, on its way to its socket. At most one for each of its operations, drains and reports waits."""

    def __init__(self, channel: NodeChannel, node: Node, *, send: Send, kick: Callable[[str], None]) -> None:
        """Raises TooManySockets instead of taking one more."""
        if len(channel.agents) >= channel.limits.agent_sessions:
            raise TooManySockets("This gateway holds as many agents as it may; try again, or use another gateway.")
        self._channel, self._send = channel, send
        self._waiting: asyncio.Queue[msgspec.Struct] = asyncio.Queue()
        self.line = AgentLine(session=node, send=self._waiting.put_nowait, kick=kick)
        self.line.told_ticket_keys = () if node.ticket_url else None

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Write commands to the socket as long as it is open."""
        channel, line = self._channel, self.line
        channel.listen(line)
        logger.info("agent.connected node=%s", line.node_name)
        writer = channel.run_beside(self._write())
        try:
            yield
        finally:
            writer.cancel()
            channel.hang_up(line)

    async def _write(self) -> None:
        while True:
            message = await self._waiting.get()
            try:
                async with asyncio.timeout(self._channel.limits.socket_write_s):
                    await self._send({"type": "websocket.send", "text": encode(message).decode()})
            except (OSError, RuntimeError, TimeoutError):
                logger.warning("agent.message_unsent node=%s message=%r", self.line.node_name, message)
                return


class AgentSocket:
    """The socket of one agent. ``node`` as ``find_agent_session`` returned it."""

    def __init__(self, channel: NodeChannel, node: Node, send: Send) -> None:
        """Raises TooManySockets instead of taking one more."""
        self._channel, self._send = channel, send
        self._close_reason = ""
        self._dead_after_s = freshness_windows(channel.limits, protocol=METALYARD).offline_s
        self._commands = Commands(channel, node, send=send, kick=self._kick)
        self.line = self._commands.line

    async def serve(self, receive: Receive) -> None:
        """Take the upgrade, then read until the agent leaves, is silent for too long, or is fenced."""
        await receive()
        await self._send({"type": "websocket.accept"})
        code, line = 1006, self.line
        with self._commands.listen():
            code = await self._read(receive)
        logger.info("agent.disconnected node=%s code=%d reason=%s", line.node_name, code, self._close_reason)
        if code in _GOODBYES and not self._close_reason:
            with suppress(DatabaseError):  # its age says the same a little later
                await run_in_database(end_agent_session, session_id=line.session_id, reason="the agent said good-bye")

    async def _read(self, receive: Receive) -> int:
        """Return the code with which the socket closed."""
        while True:
            try:
                async with asyncio.timeout(self._dead_after_s):
                    event = await receive()
            except TimeoutError:
                await self._close(1001, "no heartbeat came in time")
                return 1006
            if event["type"] == "websocket.disconnect":
                return int(event.get("code") or 1005)
            frame = event["text"] if event.get("bytes") is None else event["bytes"]
            if len(frame) > self._channel.limits.agent_message_bytes:
                await self._close(1009, f"a message has at most {self._channel.limits.agent_message_bytes} bytes")
            elif not self._close_reason:
                await self._take(frame)

    async def _take(self, frame: str | bytes) -> None:
        try:
            match decode_message(frame):
                case AgentHeartbeat() as heartbeat:
                    HEARTBEATS.labels("socket").inc()
                    await self._channel.heartbeats.call(AgentReport(self.line.session_id, heartbeat))
                case AgentCommandStatus() as status:
                    self._channel.take_command_status(self.line.node_id, self.line.node_name, status)
                case bridge.UsageReport() as said:
                    self.line.send_message(await self._channel.tickets.take_usage_of_agent(self.line.node_id, said.reports))
        except AgentError as error:
            at = f" at {error.param}" if error.param else ""
            await self._close(1002, f"the message cannot be used: {error}{at}")
        except SessionUnknown as error:
            await self._close(1008, error.message)
        except DatabaseError:
            # The sign of life is lost, and the next one may be stored: three in a row make the node dead. Reports are repeated.
            logger.warning("agent.message_not_stored node=%s", self.line.node_name)

    def _kick(self, reason: str) -> None:
        if not self._close_reason:
            self._channel.run_beside(self._close(1008, reason))

    async def _close(self, code: int, reason: str) -> None:
        if self._close_reason:
            return
        self._close_reason = reason
        short = reason.encode()[:120].decode(errors="ignore")  # RFC 6455 section 5.5 allows 123 bytes
        with suppress(OSError, RuntimeError, TimeoutError):
            async with asyncio.timeout(self._channel.limits.socket_close_s):
                await self._send({"type": "websocket.close", "code": code, "reason": short})


class RelayedAgent(NodeConsumer):
    """The socket of an agent that takes requests over it: a muster v1 session whose registration was made over HTTP."""

    def __init__(self, channel: NodeChannel, node: Node, scope: Event, send: Send) -> None:
        """Raises TooManySockets instead of taking one more."""
        super().__init__(channel)
        self._node, self._arguments = node, (scope, send)
        assert node.credential is not None
        self.credential = node.credential
        self._commands = Commands(channel, node, send=send, kick=lambda reason: self._kick(1008, reason))
        self._told = read_telemetry(node.presence)

    async def serve(self, receive: Receive) -> None:
        """Serve the socket until it closes."""
        scope, send = self._arguments
        with self._commands.listen():
            await self(scope, receive, send)

    async def websocket_connect(self, _message: Event) -> None:
        """Take the upgrade and link the node with what it registered. Raises Refused."""
        await self.send({"type": "websocket.accept"})
        node = self._node
        register = bridge.Register(
            worker_name=node.name,
            models=node.model_names,
            max_concurrent=node.max_concurrent,
            protocol_version=bridge.MUSTER_V1,
            instance_id=str(node.agent_session),
            agent_version=node.agent_version,
            gpus=self._told.gpus,
            replicas=self._told.replicas,
            available=self._told.available,
        )
        self.link = await self._register(bridge.encode_message(register))

    def take_frame(self, frame: str | bytes) -> None:
        """Take one frame: muster v1, or a message of the document."""
        if isinstance(frame, bytes) or self.link is None or not _IS_OF_AGENTS.search(frame, 0, 200):
            super().take_frame(frame)
            return
        self.link.last_seen = clock.awake()
        try:
            said = decode_message(frame)
        except AgentError as error:
            self._kick(1002, f"the message cannot be used: {error}")
            return
        if isinstance(said, AgentCommandStatus):
            self._channel.take_command_status(self.link.node_id, self.link.node_name, said)
            return
        assert isinstance(said, AgentHeartbeat)
        HEARTBEATS.labels("relay").inc()
        self._told = to_telemetry(said, before=self._told)
        self.link.node_draining = said.status == "draining"
        self._take_control(self.link, ModelsChanged(list_loaded(self._told), self._told.current_load))
        self._take_control(self.link, TelemetryArrived(self._told))


_IS_OF_AGENTS = re.compile(r'"type"\s*:\s*"(heartbeat|command_status)"')


async def poll(
    channel: NodeChannel, node: Node, heartbeat: AgentHeartbeat, *, wait_s: float
) -> tuple[AgentStanding, list[AgentCommand]]:
    """Take a heartbeat over HTTP and return the commands for the node, as soon as there is one or after ``wait_s``.

    An agent that also holds a socket is sent its commands there. Raises SessionUnknown, DatabaseError.
    """
    HEARTBEATS.labels("poll").inc()
    assert node.agent_session is not None
    standing = await channel.heartbeats.call(AgentReport(node.agent_session, heartbeat))
    commands: list[AgentCommand] = []
    if node.pk in channel.agents:
        return standing, commands
    something = asyncio.Event()

    def take(command: msgspec.Struct) -> None:
        if isinstance(command, AgentCommand):
            commands.append(command)
        something.set()

    line = AgentLine(session=node, send=take, kick=lambda _reason: something.set())
    try:
        channel.listen(line)
        with suppress(TimeoutError):
            async with asyncio.timeout(min(max(wait_s, channel.limits.agent_look_s), channel.limits.agent_poll_s)):
                await something.wait()
    finally:
        channel.hang_up(line)
    return standing, commands
