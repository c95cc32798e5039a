"""One good request for every surface, rich enough that most of what a surface reads can be spoilt in it."""

from __future__ import annotations

import copy
import json
from typing import Any  # bodies are JSON

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
EMBEDDINGS, RERANK, IMAGES = "/v1/embeddings", "/v1/rerank", "/v1/images/generations"
TRANSCRIPTIONS, COUNT_MESSAGES, COUNT_RESPONSES = (
    "/v1/audio/transcriptions",
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
)
NATIVE = (CHAT, COMPLETIONS, MESSAGES, RESPONSES, EMBEDDINGS, RERANK, IMAGES, TRANSCRIPTIONS, "/v1/audio/translations")
"""What a box can answer itself."""
Json = dict[str, Any]

_PICTURE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
_MESSAGES: Json = {
    "max_tokens": 5,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "metadata": {"user_id": "u"},
    "stop_sequences": ["a"],
    "temperature": 0.5,
    "top_k": 3,
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "tools": [
        {"name": "f", "description": "d", "input_schema": {"type": "object", "properties": {"a": {"type": "string"}}}},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}, "task_budget": {}},
    "chat_template_kwargs": {"a": 1},
    "messages": [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": "s"},
                {"type": "text", "text": "x"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
                {"type": "server_tool_use", "id": "q", "name": "web_search", "input": {"query": "x"}},
                {"type": "web_search_tool_result", "tool_use_id": "q", "content": [{"url": "u", "title": "t"}]},
                {"type": "compaction", "content": "c"},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "is_error": True,
                    "content": [{"type": "text", "text": "r"}, {"type": "image", "source": _PICTURE}],
                },
                {"type": "document", "title": "t", "source": {"type": "content", "content": [{"type": "text", "text": "x"}]}},
                {"type": "search_result", "title": "t", "source": "s", "content": [{"type": "text", "text": "z"}]},
                {"type": "browser_state", "tabs": [{"a": 1}]},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "z"}], "clear_at": "next_user_message"},
        {"role": "user", "content": "end"},
    ],
}
_RESPONSES: Json = {
    "store": False,
    "instructions": "i",
    "max_output_tokens": 5,
    "temperature": 0.1,
    "top_logprobs": 2,
    "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
    "truncation": "auto",
    "user": "u",
    "decoding": {"temperature": 1, "top_k": 2, "stop": ["a"], "beam_size": 3},
    "tools": [
        {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True},
        {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "q"}]},
        {"type": "web_search"},
    ],
    "input": [
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": "x"},
                {"type": "input_image", "image_url": "data:image/png;base64,AA", "detail": "low"},
                {"type": "input_file", "file_data": "data:x", "filename": "f"},
            ],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "o", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "namespace": "ns"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "z"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "c", "input": "zz"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "k"},
        {"type": "local_shell_call", "call_id": "c4", "action": {"command": ["ls"]}},
        {"type": "additional_tools", "tools": [{"type": "function", "name": "k"}]},
        {"role": "system", "content": "late"},
    ],
}
_CHAT: Json = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "data:AA"}}]},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
    ],
    "stream_options": {"include_usage": True},
    "max_tokens": 3,
    "max_completion_tokens": 4,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "x_pool_options": {"prefer_gpu": "a", "max_latency_ms": 3000, "priority": "low"},
}
_BODIES: dict[str, Json] = {
    CHAT: _CHAT,
    COMPLETIONS: {"prompt": ["a", "b"], "max_tokens": 1, "echo": False},
    MESSAGES: _MESSAGES,
    RESPONSES: _RESPONSES,
    EMBEDDINGS: {"input": ["a", "b"], "encoding_format": "float"},
    RERANK: {"query": "q", "documents": ["a", {"text": "x"}], "top_n": 1},
    IMAGES: {"prompt": "p", "n": 1},
    COUNT_MESSAGES: {name: value for name, value in _MESSAGES.items() if name != "max_tokens"},
    COUNT_RESPONSES: _RESPONSES,
}
JSON_SURFACES = tuple(_BODIES)
TALKING = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
"""Surfaces whose answers may be streams."""
TRANSLATED = (MESSAGES, RESPONSES)


def make_body(path: str, model: str) -> Json:
    """Return a good body, which the caller may change."""
    return {"model": model, **copy.deepcopy(_BODIES[path])}


def make_plain(path: str, model: str) -> Json:
    """Return the shortest good body."""
    needed = {"prompt", "query", "documents"} | ({"input"} if path == EMBEDDINGS else set())
    body = {name: value for name, value in make_body(path, model).items() if name in needed or name == "model"}
    if path in {CHAT, MESSAGES, COUNT_MESSAGES}:
        body["messages"] = [{"role": "user", "content": "hi"}]
    if path == MESSAGES:
        body["max_tokens"] = 5
    if path in {RESPONSES, COUNT_RESPONSES}:
        body["input"] = "hi"
    return body


def write(body: Json) -> bytes:
    """Return a body as compact JSON."""
    return json.dumps(body, separators=(",", ":")).encode()


def make_form(model: str, *, file: bytes = b"RIFFdata", more: bytes = b"", boundary: str = "xx") -> tuple[str, bytes]:
    """Return content type and body of a recording's form; ``more``: further parts, whole."""
    mark = b"--" + boundary.encode()
    field = mark + b'\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + model.encode() + b"\r\n"
    sound = mark + b'\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + file + b"\r\n"
    return f"multipart/form-data; boundary={boundary}", field + more + sound + mark + b"--\r\n"
