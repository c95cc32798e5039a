"""Reading what an engine says when it refuses or fails: any shape of ``wire.engine_errors`` in, one error of ours out. Pure."""

from __future__ import annotations

import msgspec

from core.limits import limits
from gateway.dialects.crowding import is_crowded
from gateway.dialects.overflow import is_about_context, read_overflow
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
from wire.unreadable import UNREADABLE


class Shape(msgspec.Struct, frozen=True):
    """Of an error body: whether its message stands where SDKs look, and whether its outside is Anthropic's."""

    has_message: bool
    is_anthropic: bool
    is_openai: bool = False
    """Whether its other members are text or null, as far as they are there. Engines like to put the status where the code is
    due, and a client that was promised text cannot read the whole error then."""


ANTHROPIC_TYPES = frozenset(
    {
        "api_error",
        "authentication_error",
        "billing_error",
        "invalid_request_error",
        "not_found_error",
        "overloaded_error",
        "permission_error",
        "rate_limit_error",
        "request_too_large",
        "timeout_error",
    }
)
"""Anthropic API reference, "Errors": SDKs choose the exception by them."""
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TEXTS = frozenset({"type", "code", "param"})


def _decode(body: bytes) -> EngineErrorBody | None:
    return None if is_crowded(body) else read_error_body(body)


def read_shape(body: bytes) -> Shape:
    """Return the shape of an error body."""
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
    """Return the ``error`` value of an event (JSON text) as an error of ours."""
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
