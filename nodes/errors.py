"""Errors of the node registry. A class carries its wire form; what renders it knows no status codes of its own."""

from __future__ import annotations

from http import HTTPStatus

from core.errors import ContractError
from wire.contract import ErrorCode


class NodeError(ContractError):
    """Base of the tree."""


class BadRequest(NodeError):
    """A field holds something that cannot be used."""


class InvalidNodeToken(NodeError):
    """The bearer is not a credential of the node it speaks for."""

    code = ErrorCode.INVALID_NODE_TOKEN
    status = HTTPStatus.UNAUTHORIZED.value


class TooManyWrongTokens(NodeError):
    """Too many credentials from one address were wrong; the next one is looked at after a moment."""

    code = ErrorCode.RATE_LIMITED
    status = HTTPStatus.TOO_MANY_REQUESTS.value
    retryable = True
    retry_after_s = 1


class TooManySockets(NodeError):
    """Too many sockets of one address have not registered yet."""

    code = ErrorCode.RATE_LIMITED
    status = HTTPStatus.TOO_MANY_REQUESTS.value
    retryable = True
    retry_after_s = 1


class NodeNotFound(NodeError):
    """No node has that id. The contract answers 404 with the code BAD_REQUEST."""

    status = HTTPStatus.NOT_FOUND.value


class ModelNotAllowed(NodeError):
    """The model is not on the allow-list."""

    code = ErrorCode.MODEL_NOT_ALLOWED


class ProviderUnavailable(NodeError):
    """The provider of the credential is switched off; the node may try again later."""

    status = HTTPStatus.FORBIDDEN.value
    retryable = True


class EnrolmentRefused(NodeError):
    """The credential may not enrol one more node, or not under that name."""


class NameTaken(EnrolmentRefused):
    """Another node is at work under that name and credential."""


class AgentTaken(NodeError):
    """The agent id belongs to another credential."""

    status = HTTPStatus.FORBIDDEN.value


class SessionUnknown(NodeError):
    """No session has that id, or another one took its place."""

    code = ErrorCode.NOT_FOUND
    status = HTTPStatus.NOT_FOUND.value


class ProviderNotFound(NodeError):
    """No provider has that name, or it was deleted."""

    code = ErrorCode.NOT_FOUND
    status = HTTPStatus.NOT_FOUND.value


class CredentialNotFound(NodeError):
    """No node credential has that id."""

    code = ErrorCode.NOT_FOUND
    status = HTTPStatus.NOT_FOUND.value


class Conflict(NodeError):
    """The thing is no longer in the state the change starts from."""

    status = HTTPStatus.CONFLICT.value


class ApiKeyUnreadable(NodeError):
    """The stored API key of a node was encrypted under another MUSTER_SECRET_KEY."""


class AddressRefused(BadRequest):
    """The URL of a node is one that the gateway must not call."""


class AddressUnresolvable(BadRequest):
    """The host name of a node's URL has no address at the moment."""

    retryable = True
