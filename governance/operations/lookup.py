"""Finding operations and locking them, and moving them on by compare-and-set.

Locks are taken in one order everywhere: the person who decides, the operation, its runs, the policies, the key that signed,
the decisions, the fence. Whoever needs several operations skips those that somebody else holds. So nobody ever waits in a
circle.
"""

from __future__ import annotations

import logging
import uuid
from datetime import datetime

from django.db import connection

from core.hints import publish_hint
from governance.errors import OperationNotFound, StateChanged
from governance.models import Operation, OperationRun, PolicyVersion
from governance.states import ApprovalEvent, ApprovalState, IllegalTransition, next_approval
from wire import clock
from wire.ids import format_id

logger = logging.getLogger("muster.governance")

_POLICY_LOCK = 0x6D73_706C


def find_operation(op_id: uuid.UUID, *, lock: bool = False) -> Operation:
    """Return an operation with its policy, decisions and runs; ``lock``: until the transaction ends.

    Raises OperationNotFound.
    """
    operation = _select(op_id, lock=lock, skip_locked=False)
    if operation is None:
        raise OperationNotFound(f"There is no operation {format_id('op', op_id)}.", param="op_id")
    return operation


def take_operation(op_id: uuid.UUID) -> Operation | None:
    """Return an operation locked, or None when somebody else holds it: for sweeps, which come again."""
    return _select(op_id, lock=True, skip_locked=True)


def _select(op_id: uuid.UUID, *, lock: bool, skip_locked: bool) -> Operation | None:
    rows = Operation.objects.select_related("policy", "adopts").prefetch_related(
        "decisions", "decisions__key", "decisions__person", "runs"
    )
    if lock:
        # Not against rows that refer to it: a notice or a decision may be written while somebody holds it.
        rows = rows.select_for_update(of=("self",), no_key=True, skip_locked=skip_locked)
    return rows.filter(pk=op_id).first()


def lock_run(run_id: uuid.UUID) -> OperationRun | None:
    """Return a run with its operation, both locked in their order; None when there is no such run."""
    op_id = OperationRun.objects.filter(pk=run_id).values_list("operation_id", flat=True).first()
    if op_id is None:
        return None
    operation = Operation.objects.select_for_update(no_key=True).get(pk=op_id)
    run = OperationRun.objects.select_for_update(no_key=True).get(pk=run_id)
    run.operation = operation
    return run


def hold_policies(*, to_change: bool) -> None:
    """Keep the active policy what it is until the transaction ends; ``to_change``: be the only one who looks at it."""
    name = "pg_advisory_xact_lock" if to_change else "pg_advisory_xact_lock_shared"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {name}(%s)", [_POLICY_LOCK])


def is_current(operation: Operation) -> bool:
    """Return whether the policy of an operation is the active one, read now; the first one of all stands for itself."""
    active = PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).values_list("pk", flat=True).first()
    if active is not None:
        return bool(active == operation.policy_id)
    is_draft = PolicyVersion.objects.filter(pk=operation.policy_id, state=PolicyVersion.State.DRAFT).exists()
    return is_draft and operation.adopts_id == operation.policy_id


def move_approval(operation: Operation, event: ApprovalEvent, *, reason: str = "", at: datetime | None = None) -> None:
    """Move the approval of a locked operation on. Raises StateChanged when the event does not happen in its state."""
    old = ApprovalState(operation.state)
    try:
        new = next_approval(old, event)
    except IllegalTransition:
        raise StateChanged(f"This operation is {old.value} already; look at it again.", param="op_id") from None
    now = at or clock.now()
    changes: dict[str, object] = {"state": new.value, "state_reason": reason[:300], "updated_at": now}
    changes["decided_at"] = None if new is ApprovalState.PENDING else now
    if not Operation.objects.filter(pk=operation.pk, state=old.value).update(**changes):
        raise StateChanged("Somebody else moved this operation on at the same moment; look at it again.", param="op_id")
    for field, value in changes.items():
        setattr(operation, field, value)
    publish_hint("operations", str(operation.pk))


def require_state(operation: Operation, *states: ApprovalState) -> None:
    """Raise StateChanged unless the operation is in one of the states."""
    if ApprovalState(operation.state) not in states:
        why = f" ({operation.state_reason})" if operation.state_reason else ""
        raise StateChanged(
            f"This operation is {operation.state}{why}; nothing can be decided about it any more.", param="op_id"
        )
