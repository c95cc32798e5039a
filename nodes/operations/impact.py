"""What carrying an operation out would mean for a box now. One list of plain sentences; a box may have said anything."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache

from django.conf import settings
from django.utils.module_loading import import_string

from core.limits import limits
from governance.operations.runs import last_run
from governance.registry import Impact
from nodes.operations.targets import Target, hinders
from nodes.services.telemetry import ReplicaView
from wire.contract import NodeStatus

OK, CAUTION, DANGER = "ok", "caution", "danger"

Traffic = tuple[int, int]
"""Live requests, and the tenants that they are of."""
TrafficReader = Callable[[uuid.UUID, str | None], Traffic]


def judge_reach(target: Target) -> Iterator[Impact]:
    """Yield whether the box can be told at all, and what protects it."""
    node = target.node
    if target.status is NodeStatus.OFFLINE:
        yield Impact(DANGER, f"{node.name} is offline. It is told when it is back, if that is before the approval runs out.")
    if problem := hinders(node):
        yield Impact(DANGER, f"Nothing is sent for now: {problem}.")
    elif node.op_level != "L2":
        yield Impact(CAUTION, f"{node.name} works at level {node.op_level}: it checks a key and not the approvals themselves.")
    if node.witness_alarm:
        yield Impact(DANGER, f"{node.name} contradicts the audit log: {node.witness_alarm}.")
    if node.policy_version and node.policy_error:
        yield Impact(CAUTION, f"{node.name} refused a newer policy: {node.policy_error}.")
    if node.clock_skew_ms is not None and not problem and abs(node.clock_skew_ms) > limits().nodes.clock_skew_warning_ms:
        yield Impact(CAUTION, f"The clock of {node.name} is {abs(node.clock_skew_ms) // 1000} s off.")


def judge_live(target: Target, model: str | None, *, verb: str) -> Iterator[Impact]:
    """Yield how many requests run on the box (on ``model``; None = on any) and what would happen to them."""
    reported = sum(replica.active for replica in target.box.loaded if model is None or replica.model == model)
    if model is None and target.presence is not None:
        reported = max(reported, target.presence.active_requests)
    ours, tenants = _read_traffic(target.node.pk, model)
    live = max(reported, ours)
    what = f"on {model} " if model is not None else ""
    if not live:
        yield Impact(OK, f"No request runs {what}on {target.node.name} now.")
        return
    of = f" of {tenants} tenant{'s' if tenants != 1 else ''}" if tenants else ""
    yield Impact(CAUTION, f"{live} request{'s' if live != 1 else ''}{of} run {what}on {target.node.name} now; {verb}.")


def judge_memory(target: Target, params: Mapping[str, object], *, operation: str, signed: str) -> Iterator[Impact]:
    """Yield whether a model fits, as far as it was ever measured."""
    model, evicted = str(params.get("modelId")), params.get("evictModel")
    memory = target.box.memory
    if memory is None:
        yield Impact(CAUTION, f"{target.node.name} does not say how much memory it has.")
        return
    freed = sum(replica.memory_mb or 0 for replica in target.box.loaded if replica.model == evicted)
    free = memory.total_mb - memory.used_mb + freed
    needed = _measured(target, model) or _measured_before(operation, signed, params)
    if needed is None:
        yield Impact(CAUTION, f"Memory use of {model} unknown. {free} of {memory.total_mb} MiB are free on {target.node.name}.")
    elif needed > free:
        yield Impact(DANGER, f"{model} took {needed} MiB when it was last measured; {free} MiB are free on {target.node.name}.")
    else:
        yield Impact(OK, f"{model} took {needed} MiB when it was last measured; {free} MiB are free on {target.node.name}.")


def judge_eviction(target: Target, params: Mapping[str, object]) -> Iterator[Impact]:
    """Yield what has to go for a load."""
    evicted = params.get("evictModel")
    if not isinstance(evicted, str):
        return
    if evicted not in target.loaded:
        yield Impact(CAUTION, f"{evicted} is to be unloaded first, but it is not loaded on {target.node.name}.")
        return
    yield Impact(CAUTION, f"{evicted} is unloaded from {target.node.name} first.")
    yield from judge_live(target, evicted, verb="they may finish within the node's own limit")


def judge_history(operation: str, signed: str, params: Mapping[str, object], name: str) -> Iterator[Impact]:
    """Yield how the same went the last time."""
    run = last_run(operation, target=signed, params=params)
    if run is None or run.ended_at is None:
        yield Impact(CAUTION, f"This was never done on {name} before.")
        return
    seconds = (run.ended_at - run.dispatched_at).total_seconds() if run.dispatched_at is not None else 0.0
    took = f" after {seconds:.0f} s" if seconds >= 1 else ""
    level = OK if run.state == "succeeded" else CAUTION
    why = f" ({run.code})" if run.code else ""
    yield Impact(level, f"The last time on {name}, on {run.ended_at:%Y-%m-%d %H:%M} UTC, it {run.state}{took}{why}.")


def _measured(target: Target, model: str) -> int | None:
    sizes = [replica.memory_mb for replica in _all(target) if replica.model == model and replica.memory_mb]
    return max(sizes, default=None)


def _all(target: Target) -> tuple[ReplicaView, ...]:
    return (*target.box.loaded, *target.box.changing)


def _measured_before(operation: str, signed: str, params: Mapping[str, object]) -> int | None:
    run = last_run(operation, target=signed, params=params)
    size = run.result.get("gpuMemoryUsedMB") if run is not None else None
    return size if isinstance(size, int) and size > 0 else None


def _read_traffic(node_id: uuid.UUID, model: str | None) -> Traffic:
    path = settings.NODE_TRAFFIC
    return _load_reader(path)(node_id, model) if path else (0, 0)


@lru_cache(maxsize=4)
def _load_reader(path: str) -> TrafficReader:
    """Return the function that counts live requests. It lives above this app, hence the dotted path."""
    reader: TrafficReader = import_string(path)
    return reader
