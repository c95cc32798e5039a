"""History of GPUs and of the fleet for charts: samples of two hours, means of a minute for two days, of ten for 30 days."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import accumulate, pairwise

from django.db import connection, transaction

from core.db.base import LAZILY
from core.limits import limits
from nodes.models import GpuMinute, GpuMoment, GpuSample, GpuTenMinutes, read_clock

FLEET = uuid.UUID(int=0)
"""In the place of a GPU: all that were heard together. Load is their mean, temperature the highest, the rest their sum."""


class Span(StrEnum):
    """How far back a history goes."""

    HOURS = "2h"
    DAYS = "2d"
    MONTH = "30d"


@dataclass(frozen=True, slots=True)
class _Level:
    """A table of the history: what a row of it stands for, and how long it is kept."""

    model: type[GpuMoment]
    step_s: float
    kept_s: float


def _levels() -> dict[Span, _Level]:
    policy = limits().nodes
    return {
        Span.HOURS: _Level(GpuSample, policy.history_sample_s, policy.history_samples_s),
        Span.DAYS: _Level(GpuMinute, timedelta(minutes=1).total_seconds(), policy.history_minutes_s),
        Span.MONTH: _Level(GpuTenMinutes, timedelta(minutes=10).total_seconds(), policy.history_tens_s),
    }


@dataclass(frozen=True, slots=True)
class Moment:
    """A row of the history, in the units of the GPU's own."""

    at: datetime
    load_percent: float | None
    vram_used_mb: float | None
    temperature_c: float | None
    power_w: float | None
    active_requests: float | None
    weights_mb: float | None
    kv_mb: float | None


@dataclass(frozen=True, slots=True)
class History:
    span: Span
    step_s: float
    moments: tuple[Moment, ...]


# Whoever moves the mark writes the samples, so there is one of each GPU for each step, in one statement.
_SAMPLE = f"""
WITH turn AS (
INSERT INTO nodes_sweepmark AS m (name, until)
SELECT 'samples', date_bin(make_interval(secs => %(step)s), statement_timestamp(), '2000-01-01 00:00:00+00') FROM {LAZILY}
    ON CONFLICT (name) DO UPDATE SET until = excluded.until WHERE m.until < excluded.until
RETURNING until
), heard AS MATERIALIZED (
SELECT g.id, turn.until, g.load_percent, g.vram_used_mb, g.temperature_c, g.power_w, g.active_requests, held.weights, held.kv
  FROM turn, nodes_gpu AS g LEFT JOIN nodes_nodepresence AS p USING (node_id)
 CROSS JOIN LATERAL (
       -- A replica over several GPUs is taken to hold as much on each; one that names none is on the node's only GPU.
       SELECT sum((r ->> 'weights_mb')::float8 / each_of.n) AS weights, sum((r ->> 'kv_mb')::float8 / each_of.n) AS kv
         FROM jsonb_array_elements(CASE jsonb_typeof(p.replicas) WHEN 'array' THEN p.replicas ELSE '[]' END) AS r
        CROSS JOIN LATERAL (SELECT GREATEST(jsonb_array_length(
              CASE jsonb_typeof(r -> 'gpus') WHEN 'array' THEN r -> 'gpus' ELSE '[]' END), 1)) AS each_of (n)
        WHERE jsonb_typeof(r -> 'weights_mb') = 'number' AND COALESCE(jsonb_typeof(r -> 'kv_mb'), 'number') = 'number'
          AND r ->> 'device' IS DISTINCT FROM 'cpu'
          AND (r -> 'gpus' @> to_jsonb(g.index) OR (NOT r ? 'gpus' AND NOT EXISTS (
               SELECT FROM nodes_gpu AS o WHERE o.node_id = g.node_id AND o.id <> g.id AND o.gone_at IS NULL)))) AS held
 WHERE g.gone_at IS NULL AND g.last_seen_at > statement_timestamp() - make_interval(secs => %(heard)s)
), fleet AS (
INSERT INTO nodes_gpusample (gpu_id, at, load_percent, vram_used_mb, temperature_c, power_w, active_requests, weights_mb, kv_mb)
SELECT %(fleet)s, min(until), avg(load_percent), sum(vram_used_mb), max(temperature_c), sum(power_w), sum(active_requests),
       sum(weights), sum(kv)
  FROM heard HAVING count(*) > 0
    ON CONFLICT DO NOTHING
)
INSERT INTO nodes_gpusample (gpu_id, at, load_percent, vram_used_mb, temperature_c, power_w, active_requests, weights_mb, kv_mb)
SELECT * FROM heard
    ON CONFLICT DO NOTHING
"""  # noqa: S608  # a constant
_ROLL_UP = """
WITH turn AS (
SELECT COALESCE((SELECT until FROM nodes_sweepmark WHERE name = %(name)s FOR UPDATE), '-infinity') AS begins_at,
       date_bin(make_interval(secs => %(step)s), statement_timestamp(), '2000-01-01 00:00:00+00') AS ends_at
), summed AS (
INSERT INTO {table} (gpu_id, at, load_percent, vram_used_mb, temperature_c, power_w, active_requests, weights_mb, kv_mb)
SELECT gpu_id, date_bin(make_interval(secs => %(step)s), at, '2000-01-01 00:00:00+00') AS starts_at,
       avg(load_percent), avg(vram_used_mb), avg(temperature_c), avg(power_w), avg(active_requests), avg(weights_mb), avg(kv_mb)
  FROM {source}, turn
 WHERE at >= turn.begins_at AND at < turn.ends_at
 GROUP BY gpu_id, starts_at
    ON CONFLICT DO NOTHING
)
INSERT INTO nodes_sweepmark AS m (name, until) SELECT %(name)s, ends_at FROM turn
    ON CONFLICT (name) DO UPDATE SET until = GREATEST(m.until, excluded.until)
"""


def sample_gpus() -> int:
    """Write a sample of each GPU that is heard, once in ``history_sample_s``; return how many. Idempotent."""
    values: dict[str, float | uuid.UUID] = {
        "step": limits().nodes.history_sample_s,
        "heard": limits().nodes.history_heard_s,
        "fleet": FLEET,
    }
    with connection.cursor() as cursor:
        cursor.execute(_SAMPLE, values)
        return int(cursor.rowcount)


def roll_up_history() -> int:
    """Write the means of what is complete, and delete what is too old; return how many rows went. Idempotent."""
    levels = list(_levels().values())
    for source, level in pairwise(levels):
        tables = {"table": level.model._meta.db_table, "source": source.model._meta.db_table}  # noqa: SLF001  # Django documents it
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(_ROLL_UP.format(**tables), {"name": tables["table"][:20], "step": level.step_s})
    now = read_clock()
    return sum(
        level.model._default_manager.filter(at__lt=now - timedelta(seconds=level.kept_s)).delete()[0]  # noqa: SLF001  # as above
        for level in levels
    )


_MEMORY = """
SELECT coalesce(sum(vram_used_mb), 0), coalesce(sum(vram_mb), 0) FROM nodes_gpu
 WHERE gone_at IS NULL AND vram_mb IS NOT NULL AND last_seen_at > statement_timestamp() - make_interval(secs => %(heard)s)
"""
_FLEET = """
SELECT CASE WHEN at >= %(begins_at)s THEN floor(extract(epoch FROM at - %(begins_at)s) / %(step)s)::int ELSE -1 END AS place,
       avg(vram_used_mb)
  FROM {table} WHERE gpu_id = %(fleet)s AND at >= %(before)s GROUP BY place
"""
# When a node was heard: from the first moment to the last one, of those that stand between the steps.
_ONLINE = """
SELECT GREATEST(0, ceil(extract(epoch FROM began_at - %(begins_at)s) / %(step)s))::int AS first,
       floor(extract(epoch FROM ended_at - %(begins_at)s) / %(step)s)::int AS last, count(*)
  FROM nodes_nodeonline WHERE ended_at >= %(begins_at)s GROUP BY 1, 2
"""


@dataclass(frozen=True, slots=True)
class FleetHistory:
    """How all GPUs and nodes did over time, one value for each step; None = not known.

    ``used_before``: the mean of ``used_mb`` in the time as long before. ``online``: nodes that were heard as each step began.
    """

    used_mb: tuple[float | None, ...]
    used_before: float | None
    online: tuple[int, ...]


def read_fleet_history(begins_at: datetime, *, step: timedelta, points: int) -> FleetHistory:
    """Return how the fleet did in ``points`` steps; two queries."""
    before = begins_at - points * step
    levels, span_s = list(_levels().values()), 2 * points * step.total_seconds()
    level = next((level for level in levels if span_s <= level.kept_s), levels[-1])
    values: dict[str, float | uuid.UUID | datetime] = {
        "begins_at": begins_at,
        "before": before,
        "step": step.total_seconds(),
        "fleet": FLEET,
    }
    with connection.cursor() as cursor:
        cursor.execute(_FLEET.format(table=level.model._meta.db_table), values)  # noqa: SLF001  # Django documents it
        used = dict(cursor.fetchall())
        cursor.execute(_ONLINE, values)
        changes = [0] * (points + 1)
        for first, last, nodes in cursor.fetchall():
            if first <= min(last, points - 1):
                changes[first] += nodes
                changes[min(last, points - 1) + 1] -= nodes
    return FleetHistory(tuple(used.get(place) for place in range(points)), used.get(-1), tuple(accumulate(changes[:points])))


def read_memory() -> tuple[int, int]:
    """Return how much GPU memory is in use and how much there is, in MiB, of all GPUs that are heard; one query."""
    values = {"heard": limits().nodes.history_heard_s}
    with connection.cursor() as cursor:
        cursor.execute(_MEMORY, values)
        used, total = cursor.fetchone()
    return int(used), int(total)


def read_history(gpu_id: uuid.UUID, span: Span) -> History:
    """Return how a GPU did, oldest first; one query."""
    level = _levels()[span]
    since = read_clock() - timedelta(seconds=level.kept_s)
    rows = level.model._default_manager.filter(gpu_id=gpu_id, at__gte=since).order_by("at")  # noqa: SLF001  # as above
    columns = Moment.__slots__
    return History(span, level.step_s, tuple(Moment(*row) for row in rows.values_list(*columns)))
