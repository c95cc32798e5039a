"""How a refusal becomes an HTTP answer: the one place where that is done."""

from __future__ import annotations

import math

import msgspec
from starlette.responses import Response

from runner.errors import RequestRefused
from runner.serving.request import refusal_body

ADMIN_PREFIX = "/v1/admin/"
"""Below it errors have the shape of llm-pool's admin API."""


class NotFound(RequestRefused):
    """There is no such path."""

    code = "not_found"
    status = 404


class MethodNotAllowed(RequestRefused):
    """The path is there, the method is not."""

    code = "method_not_allowed"
    status = 405


class TooLarge(RequestRefused):
    """The body has more bytes than this endpoint reads."""

    code = "request_too_large"
    status = 413


class WrongMediaType(RequestRefused):
    """The body is not of the type that this endpoint reads."""

    code = "unsupported_media_type"
    status = 415


class SlowBody(RequestRefused):
    """The body did not arrive in time."""

    code = "request_timeout"
    status = 408
    retryable = True


class OperationFailed(RequestRefused):
    """An engine did not do what it was told; the text has its own words."""

    code = "engine_failed"
    status = 500


class ModelLoadFailed(RequestRefused):
    """The files of a model could not be fetched or used, or its load ended in another state than loaded."""

    code = "model_load_failed"
    status = 500


class Broken(RequestRefused):
    """A bug of ours; the log has the details."""

    code = "internal_error"
    status = 500


def render(refusal: RequestRefused, *, path: str, model: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """Return the answer to a request for ``path`` that is refused."""
    body = _pool_body(refusal, model) if path.startswith(ADMIN_PREFIX) else refusal_body(refusal, endpoint=path)
    sent = {"content-type": "application/json", "cache-control": "no-store"} | (headers or {})
    if refusal.retry_after_s is not None:
        sent["retry-after"] = str(max(1, math.ceil(refusal.retry_after_s)))
    if refusal.status == 401:
        sent["www-authenticate"] = "Bearer"
    return Response(body, refusal.status, sent)


def _pool_body(refusal: RequestRefused, model: str | None) -> bytes:
    detail = {"code": refusal.code, "model": model, "message": refusal.message, **refusal.details}
    if refusal.param is not None:
        detail["param"] = refusal.param
    return msgspec.json.encode({"detail": detail})
