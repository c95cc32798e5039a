"""What a caller may use today, and the rule that more of it needs approval. Less of it never does."""

from __future__ import annotations

from http import HTTPStatus

from django.conf import settings

from gateway.models import ApiKey, Tenant
from gateway.services.errors import ServiceError
from gateway.values import Priority
from governance.errors import NeedsApproval
from governance.registry import RunOrder
from governance.services import require_approval
from wire.contract import ErrorCode

LIMIT_RAISE = "limit-raise"
"""As in ``settings.OPERATIONS`` and in the policy."""


class ApprovalNeeded(ServiceError):
    """The change gives somebody more than they have: it is proposed, approved and then carried out."""

    code = ErrorCode.APPROVAL_REFUSED
    status = HTTPStatus.FORBIDDEN.value
    type = "permission_error"
    anthropic_type = "permission_error"


def default_limit() -> int:
    """Return the requests per minute of whoever has no limit of their own."""
    return int(settings.GATEWAY_LIMITS.requests_per_minute)


def tenant_limit(tenant: Tenant) -> int:
    """Return the requests per minute that a tenant's keys get unless they say otherwise."""
    return tenant.requests_per_minute if tenant.requests_per_minute is not None else default_limit()


def key_limit(key: ApiKey) -> int:
    """Return the requests per minute that apply to a key. The key's tenant must be loaded."""
    return key.requests_per_minute if key.requests_per_minute is not None else tenant_limit(key.tenant)


def require_no_raise(*, before: int, after: int | None, otherwise: int, what: str, order: RunOrder | None = None) -> None:
    """Let a limit pass that is no higher than the one of today, or that an approved run brings.

    ``after`` None = ``otherwise`` applies. Raises ApprovalNeeded.
    """
    wanted = after if after is not None else otherwise
    if wanted > before:
        _require(f"{wanted} requests per minute is more than {what} has today, which is {before}.", order)


def require_no_promotion(*, before: str, after: Priority, order: RunOrder | None = None) -> None:
    """Let a priority pass that does not become high, or that an approved run brings. Raises ApprovalNeeded."""
    if after is Priority.HIGH and before != Priority.HIGH.value:
        _require("High priority goes before everybody else on a box.", order)


def _require(why: str, order: RunOrder | None) -> None:
    try:
        require_approval(LIMIT_RAISE, order=order)
    except NeedsApproval as refusal:
        raise ApprovalNeeded(f"{why} {refusal.message}", param="requests_per_minute") from None
