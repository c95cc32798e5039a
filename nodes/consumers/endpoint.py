"""The ASGI application of the worker socket: who may open a session, and what all sessions of a process share.

Authentication failures are answered by close 1008 after the upgrade, as the worker protocol has it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from urllib.parse import parse_qs

from django.db import DatabaseError

from nodes import services
from nodes.consumers.courier import Courier
from nodes.consumers.session import BoxSession, Receive, Refused, Scope, Send
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.links.source import SCOPE_FRAMES
from nodes.metrics import AUTH_FAILURES
from nodes.models import NodeCredential
from nodes.offload import run_in_database
from nodes.services import sessions
from nodes.states import HealthPolicy, SocketPolicy
from nodes.throttle import AuthThrottle

logger = logging.getLogger("muster.nodes")


class WorkerEndpoint:
    """The ASGI application of the worker socket, with what all its sessions share."""

    def __init__(
        self,
        *,
        registry: LinkRegistry,
        keeper: LinkKeeper,
        sockets: SocketPolicy,
        health: HealthPolicy,
        gateway_id: uuid.UUID,
        advertised_gateways: list[str],
    ) -> None:
        self.registry = registry
        self.keeper = keeper
        self.sockets = sockets
        self.health = health
        self.gateway_id = gateway_id
        self.advertised_gateways = advertised_gateways
        self.throttle = AuthThrottle(sockets)
        self.courier = Courier(registry, gateway_id=gateway_id)
        self.registering = asyncio.Lock()
        """Held from choosing a node to linking it: bridge workers that share a name must see each other."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes."""
        await receive()
        await send({"type": "websocket.accept"})
        address = str((scope.get("client") or ("unknown", 0))[0])
        try:
            credential = await self._authenticate(scope, address)
        except Refused as refusal:
            await send({"type": "websocket.close", "code": refusal.code, "reason": refusal.reason})
            return
        session = BoxSession(self, send, address, credential, scope.get("extensions", {}).get(SCOPE_FRAMES))
        await session.run(receive)

    async def _authenticate(self, scope: Scope, address: str) -> NodeCredential:
        if self.throttle.is_blocked(address):
            AUTH_FAILURES.labels("throttled").inc()
            raise Refused(1008, "worker authentication temporarily rate limited")
        secret = self._read_secret(scope)
        try:
            credential = await run_in_database(services.find_credential, secret) if secret else None
            if credential is None:
                self.throttle.record_failure(address)
                AUTH_FAILURES.labels("rejected").inc()
                raise Refused(1008, "worker authentication failed")
            provider = _query(scope, "provider") or "local"
            provider_open = await run_in_database(sessions.is_provider_open, provider)
        except DatabaseError:
            logger.exception("worker.auth_unavailable")
            raise Refused(1013, "the control plane cannot check credentials now; try again") from None
        if not provider_open or provider != credential.provider.name:
            raise Refused(1008, "worker provider is unknown, disabled or not the credential's")
        self.throttle.record_success(address)
        return credential

    def _read_secret(self, scope: Scope) -> str:
        headers = dict(scope["headers"])
        secret = headers.get(b"x-worker-secret")
        if secret is not None:
            return str(secret.decode("latin-1")).strip()
        bearer = str(headers.get(b"authorization", b"").decode("latin-1"))
        if bearer.lower().startswith("bearer "):
            return bearer[7:].strip()
        return _query(scope, "worker_secret") if self.sockets.allow_query_secret else ""


def _query(scope: Scope, name: str) -> str:
    values = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(name)
    return values[0] if values else ""
