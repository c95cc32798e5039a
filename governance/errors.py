"""Errors of governance. A class carries its wire form; what renders it knows no status codes of its own."""

from __future__ import annotations

from http import HTTPStatus

from core.errors import ContractError
from core.limits import limits
from wire.contract import ErrorCode


class GovernanceError(ContractError):
    """Base of the tree."""


class InvalidAdminToken(GovernanceError):
    """The bearer is not an admin token that may be used now."""

    code = ErrorCode.INVALID_ADMIN_TOKEN
    status = HTTPStatus.UNAUTHORIZED.value


class TooManyWrongTokens(GovernanceError):
    """Too many admin tokens from one address were wrong; the next one is looked at after a moment."""

    code = ErrorCode.RATE_LIMITED
    status = HTTPStatus.TOO_MANY_REQUESTS.value
    retryable = True
    retry_after_s = limits().core.throttle_retry_s


class NotFound(GovernanceError):
    """There is nothing of that id, or what is asked for does not exist yet."""

    code = ErrorCode.NOT_FOUND
    status = HTTPStatus.NOT_FOUND.value


class InvalidName(GovernanceError):
    """A name is empty or too long."""


class UnknownOperation(GovernanceError):
    """No governed operation has that name."""


class InvalidProposal(GovernanceError):
    """What is asked for cannot be asked for; ``param`` names the field."""


class NoPolicy(GovernanceError):
    """Nothing can be approved before a first policy is active."""

    code = ErrorCode.NO_POLICY
    status = HTTPStatus.CONFLICT.value


class ApprovalRefused(GovernanceError):
    """A rule of approval refused. ``rule`` is the stable code of the rule, for machines; the text says what would do."""

    code = ErrorCode.APPROVAL_REFUSED
    status = HTTPStatus.FORBIDDEN.value

    def __init__(self, message: str, *, rule: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.rule = rule


class StateChanged(GovernanceError):
    """The operation moved on meanwhile; look at it again."""

    code = ErrorCode.STATE_CHANGED
    status = HTTPStatus.CONFLICT.value


class Frozen(GovernanceError):
    """All operations are frozen."""

    code = ErrorCode.FROZEN
    status = HTTPStatus.CONFLICT.value


class TooManyOpen(GovernanceError):
    """The requester has too many open operations, or asked too often."""

    code = ErrorCode.TOO_MANY_OPEN
    status = HTTPStatus.TOO_MANY_REQUESTS.value
    retryable = True


class NotPermitted(GovernanceError):
    """Not for this person."""

    code = ErrorCode.NOT_PERMITTED
    status = HTTPStatus.FORBIDDEN.value


class SignInRefused(NotPermitted):
    """The passkey, code or password was not accepted. One text for all causes."""


class NeedsApproval(GovernanceError):
    """The change is governed: it is proposed, approved and then carried out."""

    code = ErrorCode.APPROVAL_REFUSED
    status = HTTPStatus.FORBIDDEN.value
