"""The errors of real engines, word for word in shape: what a gateway has to make sense of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any  # error bodies are JSON

from conformance.engine.script import Script

CONTEXT_TOKENS, ASKED_TOKENS = 4096, 5312
FITTING_TOKENS, ANSWER_TOKENS = 3000, 2048
"""Of a prompt that fits, and of an answer that does not fit behind it."""
REASON = "the engine's own words"
"""In every error that has words: a client must get to read them."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An answer that is an error."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def find_failure(script: Script) -> Failure | None:
    """Return the error the script asks for instead of an answer, or None."""
    if "error_400_context" in script:
        return _context_failure(script.argument("error_400_context"))
    if script.argument("error_400") == "messages":
        foreign = {"type": "error", "error": {"type": "BadRequestError", "message": REASON}}
        return Failure(400, json.dumps(foreign).encode())
    for status in (400, 404, 429, 500, 503):
        if f"error_{status}" in script:
            headers = {"retry-after": "7"} if status in {429, 503} else {}
            return Failure(status, _openai(REASON, status), headers=headers)
    if "html_error" in script:
        page = f"<html><head><title>502 Bad Gateway</title></head><body><h1>{REASON}</h1></body></html>"
        return Failure(502, page.encode(), "text/html")
    if "detail_error" in script:
        detail = [{"loc": ["body", "temperature"], "msg": REASON, "type": "value_error"}]
        return Failure(422, json.dumps({"detail": detail}).encode())
    if "text_error" in script:
        return Failure(400, json.dumps({"error": REASON}).encode())
    if "empty_error" in script:
        return Failure(500, b"", "text/plain")
    return None


def stream_error() -> dict[str, Any]:
    """Return the object that an engine puts into a stream it cannot go on with (vLLM; llama.cpp's is the same but for code)."""
    return {"error": {"message": REASON, "type": "server_error", "param": None, "code": 500}}


def _openai(message: str, status: int, **more: Any) -> bytes:
    """Return OpenAI's error object as engines write it: ``code`` is a number with vLLM and llama.cpp alike."""
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": status, **more}
    return json.dumps({"error": error}).encode()


def _context_failure(dialect: str) -> Failure:
    if dialect == "openai":
        text = (
            f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, your messages resulted in"
            f" {ASKED_TOKENS} tokens. Please reduce the length of the messages."
        )
        return Failure(400, _openai(text, 400, code="context_length_exceeded", param="messages"))
    if dialect == "vllm":
        text = (
            f"This model's maximum context length is {CONTEXT_TOKENS} tokens. However, you requested 64 output tokens and your"
            f" prompt contains at least {ASKED_TOKENS} input tokens, for a total of at least {ASKED_TOKENS + 64} tokens. Please"
            " reduce the length of the input prompt or the number of requested output tokens."
        )
        return Failure(400, _openai(text, 400, type="BadRequestError", param="input_tokens"))
    if dialect == "answer":
        text = (
            f"You passed {FITTING_TOKENS} input tokens and requested {ANSWER_TOKENS} output tokens. However, the model's"
            f" context length is only {CONTEXT_TOKENS} tokens, resulting in a maximum input length of"
            f" {CONTEXT_TOKENS - ANSWER_TOKENS} tokens. Please reduce the length of the input prompt."
        )
        return Failure(400, _openai(text, 400, type="BadRequestError", param="input_tokens"))
    text = f"request ({ASKED_TOKENS} tokens) exceeds the available context size ({CONTEXT_TOKENS} tokens), try increasing it"
    numbers = {"n_prompt_tokens": ASKED_TOKENS, "n_ctx": CONTEXT_TOKENS}
    return Failure(400, _openai(text, 400, type="exceed_context_size_error", **numbers))
