"""What the operators' first page says of the boxes. Reads only."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from django.conf import settings
from django.db.models import F
from django.utils import timezone

from nodes.models import Node, ProviderState
from nodes.states import Freshness, effective_status, judge_freshness
from wire.contract import NodeMode, NodeStatus


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One box as the first page sees it. ``age_s`` is None for a box that was never heard."""

    name: str
    status: NodeStatus
    freshness: Freshness
    age_s: float | None
    active_requests: int
    max_concurrent: int
    last_error: str
    drain_deadline_at: datetime | None


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
    now = timezone.now()
    rows = (
        Node.objects.exclude(provider__state=ProviderState.DELETED)
        .order_by("name")
        .values(
            "name",
            "mode",
            "draining",
            "cordoned",
            "max_concurrent",
            "drain_deadline_at",
            heard_at=F("presence__last_heartbeat_at"),
            reported=F("presence__reported_status"),
            accepting=F("presence__is_accepting_jobs"),
            active=F("presence__active_requests"),
            trouble=F("presence__last_error"),
        )
    )
    policy = settings.NODE_HEALTH
    nodes = []
    for row in rows:
        age_s = (now - row["heard_at"]).total_seconds() if row["heard_at"] else None
        freshness = judge_freshness(age_s, stale_after_s=policy.stale_after_s, offline_after_s=policy.offline_after_s)
        status = effective_status(
            freshness=freshness,
            reported=NodeStatus(row["reported"] or NodeStatus.OFFLINE),
            mode=NodeMode(row["mode"]),
            draining=row["draining"],
            cordoned=row["cordoned"],
            is_accepting_jobs=row["accepting"] is not False,
        )
        nodes.append(
            NodeHealth(
                name=row["name"],
                status=status,
                freshness=freshness,
                age_s=age_s,
                active_requests=row["active"] or 0,
                max_concurrent=row["max_concurrent"],
                last_error=row["trouble"] or "",
                drain_deadline_at=row["drain_deadline_at"],
            )
        )
    return FleetOverview(tuple(nodes))
