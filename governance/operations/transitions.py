"""How operations end, or fall back to pending: the state, its runs, the audit events and the notices, in one transaction."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from django.db import transaction

from core.hints import publish_hint
from governance.audit import record_event
from governance.errors import StateChanged
from governance.models import Decision, Operation, OperationRun, PolicyVersion
from governance.notices import notify
from governance.operations.evidence import is_met
from governance.operations.lookup import move_approval
from governance.states import FINAL_RUNS, OPEN_RUNS, ApprovalEvent, ApprovalState, RunState
from wire import clock
from wire.optoken.approval import ApprovalError

logger = logging.getLogger("muster.governance")

SYSTEM = "system:governance"
_ENDINGS = {
    ApprovalEvent.REJECT: "operation.rejected",
    ApprovalEvent.EXPIRE: "operation.expire",
    ApprovalEvent.CANCEL: "operation.cancel",
    ApprovalEvent.BLOCK: "operation.block",
}
"""What the audit trail calls an end. ``operation.reject`` is what one person says, and may not suffice."""


def require_nothing_on_its_way(operation: Operation) -> None:
    """Raise StateChanged once anything was sent on its way: from then on only another operation undoes it.

    Between two uses of a standing approval nothing is on its way, so it can be ended then.
    """
    if operation.dispatched_at is None or is_idle_standing(operation):
        return
    if operation.max_uses > 1:
        raise StateChanged("A use of this is on its way; wait until that has ended.", param="op_id")
    raise StateChanged("This operation is on its way already; propose another one that undoes it.", param="op_id")


def is_idle_standing(operation: Operation) -> bool:
    """Return whether it is a standing approval of which no use is being carried out."""
    is_open = [state.value for state in OPEN_RUNS]
    return operation.max_uses > 1 and not OperationRun.objects.filter(operation=operation, state__in=is_open).exists()


def end_operation(
    operation: Operation, event: ApprovalEvent, *, reason: str, actor: str = SYSTEM, notice: str = "", code: str = ""
) -> None:
    """End the approval of a locked operation, skip what has not begun, and tell people. Raises StateChanged.

    ``notice``: which one is sent, "" = none; ``code``: of the runs that are skipped. The draft of a policy ends with it.
    """
    move_approval(operation, event, reason=reason)
    skip_runs(operation, reason, code=code)
    if operation.adopts_id is not None:
        drafts = PolicyVersion.objects.filter(pk=operation.adopts_id, state=PolicyVersion.State.DRAFT)
        drafts.update(state=PolicyVersion.State.DROPPED)
    record_event(
        actor=actor, action=_ENDINGS[event], target=operation.printed_id, op_id=operation.printed_id,
        detail={"digest": operation.digest},
    )  # fmt: skip
    if notice:
        tell(operation, notice)


def skip_runs(operation: Operation, reason: str, *, code: str = "", after: OperationRun | None = None) -> int:
    """End the runs of a locked operation that have not begun, each with its event; ``after``: only those behind it in its use.

    Returns how many there were.
    """
    waiting = OperationRun.objects.select_for_update(no_key=True).filter(operation=operation, state=RunState.QUEUED.value)
    if after is not None:
        waiting = waiting.filter(use=after.use, position__gt=after.position)
    now, skipped = clock.now(), list(waiting.order_by("use", "position"))
    for run in skipped:
        changes = {"state": RunState.SKIPPED.value, "ended_at": now, "message": reason[:500], "code": code, "updated_at": now}
        OperationRun.objects.filter(pk=run.pk).update(**changes)
        audit_run(run, operation, "operation.run.skipped", {"code": code, "receipt": False})
    if skipped:
        publish_hint("operations", str(operation.pk))
    return len(skipped)


def audit_run(run: OperationRun, operation: Operation, action: str, detail: dict[str, object]) -> None:
    """Write an event of a run into the audit trail."""
    record_event(
        actor=SYSTEM, action=action, target=operation.printed_id, op_id=operation.printed_id,
        detail={"target": run.target, "use": run.use, "digest": operation.digest, **detail},
    )  # fmt: skip


def tell(operation: Operation | None, event: str, *, run: OperationRun | None = None) -> None:
    """Write the notices of an event; a stored policy that cannot be read any more costs the notices and nothing else."""
    try:
        with transaction.atomic():
            notify(operation, event, run=run)
    except ApprovalError as error:
        logger.critical("notice_not_written op=%s event=%s rule=%s", operation and operation.printed_id, event, error.rule)


def tell_when_over(operation: Operation, run: OperationRun) -> None:
    """Tell people how a use went, once nothing of it is open."""
    states = set(OperationRun.objects.filter(operation=operation, use=run.use).values_list("state", flat=True))
    if states <= {state.value for state in FINAL_RUNS}:
        tell(operation, "succeeded" if states == {RunState.SUCCEEDED.value} else "failed", run=run)


def fall_short_if_needed(operation: Operation) -> bool:
    """Move an approved operation back to pending when its approvals do not suffice any more; whether they do not."""
    if operation.state != ApprovalState.APPROVED.value or is_met(operation):
        return False
    move_approval(operation, ApprovalEvent.FALL_SHORT)
    record_event(
        actor=SYSTEM, action="operation.fall_short", target=operation.printed_id, op_id=operation.printed_id,
        detail={"digest": operation.digest},
    )  # fmt: skip
    return True


def list_void(operation: Operation) -> list[Decision]:
    """Return the approvals that stand although their key was revoked or their person was off since, if only for a moment."""
    return [d for d in operation.decisions.all() if d.void_at is not None and d.withdrawn_at is None]


def drop_void(operation: Operation) -> Sequence[Decision]:
    """Withdraw the approvals of revoked keys and deactivated people from a locked operation that is not on its way.

    What a box was sent before holds, since only a new policy tells boxes of it. Returns the decisions that were withdrawn.
    """
    void, now = list_void(operation), clock.now()
    for decision in void:
        decision.withdrawn_at = now
        decision.save(update_fields=["withdrawn_at"])
        is_revoked = decision.key is not None and decision.key.revoked_at is not None
        record_event(
            actor=SYSTEM, action="operation.withdraw", target=operation.printed_id, op_id=operation.printed_id,
            detail={"decision": decision.pk, "why": "key_revoked" if is_revoked else "person_inactive"},
        )  # fmt: skip
    if void:
        publish_hint("operations", str(operation.pk))
        fall_short_if_needed(operation)
    return void
