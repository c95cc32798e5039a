"""Why a change to tenants, keys, models or aliases was refused. A class carries its wire form."""

from __future__ import annotations

from gateway.errors import BadRequest
from wire.contract import ErrorCode


class ServiceError(BadRequest):
    """A change to tenants, keys, models or aliases is refused; the message says what to do, ``param`` names the field."""


class InvalidValue(ServiceError):
    """A name or a number cannot be used."""


class NameTaken(ServiceError):
    """Something else has this name already."""

    status = 409


class KeyRevoked(ServiceError):
    """The key is revoked, which is for good."""

    status = 409


class NotFound(ServiceError):
    """Base of what does not exist."""

    code = ErrorCode.NOT_FOUND
    status = 404
    type = anthropic_type = "invalid_request_error"


class TenantNotFound(NotFound):
    """No tenant has that name."""


class KeyNotFound(NotFound):
    """No client key has that id."""


class ModelNotFound(NotFound):
    """No model has that name."""


class AliasNotFound(NotFound):
    """No alias has that id."""


class ResponseNotKept(ServiceError):
    """An answer was not stored: the tenant does not allow it (any more), or it cannot be stored as it is."""

    status = 409
