"""The paths and what can be done on each."""

from __future__ import annotations

from gateway.dialects import SURFACES
from gateway.views.openapi.terms import COUNT, NAME, TEXT, Schema, choice, ref

_JSON, _STREAM, _FORM = "application/json", "text/event-stream", "multipart/form-data"
_ERRORS = {
    400: "Something in the request is at fault; param names the field.",
    401: "No usable key.",
    404: "No such model, response or path.",
    408: "The request did not arrive in time.",
    413: "More bytes or values than are accepted.",
    415: "A body that is compressed, or not said to be JSON.",
    429: "Too many requests of this key.",
    431: "More headers than are accepted.",
    500: "A fault of the gateway, or the engine's own.",
    502: "The box or its engine failed.",
    503: "No box is free, or can be asked.",
    504: "The request was too slow.",
}
_OF_LISTS = (401, 408, 413, 431, 500, 503)
"""What a request without a body can come to."""
_ANTHROPIC_HEADERS: list[Schema] = [
    {"name": "anthropic-version", "in": "header", "schema": TEXT},
    {"name": "anthropic-beta", "in": "header", "schema": TEXT},
]
_CACHE_HEADERS: list[Schema] = [
    {"name": "x-cache-mode", "in": "header", "schema": choice("prefix", "none", "auto")},
    {"name": "x-cache-tag", "in": "header", "schema": {"type": "string", "pattern": "^[A-Za-z0-9._:-]{1,64}$"}},
]
_RESPONSE_ID: Schema = {"name": "response_id", "in": "path", "required": True, "schema": NAME}


def _content(schema: str, *types: str) -> Schema:
    """Return the content of an answer. Of a stream, tools for OpenAPI 3.1 take the schema for that of each event."""
    schemas = {_STREAM: ref("Event"), "text/plain": TEXT}
    return {kind: {"schema": schemas.get(kind, ref(schema))} for kind in types}


def _answers(schema: str, *types: str, errors: tuple[int, ...], shape: str) -> Schema:
    """Return the answers of an operation. ``errors``: the statuses that an error may have."""
    failures = {str(status): {"$ref": f"#/components/responses/{shape}{status}"} for status in errors}
    return {"200": {"description": "The answer.", "content": _content(schema, *types)}, **failures}


def make_failures() -> Schema:
    """Return every answer that is an error, by the name that operations call it by."""
    return {
        f"{shape}{status}": {"description": text, "content": _content(shape, _JSON)}
        for shape in ("OpenAIError", "AnthropicError")
        for status, text in _ERRORS.items()
    }


def _ask(name: str, body: str, answer: str, *types: str, path: str = "", parameters: list[Schema] | None = None) -> Schema:
    """Return a path on which something is asked of a model. ``path``: its surface."""
    surface = SURFACES[path] if path else None
    is_anthropic = surface is not None and surface.is_anthropic
    shape = "AnthropicError" if is_anthropic else "OpenAIError"
    headers = [*_CACHE_HEADERS, *(_ANTHROPIC_HEADERS if is_anthropic else [])] if parameters is None else parameters
    operation: Schema = {
        "operationId": name,
        "parameters": headers,
        "requestBody": {"required": True, "content": {_FORM if surface and surface.is_form else _JSON: {"schema": ref(body)}}},
        "responses": _answers(answer, *(types or (_JSON,)), errors=tuple(_ERRORS), shape=shape),
    }
    return {"post": operation}


def _read(name: str, answer: str, *parameters: Schema, errors: tuple[int, ...] = _OF_LISTS, is_public: bool = False) -> Schema:
    operation: Schema = {
        "operationId": name,
        "parameters": list(parameters),
        "responses": _answers(answer, _JSON, errors=errors, shape="OpenAIError"),
    }
    return {**operation, "security": [{}, {"bearer": []}, {"header": []}]} if is_public else operation


def _query(name: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "schema": schema}


_WITH_BAD = (400, *_OF_LISTS)
_WITH_MISSING = (404, *_OF_LISTS)
_TALK = (_JSON, _STREAM)
_SPEECH = (_JSON, _STREAM, "text/plain")
PATHS: dict[str, Schema] = {
    "/v1/chat/completions": _ask("createChatCompletion", "ChatRequest", "ChatAnswer", *_TALK, path="/v1/chat/completions"),
    "/v1/completions": _ask("createCompletion", "CompletionRequest", "CompletionAnswer", *_TALK, path="/v1/completions"),
    "/v1/messages": _ask("createMessage", "MessagesRequest", "MessageAnswer", *_TALK, path="/v1/messages"),
    "/v1/messages/count_tokens": _ask("countMessageTokens", "CountTokensRequest", "TokenCount", path="/v1/messages"),
    "/v1/responses": _ask("createResponse", "ResponsesRequest", "Response", *_TALK, path="/v1/responses"),
    "/v1/responses/compact": _ask("compactResponse", "CompactRequest", "Compaction", path="/v1/responses/compact"),
    "/v1/responses/input_tokens": _ask("countResponseTokens", "ResponsesRequest", "TokenCount", path="/v1/responses"),
    "/v1/responses/{response_id}": {
        "parameters": [_RESPONSE_ID],
        "get": _read("getResponse", "Response", errors=(400, *_WITH_MISSING)),
        "delete": _read("deleteResponse", "DeletedResponse", errors=_WITH_MISSING),
    },
    "/v1/responses/{response_id}/cancel": {
        "parameters": [_RESPONSE_ID],
        "post": _read("cancelResponse", "Response", errors=(400, *_WITH_MISSING)),
    },
    "/v1/responses/{response_id}/input_items": {
        "parameters": [_RESPONSE_ID],
        "get": _read(
            "listInputItems",
            "InputItems",
            _query("limit", {**COUNT, "minimum": 1, "maximum": 100}),
            _query("order", choice("asc", "desc")),
            _query("after", NAME),
            errors=(400, *_WITH_MISSING),
        ),
    },
    "/v1/embeddings": _ask("createEmbedding", "EmbeddingsRequest", "Embeddings", path="/v1/embeddings"),
    "/v1/rerank": _ask("rerank", "RerankRequest", "Ranking", path="/v1/rerank"),
    "/v1/audio/transcriptions": _ask(
        "createTranscription", "AudioRequest", "Transcript", *_SPEECH, path="/v1/audio/transcriptions"
    ),
    "/v1/audio/translations": _ask("createTranslation", "AudioRequest", "Transcript", *_SPEECH, path="/v1/audio/translations"),
    "/v1/images/generations": _ask("createImage", "ImageRequest", "Images", path="/v1/images/generations"),
    "/v1/models": {
        "get": _read(
            "listModels",
            "ModelList",
            *_ANTHROPIC_HEADERS[:1],
            _query("limit", {**COUNT, "minimum": 1, "maximum": 1000}),
            _query("after_id", NAME),
            _query("before_id", NAME),
            errors=_WITH_BAD,
            is_public=True,
        )
    },
    "/v1/models/{model}": {
        "get": _read(
            "getModel",
            "Model",
            {"name": "model", "in": "path", "required": True, "schema": NAME},
            errors=_WITH_MISSING,
            is_public=True,
        ),
    },
    "/health": {"get": _read("getHealth", "Health", is_public=True)},
    "/": {"get": _read("getIndex", "Index", is_public=True)},
}  # fmt: skip
"""Every path with its operations."""
