"""The API as an OpenAPI 3.1 document, made of the route table and of the types that requests and answers have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from runner import AGENT_VERSION
from runner.api.answers import ErrorAnswer, PoolErrorAnswer
from runner.errors import ADMIN_PREFIX

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
        "info": {"title": "Muster box", "version": AGENT_VERSION, "description": "Models on one box: lifecycle and inference."},
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
