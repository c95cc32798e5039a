"""Stopping everything at once, which any one approver may do; lifting it is an operation of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import IntegrityError, transaction
from django.utils import timezone

from governance.audit import record_event
from governance.errors import Frozen, NotPermitted
from governance.hints import publish_hint
from governance.models import Freeze, Operation
from governance.services.policies import require_policy
from governance.services.transitions import tell

if TYPE_CHECKING:
    from controlplane.models import User

MAX_REASON_CHARS = 300


def read_freeze() -> Freeze | None:
    """Return the freeze in force, if there is one."""
    return Freeze.objects.filter(lifted_at=None).first()


@transaction.atomic
def freeze(*, user: User, reason: str) -> Freeze:
    """Send nothing on its way any more but an unfreeze or a policy-change; what boxes do already goes on.

    Any approver of the active policy may.

    Raises NoPolicy, NotPermitted, Frozen (it is frozen already).
    """
    _, policy = require_policy()
    name = user.get_username()
    if name not in policy.groups or not type(user).objects.filter(pk=user.pk, is_active=True).exists():
        raise NotPermitted("Only approvers of the active policy can freeze.")
    try:
        with transaction.atomic():
            row = Freeze.objects.create(frozen_by=name, reason=reason.strip()[:MAX_REASON_CHARS])
    except IntegrityError:
        raise Frozen("Everything is frozen already.") from None
    record_event(actor=f"user:{name}", action="freeze", target="control-plane")
    tell(None, "frozen")
    publish_hint("operations")
    return row


def lift_freeze(*, operation: Operation | None) -> bool:
    """End the freeze in force, inside the transaction that carries out an approved unfreeze. False when there is none.

    One that began after that was asked for stays: nobody approved lifting it.
    """
    now = timezone.now()
    standing = Freeze.objects.filter(lifted_at=None, frozen_at__lte=now if operation is None else operation.requested_at)
    lifted = standing.update(lifted_at=now, lifted_by=operation)
    if lifted:
        record_event(
            actor="system:governance",
            action="unfreeze",
            target="control-plane",
            op_id=operation.printed_id if operation else "",
        )
        publish_hint("operations")
    return bool(lifted)
