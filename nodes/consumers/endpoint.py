"""The ASGI application of the worker socket: who may open a session, and what all sessions of a process share.

Authentication failures are answered by close 1008 after the upgrade, as the worker protocol has it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

from django.conf import settings
from django.db import DatabaseError, InterfaceError

from core.db.threads import run_in_database, run_upkeep
from core.limits import limits
from core.throttle import AuthThrottle
from nodes import services
from nodes.channel import Courier
from nodes.consumers.session import BoxSession, Receive, Refused, Scope, Send
from nodes.errors import NodeNotFound, TooManySockets
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.links.relay import RelayLink
from nodes.links.source import SCOPE_FRAMES
from nodes.metrics import AUTH_FAILURES
from nodes.models import NodeCredential
from nodes.services import sessions
from nodes.session import ModeRequested
from wire import clock
from wire.contract import NodeMode
from wire.credentials import digest_credential

logger = logging.getLogger("muster.nodes")


@dataclass(frozen=True, slots=True)
class OwnerWord:
    """What an owner said at a node, and when (clock.monotonic())."""

    effect: ModeRequested
    said_at: float


class WorkerEndpoint:
    """The ASGI application of the worker socket, with what all its sessions share."""

    def __init__(
        self,
        *,
        registry: LinkRegistry,
        keeper: LinkKeeper,
        gateway_id: uuid.UUID,
        advertised_gateways: list[str],
    ) -> None:
        self.registry = registry
        self.keeper = keeper
        self.limits = limits().nodes
        self.gateway_id = gateway_id
        self.advertised_gateways = advertised_gateways
        self.throttle = AuthThrottle(
            failures=self.limits.auth_failures, block_s=self.limits.auth_block_s, read_digests=services.read_credential_digests
        )
        self._unregistered: Counter[str] = Counter()
        """Sockets by address, from the upgrade until they have registered or are closed."""
        self._reading_good = asyncio.Lock()
        self.courier = Courier(registry, gateway_id=gateway_id)
        self.registering = asyncio.Lock()
        """Held from choosing a node to linking it: bridge workers that share a name must see each other."""
        self.owner_words: dict[uuid.UUID, OwnerWord] = {}
        """What owners said at their nodes and the database does not know yet; the newest of each."""
        self._beside: set[asyncio.Task[None]] = set()

    def run_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that outlives the call that made it; it is bounded by a time-out of its own, or ended by ``close``."""
        task = asyncio.get_running_loop().create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def take_owner_word(self, link: RelayLink, effect: ModeRequested) -> None:
        """Write down that the owner lends a node or takes it back, however long the database is away and the link lives."""
        is_storing = link.node_id in self.owner_words
        self.owner_words[link.node_id] = OwnerWord(effect, clock.monotonic())
        if not is_storing:
            self.run_beside(self._store_mode(link.node_id, link.node_name))

    async def _store_mode(self, node_id: uuid.UUID, node_name: str) -> None:
        """Store the owner's newest word; until then rows do not undo it. One that was said elsewhere later makes it void."""
        while (word := self.owner_words.get(node_id)) is not None:
            try:
                await run_in_database(
                    services.set_mode,
                    node_id=node_id,
                    mode=NodeMode(word.effect.mode),
                    reason=(word.effect.reason or "owner at the box")[:200],
                    actor=f"node:{node_name}",
                    said_age_s=clock.monotonic() - word.said_at,
                )
            except NodeNotFound:
                logger.warning("node.mode_not_stored node=%s; the node was removed", node_name)
            except (DatabaseError, InterfaceError):
                logger.warning("node.mode_not_stored node=%s; trying again", node_name)
                await asyncio.sleep(1.0)
                continue
            if self.owner_words[node_id] is word:
                del self.owner_words[node_id]
                link = self.registry.get(node_id)
                if isinstance(link, RelayLink):
                    link.wanted_mode, link.mode_stored_at = None, clock.monotonic()

    async def store_farewells(self, links: Sequence[RelayLink], reason: str) -> None:
        """Mark the nodes of these links as gone from here, all in one statement."""
        ends = [sessions.SessionEnd(link.node_id, link.link_id, reason) for link in links]
        try:
            await run_upkeep(sessions.close_sessions, ends, gateway_id=self.gateway_id)
        except (DatabaseError, InterfaceError):
            logger.warning("worker.disconnect_not_stored nodes=%d; their presence will time out", len(links))
        else:
            for link in links:
                link.is_farewell_stored = True

    async def say_goodbye(self) -> None:
        """Write down at once that every node is gone from here, before the sockets close one by one."""
        links = [link for link in self.registry if isinstance(link, RelayLink) and not link.is_farewell_stored]
        if links:
            await self.store_farewells(links, "server shutdown")
        for link in links:
            link.is_farewell_stored = True  # or the database is away, and trying for each alone would not help

    async def close(self) -> None:
        """Wait a moment for what is still written about the nodes, then end it. The gateway stops."""
        if self._beside:
            await asyncio.wait(list(self._beside), timeout=self.limits.socket_close_s)
        for task in list(self._beside):
            task.cancel()
        await asyncio.gather(*self._beside, return_exceptions=True)
        for node_id in self.owner_words:
            logger.warning("node.mode_not_stored node_id=%s; the gateway stops, and the node says it again elsewhere", node_id)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one socket until it closes. Raises TooManySockets instead of taking the upgrade."""
        address = str((scope.get("client") or ("unknown", 0))[0])
        if self._unregistered[address] >= self.limits.max_unregistered and not await self._is_known(scope):
            AUTH_FAILURES.labels("too_many").inc()
            raise TooManySockets("Too many sockets of this address have yet to register; try again in a second.")
        with ExitStack() as unregistered:
            unregistered.enter_context(self._count_unregistered(address))
            await receive()
            await send({"type": "websocket.accept"})
            try:
                credential = await self._authenticate(scope, address)
            except Refused as refusal:
                await send({"type": "websocket.close", "code": refusal.code, "reason": refusal.reason})
                return
            frames = scope.get("extensions", {}).get(SCOPE_FRAMES)
            session = BoxSession(self, send, address, credential, frames, on_registered=unregistered.close)
            try:
                await session.run(receive)
            except asyncio.CancelledError:
                # Only a server that stops cancels sockets. The task ends here: the server would print a traceback for each.
                logger.warning("worker.cut_off address=%s; the gateway stops and did not wait any longer", address)

    @contextmanager
    def _count_unregistered(self, address: str) -> Iterator[None]:
        self._unregistered[address] += 1
        try:
            yield
        finally:
            self._unregistered[address] -= 1
            if not self._unregistered[address]:
                del self._unregistered[address]

    async def _is_known(self, scope: Scope) -> bool:
        """Whether the socket's credential is good, as far as that is known; it costs no query of its own."""
        async with self._reading_good:
            if self.throttle.is_reading_due:
                with suppress(DatabaseError, InterfaceError):
                    await run_upkeep(self.throttle.read_good)
        return self.throttle.knows(digest_credential(self._read_secret(scope)))

    async def _authenticate(self, scope: Scope, address: str) -> NodeCredential:
        try:
            credential = await run_in_database(self._find_credential, self._read_secret(scope), address)
            provider = _query(scope, "provider") or "local"
            provider_open = await run_in_database(sessions.is_provider_open, provider)
        except DatabaseError:
            logger.exception("worker.auth_unavailable")
            raise Refused(1013, "the control plane cannot check credentials now; try again") from None
        if not provider_open or provider != credential.provider.name:
            raise Refused(1008, "worker provider is unknown, disabled or not the credential's")
        self.throttle.record_success(address)
        return credential

    def _find_credential(self, secret: str, address: str) -> NodeCredential:
        """Return the credential; runs in a thread, where those of an address wait that came at once. Raises Refused."""
        if self.throttle.must_wait(address, digest_credential(secret)):
            AUTH_FAILURES.labels("throttled").inc()
            raise Refused(1008, "worker authentication temporarily rate limited")
        credential = services.find_credential(secret)
        if credential is None:
            self.throttle.record_failure(address)
            AUTH_FAILURES.labels("rejected").inc()
            raise Refused(1008, "worker authentication failed")
        return credential

    def _read_secret(self, scope: Scope) -> str:
        headers = dict(scope["headers"])
        secret = headers.get(b"x-worker-secret")
        if secret is not None:
            return str(secret.decode("latin-1")).strip()
        bearer = str(headers.get(b"authorization", b"").decode("latin-1"))
        if bearer.lower().startswith("bearer "):
            return bearer[7:].strip()
        return _query(scope, "worker_secret") if settings.NODE_ALLOW_QUERY_SECRET else ""


def _query(scope: Scope, name: str) -> str:
    values = parse_qs(scope.get("query_string", b"").decode("latin-1")).get(name)
    return values[0] if values else ""
