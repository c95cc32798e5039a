"""Prometheus series of the control plane: operations, audit log, worker, database, Valkey, gateways, and its own requests.

They are read when somebody asks, in a fixed number of queries. What the fleet does is told by the gateways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from http import HTTPStatus

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from core.limits import limits
from core.roles import SEE_GATEWAYS, may
from core.valkey import look_at_valkey
from gateway.request.client import came_directly
from gateway.services.requests import read_gateways
from gateway.services.rollups import read_counted_until
from governance.admin_tokens import find_holder
from governance.alerts import read_last_look
from governance.audit import log_size
from governance.checkpoints import count_alarms, latest_checkpoint
from governance.errors import TooManyWrongTokens
from governance.operations.queries import read_figures
from governance.states import ApprovalState, RunState
from nodes.services.certificates import list_authorities
from wire import RELEASE, clock
from wire.logs import bind_request

Rows = Iterable[tuple[tuple[str, ...], float]]
Next = Callable[[HttpRequest], HttpResponse]
REGISTRY = CollectorRegistry()
"""Apart from the one of gateways, whose modules this process has loaded too."""
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PARTS = ("admin", "api", "approvals", "nodes", "requests", "static")
REQUESTS = Counter(
    "muster_control_requests_total", "Requests to pages and the REST API", ["part", "method", "status"], registry=REGISTRY
)
SECONDS = Histogram(
    "muster_control_request_seconds",
    "From the first byte of a request to its answer, by the first word of its path",
    ["part"],
    buckets=(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    registry=REGISTRY,
)


class CountingMiddleware:
    """Counts requests by the first word of their path, and names in the log which one a line belongs to."""

    def __init__(self, get_response: Next) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        began = clock.monotonic()
        fields = bind_request(partial(_describe, request))
        try:
            response = self._get_response(request)
        finally:
            fields.close()
        word = request.path.split("/", 2)[1]
        part = word if word in _PARTS else "other"
        method = str(request.method) if request.method in _METHODS else "other"
        REQUESTS.labels(part, method, str(response.status_code)).inc()
        SECONDS.labels(part).observe(clock.monotonic() - began)
        return response


def _describe(request: HttpRequest) -> dict[str, object]:
    # The route, not the path: that of an invitation is a secret.
    match = request.resolver_match
    user = getattr(request, "_cached_user", None)  # as far as it was looked up: to write a line asks no database
    said: dict[str, object] = {"method": str(request.method)}
    if match is not None:
        said["route"] = match.route
    if user is not None and user.is_authenticated:
        said["user"] = user.get_username()
    return said


@never_cache
@require_safe
def show_metrics(request: HttpRequest) -> HttpResponse:
    """Answer ``GET /metrics`` to callers on this machine that no proxy passed on, and to holders of an admin token."""
    headers = {name.lower(): value for name, value in request.headers.items()}
    if settings.METRICS_REQUIRE_TOKEN or not came_directly(getattr(request, "scope", _NOWHERE), headers):
        scheme, _, text = headers.get("authorization", "").partition(" ")
        try:
            holder = find_holder(text.strip(), address=str(request.META.get("REMOTE_ADDR", "")))
        except TooManyWrongTokens as error:
            return _refuse(HTTPStatus.TOO_MANY_REQUESTS, "RATE_LIMITED", error.message)
        if holder is None or scheme.lower() != "bearer":
            words = "Metrics need an admin token here: through a proxy or from another machine always."
            return _refuse(HTTPStatus.FORBIDDEN, "INVALID_ADMIN_TOKEN", words)
        if not may(holder, SEE_GATEWAYS):
            words = f"This admin token may not do this: its role needs the permission {SEE_GATEWAYS}."
            return _refuse(HTTPStatus.FORBIDDEN, "NOT_PERMITTED", words)
    return HttpResponse(generate_latest(REGISTRY), content_type=CONTENT_TYPE_LATEST)


_NOWHERE = {"client": ("192.0.2.0", 0)}
"""In the place of a scope that does not say where a request comes from (RFC 5737)."""


def _refuse(status: HTTPStatus, code: str, words: str) -> HttpResponse:
    return JsonResponse({"error": {"code": code, "message": words}}, status=status)


class ControlFigures(Collector):
    """Reads the series of a scrape. Where the database or Valkey is away, theirs are left out and ``up`` is 0."""

    def collect(self) -> Iterator[Metric]:
        yield _gauge("muster_build_info", "1, and which release runs", "release part", [((RELEASE, "control"), 1)])
        told = look_at_valkey(settings.REDIS_URL, settings.CELERY_TASK_DEFAULT_QUEUE, longest_s=limits().core.hint_read_s)
        yield _gauge("muster_valkey_up", "Whether Valkey answers", "", [((), told is not None)])
        if told is not None:
            info, queued = told
            yield _gauge("muster_tasks_queued", "Tasks that wait for a worker", "", [((), queued)])
            memory = "Memory in use by Valkey"
            yield _gauge("muster_valkey_memory_bytes", memory, "", [((), float(info.get("used_memory", 0)))])
        try:
            families = [*_read_database(), *_read_operations(), *_read_audit(), *_read_upkeep()]
        except DatabaseFailure:
            families = []
        yield _gauge("muster_database_up", "Whether PostgreSQL answers", "", [((), bool(families))])
        yield from families

    def describe(self) -> Iterable[Metric]:
        """Return nothing: to be registered costs no look at the database."""
        return ()


def _gauge(name: str, text: str, labels: str, rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels.split())
    for values, number in rows:
        family.add_metric(values, float(number))
    return family


def _read_database() -> Iterator[Metric]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pg_database_size(current_database()), current_setting('max_connections')::int, "
            "count(*) FILTER (WHERE state = 'active'), count(*) FILTER (WHERE state = 'idle'), "
            "count(*) FILTER (WHERE state NOT IN ('active', 'idle')), "
            "coalesce(extract(epoch FROM max(clock_timestamp() - xact_start)), 0) "
            "FROM pg_stat_activity WHERE datname = current_database()"
        )
        size, most, active, idle, other, oldest_s = cursor.fetchone()
    yield _gauge("muster_database_bytes", "Size of the database", "", [((), size)])
    yield _gauge("muster_database_connections_max", "Connections that the server takes", "", [((), most)])
    counts = (("active", active), ("idle", idle), ("other", other))
    text = "Connections to the database, of all processes"
    yield _gauge("muster_database_connections", text, "state", [((state,), number) for state, number in counts])
    text = "Age of the oldest transaction"
    yield _gauge("muster_database_oldest_transaction_seconds", text, "", [((), oldest_s)])


def _read_operations() -> Iterator[Metric]:
    figures, now = read_figures(), clock.now()
    states = (ApprovalState.PENDING, ApprovalState.APPROVED)
    waiting = [((state.value,), figures.waiting.get(state.value, 0)) for state in states]
    yield _gauge("muster_operations_open", "Operations that wait for approvals, or are approved and not over", "state", waiting)
    runs = [((state.value,), figures.runs.get(state.value, 0)) for state in RunState]
    yield _gauge("muster_operation_runs", "Runs of operations on nodes by state, all that ever were", "state", runs)
    for name, text, since in (
        (
            "muster_approval_oldest_seconds",
            "How long the oldest operation has waited for approvals, 0 = none",
            figures.pending_since,
        ),
        ("muster_operation_run_oldest_seconds", "Age of the oldest run that has not ended, 0 = none", figures.open_since),
    ):
        yield _gauge(name, text, "", [((), max(0.0, (now - since).total_seconds()) if since is not None else 0.0)])


def _read_audit() -> Iterator[Metric]:
    checkpoint, size = latest_checkpoint(), log_size()
    yield _gauge("muster_audit_entries", "Entries of the audit log", "", [((), size)])
    signed = checkpoint.size if checkpoint is not None else 0
    yield _gauge("muster_audit_unsigned_entries", "Entries behind the last signed checkpoint", "", [((), size - signed)])
    age = [((), (clock.now() - checkpoint.made_at).total_seconds())] if checkpoint is not None else []
    yield _gauge("muster_audit_checkpoint_age_seconds", "Since the last signed checkpoint; none = there is none", "", age)
    yield _gauge("muster_audit_alarms", "Nodes' words that they saw another log", "", [((), count_alarms())])


def _read_upkeep() -> Iterator[Metric]:
    now, looked, counted = clock.now(), read_last_look(), read_counted_until()
    alive = [gateway.is_alive for gateway in read_gateways()]
    rows = [(("alive",), sum(alive)), (("silent",), len(alive) - sum(alive))]
    yield _gauge("muster_gateways", "Gateway processes by whether they write heartbeats", "state", rows)
    text = "Since the worker last looked for problems; none = never"
    yield _gauge("muster_worker_look_age_seconds", text, "", [] if looked is None else [((), (now - looked).total_seconds())])
    text = "How far the sums for charts are behind; none = there are none"
    behind = [] if counted is None else [((), max(0.0, (now - counted).total_seconds()))]
    yield _gauge("muster_sums_behind_seconds", text, "", behind)
    ends = [((one.name,), one.expires_at.timestamp()) for one in list_authorities()]
    yield _gauge("muster_ca_expiry_timestamp_seconds", "When an internal CA of nodes expires", "name", ends)


REGISTRY.register(ControlFigures())
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)
