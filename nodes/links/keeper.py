"""Keeps the links of this process in step with what the database says of the nodes.

Runs on the event loop; the rows and the resolved addresses are fetched elsewhere and handed in. Everything that has a
deadline (drain, staleness, silence) is looked at by ``tick``.
"""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from prometheus_client import REGISTRY
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core.limits import limits
from nodes.links.http import HttpLink, HttpTarget
from nodes.links.port import EndKind, Link
from nodes.links.registry import LinkRegistry
from nodes.links.relay import RelayLink
from nodes.states import (
    Availability,
    DrainCount,
    Health,
    NodeFacts,
    NodeRow,
    ProviderTerms,
    freshness_windows,
    judge_availability,
)
from wire import bridge, clock
from wire.bridge import GpuInfo
from wire.contract import NodeMode, NodeStatus
from wire.ids import format_id

logger = logging.getLogger("muster.nodes")


_OTHERS = ("others", "")
_MIB = 1024 * 1024
_NODE = ("node", "node_id")
_SESSION, _REST = ("protocol", "health"), "contract-v1"
_GPU = (*_NODE, "gpu")


class LinkKeeper:
    """Applies node rows to links: policy, drains, fencing, and the links that are called over HTTP."""

    def __init__(self, registry: LinkRegistry, *, gateway_id: uuid.UUID, connect_s: float) -> None:
        self.registry = registry
        self._limits = limits().nodes
        self.gateway_id = gateway_id
        self.rows: dict[uuid.UUID, NodeRow] = {}
        self.known_models: frozenset[str] = frozenset()
        self.disabled_models: frozenset[str] = frozenset()
        self.terms: dict[str, tuple[ProviderTerms, ...]] = {}
        """Of the providers of a model, where one of them has terms of its own."""
        self.trusted_models: dict[str, str] = {}
        """Models that a credential allows, and its name."""
        self.other_gateways: frozenset[uuid.UUID] = frozenset()
        """Which are alive, whether they can be asked for their nodes or not: a node may be on one of their sockets."""
        self._connect_s = connect_s
        self._authorities = ""
        """The internal CAs that nodes which are called are verified with (PEM), beside those of this machine."""
        self._applied_at = self._read_at = clock.monotonic()
        self._updated_at: dict[uuid.UUID, float] = {}
        """When rows were read that are newer than the others."""
        self._believed_at = 0.0
        """From then on (clock.monotonic()) a node without heartbeats is gone; before, the database may have been."""
        self._told: dict[uuid.UUID, tuple[object, ...]] = {}
        self._shutdown_sent: set[uuid.UUID] = set()
        self.on_silence: Callable[[Sequence[Link]], None] = lambda _links: None
        """Takes at each tick which nodes missed a second heartbeat and are not given up."""
        self._lost: set[uuid.UUID] = set()
        """Nodes of agents that fell silent: each begins with few requests when it is back."""

    def apply(
        self,
        rows: Iterable[NodeRow],
        *,
        targets: Mapping[uuid.UUID, HttpTarget],
        peers: Mapping[uuid.UUID, HttpTarget],
        read_at: float | None = None,
    ) -> None:
        """Take fresh rows. ``targets`` are resolved addresses of direct nodes, ``peers`` the gateways that can be asked.

        ``read_at``: clock.monotonic() seconds before the rows were read; None = now. What an owner said later is newer.
        """
        now = clock.monotonic()
        self._read_at = now if read_at is None else read_at
        if now - self._applied_at > self._limits.rows_blind_s:
            self._believed_at = now + self._limits.rows_blind_s
        self._applied_at = now
        self._updated_at.clear()
        known, self.rows = self.rows, {row.node_id: row for row in rows}
        if known.keys() != self.rows.keys() or any(known[node_id] is not row for node_id, row in self.rows.items()):
            self._list_models()
        for row in self.rows.values():
            self._apply_row(row, targets.get(row.node_id), peers)
        self.registry.announce(None)
        self.tick()

    def update(
        self,
        rows: Sequence[NodeRow],
        *,
        gone: Collection[uuid.UUID],
        targets: Mapping[uuid.UUID, HttpTarget],
        peers: Mapping[uuid.UUID, HttpTarget],
        read_at: float,
    ) -> None:
        """Take fresh rows of some nodes, as ``apply`` takes those of all; ``gone`` have none any more."""
        known = self.rows
        self.rows = {node_id: row for node_id, row in known.items() if node_id not in gone}
        self.rows |= {row.node_id: row for row in rows}
        if gone or any(_list_offer(row) != _list_offer(known.get(row.node_id)) for row in rows):
            self._list_models()
        for row in rows:
            self._updated_at[row.node_id] = read_at
            self._apply_row(row, targets.get(row.node_id), peers)
            if (link := self.registry.get(row.node_id)) is not None:
                self.registry.announce(link)
        self.tick()

    def list_drains(self) -> list[DrainCount]:
        """Return how many requests run from here on each node that takes nothing new any more."""
        return [
            DrainCount(row.node_id, row.draining_since, link.active if (link := self.registry.get(row.node_id)) else 0)
            for row in self.rows.values()
            if row.draining_since is not None
        ]

    def welcome(self, link: Link, *, asked_at: float) -> None:
        """Apply to a new link what rows say that were read after its session was asked for (clock.monotonic())."""
        row = self.rows.get(link.node_id)
        if row is not None and self._find_read_at(row) >= asked_at:
            self._set_policy(link, row)

    def announce_stop(self, drain_s: float) -> None:
        """Tell bridge v1 workers that this gateway takes nothing new and closes within so long; what runs may end.

        Nodes of muster v1 hear it by the close of their socket: one that left before would dial in vain until the gateway is
        back, each time later.
        """
        for link in self.registry:
            if isinstance(link, RelayLink) and not link.session.speaks_muster and not link.drain_then_close:
                message = bridge.GracefulShutdown(reason="server shutdown", drain_timeout_secs=round(drain_s))
                link.send_message(message)
                link.node_draining = True  # one more request, a peer's for example, would end its session

    def cut_off(self, credentials: Collection[int]) -> None:
        """Let go of every node that connected with one of these credentials: they were revoked."""
        for link in self.registry:
            if isinstance(link, RelayLink) and link.credential_id in credentials:
                logger.info("node.credential_revoked node=%s", link.node_name)
                self.registry.remove(link, "the credential of the node was revoked")
                link.close("worker credential was revoked", code=1008)

    def judge_nodes(self) -> list[tuple[NodeRow, Availability]]:
        """Return every node with whether it may get work now; of a node linked here, by when it was heard here."""
        found = []
        for row in self.rows.values():
            if row.provider_state == "deleted":
                continue
            link = self.registry.get(row.node_id)
            facts = NodeFacts(
                age_s=row.heartbeat_age_s if link is None else link.silence_s,
                protocol=row.protocol,
                reported=NodeStatus(row.reported_status),
                mode=NodeMode(row.mode),
                draining=row.draining,
                cordoned=row.cordoned,
                is_accepting_jobs=row.is_accepting_jobs,
                silence_before_s=row.silence_before_s,
                unreachable="" if isinstance(link, RelayLink) else row.unreachable,
            )
            found.append((row, judge_availability(facts, self._limits)))
        return found

    def tick(self) -> None:
        """Look at everything that has a deadline. Called about once a second and after every ``apply``."""
        now = clock.monotonic()
        if stood_s := clock.beat():
            logger.warning("gateway.stood_still seconds=%.1f", stood_s)
        awake = clock.awake()
        self._lost &= self.rows.keys()
        silent: list[Link] = []
        for link in self.registry:
            if link.ramp_until and now >= link.ramp_until:
                link.ramp_up(now)
                self.registry.announce(link)
            if link.policy.drain_deadline_at is not None or link.drain_then_close:
                self._enforce_drain(link, now)
            silence_s = awake - link.last_seen
            if isinstance(link, RelayLink):
                if now >= link.ping_at or silence_s >= link.windows.offline_s:
                    self._check_socket(link, now)
            elif silence_s >= link.windows.failover_s and self._is_blind(now):
                continue
            elif silence_s >= link.windows.offline_s:
                self._lose(link, "the node sent no heartbeat")
            if silence_s >= link.windows.failover_s and not link.closed:
                silent.append(link)
        self.on_silence(silent)
        for link in self.registry.ejections.tick(now):
            self.registry.announce(link)

    def trust(self, authorities: str) -> None:
        """Verify nodes that are called over TLS with these internal CAs (PEM) too, from their next connection on."""
        if authorities != self._authorities:
            self._authorities = authorities
            for link in self.registry:
                if isinstance(link, HttpLink):
                    link.trust(authorities)

    # inside

    def _find_read_at(self, row: NodeRow) -> float:
        return self._updated_at.get(row.node_id, self._read_at)

    def _list_models(self) -> None:
        self.known_models = frozenset(name for row in self.rows.values() for name in row.model_names)
        open_to = {name for row in self.rows.values() if row.provider_state != "disabled" for name in row.model_names}
        self.disabled_models = self.known_models - open_to
        special = {name for row in self.rows.values() if row.terms.is_special for name in row.model_names}
        terms: dict[str, dict[str, ProviderTerms]] = {name: {} for name in special}
        for row in self.rows.values() if special else ():
            for name in special.intersection(row.model_names):
                terms[name][row.terms.name] = row.terms
        self.terms = {name: tuple(found.values()) for name, found in terms.items()}
        self.trusted_models = {name: row.allowed_by for row in self.rows.values() if row.allowed_by for name in row.model_names}

    def _is_blind(self, now: float) -> bool:
        # The silence may be the database's: what runs over HTTP goes on then, and nothing new is placed there.
        return now - self._applied_at > self._limits.rows_blind_s or now < self._believed_at

    def _apply_row(self, row: NodeRow, target: HttpTarget | None, peers: Mapping[uuid.UUID, HttpTarget]) -> None:
        link = self.registry.get(row.node_id)
        if isinstance(link, RelayLink):
            if link.applied_row is row:
                return
            # Without an instance id (bridge v1) a node has one session, so a newer epoch is always another one.
            if row.epoch > link.epoch and (row.instance_id != link.instance_id or not link.instance_id):
                logger.warning("node.fenced node=%s epoch=%d newer=%d", row.name, link.epoch, row.epoch)
                self.registry.remove(link, "a newer session of the same node took over")
                link.close("replaced by a newer session of the same node")
                return
            self._set_policy(link, row)
            self._tell(link, row)
            link.applied_row = row if link.is_mode_known_since(self._find_read_at(row)) else None
            return
        wanted = self._wanted_target(row, target, peers)
        if wanted is None:
            if isinstance(link, HttpLink) and not self._is_blind(self._applied_at):
                self._lose(link, "the node is offline")
            return
        if isinstance(link, HttpLink) and replace(link.target, headers=wanted.headers) == wanted:
            link.take_headers(wanted)
        elif isinstance(link, HttpLink):
            self.registry.remove(link, "the node moved")
            link.close("moved")
            link = None
        if link is None:
            link = HttpLink(
                node_id=row.node_id,
                node_name=row.name,
                models=frozenset(row.model_names),
                max_concurrent=max(1, row.max_concurrent),
                target=wanted,
                connect_s=self._connect_s,
                is_peer=not row.is_direct,
                authorities=self._authorities,
            )
            self._refresh_http(link, row)
            if row.node_id in self._lost:
                self._lost.discard(row.node_id)
                link.begin_ramp(self._applied_at + self._limits.agent_ramp_s)
            link.endpoints = row.endpoints
            link.carries_bytes = row.carries_bytes
            self.registry.add(link)
            return
        self._refresh_http(link, row)
        models = frozenset(row.model_names)
        if (link.models, link.endpoints, link.carries_bytes) != (models, row.endpoints, row.carries_bytes):
            link.carries_bytes = row.carries_bytes
            self.registry.update_models(link, models, row.endpoints)

    def _lose(self, link: Link, message: str) -> None:
        """Let go of a node that is called over HTTP and was not heard."""
        row = self.rows.get(link.node_id)
        if row is not None and row.agent_session is not None:
            self._lost.add(link.node_id)
        self.registry.remove(link, message)
        link.close("offline")

    def _wanted_target(
        self, row: NodeRow, target: HttpTarget | None, peers: Mapping[uuid.UUID, HttpTarget]
    ) -> HttpTarget | None:
        if (
            row.heartbeat_age_s is None
            or row.heartbeat_age_s >= freshness_windows(self._limits, protocol=row.protocol).offline_s
        ):
            return None
        if row.is_direct:
            return target
        if row.connected and row.gateway_id is not None and row.gateway_id != self.gateway_id:
            return peers.get(row.gateway_id)
        return None

    def _refresh_http(self, link: Link, row: NodeRow) -> None:
        self._set_policy(link, row)
        link.declare_slots(max(1, row.max_concurrent))
        link.contexts, link.engines = row.contexts, row.engines
        link.last_seen = clock.awake() - (row.heartbeat_age_s or 0.0)
        link.windows = freshness_windows(self._limits, protocol=row.protocol)
        if row.is_direct:
            if isinstance(link, HttpLink):
                link.take_gpus(row.gpus)
            status = row.reported_status
            link.unhealthy_reason = "the node reports an error" if status == NodeStatus.ERROR.value else row.unreachable
            link.node_draining = not row.is_accepting_jobs or status in {NodeStatus.DRAINING.value, NodeStatus.OFFLINE.value}
            # A report from before our last request ended still counts that request.
            is_news = link.last_seen >= link.released_at
            is_full = not link.active or row.active_requests >= link.max_concurrent > link.active
            link.busy_elsewhere = status == NodeStatus.BUSY.value and is_news and is_full

    def _set_policy(self, link: Link, row: NodeRow) -> None:
        policy = link.policy
        link.figures = row.figures
        policy.provider = row.provider
        policy.provider_enabled = row.provider_state == "enabled"
        policy.cordoned = row.cordoned
        policy.draining = row.draining
        link.ticket_url = row.ticket_url
        self.registry.exclude(link, row.excluded)
        # Else what the owner said is newer.
        if not isinstance(link, RelayLink) or link.is_mode_known_since(self._find_read_at(row)):
            policy.reclaimed = row.mode == NodeMode.SPARE_OFF.value
            policy.drain_deadline_at = row.drain_deadline_at if policy.draining or policy.reclaimed else None
        if row.provider_state == "deleted" and isinstance(link, RelayLink):
            self.registry.remove(link, "the provider was deleted")
            link.close("provider was deleted")

    def _tell(self, link: RelayLink, row: NodeRow) -> None:
        status = "draining" if row.draining or row.cordoned or row.mode == NodeMode.SPARE_OFF.value else "available"
        remaining_s = row.drain_remaining_s if row.draining else None
        seconds = None if remaining_s is None else max(0, round(remaining_s))
        if link.session.speaks_muster:
            # A deadline is told to every session of the node anew: a program that was started since knows of none.
            until = None if row.drain_deadline_at is None or seconds is None else (round(row.drain_deadline_at), link.link_id)
            notice = (status, row.mode, row.cordoned, until)
            if self._told.get(link.node_id) != notice:
                self._told[link.node_id] = notice
                said = bridge.NodeNotice(status=status, mode=row.mode, cordoned=row.cordoned, drain_s=seconds)
                link.send_message(said)
            return
        if not row.draining:
            self._shutdown_sent.discard(link.node_id)
        elif link.node_id not in self._shutdown_sent:
            self._shutdown_sent.add(link.node_id)
            link.send_message(bridge.GracefulShutdown(reason=row.drain_reason or None, drain_timeout_secs=seconds))
            link.drain_then_close = True

    def _enforce_drain(self, link: Link, now: float) -> None:
        deadline = link.policy.drain_deadline_at
        overdue = deadline is not None and now >= deadline
        if overdue and link.active:
            logger.info("node.drain_deadline node=%s interrupted=%d", link.node_name, link.active)
            message = "the node was reclaimed while the request was running"
            link.end_streams(EndKind.RECLAIMED, message, reason=bridge.CANCEL_GRACEFUL_SHUTDOWN)
        if link.drain_then_close and (overdue or link.active == 0):
            link.drain_then_close = False
            link.close("graceful shutdown timed out" if overdue else "graceful shutdown complete")

    def _refresh_models(self, link: RelayLink, now: float) -> None:
        """Ask a bridge v1 worker that has no models for them, and others every so often where that is wanted."""
        every_s = self._limits.bridge_refresh_s
        if not link.models or (every_s and now >= link.refresh_at):
            link.refresh_at = now + every_s
            link.send_message(bridge.ModelsRefresh(reason="periodic" if link.models else "no models"))

    def _check_socket(self, link: RelayLink, now: float) -> None:
        if link.silence_s >= link.windows.offline_s:
            self.registry.remove(link, "the node stopped answering")
            link.close("worker heartbeat timed out")
            return
        if now >= link.ping_at:
            link.ping_at = now + link.ping_interval_s
            link.send_message(bridge.Ping(timestamp_unix_ms=clock.unix_ms()))
            if not (link.session.speaks_muster or link.active):
                self._refresh_models(link, now)


def _list_offer(row: NodeRow | None) -> tuple[object, ...]:
    return (row.model_names, row.provider_state, row.terms, row.allowed_by) if row is not None else ()


_GPU_SERIES: tuple[tuple[str, str, Callable[[GpuInfo], float | None]], ...] = (
    ("muster_gpu_memory_bytes", "Memory of a GPU", lambda gpu: _in_bytes(gpu.memory_total_mb)),
    ("muster_gpu_memory_used_bytes", "Memory in use on a GPU", lambda gpu: _in_bytes(gpu.memory_used_mb)),
    ("muster_gpu_utilization_ratio", "Share of time that a GPU computes, 0 to 1", lambda gpu: _share(gpu.utilization_percent)),
    ("muster_gpu_temperature_celsius", "Temperature of a GPU", lambda gpu: gpu.temperature_c),
    ("muster_gpu_power_watts", "Power that a GPU draws", lambda gpu: gpu.power_w),
)


def _in_bytes(mib: int | None) -> float | None:
    return None if mib is None else mib * _MIB


def _share(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


class FleetGauges(Collector):
    """Nodes by status, slots and GPUs, read from the links of the gateway at a scrape. Touched on the event loop alone."""

    def __init__(self) -> None:
        self.keeper: LinkKeeper | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the series of a scrape; without a gateway they have no values."""
        nodes = GaugeMetricFamily("muster_nodes", "Nodes by status, of the whole fleet", labels=["status"])
        sessions = GaugeMetricFamily("muster_sessions", "Nodes by what their session speaks and its health", labels=_SESSION)
        slots = GaugeMetricFamily("muster_node_slots", "Requests that a linked node takes at a time", labels=_NODE)
        used = GaugeMetricFamily("muster_node_slots_used", "Requests that run on a linked node", labels=_NODE)
        gpus = GaugeMetricFamily("muster_gpus", "GPUs of the nodes that are linked to this gateway")
        cards = [GaugeMetricFamily(name, text, labels=_GPU) for name, text, _ in _GPU_SERIES]
        if self.keeper is not None:
            judged = self.keeper.judge_nodes()
            statuses = Counter(found.status for _, found in judged)
            for status in NodeStatus:
                nodes.add_metric([status.value], statuses[status])
            standings = Counter((row.protocol or _REST, found.health) for row, found in judged)
            for protocol in sorted({protocol for protocol, _ in standings}):
                for health in Health:
                    sessions.add_metric([protocol, health.value], standings[protocol, health])
            gpus.add_metric([], sum(len({gpu.index for gpu in link.gpus}) for link in self.keeper.registry))
            rest = [0, 0]
            for index, link in enumerate(sorted(self.keeper.registry, key=lambda link: link.node_id)):
                running = min(link.load, link.max_concurrent)
                if index >= limits().nodes.named_in_metrics:
                    rest = [rest[0] + link.max_concurrent, rest[1] + running]
                    continue
                name = [link.node_name, format_id("node", link.node_id)]
                slots.add_metric(name, link.max_concurrent)
                used.add_metric(name, running)
                for gpu in {gpu.index: gpu for gpu in link.gpus}.values():  # a node may say anything, an index twice
                    card = [*name, str(gpu.index)]
                    for family, (_, _, read) in zip(cards, _GPU_SERIES, strict=True):
                        if (value := read(gpu)) is not None:
                            family.add_metric(card, value)
            if rest[0]:
                slots.add_metric(_OTHERS, rest[0])
                used.add_metric(_OTHERS, rest[1])
        yield from (nodes, sessions, slots, used, gpus, *cards)


FLEET = FleetGauges()
REGISTRY.register(FLEET)
