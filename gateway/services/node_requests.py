"""Requests of one node for its page: those that run, the newest, and sums over time. ``settings.NODE_REQUESTS`` names it."""

from __future__ import annotations

import uuid
from datetime import timedelta
from urllib.parse import urlencode

from django.db.models import Count, Min
from django.urls import reverse
from django.utils.translation import gettext as _

from core.charts import RANGES, Chart, Line
from core.limits import limits
from gateway.models import RequestRecord
from gateway.services.rollups import Metric, read_series
from gateway.values import Dimension
from nodes.services.conditions import NodeRequests, RecentRequest, RunningRequests
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState
from wire.ids import format_id

_RUNNING = [state.value for state in OPEN_REQUEST_STATES - {RequestState.QUEUED}]  # which may name the node that it lost


def read_node_requests(node_id: uuid.UUID, span: str) -> NodeRequests:
    """Return the requests of a node; ``span``: a name of ``RANGES``, "" = only those that run, in one query."""
    running = tuple(_read_running(node_id))
    url = reverse("admin:gateway_requestrecord_changelist") + "?" + urlencode({"node": format_id("node", node_id)})
    if span not in RANGES:
        return NodeRequests(running, url)
    return NodeRequests(running, url, tuple(_read_recent(node_id)), tuple(_draw(node_id, RANGES[span][1], url)))


def _read_running(node_id: uuid.UUID) -> list[RunningRequests]:
    rows = RequestRecord.objects.filter(state__in=_RUNNING, node_id=node_id).values_list("model").order_by("model")
    now = clock.now()
    return [
        RunningRequests(model, count, tenants, max(0.0, (now - oldest).total_seconds()))
        for model, count, tenants, oldest in rows.annotate(
            count=Count("pk"), tenants=Count("tenant", distinct=True), oldest=Min("created_at")
        )
    ]


def _read_recent(node_id: uuid.UUID) -> list[RecentRequest]:
    # The index of a node and a time finds them; without a time every partition would be asked.
    since = clock.now() - timedelta(seconds=limits().gateway.page_node_recent_s)
    rows = RequestRecord.objects.filter(node_id=node_id, created_at__gte=since).order_by("-created_at")
    most = limits().gateway.page_node_requests
    names = ("pk", "created_at", "model", "tenant", "state", "error_code", "latency_ms", "completion_tokens")
    return [
        RecentRequest(
            printed_id=format_id("req", pk), url=reverse("admin:gateway_requestrecord_change", args=[pk]), at=at, model=model,
            tenant=tenant, state=state, error_code=code or "", latency_ms=latency_ms, tokens=tokens,
        )
        for pk, at, model, tenant, state, code, latency_ms, tokens in rows.values_list(*names)[:most]
    ]  # fmt: skip


def _draw(node_id: uuid.UUID, span: timedelta, url: str) -> list[Chart]:
    series = read_series(span, dimension=Dimension.NODE, name=str(node_id), metric=Metric.TTFT)
    starts = [int(at.timestamp()) for at, _sums in series.points]
    step_s = int(series.step.total_seconds())
    sums = [one for _at, one in series.points]
    outcomes = (
        Line(_("served"), [one.served for one in sums], "good"),
        Line(_("refused"), [one.refused for one in sums], "refused"),
        Line(_("failed"), [one.failed for one in sums], "fault"),
        Line(_("cancelled"), [one.cancelled for one in sums], "cancelled"),
    )
    times = (Line(_("median"), [one.p50_ms for one in sums], "first"), Line(_("95 %"), [one.p95_ms for one in sums], "second"))
    tokens = (Line(_("written"), [one.completion_tokens for one in sums], "first"),)
    link = f"{url}&since={{since}}&until={{until}}"
    return [
        Chart("requests", _("Requests"), "requests", starts, step_s, outcomes, "bars", is_stacked=True, link=link),
        Chart("first-token", _("Time to first token"), "ms", starts, step_s, times),
        Chart("tokens", _("Tokens written"), "tokens", starts, step_s, tokens, "bars"),
    ]
