"""One value per API surface, and the table of them by path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from gateway.dialects.body import RequestBody, count_prompt_chars, read_body, require_list
from gateway.dialects.form import read_form
from gateway.errors import BadRequest, GatewayError
from gateway.values import InferenceRequest

_json = msgspec.json.Encoder()

CACHE_MODE, CACHE_TAG = "x-cache-mode", "x-cache-tag"
_CACHE_MODES = frozenset({"prefix", "none", "auto"})
_CACHE_TAG_RE = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z")
_OPENAI_HEADERS = frozenset({"content-type", "openai-organization", CACHE_MODE, CACHE_TAG})
_ANTHROPIC_HEADERS = frozenset({"content-type", "anthropic-version", "anthropic-beta", CACHE_MODE, CACHE_TAG})


@dataclass(frozen=True, slots=True)
class Surface:
    """How one path is read and how it says errors. ``forwarded`` headers travel to the box; credentials never do.

    ``is_form``: the body is a multipart form with a file instead of JSON.
    """

    path: str
    forwarded: frozenset[str]
    check: Callable[[RequestBody], None]
    is_anthropic: bool = False
    is_form: bool = False

    def parse(self, body: bytes, headers: Mapping[str, str]) -> InferenceRequest:
        """Read a body. Raises BadRequest."""
        forwarded = {name: headers[name] for name in self.forwarded if name in headers}
        _check_cache_headers(forwarded)
        if self.is_form:
            return self._parse_form(body, forwarded)
        fields = read_body(body)
        self.check(fields)
        _check_model(fields.model)
        limit, limit_field = fields.token_limit
        if limit is not None and limit < 0:
            raise BadRequest(f"The field '{limit_field}' must not be negative.", param=limit_field)
        options = fields.stream_options
        return InferenceRequest(
            endpoint=self.path,
            model=fields.model,
            is_streaming=bool(fields.stream),
            wants_usage=bool(options is not None and options.include_usage),
            max_tokens=limit,
            max_tokens_field=limit_field,
            prompt_chars=count_prompt_chars(fields.messages, fields.input, fields.prompt, fields.system, fields.documents),
            body=body,
            headers=forwarded,
        )

    def _parse_form(self, body: bytes, forwarded: dict[str, str]) -> InferenceRequest:
        form = read_form(body, forwarded.get("content-type", ""))
        _check_model(form.model)
        if b"file" not in form.files:
            raise BadRequest("The field 'file' is required and must be a file.", param="file")
        return InferenceRequest(
            endpoint=self.path,
            model=form.model,
            is_streaming=form.stream,
            wants_usage=False,
            max_tokens=None,
            prompt_chars=0,
            body=body,
            headers=forwarded,
        )

    def render_error(self, error: GatewayError, request_id: str) -> bytes:
        """Return the JSON body of an error."""
        if self.is_anthropic:
            return _json.encode(
                {
                    "type": "error",
                    "error": {"type": error.anthropic_type, "message": error.message, **_contract(error)},
                    "request_id": request_id,
                }
            )
        return _json.encode({"error": _openai(error)})

    def render_stream_error(self, error: GatewayError, request_id: str) -> bytes:
        """Return the one event that ends a stream that had begun."""
        if self.is_anthropic:
            return b"event: error\ndata: " + self.render_error(error, request_id) + b"\n\n"
        if self.path == "/v1/responses":
            event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
            return b"event: error\ndata: " + _json.encode({**event, "error": _openai(error)}) + b"\n\n"
        return b"data: " + _json.encode({"error": _openai(error)}) + b"\n\n"


def _openai(error: GatewayError) -> dict[str, object]:
    return {
        "code": error.code,
        "message": error.message,
        "retryable": error.retryable,
        "type": error.type,
        "param": error.param,
    }


def _contract(error: GatewayError) -> dict[str, object]:
    return {"code": error.code, "retryable": error.retryable, "param": error.param}


def _check_model(name: str) -> None:
    if not name or len(name) > 200 or not name.isprintable():
        raise BadRequest("The field 'model' must be a name of 1 to 200 printable characters.", param="model")


def _check_cache_headers(headers: Mapping[str, str]) -> None:
    mode, tag = headers.get(CACHE_MODE), headers.get(CACHE_TAG)
    if mode is not None and mode not in _CACHE_MODES:
        raise BadRequest("The header X-Cache-Mode must be prefix, none or auto.", param="X-Cache-Mode")
    if tag is not None and not _CACHE_TAG_RE.match(tag):
        raise BadRequest("The header X-Cache-Tag must have 1 to 64 characters of A-Z a-z 0-9 . _ : -", param="X-Cache-Tag")


def _check_chat(body: RequestBody) -> None:
    require_list(body.messages, "messages")


def _check_messages(body: RequestBody) -> None:
    if body.max_tokens is None:
        raise BadRequest("The field 'max_tokens' is required.", param="max_tokens")
    require_list(body.messages, "messages")


def _check_input(body: RequestBody) -> None:
    if not bytes(body.input).strip():
        raise BadRequest("The field 'input' is required.", param="input")


def _check_prompt(body: RequestBody) -> None:
    text = bytes(body.prompt).strip()
    if not text or text == b"null":
        raise BadRequest("The field 'prompt' is required.", param="prompt")
    if not text.startswith(b'"'):
        raise BadRequest("The field 'prompt' must be text.", param="prompt")
    if text == b'""':
        raise BadRequest("The field 'prompt' must not be empty.", param="prompt")


def _check_nothing(body: RequestBody) -> None:
    del body


SURFACES: dict[str, Surface] = {
    surface.path: surface
    for surface in (
        Surface("/v1/chat/completions", _OPENAI_HEADERS, _check_chat),
        Surface("/v1/completions", _OPENAI_HEADERS, _check_nothing),
        Surface("/v1/embeddings", _OPENAI_HEADERS, _check_input),
        Surface("/v1/responses", _OPENAI_HEADERS, _check_nothing),
        Surface("/v1/audio/transcriptions", _OPENAI_HEADERS, _check_nothing, is_form=True),
        Surface("/v1/audio/translations", _OPENAI_HEADERS, _check_nothing, is_form=True),
        Surface("/v1/images/generations", _OPENAI_HEADERS, _check_prompt),
        Surface("/v1/messages", _ANTHROPIC_HEADERS, _check_messages, is_anthropic=True),
    )
}
"""Every inference surface by path. Bodies and answers pass through; translation between surfaces is not done here."""

DEFAULT_SURFACE = SURFACES["/v1/chat/completions"]
"""How errors are said where no surface is involved."""
