"""The route table: every endpoint once, with what it reads, what it answers and who serves it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runner.api import schemas
from runner.api.admin import Admin, Interruptible
from runner.api.bodies import BodyBudget, answer_json
from runner.api.capabilities import CapabilityReport, read_health
from runner.api.inference import InferenceEndpoint
from runner.api.page import write_page
from runner.api.schemas import Endpoint, describe_api
from runner.config import ApiConfig
from runner.engines.port import CHAT, COMPLETIONS, EMBEDDINGS, IMAGES, MESSAGES, RESPONSES, TOKENIZE, TRANSCRIPTIONS
from runner.errors import UnknownModel
from runner.limits import limits
from runner.operations.operation import FlushBody, LoadBody, UnloadBody
from runner.parts import Parts
from runner.pool.models import Model
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

_OBJECT = dict[str, object]
_OPERATIONS = frozenset({"load", "unload"})
"""Paths below /v1/models/ that are no models."""


class _Reads:
    def __init__(self, parts: Parts, report: CapabilityReport) -> None:
        self._parts = parts
        self._report = report

    async def capabilities(self, _request: Request) -> Response:
        headers = {"content-type": "application/json", "cache-control": f"max-age={limits().api.capabilities_s:.0f}"}
        return Response(await self._report.read(), headers=headers)

    async def health(self, _request: Request) -> Response:
        status, body = await read_health(self._parts)
        return answer_json(body, status)

    async def models(self, _request: Request) -> Response:
        ready = [model for model in self._parts.pool.registry.models if model.is_ready]
        return answer_json(schemas.ModelList(data=[_entry(model) for model in ready], models=[one.model_id for one in ready]))

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name in _OPERATIONS:
            raise HTTPException(405, headers={"Allow": "POST"})
        found = self._parts.pool.registry.find(name)
        if not found.is_ready:
            raise UnknownModel(f"{found.model_id} is not loaded on this node; it is {found.state}.")
        return answer_json(_entry(found))


def make_routes(parts: Parts, config: ApiConfig) -> tuple[list[Route], Callable[[], None]]:
    """Return the routes of the API's port, metrics included where they have no port of their own, and what ends its answers."""
    report = CapabilityReport(parts)
    reads, admin, slow, budget = _Reads(parts, report), Admin(parts), Interruptible(), BodyBudget()
    in_json, in_form = InferenceEndpoint(parts, budget, is_form=False), InferenceEndpoint(parts, budget, is_form=True)
    load, unload, flush = slow.wrap(admin.load), slow.wrap(admin.unload), slow.wrap(admin.flush)
    load_wait, unload_wait = slow.wrap(admin.load_and_wait), slow.wrap(admin.unload_and_wait)
    node, pool, models, said = "Runner", "llm-pool admin", "/v1/admin/models", schemas
    table = [
        *(Endpoint("POST", path, in_json, text, "Inference", request=BodyFields) for path, text in _INFERENCE),
        *(Endpoint("POST", path, in_form, text, "Inference", is_form=True) for path, text in _FORMS),
        Endpoint("GET", "/v1/capabilities", reads.capabilities, "What the node can do", node, None, said.CapabilitiesAnswer),
        Endpoint("GET", "/health", reads.health, "Whether the node is well", node, None, said.HealthAnswer),
        Endpoint("GET", "/v1/models", reads.models, "Loaded models", node, None, said.ModelList),
        Endpoint("POST", "/v1/models/load", load, "Load a model", node, LoadBody, said.TaskAnswer, status=202),
        Endpoint("GET", "/v1/models/load/{task_id}", admin.read_task, "How a load goes on", node, None, said.TaskAnswer),
        Endpoint("POST", "/v1/models/unload", unload, "Unload a model", node, UnloadBody, said.UnloadAnswer),
        Endpoint("POST", "/v1/cache/flush", flush, "Flush KV caches", node, FlushBody, said.FlushAnswer),
        *([_metrics_endpoint(parts)] if config.has_metrics and config.metrics_port is None else []),
        Endpoint("GET", models, admin.list_models, "Every model with its state, limits and queue", pool),
        Endpoint("GET", "/v1/admin/gpu-memory", admin.read_gpu_memory, "Memory of GPUs and models", pool),
        Endpoint("POST", f"{models}/{{name:path}}/load", load_wait, "Load a model and wait", pool, _OBJECT),
        Endpoint("POST", f"{models}/{{name:path}}/unload", unload_wait, "Unload a model and wait", pool, _OBJECT),
        Endpoint(
            "POST", "/v1/admin/settings/reload", admin.reload_settings, "Read the settings files again", pool,
            answer=said.ReloadAnswer,
        ),
        # Behind the operations, whose paths fit it too.
        Endpoint("GET", "/v1/models/{name:path}", reads.model, "A loaded model", node, None, said.ModelEntry),
    ]  # fmt: skip
    document = msgspec.json.encode(describe_api(table, has_key=bool(config.key)))

    async def openapi(_request: Request) -> Response:
        return Response(document, headers={"content-type": "application/json"})

    async def page(_request: Request) -> Response:
        return await write_page(parts, report, table)

    def close() -> None:
        for one in (in_json, in_form, slow):
            one.close()

    table += [
        Endpoint("GET", "/openapi.json", openapi, "This API as an OpenAPI 3.1 document", "Documents"),
        Endpoint("GET", "/", page, "This page", "Documents", media_type="text/html"),
    ]
    return [_route(one) for one in table], close


def make_metrics_routes(parts: Parts) -> list[Route]:
    return [_route(_metrics_endpoint(parts))]


def _metrics_endpoint(parts: Parts) -> Endpoint:
    async def metrics(request: Request) -> Response:
        from runner.api.metrics import write_metrics  # its library stays out of nodes that nobody scrapes

        body, content_type = await write_metrics(parts)
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    return Endpoint("GET", "/metrics", metrics, "Metrics for Prometheus", "Runner", media_type="text/plain")


def _route(one: Endpoint) -> Route:
    return Route(one.path, one.handler, methods=[one.method])


def _entry(model: Model) -> schemas.ModelEntry:
    return schemas.ModelEntry(id=model.model_id, created=int(model.loaded_at or 0), owned_by=model.definition.backend)
