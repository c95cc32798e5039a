"""What the operators' first page says of the boxes. Reads only."""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Q
from django.db.models.functions import Now

from nodes.errors import BadRequest, NodeNotFound
from nodes.models import Node, NodePresence, ProviderState, Reach
from nodes.services.boxes import count_replicas, describe_counts, list_failures
from nodes.services.clock import clock_of, with_clock
from nodes.services.ejections import ShownEjection, list_ejections
from nodes.services.health import heartbeat_age_s, read_availability, status_expression
from nodes.states import Freshness
from wire.bridge import MUSTER_V1
from wire.contract import NodeStatus
from wire.ids import parse_id


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One node as the first page sees it. ``age_s`` and ``heard_at`` are None for a node that was never heard.

    ``models`` says how many it has loaded and is loading; empty when it does not say. ``failed``: model and reason of each
    replica that failed. ``could_take_operations``: it is a runner of ours that dials in, so only its start keeps it from them.
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
    heard_at: datetime | None = None
    is_enabled: bool = True
    """Whether its provider is switched on."""
    model_names: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    is_loading: bool = False
    probe_error: str = ""
    op_level: str = ""
    could_take_operations: bool = False
    policy_version: int = 0
    policy_error: str = ""
    witness_alarm: str = ""
    clock_skew_ms: int | None = None
    rival_seen_at: datetime | None = None
    rival_address: str = ""
    ejections: tuple[ShownEjection, ...] = ()

    @property
    def takes_work(self) -> bool:
        """Whether requests may be sent to it now."""
        return self.is_enabled and self.status in {NodeStatus.AVAILABLE, NodeStatus.BUSY}


@dataclass(frozen=True, slots=True)
class FleetOverview:
    """Every node of a provider that was not deleted, by name."""

    nodes: tuple[NodeHealth, ...]

    def count_statuses(self) -> Counter[NodeStatus]:
        """Return how many boxes are in each status of the contract."""
        return Counter(node.status for node in self.nodes)

    @property
    def online(self) -> int:
        """How many boxes were heard recently enough not to count as lost."""
        return sum(node.status is not NodeStatus.OFFLINE for node in self.nodes)

    @property
    def served_models(self) -> frozenset[str]:
        """The models of nodes that take work."""
        return frozenset(model for node in self.nodes if node.takes_work for model in node.model_names)

    @property
    def free_models(self) -> frozenset[str]:
        """The models of nodes that take work, were heard just now and have a free slot."""
        free = (node for node in self.nodes if node.takes_work and node.active_requests < node.max_concurrent)
        return frozenset(model for node in free if node.freshness is Freshness.FRESH for model in node.model_names)


def read_fleet() -> FleetOverview:
    """Return the health of every box in one query."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).select_related("presence", "provider").order_by("name")
    return FleetOverview(tuple(_describe(node, clock_of(node)) for node in with_clock(rows)))


def read_served_models() -> frozenset[str]:
    """Return the models that boxes can be asked for at this moment; one query."""
    able = [NodeStatus.AVAILABLE.value, NodeStatus.BUSY.value]
    status_now = status_expression(now=Now())
    nodes = Node.objects.filter(provider__state=ProviderState.ENABLED).annotate(status_now=status_now)
    names = nodes.filter(status_now__in=able).values_list("model_names", flat=True)
    return frozenset(name for declared in names for name in declared)


def _describe(node: Node, now: datetime) -> NodeHealth:
    presence: NodePresence | None = getattr(node, "presence", None)
    availability = read_availability(node, presence, now=now)
    counts = count_replicas(presence)
    return NodeHealth(
        name=node.name,
        status=availability.status,
        freshness=availability.freshness,
        age_s=heartbeat_age_s(presence, now=now) if presence is not None else None,
        active_requests=presence.active_requests if presence is not None else 0,
        max_concurrent=node.max_concurrent,
        models=describe_counts(counts),
        last_error=presence.last_error if presence is not None else "",
        id=node.pk,
        heard_at=presence.last_heartbeat_at if presence is not None else None,
        is_enabled=node.provider.state == ProviderState.ENABLED,
        model_names=tuple(node.model_names),
        failed=list_failures(presence) if counts["failed"] else (),
        is_loading=counts["loading"] > 0,
        probe_error=presence.probe_error if presence is not None and node.reach == Reach.DIRECT else "",
        op_level=node.op_level,
        could_take_operations=node.reach == Reach.RELAY and presence is not None and presence.protocol == MUSTER_V1,
        policy_version=node.policy_version,
        policy_error=node.policy_error,
        witness_alarm=node.witness_alarm,
        clock_skew_ms=node.clock_skew_ms,
        rival_seen_at=node.rival_seen_at,
        rival_address=node.rival_address,
        ejections=tuple(list_ejections(presence, now=now)),
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
