"""What the node can do now, and whether it is well."""

from __future__ import annotations

import asyncio
import re

import msgspec

from runner import AGENT_VERSION
from runner.api.schemas import (
    CapabilitiesAnswer,
    Flags,
    Gpu,
    HealthAnswer,
    KeptModel,
    LoadedModel,
    LoadingModel,
    Models,
    OperationsState,
    Queue,
    Resources,
    UnusableModel,
)
from runner.engines.port import Capabilities, EngineStats, FlushResult
from runner.errors import Unavailable
from runner.fit.memory import ModelShape
from runner.limits import MIB, limits
from runner.parts import Parts, Phase
from runner.pool.models import Model, ModelState, Replica, sum_known
from runner.queue import WaitBudget
from runner.telemetry import Reading
from wire import clock
from wire.bridge import GpuInfo

_Stats = dict[Replica, EngineStats]


class CapabilityReport:
    """Builds the answer and keeps it for 5 s."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._is_multi_tenant = parts.serving.rates.is_multi_tenant
        self._lock = asyncio.Lock()
        self._built_at = float("-inf")
        self._states: list[tuple[str, ModelState]] = []
        self._body = b""

    async def read(self) -> bytes:
        """Return the answer as JSON. Raises Unavailable while the node starts or stops."""
        if self._parts.phase is not Phase.SERVING:
            raise Unavailable(f"The node is {self._parts.phase.value}.", retry_after_s=2)
        async with self._lock:
            states = [(model.model_id, model.state) for model in self._parts.pool.registry.models]
            if clock.monotonic() - self._built_at >= limits().api.capabilities_s or states != self._states:
                self._body = msgspec.json.encode(await self.build())
                self._built_at, self._states = clock.monotonic(), states
            return self._body

    async def build(self) -> CapabilitiesAnswer:
        parts = self._parts
        await parts.discover()
        reading = await parts.look()
        models = parts.pool.registry.models
        ready = [model for model in models if model.is_ready]
        replicas = [replica for model in ready for replica in model.replicas]
        stats = dict(zip(replicas, await asyncio.gather(*(item.supervisor.engine.stats() for item in replicas)), strict=True))
        budget = parts.budget
        return CapabilitiesAnswer(
            runner_type=_join_engines(replicas) or f"muster-{AGENT_VERSION}",
            runner_version=f"muster-{AGENT_VERSION}",
            runner_id=parts.governance.runner_id,
            models=Models(
                loaded=[await self._describe(model, stats) for model in ready],
                loading=[_describe_loading(model) for model in models if model.state is ModelState.LOADING],
                available=parts.pool.registry.available_ids(),
                failed=[
                    UnusableModel(id=model.model_id, reason=model.last_error or "")
                    for model in models
                    if model.state is ModelState.FAILED
                ],
                unusable=[UnusableModel(id=name, reason=why) for name, why in parts.pool.registry.problems.items()],
                kept=[KeptModel(id=name, problem=problem) for name, problem in parts.desired.models.items()],
            ),
            resources=_describe_resources(reading, replicas, stats),
            queue=Queue(
                depth=budget.depth, max_depth=budget.max_depth, avg_wait_ms=round(budget.avg_wait_ms),
                p95_wait_ms=round(budget.p95_wait_ms),
            ),
            capabilities=self._join([model.capabilities for model in ready]),
            operations=msgspec.convert(parts.governance.standing, OperationsState, from_attributes=True),
            health="unhealthy" if find_ailments(parts, reading) else "healthy",
        )  # fmt: skip

    async def _describe(self, model: Model, stats: _Stats) -> LoadedModel:
        first = model.replicas[0]
        shape = await self._parts.pool.capacity.find_shape(first.plan.path)
        return LoadedModel(
            id=model.model_id,
            quantization=first.plan.quantization or _compute_type(first) or (shape.quantization if shape is not None else None),
            context_length=context_of(first, stats.get(first), shape),
            loaded_at=None if model.loaded_at is None else int(model.loaded_at),
            gpu_memory_mb=_mib(model.memory_bytes),
            engine=_name_engine(first),
            replicas=len(model.replicas),
            endpoints=list(model.capabilities.endpoints),
            weights_mb=_mib(sum_known(replica.weights_bytes for replica in model.replicas)),
            kv_mb=_mib(sum_known(replica.kv_bytes for replica in model.replicas)),
            predicted_mb=_mib(model.predicted_bytes),
            capabilities=self._join([model.capabilities]),
            cache_flush=_describe_flush(first),
            tenant_isolation=_describe_support(model.capabilities.isolates_tenants),
            engine_priority=_describe_support(model.capabilities.engine_priority),
        )

    def _join(self, each: list[Capabilities]) -> Flags:
        # What any of them can do; a node that has nothing loaded still streams and tells tenants apart.
        said = {name: any(getattr(one, name) for one in each) for name in Flags.__struct_fields__ if name != "multi_tenant"}
        return Flags(**{**said, "streaming": said["streaming"] or not each, "multi_tenant": self._is_multi_tenant})


def _name_engine(replica: Replica) -> str:
    version = replica.capabilities.version  # "" = not known; servers of somebody else's word it as they like
    kept = "".join(letter if letter.isascii() and letter.isprintable() and letter != " " else "-" for letter in version)
    return "-".join(filter(None, (replica.supervisor.engine.name, kept[: limits().api.version_chars])))


def _join_engines(replicas: list[Replica]) -> str:
    return "+".join(sorted({_name_engine(replica) for replica in replicas}))


def _describe_flush(replica: Replica) -> FlushResult:
    can, pids = replica.capabilities, replica.supervisor.engine.pids
    if can.keeps_nothing:
        return FlushResult.NOTHING_KEPT
    if can.flushes_cache:
        return FlushResult.FLUSHED
    # What is ours and cannot be asked to forget is loaded anew; of somebody else's server that cannot be had.
    return FlushResult.RELOADED if pids and can.prefix_caching else FlushResult.NOT_SUPPORTED


def _describe_support(is_there: bool) -> str:  # one flag said in words
    return "supported" if is_there else "not-supported"


def context_of(replica: Replica, stats: EngineStats | None, shape: ModelShape | None) -> int | None:
    """Return the tokens that one request may have: as the engine says or as planned, else as llama.cpp divided its cache,
    else the model's own.
    """
    plan = replica.plan
    if replica.context_tokens is not None:
        return replica.context_tokens
    if plan.backend == "gguf" and stats is not None and stats.kv_total_tokens:
        return stats.kv_total_tokens // max(1, plan.slots)
    return shape.context_max if shape is not None else None


def _describe_loading(model: Model) -> LoadingModel:
    load = model.load
    eta = load.eta_s() if load is not None else None
    return LoadingModel(
        id=model.model_id,
        progress=0.0 if load is None or load.fraction is None else round(load.fraction, 3),
        eta=None if eta is None else round(eta),
        stage=load.stage if load is not None else "",
    )


def _describe_resources(reading: Reading, replicas: list[Replica], stats: _Stats) -> Resources:
    busy = [gpu.utilization_percent for gpu in reading.gpus if gpu.utilization_percent is not None]
    told = [one for one in stats.values() if one.kv_total_tokens and one.kv_used_tokens is not None]
    total = sum(one.kv_total_tokens or 0 for one in told)
    return Resources(
        device=reading.kind,
        gpu_ids=[gpu.index for gpu in reading.gpus],
        gpu_memory_total_mb=reading.total_mb,
        gpu_memory_used_mb=reading.used_mb,
        gpu_memory_free_mb=reading.free_mb,
        gpu_utilization=round(sum(busy) / len(busy) / 100, 4) if busy else None,
        kv_cache_size_mb=_mib(sum_known(replica.kv_bytes for replica in replicas)) or 0,
        kv_cache_utilization=round(sum(one.kv_used_tokens or 0 for one in told) / total, 4) if total else None,
        gpus=[_describe_gpu(gpu) for gpu in reading.gpus],
    )


def _describe_gpu(gpu: GpuInfo) -> Gpu:
    percent = gpu.utilization_percent
    said = {name: getattr(gpu, name) for name in Gpu.__struct_fields__ if name != "utilization"}
    return Gpu(**said, utilization=None if percent is None else round(percent / 100, 4))


def _compute_type(replica: Replica) -> str | None:
    found = replica.plan.options.get("compute_type")
    return found if isinstance(found, str) else None


def _mib(size: int | None) -> int | None:
    return None if size is None else round(size / MIB)


_OUT_OF_MEMORY = re.compile(
    r"out of memory|outofmemory|\boom\b|cannot allocate memory|failed to allocate|unable to allocate|bad_alloc", re.IGNORECASE
)
_UNDER_WAY = frozenset({ModelState.LOADED, ModelState.LOADING, ModelState.UNLOADING})


def find_ailments(parts: Parts, reading: Reading | None) -> list[str]:
    """Return why the node should get no work, nothing when it is well."""
    match parts.phase:
        case Phase.STARTING:
            return ["the node is starting"]
        case Phase.STOPPING:
            return ["the node is stopping"]
        case Phase.SERVING:
            models = parts.pool.registry.models
            return [*_memory_ailments(models, reading), *_load_ailments(models), *_queue_ailments(parts.budget)]


async def read_health(parts: Parts) -> tuple[int, HealthAnswer]:
    ailments = find_ailments(parts, await parts.look())
    ready = sum(model.is_ready for model in parts.pool.registry.models)
    answer = HealthAnswer(
        status="unhealthy" if ailments else "healthy",
        uptime=max(0, int(clock.unix_s() - parts.started_at)),
        models_loaded=ready,
        queue_depth=parts.budget.depth,
        reasons=ailments,
    )
    return (503 if ailments else 200), answer


def _memory_ailments(models: list[Model], reading: Reading | None) -> list[str]:
    found = [
        f"out of memory: {model.model_id} says {model.last_error}"
        for model in models
        if model.state is ModelState.FAILED and model.last_error and _OUT_OF_MEMORY.search(model.last_error)
    ]
    if reading is not None and reading.total_mb and reading.free_mb < limits().api.free_share * reading.total_mb:
        found.append(f"out of memory: {reading.free_mb} of {reading.total_mb} MiB of the {reading.kind} are free")
    return found


def _load_ailments(models: list[Model]) -> list[str]:
    failed = [model for model in models if model.state is ModelState.FAILED]
    if not failed or any(model.state in _UNDER_WAY for model in models):
        return []
    return [f"no model serves, {failed[0].model_id} failed: {failed[0].last_error or 'no reason was given'}"]


def _queue_ailments(budget: WaitBudget) -> list[str]:
    if budget.max_depth > 0 and budget.depth >= limits().api.saturated_share * budget.max_depth:
        return [f"the queue is saturated: {budget.depth} of {budget.max_depth} requests wait"]
    return []
