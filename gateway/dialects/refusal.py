"""Reading what an engine says when it refuses or fails: any shape of ``wire.engine_errors`` in, one error of ours out. Pure."""

from __future__ import annotations

import re

import msgspec

from core.limits import limits
from gateway.dialects.body import is_crowded
from gateway.errors import ContextTooLong, EngineRefused, GatewayError
from wire.engine_errors import (
    EngineErrorBody,
    EngineErrorObject,
    correct_status,
    find_message,
    judge_error,
    read_error_body,
    strip_markup,
)
from wire.limits import WIRE
from wire.unreadable import UNREADABLE

_MARKS = (
    b"maximum context length", b"context_length_exceeded", b"exceed_context_size_error", b"available context size",
    b"context window", b"maximum model length", b"model's context length", b"exceeds the context length",
    b"exceed context limit", b"context length of only", b"prompt is too long", b"maximum prompt length",
    b"exceed the configured limit", b"max_seq_len", b"`max_new_tokens` must be <=",
)  # fmt: skip
_NUMBER = r"(\d{1,12})"
_PROMPT = re.compile(rf"{_NUMBER} (?:input tokens|tokens from the input|`inputs` tokens|in the (?:messages|prompt))")
_ANSWER = re.compile(
    rf"requested {_NUMBER} output tokens|{_NUMBER} (?:in|tokens for) the completion"
    rf"|and {_NUMBER} `max_new_tokens`|is too large: {_NUMBER}\."
)
_CONTEXT = re.compile(rf"context length (?:is|of)(?: only)? {_NUMBER}|must be <= {_NUMBER}")
_SUM = re.compile(rf"context limit: {_NUMBER} \+ {_NUMBER} > {_NUMBER}")
_COUNT = re.compile(rf"{_NUMBER}( characters)?")
_AT_LEAST = re.compile(r"\bat least \d")
"""vLLM reads no more of a prompt than shows that it is too long."""
_COMMA = re.compile(r"(?<=\d),(?=\d{3})")


def is_about_context(body: bytes) -> bool:
    head = body[: WIRE.error_head_bytes].lower()
    return any(mark in head for mark in _MARKS)


def read_overflow(words: str) -> ContextTooLong:
    """Return the error with the counts that the words name, as far as it is clear what each of them counts."""
    text = _COMMA.sub("", words)
    if found := _SUM.search(text):
        return _make(words, prompt=int(found[1]), answer=int(found[2]), context=int(found[3]))
    prompt, answer, context = (_first(pattern, text) for pattern in (_PROMPT, _ANSWER, _CONTEXT))
    if answer is not None:
        if prompt is None or context is None:
            return ContextTooLong(words)
        return _make(words, prompt=prompt, answer=answer, context=context)
    numbers = [int(found[1]) for found in _COUNT.finditer(text) if found[2] is None]
    if len(numbers) < 2:
        return ContextTooLong(words)
    # Most name the limit before what was asked for, and the first number beyond it is the request's.
    limit = numbers[0]
    asked = next((number for number in numbers[1:] if number > limit), 0)
    if not asked:
        limit, asked = min(numbers), max(numbers)
    return _make(words, prompt=asked, answer=0, context=limit)


def _make(words: str, *, prompt: int, answer: int, context: int) -> ContextTooLong:
    is_at_least = _AT_LEAST.search(words) is not None
    return ContextTooLong(words, prompt_tokens=prompt, context_tokens=context, answer_tokens=answer, is_at_least=is_at_least)


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(next(group for group in found.groups() if group is not None))


class Shape(msgspec.Struct, frozen=True):
    """Of an error body: whether its message stands where SDKs look, and whether its outside is Anthropic's."""

    has_message: bool
    is_anthropic: bool
    is_openai: bool = False
    """Whether its other members are text or null, as far as they are there. Engines like to put the status where the code is
    due, and a client that was promised text cannot read the whole error then."""


ANTHROPIC_TYPES = frozenset({
    "api_error", "authentication_error", "billing_error", "invalid_request_error", "not_found_error", "overloaded_error",
    "permission_error", "rate_limit_error", "request_too_large", "timeout_error",
})  # fmt: skip
"""Anthropic API reference, "Errors": SDKs choose the exception by them."""
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXTS = frozenset({"type", "code", "param"})


def _decode(body: bytes) -> EngineErrorBody | None:
    return None if is_crowded(body) else read_error_body(body)


def read_shape(body: bytes) -> Shape:
    outer = _decode(body)
    inner = outer.error if outer is not None else None
    if outer is None or not isinstance(inner, EngineErrorObject):
        return Shape(has_message=False, is_anthropic=False)
    has_message = isinstance(inner.message, str) and bool(inner.message)
    return Shape(
        has_message=has_message,
        is_anthropic=outer.type == "error" and isinstance(inner.type, str) and inner.type in ANTHROPIC_TYPES,
        is_openai=all(member is None or isinstance(member, str) for member in (inner.type, inner.code, inner.param)),
    )


def complete_error(body: bytes, known: dict[str, object]) -> bytes:
    """Return an OpenAI-shaped error with whatever of ``known`` the engine left out, or said in another type.

    Of a body whose names cannot be read only what is known is said.
    """
    try:
        fields = _fields_decoder.decode(body)
        said = _fields_decoder.decode(fields["error"])
    except UNREADABLE:
        return msgspec.json.encode({"error": known})
    kept = {name: value for name, value in said.items() if name not in _TEXTS or bytes(value).startswith(b'"')}
    return msgspec.json.encode({**fields, "error": {**known, **kept}})


def read_refusal(status: int, body: bytes) -> GatewayError:
    """Return an engine's error as one of ours: ContextTooLong, or EngineRefused with its words and the status due to it."""
    outer = _decode(body)
    inner = outer.error if outer is not None and isinstance(outer.error, EngineErrorObject) else None
    words = (find_message(outer) if outer is not None else strip_markup(body))[: limits().gateway.refusal_chars]
    if status < 500 and is_about_context(body):
        return _read_context(words, inner)
    param = inner.param if inner is not None and isinstance(inner.param, str) else None
    message = words or f"The engine answered with HTTP {status} and no reason."
    status = correct_status(status, words)
    blame = judge_error(status, inner.code if inner is not None else None)
    return EngineRefused(message, status=status, param=param, blame=blame)


def read_stream_failure(error: bytes) -> GatewayError:
    body = b'{"error":' + error + b"}"
    outer = _decode(body)
    inner = outer.error if outer is not None and isinstance(outer.error, EngineErrorObject) else None
    code = inner.code if inner is not None else None
    is_status = isinstance(code, int) and not isinstance(code, bool) and 400 <= code <= 599
    if is_status and isinstance(code, int):
        return read_refusal(code, body)
    return read_refusal(400 if is_about_context(body) else 502, body)


def _read_context(words: str, inner: EngineErrorObject | None) -> ContextTooLong:
    if inner is not None and isinstance(inner.n_prompt_tokens, int) and isinstance(inner.n_ctx, int):
        return ContextTooLong(words, prompt_tokens=inner.n_prompt_tokens, context_tokens=inner.n_ctx)
    return read_overflow(words)
