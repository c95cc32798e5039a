"""What a node has of models and memory at this moment, ready for a page. Reads only; a node may have said anything."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

import msgspec

from core.limits import limits
from nodes.models import Node, NodePresence, ProviderState, clock_of, heartbeat_age_s, with_clock
from nodes.states import Freshness, judge_freshness
from wire.bridge import GpuInfo, MemoryInfo, ModelFacts, ReplicaInfo

_LOADED, _FAILED = "loaded", "failed"
_CHANGING = ("loading", "unloading")
_STATES = (_LOADED, *_CHANGING, _FAILED)
T = TypeVar("T")


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
class ReplicaView:
    """One copy of a model. ``percent`` of a load that is done and ``eta_s`` it still takes; None = not known.

    ``kept``: an approval keeps it loaded, also over restarts of the node. ``gave_up_ms``: when the node stopped trying to load
    such a model, as it says (Unix time in milliseconds); None = it has not.
    """

    model: str
    engine: str
    state: str
    detail: str
    active: int
    slots: int
    percent: int | None
    eta_s: float | None
    memory_mb: int | None
    weights_mb: int | None
    kv_mb: int | None
    kept: bool = False
    gave_up_ms: int | None = None


@dataclass(frozen=True, slots=True)
class FactsView:
    """What a load of one model takes and may set. ``estimate``: where ``estimate_mb`` is from; ``limits``: a line a field."""

    name: str
    backend: str
    replicas: str
    state: str
    target_inflight: int
    configured_target_inflight: int
    estimate_mb: int | None
    estimate: str
    limits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BoxView:
    """Everything the page of a box shows of its models and memory. ``age_s``: since it was heard; None = never."""

    age_s: float | None
    is_current: bool
    loaded: tuple[ReplicaView, ...]
    changing: tuple[ReplicaView, ...]
    failed: tuple[ReplicaView, ...]
    available: tuple[str, ...]
    available_beyond: int
    memory: MemoryBar | None
    facts: tuple[FactsView, ...]
    gpus: tuple[GpuInfo, ...]
    queue_depth: int | None
    avg_wait_ms: int | None

    @property
    def says_something(self) -> bool:
        """Whether the box reports models or memory at all; bridge v1 workers do not."""
        return bool(self.loaded or self.changing or self.failed or self.available or self.memory or self.gpus)


def read_box(node_id: uuid.UUID) -> BoxView | None:
    """Return the view of a box in one query; None when there is no such box."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).select_related("presence")
    node = with_clock(rows).filter(pk=node_id).first()
    return describe_box(node, now=clock_of(node)) if node is not None else None


def describe_box(node: Node, *, now: datetime) -> BoxView:
    """Return the view of a box whose presence was loaded with it."""
    presence: NodePresence = getattr(node, "presence", None) or NodePresence(node=node)
    age_s = heartbeat_age_s(presence, now=now)
    freshness = judge_freshness(age_s, limits().nodes, protocol=presence.protocol)
    replicas = [_view_replica(replica) for replica in _read_replicas(presence)]
    gpus = _convert(presence.gpus, list[GpuInfo]) or _guess_gpus(node, presence)
    available = [str(name) for name in presence.available_models or ()]
    memory = _convert(presence.memory, MemoryInfo)
    return BoxView(
        age_s=age_s,
        is_current=freshness is Freshness.FRESH,
        loaded=_of_state(replicas, _LOADED),
        changing=_of_state(replicas, *_CHANGING),
        failed=_of_state(replicas, _FAILED),
        available=tuple(available[: limits().nodes.shown_models]),
        available_beyond=max(0, len(available) - limits().nodes.shown_models),
        memory=draw_memory(memory, gpus),
        facts=tuple(_view_facts(facts) for facts in (memory.models or ())) if memory is not None else (),
        gpus=tuple(gpus),
        queue_depth=presence.queue_depth,
        avg_wait_ms=presence.avg_wait_ms,
    )


def count_replicas(presence: NodePresence | None) -> Counter[str]:
    """Return how many copies of models a box has in each state that a page shows."""
    states = (replica.state for replica in _read_replicas(presence)) if presence is not None else ()
    return Counter(state for state in states if state in _STATES)


def list_failures(presence: NodePresence | None) -> tuple[tuple[str, str], ...]:
    """Return model and reason of each replica that failed; the reason is empty when the node gives none."""
    replicas = _read_replicas(presence) if presence is not None else ()
    return tuple((replica.model, replica.detail) for replica in replicas if replica.state == _FAILED)


def describe_counts(counts: Counter[str]) -> str:
    """Return ``2 loaded, 1 loading``; empty when there is nothing to say."""
    return ", ".join(f"{counts[state]} {state}" for state in _STATES if counts[state])


def draw_memory(memory: MemoryInfo | None, gpus: Iterable[GpuInfo]) -> MemoryBar | None:
    """Return the memory bar, from the sum of the GPUs where the box gives no figure; None when nothing is known."""
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


def _read_replicas(presence: NodePresence) -> list[ReplicaInfo]:
    return _convert(presence.replicas, list[ReplicaInfo]) or []


def _guess_gpus(node: Node, presence: NodePresence) -> list[GpuInfo]:
    """Return the GPU of a box that gives no telemetry, from its registration and its heartbeats over REST."""
    if not node.gpu_name:
        return []
    return [
        GpuInfo(
            index=0,
            name=node.gpu_name,
            memory_total_mb=node.vram_total_mb,
            memory_used_mb=presence.vram_used_mb,
            utilization_percent=presence.gpu_util_percent,
        )
    ]


def _of_state(replicas: Iterable[ReplicaView], *states: str) -> tuple[ReplicaView, ...]:
    return tuple(sorted((replica for replica in replicas if replica.state in states), key=lambda replica: replica.model))


def _view_replica(replica: ReplicaInfo) -> ReplicaView:
    return ReplicaView(
        model=replica.model,
        engine=replica.engine,
        state=replica.state,
        detail=replica.detail,
        active=replica.active,
        slots=replica.slots,
        percent=int(100 * replica.progress) if replica.progress is not None else None,
        eta_s=replica.eta_s,
        memory_mb=replica.memory_mb,
        weights_mb=replica.weights_mb,
        kv_mb=replica.kv_mb,
        kept=replica.kept,
        gave_up_ms=replica.gave_up_ms,
    )


_ESTIMATES = {"observed_load_delta": "measured", "model_artifact_size": "size of the files"}


def _view_facts(facts: ModelFacts) -> FactsView:
    count = f"{facts.loaded_replicas} of {facts.replica_max}" if facts.loaded_replicas else f"up to {facts.replica_max}"
    several = f", {facts.estimate_replicas} replicas" if facts.estimate_replicas > 1 else ""
    return FactsView(
        name=facts.name,
        backend=facts.backend,
        replicas=count,
        state=facts.state,
        target_inflight=facts.target_inflight,
        configured_target_inflight=facts.configured_target_inflight,
        estimate_mb=facts.estimate_mb,
        estimate=_ESTIMATES.get(facts.estimate_source, "not known") + several,
        limits=tuple(f"{name}: {describe_limits(limits)}" for name, limits in facts.load_constraints.items()),
    )


def describe_limits(limits: Mapping[str, object]) -> str:
    """Return what a field of a load may be, in words: ``1 to 64 in steps of 256 tokens; 4096 when left out``."""
    words: list[str] = []
    if isinstance(values := limits.get("allowed_values"), list):
        words.append(", ".join("nothing" if value is None else str(value) for value in values))
    elif "minimum" in limits:
        words.append(f"{limits['minimum']} to {limits['maximum']}" if "maximum" in limits else f"from {limits['minimum']}")
        if limits.get("step") not in {None, 1}:
            words.append(f"in steps of {limits['step']}")
        words.append(str(limits.get("unit") or ""))
    else:
        words.append(str(limits.get("format") or limits.get("kind") or "any value"))
    default = limits.get("default")
    return " ".join(filter(None, words)) + (f"; {default} when left out" if default is not None else "")


def _convert(stored: object, kind: type[T]) -> T | None:
    try:
        return msgspec.convert(stored, kind)
    except msgspec.ValidationError:  # written by a release that knew more, or less
        return None
