"""What clients get: the parts of an answer that every engine has, and errors. Engines may say more.

Sources: OpenAI API reference; Anthropic API reference.
"""

from __future__ import annotations

from gateway.views.openapi.terms import (
    COUNT,
    FLAG,
    NAME,
    NUMBER,
    OBJECT,
    TEXT,
    Schema,
    choice,
    const,
    either,
    listed,
    members,
    nullable,
)
from wire.contract import ErrorCode

_CODE = {"type": "string", "enum": sorted(code.value for code in ErrorCode)}
_USAGE = members(
    "prompt_tokens completion_tokens total_tokens", prompt_tokens=COUNT, completion_tokens=COUNT, total_tokens=COUNT
)
_MESSAGE = members("role", role=const("assistant"), content=nullable(TEXT), tool_calls=nullable(listed(OBJECT)))
_MODEL = either(
    members("id object created owned_by", id=NAME, object=const("model"), created=COUNT, owned_by=TEXT),
    members("id type display_name created_at", id=NAME, type=const("model"), display_name=TEXT, created_at=TEXT),
)
_RESPONSE = members(
    "id object created_at status model output",
    id=NAME,
    object=const("response"),
    created_at=NUMBER,
    status=choice("completed", "incomplete", "failed", "in_progress"),
    model=TEXT,
    output=listed(OBJECT),
    usage=nullable(OBJECT),
)

ANSWERS: dict[str, Schema] = {
    "OpenAIError": members(
        "error",
        error=members(
            "message type param code retryable",
            message=NAME,
            type=TEXT,
            param={**nullable(TEXT), "description": "The field at fault, for example messages[0].content[1].type."},
            code=_CODE,
            retryable=FLAG,
        ),
    ),
    "AnthropicError": members(
        "type error request_id",
        type=const("error"),
        error=members("type message", type=TEXT, message=NAME, code=_CODE, retryable=FLAG, param=nullable(TEXT)),
        request_id=NAME,
    ),
    "ChatAnswer": members(
        "id object created model choices",
        id=TEXT,
        object=const("chat.completion"),
        created=NUMBER,
        model=TEXT,
        choices=listed(members("index message", index=COUNT, message=_MESSAGE, finish_reason=nullable(TEXT))),
        usage=nullable(_USAGE),
    ),
    "CompletionAnswer": members(
        "id object created model choices",
        id=TEXT,
        object=const("text_completion"),
        created=NUMBER,
        model=TEXT,
        choices=listed(members("index text", index=COUNT, text=TEXT, finish_reason=nullable(TEXT))),
        usage=nullable(_USAGE),
    ),
    "MessageAnswer": members(
        "id type role model content stop_reason usage",
        id=NAME,
        type=const("message"),
        role=const("assistant"),
        model=TEXT,
        content=listed(members("type", type=NAME)),
        stop_reason=nullable(TEXT),
        stop_sequence=nullable(TEXT),
        usage=members("input_tokens output_tokens", input_tokens=COUNT, output_tokens=COUNT),
    ),
    "Compaction": members(
        "id object created_at output usage",
        id=TEXT,
        object=const("response.compaction"),
        created_at=COUNT,
        output=listed(members("id type", id=TEXT, type=TEXT, encrypted_content=TEXT), least=1),
        usage=nullable(members("input_tokens output_tokens", input_tokens=COUNT, output_tokens=COUNT)),
    ),
    "TokenCount": members("input_tokens", input_tokens=COUNT, estimated=FLAG, object=TEXT),
    "Response": _RESPONSE,
    "DeletedResponse": members("id object deleted", id=NAME, object=const("response"), deleted=FLAG),
    "InputItems": members("object data has_more", object=const("list"), data=listed(OBJECT), has_more=FLAG),
    "Embeddings": members(
        "object data model",
        object=const("list"),
        model=TEXT,
        data=listed(members("object index embedding", object=const("embedding"), index=COUNT)),
    ),
    "Ranking": members("results", results=listed(members("index relevance_score", index=COUNT, relevance_score=NUMBER))),
    "Transcript": members("text", text=TEXT),
    "Event": {
        **members("data", data=TEXT, event=TEXT),
        "description": "One server-sent event: data is JSON, or [DONE] behind the last one where OpenAI ends its streams so.",
    },
    "Images": members("created data", created=NUMBER, data=listed(OBJECT)),
    "Model": _MODEL,
    "ModelList": members("data", object=const("list"), data=listed(_MODEL), has_more=FLAG),
    "Index": members("service version models health", service=TEXT, version=TEXT, models=TEXT, health=TEXT),
    "Health": members("ok status version", ok=FLAG, status=choice("ok", "degraded"), version=TEXT),
}
"""Schemas of answers and errors, by the names they have in the document."""
