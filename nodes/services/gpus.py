"""GPUs of the fleet: one row each, brought in line with what nodes report of them, whichever way they report it."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from django.db import DataError, connection, transaction
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet, Value
from django.db.models.functions import Coalesce, Now

from core.hints import publish_hint
from core.limits import limits
from nodes.models import Gpu, Node, NodePresence, ProviderState, clock_of, presence_of
from nodes.reports import read_replicas, read_stored
from nodes.services.availability import judge_status
from nodes.services.telemetry import guess_gpus
from wire.bridge import CPU, RESERVED, GpuInfo, ReplicaInfo
from wire.contract import NodeStatus

logger = logging.getLogger("muster.nodes")

_LOCK = 0x6D73_6770
"""Key of the advisory lock: one sweep of GPUs at a time, however many workers run."""
_VENDORS = ("nvidia", "amd", "apple", "intel")


@dataclass(frozen=True, slots=True)
class GpuReport:
    """What changed. ``written``: GPUs that nodes reported; ``gone``: no longer named; ``forgotten``: gone for too long."""

    written: int = 0
    gone: int = 0
    forgotten: int = 0


def follow_gpus() -> GpuReport:
    """Write what nodes newly reported of their GPUs. Idempotent; two at once do the work of one.

    Every way of reporting ends in the row of a node's presence, and this reads those rows: a gateway that heard a node, a
    heartbeat, a registration and a poll of capabilities cost no statement more, and a node with sockets on several gateways
    is written once. A round of 1,000 nodes has five statements.
    """
    report, after = GpuReport(), uuid.UUID(int=0)
    while True:
        with transaction.atomic():
            if not _take_lock():
                return report
            batch = _read_news(after)
            if batch:
                report = _try_to_write(batch, report)
        if len(batch) < limits().nodes.gpu_batch:
            return report
        after = batch[-1].node_id


@dataclass(frozen=True, slots=True)
class _News:
    """What a node reported of its GPUs, and when it was heard."""

    node_id: uuid.UUID
    heard_at: datetime
    gpus: object
    gpu_name: str
    vram_total_mb: int | None
    vram_used_mb: int | None
    load_percent: float | None
    active: int
    max_concurrent: int
    context_tokens: int | None
    """The largest of its replicas."""
    replicas: str | None
    """Those that say on which GPUs they are, and the others, as JSON; None where none says it."""


_READ_NEWS = """
SELECT p.node_id, p.last_heartbeat_at, p.gpus::text, n.gpu_name, n.vram_total_mb, p.vram_used_mb, p.gpu_util_percent,
       p.active_requests, n.max_concurrent,
       (SELECT max((r ->> 'context_tokens')::bigint)
          FROM jsonb_array_elements(CASE jsonb_typeof(p.replicas) WHEN 'array' THEN p.replicas ELSE '[]' END) AS r
         WHERE jsonb_typeof(r -> 'context_tokens') = 'number'),
       CASE WHEN p.replicas @? '$[*].gpus[*]' THEN p.replicas::text END
  FROM nodes_nodepresence AS p JOIN nodes_node AS n ON n.id = p.node_id
  LEFT JOIN (SELECT node_id, max(last_seen_at) AS seen_at, bool_or(gone_at IS NULL) AS is_there
               FROM nodes_gpu GROUP BY node_id) AS g USING (node_id)
 WHERE p.node_id > %(after)s
   AND p.last_heartbeat_at IS NOT NULL
   AND (g.seen_at IS NULL OR p.last_heartbeat_at >= g.seen_at + make_interval(secs => %(refresh)s))
   AND (p.gpus <> '[]' OR n.gpu_name <> '' OR g.is_there)
 ORDER BY p.node_id
 LIMIT %(batch)s
"""
_WRITE = """
INSERT INTO nodes_gpu (id, node_id, own_id, index, vendor, model, vram_mb, compute_capability, driver_version, runtime_version,
                       "group", max_batch, max_context_tokens, load_percent, vram_used_mb, temperature_c, power_w,
                       active_requests, first_seen_at, last_seen_at)
SELECT r.*, r.seen_at
  FROM jsonb_to_recordset(%(rows)s::jsonb) AS r(
       id uuid, node_id uuid, own_id text, index integer, vendor text, model text, vram_mb integer, compute_capability text,
       driver_version text, runtime_version text, "group" text, max_batch integer, max_context_tokens integer,
       load_percent float8, vram_used_mb integer, temperature_c float8, power_w float8, active_requests integer,
       seen_at timestamptz)
    ON CONFLICT (id) DO UPDATE
   SET index = excluded.index, vendor = excluded.vendor, model = excluded.model, vram_mb = excluded.vram_mb,
       compute_capability = excluded.compute_capability, driver_version = excluded.driver_version,
       runtime_version = excluded.runtime_version, "group" = excluded."group", max_batch = excluded.max_batch,
       max_context_tokens = excluded.max_context_tokens, load_percent = excluded.load_percent,
       vram_used_mb = excluded.vram_used_mb, temperature_c = excluded.temperature_c, power_w = excluded.power_w,
       active_requests = excluded.active_requests, last_seen_at = excluded.last_seen_at, gone_at = NULL
"""
_MARK_GONE = """
UPDATE nodes_gpu SET gone_at = statement_timestamp()
 WHERE node_id = ANY(%(nodes)s) AND gone_at IS NULL AND NOT id = ANY(%(gpus)s)
"""
_FORGET = """
DELETE FROM nodes_gpu AS g
 USING (SELECT id, gone_at, row_number() OVER (PARTITION BY node_id ORDER BY gone_at DESC, id) AS place
          FROM nodes_gpu WHERE gone_at IS NOT NULL) AS gone
 WHERE g.id = gone.id
   AND (gone.place > %(most)s OR gone.gone_at < statement_timestamp() - make_interval(secs => %(kept)s))
"""


def _take_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [_LOCK])
        row = cursor.fetchone()
    return bool(row and row[0])


def _read_news(after: uuid.UUID) -> list[_News]:
    values: dict[str, str | float | uuid.UUID] = {
        "after": after,
        "refresh": limits().nodes.gpu_refresh_s,
        "batch": limits().nodes.gpu_batch,
    }
    with connection.cursor() as cursor:
        cursor.execute(_READ_NEWS, values)
        return [_News(*row) for row in cursor.fetchall()]


def _try_to_write(batch: Sequence[_News], before: GpuReport) -> GpuReport:
    try:
        with transaction.atomic():
            return _write(batch, before)
    except DataError:  # what one node says of its GPUs must not keep those of the others from being written
        if len(batch) == 1:
            logger.warning("gpus.refused node_id=%s", batch[0].node_id)
            return before
    report = before
    for news in batch:
        report = _try_to_write([news], report)
    return report


def _write(batch: Sequence[_News], before: GpuReport) -> GpuReport:
    rows = [row for news in batch for row in _list_rows(news)]
    with connection.cursor() as cursor:
        if rows:
            cursor.execute(_WRITE, {"rows": msgspec.json.encode([row for _, row in rows]).decode()})
        cursor.execute(_MARK_GONE, {"nodes": [news.node_id for news in batch], "gpus": [gpu_id for gpu_id, _ in rows]})
        gone = cursor.rowcount
        cursor.execute(_FORGET, {"most": limits().nodes.gpu_gone_per_node, "kept": limits().nodes.gpu_gone_s})
        forgotten = cursor.rowcount
    return GpuReport(before.written + len(rows), before.gone + gone, before.forgotten + forgotten)


def _list_rows(news: _News) -> Iterable[tuple[uuid.UUID, dict[str, object]]]:
    """Yield id and row of each GPU of a node, in the order in which everybody writes them; of GPUs with one name the first."""
    named: dict[str, GpuInfo] = {}
    for gpu in _read_gpus(news):
        named.setdefault(gpu.gpu_id or str(gpu.index), gpu)
    is_only = len(named) == 1
    replicas = read_replicas(msgspec.json.decode(news.replicas)) if news.replicas is not None else []
    for own_id, gpu in sorted(named.items()):
        gpu_id, share = derive_gpu_id(news.node_id, own_id), _find_share(replicas, gpu.index)
        yield (
            gpu_id,
            {
                "id": gpu_id,
                "node_id": news.node_id,
                "own_id": own_id,
                "index": gpu.index,
                "vendor": gpu.vendor or _guess_vendor(gpu.name),
                "model": gpu.name,
                "vram_mb": gpu.memory_total_mb,
                "compute_capability": gpu.compute_capability,
                "driver_version": gpu.driver_version,
                "runtime_version": gpu.runtime_version,
                "group": gpu.group,
                # A GPU of which nothing else is said has the limits of its node.
                "max_batch": _choose(gpu.max_batch, share.slots, news.max_concurrent),
                "max_context_tokens": _choose(gpu.max_context_tokens, share.context_tokens, news.context_tokens),
                "load_percent": gpu.utilization_percent,
                "vram_used_mb": gpu.memory_used_mb,
                "temperature_c": gpu.temperature_c,
                "power_w": gpu.power_w,
                # All that runs on a node with one GPU runs on that.
                "active_requests": _choose(gpu.active_requests, share.active, news.active if is_only else None),
                "seen_at": news.heard_at,
            },
        )


@dataclass(frozen=True, slots=True)
class _Share:
    """What a node says that it runs on one of its GPUs; None = it does not say it of all its replicas."""

    slots: int | None = None
    active: int | None = None
    context_tokens: int | None = None


def _find_share(replicas: Sequence[ReplicaInfo], index: int) -> _Share:
    here = [replica for replica in replicas if index in replica.gpus and replica.device != CPU]
    if not here or not all(replica.gpus or replica.device == CPU for replica in replicas):
        return _Share()
    contexts = [replica.context_tokens for replica in here if replica.context_tokens]
    slots, active = sum(replica.slots for replica in here), sum(replica.active for replica in here)
    return _Share(slots or None, active, max(contexts, default=None))


def _choose(*known: int | None) -> int | None:
    return next((value for value in known if value is not None), None)


def _read_gpus(news: _News) -> list[GpuInfo]:
    gpus = read_stored(msgspec.json.decode(str(news.gpus)), list[GpuInfo]) or []
    return gpus or guess_gpus(
        name=news.gpu_name, total_mb=news.vram_total_mb, used_mb=news.vram_used_mb, load_percent=news.load_percent
    )


def derive_gpu_id(node_id: uuid.UUID, own_id: str) -> uuid.UUID:
    """Return the fleet-wide id of a GPU (UUIDv5), from that of its node and what the node calls it."""
    return uuid.uuid5(node_id, own_id)


def _guess_vendor(name: str) -> str:
    first = name.partition(" ")[0].lower()
    return first if first in _VENDORS else ""


def list_gpus(*, node_id: uuid.UUID | None = None, with_gone: bool = False) -> QuerySet[Gpu]:
    """Return GPUs, each with its node and the time at which it was read; those of deleted providers are left out."""
    gpus = Gpu.objects.select_related("node__presence", "node__provider").exclude(node__provider__state=ProviderState.DELETED)
    gpus = gpus.annotate(database_now=Now())
    if node_id is not None:
        gpus = gpus.filter(node_id=node_id)
    return gpus if with_gone else gpus.filter(gone_at=None)


def list_models(gpu: Gpu) -> list[str]:
    """Return the models that are on a GPU: those that its node has loaded, less those that it says are on others, and those
    for whose replica on another node it is reserved.
    """
    elsewhere = list_elsewhere(gpu)
    reserved = dict.fromkeys(
        replica.model
        for replica in read_replicas(presence_of(gpu.node).replicas)
        if replica.state == RESERVED and (not replica.gpus or gpu.index in replica.gpus)
    )
    return [*(name for name in gpu.node.model_names if name not in elsewhere), *reserved]


def list_elsewhere(gpu: Gpu) -> set[str]:
    """Return the models of a GPU's node that, as the node says, are on other GPUs or on none."""
    replicas = read_replicas(presence_of(gpu.node).replicas)
    on_gpus = [replica for replica in replicas if replica.device != CPU]
    here = {replica.model for replica in on_gpus if not replica.gpus or gpu.index in replica.gpus}
    return {replica.model for replica in replicas} - here


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU for whoever asks what can run a model. Memory in MiB; ``status`` and ``models``, which are loaded, of its node.

    ``is_on_cpu``: the node runs the model on no GPU.
    """

    gpu_id: uuid.UUID
    node_id: uuid.UUID
    node_name: str
    index: int
    vendor: str
    model: str
    vram_mb: int | None
    vram_free_mb: int | None
    compute_capability: str
    status: NodeStatus
    models: tuple[str, ...]
    is_on_cpu: bool = False


def read_gpus(model: str, *, node_id: uuid.UUID | None = None, is_loaded: bool = False) -> list[GpuFacts]:
    """Return the GPUs that nodes name, or this one, for whoever asks about a model; one query. ``is_loaded``: of nodes that
    have it loaded.
    """
    gpus = list_gpus(node_id=node_id).annotate(is_on_cpu=_is_on_cpu(model))
    if is_loaded:
        gpus = gpus.filter(node__model_names__contains=[model])
    return [
        GpuFacts(
            gpu_id=gpu.pk,
            node_id=gpu.node_id,
            node_name=gpu.node.name,
            index=gpu.index,
            vendor=gpu.vendor,
            model=gpu.model,
            vram_mb=gpu.vram_mb,
            vram_free_mb=gpu.vram_free_mb,
            compute_capability=gpu.compute_capability,
            status=judge_status(gpu.node, now=clock_of(gpu)),
            models=tuple(gpu.node.model_names),
            is_on_cpu=gpu.is_on_cpu,
        )
        for gpu in gpus.defer(*_UNREAD)
    ]


def _is_on_cpu(model: str) -> ExpressionWrapper[Coalesce]:
    loaded = Q(node__presence__replicas__contains=[{"model": model, "device": CPU}])
    set_up = Q(node__presence__memory__contains={"models": [{"name": model, "device": CPU}]})
    found = Coalesce(ExpressionWrapper(loaded | set_up, output_field=BooleanField()), Value(value=False))
    return ExpressionWrapper(found, output_field=BooleanField())


_UNREAD = (
    *("node__figures", "node__presence__gpus", "node__presence__replicas", "node__presence__memory"),
    *("node__presence__available_models", "node__presence__ejections"),
)
"""What is long and says nothing of a GPU."""


def read_places(model: str) -> dict[uuid.UUID, list[tuple[int, ...]]]:
    """Return by node the numbers of the GPUs of each replica of a model; of one whose node does not say them there are none."""
    rows = NodePresence.objects.filter(node__model_names__contains=[model]).values_list("node_id", "replicas")
    return {
        node_id: [tuple(replica.gpus) for replica in read_replicas(replicas) if replica.model == model]
        for node_id, replicas in rows
    }


def write_exclusions(found: Mapping[uuid.UUID, Collection[str]]) -> int:
    """Write for which of their loaded models nodes get nothing, of all nodes; return how many changed. Idempotent."""
    changed = 0
    nodes = Node.objects.filter(Q(pk__in=list(found)) | ~Q(excluded_models=[]))
    for node_id, name, before in nodes.values_list("pk", "name", "excluded_models"):
        after = sorted(found.get(node_id, ()))
        # A row that somebody else changed meanwhile is left to the next round.
        if after != before and Node.objects.filter(pk=node_id, excluded_models=before).update(excluded_models=after):
            logger.warning("gpus.excluded node=%s models=%s", name, ",".join(after) or "-")
            publish_hint("nodes", str(node_id))
            changed += 1
    return changed


def measure_model(model: str) -> int | None:
    """Return the MiB that one replica of a model takes, the most that any node measured or estimated; None = nobody knows."""
    with connection.cursor() as cursor:
        cursor.execute(_MEASURE, {"model": model})
        row = cursor.fetchone()
    return None if row is None or row[0] is None else int(row[0])


_MEASURE = """
SELECT max(mb) FROM (
SELECT (r ->> 'memory_mb')::float8 AS mb
  FROM nodes_nodepresence, jsonb_array_elements(replicas) AS r
 WHERE jsonb_typeof(replicas) = 'array' AND r ->> 'model' = %(model)s AND jsonb_typeof(r -> 'memory_mb') = 'number'
   AND r ->> 'device' IS DISTINCT FROM 'cpu'
UNION ALL
SELECT (f ->> 'estimate_mb')::float8 / GREATEST((f ->> 'estimate_replicas')::float8, 1)
  FROM nodes_nodepresence, jsonb_array_elements(memory -> 'models') AS f
 WHERE jsonb_typeof(memory -> 'models') = 'array' AND f ->> 'name' = %(model)s AND jsonb_typeof(f -> 'estimate_mb') = 'number'
   AND f ->> 'device' IS DISTINCT FROM 'cpu'
) AS known WHERE mb > 0
"""
