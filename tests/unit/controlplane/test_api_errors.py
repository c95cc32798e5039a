"""Errors of the REST API are described in one body, whoever raised them."""

from __future__ import annotations

import pytest
from django.core.exceptions import PermissionDenied, RequestDataTooBig
from django.db import InterfaceError, OperationalError
from django.http import Http404
from rest_framework import exceptions

from controlplane.api_errors import describe_error
from gateway.services import InvalidValue, NameTaken
from governance.errors import InvalidAdminToken
from nodes.errors import NodeNotFound
from wire.contract import ErrorCode


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidValue("limit must be a number.", param="limit"), 400, ErrorCode.BAD_REQUEST, "limit"),
        (NameTaken("taken", param="name"), 409, ErrorCode.BAD_REQUEST, "name"),
        (InvalidAdminToken("no"), 401, ErrorCode.INVALID_ADMIN_TOKEN, None),
        (NodeNotFound("no"), 404, ErrorCode.BAD_REQUEST, None),
        (exceptions.NotAuthenticated(), 401, ErrorCode.INVALID_ADMIN_TOKEN, None),
        (exceptions.ValidationError({"node": {"name": ["too long"]}}), 400, ErrorCode.BAD_REQUEST, "node.name"),
        (exceptions.ParseError("JSON parse error"), 400, ErrorCode.BAD_REQUEST, None),
        (exceptions.UnsupportedMediaType("text/plain"), 415, ErrorCode.BAD_REQUEST, None),
        (exceptions.MethodNotAllowed("PUT"), 405, ErrorCode.BAD_REQUEST, None),
        (exceptions.NotFound(), 404, ErrorCode.NOT_FOUND, None),
        (Http404(), 404, ErrorCode.NOT_FOUND, None),
        (PermissionDenied(), 403, ErrorCode.INVALID_ADMIN_TOKEN, None),
        (RequestDataTooBig(), 413, ErrorCode.BODY_TOO_LARGE, None),
        (exceptions.Throttled(wait=3), 429, ErrorCode.RATE_LIMITED, None),
        (exceptions.APIException("broken"), 500, ErrorCode.INTERNAL_ERROR, None),
        (OperationalError("the server closed the connection"), 503, ErrorCode.INTERNAL_ERROR, None),
        (InterfaceError("the connection is closed"), 503, ErrorCode.INTERNAL_ERROR, None),
    ],
)
def test_every_known_error_has_its_status_code_and_parameter(
    error: Exception, status: int, code: ErrorCode, param: str | None
) -> None:
    known = describe_error(error)

    assert known is not None
    assert (known.status, known.code, known.param) == (status, code, param)
    assert set(known.body()["error"]) == {"code", "message", "retryable", "type", "param"}


def test_a_defect_of_ours_is_not_described_to_the_caller() -> None:
    assert describe_error(ZeroDivisionError("division by zero")) is None


@pytest.mark.parametrize(("method", "is_safe"), [("GET", True), ("HEAD", True), ("POST", False), ("DELETE", False)])
def test_without_the_database_only_what_changes_nothing_may_blindly_be_sent_again(method: str, is_safe: bool) -> None:
    known = describe_error(OperationalError("gone"), method=method)

    assert known is not None
    assert known.retryable is is_safe
    assert ("Nothing was changed" in known.message, "may or may not have been done" in known.message) == (is_safe, not is_safe)
    assert "gone" not in known.message
