"""Figures of nodes: reliability, latency and throughput of models by what became of requests, uptime by when nodes were heard.

Nothing here is said by a node. Requests that ended are folded into one row for each node and model; an hour takes 1 % of
what they weigh. Times and rates are kept as how many fell into which bucket of a logarithmic scale, whose size does not grow
(DDSketch, Masson et al. 2019, with decay); a quantile is right within half a step of it, 5 %.
"""

from __future__ import annotations

import math
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from statistics import median
from typing import Any

import msgspec
from django.db import connection, transaction
from django.db.models import Count

from core.db.base import LAZILY
from core.limits import limits
from nodes.models import Gpu, GpuFigures, Node, NodeFigures, SweepMark, read_clock
from nodes.services.gpus import list_elsewhere
from nodes.states import Figures, Windows, freshness_windows
from wire.agent import METALYARD, METALYARD_RELAY
from wire.bridge import BRIDGE_V1

_Values = dict[str, str | float | list[str] | list[uuid.UUID]]
Sketch = dict[str, float]
"""How much weight fell into which bucket, by its number; as JSON keeps it."""
_MARK, _HEARD = "requests", "heard"
_FIRST_ID, _LAST_ID = uuid.UUID(int=0), uuid.UUID(bytes=b"\xff" * 16)


@dataclass(frozen=True, slots=True)
class Observation:
    """One request that ended on a node. Times are the node's share, without the queue; None = does not apply."""

    node_id: uuid.UUID
    model: str
    ended_at: datetime
    is_ok: bool
    latency_ms: float | None = None
    ttft_ms: float | None = None
    tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """Which requests a batch may hold: those that ended after (``after``, ``after_id``) and until ``until``, by both."""

    after: datetime
    after_id: uuid.UUID
    until: datetime
    most: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What the requests of a span say, ``count`` of them in their order; ``last``: when the last one ended, and its id."""

    observations: tuple[Observation, ...]
    count: int
    last: tuple[datetime, uuid.UUID] | None


# Sketches


def add_to_sketch(sketch: Sketch, value: float, weight: float) -> None:
    """Count a value, in place."""
    policy = limits().nodes
    bucket = math.ceil(math.log(max(value, policy.figures_smallest) / policy.figures_smallest) / math.log(policy.figures_step))
    key = str(min(bucket, policy.figures_buckets))
    sketch[key] = sketch.get(key, 0.0) + weight


def read_quantile(sketch: Sketch, share: float) -> float | None:
    """Return the value below which ``share`` (0.0 to 1.0) of a sketch lies; None below ``figures_settled`` requests."""
    policy = limits().nodes
    total = sum(sketch.values())
    if total < policy.figures_settled:
        return None
    below, bucket = 0.0, 0
    for bucket in sorted(map(int, sketch)):
        below += sketch[str(bucket)]
        if below >= share * total:
            break
    return read_bucket(bucket)


def read_bucket(bucket: int) -> float:
    """Return the middle of a bucket."""
    policy = limits().nodes
    return policy.figures_smallest * math.pow(policy.figures_step, bucket) * 2 / (1 + policy.figures_step)


def _decay(sketch: Sketch, factor: float) -> Sketch:
    return {bucket: left for bucket, weight in sketch.items() if (left := weight * factor) >= limits().nodes.figures_least}


def _weigh(age: timedelta) -> float:
    return min(1.0, math.pow(limits().nodes.figures_hour, age / timedelta(hours=1)))


# Counting requests


def fold_requests(read: Callable[[Span], Seen]) -> int:
    """Count the next batch of requests that ended; return how many there were, 0 when another worker is at it.

    The rows and how far it came are written in one transaction, so each request counts once however often this runs.
    """
    policy = limits().nodes
    with transaction.atomic():
        now = read_clock()
        SweepMark.objects.get_or_create(
            name=_MARK, defaults={"until": now - timedelta(seconds=policy.figures_back_s), "last_id": _FIRST_ID}
        )
        mark = SweepMark.objects.select_for_update(skip_locked=True).filter(name=_MARK).first()
        if mark is None:
            return 0
        _commit_lazily()  # what is forgotten is counted again
        until = now - timedelta(seconds=policy.figures_lag_s)
        seen = read(Span(mark.until, mark.last_id or _FIRST_ID, until, policy.figures_batch))
        if seen.observations:
            _fold(seen.observations, now=now)
        is_all = seen.last is None or seen.count < policy.figures_batch
        reached = seen.last if seen.last is not None and not is_all else (until, _LAST_ID)
        SweepMark.objects.filter(pk=mark.pk, until__lte=reached[0]).update(until=reached[0], last_id=reached[1])
        return seen.count


def _commit_lazily() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {LAZILY}")


def _fold(observations: Sequence[Observation], *, now: datetime) -> None:
    known = set(Node.objects.filter(pk__in={one.node_id for one in observations}).values_list("pk", flat=True))
    gpus = _find_gpus(known)
    _add(NodeFigures, "node", [(one.node_id, one) for one in observations if one.node_id in known], now=now)
    of_gpus = [(gpu_id, one) for one in observations if (gpu_id := gpus.get((one.node_id, one.model))) is not None]
    _add(GpuFigures, "gpu", of_gpus, now=now)


def _add(
    kind: type[NodeFigures | GpuFigures], owner: str, found: Sequence[tuple[uuid.UUID, Observation]], *, now: datetime
) -> None:  # fmt: skip
    if not found:
        return
    wanted, column = {(owner_id, one.model) for owner_id, one in found}, f"{owner}_id"
    scope = {f"{column}__in": {owner_id for owner_id, _ in wanted}, "model__in": {model for _, model in wanted}}
    stored = kind.objects.filter(**scope).select_for_update().order_by("pk")
    rows = {(getattr(row, column), row.model): row for row in stored}
    for owner_id, model in sorted(wanted - rows.keys()):
        rows[owner_id, model] = kind(**{column: owner_id}, model=model, counted_at=now)
    for key in wanted:
        _age(rows[key], now=now)
    for owner_id, one in found:
        _count(rows[owner_id, one.model], one, weight=_weigh(now - one.ended_at))
    changed: list[Any] = [rows[key] for key in sorted(wanted)]  # Any: of one of the two kinds
    for row in changed:
        row.latency_ms, row.latency_p95_ms = read_quantile(row.latency, 0.5), read_quantile(row.latency, 0.95)
        row.ttft_ms, row.tokens_per_s = read_quantile(row.ttft, 0.5), read_quantile(row.rate, 0.5)
    kind.objects.bulk_create(
        changed, update_conflicts=True, unique_fields=[owner, "model"], update_fields=_FOLDED, batch_size=len(changed)
    )


_GPUS = """
WITH places AS (
SELECT p.node_id, r ->> 'model' AS model, CASE jsonb_typeof(r -> 'gpus') WHEN 'array' THEN r -> 'gpus' ELSE '[]' END AS gpus
  FROM nodes_nodepresence AS p,
       jsonb_array_elements(CASE jsonb_typeof(p.replicas) WHEN 'array' THEN p.replicas ELSE '[]' END) AS r
 WHERE p.node_id = ANY(%(nodes)s)
), alone AS (
SELECT node_id, model, min(gpus ->> 0) AS number FROM places GROUP BY node_id, model
HAVING bool_and(jsonb_array_length(gpus) = 1) AND count(DISTINCT gpus ->> 0) = 1
)
SELECT a.node_id, a.model, g.id
  FROM alone AS a JOIN nodes_gpu AS g ON g.node_id = a.node_id AND g.index::text = a.number AND g.gone_at IS NULL
 WHERE EXISTS (SELECT FROM nodes_gpu AS o WHERE o.node_id = g.node_id AND o.id <> g.id AND o.gone_at IS NULL)
 ORDER BY g.id
"""


def _find_gpus(node_ids: Collection[uuid.UUID]) -> dict[tuple[uuid.UUID, str], uuid.UUID]:
    """Return for which models of nodes with several GPUs one GPU alone answers, and which, as the nodes say it now."""
    with connection.cursor() as cursor:
        cursor.execute(_GPUS, {"nodes": list(node_ids)})
        return {(node_id, model): gpu_id for node_id, model, gpu_id in cursor.fetchall()}


_FOLDED = (
    *("ok", "failed", "latency", "ttft", "rate", "latency_ms", "latency_p95_ms", "ttft_ms", "tokens_per_s", "counted_at"),
)


def _age(row: NodeFigures | GpuFigures, *, now: datetime) -> None:
    factor = _weigh(now - row.counted_at)
    row.ok, row.failed, row.counted_at = row.ok * factor, row.failed * factor, now
    row.latency, row.ttft, row.rate = _decay(row.latency, factor), _decay(row.ttft, factor), _decay(row.rate, factor)


def _count(row: NodeFigures | GpuFigures, one: Observation, *, weight: float) -> None:
    if not one.is_ok:
        row.failed += weight
        return
    row.ok += weight
    for sketch, value in ((row.latency, one.latency_ms), (row.ttft, one.ttft_ms), (row.rate, one.tokens_per_s)):
        if value is not None:
            add_to_sketch(sketch, value, weight)


# What routing and pages read


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """What is known of a model on a node, or on one of its GPUs. ``requests``: how many it rests on, as they weigh now."""

    model: str
    figures: Figures
    latency_p95_ms: float | None
    requests: float
    is_of_gpu: bool = False


def read_figures(node_ids: Collection[uuid.UUID], *, now: datetime) -> dict[uuid.UUID, list[ModelFigures]]:
    """Return the figures of nodes by model, the most used first; one query."""
    rows = NodeFigures.objects.filter(node_id__in=node_ids).values_list("node_id", *_SCALARS, "latency_p95_ms")
    return _tell(rows, now=now, is_of_gpu=False)


def read_gpu_figures(gpus: Collection[Gpu], *, now: datetime) -> dict[uuid.UUID, list[ModelFigures]]:
    """Return the figures of GPUs by model, the most used first; three queries.

    What no other GPU of the node had a share in is the GPU's. The rest is the node's, less the models that are on others.
    """
    node_ids = {gpu.node_id for gpu in gpus}
    of_nodes = read_figures(node_ids, now=now)
    rows = GpuFigures.objects.filter(gpu_id__in=[gpu.pk for gpu in gpus]).values_list("gpu_id", *_SCALARS, "latency_p95_ms")
    of_gpus = _tell(rows, now=now, is_of_gpu=True)
    there = Gpu.objects.filter(node_id__in=node_ids, gone_at=None).values_list("node_id")
    lonely = {node_id for node_id, count in there.annotate(count=Count("pk")) if count == 1}
    found = {}
    for gpu in gpus:
        own, elsewhere = of_gpus.get(gpu.pk, []), list_elsewhere(gpu)
        known = {one.model for one in own} | elsewhere
        is_only = gpu.node_id in lonely and gpu.gone_at is None
        of_node = [one for one in of_nodes.get(gpu.node_id, []) if one.model not in known]
        found[gpu.pk] = own + [replace(one, is_of_gpu=is_only) for one in of_node]
    return found


def _tell(rows: Iterable[tuple[Any, ...]], *, now: datetime, is_of_gpu: bool) -> dict[uuid.UUID, list[ModelFigures]]:
    found: dict[uuid.UUID, list[ModelFigures]] = defaultdict(list)
    for row in rows:
        own = _Own(*row[:-1])
        late, count = _choose(row[-1], None), round(own.weigh(now), 2)
        found[own.owner_id].append(ModelFigures(own.model, own.tell({}, now=now), late, count, is_of_gpu))
    return {owner_id: sorted(each, key=lambda one: -one.requests) for owner_id, each in found.items()}


_SCALARS = ("model", "ok", "failed", "counted_at", "latency_ms", "ttft_ms", "tokens_per_s")


@dataclass(frozen=True, slots=True)
class _Own:
    """What the requests of one node, or of one GPU, say of one model."""

    owner_id: uuid.UUID
    model: str
    ok: float
    failed: float
    counted_at: datetime
    latency_ms: float | None
    ttft_ms: float | None
    tokens_per_s: float | None

    def weigh(self, now: datetime) -> float:
        return (self.ok + self.failed) * _weigh(now - self.counted_at)

    def tell(self, fleet: Mapping[str, Figures], *, now: datetime) -> Figures:
        """Return the figures, with those of the fleet in place of what is not known and as what reliability begins with."""
        prior = fleet.get(self.model, Figures())
        factor = _weigh(now - self.counted_at)
        ok, failed = self.ok * factor, self.failed * factor
        # With a prior of one half this is (ok + 1) / (ok + failed + 2).
        return Figures(
            reliability=round((ok + 2 * prior.reliability) / (ok + failed + 2), 3),
            latency_ms=_choose(self.latency_ms, prior.latency_ms),
            ttft_ms=_choose(self.ttft_ms, prior.ttft_ms),
            tokens_per_s=_choose(self.tokens_per_s, prior.tokens_per_s),
        )


def _choose(own: float | None, other: float | None) -> float | None:
    value = other if own is None else own
    return None if value is None else float(f"{value:.3g}")


def publish_figures() -> int:
    """Bring what routing reads in line with what was counted, and return how many nodes changed. Idempotent.

    A node that has not answered for a model yet begins with the median of those that have.
    """
    with transaction.atomic():
        now = read_clock()
        rows = [_Own(*row) for row in NodeFigures.objects.values_list("node_id", *_SCALARS)]
        fleet = _find_medians(rows, now=now)
        own = {(row.owner_id, row.model): row.tell(fleet, now=now) for row in rows}
        changes = []
        for node_id, models, before in Node.objects.values_list("pk", "model_names", "figures"):
            told = {model: found for model in models if (found := own.get((node_id, model), fleet.get(model))) is not None}
            text = msgspec.to_builtins(told)
            if text != before:
                changes.append({"id": node_id, "figures": text})
        if not changes:
            return 0
        with connection.cursor() as cursor:
            cursor.execute(_PUBLISH, [msgspec.json.encode(changes).decode()])
            return int(cursor.rowcount)


# A row that somebody else writes at the moment is left to the next round: nobody ever waits here, so there is no deadlock.
_PUBLISH = """
WITH said AS (SELECT * FROM jsonb_to_recordset(%s::jsonb) AS r(id uuid, figures jsonb)),
     free AS MATERIALIZED (SELECT n.id FROM nodes_node AS n JOIN said USING (id) FOR NO KEY UPDATE OF n SKIP LOCKED)
UPDATE nodes_node AS n SET figures = said.figures FROM said JOIN free USING (id) WHERE n.id = said.id
"""


def _find_medians(rows: Iterable[_Own], *, now: datetime) -> dict[str, Figures]:
    by_model: dict[str, list[Figures]] = defaultdict(list)
    for row in rows:
        if row.weigh(now) >= limits().nodes.figures_settled:
            by_model[row.model].append(row.tell({}, now=now))
    return {
        model: Figures(
            reliability=round(median(one.reliability for one in each), 3),
            latency_ms=_middle(one.latency_ms for one in each),
            ttft_ms=_middle(one.ttft_ms for one in each),
            tokens_per_s=_middle(one.tokens_per_s for one in each),
        )
        for model, each in by_model.items()
    }


def _middle(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{median(known):.3g}") if known else None


def forget_figures() -> int:
    """Delete the figures of which nothing is left, and return how many."""
    with connection.cursor() as cursor:
        cursor.execute(_FORGET, {"least": limits().nodes.figures_least, "hour": limits().nodes.figures_hour})
        return int(cursor.rowcount)


_IS_LITTLE = """(ok + failed) * power(%(hour)s::float8, extract(epoch FROM statement_timestamp() - counted_at)::float8 / 3600)
       < %(least)s"""
_FORGET = f"""
WITH of_gpus AS (DELETE FROM nodes_gpufigures WHERE {_IS_LITTLE})
DELETE FROM nodes_nodefigures WHERE {_IS_LITTLE}
"""  # noqa: S608  # constants


# Uptime


def follow_uptime() -> int:
    """Note which nodes were heard since the last time; return how many begin a new time online.

    Idempotent. A pause of the sweep itself is no pause of a node: so much more silence is forgiven.
    """
    policy = limits().nodes
    with transaction.atomic():
        now = read_clock()
        SweepMark.objects.get_or_create(name=_HEARD, defaults={"until": now})
        mark = SweepMark.objects.select_for_update(skip_locked=True).filter(name=_HEARD).first()
        if mark is None:
            return 0
        values: _Values = {"stood_still": max(0.0, (now - mark.until).total_seconds()), "kept": policy.uptime_s}
        with connection.cursor() as cursor:
            cursor.execute(_FOLLOW, values | _list_windows(lambda windows: windows.offline_s))
            begun = int(cursor.rowcount)
        if not begun:
            _commit_lazily()
        SweepMark.objects.filter(pk=mark.pk).update(until=now)
        return begun


def _list_windows(choose: Callable[[Windows], float]) -> _Values:
    """Return the values of ``_WINDOW``: one of the windows of each protocol."""
    windows = {name: choose(freshness_windows(limits().nodes, protocol=name)) for name in ("", BRIDGE_V1, METALYARD)}
    return {
        "bridge": BRIDGE_V1,
        "agents": [METALYARD, METALYARD_RELAY],
        "window": windows[""],
        "bridge_window": windows[BRIDGE_V1],
        "agent_window": windows[METALYARD],
    }


_WINDOW = """CASE WHEN p.protocol = %(bridge)s THEN %(bridge_window)s
                   WHEN p.protocol = ANY(%(agents)s) THEN %(agent_window)s ELSE %(window)s END"""
_FOLLOW = f"""
WITH heard AS (
SELECT node_id, last_heartbeat_at AS heard_at, make_interval(secs => %(stood_still)s + {_WINDOW}) AS longest
  FROM nodes_nodepresence AS p
 WHERE last_heartbeat_at > statement_timestamp() - make_interval(secs => %(kept)s)
), newest AS (
SELECT DISTINCT ON (node_id) id, node_id, ended_at FROM nodes_nodeonline ORDER BY node_id, began_at DESC
), grown AS (
UPDATE nodes_nodeonline AS o SET ended_at = h.heard_at
  FROM newest AS n JOIN heard AS h USING (node_id)
 WHERE o.id = n.id AND h.heard_at > n.ended_at AND h.heard_at - n.ended_at <= h.longest
), past AS (
DELETE FROM nodes_nodeonline WHERE ended_at < statement_timestamp() - make_interval(secs => %(kept)s)
)
INSERT INTO nodes_nodeonline (node_id, began_at, ended_at)
SELECT h.node_id, h.heard_at, h.heard_at FROM heard AS h LEFT JOIN newest AS n USING (node_id)
 WHERE n.id IS NULL OR h.heard_at - n.ended_at > h.longest
"""  # noqa: S608  # constants
_UPTIME = f"""
SELECT n.id, COALESCE(sum(extract(epoch FROM
             LEAST(o.ended_at + make_interval(secs => {_WINDOW}), statement_timestamp())
             - GREATEST(o.began_at, statement_timestamp() - make_interval(secs => %(kept)s)))
         ) FILTER (WHERE o.ended_at > statement_timestamp() - make_interval(secs => %(kept)s)), 0)::float8,
       extract(epoch FROM LEAST(make_interval(secs => %(kept)s), statement_timestamp() - n.created_at))::float8
  FROM nodes_node AS n LEFT JOIN nodes_nodepresence AS p ON p.node_id = n.id
  LEFT JOIN nodes_nodeonline AS o ON o.node_id = n.id
 WHERE n.id = ANY(%(nodes)s)
 GROUP BY n.id
"""  # noqa: S608  # constants


def read_uptimes(node_ids: Collection[uuid.UUID]) -> dict[uuid.UUID, float]:
    """Return the share, 0.0 to 1.0, of the last 24 hours (or of its life, if that is shorter) in which each node was heard."""
    # After its last sign of life a node counts as online for as long as it would be given work.
    values: _Values = {"nodes": list(node_ids), "kept": limits().nodes.uptime_s}
    with connection.cursor() as cursor:
        cursor.execute(_UPTIME, values | _list_windows(lambda windows: windows.stale_s))
        return {node_id: min(1.0, online_s / max(known_s, 1.0)) for node_id, online_s, known_s in cursor.fetchall()}
