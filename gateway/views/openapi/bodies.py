"""What clients send, with the types of the originals. Fields that are not listed travel on to the engine.

Sources: OpenAI API reference; Anthropic API reference; Cohere API reference, "Rerank".
"""

from __future__ import annotations

from core.limits import limits
from gateway.views.openapi.terms import (
    COUNT,
    FLAG,
    LIMIT,
    MODEL,
    NAME,
    NUMBER,
    OBJECT,
    POSITIVE,
    POSITIVE_LIMIT,
    TEXT,
    Schema,
    choice,
    const,
    either,
    listed,
    members,
    nullable,
    ref,
)
from wire.bounds import BOUNDS

_FUNCTION = members("name", name=NAME, description=TEXT, parameters=OBJECT, strict=nullable(FLAG))
_CALL = members(
    "id type function", id=NAME, type=const("function"), function=members("name arguments", name=NAME, arguments=TEXT)
)


def _bounded(path: str, name: str) -> Schema:
    """Return the schema of a number that the surface refuses beyond its bounds."""
    lowest, highest = BOUNDS[path][name]
    return {**NUMBER, "minimum": lowest} if highest is None else {**NUMBER, "minimum": lowest, "maximum": highest}


_SAMPLING: dict[str, Schema] = {
    name: nullable(_bounded("/v1/chat/completions", name))
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")
}
_STREAMED: dict[str, Schema] = {
    "stream": nullable(FLAG),
    "stream_options": nullable(members(include_usage=nullable(FLAG))),
    "x_pool_options": ref("PoolOptions"),
}

_CHAT = members(
    "model messages",
    model=MODEL,
    messages=listed(ref("ChatMessage"), least=1),
    max_tokens=nullable(POSITIVE_LIMIT),
    max_completion_tokens=nullable(POSITIVE_LIMIT),
    stop=nullable(either(TEXT, listed(TEXT, most=4))),
    n=nullable({**POSITIVE, "maximum": BOUNDS["/v1/chat/completions"]["n"][1]}),
    seed=nullable({"type": "integer"}),
    logprobs=nullable(FLAG),
    top_logprobs=nullable({**COUNT, "maximum": 20}),
    tools=nullable(listed(members("type function", type=const("function"), function=_FUNCTION))),
    tool_choice=nullable(either(choice("none", "auto", "required"), OBJECT)),
    parallel_tool_calls=nullable(FLAG),
    response_format=nullable(members("type", type=choice("text", "json_object", "json_schema"))),
    reasoning_effort=nullable(TEXT),
    user=nullable(TEXT),
    **_SAMPLING,
    **_STREAMED,
)
_CHAT_MESSAGE = members(
    "role",
    role=choice("system", "developer", "user", "assistant", "tool"),
    content=nullable(either(TEXT, listed(either(members("type text", type=const("text"), text=TEXT), ref("ImagePart"))))),
    name=TEXT,
    tool_calls=listed(_CALL),
    tool_call_id=TEXT,
)
_COMPLETION = members(
    "model prompt",
    model=MODEL,
    prompt=either(TEXT, listed(TEXT, least=1), listed(COUNT, least=1), listed(listed(COUNT, least=1), least=1)),
    max_tokens=nullable(LIMIT),
    echo=nullable(FLAG),
    logprobs=nullable({**COUNT, "maximum": 5}),
    stop=nullable(either(TEXT, listed(TEXT, most=4))),
    **_SAMPLING,
    **_STREAMED,
)

_SOURCE = either(
    members("type media_type data", type=const("base64"), media_type=TEXT, data=TEXT),
    members("type url", type=const("url"), url=TEXT),
)
_SAID_BLOCK = either(
    members("type text", type=const("text"), text=TEXT), members("type source", type=const("image"), source=_SOURCE)
)
_ASSISTANT_BLOCK = either(
    members("type text", type=const("text"), text=TEXT),
    members("type thinking signature", type=const("thinking"), thinking=TEXT, signature=TEXT),
    members("type id name input", type=const("tool_use"), id=NAME, name=NAME, input=OBJECT),
)
_USER_BLOCK = either(
    _SAID_BLOCK,
    members(
        "type tool_use_id",
        type=const("tool_result"),
        tool_use_id=NAME,
        content=either(TEXT, listed(_SAID_BLOCK)),
        is_error=FLAG,
    ),
)
_PROMPT_OF_MESSAGES: dict[str, Schema] = {
    "model": MODEL,
    "messages": listed(ref("Message"), least=1),
    "system": either(TEXT, listed(members("type text", type=const("text"), text=TEXT))),
    "tools": listed(
        members(
            "name input_schema",
            name=NAME,
            type=nullable(TEXT),
            description=nullable(TEXT),
            input_schema=OBJECT,
            strict=nullable(FLAG),
        )
    ),
    "tool_choice": either(
        members("type", type=choice("auto", "any", "none"), disable_parallel_tool_use=FLAG),
        members("type name", type=const("tool"), name=NAME),
    ),
    "thinking": either(
        members("type budget_tokens", type=const("enabled"), budget_tokens=POSITIVE),
        members("type", type=choice("disabled", "adaptive")),
    ),
    "n": {**nullable({"type": "integer", "const": 1}), "description": "A message has one answer."},
}
_MESSAGES = members(
    "model messages max_tokens",
    **_PROMPT_OF_MESSAGES,
    max_tokens=POSITIVE_LIMIT,
    stream=FLAG,
    stop_sequences=listed(TEXT),
    temperature=_bounded("/v1/messages", "temperature"),
    top_p=_bounded("/v1/messages", "top_p"),
    top_k=COUNT,
    metadata=members(user_id=nullable(TEXT)),
    x_pool_options=ref("PoolOptions"),
)
_MESSAGE = either(
    members("role content", role=const("user"), content=either(TEXT, listed(_USER_BLOCK))),
    members("role content", role=const("assistant"), content=either(TEXT, listed(_ASSISTANT_BLOCK))),
)

_INPUT_PART = either(
    members("type text", type=const("input_text"), text=TEXT),
    members("type image_url", type=const("input_image"), image_url=TEXT, detail=choice("low", "high", "auto")),
    members("type file_data", type=const("input_file"), file_data=TEXT, filename=TEXT),
)
_SAID_PART = either(
    members("type text", type=const("output_text"), text=TEXT), members("type refusal", type=const("refusal"), refusal=TEXT)
)
_ITEM = either(
    members("role content", type=const("message"), role=const("user"), content=either(TEXT, listed(_INPUT_PART))),
    members("role content", role=choice("system", "developer"), content=TEXT),
    members("type role content", type=const("message"), role=const("assistant"), content=either(TEXT, listed(_SAID_PART))),
    members("type call_id name arguments", type=const("function_call"), call_id=NAME, name=NAME, arguments=TEXT),
    members("type call_id output", type=const("function_call_output"), call_id=NAME, output=either(TEXT, listed(_INPUT_PART))),
    members(
        "type summary",
        type=const("reasoning"),
        summary=listed(members("type text", type=const("summary_text"), text=TEXT)),
    ),
)
_DECODING = {
    **members(
        temperature=nullable(NUMBER),
        top_p=nullable(NUMBER),
        top_k=nullable(COUNT),
        repetition_penalty=nullable(NUMBER),
        max_tokens=nullable(POSITIVE_LIMIT),
        stop=nullable(listed(TEXT)),
        beam_size=nullable(COUNT),
    ),
    "additionalProperties": False,
}
_LANGUAGE = {**nullable(TEXT), "description": "Only where a box answers llm-pool's form of this path itself."}
_RESPONSE = members(
    "model input",
    model=MODEL,
    input=either(NAME, listed(ref("InputItem"), least=1)),
    instructions=nullable(TEXT),
    max_output_tokens=nullable(POSITIVE_LIMIT),
    top_logprobs=nullable({**COUNT, "maximum": 20}),
    tools=nullable(listed(members("type name", type=const("function"), **_FUNCTION["properties"]))),
    tool_choice=nullable(choice("none", "auto")),
    parallel_tool_calls=nullable(FLAG),
    text=nullable(members(format=members("type", type=choice("text", "json_object")), verbosity=nullable(TEXT))),
    reasoning=nullable(members(effort=nullable(TEXT), summary=nullable(TEXT))),
    metadata=nullable({"type": "object", "additionalProperties": TEXT}),
    stream=nullable(FLAG),
    store={**nullable(FLAG), "description": "True only where the tenant keeps answers."},
    previous_response_id={**nullable(TEXT), "description": "Only where the tenant keeps answers."},
    user=nullable(TEXT),
    max_tool_calls=nullable(COUNT),
    include=nullable(listed(TEXT)),
    truncation=nullable(choice("auto", "disabled")),
    service_tier=nullable(TEXT),
    safety_identifier=nullable(TEXT),
    prompt_cache_key=nullable(TEXT),
    decoding=nullable(_DECODING),
    allow_remote=nullable(FLAG),
    source_lang_code=_LANGUAGE,
    target_lang_code=_LANGUAGE,
    x_pool_options=ref("PoolOptions"),
    **_SAMPLING,
)

_AUDIO = members(
    "model file",
    model=MODEL,
    file={"type": "string", "format": "binary"},
    language=TEXT,
    prompt=TEXT,
    response_format=choice("json", "text", "srt", "vtt", "verbose_json"),
    temperature=NUMBER,
    stream=choice("true", "false"),
)

BODIES: dict[str, Schema] = {
    "PoolOptions": members(
        prefer_gpu=nullable(TEXT),
        max_latency_ms=nullable({**COUNT, "maximum": limits().gateway.latency_ms}),
        fallback_models=listed(MODEL, most=limits().gateway.fallbacks),
        priority=nullable(choice("high", "normal", "low")),
    ),
    "ImagePart": members("type image_url", type=const("image_url"), image_url=members("url", url=TEXT)),
    "ChatMessage": _CHAT_MESSAGE,
    "ChatRequest": _CHAT,
    "CompletionRequest": _COMPLETION,
    "Message": _MESSAGE,
    "MessagesRequest": _MESSAGES,
    "CountTokensRequest": members("model messages", **_PROMPT_OF_MESSAGES),
    "InputItem": _ITEM,
    "ResponsesRequest": _RESPONSE,
    "CompactRequest": members(
        "model input",
        **{
            name: _RESPONSE["properties"][name]
            for name in (
                "model",
                "input",
                "instructions",
                "previous_response_id",
                "service_tier",
                "prompt_cache_key",
                "allow_remote",
                "x_pool_options",
            )
        },
    ),
    "EmbeddingsRequest": members(
        "model input",
        model=MODEL,
        input=either(NAME, listed(TEXT, least=1), listed(COUNT, least=1), listed(listed(COUNT, least=1), least=1)),
        encoding_format=choice("float", "base64"),
        dimensions=POSITIVE,
        x_pool_options=ref("PoolOptions"),
    ),
    "RerankRequest": members(
        "model query documents",
        model=MODEL,
        query=TEXT,
        documents=listed(either(TEXT, members("text", text=TEXT)), least=1),
        top_n=POSITIVE,
        return_documents=FLAG,
        x_pool_options=ref("PoolOptions"),
    ),
    "ImageRequest": members(
        "model prompt", model=MODEL, prompt=NAME, n=nullable(POSITIVE), size=nullable(TEXT), x_pool_options=ref("PoolOptions")
    ),
    "AudioRequest": _AUDIO,
}
"""Schemas of request bodies and their parts, by the names they have in the document."""
