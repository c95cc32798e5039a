"""Errors carry the wire form that the contract gives them."""

from __future__ import annotations

import pytest

from nodes import errors


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [
        (errors.BadRequest, 400, "BAD_REQUEST"),
        (errors.AddressRefused, 400, "BAD_REQUEST"),
        (errors.EnrolmentRefused, 400, "BAD_REQUEST"),
        (errors.ModelNotAllowed, 400, "MODEL_NOT_ALLOWED"),
        (errors.InvalidNodeToken, 401, "INVALID_NODE_TOKEN"),
        (errors.ProviderUnavailable, 403, "BAD_REQUEST"),
        (errors.NodeNotFound, 404, "BAD_REQUEST"),
        (errors.Conflict, 409, "BAD_REQUEST"),
    ],
)
def test_an_error_has_its_status_and_code(kind: type[errors.NodeError], status: int, code: str) -> None:
    error = kind("what to do", param="field")
    assert (error.status, error.code.value, error.message, error.param, str(error)) == (
        status,
        code,
        "what to do",
        "field",
        "what to do",
    )
