"""Errors of the node registry. A class carries its wire form; what renders it knows no status codes of its own."""

from __future__ import annotations

from http import HTTPStatus

from core.errors import ContractError
from wire.contract import ErrorCode


class NodeError(ContractError):
    """Base of the tree."""


class BadRequest(NodeError):
    """A field holds something that cannot be used."""


class InvalidNodeToken(NodeError, code=ErrorCode.INVALID_NODE_TOKEN, status=HTTPStatus.UNAUTHORIZED):
    """The bearer is not a credential of the node it speaks for."""


class TooManyWrongTokens(NodeError, code=ErrorCode.RATE_LIMITED, status=HTTPStatus.TOO_MANY_REQUESTS, retryable=True):
    """Too many credentials from one address were wrong; the next one is looked at after a moment."""

    retry_after_s = 1


class TooManySockets(NodeError, code=ErrorCode.RATE_LIMITED, status=HTTPStatus.TOO_MANY_REQUESTS, retryable=True):
    """Too many sockets of one address have not registered yet."""

    retry_after_s = 1


class NodeNotFound(NodeError, status=HTTPStatus.NOT_FOUND):
    """No node has that id. The contract answers 404 with the code BAD_REQUEST."""


class ModelNotAllowed(NodeError, code=ErrorCode.MODEL_NOT_ALLOWED):
    """The model is not on the allow-list."""


class ProviderUnavailable(NodeError, status=HTTPStatus.FORBIDDEN, retryable=True):
    """The provider of the credential is switched off; the node may try again later."""


class EnrolmentRefused(NodeError):
    """The credential may not enrol one more node, or not under that name."""


class NameTaken(EnrolmentRefused):
    """Another node is at work under that name and credential."""


class AgentTaken(NodeError, status=HTTPStatus.FORBIDDEN):
    """The agent id belongs to another credential."""


class CertificateRefused(NodeError):
    """The internal CA gives no certificate for that host, that key or that node."""


class SessionUnknown(NodeError, code=ErrorCode.NOT_FOUND, status=HTTPStatus.NOT_FOUND):
    """No session has that id, or another one took its place."""

    default_message = "There is no such session: it ended, or the agent registered again since. Register again."


class ProviderNotFound(NodeError, code=ErrorCode.NOT_FOUND, status=HTTPStatus.NOT_FOUND):
    """No provider has that name, or it was deleted."""


class CredentialNotFound(NodeError, code=ErrorCode.NOT_FOUND, status=HTTPStatus.NOT_FOUND):
    """No node credential has that id."""


class Conflict(NodeError, status=HTTPStatus.CONFLICT):
    """The thing is no longer in the state the change starts from."""


class ApiKeyUnreadable(NodeError):
    """The stored API key of a node was encrypted under another MUSTER_SECRET_KEY."""


class AddressRefused(BadRequest):
    """The URL of a node is one that the gateway must not call."""


class AddressUnresolvable(BadRequest, retryable=True):
    """The host name of a node's URL has no address at the moment."""
