"""What was used: an event of each finished request, sums of it for budgets, and for people.

Events are written by the statement that makes a request record final (``ADD_USAGE``, ``ADD_RESERVED``).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any

import msgspec
from django.conf import settings
from django.db import connection, transaction
from django.db.models import Count, QuerySet, Sum
from django.db.models.functions import TruncDate
from django.utils.translation import gettext as _

from core.limits import limits
from gateway.models import ApiKey, RequestRecord, Tenant, UsageDelivery, UsageEvent
from gateway.services.errors import InvalidValue
from gateway.services.limits import read_budgets
from gateway.values import BudgetKind, Counter, find_window
from governance.notices import DeliveryFailed, list_reached_budgets, list_webhooks, notify_of_budget, post_notice
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState
from wire.ids import format_id

logger = logging.getLogger("muster.gateway")

_COLUMNS = (
    "event_id, created_at, finished_at, gateway_id, tenant, key_id, key_name, model, state, prompt_tokens, completion_tokens, "
    "cached_tokens, is_estimated, tokens, cost_micros"
)
# Only ``gateway.services.rollups`` counts these.
_OWN_COLUMNS = "node_id, status_code, queue_ms, ttft_ms, latency_ms"
_OWN_VALUES = "r.node_id, r.status_code, r.queue_ms, CASE WHEN r.is_streaming THEN r.ttfb_ms END, r.latency_ms"
_OPEN = ", ".join(f"'{state.value}'" for state in sorted(OPEN_REQUEST_STATES))
RECORDED = (
    "id, created_at, finished_at, gateway_id, tenant, key_id, key_name, model, state, prompt_tokens, completion_tokens, "
    "cached_tokens, tokens_estimated, reserved_tokens, reserved_micros, "
    "node_id, status_code, queue_ms, ttfb_ms, latency_ms, is_streaming"
)
"""Columns of request records of which events are made."""
_REJECTED = f"'{RequestState.REJECTED.value}'"
# An estimate of ours charges no more than was reserved. A rejected request used nothing: its event is only counted. A record
# becomes final once, so that no index has to keep a second event away.
ADD_USAGE = f"""
INSERT INTO gateway_usageevent ({_COLUMNS}, {_OWN_COLUMNS})
SELECT r.id, r.created_at, coalesce(r.finished_at, clock_timestamp()), r.gateway_id, r.tenant, r.key_id, r.key_name, r.model,
       r.state, used.prompt, used.completion, used.cached, r.tokens_estimated,
       LEAST(used.prompt + used.completion, CASE WHEN r.tokens_estimated THEN r.reserved_tokens END),
       LEAST(CASE WHEN m.name IS NULL THEN 0
                  ELSE ceil((used.prompt - used.cached) * m.input_price + used.cached * m.cached_price
                            + used.completion * m.output_price)::bigint END,
             CASE WHEN r.tokens_estimated THEN r.reserved_micros END), {_OWN_VALUES}
  FROM {{source}} AS r
 CROSS JOIN LATERAL (
       SELECT coalesce(CASE WHEN r.state <> {_REJECTED} THEN r.prompt_tokens END, 0)::bigint AS prompt,
              coalesce(CASE WHEN r.state <> {_REJECTED} THEN r.completion_tokens END, 0)::bigint AS completion,
              coalesce(CASE WHEN r.state <> {_REJECTED} THEN r.cached_tokens END, 0)::bigint AS cached) AS used
  LEFT JOIN gateway_model AS m
    ON m.name = r.model AND (m.input_price > 0 OR m.cached_price > 0 OR m.output_price > 0)
 WHERE r.state NOT IN ({_OPEN})
"""  # noqa: S608  # constants
"""Adds the events of those rows of ``source`` that are final; ``LEAST`` passes over what is null."""
ADD_RESERVED = f"""
INSERT INTO gateway_usageevent ({_COLUMNS}, {_OWN_COLUMNS})
SELECT r.id, r.created_at, r.finished_at, r.gateway_id, r.tenant, r.key_id, r.key_name, r.model, r.state,
       coalesce(r.prompt_tokens, 0), coalesce(r.completion_tokens, 0), coalesce(r.cached_tokens, 0), true,
       coalesce(r.reserved_tokens, 0), coalesce(r.reserved_micros, 0), {_OWN_VALUES}
  FROM {{source}} AS r
"""  # noqa: S608  # constants
"""Adds the events of requests whose gateway is gone: nobody knows what they used, so they are charged what they might have."""

_SUM = f"""
SELECT tenant, key_id, sum(used)
  FROM (SELECT tenant, key_id, {{event}} AS used FROM gateway_usageevent AS one
         WHERE {{gateways}} AND created_at >= %(from)s AND created_at < %(until)s
         UNION ALL
        SELECT tenant, key_id, {{reserved}} FROM gateway_requestrecord AS one
         WHERE {{gateways}} AND created_at >= %(from)s AND created_at < %(until)s AND state IN ({_OPEN})) AS everything
 WHERE tenant = ANY(%(tenants)s) GROUP BY tenant, key_id
"""  # noqa: S608  # constants
_LIVING = """
SELECT EXISTS (SELECT FROM gateway_gatewayprocess WHERE stopped_at IS NULL AND NOT (id = ANY(%(joined)s::uuid[]))
                  AND heartbeat_at >= statement_timestamp() - make_interval(secs => %(dead_s)s))
"""
_GONE = """
SELECT (SELECT stopped_at IS NOT NULL OR heartbeat_at < statement_timestamp() - make_interval(secs => %(dead_s)s)
          FROM gateway_gatewayprocess WHERE id = %(gateway)s) IS NOT FALSE
   AND NOT EXISTS (SELECT FROM gateway_requestrecord WHERE gateway_id = %(gateway)s AND state = ANY(%(open)s))
"""


class Spent:
    """What PostgreSQL knows of gateways that are gone (``gateway.request.budgets.Spending``)."""

    def sum_before(self, counters: Collection[Counter], *, without: Collection[uuid.UUID]) -> dict[Counter, int] | None:
        """Return what all gateways but these used, None while another one lives, which may hold something."""
        ids = [str(one) for one in without]
        with connection.cursor() as cursor:
            cursor.execute(_LIVING, {"joined": ids, "dead_s": limits().gateway.dead_s})
            if cursor.fetchone()[0]:
                return None
        return self._sum(counters, "gateway_id <> ALL(%(gateways)s::uuid[])", ids)

    def sum_of_gone(self, counter: Counter, gateway_id: uuid.UUID) -> int | None:
        """Return what a gateway used that is gone and whose requests are all closed, None when it is not."""
        open_states = sorted(state.value for state in OPEN_REQUEST_STATES)
        values: dict[str, uuid.UUID | float | list[str]] = {
            "gateway": gateway_id,
            "dead_s": limits().gateway.dead_s,
            "open": open_states,
        }
        with connection.cursor() as cursor:
            cursor.execute(_GONE, values)
            if not cursor.fetchone()[0]:
                return None
        return self._sum([counter], "gateway_id = ANY(%(gateways)s::uuid[])", [str(gateway_id)])[counter]

    def _sum(self, counters: Collection[Counter], gateways: str, ids: list[str]) -> dict[Counter, int]:
        """Sum up for counters, with one statement for all of a window; of gateways that are gone a limit has nothing left.

        Nothing of them runs any more, and their last minute is over as they are dead.
        """
        names = {one.owner.partition(":")[2] for one in counters if one.owner.startswith("key:")}
        tenants = {
            f"key:{key}": tenant for key, tenant in ApiKey.objects.filter(pk__in=names).values_list("pk", "tenant__name")
        }
        sums = dict.fromkeys(counters, 0)
        for window, is_cost in {(one.window, one.kind.is_cost) for one in counters if one.kind.is_budget}:
            mine = [one for one in counters if (one.window, one.kind.is_cost) == (window, is_cost) and one.kind.is_budget]
            owners = {tenants.get(one.owner, one.owner.partition(":")[2]) for one in mine}
            columns = ("cost_micros", "reserved_micros") if is_cost else ("tokens", "reserved_tokens")
            values = {"tenants": list(owners), "gateways": ids, "from": window.starts_at, "until": window.ends_at}
            with connection.cursor() as cursor:
                cursor.execute(_SUM.format(event=columns[0], reserved=columns[1], gateways=gateways), values)
                rows = cursor.fetchall()
            for one in mine:
                whose = [used for tenant, key, used in rows if one.owner in (f"tenant:{tenant}", f"key:{key}")]
                sums[one] = int(sum(used or 0 for used in whose))
        return sums


# For people and their programs

GROUPS = {"day": ("day",), "model": ("model",), "key": ("key_id", "key_name"), "tenant": ("tenant",), "node": ("node_id",)}
"""What usage is summed up by, and the columns of each; ``node_id`` is None for requests that no node got."""
_SUMS = ("prompt_tokens", "cached_tokens", "completion_tokens", "tokens", "cost_micros")


def read_usage(*, groups: Sequence[str], first: date, last: date, tenant: str | None = None) -> list[dict[str, Any]]:
    """Return sums by group, of requests that came on the UTC days from ``first`` to ``last``, in the order of the groups.

    Raises InvalidValue: for a group that is none of GROUPS, days in the wrong order, and when there are too many rows.
    """
    unknown = next((group for group in groups if group not in GROUPS), None)
    if unknown is not None or not groups or len(set(groups)) < len(groups):
        raise InvalidValue(
            _("group_by must be some of %(groups)s, each once.") % {"groups": ", ".join(GROUPS)}, param="group_by"
        )
    if last < first or last - first > timedelta(days=limits().gateway.usage_days):
        raise InvalidValue(
            _("to must be from to %(usage_days)s days after from.") % {"usage_days": limits().gateway.usage_days}, param="to"
        )
    events = UsageEvent.objects.filter(
        created_at__gte=datetime.combine(first, time.min, UTC),
        created_at__lt=datetime.combine(last + timedelta(days=1), time.min, UTC),
    ).exclude(state=RequestState.REJECTED.value)
    if tenant is not None:
        events = events.filter(tenant=tenant)
    if "day" in groups:
        events = events.annotate(day=TruncDate("created_at", tzinfo=UTC))
    fields = [field for group in groups for field in GROUPS[group]]
    rows: QuerySet[Any, Any] = events.order_by().values(*fields)  # Any: dicts of the chosen columns
    most = limits().gateway.usage_rows
    found = list(
        rows.annotate(
            requests=Count("pk"), **{f"sum_{name}": Sum(name) for name in _SUMS}
        ).order_by(*fields)[: most + 1]
    )  # fmt: skip
    if len(found) > most:
        raise InvalidValue(
            _("That are more than %(most)s rows: name a tenant, fewer groups or fewer days.") % {"most": most}, param="group_by"
        )
    return [{name.removeprefix("sum_"): value for name, value in row.items()} for row in found]


def read_cost(record: RequestRecord) -> int | None:
    """Return what a request was charged, in millionths of the currency; None before it has ended.

    Events have no index by request: those of the moment when it came are few.
    """
    events = UsageEvent.objects.filter(created_at=record.created_at, event_id=record.pk)
    return events.values_list("cost_micros", flat=True).first() if record.finished_at is not None else None


def tell_reached_budgets() -> int:
    """Tell webhooks of budgets of this day and month of which 80 or 100 % is used; return how many were told of."""
    now, told = clock.now(), 0
    holders = [(f"{owner_type}:{owner_id}", holder) for owner_type, owner_id, holder in _list_holders()]
    wanted = [(owner, one) for owner, holder in holders for one in read_budgets(holder) if one.kind.is_budget]
    spent = {kind: _sum_window(kind, now) for kind in {one.kind for _, one in wanted}}
    for owner, one in wanted:
        used = spent[one.kind].get(owner, 0)
        percent = _judge(used, one.amount)
        if percent:
            told += notify_of_budget(
                owner=owner,
                kind=one.kind.value,
                window=find_window(one.kind, now).name,
                percent=percent,
                amount=one.amount,
                used=used,
                is_hard=one.is_hard,
            )
    return told


@dataclass(frozen=True, slots=True)
class UsedBudget:
    """A budget of which 80 or 100 % (``percent``) is used in its day or month. ``owner_type``: tenant or key."""

    owner_type: str
    owner_id: str
    owner_name: str
    kind: str
    window: str
    percent: int
    is_hard: bool


def find_used_budgets() -> tuple[UsedBudget, ...]:
    """Return the budgets of this day and month of which ``tell_reached_budgets`` told; three queries, and nothing is summed.

    A budget that was raised since is judged by what it is now.
    """
    now, found = clock.now(), []
    told = {
        (event["owner"], event["kind"], event["window"]): event["used"]
        for event in list_reached_budgets(since=now - timedelta(seconds=limits().gateway.budget_told_s))
    }
    for owner_type, owner_id, holder in _list_holders() if told else ():
        for one in read_budgets(holder):
            window = find_window(one.kind, now).name if one.kind.is_budget else ""
            used = told.get((f"{owner_type}:{owner_id}", one.kind.value, window), 0)
            percent = _judge(used, one.amount)
            if percent:
                found.append(UsedBudget(owner_type, owner_id, holder.name, one.kind.value, window, percent, one.is_hard))
    return tuple(found)


def _list_holders() -> list[tuple[str, str, Tenant | ApiKey]]:
    tenants = [("tenant", tenant.name, tenant) for tenant in Tenant.objects.exclude(budgets=[])]
    keys = [("key", str(key.pk), key) for key in ApiKey.objects.exclude(budgets=[]).filter(revoked_at=None)]
    return [*tenants, *keys]


def _judge(used: int, amount: int) -> int:
    return next((part for part in (100, 80) if used and used * 100 >= amount * part), 0)


def _sum_window(kind: BudgetKind, now: datetime) -> dict[str, int]:
    column = "cost_micros" if kind.is_cost else "tokens"
    rows = (
        UsageEvent.objects.filter(created_at__gte=find_window(kind, now).starts_at)
        .order_by()
        .values_list("tenant", "key_id")
        .annotate(Sum(column))
    )
    spent: dict[str, int] = {}
    for tenant, key_id, used in rows:
        spent[f"key:{key_id}"] = int(used)
        spent[f"tenant:{tenant}"] = spent.get(f"tenant:{tenant}", 0) + int(used)
    return spent


# Webhooks

# No transaction of this database below it is under way. PostgreSQL's own pg_snapshot_xmin also waits for those of other
# databases of the server. What it hides, the transactions of other roles, makes that one count.
_HORIZON = """
WITH snapshot AS MATERIALIZED (SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS oldest,
                                      pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS next),
     running AS MATERIALIZED (
       SELECT backend_xid::text::bigint AS xid,
              pg_has_role(usesysid, 'USAGE') OR pg_has_role('pg_read_all_stats', 'USAGE') AS is_shown
         FROM pg_stat_activity WHERE datname = current_database() AND usesysid IS NOT NULL)
SELECT CASE WHEN EXISTS (SELECT FROM running WHERE NOT is_shown) THEN oldest
            ELSE (SELECT min(next - age) FROM (SELECT (next - xid) & 4294967295 AS age FROM running
                                               UNION ALL SELECT 0) AS ages WHERE age < 2147483648) END
  FROM snapshot
"""
# A statement after that of the horizon: only its snapshot surely has all that ended below the horizon.
_NEXT = f"""
SELECT written_in::text, seq, {_COLUMNS} FROM gateway_usageevent
 WHERE (written_in, seq) > (%s::text::xid8, %s) AND written_in < %s::text::xid8 AND state <> {_REJECTED}
 ORDER BY written_in, seq LIMIT %s
"""  # noqa: S608  # constants


def deliver_usage() -> int:
    """Post the next batches of usage events to the webhooks that take them; return how many batches got through.

    In their order, at least once. Safe to run several times at once: a batch belongs to whoever took its webhook's row.
    """
    return sum(_deliver(hook.pk, hook.url, hook.secret) for hook in list_webhooks() if hook.is_active and hook.takes_usage)


def _deliver(webhook_id: int, url: str, secret: str) -> int:
    sent = 0
    for _batch in range(limits().gateway.usage_batches):
        claimed = _claim(webhook_id)
        if claimed is None:
            break
        horizon = find_horizon()
        batch, mine = _read_batch(claimed, horizon), UsageDelivery.objects.filter(pk=webhook_id, attempt=claimed.attempt)
        if not batch:
            # Nobody looks again at the rejected requests below it.
            mine.update(written_in=horizon, seq=0, attempt=0, due_at=clock.now())
            break
        body = msgspec.json.encode({"event": "usage", "id": f"usage_{webhook_id}_{batch[-1][1]}", "events": _show(batch)})
        try:
            post_notice(url=url, secret=secret, body=body, at=int(clock.unix_s()))
        except DeliveryFailed as failure:
            bounds, now = limits().governance, clock.now()
            pause_s = min(bounds.notice_pause_max_s, bounds.notice_pause_s * 2 ** min(claimed.attempt, 10))
            mine.update(due_at=now + timedelta(seconds=pause_s), last_error=str(failure)[:200])
            logger.warning("usage.not_delivered webhook=%d reason=%s", webhook_id, failure)
            break
        written_in, seq = int(batch[-1][0]), batch[-1][1]
        mine.update(written_in=written_in, seq=seq, attempt=0, due_at=clock.now(), last_error="")
        sent += 1
    return sent


@transaction.atomic
def _claim(webhook_id: int) -> UsageDelivery | None:
    """Take a webhook's row for as long as a lease; a new webhook begins with what is written from now on."""
    now = clock.now()
    delivery = UsageDelivery.objects.select_for_update(skip_locked=True).filter(pk=webhook_id).first()
    if delivery is None:
        newest = find_horizon()
        delivery, is_new = UsageDelivery.objects.get_or_create(pk=webhook_id, defaults={"written_in": newest, "due_at": now})
        if not is_new:
            return None
    if delivery.due_at > now:
        return None
    delivery.attempt += 1
    delivery.due_at = now + timedelta(seconds=limits().governance.notice_lease_s)
    delivery.save(update_fields=["attempt", "due_at"])
    return delivery


def find_horizon() -> int:
    """Return the transaction below which everything has ended; what was written there is seen by the next statement."""
    with connection.cursor() as cursor:
        cursor.execute(_HORIZON)
        return int(cursor.fetchone()[0])


def _read_batch(delivery: UsageDelivery, horizon: int) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(_NEXT, [str(delivery.written_in), delivery.seq, str(horizon), limits().gateway.usage_batch])
        batch: list[tuple[Any, ...]] = cursor.fetchall()
    return batch


def _show(batch: Iterable[tuple[Any, ...]]) -> list[dict[str, object]]:
    names = [name.strip() for name in _COLUMNS.split(",")]
    events = []
    for _written_in, _seq, *values in batch:
        event: dict[str, object] = dict(zip(names, values, strict=True))
        event |= {"event_id": format_id("req", values[0]), "currency": settings.CURRENCY}
        events.append(event)
    return events


# Nothing changes an event, so its place in the table is its name.
_FORGET = """
DELETE FROM gateway_usageevent
 WHERE ctid = ANY(ARRAY(SELECT ctid FROM gateway_usageevent WHERE created_at < %s LIMIT %s))
"""


def forget_old_usage() -> int:
    """Delete events that are older than ``usage_days``; return how many."""
    oldest = clock.now() - timedelta(days=limits().gateway.usage_days)
    with connection.cursor() as cursor:
        cursor.execute(_FORGET, [oldest, limits().gateway.usage_rows])
        return int(cursor.rowcount)
