"""Types of what the endpoints answer, named as the specifications have them, and the OpenAPI document made of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runner import AGENT_VERSION
from runner.errors import ADMIN_PREFIX


def spec_name(name: str) -> str:
    """Return a field name as the model-runner specification writes it: ``kv_cache_size_mb`` is ``kvCacheSizeMB``."""
    first, *rest = name.split("_")
    return first + "".join("MB" if word == "mb" else word.capitalize() for word in rest)


class Flags(msgspec.Struct, kw_only=True, rename=spec_name):
    """What can be asked of a model, or of the node: then of any of its loaded models."""

    streaming: bool
    prefix_caching: bool
    multi_tenant: bool
    vision_input: bool
    audio_input: bool
    function_calling: bool


class LoadedModel(msgspec.Struct, kw_only=True, rename=spec_name):
    """A model that answers. ``gpuMemoryMB`` is measured: of the GPUs, or of the host where ``resources.device`` says so.

    ``cacheFlush``: what a flush of the whole model comes to, flushed, reloaded, nothing-kept or not-supported. Whether the
    engine itself keeps tenants apart and heeds priorities: supported or not-supported; the node's own queue always does.
    """

    id: str
    quantization: str | None
    context_length: int | None
    loaded_at: int | None
    gpu_memory_mb: int | None
    engine: str
    replicas: int
    endpoints: list[str]
    weights_mb: int | None
    kv_mb: int | None
    predicted_mb: int | None
    capabilities: Flags
    cache_flush: str
    tenant_isolation: str
    engine_priority: str


class LoadingModel(msgspec.Struct, kw_only=True):
    """A model that is being loaded: ``progress`` from 0 to 1, ``eta`` in seconds; null = cannot be told yet."""

    id: str
    progress: float | None
    eta: int | None
    stage: str


class UnusableModel(msgspec.Struct, kw_only=True):
    """A model that does not serve, and why."""

    id: str
    reason: str


class KeptModel(msgspec.Struct, kw_only=True):
    """A model that an operation keeps loaded; ``problem``: why the runner cannot load it again, "" = nothing is wrong."""

    id: str
    problem: str


class Models(msgspec.Struct, kw_only=True):
    """Every model by what can be done with it; ``failed`` ones may be loaded again, ``unusable`` files may not.

    ``kept``: those that the runner loads again by itself after a restart.
    """

    loaded: list[LoadedModel]
    loading: list[LoadingModel]
    available: list[str]
    failed: list[UnusableModel]
    unusable: list[UnusableModel]
    kept: list[KeptModel]


class Gpu(msgspec.Struct, kw_only=True, rename=spec_name):
    """One GPU; ``utilization`` from 0 to 1; null = its driver does not tell."""

    index: int
    name: str
    memory_total_mb: int | None
    memory_used_mb: int | None
    utilization: float | None
    temperature_c: float | None
    power_w: float | None


class Resources(msgspec.Struct, kw_only=True, rename=spec_name):
    """The memory that models share: of all GPUs together, or, where ``device`` is host, of the machine."""

    device: str
    gpu_ids: list[int]
    gpu_memory_total_mb: int
    gpu_memory_used_mb: int
    gpu_memory_free_mb: int
    gpu_utilization: float | None
    kv_cache_size_mb: int
    kv_cache_utilization: float | None
    gpus: list[Gpu]


class Queue(msgspec.Struct, kw_only=True, rename=spec_name):
    """Requests that wait on the node, and how long those of the last 5 minutes waited."""

    depth: int
    max_depth: int
    avg_wait_ms: int
    p95_wait_ms: int


class OperationsState(msgspec.Struct, kw_only=True, rename=spec_name):
    """Who may load, unload and flush: at which level, by which policy (0 and "" = none pinned), and what the owner should do.

    ``witnessSize``: entries of the audit log that this node vouches for; ``policyWords``: fingerprint of the pinned version.
    """

    level: str
    policy_version: int
    policy_words: str
    witness_size: int
    advice: str


class CapabilitiesAnswer(msgspec.Struct, kw_only=True, rename=spec_name):
    """``GET /v1/capabilities``. ``runnerType``: the engines that serve, with their versions (``vllm-0.6.0``, several joined by
    ``+``), and ``runnerVersion`` where none does; ``runnerVersion``: this program.
    """

    runner_type: str
    runner_version: str
    runner_id: str
    models: Models
    resources: Resources
    queue: Queue
    capabilities: Flags
    operations: OperationsState
    health: str


class HealthAnswer(msgspec.Struct, kw_only=True, rename=spec_name, omit_defaults=True):
    """``GET /health``: ``status`` is healthy, or unhealthy with ``reasons``; ``uptime`` in seconds."""

    status: str
    uptime: int
    models_loaded: int
    queue_depth: int
    reasons: list[str] = []


class ModelEntry(msgspec.Struct, kw_only=True):
    """One model as OpenAI's clients know it."""

    id: str
    created: int
    owned_by: str
    object: str = "model"


class ModelList(msgspec.Struct, kw_only=True):
    """``GET /v1/models``: OpenAI's list in ``data``, llm-pool's in ``models``; loaded models only."""

    data: list[ModelEntry]
    models: list[str]
    object: str = "list"


class ErrorObject(msgspec.Struct, kw_only=True):
    """What was wrong. Some codes have further members, such as ``queueDepth`` and ``avgWaitMs``, or ``resetAt``."""

    code: str
    message: str
    type: str
    param: str | None
    retryable: bool


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """Every error outside ``/v1/admin/``."""

    error: ErrorObject


class PoolDetail(msgspec.Struct, kw_only=True):
    """What was wrong, in llm-pool's words."""

    code: str
    model: str | None
    message: str


class PoolErrorAnswer(msgspec.Struct, kw_only=True):
    """Every error below ``/v1/admin/``."""

    detail: PoolDetail


class TaskAnswer(msgspec.Struct, kw_only=True, rename=spec_name):
    """A load: ``status`` is loading, completed, failed or interrupted; times in seconds or, with Ms, milliseconds."""

    task_id: str | None
    status: str
    model_id: str
    progress: float | None = None
    eta: int | None = None
    stage: str | None = None
    error: str | None = None
    code: str | None = None
    gpu_memory_used_mb: int | None = None
    predicted_memory_mb: int | None = None
    load_time_ms: int | None = None
    replicas: int | None = None
    evicted: str | None = None
    started_at: int | None = None
    receipt: str | None = None


class UnloadAnswer(msgspec.Struct, kw_only=True, rename=spec_name):
    """``POST /v1/models/unload``: memory of the model's processes, before and after."""

    model_id: str
    gpu_memory_freed_mb: int
    kv_cache_flushed: bool
    memory_before_mb: int
    memory_after_mb: int
    requests_cut: int
    was_loaded: bool
    receipt: str | None = None


class FlushedModel(msgspec.Struct, kw_only=True, rename=spec_name):
    """``outcome`` is flushed, nothing-kept, refused-busy, reloaded or not-supported; null = the engine does not tell."""

    model_id: str
    outcome: str
    detail: str
    entries_removed: int | None
    memory_freed_mb: int | None


class FlushAnswer(msgspec.Struct, kw_only=True, rename=spec_name):
    """``POST /v1/cache/flush``: ``flushed`` when every model was."""

    flushed: bool
    entries_removed: int | None
    memory_freed_mb: int | None
    models: list[FlushedModel]
    receipt: str | None = None


class ReloadAnswer(msgspec.Struct, kw_only=True):
    """``POST /v1/admin/settings/reload``."""

    added_models: list[str]
    removed_models: list[str]
    updated_models: list[str]
    unchanged_models: list[str]
    service_restart_required: bool


_CONVERTED = re.compile(r"\{(\w+)(?::\w+)?\}")
_HEADERS: Sequence[tuple[str, str, list[str] | None]] = (
    ("X-Tenant-ID", "Whose request it is: queue, limits and cache are separate", None),
    ("X-Priority", "Class in the queue", ["high", "normal", "low"]),
    ("X-Cache-Mode", "Whether a cached prefix may be used and kept", ["prefix", "none", "auto"]),
    ("X-Cache-Tag", "Scope of cache entries within the tenant, at most 64 characters", None),
)
_ANSWER_HEADERS = {
    "X-Cache-Hit": ("boolean", "Whether a cached prefix was used"),
    "X-Cache-Tokens-Reused": ("integer", "Tokens taken from the cache"),
    "X-Queue-Wait-Ms": ("integer", "Time in the queue"),
    "X-GPU-Time-Ms": ("integer", "Time the engine worked"),
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the route table. ``handler``: a coroutine function or an ASGI application; ``status``: the usual one."""

    method: str
    path: str
    handler: Any  # Any: Starlette takes both kinds
    summary: str
    tag: str
    request: Any = None  # Any: a type
    answer: Any = None  # Any: a type
    status: int = 200
    media_type: str = "application/json"
    is_form: bool = False

    @property
    def shown_path(self) -> str:
        return _CONVERTED.sub(r"{\1}", self.path)


def describe_api(table: Sequence[Endpoint], *, has_key: bool) -> dict[str, object]:
    """Return the document. ``has_key``: clients must send the node's API key."""
    types = [kind for one in table for kind in (one.request, one.answer) if kind is not None]
    types = [*dict.fromkeys([ErrorAnswer, PoolErrorAnswer]), *(kind for kind in types if kind != dict[str, object])]
    schemas, components = msgspec.json.schema_components(
        types, schema_hook=_schema_of_any, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(types, schemas, strict=True))
    schema_of[dict[str, object]] = {"type": "object"}
    paths: dict[str, dict[str, object]] = {}
    for one in table:
        paths.setdefault(one.shown_path, {})[one.method.lower()] = _describe(one, schema_of)
    document: dict[str, object] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Muster node",
            "version": AGENT_VERSION,
            "description": "Models on one node: lifecycle and inference.",
        },
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }
    return {**document, "security": [{"key": []}]} if has_key else document


def _describe(one: Endpoint, schema_of: dict[Any, dict[str, Any]]) -> dict[str, object]:
    parameters: list[dict[str, object]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _CONVERTED.findall(one.path)
    ]
    is_inference = one.tag == "Inference"
    if is_inference:
        parameters += [_header(*header) for header in _HEADERS]
    error = PoolErrorAnswer if one.path.startswith(ADMIN_PREFIX) else ErrorAnswer
    answered: dict[str, object] = {"description": one.summary, "content": {one.media_type: {"schema": _schema(one, schema_of)}}}
    if is_inference:
        answered["headers"] = {
            name: {"schema": {"type": kind}, "description": text} for name, (kind, text) in _ANSWER_HEADERS.items()
        }
        answered["content"] = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {}}}
    described: dict[str, object] = {
        "summary": one.summary,
        "tags": [one.tag],
        "responses": {
            str(one.status): answered,
            "default": {"description": "Refused", "content": {"application/json": {"schema": schema_of[error]}}},
        },
    }
    if parameters:
        described["parameters"] = parameters
    if one.is_form:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}
    elif one.request is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[one.request]}}}
    return described


def _schema_of_any(kind: type) -> dict[str, Any]:
    if kind is object:
        return {"description": "Any JSON value."}
    raise NotImplementedError


_FORM = {
    "type": "object",
    "required": ["model", "file"],
    "properties": {"model": {"type": "string"}, "file": {"type": "string", "format": "binary"}, "stream": {"type": "boolean"}},
}


def _schema(one: Endpoint, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if one.answer is not None:
        return schema_of[one.answer]
    return {"type": "object"} if one.media_type == "application/json" else {"type": "string"}


def _header(name: str, text: str, words: list[str] | None) -> dict[str, object]:
    schema: dict[str, object] = {"type": "string"} if words is None else {"type": "string", "enum": words}
    return {"name": name, "in": "header", "required": False, "description": text, "schema": schema}
