"""What the operators' first page says of the boxes. Reads only."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from nodes.errors import BadRequest, NodeNotFound
from nodes.models import Node, NodePresence, ProviderState
from nodes.services.boxes import count_replicas, describe_counts
from nodes.services.clock import clock_of, with_clock
from nodes.services.health import heartbeat_age_s, judge_status, status_expression
from nodes.states import Freshness, freshness_windows, judge_freshness
from wire.contract import NodeStatus
from wire.ids import parse_id


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One box as the first page sees it. ``age_s`` is None for a box that was never heard.

    ``models`` says how many it has loaded and is loading; empty when it does not say.
    """

    name: str
    status: NodeStatus
    freshness: Freshness
    age_s: float | None
    active_requests: int
    max_concurrent: int
    models: str
    last_error: str
    id: uuid.UUID | None = None


@dataclass(frozen=True, slots=True)
class FleetOverview:
    """Every box of a provider that was not deleted, by name."""

    nodes: tuple[NodeHealth, ...]

    def count_statuses(self) -> Counter[NodeStatus]:
        """Return how many boxes are in each status of the contract."""
        return Counter(node.status for node in self.nodes)

    @property
    def online(self) -> int:
        """How many boxes were heard recently enough not to count as lost."""
        return sum(node.status is not NodeStatus.OFFLINE for node in self.nodes)


def read_fleet() -> FleetOverview:
    """Return the health of every box in one query."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).select_related("presence").order_by("name")
    return FleetOverview(tuple(_describe(node, clock_of(node)) for node in with_clock(rows)))


def read_served_models() -> frozenset[str]:
    """Return the models that boxes can be asked for at this moment; one query."""
    able = [NodeStatus.AVAILABLE.value, NodeStatus.BUSY.value]
    status_now = status_expression(now=Now())
    nodes = Node.objects.filter(provider__state=ProviderState.ENABLED).annotate(status_now=status_now)
    names = nodes.filter(status_now__in=able).values_list("model_names", flat=True)
    return frozenset(name for declared in names for name in declared)


def list_served_models() -> frozenset[str]:
    """Return the models of boxes that take work now, as the boxes said last; one query."""
    rows = with_clock(Node.objects.filter(provider__state=ProviderState.ENABLED)).select_related("presence")
    taking = {NodeStatus.AVAILABLE, NodeStatus.BUSY}
    return frozenset(
        name
        for node in rows
        if judge_status(node, getattr(node, "presence", None), now=clock_of(node)) in taking
        for name in node.model_names
    )


def _describe(node: Node, now: datetime) -> NodeHealth:
    presence: NodePresence | None = getattr(node, "presence", None)
    age_s = heartbeat_age_s(presence, now=now) if presence is not None else None
    stale_after_s, offline_after_s = freshness_windows(
        settings.NODE_HEALTH, protocol=presence.protocol if presence is not None else ""
    )
    return NodeHealth(
        name=node.name,
        status=judge_status(node, presence, now=now),
        freshness=judge_freshness(age_s, stale_after_s=stale_after_s, offline_after_s=offline_after_s),
        age_s=age_s,
        active_requests=presence.active_requests if presence is not None else 0,
        max_concurrent=node.max_concurrent,
        models=describe_counts(count_replicas(presence)),
        last_error=presence.last_error if presence is not None else "",
        id=node.pk,
    )


def find_node_id(text: str) -> uuid.UUID:
    """Return the id of the box that ``text`` names: its printed id, its UUID, or a name that only one box has.

    Raises NodeNotFound; BadRequest when several boxes have that name.
    """
    node_id = parse_id("node", text)
    found = list(Node.objects.filter(Q(pk=node_id) if node_id else Q(name=text)).values_list("pk", flat=True)[:2])
    if not found:
        raise NodeNotFound(f"There is no node {text}.", param="node")
    if len(found) > 1:
        raise BadRequest(f"Several nodes are called {text}; say which by its id, node_….", param="node")
    return found[0]
