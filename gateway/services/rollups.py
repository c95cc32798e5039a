"""Sums of requests for charts: of minutes, ten minutes, hours and days, written from usage events and never from a page.

Events are counted in the order of their transactions, as webhooks get them, and a batch and how far it came are one
transaction: each event is counted once, whoever is killed, and none that was committed late is passed over. A request counts in
the minute in which it ended. Quantiles are read from sketches (``nodes.services.figures``) that add up as counts do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Any

from django.db import connection, transaction

from core.charts import RANGES as RANGES  # noqa: PLC0414  # what reads sums reads them over one of these
from core.db.base import LAZILY
from core.limits import limits
from gateway.models import RequestDay, RequestHour, RequestMinute, RequestSums, RequestTenMinutes, UsageDelivery
from gateway.services.usage import find_horizon
from gateway.values import Dimension
from nodes.services.figures import read_bucket
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState

_Values = dict[str, str | float | datetime | list[int] | list[str] | None]
_MARK = 0
"""Of ``UsageDelivery``: how far the events are counted."""
_ORIGIN = datetime(2000, 1, 1, tzinfo=UTC)
"""Steps are counted from it, so that those of whole hours begin with a UTC day."""
_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
_SUMMED = ("prompt_tokens", "cached_tokens", "completion_tokens", "cost_micros", "node_ms")
_COUNTS = ("served", "refused", "failed", "cancelled", *_SUMMED)


class Metric(StrEnum):
    """What has a sketch, in milliseconds; the value is its column."""

    LATENCY = "latency"
    """Of a served request, with its queue."""
    TTFT = "ttft"
    """Of a served stream, until the first byte, with the queue."""
    TOKEN_TIME = "token_time"  # noqa: S105  # no secret
    """Of a served stream, for each token after the first; only where the engine counted them."""
    QUEUE_TIME = "queue_time"
    """Of each request that got a node."""


@dataclass(frozen=True, slots=True)
class _Level:
    """A table: what a row of it stands for, how long it is kept, what it has rows of, and which of them have sketches."""

    model: type[RequestSums]
    step: timedelta
    kept: timedelta
    dimensions: tuple[Dimension, ...]
    sketched: tuple[Dimension, ...]

    @property
    def table(self) -> str:
        return self.model._meta.db_table  # noqa: SLF001  # Django documents it


def _list_levels() -> tuple[_Level, ...]:
    policy, few = limits().gateway, (Dimension.ALL, Dimension.MODEL, Dimension.NODE, Dimension.TENANT)
    return (
        _Level(RequestMinute, _MINUTE, timedelta(days=policy.rollup_minutes_days), few, few),
        _Level(RequestTenMinutes, 10 * _MINUTE, timedelta(days=policy.rollup_tens_days), few, few),
        _Level(RequestHour, _HOUR, timedelta(days=policy.rollup_hours_days), few, few),
        # A month of 1,000 nodes is read to find the first of them: their rows are small.
        _Level(RequestDay, _DAY, timedelta(days=policy.rollup_days), tuple(Dimension), (few[0], few[1], few[3])),
    )


# Writing

_METRICS = {
    Metric.LATENCY: "CASE WHEN e.state = 'completed' THEN e.latency_ms END",
    Metric.TTFT: "CASE WHEN e.state = 'completed' THEN e.ttft_ms END",
    Metric.TOKEN_TIME: "CASE WHEN e.state = 'completed' AND e.completion_tokens > 1 AND NOT e.is_estimated "
    "THEN (e.latency_ms - e.ttft_ms)::float8 / (e.completion_tokens - 1) END",
    Metric.QUEUE_TIME: "CASE WHEN e.node_id IS NOT NULL THEN e.queue_ms END",
}


def _each(text: str, names: Iterable[str]) -> str:
    return ", ".join(text.replace("?", name) for name in names)


# ``GREATEST`` passes over what is null.
_BUCKET = (
    "CASE WHEN {} IS NOT NULL THEN LEAST(%(last)s, ceil(ln(GREATEST({}, %(least)s) / %(least)s) / ln(%(scale)s)))::bigint END"
)
_BUCKETS = ", ".join(f"{_BUCKET.format(value, value)} AS {one}" for one, value in _METRICS.items())
_COLUMNS = ", ".join(("dimension", "at", "name", *_COUNTS, *Metric, "queued_most", "running_most"))
_MERGED = """
? = CASE WHEN excluded.? = '{{}}' THEN t.? ELSE (
    SELECT array_agg(n << 10 | bucket)
      FROM (SELECT v & 1023 AS bucket, sum(v >> 10)::bigint AS n FROM unnest(t.? || excluded.?) AS v GROUP BY 1) AS b) END"""
# What became of a request is judged as ``gateway.values.judge_outcome`` does.
_BATCH = f"""
WITH batch AS MATERIALIZED (
SELECT e.written_in, e.seq, date_bin('1 minute', e.finished_at, %(origin)s) AS at, {_BUCKETS},
       coalesce(m.name, '') AS model, e.node_id::text AS node, e.tenant, e.key_id::text AS key,
       e.prompt_tokens, e.cached_tokens, e.completion_tokens, e.cost_micros,
       CASE WHEN e.node_id IS NULL THEN 0 ELSE GREATEST(0, coalesce(e.latency_ms, 0) - coalesce(e.queue_ms, 0)) END AS node_ms,
       CASE WHEN e.state = 'completed' THEN 'served' WHEN e.state = 'cancelled' THEN 'cancelled'
            WHEN e.state = 'rejected' AND e.status_code BETWEEN 400 AND 499 THEN 'refused' ELSE 'failed' END AS outcome
  FROM (SELECT * FROM gateway_usageevent
         WHERE (written_in, seq) > (%(written_in)s::text::xid8, %(seq)s) AND written_in < %(horizon)s::text::xid8
         ORDER BY written_in, seq LIMIT %(most)s) AS e
  LEFT JOIN gateway_model AS m ON m.name = e.model
), named AS MATERIALIZED (
SELECT b.*, d.dimension, d.name
  FROM batch AS b
 CROSS JOIN LATERAL (VALUES ({Dimension.ALL:d}, ''), ({Dimension.MODEL:d}, b.model), ({Dimension.NODE:d}, b.node),
                            ({Dimension.TENANT:d}, b.tenant), ({Dimension.KEY:d}, b.key),
                            ({Dimension.TENANT_MODEL:d}, b.tenant || E'\\n' || b.model)) AS d (dimension, name)
 WHERE d.name IS NOT NULL
), counts AS MATERIALIZED (
SELECT at, dimension, name, {_each("count(*) FILTER (WHERE outcome = '?') AS ?", _COUNTS[:4])},
       {_each("sum(?) AS ?", _SUMMED)}
  FROM named GROUP BY at, dimension, name
), buckets AS MATERIALIZED (
SELECT at, dimension, name, v.metric, v.bucket, count(*) AS n
  FROM named AS b CROSS JOIN LATERAL (VALUES {_each("('?', b.?)", Metric)}) AS v (metric, bucket)
 WHERE v.bucket IS NOT NULL AND dimension = ANY(%(sketched)s) GROUP BY at, dimension, name, v.metric, v.bucket
)
"""  # noqa: S608  # constants
# Sums and buckets are grouped together, not joined: nobody knows how many there are when it is planned.
_LEVEL = f"""
, {{table}}_written AS (
INSERT INTO {{table}} AS t ({_COLUMNS})
SELECT dimension, at, name, {_each("sum(?)::bigint", _COUNTS)},
       {_each("coalesce(array_agg(n << 10 | bucket) FILTER (WHERE metric = '?'), '{{}}')", Metric)}, 0, 0
  FROM (SELECT date_bin(%({{table}}_step)s, at, %(origin)s) AS at, dimension, name, {_each("?", _COUNTS)},
               NULL AS metric, NULL AS bucket, NULL AS n
          FROM counts WHERE at >= %({{table}}_oldest)s AND dimension = ANY(%({{table}}_of)s)
         UNION ALL
        SELECT date_bin(%({{table}}_step)s, at, %(origin)s) AS at, dimension, name, {_each("0", _COUNTS)},
               metric, bucket, sum(n)::bigint
          FROM buckets WHERE at >= %({{table}}_oldest)s AND dimension = ANY(%({{table}}_sketched)s)
         GROUP BY 1, 2, 3, metric, bucket) AS found
 GROUP BY at, dimension, name
    ON CONFLICT (dimension, at, name) DO UPDATE SET
       {_each("? = t.? + excluded.?", _COUNTS)}, {_each(_MERGED, Metric)}
)
"""  # noqa: S608  # constants
_LAST = """
SELECT (SELECT count(*) FROM batch), written_in::text, seq, at FROM batch ORDER BY written_in DESC, seq DESC LIMIT 1
"""
_OPEN = f"""
WITH found AS MATERIALIZED (
SELECT model, count(*) FILTER (WHERE state = '{RequestState.QUEUED.value}') AS queued,
       count(*) FILTER (WHERE state <> '{RequestState.QUEUED.value}') AS running
  FROM gateway_requestrecord WHERE state IN ({", ".join(f"'{state.value}'" for state in sorted(OPEN_REQUEST_STATES))})
 GROUP BY model
), named AS MATERIALIZED (
SELECT {Dimension.ALL:d} AS dimension, '' AS name, sum(queued) AS queued, sum(running) AS running FROM found HAVING count(*) > 0
 UNION ALL
SELECT {Dimension.MODEL:d}, coalesce(m.name, ''), sum(queued), sum(running)
  FROM found AS f LEFT JOIN gateway_model AS m ON m.name = f.model GROUP BY 2
)
"""  # noqa: S608  # constants
_OPEN_LEVEL = f"""
{{table}}_written AS (
INSERT INTO {{table}} AS t ({_COLUMNS})
SELECT dimension, date_bin(%({{table}}_step)s, statement_timestamp(), %(origin)s), name, {_each("0", _COUNTS)},
       {_each("'{{}}'::bigint[]", Metric)}, queued, running
  FROM named
    ON CONFLICT (dimension, at, name) DO UPDATE SET queued_most = GREATEST(t.queued_most, excluded.queued_most),
       running_most = GREATEST(t.running_most, excluded.running_most)
 WHERE t.queued_most < excluded.queued_most OR t.running_most < excluded.running_most
)
"""  # noqa: S608  # constants
# Nothing moves an old row, so its place in the table is its name.
_FORGET = """
DELETE FROM {table} WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM {table} WHERE dimension = ANY(%(of)s) AND at < %(oldest)s LIMIT %(most)s))
"""


def roll_up_requests() -> int:
    """Count the events since the last time, in batches, note what is open, forget what is old; return how many were counted.

    Safe to run several times at once: whoever finds another one at it leaves it the rest.
    """
    counted, until = 0, clock.monotonic() + limits().gateway.rollup_budget_s
    while True:
        batch = _roll_up_batch(is_first=not counted)
        counted += batch
        if batch < limits().gateway.rollup_batch or clock.monotonic() >= until:
            return counted


@transaction.atomic
def _roll_up_batch(*, is_first: bool) -> int:
    UsageDelivery.objects.get_or_create(pk=_MARK, defaults={"due_at": clock.now()})
    mark = UsageDelivery.objects.select_for_update(skip_locked=True).filter(pk=_MARK).first()
    if mark is None:
        return 0
    levels, horizon, now = _list_levels(), find_horizon(), clock.now()
    scale = limits().nodes
    values: _Values = {
        "origin": _ORIGIN,
        "written_in": str(mark.written_in),
        "seq": mark.seq,
        "horizon": str(horizon),
        "most": limits().gateway.rollup_batch,
        "least": scale.figures_smallest,
        "scale": scale.figures_step,
        "last": scale.figures_buckets,
        "sketched": [one.value for one in levels[0].sketched],
    }
    for level in levels:
        values[f"{level.table}_step"], values[f"{level.table}_of"] = (
            _print_step(level.step),
            [one.value for one in level.dimensions],
        )
        values[f"{level.table}_sketched"] = [one.value for one in level.sketched]
        values[f"{level.table}_oldest"] = _align(now - level.kept, level.step)
    with connection.cursor() as cursor:
        if is_first:
            opened = ", ".join(_OPEN_LEVEL.format(table=level.table) for level in levels)
            cursor.execute(f"{_OPEN}, {opened} SELECT", values)
            for level in levels:
                bounds: _Values = {name: values[f"{level.table}_{name}"] for name in ("of", "oldest")}
                bounds["most"] = limits().gateway.rollup_forgotten
                cursor.execute(_FORGET.format(table=level.table), bounds)
        # What a crash of the server forgets is counted again: the mark goes with it.
        cursor.execute(f"SELECT {LAZILY}, set_config('work_mem', %s, true)", [f"{limits().gateway.rollup_memory_mb}MB"])
        cursor.execute(_BATCH + "".join(_LEVEL.format(table=level.table) for level in levels) + _LAST, values)
        found = cursor.fetchone()
    count, mark.due_at = 0, now
    if found is not None:
        count, mark.written_in, mark.seq = found[0], int(found[1]), found[2]
        if count == limits().gateway.rollup_batch:  # there may be more
            mark.due_at = min(now, found[3])
    mark.save(update_fields=["written_in", "seq", "due_at"])
    return count


def _print_step(step: timedelta) -> str:
    return f"{step.total_seconds():.0f} seconds"


def _align(moment: datetime, step: timedelta) -> datetime:
    return moment - (moment - _ORIGIN) % step


# Reading


def read_counted_until() -> datetime | None:
    """Return until when everything that ended is counted; None before the first time."""
    return UsageDelivery.objects.filter(pk=_MARK).values_list("due_at", flat=True).first()


def has_counted_any() -> bool:
    """Return whether there was ever a request that ended."""
    return RequestDay.objects.filter(dimension=Dimension.ALL.value).exists()


@dataclass(frozen=True, slots=True)
class Sums:
    """What requests came to. Quantiles are those of the metric that was asked for, in ms; None where there is none."""

    served: int = 0
    refused: int = 0
    failed: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_micros: int = 0
    node_ms: int = 0
    """How long nodes worked on them; of requests that one node worked on at once each counts."""
    queued_most: int = 0
    running_most: int = 0
    p50_ms: float | None = None
    p95_ms: float | None = None

    @property
    def requests(self) -> int:
        return self.served + self.refused + self.failed + self.cancelled

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    @property
    def failed_percent(self) -> float:
        """Share of requests that failed, 0 to 100. Refused ones count on neither side: many would hide what failed."""
        judged = self.requests - self.refused
        return 100.0 * self.failed / judged if judged else 0.0


@dataclass(frozen=True, slots=True)
class Series:
    """Sums over time: a point for each ``step``, oldest first and without a gap; the last one still grows."""

    step: timedelta
    points: tuple[tuple[datetime, Sums], ...]
    total: Sums


@dataclass(frozen=True, slots=True)
class Named:
    """The sums of one name of a dimension."""

    name: str
    sums: Sums


class Order(StrEnum):
    """By what names are the first."""

    REQUESTS = "served + refused + failed + cancelled"
    FAILED = "failed"
    TOKENS = "prompt_tokens + completion_tokens"
    COST = "cost_micros"


_SUMS = ", ".join(
    [*(f"sum({one})::bigint AS {one}" for one in _COUNTS), *(f"max({one}) AS {one}" for one in ("queued_most", "running_most"))]
)
_ROWS = """
SELECT date_bin(%(step)s, at, %(origin)s) AS slot, {columns} FROM {table}
 WHERE dimension = %(dimension)s AND name = %(name)s
   AND at = ANY(ARRAY(SELECT generate_series(%(begins_at)s::timestamptz, %(ends_at)s::timestamptz, %(own_step)s::interval)))
"""
_SERIES = f"""
SELECT coalesce(slot, %(origin)s) AS slot, {_SUMS} FROM ({_ROWS}) AS r GROUP BY GROUPING SETS ((r.slot), ())
"""  # noqa: S608  # constants
_SERIES_OF = f"""
WITH rows AS MATERIALIZED ({_ROWS}),
sums AS (
SELECT coalesce(slot, %(origin)s) AS slot, {_SUMS} FROM rows AS r GROUP BY GROUPING SETS ((r.slot), ())
), each AS (
SELECT slot, v & 1023 AS bucket, sum((v >> 10)::float8) AS n FROM rows CROSS JOIN LATERAL unnest(rows.{{metric}}) AS v
 GROUP BY slot, v & 1023
), buckets AS (
SELECT slot, bucket, n FROM each UNION ALL SELECT %(origin)s, bucket, sum(n) FROM each GROUP BY bucket
), ranked AS (
SELECT slot, bucket, sum(n) OVER (PARTITION BY slot ORDER BY bucket) AS below, sum(n) OVER (PARTITION BY slot) AS n FROM buckets
), quantiles AS (
SELECT slot, min(bucket) FILTER (WHERE below >= 0.5 * n) AS p50, min(bucket) FILTER (WHERE below >= 0.95 * n) AS p95
  FROM ranked GROUP BY slot
)
SELECT sums.*, p50, p95 FROM sums LEFT JOIN quantiles USING (slot)
"""  # noqa: S608  # constants
# Two marks that no row has: a slot for the sums of all, and one for those of the time before.
_BEFORE = _ORIGIN - _DAY
_QUANTILES = {
    f"{metric}_{name}": f"min(bucket) FILTER (WHERE metric = '{metric}' AND below >= {share} * n) AS {metric}_{name}"
    for metric in Metric
    for name, share in (("p50", 0.5), ("p95", 0.95))
}
_COMPARED = f"""
WITH rows AS MATERIALIZED (
SELECT date_bin(%(step)s, at, %(origin)s) AS slot, {{columns}} FROM {{table}}
 WHERE dimension = {Dimension.ALL:d} AND name = ''
   AND at = ANY(ARRAY(SELECT generate_series(%(begins_at)s::timestamptz, %(ends_at)s::timestamptz, %(own_step)s::interval)))
 UNION ALL
SELECT %(before)s, {{columns}} FROM {{before}}
 WHERE dimension = {Dimension.ALL:d} AND name = '' AND at >= %(before_begins_at)s AND at < %(before_ends_at)s
), sums AS (
SELECT slot, {_SUMS} FROM rows GROUP BY slot
), each AS (
SELECT slot, metric, v & 1023 AS bucket, sum((v >> 10)::float8) AS n
  FROM rows CROSS JOIN LATERAL (VALUES {{sketches}}) AS s (metric, sketch) CROSS JOIN LATERAL unnest(sketch) AS v
 GROUP BY slot, metric, v & 1023
), buckets AS (
SELECT slot, metric, bucket, n FROM each
 UNION ALL
SELECT %(origin)s, metric, bucket, sum(n) FROM each WHERE slot <> %(before)s GROUP BY metric, bucket
), ranked AS (
SELECT slot, metric, bucket, sum(n) OVER (PARTITION BY slot, metric ORDER BY bucket) AS below,
       sum(n) OVER (PARTITION BY slot, metric) AS n
  FROM buckets
), quantiles AS (
SELECT slot, {{quantiles}} FROM ranked GROUP BY slot
)
SELECT quantiles.*, sums.* FROM sums FULL JOIN quantiles USING (slot)
"""  # noqa: S608  # constants
_TOP = f"""
SELECT name, {_SUMS} FROM {{table}} WHERE dimension = %(dimension)s AND at >= %(begins_at)s
 GROUP BY name ORDER BY sum({{order}}) DESC, name LIMIT %(most)s
"""  # noqa: S608  # constants

# Names are bytes, so those of a tenant's models stand between its name with a new line behind it and that with the next byte.
_OF_DAYS = """
 WHERE dimension = %(dimension)s AND at >= %(begins_at)s AND name >= %(first)s AND (%(last)s = '' OR name < %(last)s)
   AND (%(names)s::text[] IS NULL OR name = ANY(%(names)s))
"""
_FIRST = f"""
SELECT name FROM {{table}} {_OF_DAYS} GROUP BY name ORDER BY sum({{order}}) DESC, name LIMIT %(most)s
"""  # noqa: S608  # constants
_BY_NAME = f"""
WITH sums AS MATERIALIZED (
SELECT name, {_SUMS} FROM {{table}} {_OF_DAYS} GROUP BY name
), places AS (
SELECT *, row_number() OVER (ORDER BY {{order}} DESC, name) AS place FROM sums
)
SELECT CASE WHEN place <= %(most)s THEN name END, {_SUMS} FROM places GROUP BY 1 ORDER BY min(place)
"""  # noqa: S608  # constants
_BY_DAY = f"""
SELECT name, at, {_SUMS} FROM {{table}} {_OF_DAYS} GROUP BY name, at ORDER BY at, name LIMIT %(most)s
"""  # noqa: S608  # constants
_OF_NAMES = f"""
SELECT name, {_SUMS} FROM {{table}} WHERE dimension = %(dimension)s AND at >= %(since)s AND name = ANY(%(names)s) GROUP BY name
"""  # noqa: S608  # constants


@dataclass(frozen=True, slots=True)
class Part:
    """What is summed up: some UTC days until now, by the names of a dimension.

    ``tenant``: of TENANT_MODEL, that tenant's names alone. ``names``: only these, None = all.
    """

    days: int
    dimension: Dimension
    tenant: str = ""
    names: tuple[str, ...] | None = None

    @property
    def starts(self) -> tuple[datetime, ...]:
        """The days, oldest first."""
        return tuple(_align(clock.now(), _DAY) - _DAY * back for back in reversed(range(self.days)))

    def _list_values(self, *, most: int) -> _Values:
        return {
            "dimension": self.dimension.value,
            "begins_at": self.starts[0],
            "first": f"{self.tenant}\n" if self.tenant else "",
            "last": f"{self.tenant}\x0b" if self.tenant else "",
            "names": None if self.names is None else list(self.names),
            "most": most,
        }

    def run(self, text: str, *, most: int, order: Order = Order.REQUESTS) -> list[tuple[Any, ...]]:  # Any: columns
        with connection.cursor() as cursor:
            cursor.execute(text.format(table=_list_levels()[-1].table, order=order), self._list_values(most=most))
            found: list[tuple[Any, ...]] = cursor.fetchall()
        return found


def read_first_names(part: Part, *, most: int, order: Order) -> list[str]:
    """Return the names of which there is most; one query."""
    return [name for (name,) in part.run(_FIRST, most=most, order=order)]


def read_totals(part: Part, *, most: int, order: Order) -> tuple[tuple[Named, ...], Sums | None]:
    """Return the sums of the first names, and of all others together; None = there is no other one. One query."""
    found = [(name, _read_sums(*sums)) for name, *sums in part.run(_BY_NAME, most=most, order=order)]
    named = tuple(Named(name, sums) for name, sums in found if name is not None)
    return named, next((sums for name, sums in found if name is None), None)


def read_days(part: Part, *, most: int) -> dict[str, tuple[Sums, ...]]:
    """Return the sums of each name on each of the days, of at most so many pairs of both; one query."""
    found: dict[str, dict[datetime, Sums]] = {}
    for name, at, *sums in part.run(_BY_DAY, most=most):
        found.setdefault(name, {})[at] = _read_sums(*sums)
    starts = part.starts
    return {name: tuple(days.get(at, Sums()) for at in starts) for name, days in found.items()}


def sum_days(dimension: Dimension, *, since: datetime, names: Iterable[str]) -> dict[str, Sums]:
    """Return the sums of these names of the UTC days from ``since`` on; without names of which there is nothing."""
    values: _Values = {"dimension": dimension.value, "since": since, "names": list(names)}
    with connection.cursor() as cursor:
        cursor.execute(_OF_NAMES.format(table=_list_levels()[-1].table), values)
        return {name: _read_sums(*row) for name, *row in cursor.fetchall()}


def read_first_day() -> datetime | None:
    """Return the UTC day from which on requests are summed up; None before the first."""
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT min(at) FROM {_list_levels()[-1].table} WHERE dimension = {Dimension.ALL:d}")  # noqa: S608
        found: datetime | None = cursor.fetchone()[0]
    return found


def read_series(
    span: timedelta, *, dimension: Dimension = Dimension.ALL, name: str = "", metric: Metric | None = None
) -> Series:
    """Return how requests went until now, of all or of one name, in steps that fit the span; one query.

    With a metric, points and total have its median and its 95th percentile.
    """
    level, step = _choose_steps(span, dimension)
    last = _align(clock.now(), step)
    times = [last - step * back for back in reversed(range(max(1, math.ceil(span / step))))]
    columns = ", ".join([*_COUNTS, "queued_most", "running_most", *([metric.value] if metric else [])])
    text = (_SERIES_OF if metric else _SERIES).format(table=level.table, columns=columns, metric=metric)
    values: _Values = {
        "dimension": dimension.value,
        "name": name,
        "step": _print_step(step),
        "own_step": _print_step(level.step),
        "origin": _ORIGIN,
        "begins_at": times[0],
        "ends_at": last + step - level.step,
    }
    with connection.cursor() as cursor:
        cursor.execute(text, values)
        found = {slot: _read_sums(*row) for slot, *row in cursor.fetchall()}
    return Series(step, tuple((at, found.get(at, Sums())) for at in times), found.get(_ORIGIN, Sums()))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 95th percentile, in ms; None where there is nothing to measure."""

    p50_ms: float | None = None
    p95_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """How all requests went over time, and in the time before: everything that one page shows of them.

    ``before``: the sums of a time as long, which ends with the step of the table it is read from that ``points`` begin in.
    ``quantiles``: by metric, of each point; ``of_all`` and ``of_before``: by metric.
    """

    step: timedelta
    points: tuple[tuple[datetime, Sums], ...]
    quantiles: Mapping[Metric, tuple[Quantiles, ...]]
    total: Sums
    of_all: Mapping[Metric, Quantiles]
    before: Sums
    of_before: Mapping[Metric, Quantiles]


def read_comparison(span: timedelta, metrics: Sequence[Metric]) -> Comparison:
    """Return how all requests went within a span until now, with the span before; one query."""
    level, step = _choose_steps(span, Dimension.ALL)
    if step > _HOUR:  # a month of hours has more buckets than 20 ms are enough for
        level, step = _list_levels()[-1], _DAY
    past = _choose_table(span, Dimension.ALL)
    last = _align(clock.now(), step)
    times = [last - step * back for back in reversed(range(max(1, math.ceil(span / step))))]
    past_ends_at = _align(times[0], past.step)
    names = [f"{metric}_{name}" for metric in metrics for name in ("p50", "p95")]
    text = _COMPARED.format(
        table=level.table,
        before=past.table,
        columns=", ".join([*_COUNTS, "queued_most", "running_most", *metrics]),
        sketches=_each("('?', ?)", metrics),
        quantiles=", ".join(_QUANTILES[name] for name in names),
    )
    values: _Values = {
        "step": _print_step(step),
        "own_step": _print_step(level.step),
        "origin": _ORIGIN,
        "before": _BEFORE,
        "begins_at": times[0],
        "ends_at": last + step - level.step,
        "before_begins_at": past_ends_at - span,
        "before_ends_at": past_ends_at,
    }
    with connection.cursor() as cursor:
        cursor.execute(text, values)
        rows = cursor.fetchall()
    width = len(names) + 1
    sums = {slot: _read_sums(*rest) for row in rows for slot, *rest in [row[width:]] if slot is not None}
    found = {row[0]: dict(zip(names, row[1:width], strict=True)) for row in rows if row[0] is not None}

    def read_quantiles(slot: datetime, metric: Metric) -> Quantiles:
        buckets = (found.get(slot, {}).get(f"{metric}_{name}") for name in ("p50", "p95"))
        return Quantiles(*(None if one is None else read_bucket(one) for one in buckets))

    points = tuple((at, sums.get(at, Sums())) for at in times)
    return Comparison(
        step=step,
        points=points,
        quantiles={metric: tuple(read_quantiles(at, metric) for at in times) for metric in metrics},
        total=add_sums(sum_ for _, sum_ in points),
        of_all={metric: read_quantiles(_ORIGIN, metric) for metric in metrics},
        before=sums.get(_BEFORE, Sums()),
        of_before={metric: read_quantiles(_BEFORE, metric) for metric in metrics},
    )


def add_sums(parts: Iterable[Sums]) -> Sums:
    """Return them as one, without quantiles."""
    all_of = tuple(parts)
    counts = {name: sum(getattr(one, name) for one in all_of) for name in _COUNTS}
    most = {name: max((getattr(one, name) for one in all_of), default=0) for name in ("queued_most", "running_most")}
    return Sums(**counts, **most)


def read_top(span: timedelta, dimension: Dimension, *, most: int, order: Order = Order.REQUESTS) -> tuple[Named, ...]:
    """Return the first ``most`` names of a dimension within a span until now, by what ``order`` says; one query.

    The span begins with a step of the table that is read, so it may be longer by one: see ``_choose_table``.
    """
    level = _choose_table(span, dimension)
    values = {"dimension": dimension.value, "begins_at": _align(clock.now() - span, level.step), "most": most}
    with connection.cursor() as cursor:
        cursor.execute(_TOP.format(table=level.table, order=order), values)
        return tuple(Named(name, _read_sums(*row)) for name, *row in cursor.fetchall())


OUTCOMES = ("served", "refused", "failed", "cancelled")
_BY_PROVIDER = f"""
SELECT p.name, {", ".join(f"sum(r.{one})::bigint" for one in OUTCOMES)} FROM {{table}} AS r
  JOIN nodes_node AS n ON n.id::text = r.name JOIN nodes_provider AS p ON p.id = n.provider_id
 WHERE r.dimension = {Dimension.NODE:d} AND r.at >= %s GROUP BY p.name
"""  # noqa: S608  # constants


def read_provider_requests() -> dict[str, dict[str, int]]:
    """Return what the requests that nodes got within ``provider_span_s`` came to (``OUTCOMES``), by provider; one query."""
    span = timedelta(seconds=limits().gateway.provider_span_s)
    level = _choose_table(span, Dimension.NODE)
    with connection.cursor() as cursor:
        cursor.execute(_BY_PROVIDER.format(table=level.table), [_align(clock.now() - span, level.step)])
        return {name: dict(zip(OUTCOMES, counts, strict=True)) for name, *counts in cursor.fetchall()}


def _read_sums(*row: int | None) -> Sums:
    *sums, p50, p95 = row if len(row) > len(_COUNTS) + 2 else (*row, None, None)
    return Sums(*(value or 0 for value in sums), *(None if one is None else read_bucket(one) for one in (p50, p95)))


def _choose_steps(span: timedelta, dimension: Dimension) -> tuple[_Level, timedelta]:
    minutes, tens, hours, days = _list_levels()
    for level, step in ((minutes, _MINUTE), (minutes, 2 * _MINUTE), (tens, 10 * _MINUTE), (hours, _HOUR), (hours, 4 * _HOUR)):
        if span <= step * limits().gateway.chart_points and span <= level.kept and dimension in level.dimensions:
            return level, step
    return days, _DAY


def _choose_table(span: timedelta, dimension: Dimension) -> _Level:
    """Return the table with the fewest rows that is still fine enough: every name has one for each step."""
    minutes, tens, hours, days = _list_levels()
    for level, longest in ((minutes, _HOUR / 2), (tens, 6 * _HOUR), (hours, 2 * _DAY)):
        if span <= longest and dimension in level.dimensions:
            return level
    return days
