"""Everything one gateway process holds, put together, and the loop that keeps it in step with the database.

Hints make changes arrive at once; the sweep makes them arrive anyway. No part of this is on the path of a request.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import socket
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import redis.exceptions
from channels.layers import get_channel_layer
from django.conf import settings
from django.db import DatabaseError, InterfaceError, connection
from django.db.models.functions import Now
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from core.db.base import LAZILY
from core.db.threads import run_pulse, run_upkeep
from core.hints import HINT_GROUP
from core.limits import limits
from core.valkey import open_async_client
from gateway import metrics
from gateway.canary import Canaries
from gateway.errors import ShuttingDown
from gateway.models import GatewayProcess
from gateway.request.access_log import AccessMode, open_access_log
from gateway.request.budgets import Budgets, Valkey
from gateway.request.dispatch import Dispatcher
from gateway.request.identity import KeyRing, RateLimiter
from gateway.request.models import Admission, AliasEntry, Catalogue, KeyEntry, Marks, read_marks, store_key_use
from gateway.request.pipeline import Pipeline
from gateway.request.records import RecordWriter
from gateway.request.tickets import TicketOffice
from gateway.services.models import allow_declared, remember_models
from gateway.services.requests import close_orphaned_requests
from gateway.services.shares import DealerTable
from gateway.services.tickets import find_ended, store_usage
from gateway.services.usage import Spent
from gateway.token_counts import TokenCounter
from gateway.values import ModelEntry
from governance.alerts import count_by_kind
from nodes.addresses import resolve_direct_target
from nodes.channel import NodeChannel, presence_reports
from nodes.errors import NodeError
from nodes.links import EndKind, Link, LinkRegistry
from nodes.links.http import HttpTarget
from nodes.links.keeper import FLEET, LinkKeeper
from nodes.links.relay import RelayLink
from nodes.services.availability import EjectionReport, write_ejections
from nodes.services.certificates import KnownAuthority, load_authorities
from nodes.services.drains import write_drain_counts
from nodes.services.sessions import KnownNodes, write_presences
from nodes.services.tickets import KnownKey, load_ticket_keys
from nodes.states import DrainCount, NodeRow
from nodes.tickets import Refusals
from wire import RELEASE, clock
from wire.bridge import CANCEL_SERVER_SHUTDOWN, TicketUsage
from wire.ids import new_uuid7
from wire.traces import open_traces

logger = logging.getLogger("muster.gateway")


@dataclass(frozen=True, slots=True)
class _News:
    """What a sweep read; None = the table did not change. ``is_full``: ``keys`` are all there are, not the changed ones."""

    marks: Marks
    is_full: bool
    keys: list[tuple[str, KeyEntry]] | None
    models: list[ModelEntry] | None
    aliases: list[AliasEntry] | None
    ticket_keys: tuple[KnownKey, ...] | None
    authorities: tuple[KnownAuthority, ...] | None


class _HintedRows:
    """The rows that hints named since they were last taken. Whoever takes them reads these rows and no table."""

    def __init__(self) -> None:
        self.keys: set[uuid.UUID] = set()
        self.tenants: set[str] = set()
        self.models: set[str] = set()
        self.nodes: set[uuid.UUID] = set()
        self.is_all = False
        """A hint named no row, or one that this release cannot name, or all of them named too many."""

    def add(self, topic: str, ident: str) -> None:
        try:
            match topic:
                case "keys":
                    self.keys.add(uuid.UUID(ident))
                case "nodes":
                    self.nodes.add(uuid.UUID(ident))
                # What else stands there came from somebody who may write to Valkey; PostgreSQL would refuse some of it.
                case "tenants" if ident and ident.isprintable():
                    self.tenants.add(ident)
                case "models" if ident and ident.isprintable():
                    self.models.add(ident)
                case _:
                    self.is_all = True
        except ValueError:
            self.is_all = True
        if len(self.keys) + len(self.tenants) + len(self.models) + len(self.nodes) > limits().gateway.hint_rows:
            self.is_all = True


class GatewayRuntime:
    """One gateway process: links, queue, pipeline, and its background tasks."""

    def __init__(self) -> None:
        self.gateway_id = new_uuid7()
        self.started_at = clock.unix_s()
        self.limits = limits().gateway
        self.registry = LinkRegistry()
        self.keeper = LinkKeeper(
            self.registry,
            gateway_id=self.gateway_id,
            connect_s=self.limits.upstream_connect_s,
        )
        FLEET.keeper = self.keeper
        self.catalogue = Catalogue(self.limits)
        self.keys = KeyRing(self.catalogue)
        self.limiter = RateLimiter()
        self.dispatcher = Dispatcher(self.registry, self.keeper, self.limits, weights=self.catalogue.weights)
        self.records = RecordWriter(accept_s=self.limits.accept_s, max_pending=self.limits.max_pending_records)
        self.valkey = open_async_client(
            settings.REDIS_URL,
            socket_timeout=self.limits.budget_valkey_s,
            socket_connect_timeout=self.limits.budget_valkey_s,
            retry=Retry(NoBackoff(), 0),
        )
        self.budgets = Budgets(
            gateway_id=self.gateway_id,
            valkey=cast("Valkey", self.valkey),  # redis-py says that a call may be sync or async
            spending=Spent(),
            terms=DealerTable(),
            in_thread=run_upkeep,
            find_others=lambda: self.keeper.other_gateways,
            currency=settings.CURRENCY,
        )
        self.pipeline = Pipeline(
            gateway_id=self.gateway_id,
            keys=self.keys,
            limiter=self.limiter,
            admission=Admission(self.catalogue, self.is_known_model, self.dispatcher.rank_models),
            dispatcher=self.dispatcher,
            records=self.records,
            counter=TokenCounter(self.registry, Path(settings.TOKENIZERS_DIR) if settings.TOKENIZERS_DIR else None),
            limits=self.limits,
            budgets=self.budgets,
            traces=open_traces(os.environ, service="muster-gateway", instance=self.gateway_id.hex),
            access=open_access_log(AccessMode(settings.ACCESS_LOG), self.limits, is_json=settings.LOG_FORMAT == "json"),
        )
        self.canaries = Canaries(
            gateway_id=self.gateway_id,
            registry=self.registry,
            dispatcher=self.dispatcher,
            catalogue=self.catalogue,
            records=self.records,
            interval_s=self.limits.canary_interval_s,
        )
        self.node_channel = NodeChannel(
            self.keeper,
            advertised_gateways=settings.GATEWAY_ADVERTISED_URLS,
            store_usage=self._store_usage,
            hear_usage=self._hear_usage,
        )
        self.tickets = TicketOffice(
            self.pipeline,
            self.registry,
            self.node_channel.tickets.keyring,
            self.node_channel.tickets.certificates,
            f"{str(settings.GATEWAY_PUBLIC_URL).rstrip('/')}/v1",
        )
        self.pipeline.say_failover = self.tickets.say_failover_of_stream
        self._tasks: list[asyncio.Task[None]] = []
        self._cut_short: set[Link] = set()  # something still ran there when the gateway could wait no longer
        self._targets: dict[str, HttpTarget] = {}
        self._peers: dict[uuid.UUID, HttpTarget] = {}
        self._keys_mark: int | None = None
        self._marks: Marks | None = None
        self._full_at = 0.0
        self._nodes = KnownNodes(self.gateway_id)
        self._resolving: asyncio.Task[None] | None = None
        self._refresh = asyncio.Event()
        self._hinted = _HintedRows()
        self._drains_told: list[DrainCount] = []
        self._ejections_told: list[tuple[object, ...]] = []

    def is_known_model(self, name: str) -> bool:
        """Whether any node ever declared the model or an operator named it."""
        return name in self.catalogue.models or name in self.keeper.known_models or bool(self.registry.links_for(name))

    async def start(self) -> None:
        """Load everything once, then keep it fresh. Raises DatabaseError when the database cannot be reached."""
        metrics.COUNTERS.tells_tenants = settings.METRICS_TENANTS
        self.records.start()
        await run_upkeep(self._register_process)
        await self._sweep()
        loop = asyncio.get_running_loop()
        jobs = (
            self._run_sweeps(),
            # On a clock and a thread of its own: nothing that holds anything else up must make us look dead.
            self._repeat(self.limits.heartbeat_s, "gateway.heartbeat_failed", partial(run_pulse, self._beat)),
            self._run_reports(),
            self._repeat(self.limits.reconcile_s, "gateway.reconcile_failed", self._reconcile),
            self._run_ticks(),
            self._run_hints(),
            self._run_canaries(),
            self.budgets.run(),
            self.node_channel.run(),
        )
        self._tasks = [loop.create_task(job) for job in jobs]
        for task in self._tasks:
            task.add_done_callback(self._take_dead_task)
        logger.info("gateway.started id=%s pid=%d", self.gateway_id, os.getpid())

    def begin_stop(self) -> None:
        """Refuse new work; whoever waits for a node is told to come back. What runs for tickets needs no gateway."""
        if not self.pipeline.is_stopping:
            self.keeper.announce_stop(self.limits.shutdown_grace_s)
        self.pipeline.is_stopping = True
        self.tickets.free_slots()
        self.dispatcher.fail_waiting(ShuttingDown(retry_after_s=2))

    def interrupt_running(self) -> None:
        # What still runs is told so, instead of being cut with the process.
        self._cut_short = {link for link in self.registry if link.active}
        for link in list(self.registry):
            link.end_streams(EndKind.RECLAIMED, "the gateway stops", reason=CANCEL_SERVER_SHUTDOWN)

    async def say_goodbye(self) -> None:
        """Write down that the nodes are gone from here, before their sockets close; workers are closed in bridge v1's words."""
        await self.node_channel.end_sessions()
        for link in list(self.registry):
            if isinstance(link, RelayLink) and not link.session.speaks_muster:
                link.close("graceful shutdown timed out" if link in self._cut_short else "graceful shutdown complete")
        await asyncio.sleep(0)  # before the server closes what is open in words of its own

    @property
    def running_requests(self) -> int:
        return sum(link.active for link in self.registry)

    async def stop(self) -> None:
        """Let go of the nodes, write every record, say good-bye."""
        self.begin_stop()
        tasks = self._tasks if self._resolving is None else [*self._tasks, self._resolving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.node_channel.end_sessions()
        for link in self.registry:
            link.close("server shutdown")
            self.registry.remove(link, "the gateway is stopping")
        await self.node_channel.close()
        self.pipeline.counter.close()
        await self.valkey.aclose()
        await self.records.stop()
        if self.pipeline.traces is not None:
            await asyncio.to_thread(self.pipeline.traces.close)
        if self.pipeline.access is not None:
            self.pipeline.access.stop()
        try:
            await run_upkeep(self._unregister_process)
        except DatabaseError:
            logger.warning("gateway.farewell_not_stored; the reconciler will notice")

    # background

    def _take_dead_task(self, task: asyncio.Task[None]) -> None:
        # No background task ends by itself, and a gateway without one would serve revoked keys.
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("gateway.background_task_died; the gateway stops", exc_info=error)
            signal.raise_signal(signal.SIGTERM)

    async def _run_sweeps(self) -> None:
        loop = asyncio.get_running_loop()
        next_hint_at, sweep_at = 0.0, loop.time() + self.limits.sweep_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(sweep_at):
                    await self._refresh.wait()
                    await asyncio.sleep(next_hint_at - loop.time())
            was_hinted, began = self._refresh.is_set(), loop.time()
            self._refresh.clear()
            hinted, self._hinted = self._hinted, _HintedRows()
            is_sweep = hinted.is_all or not was_hinted or began >= sweep_at
            if is_sweep:
                sweep_at = began + self.limits.sweep_s
            try:
                await (self._sweep() if is_sweep else self._follow(hinted))
            except (DatabaseError, InterfaceError, OSError) as error:
                self._keys_mark = None  # the database that comes back may be another, with other marks
                logger.warning("gateway.sweep_failed error=%s; working from memory", type(error).__name__)
            if was_hinted:
                # Many nodes make a sweep long; those that all come at once must not have it take all the time.
                took_s = loop.time() - began
                next_hint_at = loop.time() + min(max(self.limits.hint_pause_s, 4 * took_s), self.limits.sweep_s)

    async def _repeat(self, pause_s: float, failed: str, work: Callable[[], Awaitable[object]]) -> None:
        while True:
            await asyncio.sleep(pause_s)
            try:
                await work()
            except (DatabaseError, InterfaceError, OSError) as error:
                logger.warning("%s error=%s", failed, type(error).__name__)

    async def _run_reports(self) -> None:
        # On a clock of their own: what holds a sweep up must not make our nodes look silent.
        for turn in itertools.count():
            if turn:
                await asyncio.sleep(self.limits.presence_s)
            news_only = turn % self.limits.presence_full_rounds != 0
            drains = self.keeper.list_drains()
            ejections = self.registry.ejections.list_marks()
            has_news = (drains, ejections) != (self._drains_told, self._ejections_told) or any(
                isinstance(link, RelayLink) and link.has_news for link in self.registry
            )
            if news_only and not has_news:
                continue
            used, self.keys.used = self.keys.used, {}
            try:
                await run_upkeep(self._write_back, used, drains, news_only=news_only)
                await self._write_ejections(ejections)
            except (DatabaseError, InterfaceError, OSError) as error:
                self.keys.used = used | self.keys.used
                logger.warning("gateway.report_failed error=%s", type(error).__name__)

    async def _write_ejections(self, marks: list[tuple[object, ...]]) -> None:
        if marks == self._ejections_told:
            return
        told = list(self.registry.ejections)
        now = clock.monotonic()
        reports = [
            EjectionReport(
                node_id=one.node_id,
                model=one.model,
                reason=one.fault.value,
                age_s=now - one.since,
                left_s=one.until - now,
                is_news=one.is_news,
                is_held=not one.is_only_told,
            )
            for one in told
        ]
        await run_upkeep(partial(write_ejections, reports, gateway_id=self.gateway_id))
        self._ejections_told = marks
        for one in told:
            one.is_news = False

    async def _run_ticks(self) -> None:
        while True:
            await asyncio.sleep(self.limits.tick_s)
            self.keeper.tick()
            self.limiter.forget_idle()
            self.pipeline.recorder.forget_idle()
            metrics.WORKERS.set(len(self.registry))

    async def _reconcile(self) -> None:
        await run_upkeep(close_orphaned_requests)
        metrics.show_alerts(await run_upkeep(count_by_kind))
        if held := list(self.tickets.held):  # another gateway may have heard of them, and nobody of some
            self.tickets.settle(await run_upkeep(find_ended, held))

    async def _run_canaries(self) -> None:
        while True:
            await asyncio.sleep(self.limits.canary_look_s)
            await self.canaries.ask_due()

    async def _run_hints(self) -> None:
        while True:
            try:
                layer = get_channel_layer()
                channel = await layer.new_channel()
                await layer.group_add(HINT_GROUP, channel)
                self._look_at_all()
                while True:
                    message = await layer.receive(channel)
                    self._take_hint(message["topic"], message["ident"])
            # A lost hint costs one sweep, so every failure just means trying again.
            except (redis.exceptions.RedisError, OSError) as error:
                logger.warning("gateway.hints_lost error=%s; sweeping until it is back", type(error).__name__)
                await asyncio.sleep(1.0)

    def _look_at_all(self) -> None:
        self._hinted.is_all = True
        self._refresh.set()

    def _take_hint(self, topic: str, ident: str) -> None:
        if topic in {"commands", "policy", "checkpoints"}:
            self.node_channel.wake(topic)
        if topic in {"commands", "policy", "checkpoints", "operations"}:
            return  # nothing of it is kept here
        if topic in {"keys", "tenants"}:
            self.keys.forget_unknown()
        self._hinted.add(topic, ident)
        self._refresh.set()

    async def _sweep(self) -> None:
        now = clock.monotonic()
        credentials = list({link.credential_id for link in self.registry if isinstance(link, RelayLink)})
        since = self._keys_mark if now - self._full_at <= self.limits.reload_s else None
        news = await run_upkeep(self._load, since, credentials)
        if news.keys is not None:
            self.catalogue.apply_keys(news.keys, replace=news.is_full)
        if news.models is not None:
            self.catalogue.apply_models(news.models)
        if news.aliases is not None:
            self.catalogue.apply_aliases(news.aliases)
        self._marks, self._keys_mark = news.marks, news.marks.since
        if news.is_full:
            self._full_at = now
        self.keeper.other_gateways = frozenset(news.marks.others)
        self._peers = _find_peers(news.marks.others)
        rows = list(self._nodes.rows.values())
        for url in self._targets.keys() - {row.public_base_url for row in rows if row.is_direct}:
            del self._targets[url]
        self.keeper.apply(rows, targets=self._known_targets(rows), peers=self._peers, read_at=now)
        self.node_channel.tell_agents(self.keeper.rows)
        if news.ticket_keys is not None:
            self.node_channel.tickets.keyring.take(news.ticket_keys)
        if news.authorities is not None:
            self.node_channel.tickets.certificates.take(news.authorities)
        self.keeper.trust(self.node_channel.tickets.certificates.authorities)
        self.node_channel.tickets.tell_keys()
        self.keeper.cut_off(news.marks.revoked)
        await self._remember_declared()

    async def _follow(self, hinted: _HintedRows) -> None:
        """Read the rows that hints named, in one statement for each table. The next sweep finds whatever else changed."""
        now = clock.monotonic()
        if hinted.keys or hinted.tenants:
            keys = await run_upkeep(partial(self.catalogue.load_named_keys, hinted.keys, tenants=hinted.tenants))
            self.catalogue.apply_keys(keys, replace=False)
        if hinted.models:
            self.catalogue.apply_named_models(hinted.models, await run_upkeep(self.catalogue.load_models, hinted.models))
        if hinted.nodes:
            await run_upkeep(self._nodes.read, hinted.nodes)
            rows = [row for node_id in hinted.nodes if (row := self._nodes.rows.get(node_id)) is not None]
            gone = hinted.nodes - self._nodes.rows.keys()
            self.keeper.update(rows, gone=gone, targets=self._known_targets(rows), peers=self._peers, read_at=now)
            self.node_channel.tell_agents(self.keeper.rows)
            if {row.gateway_id for row in rows if row.connected} - self.keeper.other_gateways - {None, self.gateway_id}:
                self._look_at_all()  # a node is on a gateway that the last sweep did not know
        await self._remember_declared()

    async def _remember_declared(self) -> None:
        declared = self.keeper.known_models.difference(self.catalogue.models)
        if declared:  # operators then see them, with a button that allows them
            await run_upkeep(remember_models, names=sorted(declared))
        known = self.catalogue.models
        trusted = {
            name: credential
            for name, credential in self.keeper.trusted_models.items()
            if (entry := known.get(name)) is None or not (entry.allowed or entry.refused)
        }
        if trusted:
            await run_upkeep(allow_declared, trusted)

    def _known_targets(self, rows: list[NodeRow]) -> dict[uuid.UUID, HttpTarget]:
        direct = {row.node_id: row.public_base_url for row in rows if row.is_direct}
        missing = set(direct.values()) - self._targets.keys()
        if missing and (self._resolving is None or self._resolving.done()):
            # Beside the sweep, because a name server may be slow.
            self._resolving = asyncio.get_running_loop().create_task(self._resolve(missing))
            self._resolving.add_done_callback(self._take_dead_task)
        keys = {row.node_id: {"authorization": f"Bearer {row.api_key}"} for row in rows if row.api_key}
        known = {node_id: self._targets[url] for node_id, url in direct.items() if url in self._targets}
        return {node_id: replace(target, headers=keys.get(node_id, {})) for node_id, target in known.items()}

    async def _resolve(self, urls: set[str]) -> None:
        found = await run_upkeep(_resolve_targets, urls)
        if found:
            self._targets |= found
            self._look_at_all()

    def _hear_usage(self, node_id: uuid.UUID, report: TicketUsage) -> None:
        self.tickets.hear(node_id, report)

    async def _store_usage(self, reports: Sequence[tuple[uuid.UUID, TicketUsage]]) -> Refusals:
        stored = await run_upkeep(store_usage, reports)
        self.tickets.take_ended(stored.ended)
        return stored.refused

    # in a database thread

    def _load(self, since: int | None, credentials: list[int]) -> _News:
        """Look what changed since the last sweep, and read that again; ``since`` None = read everything."""
        marks = read_marks(since=since, gateway_id=self.gateway_id, credentials=credentials, dead_s=self.limits.dead_s)
        before = self._marks
        if since is None or before is None or marks.since < since:
            since = before = None
            self._nodes.forget()
        if before is None or marks.nodes != self._nodes.mark:
            self._nodes.refresh()
        return _News(
            marks=marks,
            is_full=since is None,
            keys=self.catalogue.load_keys(since) if since is None or marks.has_new_keys else None,
            models=self.catalogue.load_models() if before is None or marks.models != self.catalogue.models_mark else None,
            aliases=self.catalogue.load_aliases() if before is None or marks.aliases != before.aliases else None,
            ticket_keys=load_ticket_keys() if before is None or marks.ticket_keys != before.ticket_keys else None,
            authorities=load_authorities() if before is None or marks.authorities != before.authorities else None,
        )

    def _beat(self) -> None:
        # By the database's clock, by which it is judged: that of this machine may be wrong.
        with connection.cursor() as cursor:
            cursor.execute(
                f"UPDATE gateway_gatewayprocess SET heartbeat_at = statement_timestamp() FROM {LAZILY} WHERE id = %s",  # noqa: S608
                [self.gateway_id],
            )

    def _write_back(self, used: dict[uuid.UUID, float], drains: list[DrainCount], *, news_only: bool) -> None:
        write_presences(presence_reports(self.registry, news_only=news_only), gateway_id=self.gateway_id)
        if drains != self._drains_told:
            write_drain_counts(drains, gateway_id=self.gateway_id)
            self._drains_told = drains
        store_key_use(used)

    def _register_process(self) -> None:
        GatewayProcess.objects.create(
            pk=self.gateway_id,
            host=socket.gethostname()[:120],
            pid=os.getpid(),
            internal_url=settings.GATEWAY_INTERNAL_URL,
            release=RELEASE,
            heartbeat_at=Now(),
        )

    def _unregister_process(self) -> None:
        GatewayProcess.objects.filter(pk=self.gateway_id).update(stopped_at=Now(), heartbeat_at=Now())


def _find_peers(others: dict[uuid.UUID, str]) -> dict[uuid.UUID, HttpTarget]:
    peers: dict[uuid.UUID, HttpTarget] = {}
    for gateway_id, internal_url in others.items() if settings.CLUSTER_SECRET else ():
        # One at our own address is the process before us: it is asked for nothing, and its nodes dial again.
        if internal_url in ("", settings.GATEWAY_INTERNAL_URL):
            continue
        parts = urlsplit(internal_url)
        host = parts.hostname or "127.0.0.1"
        peers[gateway_id] = HttpTarget(
            scheme=parts.scheme,
            host=host,
            address=host,
            port=parts.port or (443 if parts.scheme == "https" else 80),
            base_path="/internal/v1/nodes",
            headers={"x-muster-cluster": settings.CLUSTER_SECRET},
        )
    return peers


def _resolve_targets(urls: set[str]) -> dict[str, HttpTarget]:
    found: dict[str, HttpTarget] = {}
    for url in urls:
        try:
            target = resolve_direct_target(url)
        except NodeError as error:
            logger.warning("node.address_refused reason=%s", error.message)
            continue
        found[url] = HttpTarget(
            scheme=target.scheme,
            host=target.host,
            address=str(target.address),
            port=target.port,
            base_path=target.base_path,
        )
    return found
