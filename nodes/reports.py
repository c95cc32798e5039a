"""What a node says of itself and of operations, cut to sizes that can be kept, stored and shown: a node may say anything.

Text is cut and made printable, numbers are brought into their range, and what is beyond the caps is dropped. Ids, keys and
receipts are never shortened: one that is too long is dropped, because its head would be another one. Nothing raises but
``read_capabilities``: a wrong figure on a page is better than a node that cannot work.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from core.limits import NodeLimits, limits
from wire import bridge
from wire.unreadable import UNREADABLE

_GONE = frozenset({"failed", "unloaded"})
_STATES = frozenset({"running", "succeeded", "failed", "refused", "interrupted", "unknown"})
_LEVELS = frozenset({"L0", "L1", "L2"})
_LOG_LEVELS = frozenset({"info", "warning", "error", "critical"})

_HEALTHY = "healthy"
ANY_MODEL = "*"
"""What a bridge v1 worker declares that is to ask its backend for models, while that does not answer."""
NO_MODELS = "no models accepted: this node gets no requests until it declares a model"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What ``GET /v1/capabilities`` of the model-runner API says, cut to sizes that can be kept.

    ``models``: names of the loaded models. ``ailment``: the node's word for its health where that is not "healthy".
    ``vram_*`` in MiB and ``gpu_util_percent`` of all GPUs together; None = it does not say.
    """

    models: tuple[str, ...]
    telemetry: bridge.Telemetry
    ailment: str
    vram_used_mb: int | None
    vram_free_mb: int | None
    gpu_util_percent: float | None


class _Loaded(
    msgspec.Struct,
    rename={"context_length": "contextLength", "memory_mb": "gpuMemoryMB", "weights_mb": "weightsMB", "kv_mb": "kvMB"},
):
    id: str
    context_length: float | None = None
    memory_mb: float | None = None
    engine: str = ""
    replicas: float = 1
    endpoints: list[str] = []
    weights_mb: float | None = None
    kv_mb: float | None = None


class _Loading(msgspec.Struct):
    id: str
    progress: float | None = None
    eta: float | None = None
    stage: str = ""


class _Failed(msgspec.Struct):
    id: str
    reason: str = ""


class _Models(msgspec.Struct):
    loaded: list[_Loaded] = []
    loading: list[_Loading] = []
    available: list[str] = []
    failed: list[_Failed] = []


class _Gpu(
    msgspec.Struct,
    rename={
        "memory_total_mb": "memoryTotalMB", "memory_used_mb": "memoryUsedMB",
        "temperature_c": "temperatureC", "power_w": "powerW",
    },
):  # fmt: skip
    index: int
    name: str = ""
    memory_total_mb: float | None = None
    memory_used_mb: float | None = None
    utilization: float | None = None
    temperature_c: float | None = None
    power_w: float | None = None


class _Resources(
    msgspec.Struct,
    rename={
        "gpu_ids": "gpuIds", "total_mb": "gpuMemoryTotalMB", "used_mb": "gpuMemoryUsedMB", "free_mb": "gpuMemoryFreeMB",
        "utilization": "gpuUtilization", "kv_mb": "kvCacheSizeMB",
    },
):  # fmt: skip
    device: str = "gpu"
    gpu_ids: list[int] = []
    total_mb: float | None = None
    used_mb: float | None = None
    free_mb: float | None = None
    utilization: float | None = None
    kv_mb: float | None = None
    gpus: list[_Gpu] = []


class _Queue(msgspec.Struct, rename={"avg_wait_ms": "avgWaitMs"}):
    depth: float = 0
    avg_wait_ms: float | None = None


class _Answer(msgspec.Struct, rename={"runner_type": "runnerType"}):
    models: _Models
    runner_type: str = ""
    resources: _Resources = msgspec.field(default_factory=_Resources)
    queue: _Queue = msgspec.field(default_factory=_Queue)
    health: str = _HEALTHY


_answers = msgspec.json.Decoder(_Answer)
_VERSION_RE = re.compile(r"-v?b?[0-9].*")


def read_capabilities(body: bytes, *, policy: NodeLimits, gpu_name: str = "") -> Capabilities:
    """Return what a node answers to ``GET /v1/capabilities``. Unknown members are skipped.

    ``gpu_name``: of the registration, for a node that numbers its GPUs without naming them. Raises ValueError, saying which
    member is wrong.
    """
    try:
        said = _answers.decode(body)
    except UNREADABLE as error:
        raise ValueError(str(error)) from None
    resources, loaded = said.resources, said.models.loaded[: limits().nodes.report_replicas]
    telemetry = bridge.Telemetry(
        current_load=0,
        gpus=_read_gpus(resources, gpu_name),
        replicas=[
            *(replica for model in loaded for replica in _read_loaded(model, said.runner_type)),
            *(
                bridge.ReplicaInfo(model=one.id, state="loading", detail=one.stage, progress=one.progress, eta_s=one.eta)
                for one in said.models.loading
            ),
            *(bridge.ReplicaInfo(model=one.id, state="failed", detail=one.reason) for one in said.models.failed),
        ],
        available=said.models.available,
        memory=None
        if resources.total_mb is None
        else bridge.MemoryInfo(
            kind=resources.device,
            total_mb=_whole(resources.total_mb),
            used_mb=_whole(resources.used_mb),
            weights_mb=_sum_whole(model.weights_mb for model in loaded),
            kv_mb=_whole(resources.kv_mb),
        ),
        queue_depth=_whole(said.queue.depth) or 0,
        avg_wait_ms=_whole(said.queue.avg_wait_ms),
    )
    clean_telemetry(telemetry)
    models, _ = clean_models((model.id for model in loaded), policy)
    return Capabilities(
        models=models,
        telemetry=telemetry,
        ailment="" if said.health == _HEALTHY else _clean_text(said.health, limits().nodes.report_word_chars) or "unknown",
        vram_used_mb=_clean_int(_whole(resources.used_mb), limits().nodes.report_mb),
        vram_free_mb=_clean_int(_whole(resources.free_mb), limits().nodes.report_mb),
        gpu_util_percent=_clean_float(_percent(resources.utilization), 0.0, 100.0),
    )


def _read_loaded(model: _Loaded, runner_type: str) -> list[bridge.ReplicaInfo]:
    # Memory is said of all replicas together and divided evenly.
    count = min(max(1, int(model.replicas)), limits().nodes.report_replicas)
    replica = bridge.ReplicaInfo(
        model=model.id,
        state="loaded",
        engine=_VERSION_RE.sub("", model.engine or runner_type),
        memory_mb=_whole(model.memory_mb, parts=count),
        weights_mb=_whole(model.weights_mb, parts=count),
        kv_mb=_whole(model.kv_mb, parts=count),
        endpoints=model.endpoints,
        context_tokens=_whole(model.context_length),
    )
    return [replica] * count


def _read_gpus(resources: _Resources, name: str) -> list[bridge.GpuInfo]:
    gpus = resources.gpus or [_Gpu(index=index) for index in resources.gpu_ids]
    if not resources.gpus and len(gpus) == 1:  # sums are told of a GPU only if it is the only one
        (only,) = gpus
        only.memory_total_mb, only.memory_used_mb = resources.total_mb, resources.used_mb
        only.utilization = resources.utilization
    return [
        bridge.GpuInfo(
            index=gpu.index,
            name=gpu.name or name,
            memory_total_mb=_whole(gpu.memory_total_mb),
            memory_used_mb=_whole(gpu.memory_used_mb),
            utilization_percent=_percent(gpu.utilization),
            temperature_c=gpu.temperature_c,
            power_w=gpu.power_w,
        )
        for gpu in gpus
    ]


def _whole(value: float | None, *, parts: int = 1) -> int | None:
    return None if value is None else int(value / parts)


def _sum_whole(values: Iterable[float | None]) -> int | None:
    known = [value for value in values if value is not None]
    return int(sum(known)) if known else None


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def clean_models(names: Iterable[str], policy: NodeLimits) -> tuple[tuple[str, ...], list[str]]:
    """Return the model names that can be used, each once and in their order, and a warning for each thing that was changed."""
    warnings: list[str] = []
    accepted: dict[str, None] = {}
    for raw in names:
        name = raw.strip()
        if name == ANY_MODEL:
            warnings.append(f"{ANY_MODEL} is no model: the worker's backend did not say what it serves; it is asked again")
        elif name and len(name) <= policy.max_model_name_chars and name.isprintable():
            accepted.setdefault(name)
    models = tuple(accepted)
    if len(models) > policy.max_models:
        models = models[: policy.max_models]
        warnings.append(f"model list truncated to {policy.max_models} entries")
    if not models:
        warnings.append(NO_MODELS)
    return models, warnings


def clean_register(message: bridge.Register) -> None:
    """Cut what a registration says beyond its models, in place; bridge v1 knows nothing of replicas.

    Names stay as long as they are: who keeps one knows how much of it. They go into logs and headers, so they have one line.
    """
    message.worker_name = _clean_line(message.worker_name)
    message.instance_id = None if message.instance_id is None else _clean_line(message.instance_id)
    message.agent_version = None if message.agent_version is None else _clean_line(message.agent_version)
    message.owner_name = None if message.owner_name is None else _clean_line(message.owner_name)
    message.gpus = _clean_gpus(message.gpus)
    if message.protocol_version != bridge.MUSTER_V1:
        message.replicas, message.available, message.memory, message.endpoints = [], [], None, []
        message.governance, message.ticket_url = None, ""
        return
    message.replicas = _clean_replicas(message.replicas)
    message.available = _clean_available(message.available)
    message.memory = _clean_memory(message.memory)
    message.endpoints = _clean_endpoints(message.endpoints)
    url = _clean_line(message.ticket_url).strip()
    message.ticket_url = url if len(url) <= limits().nodes.url_chars else ""
    if message.governance is not None:
        clean_governance(message.governance)


def clean_telemetry(message: bridge.Telemetry) -> None:
    """Cut a telemetry message, in place."""
    message.current_load = _clean_int(message.current_load, limits().nodes.report_load) or 0
    message.gpus = _clean_gpus(message.gpus)
    message.replicas = _clean_replicas(message.replicas)
    message.available = _clean_available(message.available)
    message.memory = _clean_memory(message.memory)
    message.queue_depth = _clean_int(message.queue_depth, limits().nodes.report_load) or 0
    message.avg_wait_ms = _clean_int(message.avg_wait_ms, limits().nodes.report_duration_ms)
    message.last_error = _clean_text(message.last_error, limits().nodes.report_error_chars) if message.last_error else None


def sum_gpus(gpus: Sequence[bridge.GpuInfo]) -> dict[str, object]:
    """Return what all GPUs of a node use and have free, in MiB, and how busy the busiest is, by column of its presence."""
    used = [gpu.memory_used_mb for gpu in gpus if gpu.memory_used_mb is not None]
    total = [gpu.memory_total_mb for gpu in gpus if gpu.memory_total_mb is not None]
    busy = [gpu.utilization_percent for gpu in gpus if gpu.utilization_percent is not None]
    return {
        "vram_used_mb": sum(used) if used else None,
        "vram_free_mb": max(0, sum(total) - sum(used)) if used and total else None,
        "gpu_util_percent": max(busy, default=None),
    }


def find_endpoints(
    models: Iterable[str], *, replicas: Iterable[bridge.ReplicaInfo], registered: Sequence[str]
) -> dict[str, frozenset[str]]:
    """Return the API paths that each model answers on a node; a model that is not in it answers anything.

    A replica says so itself; one that says nothing answers what the registration lists, and where that lists nothing
    either the node may be asked anything. Replicas that are not there any more say nothing.
    """
    said: dict[str, set[str]] = {}
    for replica in replicas:
        if replica.state not in _GONE:
            said.setdefault(replica.model, set()).update(replica.endpoints or registered or ("",))
    found: dict[str, frozenset[str]] = {}
    for model in models:
        paths = said.get(model) or set(registered)
        if paths and "" not in paths:
            found[model] = frozenset(paths)
    return found


def store_endpoints(endpoints: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    """Return endpoints as JSON values, always in the same order."""
    return {model: sorted(paths) for model, paths in sorted(endpoints.items())}


def read_endpoints(stored: Mapping[str, Sequence[str]] | None) -> dict[str, frozenset[str]]:
    """Return what ``find_endpoints`` returned, from the form in which it is stored."""
    return {model: frozenset(paths) for model, paths in (stored or {}).items()}


def find_contexts(replicas: Iterable[bridge.ReplicaInfo]) -> dict[str, int]:
    """Return the tokens that a request for each model may have on whichever replica it meets: those of the smallest."""
    found: dict[str, int] = {}
    for replica in replicas:
        tokens = replica.context_tokens
        if tokens and replica.state not in _GONE:
            found[replica.model] = min(tokens, found.get(replica.model, tokens))
    return found


def find_engines(replicas: Iterable[bridge.ReplicaInfo]) -> dict[str, frozenset[str]]:
    """Return the names of the engines that serve each model, as far as the node says."""
    found: dict[str, frozenset[str]] = {}
    for replica in replicas:
        if replica.engine and replica.state not in _GONE:
            found[replica.model] = found.get(replica.model, frozenset()) | {replica.engine}
    return found


def read_stored(stored: object, kind: type[T]) -> T | None:
    """Return what was stored as JSON values; None for what a release wrote that knew more, or less."""
    try:
        return msgspec.convert(stored, kind)
    except msgspec.ValidationError:
        return None


def read_replicas(stored: object) -> list[bridge.ReplicaInfo]:
    """Return the replicas that were stored as JSON values; none where they cannot be read."""
    return read_stored(stored, list[bridge.ReplicaInfo]) or []


def _clean_gpus(gpus: Sequence[bridge.GpuInfo]) -> list[bridge.GpuInfo]:
    return [
        bridge.GpuInfo(
            index=_clean_int(gpu.index, 1_000_000) or 0,
            name=_clean_text(gpu.name, limits().nodes.report_name_chars),
            memory_total_mb=_clean_int(gpu.memory_total_mb, limits().nodes.report_mb),
            memory_used_mb=_clean_int(gpu.memory_used_mb, limits().nodes.report_mb),
            utilization_percent=_clean_float(gpu.utilization_percent, 0.0, 100.0),
            temperature_c=_clean_float(gpu.temperature_c, -273.0, limits().nodes.report_temperature_c),
            power_w=_clean_float(gpu.power_w, 0.0, limits().nodes.report_power_w),
            gpu_id=_keep_whole(gpu.gpu_id, limits().nodes.report_word_chars),
            vendor=_clean_text(gpu.vendor, limits().nodes.report_word_chars),
            compute_capability=_clean_text(gpu.compute_capability, limits().nodes.report_word_chars),
            driver_version=_clean_text(gpu.driver_version, limits().nodes.report_word_chars),
            runtime_version=_clean_text(gpu.runtime_version, limits().nodes.report_word_chars),
            group=_clean_text(gpu.group, limits().nodes.report_word_chars),
            max_batch=_clean_int(gpu.max_batch, limits().nodes.report_load),
            max_context_tokens=_clean_int(gpu.max_context_tokens, limits().nodes.report_context_tokens),
            active_requests=_clean_int(gpu.active_requests, limits().nodes.report_load),
        )
        for gpu in gpus[: limits().nodes.report_gpus]
    ]


def _clean_replicas(replicas: Sequence[bridge.ReplicaInfo]) -> list[bridge.ReplicaInfo]:
    return [
        bridge.ReplicaInfo(
            model=_clean_text(replica.model, limits().nodes.report_name_chars),
            state=_clean_text(replica.state, limits().nodes.report_word_chars),
            engine=_clean_text(replica.engine, limits().nodes.report_word_chars),
            slots=_clean_int(replica.slots, limits().nodes.report_load) or 0,
            active=_clean_int(replica.active, limits().nodes.report_load) or 0,
            detail=_clean_text(replica.detail, limits().nodes.report_detail_chars),
            progress=_clean_float(replica.progress, 0.0, 1.0),
            eta_s=_clean_float(replica.eta_s, 0.0, limits().nodes.report_eta_s),
            memory_mb=_clean_int(replica.memory_mb, limits().nodes.report_mb),
            weights_mb=_clean_int(replica.weights_mb, limits().nodes.report_mb),
            kv_mb=_clean_int(replica.kv_mb, limits().nodes.report_mb),
            endpoints=_clean_endpoints(replica.endpoints),
            context_tokens=_clean_int(replica.context_tokens, limits().nodes.report_context_tokens) or None,
            kept=replica.kept is True,
            gave_up_ms=_clean_int(replica.gave_up_ms, limits().nodes.report_unix_ms),
            gpus=[
                index for gpu in replica.gpus[: limits().nodes.report_gpus] if (index := _clean_int(gpu, 1_000_000)) is not None
            ],
            device=bridge.CPU if replica.device == bridge.CPU else "",
            replica_id=_clean_text(replica.replica_id, limits().nodes.report_name_chars),
            members=[
                _clean_text(member, limits().nodes.report_name_chars)
                for member in replica.members[: limits().nodes.operation_targets]
            ],
        )
        for replica in replicas[: limits().nodes.report_replicas]
    ]


def _clean_available(names: Sequence[str]) -> list[str]:
    cleaned = (_clean_text(name, limits().nodes.report_name_chars) for name in names[: limits().nodes.report_available])
    return list(dict.fromkeys(name for name in cleaned if name))


def _clean_memory(memory: bridge.MemoryInfo | None) -> bridge.MemoryInfo | None:
    if memory is None:
        return None
    return bridge.MemoryInfo(
        kind=_clean_text(memory.kind, limits().nodes.report_word_chars),
        total_mb=_clean_int(memory.total_mb, limits().nodes.report_mb),
        used_mb=_clean_int(memory.used_mb, limits().nodes.report_mb),
        weights_mb=_clean_int(memory.weights_mb, limits().nodes.report_mb),
        kv_mb=_clean_int(memory.kv_mb, limits().nodes.report_mb),
        models=None
        if memory.models is None
        else [_clean_facts(facts) for facts in memory.models[: limits().nodes.report_models]],
    )


def _clean_facts(facts: bridge.ModelFacts) -> bridge.ModelFacts:
    constraints = {
        _clean_text(name, limits().nodes.report_word_chars): {
            _clean_text(key, limits().nodes.report_word_chars): _clean_limit(value) for key, value in _first(members)
        }
        for name, members in _first(facts.load_constraints)
    }
    if len(msgspec.json.encode(constraints)) > limits().nodes.report_constraints_bytes:
        constraints = {}
    return bridge.ModelFacts(
        name=_clean_text(facts.name, limits().nodes.report_name_chars),
        backend=_clean_text(facts.backend, limits().nodes.report_word_chars),
        quantization=_clean_text(facts.quantization, limits().nodes.report_word_chars),
        state=_clean_text(facts.state, limits().nodes.report_word_chars),
        replicas=_clean_int(facts.replicas, limits().nodes.report_load) or 0,
        loaded_replicas=_clean_int(facts.loaded_replicas, limits().nodes.report_load) or 0,
        replica_max=_clean_int(facts.replica_max, limits().nodes.report_load) or 0,
        target_inflight=_clean_int(facts.target_inflight, limits().nodes.report_load) or 0,
        configured_target_inflight=_clean_int(facts.configured_target_inflight, limits().nodes.report_load) or 0,
        estimate_mb=_clean_int(facts.estimate_mb, limits().nodes.report_mb),
        estimate_replicas=_clean_int(facts.estimate_replicas, limits().nodes.report_load) or 0,
        estimate_source=_clean_text(facts.estimate_source, limits().nodes.report_word_chars),
        load_constraints=constraints,
        device=bridge.CPU if facts.device == bridge.CPU else "",
    )


def _first(members: Mapping[str, T]) -> list[tuple[str, T]]:
    return list(members.items())[: limits().nodes.report_constraints]


def _clean_limit(value: object) -> object:
    """Return one limit of a field: a number, a flag, null, a short text or a list of short texts and nulls."""
    match value:
        case None | bool():
            return value
        case int() if abs(value) <= limits().nodes.report_exact_integer:
            return value
        case float() if math.isfinite(value):
            return value
        case str():
            return _clean_text(value, limits().nodes.report_limit_chars)
        case list():
            return [
                _clean_text(item, limits().nodes.report_word_chars)
                for item in value[: limits().nodes.report_constraints]
                if isinstance(item, str)
            ]
        case _:
            return None


def _clean_endpoints(paths: Sequence[str]) -> list[str]:
    kept = (
        path
        for path in paths[: limits().nodes.report_endpoints]
        if path.startswith("/") and len(path) <= limits().nodes.report_path_chars and path.isprintable()
    )
    return list(dict.fromkeys(kept))


def _clean_line(text: str) -> str:
    return _clean_text(text, len(text))


def _clean_text(text: str, limit: int) -> str:
    cut = text[:limit]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else " " for c in cut).strip()


def _clean_int(value: int | None, top: int) -> int | None:
    return None if value is None else min(max(0, value), top)


def _clean_float(value: float | None, low: float, high: float) -> float | None:
    return None if value is None else min(max(low, value), high)


def clean_status(status: bridge.OpStatus) -> None:
    """Cut an ``op_status``, in place. A state that is none becomes "" and an impossible id or use names nothing."""
    status.op_id = _keep_whole(status.op_id, limits().nodes.op_id_chars)
    status.use = status.use if 1 <= status.use <= limits().nodes.report_integer else 0
    status.state = status.state if status.state in _STATES else ""
    status.stage = _clean_text(status.stage, limits().nodes.status_stage_chars).strip()
    status.fraction = _clamp(status.fraction, 1.0)
    status.eta_s = _clamp(status.eta_s, limits().nodes.report_eta_s)
    status.code = _clean_text(status.code, limits().nodes.status_code_chars).strip()
    status.message = _clean_text(status.message, limits().nodes.status_message_chars).strip()
    status.result = clean_result(status.result)
    status.receipt = _keep_whole(status.receipt, limits().nodes.status_receipt_chars)


def clean_log(tail: bridge.LogTail) -> None:
    """Cut a ``log_tail``, in place: the newest lines stay."""
    bounds = limits().nodes
    tail.query_id = _keep_whole(tail.query_id, bounds.op_id_chars)
    tail.left_out = min(max(0, tail.left_out), bounds.report_integer)
    tail.lines = tail.lines[-bounds.log_lines :]
    for line in tail.lines:
        line.at_ms = min(max(0, line.at_ms), bounds.report_clock_ms)
        line.level = line.level if line.level in _LOG_LEVELS else "info"
        line.text = _clean_text(line.text, bounds.log_line_chars)


def clean_hub_answer(answer: bridge.HubAnswer) -> None:
    """Cut a ``hub_answer``, in place."""
    bounds = limits().nodes
    answer.query_id = _keep_whole(answer.query_id, bounds.op_id_chars)
    answer.error = _clean_text(answer.error, bounds.report_detail_chars)
    answer.models = answer.models[: bounds.hub_models]
    for model in answer.models:
        model.name = _keep_whole(model.name, bounds.report_name_chars)
        model.downloads = min(max(0, model.downloads), bounds.report_exact_integer)
        model.task = _clean_text(model.task, bounds.report_word_chars)
        found = (_keep_whole(name, bounds.report_name_chars) for name in model.files[: bounds.hub_files])
        model.files = [name for name in found if name]
    answer.models = [model for model in answer.models if model.name]


def clean_result(result: dict[str, object]) -> dict[str, object]:
    """Return the result of an operation as it is, or one word on why it is not kept."""
    return result if _can_be_stored(result) else {"omitted": "it is too large, or cannot be stored"}


def clean_report(report: bridge.GovernanceReport) -> None:
    """Cut a ``governance_report``, in place."""
    clean_governance(report.governance)
    report.witness_signature = _keep_whole(report.witness_signature, limits().nodes.op_key_chars)
    note = report.witness_note
    is_note = len(note) <= limits().nodes.witness_note_chars and all(line.isprintable() for line in note.split("\n"))
    report.witness_note = note if is_note else ""
    report.witness_alarm = _clean_text(report.witness_alarm, limits().nodes.witness_alarm_chars).strip()


def clean_governance(governance: bridge.NodeGovernance) -> None:
    """Cut how a node decides, in place. A level that is none becomes ""."""
    governance.level = governance.level if governance.level in _LEVELS else ""
    governance.runner_id = _keep_whole(governance.runner_id, limits().nodes.runner_id_chars)
    governance.public_key = _keep_whole(governance.public_key, limits().nodes.public_key_chars)
    newest = list(governance.op_keys.items())[-limits().nodes.op_keys :]
    governance.op_keys = {
        kid: secret
        for kid, secret in newest
        if kid and _keep_whole(kid, limits().nodes.op_id_chars) and secret and _keep_whole(secret, limits().nodes.op_key_chars)
    }
    governance.policy_version = min(max(0, governance.policy_version), limits().nodes.report_integer)
    governance.policy_sha256 = _keep_whole(governance.policy_sha256, limits().nodes.digest_chars)
    governance.policy_error = _clean_text(governance.policy_error, limits().nodes.witness_alarm_chars).strip()
    governance.witness_size = min(max(0, governance.witness_size), limits().nodes.report_exact_integer)
    governance.witness_root = _keep_whole(governance.witness_root, limits().nodes.digest_chars)
    governance.cluster_address = _keep_whole(governance.cluster_address, limits().nodes.report_name_chars)
    governance.clock_ms = min(max(0, governance.clock_ms), limits().nodes.report_clock_ms)


def _keep_whole(text: str, limit: int) -> str:
    return text if len(text) <= limit and text.isprintable() else ""


def _clamp(value: float | None, top: float) -> float | None:
    return None if value is None or not math.isfinite(value) else min(max(0.0, value), top)


def _can_be_stored(result: dict[str, object]) -> bool:
    # PostgreSQL takes no NUL, no lone surrogate and no infinity as JSON.
    try:
        text = json.dumps(result, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return len(text) <= limits().nodes.status_result_bytes and "\\u0000" not in text and _is_encodable(result)


def _is_encodable(result: dict[str, object]) -> bool:
    try:
        json.dumps(result, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
