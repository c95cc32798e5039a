"""Errors of governance. A class carries its wire form; what renders it knows no status codes of its own."""

from __future__ import annotations

from http import HTTPStatus
from typing import ClassVar

from wire.contract import ErrorCode


class GovernanceError(Exception):
    """Base of the tree. ``message`` is shown to the caller and says what to do; ``param`` names the field at fault."""

    code: ClassVar[ErrorCode] = ErrorCode.BAD_REQUEST
    status: ClassVar[int] = HTTPStatus.BAD_REQUEST.value
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidAdminToken(GovernanceError):
    """The bearer is not an admin token that may be used now."""

    code = ErrorCode.INVALID_ADMIN_TOKEN
    status = HTTPStatus.UNAUTHORIZED.value


class AdminTokenNotFound(GovernanceError):
    """No admin token has that id."""

    code = ErrorCode.NOT_FOUND
    status = HTTPStatus.NOT_FOUND.value


class InvalidName(GovernanceError):
    """A name is empty or too long."""
