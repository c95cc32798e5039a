"""How a refusal is said in JSON: the error object of the model-runner specification, which OpenAI's clients read as theirs."""

from __future__ import annotations

import msgspec

from runner.engines.port import MESSAGES
from runner.errors import RequestRefused

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def refusal_body(refusal: RequestRefused, *, endpoint: str = "") -> bytes:
    """Return ``{"error": {code, message, type, param, retryable, …}}`` with the details of the refusal beside them.

    ``endpoint``: the path that was asked; on /v1/messages Anthropic's ``"type": "error"`` stands outside.
    """
    outside = {"type": "error"} if endpoint == MESSAGES else {}
    return msgspec.json.encode({**outside, "error": refusal_fields(refusal)})


def refusal_fields(refusal: RequestRefused) -> dict[str, object]:
    """Return the members of the error object."""
    return {
        "code": refusal.code,
        "message": refusal.message,
        "type": _TYPES.get(refusal.status, "api_error"),
        "param": refusal.param,
        "retryable": refusal.retryable,
        **refusal.details,
    }
