"""What the operators' first page says of requests. Reads only."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db.models import Aggregate, Count, FloatField, Min, Q, Sum
from django.db.models.functions import Now, TruncMinute

from core.limits import limits
from gateway.models import GatewayProcess, RequestRecord
from nodes.services.drains import DrainFacts
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState

REFUSED = Q(state=RequestState.REJECTED.value, status_code__range=(400, 499))
"""The caller's mistake, as ``gateway.values.judge_outcome`` has it."""
FAILED = Q(state__in=[RequestState.FAILED.value, RequestState.INTERRUPTED.value]) | (
    Q(state=RequestState.REJECTED.value) & ~Q(status_code__range=(400, 499))
)
"""A fault of node, engine or gateway, or a lack of capacity. A caller that left (``cancelled``) is neither."""


@dataclass(frozen=True, slots=True)
class OpenRequests:
    """Requests that are not finished. ``oldest_wait_s`` is how long the first one in the queue has waited."""

    queued: int
    running: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class Minute:
    """Requests that came in during one minute, and how many of them were refused or failed."""

    starts_at: datetime
    requests: int
    refused: int
    failed: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """The last ``page_traffic_minutes``. Latencies in ms, of completed requests; None when there were none."""

    requests: int
    served: int
    refused: int
    failed: int
    p50_ms: int | None
    p95_ms: int | None
    prompt_tokens: int
    completion_tokens: int
    minutes: tuple[Minute, ...]

    @property
    def failed_percent(self) -> float:
        """Share of requests that failed, 0 to 100. Refused ones count on neither side: many would hide what failed."""
        judged = self.requests - self.refused
        return 100.0 * self.failed / judged if judged else 0.0


def read_open_requests() -> OpenRequests:
    """Count open requests; cheap however large the table, thanks to the partial index on open states."""
    queued = Q(state=RequestState.QUEUED.value)
    row = RequestRecord.objects.filter(state__in=[state.value for state in OPEN_REQUEST_STATES]).aggregate(
        queued=Count("pk", filter=queued), total=Count("pk"), oldest=Min("created_at", filter=queued)
    )
    wait_s = (clock.now() - row["oldest"]).total_seconds() if row["oldest"] else 0.0
    return OpenRequests(queued=row["queued"], running=row["total"] - row["queued"], oldest_wait_s=max(0.0, wait_s))


def read_traffic_of_node(node_id: uuid.UUID, model: str | None) -> tuple[int, int]:
    """Return how many requests run on a box now (on ``model``; None = on any), and of how many tenants."""
    states = [state.value for state in OPEN_REQUEST_STATES - {RequestState.QUEUED}]  # which may name the box that it lost
    running = RequestRecord.objects.filter(state__in=states, node_id=node_id)
    if model is not None:
        running = running.filter(model=model)
    found = running.aggregate(requests=Count("pk"), tenants=Count("tenant", distinct=True))
    return found["requests"], found["tenants"]


def read_drain_facts(node_id: uuid.UUID, since: datetime) -> DrainFacts:
    """Return what the gateways know of a node that drains ``since``; for ``nodes.services.drains``."""
    alive = GatewayProcess.objects.filter(stopped_at=None, heartbeat_at__gte=Now() - timedelta(seconds=limits().gateway.dead_s))
    running, _tenants = read_traffic_of_node(node_id, None)
    interrupted = RequestRecord.objects.filter(
        created_at__gte=since - timedelta(seconds=limits().gateway.request_s),  # names the partitions to look in
        finished_at__gte=since,
        node_id=node_id,
        state=RequestState.INTERRUPTED.value,
    )
    return DrainFacts(frozenset(alive.values_list("pk", flat=True)), running, interrupted.count())


class _Percentile(Aggregate):
    """A percentile of whole numbers, as a fraction of them."""

    function = "PERCENTILE_CONT"
    template = "%(function)s(%(share)s) WITHIN GROUP (ORDER BY %(expressions)s)"
    output_field = FloatField()


def read_traffic() -> Traffic:
    """Return totals, percentiles and the minutes of the last hour in two queries."""
    this_minute = clock.now().replace(second=0, microsecond=0)
    first = this_minute - timedelta(minutes=limits().gateway.page_traffic_minutes - 1)
    recent = RequestRecord.objects.filter(created_at__gte=first)
    completed = Q(state=RequestState.COMPLETED.value)
    totals = recent.aggregate(
        requests=Count("pk"),
        served=Count("pk", filter=completed),
        refused=Count("pk", filter=REFUSED),
        failed=Count("pk", filter=FAILED),
        p50_ms=_Percentile("latency_ms", share=0.5, filter=completed),
        p95_ms=_Percentile("latency_ms", share=0.95, filter=completed),
        prompt_tokens=Sum("prompt_tokens", default=0),
        completion_tokens=Sum("completion_tokens", default=0),
    )
    by_minute = (
        recent.order_by()
        .annotate(minute=TruncMinute("created_at", tzinfo=UTC))
        .values("minute")
        .annotate(
            requests=Count("pk"),
            refused=Count("pk", filter=REFUSED),
            failed=Count("pk", filter=FAILED),
        )
    )
    counted = {row["minute"]: (row["requests"], row["refused"], row["failed"]) for row in by_minute}
    times = [first + timedelta(minutes=step) for step in range(limits().gateway.page_traffic_minutes)]
    latencies = {name: None if totals[name] is None else round(totals[name]) for name in ("p50_ms", "p95_ms")}
    return Traffic(**{**totals, **latencies}, minutes=tuple(Minute(time, *counted.get(time, (0, 0, 0))) for time in times))
