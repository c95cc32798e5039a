"""What request records say of the nodes that answered, from which ``nodes.services.figures`` counts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta

from django.db.models import BooleanField, Case, Q, When

from core.limits import limits
from gateway.models import RequestRecord
from gateway.services.requests import FAILED
from gateway.values import TICKETS_PATH
from nodes.services.figures import Observation, Seen, Span, fold_requests, forget_figures, publish_figures
from wire import clock
from wire.contract import ErrorCode, RequestState

_NOT_THE_NODES = (
    ErrorCode.NO_AVAILABLE_NODE,
    ErrorCode.NODE_STALE,
    ErrorCode.NODE_DRAINING,
    ErrorCode.NODE_UNHEALTHY,
    ErrorCode.RATE_LIMITED,
    ErrorCode.INTERNAL_ERROR,
)
"""What a request may end with that its node is not to blame for."""


def update_figures() -> int:
    """Count the requests that ended since the last time, in batches, and tell routing; return how many were looked at."""
    counted, until = 0, clock.monotonic() + limits().nodes.figures_budget_s
    while clock.monotonic() < until and (batch := fold_requests(_read_requests)):
        counted += batch
    forget_figures()
    publish_figures()
    return counted


def _read_requests(span: Span) -> Seen:
    # There is no index by when a request ended, so it is looked for among those that can have ended by now.
    longest_s = max(limits().nodes.figures_longest_s, limits().gateway.request_s)
    begun = span.after - timedelta(seconds=longest_s)
    is_later = Q(finished_at__gt=span.after) | Q(finished_at=span.after, id__gt=span.after_id)
    records = RequestRecord.objects.filter(is_later, created_at__gte=begun, finished_at__lte=span.until, node_id__isnull=False)
    records = records.exclude(endpoint=TICKETS_PATH)  # how those ended a node says itself
    # A request that its gateway left open when it died has no status: that was not the node.
    is_failure = FAILED & Q(status_code__isnull=False) & ~Q(error_code__in=_NOT_THE_NODES)
    counts = Q(state=RequestState.COMPLETED.value) | is_failure
    told = records.annotate(counts=Case(When(counts, then=True), default=False, output_field=BooleanField()))
    found = list(told.filter(counts | ~Q(lost_attempts="")).order_by("finished_at", "id").only(*_READ)[: span.most])
    last = found[-1] if found else None
    return Seen(
        observations=tuple(one for record in found for one in _observe_all(record)),
        count=len(found),
        last=None if last is None or last.finished_at is None else (last.finished_at, last.id),
    )


_READ = (
    *("node_id", "model", "state", "is_streaming", "queue_ms", "ttfb_ms", "latency_ms", "finished_at", "completion_tokens"),
    *("bytes_out", "tokens_estimated", "lost_attempts"),
)


def _observe_all(record: RequestRecord) -> Iterator[Observation]:
    assert record.finished_at is not None
    for line in record.lost_attempts.splitlines():
        node_id, _, rest = line.partition(" ")
        model = rest.partition("\t")[0]
        yield Observation(node_id=uuid.UUID(node_id), model=model, ended_at=record.finished_at, is_ok=False)
    if record.counts:  # type: ignore[attr-defined]  # the annotation
        yield _observe(record)


def _observe(record: RequestRecord) -> Observation:
    assert record.node_id is not None
    assert record.finished_at is not None
    queued, latency = record.queue_ms or 0, record.latency_ms
    own = max(0, latency - queued) if latency is not None else None
    first = max(0, record.ttfb_ms - queued) if record.is_streaming and record.ttfb_ms is not None else None
    return Observation(
        node_id=record.node_id,
        model=record.model,
        ended_at=record.finished_at,
        is_ok=record.state == RequestState.COMPLETED.value,
        latency_ms=own,
        ttft_ms=first,
        tokens_per_s=_find_rate(record, own, first),
    )


def _find_rate(record: RequestRecord, own_ms: int | None, first_ms: int | None) -> float | None:
    """Return the tokens a second of an answer, of a stream from its first byte on. No byte holds more than one."""
    tokens = min(record.completion_tokens or 0, record.bytes_out)
    took_ms = (own_ms or 0) - (first_ms or 0)
    return 1000 * tokens / took_ms if tokens and took_ms > 0 and not record.tokens_estimated else None
