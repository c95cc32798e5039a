"""Why a change to tenants, keys, models or aliases was refused. A class carries its wire form."""

from __future__ import annotations

from gateway.errors import BadRequest
from wire.contract import ErrorCode


class ServiceError(BadRequest):
    """A change to tenants, keys, models or aliases is refused; the message says what to do, ``param`` names the field."""


class InvalidValue(ServiceError):
    """A name or a number cannot be used."""


class NameTaken(ServiceError, status=409):
    """Something else has this name already."""


class KeyRevoked(ServiceError, status=409):
    """The key is revoked, which is for good."""


class NotFound(ServiceError, code=ErrorCode.NOT_FOUND, status=404):
    """Base of what does not exist."""

    type = anthropic_type = "invalid_request_error"


class TenantNotFound(NotFound):
    """No tenant has that name."""


class KeyNotFound(NotFound):
    """No client key has that id."""


class ModelNotFound(NotFound):
    """No model has that name."""


class AliasNotFound(NotFound):
    """No alias has that id."""


class RequestNotFound(NotFound):
    """No request has that id."""


class ResponseNotKept(ServiceError, status=409):
    """An answer was not stored: the tenant does not allow it (any more), or it cannot be stored as it is."""
