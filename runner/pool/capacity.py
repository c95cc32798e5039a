"""Whether a load fits: what it will take, what is free, and what is promised to loads under way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runner.definitions.plan import LoadPlan, Observation, check_quantization, plan_key
from runner.engines.port import EngineStats
from runner.errors import CorruptModel, InsufficientMemory
from runner.fit import read_shape
from runner.fit.memory import Alternative, DoesNotFit, Estimate, ModelShape, ceil_mib, estimate, judge, learn_overhead
from runner.ledger.database import LedgerError
from runner.ledger.ledger import Ledger
from runner.library.files import FoundModel, other_quantizations
from runner.limits import MIB, limits
from runner.pool.models import Model, Replica
from runner.telemetry import Reading, Telemetry
from wire import clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one replica is expected to take. ``estimate`` None: a server of somebody else's, which takes nothing here."""

    shape: ModelShape | None
    estimate: Estimate | None
    expected_s: float | None

    @property
    def total_bytes(self) -> int:
        return self.estimate.total_bytes if self.estimate is not None else 0


class Capacity:
    """Predicts, decides and learns. ``budget_bytes`` caps what all models together may hold, None = the whole machine."""

    def __init__(self, telemetry: Telemetry, ledger: Ledger | None, *, budget_bytes: int | None) -> None:
        self._telemetry = telemetry
        self._ledger = ledger
        self._budget_bytes = budget_bytes
        self._shapes: dict[tuple[Path, int], ModelShape | None] = {}
        """What was read of model files, by path and time of change."""

    async def read(self) -> Reading:
        return await asyncio.to_thread(self._telemetry.sample)

    async def find_shape(self, path: Path | None) -> ModelShape | None:
        """Return what model files say of themselves; None when there are none or they cannot be read."""
        return None if path is None else await asyncio.to_thread(self._find_shape, path)

    def _find_shape(self, path: Path) -> ModelShape | None:
        try:
            key = (path, path.stat().st_mtime_ns)
            if key not in self._shapes:
                if len(self._shapes) >= limits().api.shapes:
                    self._shapes.clear()
                self._shapes[key] = read_shape(path)
            return self._shapes[key]
        except (OSError, CorruptModel):
            return None

    async def predict(self, plan: LoadPlan) -> Prediction:
        """Return what one replica of ``plan`` will take.

        Raises CorruptModel for files that are damaged, InvalidLoadRequest when they are of another quantisation than asked for.
        """
        expected_s = await self._ledger.last_load_s(plan.model_id, plan_key(plan)) if self._ledger is not None else None
        if plan.path is None:
            return Prediction(None, None, expected_s)
        shape = await asyncio.to_thread(read_shape, plan.path)
        check_quantization(plan, shape.quantization)
        seen = _largest(await self._ledger.observations(plan.backend)) if self._ledger is not None else []
        has_gpu = await self._uses_gpu(plan)
        on_gpu = plan.options.get("gguf_n_gpu_layers")
        if has_gpu and isinstance(on_gpu, int):  # the others are in the memory of the host, which is not shared out
            shape = shape.last_layers(on_gpu)
        if plan.nodes > 1:  # a pipeline: each node has a part of the layers
            shape = shape.share(plan.nodes)
        predicted = estimate(
            shape,
            context_tokens=_context_of(plan, shape),
            slots=plan.slots,
            type_k=_cache_type(plan, "gguf_type_k"),
            type_v=_cache_type(plan, "gguf_type_v"),
            overhead_bytes=learn_overhead(seen, plan.backend, has_gpu=has_gpu, gpus=len(plan.gpu_ids)),
        )
        return Prediction(shape, predicted, expected_s)

    async def _uses_gpu(self, plan: LoadPlan) -> bool:
        # llama.cpp finds a GPU by itself, the others are given theirs.
        if plan.options.get("device") == "cpu" or not (plan.gpu_ids or plan.backend == "gguf"):
            return False
        return (await self.read()).kind == "gpu"

    def decide(
        self, model: Model, plan: LoadPlan, prediction: Prediction, *, replicas: int, reading: Reading,
        models: Iterable[Model], evictee: Model | None, found: Sequence[FoundModel] = (),
    ) -> int:  # fmt: skip
        """Return the bytes to reserve for all replicas. Raises InsufficientMemory with what would fit. Does not wait."""
        if prediction.estimate is None or prediction.shape is None:
            return 0
        others = [other for other in models if other is not model]
        free = _free_bytes(reading, plan.gpu_ids, others, evictee)
        if self._budget_bytes is not None:
            staying = [other for other in others if other is not evictee]
            held = sum(max(other.memory_bytes or 0, other.reserved_bytes) for other in staying)
            free = min(free, self._budget_bytes - held)
        verdict = judge(
            prediction.estimate,
            free_bytes=max(0, free) // replicas,
            budget_bytes=None if plan.memory_budget_mb is None else plan.memory_budget_mb * MIB,
            shape=prediction.shape,
            context_tokens=_context_of(plan, prediction.shape),
            slots=plan.slots,
            type_k=_cache_type(plan, "gguf_type_k"),
            type_v=_cache_type(plan, "gguf_type_v"),
            kv_types=("q8_0", "q4_0") if plan.backend == "gguf" else (),
            alternatives=[
                Alternative(entry.model_id, entry.quantization or "another", entry.size_bytes)
                for entry in other_quantizations(model.model_id, found)
            ],
            loaded=[
                (other.model_id, other.memory_bytes or 0) for other in others if other is not evictee and other.memory_bytes
            ],
        )
        if verdict is not None:
            raise _refusal(model.model_id, plan, verdict, replicas=replicas, free_bytes=max(0, free))
        return prediction.estimate.total_bytes * replicas

    async def measure(self, replica: Replica) -> None:
        engine = replica.supervisor.engine
        if pids := engine.pids:
            replica.memory = await asyncio.to_thread(self._telemetry.measure, pids)
        stats: EngineStats = await engine.stats()
        replica.weights_bytes = stats.weights_bytes or replica.weights_bytes
        replica.kv_bytes = stats.kv_bytes or replica.kv_bytes

    async def measure_roots(self, roots: Sequence[int]) -> int:
        """Return the bytes still held by the trees of these processes; 0 when all are gone."""
        if not roots:
            return 0
        memory = await asyncio.to_thread(self._telemetry.measure, roots)
        return memory.held_bytes

    async def learn_again(self, replica: Replica) -> None:
        """Write down what a replica took in the end, where that is more than when it was loaded."""
        before = replica.learnt
        if before is None or self._ledger is None or replica.memory is None:
            return
        measured = replica.memory.held_bytes
        if measured > before.measured_bytes:
            await self._remember(replace(before, measured_bytes=measured))

    async def learn(self, replica: Replica, prediction: Prediction, *, load_s: float) -> None:
        memory, predicted = replica.memory, prediction.estimate
        if predicted is not None:
            replica.weights_bytes = replica.weights_bytes or predicted.weights_bytes
            replica.kv_bytes = replica.kv_bytes or predicted.kv_bytes
        if self._ledger is None:
            return
        measured = 0 if memory is None else memory.held_bytes
        replica.learnt = Observation(
            backend=replica.plan.backend, model_id=replica.plan.model_id, plan_key=plan_key(replica.plan),
            weights_bytes=predicted.weights_bytes if predicted else 0, kv_bytes=predicted.kv_bytes if predicted else 0,
            measured_bytes=measured, load_s=load_s, loaded_at=clock.unix_s(),
        )  # fmt: skip
        await self._remember(replica.learnt)

    async def _remember(self, observation: Observation) -> None:
        assert self._ledger is not None
        try:
            await self._ledger.add_observation(observation)
        except LedgerError as error:  # a disk that is full must not undo a load or keep a model from being unloaded
            log.warning("observation was not written down model=%s error=%s", observation.model_id, error)


def _refusal(model_id: str, plan: LoadPlan, verdict: DoesNotFit, *, replicas: int, free_bytes: int) -> InsufficientMemory:
    required, available = ceil_mib(verdict.required_bytes * replicas), verdict.free_bytes * replicas // MIB
    budget_mb = plan.memory_budget_mb
    words = f"{available} MiB are free"
    if len(plan.gpu_ids) > 1:
        words += f" on the GPUs {', '.join(map(str, plan.gpu_ids))} (of each as much as on the fullest)"
    # What it may have is the smaller of what is free and its own budget.
    if budget_mb is not None and budget_mb * replicas < free_bytes // MIB:
        each = f" for each of {replicas} replicas" if replicas > 1 else ""
        words = f"its gpuMemoryBudgetMB allows {budget_mb} MiB{each}, of {free_bytes // MIB} MiB that are free"
    return InsufficientMemory(
        " ".join([f"{model_id} needs {required} MiB and {words}.", *(suggestion.text for suggestion in verdict.suggestions)]),
        details={
            "requiredMB": required,
            "freeMB": available,
            **({} if budget_mb is None else {"gpuMemoryBudgetMB": budget_mb}),
            "suggestions": [suggestion.as_dict() for suggestion in verdict.suggestions],
        },
    )


def _free_bytes(reading: Reading, gpu_ids: Sequence[int], others: Sequence[Model], evictee: Model | None) -> int:
    """Return what one load may have: on each of its GPUs the same share, so as much as the fullest of them allows."""
    free_of_gpus = reading.free_of_gpus
    sizes = [free_mb for index in gpu_ids if (free_mb := free_of_gpus.get(index)) is not None]
    if reading.kind != "gpu" or not gpu_ids or len(sizes) < len(gpu_ids):
        # Which GPUs the engine takes is not known, or not what they have: the sum counts.
        freed = _freed_by(evictee) if evictee is not None else 0
        return (reading.free_mb or 0) * MIB - sum(other.reserved_bytes for other in others) + freed
    return len(gpu_ids) * min(
        free_mb * MIB
        - sum(_share_of(other, index, other.reserved_bytes) for other in others)
        + (_share_of(evictee, index, _freed_by(evictee)) if evictee is not None else 0)
        for index, free_mb in zip(gpu_ids, sizes, strict=True)
    )


def _share_of(model: Model, index: int, size: int) -> int:
    """Return what of a model's memory is on one GPU; of a model whose GPUs are not known it may be all."""
    gpu_ids = model.plan.gpu_ids if model.plan is not None else ()
    if not gpu_ids:
        return size
    return -(-size // len(gpu_ids)) if index in gpu_ids else 0


def _freed_by(evictee: Model) -> int:
    # Memory of a dead engine is free already.
    up = [replica.memory for replica in evictee.replicas if replica.supervisor.is_ready and replica.memory is not None]
    return sum(memory.held_bytes for memory in up)


def _largest(seen: Sequence[Observation]) -> list[Observation]:
    # Of each model and plan, for engines grow with their first requests.
    most: dict[tuple[str, str], Observation] = {}
    for each in seen:
        key = (each.model_id, each.plan_key)
        if key not in most or each.measured_bytes > most[key].measured_bytes:
            most[key] = each
    return list(most.values())


def _context_of(plan: LoadPlan, shape: ModelShape) -> int:
    # llama.cpp is given a bounded context unless told otherwise.
    own = shape.context_max or limits().engines.context_tokens
    return plan.context_tokens or (min(own, limits().engines.context_tokens) if plan.backend == "gguf" else own)


def _cache_type(plan: LoadPlan, option: str) -> str:
    return str(plan.options.get(option) or "f16")
