"""What the operators' first page says of requests. Reads only."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection
from django.db.models import Count, Min, Q
from django.db.models.functions import Now
from django.utils import timezone

from gateway.models import GatewayProcess, RequestRecord
from gateway.values import DEAD_AFTER_S
from nodes.services.drains import DrainFacts
from wire.contract import OPEN_REQUEST_STATES, RequestState

WINDOW_MINUTES = 60
FAULT_STATES = (RequestState.FAILED.value, RequestState.INTERRUPTED.value, RequestState.REJECTED.value)
"""What counts as an error. A caller that left (``cancelled``) is none of ours."""


@dataclass(frozen=True, slots=True)
class OpenRequests:
    """Requests that are not finished. ``oldest_wait_s`` is how long the first one in the queue has waited."""

    queued: int
    running: int
    oldest_wait_s: float


@dataclass(frozen=True, slots=True)
class Minute:
    """Requests that came in during one minute, and how many of them went wrong."""

    starts_at: datetime
    requests: int
    faults: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """The last WINDOW_MINUTES minutes. Latencies in ms, of completed requests; None when there were none."""

    requests: int
    faults: int
    p50_ms: int | None
    p95_ms: int | None
    prompt_tokens: int
    completion_tokens: int
    minutes: tuple[Minute, ...]

    @property
    def fault_percent(self) -> float:
        """Share of requests that went wrong, 0 to 100."""
        return 100.0 * self.faults / self.requests if self.requests else 0.0


def read_open_requests() -> OpenRequests:
    """Count open requests; cheap however large the table, thanks to the partial index on open states."""
    queued = Q(state=RequestState.QUEUED.value)
    row = RequestRecord.objects.filter(state__in=[state.value for state in OPEN_REQUEST_STATES]).aggregate(
        queued=Count("pk", filter=queued), total=Count("pk"), oldest=Min("created_at", filter=queued)
    )
    wait_s = (timezone.now() - row["oldest"]).total_seconds() if row["oldest"] else 0.0
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
    alive = GatewayProcess.objects.filter(stopped_at=None, heartbeat_at__gte=Now() - timedelta(seconds=DEAD_AFTER_S))
    running, _tenants = read_traffic_of_node(node_id, None)
    interrupted = RequestRecord.objects.filter(
        created_at__gte=since - timedelta(seconds=settings.GATEWAY_TIMEOUTS.request_s),  # names the partitions to look in
        finished_at__gte=since,
        node_id=node_id,
        state=RequestState.INTERRUPTED.value,
    )
    return DrainFacts(frozenset(alive.values_list("pk", flat=True)), running, interrupted.count())


_TOTALS = """
SELECT count(*),
       count(*) FILTER (WHERE state = ANY(%(faults)s)),
       percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE state = 'completed'),
       percentile_cont(0.95) WITHIN GROUP (ORDER BY latency_ms) FILTER (WHERE state = 'completed'),
       coalesce(sum(coalesce(prompt_tokens, 0)), 0),
       coalesce(sum(coalesce(completion_tokens, 0)), 0)
  FROM gateway_requestrecord
 WHERE created_at >= %(since)s
"""
_MINUTES = """
SELECT date_trunc('minute', created_at) AS minute, count(*), count(*) FILTER (WHERE state = ANY(%(faults)s))
  FROM gateway_requestrecord
 WHERE created_at >= %(since)s
 GROUP BY minute
"""


def read_traffic() -> Traffic:
    """Return totals, percentiles and the minutes of the last hour in two queries."""
    this_minute = timezone.now().replace(second=0, microsecond=0)
    first = this_minute - timedelta(minutes=WINDOW_MINUTES - 1)
    parameters: dict[str, datetime | list[str]] = {"since": first, "faults": list(FAULT_STATES)}
    with connection.cursor() as cursor:
        cursor.execute(_TOTALS, parameters)
        totals = cursor.fetchone() or (0, 0, None, None, 0, 0)
        cursor.execute(_MINUTES, parameters)
        counted = {minute: (requests, faults) for minute, requests, faults in cursor.fetchall()}
    times = [first + timedelta(minutes=step) for step in range(WINDOW_MINUTES)]
    return Traffic(
        requests=totals[0],
        faults=totals[1],
        p50_ms=None if totals[2] is None else round(totals[2]),
        p95_ms=None if totals[3] is None else round(totals[3]),
        prompt_tokens=int(totals[4]),
        completion_tokens=int(totals[5]),
        minutes=tuple(Minute(time, *counted.get(time, (0, 0))) for time in times),
    )
