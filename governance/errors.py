"""Errors of governance. A class carries its wire form; what renders it knows no status codes of its own."""

from __future__ import annotations

from http import HTTPStatus

from core.errors import ContractError
from core.limits import limits
from wire.contract import ErrorCode


class GovernanceError(ContractError):
    """Base of the tree."""


class InvalidAdminToken(GovernanceError, code=ErrorCode.INVALID_ADMIN_TOKEN, status=HTTPStatus.UNAUTHORIZED):
    """The bearer is not an admin token that may be used now."""


class TooManyWrongTokens(GovernanceError, code=ErrorCode.RATE_LIMITED, status=HTTPStatus.TOO_MANY_REQUESTS, retryable=True):
    """Too many admin tokens from one address were wrong; the next one is looked at after a moment."""

    retry_after_s = limits().core.throttle_retry_s


class NotFound(GovernanceError, code=ErrorCode.NOT_FOUND, status=HTTPStatus.NOT_FOUND):
    """There is nothing of that id, or what is asked for does not exist yet."""


class InvalidName(GovernanceError):
    """A name is empty or too long."""


class InvalidGrant(GovernanceError):
    """A token cannot have such rights; ``param`` names the field."""


class InvalidSilence(GovernanceError):
    """An alert cannot be silenced so; ``param`` names the field."""


class UnknownOperation(GovernanceError):
    """No governed operation has that name."""


class InvalidProposal(GovernanceError):
    """What is asked for cannot be asked for; ``param`` names the field."""


class NoPolicy(GovernanceError, code=ErrorCode.NO_POLICY, status=HTTPStatus.CONFLICT):
    """Nothing can be approved before a first policy is active."""


class ApprovalRefused(GovernanceError, code=ErrorCode.APPROVAL_REFUSED, status=HTTPStatus.FORBIDDEN):
    """A rule of approval refused. ``rule`` is the stable code of the rule, for machines; the text says what would do."""

    def __init__(self, message: str, *, rule: str, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.rule = rule


class StateChanged(GovernanceError, code=ErrorCode.STATE_CHANGED, status=HTTPStatus.CONFLICT):
    """The operation moved on meanwhile; look at it again."""


class Frozen(GovernanceError, code=ErrorCode.FROZEN, status=HTTPStatus.CONFLICT):
    """All operations are frozen."""


class TooManyOpen(GovernanceError, code=ErrorCode.TOO_MANY_OPEN, status=HTTPStatus.TOO_MANY_REQUESTS, retryable=True):
    """The requester has too many open operations, or asked too often."""


class NotPermitted(GovernanceError, code=ErrorCode.NOT_PERMITTED, status=HTTPStatus.FORBIDDEN):
    """Not for this person."""


class SignInRefused(NotPermitted):
    """The passkey, code or password was not accepted. One text for all causes."""


class NeedsApproval(GovernanceError, code=ErrorCode.APPROVAL_REFUSED, status=HTTPStatus.FORBIDDEN):
    """The change is governed: it is proposed, approved and then carried out."""
