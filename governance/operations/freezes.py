"""Stopping everything at once, which any one approver may do; lifting it is an operation of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from django.db import IntegrityError, transaction

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.errors import Frozen, NotPermitted, StateChanged
from governance.models import Freeze, Operation
from governance.operations.policies import require_policy
from governance.operations.transitions import tell
from wire import clock

if TYPE_CHECKING:
    from core.models import User


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
            row = Freeze.objects.create(frozen_by=name, reason=reason.strip()[: limits().governance.freeze_reason_chars])
    except IntegrityError:
        raise Frozen("Everything is frozen already.") from None
    record_event(actor=f"user:{name}", action="freeze", target="control-plane")
    tell(None, "frozen")
    publish_hint("operations")
    return row


def name_freeze(row: Freeze) -> dict[str, object]:
    """Return what a statement names a freeze by. Its number alone would not do: a restored database gives numbers again."""
    return {"freeze": row.pk, "frozenBy": row.frozen_by, "frozenAt": int(row.frozen_at.timestamp())}


def lift_freeze(*, named: Mapping[str, object], operation: Operation | None) -> bool:
    """End the freeze in force, inside the transaction that carries out an approved unfreeze. False when there is none.

    ``named``: which one was signed, as ``name_freeze`` says it. Raises StateChanged when it is not the one in force.
    """
    row = Freeze.objects.select_for_update().filter(lifted_at=None).first()
    if row is None:
        return False
    if named != name_freeze(row):
        which = f"is for freeze {named['freeze']}, which has ended" if named else "names no freeze"
        raise StateChanged(
            f"What was signed {which}; {row.frozen_by} froze everything at {row.frozen_at:%Y-%m-%d %H:%M:%S} UTC (freeze "
            f"{row.pk}). Look at why, and ask for unfreeze again.",
            param="freeze",
        )
    row.lifted_at, row.lifted_by = clock.now(), operation
    row.save(update_fields=["lifted_at", "lifted_by"])
    op_id = operation.printed_id if operation else ""
    record_event(actor="system:governance", action="unfreeze", target="control-plane", op_id=op_id)
    publish_hint("operations")
    return True
