"""The route table: every endpoint once, with what it reads, what it answers and who serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runner.api import answers
from runner.api.admin import Interruptible, Lifecycle, PoolAdmin
from runner.api.bodies import BodyBudget
from runner.api.capabilities import CapabilityReport, read_health
from runner.api.inference import InferenceEndpoint
from runner.api.openapi import Endpoint, describe_api
from runner.api.page import write_page
from runner.config import ApiConfig
from runner.engines.port import CHAT, COMPLETIONS, EMBEDDINGS, IMAGES, MESSAGES, RESPONSES, TOKENIZE, TRANSCRIPTIONS
from runner.errors import UnknownModel
from runner.limits import limits
from runner.operations.operation import FlushBody, LoadBody, UnloadBody
from runner.parts import Parts
from runner.pool import Model
from runner.report import Shapes
from runner.serving.request import BodyFields

TRANSLATIONS = "/v1/audio/translations"
_INFERENCE: Sequence[tuple[str, str]] = (
    (CHAT, "Chat completion"),
    (COMPLETIONS, "Text completion"),
    (EMBEDDINGS, "Embeddings"),
    (RESPONSES, "Responses, in the shape of OpenAI or of llm-pool"),
    (MESSAGES, "Messages, in the shape of Anthropic"),
    (IMAGES, "Images from a text"),
    (TOKENIZE, "How many tokens a prompt has"),
)
_FORMS: Sequence[tuple[str, str]] = ((TRANSCRIPTIONS, "Speech to text"), (TRANSLATIONS, "Speech to English text"))

_OPERATIONS = frozenset({"load", "unload"})
"""Paths below /v1/models/ that are no models."""


@dataclass(frozen=True, slots=True)
class Routes:
    """The routes of one port, and what ends the answers under way."""

    routes: list[Route]
    close: Callable[[], None]


def make_routes(parts: Parts, config: ApiConfig) -> Routes:
    shapes = Shapes()
    report, lifecycle, pool = CapabilityReport(parts, shapes), Lifecycle(parts), PoolAdmin(parts, shapes)
    has_metrics = config.has_metrics and config.metrics_port is None
    slow, budget = Interruptible(), BodyBudget()
    table = [
        *_runner_endpoints(parts, report),
        *_lifecycle_endpoints(lifecycle, slow),
        *([_metrics_endpoint(parts)] if has_metrics else []),
        *_pool_endpoints(pool, slow),
        _model_endpoint(parts),
    ]
    json_door, form_door = InferenceEndpoint(parts, budget, is_form=False), InferenceEndpoint(parts, budget, is_form=True)
    table[:0] = [
        *(Endpoint("POST", path, json_door, text, "Inference", request=BodyFields) for path, text in _INFERENCE),
        *(Endpoint("POST", path, form_door, text, "Inference", is_form=True) for path, text in _FORMS),
    ]
    table += _page_endpoints(parts, report, table, has_key=bool(config.key))

    def close() -> None:
        json_door.close()
        form_door.close()
        slow.close()

    return Routes([Route(one.path, one.handler, methods=[one.method]) for one in table], close)


def make_metrics_routes(parts: Parts) -> Routes:
    one = _metrics_endpoint(parts)
    return Routes([Route(one.path, one.handler, methods=[one.method])], lambda: None)


def _runner_endpoints(parts: Parts, report: CapabilityReport) -> list[Endpoint]:
    async def capabilities(_request: Request) -> Response:
        headers = {"content-type": "application/json", "cache-control": f"max-age={limits().api.capabilities_s:.0f}"}
        return Response(await report.read(), headers=headers)

    async def health(_request: Request) -> Response:
        status, body = await read_health(parts)
        return _json(body, status=status)

    async def models(_request: Request) -> Response:
        ready = [model for model in parts.pool.registry.models if model.is_ready]
        entries = [_entry(model) for model in ready]
        return _json(answers.ModelList(data=entries, models=[model.model_id for model in ready]))

    tag = "Runner"
    return [
        Endpoint("GET", "/v1/capabilities", capabilities, "What the box can do now", tag, answer=answers.CapabilitiesAnswer),
        Endpoint("GET", "/health", health, "Whether the box is well", tag, answer=answers.HealthAnswer),
        Endpoint("GET", "/v1/models", models, "Loaded models", tag, answer=answers.ModelList),
    ]


def _model_endpoint(parts: Parts) -> Endpoint:
    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name in _OPERATIONS:
            raise HTTPException(405, headers={"Allow": "POST"})
        found = parts.pool.registry.find(name)
        if not found.is_ready:
            raise UnknownModel(f"{found.model_id} is not loaded on this box; it is {found.state}.")
        return _json(_entry(found))

    # The last of the table: its path fits those of operations too.
    return Endpoint("GET", "/v1/models/{name:path}", model, "A loaded model", "Runner", answer=answers.ModelEntry)


def _lifecycle_endpoints(lifecycle: Lifecycle, slow: Interruptible) -> list[Endpoint]:
    tag, load, unload, flush = "Runner", slow.wrap(lifecycle.load), slow.wrap(lifecycle.unload), slow.wrap(lifecycle.flush)
    return [
        Endpoint("POST", "/v1/models/load", load, "Load a model", tag, LoadBody, answers.TaskAnswer, status=202),
        Endpoint("GET", "/v1/models/load/{task_id}", lifecycle.read_task, "How a load goes on", tag, answer=answers.TaskAnswer),
        Endpoint("POST", "/v1/models/unload", unload, "Unload a model", tag, UnloadBody, answers.UnloadAnswer),
        Endpoint("POST", "/v1/cache/flush", flush, "Flush KV caches", tag, FlushBody, answers.FlushAnswer),
    ]


def _metrics_endpoint(parts: Parts) -> Endpoint:
    async def metrics(request: Request) -> Response:
        from runner.api.metrics import write_metrics  # its library stays out of boxes that nobody scrapes

        body, content_type = await write_metrics(parts, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    return Endpoint("GET", "/metrics", metrics, "Metrics for Prometheus", "Runner", media_type="text/plain")


def _pool_endpoints(pool: PoolAdmin, slow: Interruptible) -> list[Endpoint]:
    tag, path = "llm-pool admin", "/v1/admin/models"
    load, unload = slow.wrap(pool.load), slow.wrap(pool.unload)
    return [
        Endpoint("GET", path, pool.list_models, "Every model with its state, limits and queue", tag),
        Endpoint("GET", "/v1/admin/gpu-memory", pool.read_gpu_memory, "Memory of GPUs and models", tag),
        Endpoint("POST", f"{path}/{{name:path}}/load", load, "Load a model and wait", tag, dict[str, object]),
        Endpoint("POST", f"{path}/{{name:path}}/unload", unload, "Unload a model and wait", tag, dict[str, object]),
        Endpoint(
            "POST", "/v1/admin/settings/reload", pool.reload_settings, "Read the settings files again", tag,
            answer=answers.ReloadAnswer,
        ),
    ]  # fmt: skip


def _page_endpoints(parts: Parts, report: CapabilityReport, table: list[Endpoint], *, has_key: bool) -> list[Endpoint]:
    document = msgspec.json.encode(describe_api(table, has_key=has_key))

    async def openapi(_request: Request) -> Response:
        return Response(document, headers={"content-type": "application/json"})

    async def page(_request: Request) -> Response:
        return await write_page(parts, report, table)

    return [
        Endpoint("GET", "/openapi.json", openapi, "This API as an OpenAPI 3.1 document", "Documents"),
        Endpoint("GET", "/", page, "This page", "Documents", media_type="text/html"),
    ]


def _entry(model: Model) -> answers.ModelEntry:
    return answers.ModelEntry(id=model.model_id, created=int(model.loaded_at or 0), owned_by=model.definition.backend)


def _json(body: msgspec.Struct, *, status: int = 200) -> Response:
    headers = {"content-type": "application/json", "cache-control": "no-store"}
    return Response(msgspec.json.encode(body), status, headers)
