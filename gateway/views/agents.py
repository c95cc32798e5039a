"""Doors for agents of the central-server document: registration, the session's socket, and its fallback over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial
from http import HTTPStatus
from urllib.parse import parse_qs

from django.db import DatabaseError

from core.db.threads import run_in_database
from gateway.errors import GatewayError, RecordsUnavailable
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection, Receive, Scope, Send
from gateway.request.response import Application, refuse_socket
from gateway.values import HeaderView
from gateway.views.endpoints import Handler, make_endpoint, send_answer
from nodes.agents import AgentSocket, RelayedAgent, poll
from nodes.channel import CredentialCheck, CredentialRefused, NodeChannel
from nodes.errors import BadRequest, InvalidNodeToken, NodeError, SessionUnknown
from nodes.models import Node, NodeCredential, Reach
from nodes.services.agents import find_agent_session, find_endpoint, register_agent
from nodes.states import freshness_windows
from wire import agent, clock
from wire.bridge import MUSTER_V1
from wire.ids import format_id

_TYPES = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


def make_agent_routes(runtime: GatewayRuntime) -> list[tuple[str, Application]]:
    """Return the patterns of the HTTP routes of agents, anchors left out, with their applications."""
    views = AgentViews(runtime)
    return [
        ("api/v1/register", make_endpoint(runtime, {"POST": _say_errors(views.register)})),
        ("api/v1/session/(?P<session_id>[^/]+)", make_endpoint(runtime, {"POST": _say_errors(views.poll)})),
    ]


def make_agent_socket(runtime: GatewayRuntime) -> Application:
    """Return the ASGI application of ``/api/v1/session/{id}`` over WebSocket. What is wrong is said before the upgrade."""
    views = AgentViews(runtime)

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        session_id = str(scope["url_route"]["kwargs"]["session_id"])
        address = str((scope.get("client") or ("unknown", 0))[0])
        try:
            node = await views.find_session(session_id, HeaderView(scope["headers"]), address)
            is_relayed = node.reach == Reach.RELAY.value and node.presence.protocol in (agent.METALYARD_RELAY, MUSTER_V1)
            serve_agent = _serve_relayed if is_relayed else _serve
            await serve_agent(runtime.node_channel, node, scope, receive, send)
        except NodeError as error:
            await refuse_socket(scope, receive, send, _as_gateway_error(error))
        except DatabaseError:
            away = RecordsUnavailable("The database cannot be reached now; please retry", retry_after_s=2)
            await refuse_socket(scope, receive, send, away)

    return serve


async def _serve(channel: NodeChannel, node: Node, _scope: Scope, receive: Receive, send: Send) -> None:
    await AgentSocket(channel, node, send).serve(receive)


async def _serve_relayed(channel: NodeChannel, node: Node, scope: Scope, receive: Receive, send: Send) -> None:
    await RelayedAgent(channel, node, send).serve(scope, receive, send)


class AgentViews:
    """Endpoints that agents call, and who may."""

    def __init__(self, runtime: GatewayRuntime) -> None:
        self._channel = runtime.node_channel

    async def register(self, client: ClientConnection) -> None:
        """``POST /api/v1/register``: enrols the node, or begins a new session of it. Raises NodeError."""
        try:
            said = agent.decode_register(await client.read_body(self._channel.limits.agent_message_bytes))
        except agent.AgentError as error:
            at = f"{error.param}: " if error.param else ""
            raise BadRequest(f"The registration cannot be used: {at}{error}.", param=error.param or None) from None
        token = _read_bearer(client.headers) or said.auth_token
        credential = await self._identify(token, client.address)
        endpoint = await asyncio.to_thread(find_endpoint, said)
        work = partial(register_agent, credential=credential, said=said, peer_address=client.address, endpoint=endpoint)
        session = await run_in_database(work)
        policy = self._channel.limits
        stale_after_s, dead_after_s = freshness_windows(policy, protocol=agent.METALYARD)
        config = agent.AgentConfig(
            stale_after_s=stale_after_s,
            dead_after_s=dead_after_s,
            max_message_bytes=policy.agent_message_bytes,
            gateways=self._channel.advertised_gateways,
            time=clock.now().isoformat().replace("+00:00", "Z"),
            warnings=list(session.warnings),
        )
        answer = agent.AgentRegistered(
            session_id=str(session.session_id),
            heartbeat_interval=policy.agent_heartbeat_s,
            config=config,
            node_id=format_id("node", session.node.pk),
        )
        send_answer(client, 200, answer)

    async def poll(self, client: ClientConnection) -> None:
        """``POST /api/v1/session/{id}``: a heartbeat or a command's status over HTTP; the answer holds commands."""
        node = await self.find_session(str(client.scope["url_route"]["kwargs"]["session_id"]), client.headers, client.address)
        try:
            said = agent.decode_message(await client.read_body(self._channel.limits.agent_message_bytes))
        except agent.AgentError as error:
            at = f"{error.param}: " if error.param else ""
            raise BadRequest(f"The message cannot be used: {at}{error}.", param=error.param or None) from None
        if isinstance(said, agent.AgentCommandStatus):
            self._channel.take_command_status(node.pk, node.name, said)
            send_answer(client, 200, {"commands": []})
            return
        standing, commands = await client.wait_for_work(poll(self._channel, node, said, wait_s=_read_wait(client)))
        answer = {"commands": commands, "status": standing.status.value, "should_drain": standing.should_drain}
        send_answer(client, 200, answer)

    async def find_session(self, text: str, headers: HeaderView, address: str) -> Node:
        """Return the node of a session. Its id is a secret of its agent; a credential, where one is sent, must be its own.

        Raises SessionUnknown, InvalidNodeToken.
        """
        try:
            session_id = uuid.UUID(text)
        except ValueError:
            raise SessionUnknown("A session id is a UUID, as the registration answered it. Register again.") from None
        token = _read_bearer(headers)
        credential = await self._identify(token, address) if token else None
        node = await run_in_database(find_agent_session, session_id)
        if credential is not None and credential.pk != node.credential_id and credential.node_id != node.pk:
            raise InvalidNodeToken("The session belongs to another credential.")
        return node

    async def _identify(self, token: str, address: str) -> NodeCredential:
        if not token:
            raise InvalidNodeToken("Send the node credential as auth_token, or as Authorization: Bearer msw_….")
        try:
            return await self._channel.credentials.call(CredentialCheck(address, token))
        except CredentialRefused as refusal:
            raise InvalidNodeToken(f"The node credential is not valid: {refusal}.") from None


def _say_errors(handler: Handler) -> Handler:
    """Return the handler with errors of the node registry said as the gateway says its own."""

    async def handle(client: ClientConnection) -> None:
        try:
            await handler(client)
        except NodeError as error:
            raise _as_gateway_error(error) from None

    return handle


def _as_gateway_error(error: NodeError) -> GatewayError:
    said = GatewayError(error.message, param=error.param, retry_after_s=error.retry_after_s)
    said.code, said.status, said.retryable = error.code, error.status, error.retryable
    said.type = said.anthropic_type = _TYPES.get(HTTPStatus(error.status), "invalid_request_error")
    return said


def _read_bearer(headers: HeaderView) -> str:
    text = headers.get("authorization", "")
    return text[7:].strip() if text[:7].lower() == "bearer " else ""


def _read_wait(client: ClientConnection) -> float:
    """Return for how many seconds an agent wants to wait for a command. Raises BadRequest."""
    values = parse_qs(client.scope.get("query_string", b"").decode("latin-1")).get("wait", ["0"])
    try:
        wait_s = float(values[0])
    except ValueError:
        raise BadRequest("wait is a number of seconds.", param="wait") from None
    return wait_s if wait_s > 0 else 0.0
