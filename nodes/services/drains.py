"""Drains and reclaims of nodes: what still runs on a draining node, when nothing does any more, and how a page says so.

Every gateway writes for every draining node how many requests it runs there; that row also says that the gateway places nothing
new. A node is drained once each gateway that is alive has said zero, no request record names the node as running, and the node
itself reported zero since the drain began. ``Node.draining_since`` names the drain: a row of an earlier one counts for nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string

from core.hints import publish_hint
from governance.audit import record_event
from governance.services.notices import notify_of_event
from nodes.models import Node, NodeDrainCount, NodePresence
from nodes.services.clock import read_clock
from nodes.services.health import is_drained, judge_status
from nodes.states import DrainCount
from wire import clock
from wire.bridge import BRIDGE_V1
from wire.contract import NodeMode, NodeStatus

ACTOR = "system:sweep"


@dataclass(frozen=True, slots=True)
class DrainFacts:
    """What the data plane knows of a drain: gateways that are alive, requests that run on the node, and those interrupted."""

    gateways: frozenset[uuid.UUID]
    running: int
    interrupted: int


DrainReader = Callable[[uuid.UUID, datetime], DrainFacts]


def begin_stop() -> dict[str, object]:
    """Return the changes of a node row with which a drain or reclaim begins."""
    return {"draining_since": read_clock(), "drained_at": None, "drain_interrupted": 0}


def end_stop() -> dict[str, object]:
    """Return the changes of a node row that takes work again."""
    return {"draining_since": None, "drained_at": None, "drain_interrupted": 0, "drain_actor": ""}


def write_drain_counts(counts: Sequence[DrainCount], *, gateway_id: uuid.UUID) -> None:
    """Write what a gateway runs on draining nodes, and see whether they are drained now. A drain that is over is skipped."""
    known = dict(Node.objects.filter(pk__in=[count.node_id for count in counts]).values_list("pk", "draining_since"))
    now = clock.now()
    rows = [
        NodeDrainCount(
            node_id=count.node_id,
            gateway_id=gateway_id,
            draining_since=count.draining_since,
            active=count.active,
            updated_at=now,
        )
        for count in counts
        if known.get(count.node_id) == count.draining_since
    ]
    if not rows:
        return
    NodeDrainCount.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["node", "gateway_id"],
        update_fields=["draining_since", "active", "updated_at"],
    )
    mark_drained([row.node_id for row in rows if not row.active])


def mark_drained(node_ids: Collection[uuid.UUID] | None = None) -> int:
    """Write down which of the draining nodes (None = all) run nothing any more; return how many. Idempotent."""
    due = Node.objects.filter(draining_since__isnull=False, drained_at=None)
    if node_ids is not None:
        due = due.filter(pk__in=node_ids)
    now = read_clock()
    return sum(_mark(node, now=now) for node in due.select_related("presence").prefetch_related("drain_counts").order_by("pk"))


def describe_drain(node: Node, presence: NodePresence | None) -> str:
    """Return how the drain or reclaim of a node stands, for a page; empty when there is none."""
    if not node.draining and node.mode != NodeMode.SPARE_OFF.value:
        return ""
    running = _count_requests(presence.active_requests if presence is not None else 0)
    if node.drained_at is None:
        limit = f"; what still runs at {_clock_time(node.drain_deadline_at)} is interrupted" if node.drain_deadline_at else ""
        return f"draining: {running} now{limit}"
    interrupted = f", {_count_requests(node.drain_interrupted)} interrupted" if node.drain_interrupted else ""
    drained = f"drained at {_clock_time(node.drained_at)}{interrupted}"
    if not is_drained(node, presence):
        return f"{drained}; {running} now on its own port"
    if presence is not None and presence.protocol == BRIDGE_V1:
        return f"{drained}: no gateway runs a request there; a ModelRelay worker does not say what else it does"
    return f"{drained}: safe to power off"


def _mark(node: Node, *, now: datetime) -> bool:
    since = node.draining_since
    if since is None or not _says_idle(node, since, now=now):
        return False
    facts = _read_facts(node.pk, since)
    told = {count.gateway_id for count in node.drain_counts.all() if count.draining_since == since and not count.active}
    if facts.running or not facts.gateways <= told:
        return False
    with transaction.atomic():
        same = Node.objects.filter(pk=node.pk, draining_since=since, drained_at=None)
        if not same.update(drained_at=now, drain_interrupted=facts.interrupted, updated_at=now):
            return False
        detail = {"name": node.name, "interrupted": facts.interrupted}
        event = record_event(actor=ACTOR, action="node.drained", target=node.printed_id, detail=detail)
        if node.draining:  # an owner who takes the node back needs no message about it
            kind, _, name = node.drain_actor.partition(":")
            notify_of_event(event, "drained", usernames={name} if kind == "user" else set())
        publish_hint("nodes", str(node.pk))
    return True


def _says_idle(node: Node, since: datetime, *, now: datetime) -> bool:
    """Whether the node reported, since the drain began, that it runs nothing; one that is gone runs nothing for us."""
    presence: NodePresence | None = getattr(node, "presence", None)
    if presence is None or judge_status(node, presence, now=now) is NodeStatus.OFFLINE:
        return True
    return presence.active_requests == 0 and presence.last_heartbeat_at is not None and presence.last_heartbeat_at >= since


def _read_facts(node_id: uuid.UUID, since: datetime) -> DrainFacts:
    read: DrainReader = import_string(settings.NODE_DRAIN_FACTS)
    return read(node_id, since)


def _count_requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _clock_time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"
