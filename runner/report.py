"""What a node says of its models: to its gateways, and on its own port."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.definitions.fields import TRANSLATABLE
from runner.definitions.plan import LoadPlan, load_constraints
from runner.engines.port import Capabilities
from runner.fit.memory import ceil_mib
from runner.library.files import FoundModel
from runner.limits import MIB, limits
from runner.parts import Parts
from runner.pool.loads import count_replicas, is_elsewhere
from runner.pool.models import Model, ModelState, Replica, sum_known
from runner.serving.request import INFERENCE_PATHS
from runner.telemetry import Reading
from wire.bridge import CPU, RESERVED, MemoryInfo, ModelFacts, ReplicaInfo

_CPU_UNLESS_TOLD = frozenset({"ct2", "whisper"})
WAITING = "the node is about to load it again"


def list_replicas(
    models: Iterable[Model], desired: Mapping[str, str] | None = None, gave_up_ms: Mapping[str, int] | None = None
) -> list[ReplicaInfo]:
    """Return every replica of every model that is or should be loaded; one without replicas yet counts as one.

    ``desired``: the models that approvals keep loaded, each with why it could not be loaded again, "" = nothing is wrong. One
    that the node does not even know any more counts as failed. ``gave_up_ms``: when the runner stopped trying, for each of
    them that it has given up.
    """
    found: list[ReplicaInfo] = []
    missing = dict(desired or {})
    for model in models:
        if model.state is ModelState.UNLOADED:
            continue
        kept, problem = model.model_id in missing, missing.pop(model.model_id, "")
        if model.state is ModelState.LOADING or not model.replicas:
            infos = [_describe_loading(model)]
        else:
            infos = [_describe_replica(model, replica) for replica in model.replicas]
        for info in infos:
            info.kept = kept
            if problem and info.state == ModelState.FAILED.value:
                info.detail = problem[: limits().connection.detail_chars]
        found += infos
    for name, problem in missing.items():
        state = ModelState.FAILED if problem else ModelState.LOADING
        found.append(
            ReplicaInfo(
                model=name, state=state.value, detail=(problem or WAITING)[: limits().connection.detail_chars], kept=True
            )
        )
    for info in found:
        if info.kept and info.state == ModelState.FAILED.value:
            info.gave_up_ms = (gave_up_ms or {}).get(info.model)
    return found


def list_endpoints(models: Iterable[Model]) -> list[str]:
    return sorted({path for model in models if model.is_ready for path in _tell_endpoints(model, model.capabilities)})


def read_memory(reading: Reading | None, models: Sequence[Model]) -> MemoryInfo | None:
    if reading is None:
        return None
    replicas = [replica for model in models for replica in model.replicas]
    return MemoryInfo(
        kind=reading.kind,
        total_mb=reading.total_mb,
        used_mb=reading.used_mb,
        weights_mb=_mib(sum_known(replica.weights_bytes for replica in replicas)),
        kv_mb=_mib(sum_known(replica.kv_bytes for replica in replicas)),
    )


def _describe_loading(model: Model) -> ReplicaInfo:
    load = model.load
    return ReplicaInfo(
        model=model.model_id,
        state=model.state.value,
        engine=model.definition.backend,
        slots=model.definition.target_inflight,
        detail=(load.stage if load is not None else model.last_error or "")[: limits().connection.detail_chars],
        progress=None if load is None or load.fraction is None else round(load.fraction, 3),
        eta_s=None if load is None or (eta := load.eta_s()) is None else round(eta, 1),
        gpus=list(model.plan.gpu_ids) if model.plan is not None else [],
        device=_find_device(model.plan) if model.plan is not None else "",
        **_tell_cluster(model.plan),
    )


def _describe_replica(model: Model, replica: Replica) -> ReplicaInfo:
    supervisor, memory = replica.supervisor, replica.memory
    state = model.state.value if model.state is ModelState.UNLOADING else supervisor.state.value
    return ReplicaInfo(
        model=model.model_id,
        state=RESERVED if replica.plan.is_reserved and supervisor.is_ready else state,
        engine=supervisor.engine.name,
        slots=replica.slots,
        active=replica.active,
        detail=(supervisor.last_error or "")[: limits().connection.detail_chars],
        memory_mb=_mib(None if memory is None else memory.held_bytes),
        weights_mb=_mib(replica.weights_bytes),
        kv_mb=_mib(replica.kv_bytes),
        endpoints=_tell_endpoints(model, replica.capabilities),
        context_tokens=replica.context_tokens,
        gpus=list(replica.plan.gpu_ids),
        device=_find_device(replica.plan),
        **_tell_cluster(replica.plan),
    )


def _find_device(plan: LoadPlan) -> str:
    is_told = plan.options.get("device") == CPU or plan.options.get("gguf_n_gpu_layers") == 0
    return CPU if is_told or (plan.backend in _CPU_UNLESS_TOLD and not plan.gpu_ids) else ""


def _tell_cluster(plan: LoadPlan | None) -> dict[str, Any]:
    if plan is None or plan.cluster is None:
        return {}
    return {"replica_id": plan.cluster.replica_id, "members": [member.node for member in plan.cluster.members]}


def _tell_endpoints(model: Model, capabilities: Capabilities) -> list[str]:
    # None = they may ask anything. What gateways are to translate is kept back, or they would pass it on as it is.
    kept_back = {TRANSLATABLE[word] for word in model.definition.translate}
    answered = capabilities.declared_endpoints or (INFERENCE_PATHS if kept_back else ())
    return [path for path in answered if path not in kept_back]


def _mib(size: int | None) -> int | None:
    return None if size is None else size // MIB


async def list_facts(parts: Parts, *, most: int) -> list[ModelFacts]:
    """Return what gateways are told of the models, loaded and configured ones first. Raises LedgerError."""
    # Models of the server given with ``--backend`` are left out: that server alone loads them.
    models = [model for model in parts.pool.registry.models if model.definition.backend != "attached"]
    models.sort(key=lambda model: (not model.replicas, not model.definition.is_configured))
    return [await _describe(parts, model) for model in models[:most]]


async def estimate_memory(parts: Parts, model: Model) -> tuple[int | None, str, int]:
    """Return bytes, where they come from in llm-pool's words, and for how many replicas they are. Raises LedgerError."""
    if model.memory_bytes is not None:
        return model.memory_bytes, "observed_load_delta", len(model.replicas)
    wanted = count_replicas(model.definition, model.overrides)
    seen = await parts.ledger.observations(model.definition.backend)
    for observation in seen:
        if observation.model_id == model.model_id and observation.measured_bytes:
            return observation.measured_bytes * wanted, "observed_load_delta", wanted
    size = await _file_size(parts, model)
    return (None, "unavailable", wanted) if size is None else (size * wanted, "model_artifact_size", wanted)


def effective_inflight(model: Model) -> int:
    """Return the requests that one replica takes at once: what is wanted, within what its engine can."""
    if model.replicas:
        return min(replica.slots for replica in model.replicas)
    asked = model.overrides.get("target_inflight")
    return asked if isinstance(asked, int) else model.definition.target_inflight


async def _describe(parts: Parts, model: Model) -> ModelFacts:
    size, source, count = await estimate_memory(parts, model)
    definition = model.definition
    return ModelFacts(
        name=model.model_id,
        backend=definition.backend,
        quantization=model.files_quantization or _find_quantization(parts, model),
        state=model.state.value,
        replicas=count_replicas(model.definition, model.overrides),
        loaded_replicas=sum(replica.supervisor.is_ready for replica in model.replicas),
        replica_max=definition.replica_max,
        target_inflight=effective_inflight(model),
        configured_target_inflight=definition.target_inflight,
        estimate_mb=None if size is None else ceil_mib(size),
        estimate_replicas=count,
        estimate_source=source,
        load_constraints=load_constraints(definition),
        device=CPU if definition.device == CPU else "",
    )


async def _file_size(parts: Parts, model: Model) -> int | None:
    definition = model.definition
    if is_elsewhere(definition):
        return None
    if (found := _find_files(parts, model)) is not None:
        return found.size_bytes
    path = Path(definition.model_path or definition.model_id)
    shape = await parts.pool.capacity.find_shape(path) if definition.is_configured and path.is_absolute() else None
    return shape.weights_bytes if shape is not None else None


def _find_quantization(parts: Parts, model: Model) -> str:
    found = None if is_elsewhere(model.definition) else _find_files(parts, model)
    return (found.quantization or "") if found is not None else ""


def _find_files(parts: Parts, model: Model) -> FoundModel | None:
    wanted = model.definition.model_path or model.definition.model_id
    return next((entry for entry in parts.pool.registry.found if wanted in {entry.model_id, str(entry.path)}), None)
