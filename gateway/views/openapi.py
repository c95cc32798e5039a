"""``GET /openapi.json``: the client API as OpenAPI 3.1, written by hand from what the surfaces take and give.

A client library can be made from it, and a fuzzer is: what it says is held against the running gateway. What clients send has
the types of the originals, and what they get the parts that every engine has; fields that are not listed travel on, and
engines may say more. Sources: OpenAI API reference; Anthropic API reference; Cohere API reference, "Rerank".
"""

from __future__ import annotations

from typing import Any

import msgspec

from core.limits import limits
from gateway.dialects.surface import SURFACES
from wire import agent, bridge
from wire.bounds import BOUNDS
from wire.contract import ErrorCode

Schema = dict[str, Any]
"""A JSON Schema (draft 2020-12, the one of OpenAPI 3.1). Any: JSON."""

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
OBJECT: Schema = {"type": "object"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
_OF_THE_MODEL = "How much a model allows stands in GET /v1/models."
LIMIT: Schema = {**POSITIVE, "minimum": 0, "description": _OF_THE_MODEL}
POSITIVE_LIMIT: Schema = {**POSITIVE, "description": _OF_THE_MODEL}
_SAID = "A model, an alias of one, or auto."
MODEL: Schema = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": r"^[\x20-\x7e]+$", "description": _SAID}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def choice(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def listed(item: Schema, *, least: int = 0, most: int | None = None) -> Schema:
    bounds = {"minItems": least or None, "maxItems": most}
    return {"type": "array", "items": item, **{name: bound for name, bound in bounds.items() if bound is not None}}


def either(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    return either(schema, {"type": "null"})


def nullables(**properties: Schema) -> dict[str, Schema]:
    return {name: nullable(schema) for name, schema in properties.items()}


def members(required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object; ``required``: names with blanks between. It may have members that are not listed."""
    schema: Schema = {"type": "object", "properties": properties}
    return {**schema, "required": required.split()} if required else schema


def typed(kind: str, required: str = "", /, **properties: Schema) -> Schema:
    """Return the schema of an object whose ``type`` is that text, as the others of ``required`` are."""
    return members(f"type {required}", type={"const": kind}, **properties)


def _bounded(path: str, name: str) -> Schema:
    lowest, highest = BOUNDS[path][name]
    return {**NUMBER, "minimum": lowest} if highest is None else {**NUMBER, "minimum": lowest, "maximum": highest}


_CHAT, _MESSAGES = "/v1/chat/completions", "/v1/messages"
_POOL = {"x_pool_options": ref("PoolOptions")}
_SAMPLING = nullables(
    **{name: _bounded(_CHAT, name) for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")}
)
_STREAMED = {**nullables(stream=FLAG, stream_options=members(**nullables(include_usage=FLAG))), **_POOL}
_STOP = either(TEXT, listed(TEXT, most=4))
_FUNCTION = {"name": NAME, "description": TEXT, "parameters": OBJECT, "strict": nullable(FLAG)}
_CALL = typed("function", "id function", id=NAME, function=members("name arguments", name=NAME, arguments=TEXT))
_TEXT_PART = typed("text", "text", text=TEXT)
# What stands for a prompt beside one text: texts, tokens, or several lists of tokens.
_TOKENS = (listed(TEXT, least=1), listed(COUNT, least=1), listed(listed(COUNT, least=1), least=1))

_SOURCE = either(
    typed("base64", "media_type data", media_type=TEXT, data=TEXT),
    typed("url", "url", url=TEXT),
)
_SAID_BLOCK = either(_TEXT_PART, typed("image", "source", source=_SOURCE))
_ASSISTANT_BLOCK = either(
    _TEXT_PART,
    typed("thinking", "thinking signature", thinking=TEXT, signature=TEXT),
    typed("tool_use", "id name input", id=NAME, name=NAME, input=OBJECT),
)
_USER_BLOCK = either(
    _SAID_BLOCK,
    typed("tool_result", "tool_use_id", tool_use_id=NAME, content=either(TEXT, listed(_SAID_BLOCK)), is_error=FLAG),
)
_TOOL = members("name input_schema", name=NAME, input_schema=OBJECT, **nullables(type=TEXT, description=TEXT, strict=FLAG))
_PROMPT_OF_MESSAGES: dict[str, Schema] = {
    "model": MODEL,
    "messages": listed(ref("Message"), least=1),
    "system": either(TEXT, listed(_TEXT_PART)),
    "tools": listed(_TOOL),
    "tool_choice": either(
        members("type", type=choice("auto", "any", "none"), disable_parallel_tool_use=FLAG), typed("tool", "name", name=NAME)
    ),
    "thinking": either(
        typed("enabled", "budget_tokens", budget_tokens=POSITIVE), members("type", type=choice("disabled", "adaptive"))
    ),
    "n": {**nullable({"type": "integer", "const": 1}), "description": "A message has one answer."},
}

_INPUT_PART = either(
    typed("input_text", "text", text=TEXT),
    typed("input_image", "image_url", image_url=TEXT, detail=choice("low", "high", "auto")),
    typed("input_file", "file_data", file_data=TEXT, filename=TEXT),
)
_SAID_PART = either(typed("output_text", "text", text=TEXT), typed("refusal", "refusal", refusal=TEXT))
_MESSAGE_TYPE, _OF_ASSISTANT = {"const": "message"}, {"const": "assistant"}
_ITEM = either(
    members("role content", type=_MESSAGE_TYPE, role={"const": "user"}, content=either(TEXT, listed(_INPUT_PART))),
    members("role content", role=choice("system", "developer"), content=TEXT),
    members("type role content", type=_MESSAGE_TYPE, role=_OF_ASSISTANT, content=either(TEXT, listed(_SAID_PART))),
    typed("function_call", "call_id name arguments", call_id=NAME, name=NAME, arguments=TEXT),
    typed("function_call_output", "call_id output", call_id=NAME, output=either(TEXT, listed(_INPUT_PART))),
    typed("reasoning", "summary", summary=listed(typed("summary_text", "text", text=TEXT))),
)
_DECODING = {**members(**nullables(temperature=NUMBER, top_p=NUMBER, top_k=COUNT, repetition_penalty=NUMBER,
    max_tokens=POSITIVE_LIMIT, stop=listed(TEXT), beam_size=COUNT)), "additionalProperties": False}  # fmt: skip
_LANGUAGE = {**nullable(TEXT), "description": "Only where a node answers llm-pool's form of this path itself."}
_RESPONSE = members(
    "model input", model=MODEL, input=either(NAME, listed(ref("InputItem"), least=1)),
    store={**nullable(FLAG), "description": "True only where the tenant keeps answers."},
    previous_response_id={**nullable(TEXT), "description": "Only where the tenant keeps answers."},
    source_lang_code=_LANGUAGE, target_lang_code=_LANGUAGE,
    **nullables(
        instructions=TEXT, max_output_tokens=POSITIVE_LIMIT, top_logprobs={**COUNT, "maximum": 20},
        tools=listed(typed("function", "name", **_FUNCTION)), tool_choice=choice("none", "auto"), parallel_tool_calls=FLAG,
        text=members(format=members("type", type=choice("text", "json_object")), verbosity=nullable(TEXT)),
        reasoning=members(**nullables(effort=TEXT, summary=TEXT)), metadata={"type": "object", "additionalProperties": TEXT},
        stream=FLAG, user=TEXT, max_tool_calls=COUNT, include=listed(TEXT), truncation=choice("auto", "disabled"),
        service_tier=TEXT, safety_identifier=TEXT, prompt_cache_key=TEXT, decoding=_DECODING, allow_remote=FLAG,
    ),
    **_POOL, **_SAMPLING,
)  # fmt: skip
_OF_COMPACTIONS = ("model", "input", "instructions", "previous_response_id", "service_tier", "prompt_cache_key", "allow_remote")

BODIES: dict[str, Schema] = {
    "PoolOptions": members(fallback_models=listed(MODEL, most=limits().gateway.fallbacks), **nullables(prefer_gpu=TEXT,
        max_latency_ms={**COUNT, "maximum": limits().gateway.latency_ms}, priority=choice("high", "normal", "low"),
        resume=FLAG)),
    "TicketWish": members("model", model=MODEL, prompt_tokens_est=POSITIVE, dialects=listed(choice("chat", "completions",
        "embeddings", "messages", "responses"), least=1, most=5), max_tokens=nullable(LIMIT), **_POOL),
    "ImagePart": typed("image_url", "image_url", image_url=members("url", url=TEXT)),
    "ChatMessage": members("role", role=choice("system", "developer", "user", "assistant", "tool"),
        content=nullable(either(TEXT, listed(either(_TEXT_PART, ref("ImagePart"))))), name=TEXT, tool_calls=listed(_CALL),
        tool_call_id=TEXT),
    "ChatRequest": members("model messages", model=MODEL, messages=listed(ref("ChatMessage"), least=1),
        **nullables(max_tokens=POSITIVE_LIMIT, max_completion_tokens=POSITIVE_LIMIT, stop=_STOP, n={**POSITIVE, "maximum":
        BOUNDS[_CHAT]["n"][1]}, seed={"type": "integer"}, logprobs=FLAG, top_logprobs={**COUNT, "maximum": 20},
        tools=listed(typed("function", "function", function=members("name", **_FUNCTION))),
        tool_choice=either(choice("none", "auto", "required"), OBJECT), parallel_tool_calls=FLAG,
        response_format=members("type", type=choice("text", "json_object", "json_schema")), reasoning_effort=TEXT,
        user=TEXT), **_SAMPLING, **_STREAMED),
    "CompletionRequest": members("model prompt", model=MODEL, prompt=either(TEXT, *_TOKENS), **nullables(max_tokens=LIMIT,
        echo=FLAG, logprobs={**COUNT, "maximum": 5}, stop=_STOP), **_SAMPLING, **_STREAMED),
    "Message": either(members("role content", role={"const": "user"}, content=either(TEXT, listed(_USER_BLOCK))),
        members("role content", role=_OF_ASSISTANT, content=either(TEXT, listed(_ASSISTANT_BLOCK)))),
    "MessagesRequest": members("model messages max_tokens", **_PROMPT_OF_MESSAGES, max_tokens=POSITIVE_LIMIT, stream=FLAG,
        stop_sequences=listed(TEXT), temperature=_bounded(_MESSAGES, "temperature"), top_p=_bounded(_MESSAGES, "top_p"),
        top_k=COUNT, metadata=members(user_id=nullable(TEXT)), **_POOL),
    "CountTokensRequest": members("model messages", **_PROMPT_OF_MESSAGES),
    "InputItem": _ITEM,
    "ResponsesRequest": _RESPONSE,
    "CompactRequest": members("model input", **{name: _RESPONSE["properties"][name] for name in _OF_COMPACTIONS}, **_POOL),
    "EmbeddingsRequest": members("model input", model=MODEL, input=either(NAME, *_TOKENS), encoding_format=choice("float",
        "base64"), dimensions=POSITIVE, **_POOL),
    "RerankRequest": members("model query documents", model=MODEL, query=TEXT, documents=listed(either(TEXT, members("text",
        text=TEXT)), least=1), top_n=POSITIVE, return_documents=FLAG, **_POOL),
    "ImageRequest": members("model prompt", model=MODEL, prompt=NAME, **nullables(n=POSITIVE, size=TEXT), **_POOL),
    "AudioRequest": members("model file", model=MODEL, file={"type": "string", "format": "binary"}, language=TEXT,
        prompt=TEXT, response_format=choice("json", "text", "srt", "vtt", "verbose_json"), temperature=NUMBER,
        stream=choice("true", "false")),
}  # fmt: skip
"""Schemas of request bodies and their parts, by the names they have in the document."""

_CODE = {"type": "string", "enum": sorted(code.value for code in ErrorCode)}
_USAGE = members(
    "prompt_tokens completion_tokens total_tokens", prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT
)
_MESSAGE = members("role", role=_OF_ASSISTANT, **nullables(content=TEXT, tool_calls=listed(OBJECT)))
_MODEL = either(members("id object created owned_by", id=NAME, object={"const": "model"}, created=COUNT, owned_by=TEXT),
    typed("model", "id display_name created_at", id=NAME, display_name=TEXT, created_at=TEXT))  # fmt: skip


def _completion(kind: str, answer: Schema) -> Schema:
    choices, usage = listed(answer), nullable(_USAGE)
    named: dict[str, Schema] = {"id": TEXT, "object": {"const": kind}, "created": NUMBER, "model": TEXT}
    return members("id object created model choices", **named, choices=choices, usage=usage)


ANSWERS: dict[str, Schema] = {
    "OpenAIError": members("error", error=members("message type param code retryable", message=NAME, type=TEXT,
        param={**nullable(TEXT), "description": "The field at fault, for example messages[0].content[1].type."}, code=_CODE,
        retryable=FLAG)),
    "Ticket": members("ticket ticket_id base_url expires_at model node_id", ticket=NAME, ticket_id=NAME, base_url=NAME,
        expires_at={**TEXT, "format": "date-time"}, model=NAME, node_id=NAME, ca_url=NAME),
    "RelayAdvice": members("relay base_url", relay={"const": True}, base_url=NAME),
    "TicketEvent": {"oneOf": [
        members("type reason new_ticket base_url", type={"const": "x_pool_failover"}, reason=choice("gpu_timeout", "gpu_lost",
            "gpu_reclaimed", "gpu_draining"), new_ticket={**nullable(TEXT), "description": "null: ask the gateway, base_url."},
            base_url=NAME, ticket_id=NAME, expires_at={**TEXT, "format": "date-time"}, model=NAME, node_id=NAME),
        members("type", type={"const": "x_pool_end"}),
    ]},
    "AnthropicError": members("type error request_id", type={"const": "error"}, error=members("type message", type=TEXT,
        message=NAME, code=_CODE, retryable=FLAG, param=nullable(TEXT)), request_id=NAME),
    "ChatAnswer": _completion("chat.completion", members("index message", index=COUNT, message=_MESSAGE,
        finish_reason=nullable(TEXT))),
    "CompletionAnswer": _completion("text_completion", members("index text", index=COUNT, text=TEXT,
        finish_reason=nullable(TEXT))),
    "MessageAnswer": members("id type role model content stop_reason usage", id=NAME, type=_MESSAGE_TYPE,
        role=_OF_ASSISTANT, model=TEXT, content=listed(members("type", type=NAME)), **nullables(stop_reason=TEXT,
        stop_sequence=TEXT), usage=members("input_tokens output_tokens", input_tokens=COUNT, output_tokens=COUNT)),
    "Compaction": members("id object created_at output usage", id=TEXT, object={"const": "response.compaction"},
        created_at=COUNT, output=listed(members("id type", id=TEXT, type=TEXT, encrypted_content=TEXT), least=1),
        usage=nullable(members("input_tokens output_tokens", input_tokens=COUNT, output_tokens=COUNT))),
    "TokenCount": members("input_tokens", input_tokens=COUNT, estimated=FLAG, object=TEXT),
    "Response": members("id object created_at status model output", id=NAME, object={"const": "response"},
        created_at=NUMBER, status=choice("completed", "incomplete", "failed", "in_progress"), model=TEXT,
        output=listed(OBJECT), usage=nullable(OBJECT)),
    "DeletedResponse": members("id object deleted", id=NAME, object={"const": "response"}, deleted=FLAG),
    "InputItems": members("object data has_more", object={"const": "list"}, data=listed(OBJECT), has_more=FLAG),
    "Embeddings": members("object data model", object={"const": "list"}, model=TEXT,
        data=listed(members("object index embedding", object={"const": "embedding"}, index=COUNT))),
    "Ranking": members("results", results=listed(members("index relevance_score", index=COUNT, relevance_score=NUMBER))),
    "Transcript": members("text", text=TEXT),
    "Event": {**members("data", data=TEXT, event=TEXT), "description":
        "One server-sent event: data is JSON, or [DONE] behind the last one where OpenAI ends its streams so."},
    "Images": members("created data", created=NUMBER, data=listed(OBJECT)),
    "Model": _MODEL,
    "ModelList": members("data", object={"const": "list"}, data=listed(_MODEL), has_more=FLAG),
    "Index": members("service version models health", service=TEXT, version=TEXT, models=TEXT, health=TEXT),
    "Health": members("ok status version", ok=FLAG, status=choice("ok", "degraded"), version=TEXT),
}  # fmt: skip
"""Schemas of answers and errors, by the names they have in the document."""

_JSON, _STREAM, _FORM = "application/json", "text/event-stream", "multipart/form-data"
_ERRORS = {
    400: "Something in the request is at fault; param names the field.",
    401: "No usable key.",
    403: "Not permitted to whoever asks.",
    404: "No such model, response or path.",
    408: "The request did not arrive in time.",
    413: "More bytes or values than are accepted.",
    415: "A body that is compressed, or not said to be JSON.",
    429: "Too many requests of this key.",
    431: "More headers than are accepted.",
    500: "A fault of the gateway, or the engine's own.",
    502: "The node or its engine failed.",
    503: "No node is free, or can be asked.",
    504: "The request was too slow.",
}
# What a request without a body can come to.
_OF_LISTS = (401, 408, 413, 431, 500, 503)
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
    failures = {str(status): {"$ref": f"#/components/responses/{shape}{status}"} for status in errors}
    return {"200": {"description": "The answer.", "content": _content(schema, *types)}, **failures}


def make_failures() -> Schema:
    return {
        f"{shape}{status}": {"description": text, "content": _content(shape, _JSON)}
        for shape in ("OpenAIError", "AnthropicError")
        for status, text in _ERRORS.items()
    }


def _ask(name: str, body: str, answer: str, *types: str, path: str) -> Schema:
    surface = SURFACES[path]
    shape = "AnthropicError" if surface.is_anthropic else "OpenAIError"
    operation: Schema = {
        "operationId": name,
        "parameters": [*_CACHE_HEADERS, *(_ANTHROPIC_HEADERS if surface.is_anthropic else [])],
        "requestBody": {"required": True, "content": {_FORM if surface.is_form else _JSON: {"schema": ref(body)}}},
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
    _CHAT: _ask("createChatCompletion", "ChatRequest", "ChatAnswer", *_TALK, path=_CHAT),
    "/v1/completions": _ask("createCompletion", "CompletionRequest", "CompletionAnswer", *_TALK, path="/v1/completions"),
    _MESSAGES: _ask("createMessage", "MessagesRequest", "MessageAnswer", *_TALK, path=_MESSAGES),
    "/v1/messages/count_tokens": _ask("countMessageTokens", "CountTokensRequest", "TokenCount", path="/v1/messages"),
    "/v1/responses": _ask("createResponse", "ResponsesRequest", "Response", *_TALK, path="/v1/responses"),
    "/v1/responses/compact": _ask("compactResponse", "CompactRequest", "Compaction", path="/v1/responses/compact"),
    "/v1/responses/input_tokens": _ask("countResponseTokens", "ResponsesRequest", "TokenCount", path="/v1/responses"),
    "/v1/responses/{response_id}": {"parameters": [_RESPONSE_ID], "get": _read("getResponse", "Response", errors=(400,
        *_WITH_MISSING)), "delete": _read("deleteResponse", "DeletedResponse", errors=_WITH_MISSING)},
    "/v1/responses/{response_id}/cancel": {"parameters": [_RESPONSE_ID], "post": _read("cancelResponse", "Response",
        errors=(400, *_WITH_MISSING))},
    "/v1/responses/{response_id}/input_items": {"parameters": [_RESPONSE_ID], "get": _read("listInputItems", "InputItems",
        _query("limit", {**COUNT, "minimum": 1, "maximum": 100}), _query("order", choice("asc", "desc")), _query("after",
        NAME), errors=(400, *_WITH_MISSING))},
    "/v1/embeddings": _ask("createEmbedding", "EmbeddingsRequest", "Embeddings", path="/v1/embeddings"),
    "/v1/rerank": _ask("rerank", "RerankRequest", "Ranking", path="/v1/rerank"),
    "/v1/audio/transcriptions": _ask("createTranscription", "AudioRequest", "Transcript", *_SPEECH,
        path="/v1/audio/transcriptions"),
    "/v1/audio/translations": _ask("createTranslation", "AudioRequest", "Transcript", *_SPEECH,
        path="/v1/audio/translations"),
    "/v1/images/generations": _ask("createImage", "ImageRequest", "Images", path="/v1/images/generations"),
    "/v1/tickets": {"post": {
        "operationId": "createTicket",
        "requestBody": {"required": True, "content": {_JSON: {"schema": ref("TicketWish")}}},
        "responses": {
            "201": {"description": "A ticket to a node.", "content": _content("Ticket", _JSON)},
            **_answers("RelayAdvice", _JSON, errors=tuple(_ERRORS), shape="OpenAIError"),
        },
    }},
    "/v1/tickets/{ticket_id}/events": {"get": {
        "operationId": "followTicket",
        "parameters": [{"name": "ticket_id", "in": "path", "required": True, "schema": NAME}],
        "responses": {
            **_answers("TicketEvent", _JSON, errors=_WITH_MISSING, shape="OpenAIError"),
            "200": {"description": "Says when the node of the ticket is lost, or that its request has ended.",
                "content": {_STREAM: {"schema": ref("TicketEvent")}}},
        },
    }},
    "/v1/models": {"get": _read("listModels", "ModelList", *_ANTHROPIC_HEADERS[:1], _query("limit", {**COUNT, "minimum": 1,
        "maximum": 1000}), _query("after_id", NAME), _query("before_id", NAME), errors=_WITH_BAD, is_public=True)},
    "/v1/models/{model}": {"get": _read("getModel", "Model", {"name": "model", "in": "path", "required": True, "schema":
        NAME}, errors=_WITH_MISSING, is_public=True)},
    "/v1/ca": {"get": {
        "operationId": "getNodeAuthorities",
        "responses": {
            "200": {"description": "The internal CAs that nodes are verified with.", "content": {"application/x-pem-file":
                {"schema": TEXT}}},
            "404": {"description": "There is none.", "content": _content("OpenAIError", _JSON)},
        },
        "security": [{}],
    }},
    "/health": {"get": _read("getHealth", "Health", is_public=True)},
    "/": {"get": _read("getIndex", "Index", is_public=True)},
}  # fmt: skip
"""Every path with its operations."""


_SESSION_ID: Schema = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string", "format": "uuid"}}
_OF_AGENTS = (400, 401, 403, 404, 408, 413, 415, 429, 431, 500, 503)


def _tell(name: str, body: str, answer: str, *parameters: Schema) -> Schema:
    """Return an operation of agents: they show a node credential, or in a session its id."""
    return {
        "operationId": name,
        "tags": ["agents"],
        "parameters": list(parameters),
        "requestBody": {"required": True, "content": {_JSON: {"schema": ref(body)}}},
        "responses": _answers(answer, _JSON, errors=_OF_AGENTS, shape="OpenAIError"),
        "security": [{"node": []}, {}],
    }


_WAIT = _query("wait", {**NUMBER, "minimum": 0, "description": "Seconds to wait for a command"})
AGENT_PATHS: dict[str, Schema] = {
    "/api/v1/register": {"post": _tell("registerAgent", "AgentRegister", "AgentRegistered")},
    "/api/v1/session/{session_id}": {
        "parameters": [_SESSION_ID],
        "post": _tell("tellAgentSession", "AgentMessage", "AgentCommands", _WAIT),
    },
}
"""Paths of agents, whose schemas are made from ``wire.agent``."""


def make_agent_schemas() -> dict[str, Schema]:
    """Return the schemas of what agents send and get."""
    sent = [agent.AgentHeartbeat, agent.AgentCommandStatus, bridge.UsageReport]
    kinds = [agent.AgentRegister, agent.AgentRegistered, agent.AgentCommand, *sent]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    message = either(*(ref(kind.__name__) for kind in sent))
    statuses = {"type": "object", "additionalProperties": TEXT}
    commands = members("commands", commands=listed(ref("AgentCommand")), status=TEXT, should_drain=FLAG, taken=statuses,
        refused=statuses, ticket_keys=listed(ref("TicketPublicKey")))  # fmt: skip
    return {**schemas, "AgentMessage": message, "AgentCommands": commands}


def make_document(version: str) -> Schema:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Muster gateway",
            "version": version,
            "description": "The APIs of OpenAI and Anthropic in front of nodes that people own.",
        },
        "paths": {**PATHS, **AGENT_PATHS},
        "components": {
            "schemas": {**make_agent_schemas(), **BODIES, **ANSWERS},
            "responses": make_failures(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "A client key, mst_…"},
                "node": {"type": "http", "scheme": "bearer", "description": "A node credential, msw_…, or a JWT of an agent"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
        "security": [{"bearer": []}, {"header": []}],
    }
