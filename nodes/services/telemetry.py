"""What a node has of models and memory at this moment, ready for a page. Reads only; a node may have said anything."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import msgspec

from core.limits import limits
from nodes.models import Node, NodePresence, clock_of, heartbeat_age_s, presence_of, with_clock
from nodes.reports import read_replicas, read_stored
from nodes.states import Freshness, judge_freshness
from wire.bridge import RESERVED, GpuInfo, MemoryInfo, ModelFacts, ReplicaInfo

_LOADED, _FAILED = "loaded", "failed"
_CHANGING = ("loading", "unloading")
_STATES = (_LOADED, RESERVED, *_CHANGING, _FAILED)


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """A piece of a memory bar. ``name`` is what it is called in the style sheet; ``start`` and ``share`` in percent."""

    name: str
    label: str
    mb: int
    start: float
    share: float


@dataclass(frozen=True, slots=True)
class MemoryBar:
    """Memory that models share: what of it is used for what, in MiB. The parts fill the bar."""

    kind: str
    total_mb: int
    used_mb: int
    parts: tuple[MemoryPart, ...]


@dataclass(frozen=True, slots=True)
class NodeTelemetry:
    """Everything the page of a node shows of its models and memory. ``age_s``: since it was heard; None = never.

    ``reserved``: parts of replicas that other nodes serve; ``spanning``: whatever belongs to a replica over several nodes.
    ``facts``: the members of ``ModelFacts`` by name, some of them as the page says them.
    """

    age_s: float | None
    is_current: bool
    loaded: tuple[ReplicaInfo, ...]
    changing: tuple[ReplicaInfo, ...]
    failed: tuple[ReplicaInfo, ...]
    reserved: tuple[ReplicaInfo, ...]
    spanning: tuple[ReplicaInfo, ...]
    available: tuple[str, ...]
    available_beyond: int
    memory: MemoryBar | None
    facts: tuple[dict[str, object], ...]
    gpus: tuple[GpuInfo, ...]
    queue_depth: int | None
    avg_wait_ms: int | None

    @property
    def available_count(self) -> int:
        """How many models could be loaded, those included that no page names."""
        return len(self.available) + self.available_beyond

    @property
    def says_something(self) -> bool:
        """Whether the node reports models or memory at all; bridge v1 workers do not."""
        return bool(self.loaded or self.changing or self.failed or self.reserved or self.available or self.memory or self.gpus)


def read_telemetries(node_ids: Collection[uuid.UUID]) -> dict[uuid.UUID, NodeTelemetry]:
    """Return the telemetry of each of these nodes, by id; one query."""
    rows = with_clock(Node.objects.filter(pk__in=node_ids).select_related("presence"))
    return {node.pk: describe_telemetry(node, now=clock_of(node)) for node in rows}


def describe_telemetry(node: Node, *, now: datetime) -> NodeTelemetry:
    presence = presence_of(node)
    age_s = heartbeat_age_s(presence, now=now)
    freshness = judge_freshness(age_s, limits().nodes, protocol=presence.protocol)
    replicas = read_replicas(presence.replicas)
    gpus = read_stored(presence.gpus, list[GpuInfo]) or guess_gpus(
        name=node.gpu_name,
        total_mb=node.vram_total_mb,
        used_mb=presence.vram_used_mb,
        load_percent=presence.gpu_util_percent,
    )
    available = [str(name) for name in presence.available_models or ()]
    memory = read_stored(presence.memory, MemoryInfo)
    return NodeTelemetry(
        age_s=age_s,
        is_current=freshness is Freshness.FRESH,
        loaded=_of_state(replicas, _LOADED),
        changing=_of_state(replicas, *_CHANGING),
        failed=_of_state(replicas, _FAILED),
        reserved=_of_state(replicas, RESERVED),
        spanning=tuple(replica for replica in replicas if replica.members),
        available=tuple(available[: limits().nodes.shown_models]),
        available_beyond=max(0, len(available) - limits().nodes.shown_models),
        memory=draw_memory(memory, gpus),
        facts=tuple(_view_facts(facts) for facts in (memory.models or ())) if memory is not None else (),
        gpus=tuple(gpus),
        queue_depth=presence.queue_depth,
        avg_wait_ms=presence.avg_wait_ms,
    )


def count_replicas(presence: NodePresence) -> Counter[str]:
    """Return how many copies of models a node has in each state that a page shows."""
    return Counter(replica.state for replica in read_replicas(presence.replicas) if replica.state in _STATES)


def list_failures(presence: NodePresence) -> tuple[tuple[str, str], ...]:
    """Return model and reason of each replica that failed; the reason is empty when the node gives none."""
    return tuple((replica.model, replica.detail) for replica in read_replicas(presence.replicas) if replica.state == _FAILED)


def describe_counts(counts: Counter[str]) -> str:
    """Return ``2 loaded, 1 loading``; empty when there is nothing to say."""
    return ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])


def draw_memory(memory: MemoryInfo | None, gpus: Iterable[GpuInfo]) -> MemoryBar | None:
    """Return the memory bar, from the sum of the GPUs where the node gives no figure; None when nothing is known."""
    if memory is None or memory.total_mb is None:
        totals = [(gpu.memory_total_mb, gpu.memory_used_mb or 0) for gpu in gpus if gpu.memory_total_mb is not None]
        if not totals:
            return None
        memory = MemoryInfo(total_mb=sum(total for total, _ in totals), used_mb=sum(used for _, used in totals))
    total = memory.total_mb or 0
    if total <= 0:
        return None
    used = min(memory.used_mb or 0, total)
    weights = min(memory.weights_mb or 0, used)
    kv = min(memory.kv_mb or 0, used - weights)
    named = (
        ("weights", "weights", weights),
        ("kv", "KV cache", kv),
        ("other", "other", used - weights - kv),
        ("free", "free", total - used),
    )
    return MemoryBar(memory.kind, total, used, _draw_parts(named, total))


def _draw_parts(named: Iterable[tuple[str, str, int]], total: int) -> tuple[MemoryPart, ...]:
    parts: list[MemoryPart] = []
    start = 0
    for name, label, mb in named:
        parts.append(MemoryPart(name, label, mb, round(100 * start / total, 3), round(100 * mb / total, 3)))
        start += mb
    return tuple(parts)


def guess_gpus(*, name: str, total_mb: int | None, used_mb: int | None, load_percent: float | None) -> list[GpuInfo]:
    """Return the GPU of a node that gives no telemetry: it named that when it registered, and says over REST how busy it is."""
    if not name:
        return []
    return [GpuInfo(index=0, name=name, memory_total_mb=total_mb, memory_used_mb=used_mb, utilization_percent=load_percent)]


def _of_state(replicas: Iterable[ReplicaInfo], *states: str) -> tuple[ReplicaInfo, ...]:
    return tuple(sorted((replica for replica in replicas if replica.state in states), key=lambda replica: replica.model))


_ESTIMATES = {"observed_load_delta": "measured", "model_artifact_size": "size of the files"}


def _view_facts(facts: ModelFacts) -> dict[str, object]:
    count = f"{facts.loaded_replicas} of {facts.replica_max}" if facts.loaded_replicas else f"up to {facts.replica_max}"
    several = f", {facts.estimate_replicas} replicas" if facts.estimate_replicas > 1 else ""
    return {
        **msgspec.structs.asdict(facts),
        "replicas": count,
        "estimate": _ESTIMATES.get(facts.estimate_source, "not known") + several,
        "limits": [f"{name}: {describe_limits(limits)}" for name, limits in facts.load_constraints.items()],
    }


def describe_limits(limits: Mapping[str, object]) -> str:
    """Return what a field of a load may be, in words: ``1 to 64 in steps of 256 tokens; 4096 when left out``."""
    parts: list[str] = []
    if isinstance(values := limits.get("allowed_values"), list):
        parts.append(", ".join("nothing" if value is None else str(value) for value in values))
    elif "minimum" in limits:
        parts.append(f"{limits['minimum']} to {limits['maximum']}" if "maximum" in limits else f"from {limits['minimum']}")
        if limits.get("step") not in {None, 1}:
            parts.append(f"in steps of {limits['step']}")
        parts.append(str(limits.get("unit") or ""))
    else:
        parts.append(str(limits.get("format") or limits.get("kind") or "any value"))
    default = limits.get("default")
    return " ".join(filter(None, parts)) + (f"; {default} when left out" if default is not None else "")
