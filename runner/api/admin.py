"""Load, unload, flush and settings over HTTP: the endpoints of the model-runner specification and llm-pool's admin API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from starlette.requests import Request
from starlette.responses import Response

from runner.api.bodies import answer_json, decode, read_object
from runner.definitions.plan import describe, load_constraints, load_recommendations
from runner.errors import InvalidRequest, ModelLoadFailed, Unavailable
from runner.fit.memory import ceil_mib
from runner.operations.operation import FlushBody, LoadBody, Reply, UnloadBody, reload_fields
from runner.parts import Parts
from runner.pool.loads import count_replicas
from runner.pool.models import Model
from runner.report import effective_inflight, estimate_memory

Handler = Callable[[Request], Coroutine[None, None, Response]]
TOKEN_FIELD = "verifiedOpToken"  # noqa: S105  # the name of a field


class Interruptible:
    """Handlers that may wait for minutes, and that are told when the node stops meanwhile."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Response]] = set()

    def wrap(self, handler: Handler) -> Handler:
        """Return the same handler, which raises Unavailable when ``close`` is called before it has answered."""

        async def wrapped(request: Request) -> Response:
            task = asyncio.create_task(handler(request))
            self._running.add(task)
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                self._running.discard(task)
            if task.cancelled():
                raise Unavailable("The node is shutting down.", retry_after_s=5)
            return task.result()

        return wrapped

    def close(self) -> None:
        """Interrupt what waits; operations themselves are ended by those who carry them out."""
        for task in self._running:
            task.cancel()


class Admin:
    """Endpoints of the model-runner specification, and those below ``/v1/admin/`` of llm-pool.

    Whatever loads, unloads or flushes passes the same gate: each needs an operation token.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def load(self, request: Request) -> Response:
        fields = await read_object(request)
        body = decode(fields, LoadBody)
        await self._parts.seek(body.modelId)
        return _answer(await self._parts.operations.load(body, without_token(fields)))

    async def unload(self, request: Request) -> Response:
        fields = await read_object(request)
        return _answer(await self._parts.operations.unload(decode(fields, UnloadBody), without_token(fields)))

    async def flush(self, request: Request) -> Response:
        fields = await read_object(request)
        return _answer(await self._parts.operations.flush(decode(fields, FlushBody), without_token(fields)))

    async def read_task(self, request: Request) -> Response:
        return answer_json(await self._parts.operations.read_task(request.path_params["task_id"]))

    async def list_models(self, _request: Request) -> Response:
        await self._parts.discover()
        await self._parts.look()
        return answer_json({"models": [await self._describe(model) for model in self._parts.pool.registry.models]})

    async def read_gpu_memory(self, _request: Request) -> Response:
        await self._parts.discover()
        reading = await self._parts.look()
        gpus = [
            {
                "index": gpu.index, "name": gpu.name, "used_mib": gpu.memory_used_mb, "total_mib": gpu.memory_total_mb,
                "used_over_total": f"{gpu.memory_used_mb}MiB / {gpu.memory_total_mb}MiB",
            }
            for gpu in reading.gpus
        ]  # fmt: skip
        error = None if gpus else f"no GPU was found; models use the memory of the host: {reading.free_mb} MiB are free"
        models = [await self._describe_memory(model) for model in self._parts.pool.registry.models]
        return answer_json({"gpus": gpus, "models": models, "error": error})

    async def load_and_wait(self, request: Request) -> Response:
        name, fields = request.path_params["name"], await read_object(request)
        overrides = without_token(fields)
        if overrides.pop("modelId", name) != name:
            raise InvalidRequest("modelId is another model than that of the path.", param="modelId")
        await self._parts.seek(name)
        model = self._parts.pool.registry.find(name)
        body = LoadBody(modelId=name, overrides=overrides, verifiedOpToken=fields.get(TOKEN_FIELD))
        reply = await self._parts.operations.load(body, {**overrides, "modelId": name})
        task_id = reply.body.get("taskId")
        if isinstance(task_id, str) and reply.body.get("status") != "completed":
            task = await self._parts.operations.wait(task_id)
            if task["status"] != "completed":
                raise ModelLoadFailed(f"{name} was not loaded: {task.get('error') or task['status']}")
        return answer_json(await self._describe(model))

    async def unload_and_wait(self, request: Request) -> Response:
        name, fields = request.path_params["name"], await read_object(request)
        others = set(fields) - {TOKEN_FIELD, "modelId"}
        if others or fields.get("modelId", name) != name:
            raise InvalidRequest(f"The body may have {TOKEN_FIELD} only; the model is that of the path.")
        body = UnloadBody(modelId=name, verifiedOpToken=fields.get(TOKEN_FIELD))
        await self._parts.operations.unload(body, {"modelId": name})
        return answer_json(await self._describe(self._parts.pool.registry.find(name)))

    async def reload_settings(self, request: Request) -> Response:
        await read_object(request)
        return answer_json(reload_fields(await self._parts.reload_settings()))

    async def _describe(self, model: Model) -> dict[str, object]:
        definition = model.definition
        return {
            **await self._describe_memory(model),
            "resolved_backend": definition.backend,
            "configured_enabled": definition.enabled,
            "replicas": count_replicas(definition, model.overrides),
            "replica_max": definition.replica_max,
            "loaded_replicas": sum(replica.supervisor.is_ready for replica in model.replicas),
            "inflight_requests": model.active,
            "queue_depth": model.queue.depth,
            "runtime_inflight": model.active,
            "fairness": _describe_fairness(model),
            "last_error": model.last_error,
            "load_constraints": load_constraints(definition),
            "load_recommendations": load_recommendations(definition),
            "load_override": model.overrides,
            "capabilities": _describe_capabilities(model),
            "definition": describe(definition),
        }

    async def _describe_memory(self, model: Model) -> dict[str, object]:
        size, source, count = await estimate_memory(self._parts, model)
        return {
            "name": model.model_id,
            "runtime_state": model.state.value,
            "is_loaded": model.is_ready,
            "configured_target_inflight": model.definition.target_inflight,
            "effective_target_inflight": effective_inflight(model),
            "vram_estimate_mib": None if size is None else ceil_mib(size),
            "vram_estimate_replica_count": count,
            "vram_estimate_source": source,
        }


def without_token(fields: dict[str, object]) -> dict[str, object]:
    """Return what an operation token may bind: every member of the body but itself."""
    return {name: value for name, value in fields.items() if name != TOKEN_FIELD}


def _answer(reply: Reply) -> Response:
    return answer_json(reply.body, reply.status)


def _describe_fairness(model: Model) -> dict[str, object]:
    queue = model.queue
    return {
        "rejected_per_key_limit": queue.rejected_per_key_limit,
        "rejected_executor_limit": queue.rejected_executor_limit,
        "keys": [
            {
                "fairness_key": key.tenant, "pending": key.pending, "active": key.active, "weight": key.weight,
                "score": round(score, 3), "rejected": key.rejected,
            }
            for key, score in queue.list_accounts()
        ],
    }  # fmt: skip


def _describe_capabilities(model: Model) -> dict[str, object]:
    found = model.capabilities
    return {
        "modalities": ["text", *(["image"] if found.vision_input else []), *(["audio"] if found.audio_input else [])],
        "file_inputs": [],
        "multi_turn": not model.replicas or "/v1/chat/completions" in found.endpoints,
        "thinking_modes": ["on", "off"] if _can_think(model) else [],
        "response_formats": ["text"],
        "endpoints": list(found.endpoints),
    }


def _can_think(model: Model) -> bool:
    return model.definition.enable_thinking is not None or model.definition.prompt_format == "gemma4_template"
