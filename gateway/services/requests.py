"""Finding request records: one, for a page that follows what it sent, or those that somebody names. Reads only."""

from __future__ import annotations

import logging
import re
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.db import connection, transaction
from django.db.models import Count, F, Min, Q, QuerySet, TextField
from django.db.models.functions import Cast, Now, Right

from core.limits import limits
from gateway.models import TAIL_CHARS, ApiKey, GatewayProcess, Model, ModelAlias, RequestRecord, Tenant
from gateway.services.rollups import read_top
from gateway.services.usage import ADD_RESERVED
from gateway.values import TICKETS_PATH, Dimension
from nodes.services.drains import DrainFacts
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState
from wire.ids import parse_id

_TAIL = re.compile(r"[0-9a-f]{8,31}\Z")


_FACTS = (
    "state", "error_code", "model", "queue_ms", "ttfb_ms", "latency_ms", "prompt_tokens", "completion_tokens",
    "tokens_estimated",
)  # fmt: skip


def find_request(record_id: uuid.UUID) -> dict[str, object] | None:
    """Return how a request stands, by column and with its ``node``; None when there is no record of that id.

    Times are in milliseconds, None = not known (yet). ``is_final``: nothing changes any more.
    """
    record = RequestRecord.objects.filter(pk=record_id).values(*_FACTS, node=F("node_name")).first()
    return None if record is None else {**record, "is_final": RequestState(record["state"]) not in OPEN_REQUEST_STATES}


def find_id(records: QuerySet[RequestRecord], text: str) -> QuerySet[RequestRecord] | None:
    """Return those of ``records`` whose id is ``text`` (``req_…`` or a UUID) or ends so; None when none does.

    An index finds the last TAIL_CHARS characters. Fewer, eight at least, are looked for among the newest records.
    """
    record_id = parse_id("req", text)
    if record_id is not None:
        return records.filter(pk=record_id)
    tail = text.removeprefix("…").lower()
    if not _TAIL.match(tail):
        return None
    if len(tail) >= TAIL_CHARS:
        ids = [pk for pk in _with_tail(tail[-TAIL_CHARS:]).values_list("pk", flat=True) if pk.hex.endswith(tail)]
    else:
        ending = RequestRecord.objects.alias(tail=Right(Cast("id", TextField()), len(tail))).filter(tail=tail)
        begins_at = find_scan_start(RequestRecord.objects.all(), most=limits().gateway.page_scanned_records)
        newest = ending if begins_at is None else ending.filter(created_at__gt=begins_at)
        ids = list(newest.values_list("pk", flat=True)[: limits().gateway.page_choices])
    return records.filter(pk__in=ids) if ids else None


def find_scan_start(records: QuerySet[RequestRecord], *, most: int) -> datetime | None:
    """Return when the newest ``most`` begin; None where there are no more. Reads an index alone."""
    return records.order_by("-created_at").values_list("created_at", flat=True)[most : most + 1].first()


def find_named(text: str) -> Q:
    """Return what records have whose model, alias, tenant or key is called so, in any case.

    Whose name it is shows in small tables; of a name in none of them records are asked themselves.
    """
    known: tuple[tuple[str, QuerySet[Any, Any]], ...] = (  # Any: names or UUIDs, of different tables
        ("model", Model.objects.filter(name__iexact=text).values_list("name", flat=True)),
        ("asked_model", ModelAlias.objects.filter(name__iexact=text).values_list("name", flat=True)),
        ("tenant", Tenant.objects.filter(name__iexact=text).values_list("name", flat=True)),
        ("key_id", ApiKey.objects.filter(name__iexact=text).values_list("pk", flat=True)),
    )
    named = Q()
    for field, names in known:
        if found := list(names):
            named |= Q(**{f"{field}__in": found})
    return named or reduce(or_, (Q(**{f"{field}__iexact": text}) for field in ("model", "asked_model", "tenant", "key_name")))


def _with_tail(tail: str) -> QuerySet[RequestRecord]:
    states = [state.value for state in OPEN_REQUEST_STATES]
    is_it = Q(tail=tail)
    return RequestRecord.objects.alias(tail=Right(Cast("id", TextField()), TAIL_CHARS)).filter(
        (is_it & Q(finished_at__isnull=False)) | (is_it & Q(state__in=states))
    )


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


def read_open_requests() -> OpenRequests:
    """Count open requests; cheap however large the table, thanks to the partial index on open states."""
    queued = Q(state=RequestState.QUEUED.value)
    row = RequestRecord.objects.filter(state__in=[state.value for state in OPEN_REQUEST_STATES]).aggregate(
        queued=Count("pk", filter=queued), total=Count("pk"), oldest=Min("created_at", filter=queued)
    )
    wait_s = (clock.now() - row["oldest"]).total_seconds() if row["oldest"] else 0.0
    return OpenRequests(queued=row["queued"], running=row["total"] - row["queued"], oldest_wait_s=max(0.0, wait_s))


def read_traffic_of_node(node_id: uuid.UUID, model: str | None) -> tuple[int, int]:
    """Return how many requests run on a node now (on ``model``; None = on any), and of how many tenants."""
    states = [state.value for state in OPEN_REQUEST_STATES - {RequestState.QUEUED}]  # which may name the node that it lost
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


@dataclass(frozen=True, slots=True)
class GatewayHealth:
    """A gateway process that was not stopped, as its heartbeats show it. ``silent_s``: since the last one."""

    name: str
    heard_at: datetime
    silent_s: float
    release: str = ""
    """Empty for one that does not say it: it is of 0.1.0."""

    @property
    def is_alive(self) -> bool:
        """Whether it was heard recently enough not to count as lost."""
        return self.silent_s < limits().gateway.dead_s


@dataclass(frozen=True, slots=True)
class ExpiringKey:
    """An API key that is in use and ends soon."""

    key_id: uuid.UUID
    name: str
    expires_at: datetime


def read_gateways() -> tuple[GatewayHealth, ...]:
    """Return the gateway processes that should serve, in one query."""
    since = Now() - timedelta(seconds=limits().gateway.forgotten_s)
    rows = GatewayProcess.objects.filter(stopped_at=None, heartbeat_at__gte=since)
    processes = list(rows.annotate(silence=Now() - F("heartbeat_at")).order_by("host", "pid"))
    # A process that died wrote no end: it counts until one that started later has its host and its internal address.
    newest: dict[tuple[str, str], datetime] = {}
    for process in processes:
        place = process.host, process.internal_url
        newest[place] = max(newest.get(place, process.started_at), process.started_at)
    found = []
    for process in processes:
        health = GatewayHealth(str(process), process.heartbeat_at, process.silence.total_seconds(), process.release)
        was_replaced = newest[process.host, process.internal_url] > max(process.started_at, process.heartbeat_at)
        if health.is_alive or not was_replaced:
            found.append(health)
    return tuple(found)


def count_asked_models() -> dict[str, int]:
    """Return every allowed model with the requests for it that ended within ``page_asked_s``, in two queries."""
    names = list(Model.objects.filter(allowed=True).values_list("name", flat=True))
    top = read_top(timedelta(seconds=limits().gateway.page_asked_s), Dimension.MODEL, most=limits().gateway.list_rows)
    asked = {one.name: one.sums.requests for one in top}
    return {name: asked.get(name, 0) for name in names}


def read_expiring_keys() -> tuple[ExpiringKey, ...]:
    """Return the keys that end within ``page_key_warning_s`` and were used within it, the first to end first; one query.

    A key that was made for less than that time, such as those of the playground, is meant to end.
    """
    now = clock.now()
    within = timedelta(seconds=limits().gateway.page_key_warning_s)
    usable = ApiKey.objects.filter(revoked_at=None, last_used_at__gte=now - within)
    ending = usable.filter(expires_at__range=(now, now + within), expires_at__gt=F("created_at") + within)
    rows = ending.order_by("expires_at")
    return tuple(ExpiringKey(key.pk, key.name, key.expires_at) for key in rows if key.expires_at is not None)


logger = logging.getLogger(__name__)

# A gateway cannot write its heartbeat while the database is away: after a restart of the database nobody is taken for
# dead before every living gateway had the time to write again.
_SILENT = """
    g.heartbeat_at < clock_timestamp() - make_interval(secs => %(dead_after_s)s)
    AND pg_postmaster_start_time() < clock_timestamp() - make_interval(secs => %(dead_after_s)s)
"""
# A request with a ticket runs without any gateway. It is waited for until its time has run out, and after an outage until a
# gateway has been back for as long as nodes need to tell what they kept.
_OVERDUE = """(
    r.created_at < clock_timestamp()
                   - make_interval(secs => CASE WHEN r.state = %(assigned)s THEN %(unused_s)s ELSE %(ticket_s)s END)
    AND EXISTS (
        SELECT 1 FROM gateway_gatewayprocess AS back
         WHERE back.stopped_at IS NULL
           AND back.started_at < clock_timestamp() - make_interval(secs => %(back_s)s)
           AND back.heartbeat_at >= clock_timestamp() - make_interval(secs => %(dead_after_s)s)
    )
)"""
_ORPHANS = f"""
         FROM gateway_requestrecord AS r
         LEFT JOIN gateway_gatewayprocess AS g ON g.id = r.gateway_id
        WHERE r.state = ANY(%(open)s)
          AND CASE WHEN r.endpoint = %(tickets)s THEN {_OVERDUE} ELSE
               g.stopped_at IS NOT NULL
               OR (g.id IS NULL AND r.created_at < clock_timestamp() - make_interval(secs => %(dead_after_s)s))
               OR ({_SILENT})
          END
"""
# Whether a request's gateway is silent; null when no request is an orphan.
_LOOK = f"SELECT bool_or(r.endpoint <> %(tickets)s AND g.id IS NOT NULL AND g.stopped_at IS NULL) {_ORPHANS}"  # a constant
_CLOSE = f"""
WITH closed AS (
UPDATE gateway_requestrecord AS record
   SET (state, error_code) = (
           SELECT CASE WHEN is_unused THEN %(cancelled)s ELSE %(interrupted)s END,
                  CASE WHEN is_unused THEN %(unused_code)s ELSE %(error_code)s END
             FROM (SELECT record.endpoint = %(tickets)s AND record.state = %(assigned)s) AS ticket (is_unused)
       ),
       finished_at = clock_timestamp(),
       latency_ms = LEAST(
           2147483647, GREATEST(0, extract(epoch FROM clock_timestamp() - record.created_at) * 1000)
       )::integer
  FROM (
        SELECT r.id, r.created_at
        {_ORPHANS}
         LIMIT %(batch)s
           FOR UPDATE OF r SKIP LOCKED
       ) AS orphan
 WHERE record.id = orphan.id AND record.created_at = orphan.created_at AND record.state = ANY(%(open)s)
RETURNING record.*
) {ADD_RESERVED.format(source="closed")}
"""  # noqa: S608  # a constant


def close_orphaned_requests(*, dead_after_s: float | None = None, confirm_s: float = 2.0) -> int:
    """Mark open requests of gateways that stopped, or were silent for ``dead_after_s`` seconds, as interrupted.

    So are those with a ticket of which no node said in time how they ended; they need no gateway while they run. A ticket that
    nobody used, as far as its node told, ends as cancelled: that is nobody's failure, and what it reserved is charged.
    Returns how many were closed. Final states are never touched; rows that a gateway is writing at the moment are left
    for the next call. Safe to run several times at once.
    """
    parameters: dict[str, str | float | list[str]] = {
        "interrupted": RequestState.INTERRUPTED.value,
        "error_code": ErrorCode.REQUEST_INTERRUPTED.value,
        "cancelled": RequestState.CANCELLED.value,
        "unused_code": ErrorCode.TICKET_UNUSED.value,
        "open": sorted(state.value for state in OPEN_REQUEST_STATES),
        "dead_after_s": limits().gateway.dead_s if dead_after_s is None else dead_after_s,
        "batch": limits().gateway.orphans_batch,
        "tickets": TICKETS_PATH,
        "assigned": RequestState.ASSIGNED.value,
        "unused_s": limits().gateway.ticket_unused_s,
        "ticket_s": limits().gateway.request_s + limits().gateway.ticket_report_s,
        "back_s": limits().gateway.ticket_back_s,
    }
    is_silent = _look(parameters)
    if is_silent is None:
        return 0
    if is_silent:
        # After a database that stood still, frozen with its machine or cut off, everybody is until the next heartbeat.
        clock.sleep(confirm_s)
    closed = 0
    while True:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(_CLOSE, parameters)
            batch = int(cursor.rowcount)
        closed += batch
        if batch < limits().gateway.orphans_batch:
            break
    if closed:
        logger.warning("orphaned_requests_closed count=%d", closed)
    return closed


def _look(parameters: dict[str, str | float | list[str]]) -> bool | None:
    with connection.cursor() as cursor:
        cursor.execute(_LOOK, parameters)
        is_silent: bool | None = cursor.fetchone()[0]
    return is_silent
