"""Doors for agents of the central-server document: registration, the session's socket, and its fallback over HTTP."""

from __future__ import annotations

import asyncio
from functools import partial
from urllib.parse import parse_qs

from django.db import DatabaseError

from core.db.threads import run_in_database
from gateway.errors import GatewayError, RecordsUnavailable
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection, Receive, Scope, Send
from gateway.request.response import Application, refuse_socket
from gateway.values import HeaderView
from gateway.views.endpoints import Handler, make_endpoint, send_answer
from nodes.agents import find_session, identify, open_socket, poll
from nodes.errors import BadRequest, InvalidNodeToken, NodeError
from nodes.services.agents import find_endpoint, register_agent
from nodes.services.credentials import read_jwt_subject
from nodes.states import freshness_windows
from wire import agent, bridge, clock
from wire.ids import format_id


def make_agent_routes(runtime: GatewayRuntime) -> list[tuple[str, Application]]:
    """Return the patterns of the HTTP routes of agents, anchors left out, with their applications."""
    views = AgentViews(runtime)
    return [
        ("api/v1/register", make_endpoint(runtime, {"POST": _say_errors(views.register)})),
        ("api/v1/session/(?P<session_id>[^/]+)", make_endpoint(runtime, {"POST": _say_errors(views.poll)})),
    ]


def make_agent_socket(runtime: GatewayRuntime) -> Application:
    """Return the ASGI application of ``/api/v1/session/{id}`` over WebSocket. What is wrong is said before the upgrade."""
    channel = runtime.node_channel

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        session_id = str(scope["url_route"]["kwargs"]["session_id"])
        address = str((scope.get("client") or ("unknown", 0))[0])
        try:
            node = await find_session(channel, session_id, token=_read_bearer(HeaderView(scope["headers"])), address=address)
            socket = open_socket(channel, node, scope, send)
        except NodeError as error:
            await refuse_socket(scope, receive, send, _as_gateway_error(error))
        except DatabaseError:
            away = RecordsUnavailable("The database cannot be reached now; please retry", retry_after_s=2)
            await refuse_socket(scope, receive, send, away)
        else:
            await socket.serve(receive)

    return serve


class AgentViews:
    """Endpoints that agents call, and who may."""

    def __init__(self, runtime: GatewayRuntime) -> None:
        self._channel = runtime.node_channel

    async def register(self, client: ClientConnection) -> None:
        """``POST /api/v1/register``: enrols the node, or begins a new session of it. Raises NodeError."""
        body = await client.read_body(self._channel.limits.agent_message_bytes)
        token = _read_bearer(client.headers) or agent.find_token(body)
        # Whoever shows a credential learns what is wrong with the body; of everybody else it is asked first.
        credential = await identify(self._channel, token, address=client.address)
        try:
            said = agent.decode_register(body)
        except agent.AgentError as error:
            raise _explain("registration", error) from None
        subject = read_jwt_subject(token)
        if subject not in (None, said.agent_id):
            raise InvalidNodeToken("The token names another agent in sub.")
        endpoint = await asyncio.to_thread(find_endpoint, said)
        work = partial(register_agent, credential=credential, said=said, peer_address=client.address, endpoint=endpoint)
        session = await run_in_database(work)
        if said.config.tickets:
            await self._channel.tickets.ensure_key()
        policy = self._channel.limits
        windows = freshness_windows(policy, protocol=agent.METALYARD)
        config = agent.AgentConfig(
            stale_after_s=windows.stale_s,
            dead_after_s=windows.offline_s,
            max_message_bytes=policy.agent_message_bytes,
            gateways=self._channel.advertised_gateways,
            time=clock.now().isoformat().replace("+00:00", "Z"),
            warnings=list(session.warnings),
            ticket_keys=self._channel.tickets.keyring.list_public(),
        )
        answer = agent.AgentRegistered(
            session_id=str(session.session_id),
            heartbeat_interval=policy.agent_heartbeat_s,
            config=config,
            node_id=format_id("node", session.node.pk),
        )
        send_answer(client, 200, answer)

    async def poll(self, client: ClientConnection) -> None:
        """``POST /api/v1/session/{id}``: a heartbeat, a command's status or usage over HTTP; the answer holds commands."""
        session_id = str(client.scope["url_route"]["kwargs"]["session_id"])
        token = _read_bearer(client.headers)
        node = await find_session(self._channel, session_id, token=token, address=client.address)
        try:
            said = agent.decode_message(await client.read_body(self._channel.limits.agent_message_bytes))
        except agent.AgentError as error:
            raise _explain("message", error) from None
        if isinstance(said, agent.AgentCommandStatus):
            self._channel.take_command_status(node.pk, node.name, said)
            send_answer(client, 200, {"commands": []})
            return
        if isinstance(said, bridge.UsageReport):
            taken = await self._channel.tickets.take_usage_of_agent(node.pk, said.reports)
            send_answer(client, 200, {"commands": [], "taken": taken.taken, "refused": taken.refused})
            return
        standing, commands = await client.wait_for_work(poll(self._channel, node, said, wait_s=_read_wait(client)))
        answer: dict[str, object] = {
            "commands": commands,
            "status": standing.status.value,
            "should_drain": standing.should_drain,
        }
        if node.ticket_url:
            answer["ticket_keys"] = self._channel.tickets.keyring.list_public()
        send_answer(client, 200, answer)


def _explain(what: str, error: agent.AgentError) -> BadRequest:
    at = f"{error.param}: " if error.param else ""
    return BadRequest(f"The {what} cannot be used: {at}{error}.", param=error.param or None)


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
