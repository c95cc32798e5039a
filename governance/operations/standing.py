"""Standing approvals: one statement that may be carried out several times within its window."""

from __future__ import annotations

import uuid

from django.db import transaction
from django.db.models import Max

from governance.audit import record_event
from governance.errors import ApprovalRefused, Frozen, StateChanged
from governance.models import OperationRun
from governance.operations.decisions import plan_runs, require_current
from governance.operations.evidence import find_policy
from governance.operations.freezes import read_freeze
from governance.operations.lookup import find_operation, hold_policies, require_state
from governance.operations.proposals import name_actor, require_proposer
from governance.operations.reviews import explain_unreviewed
from governance.operations.transitions import is_idle_standing, list_void
from governance.operations.values import Proposer
from governance.states import ApprovalState
from wire import clock
from wire.optoken.approval import BREAK_GLASS


@transaction.atomic
def use_approval(*, op_id: uuid.UUID, proposer: Proposer) -> list[OperationRun]:
    """Carry a standing approval out once more and return the runs. The box counts as well.

    Whoever may ask for operations of its class may use it. Raises OperationNotFound, StateChanged, NotPermitted,
    ApprovalRefused (not a standing one, used up, a new policy, an approver's key revoked since, not reviewed), Frozen.
    """
    operation = find_operation(op_id, lock=True)
    require_state(operation, ApprovalState.APPROVED)
    if operation.max_uses == 1:
        raise ApprovalRefused("This is no standing approval: it is carried out once, by itself.", rule="too_many_uses")
    require_proposer(proposer, find_policy(operation), operation.op_class)
    if clock.now() >= operation.not_after:
        raise StateChanged("The window of this approval is over; ask for a new one.", param="op_id")
    if read_freeze() is not None:
        raise Frozen("Everything is frozen; a quorum can lift that.")
    hold_policies(to_change=False)
    require_current(operation)
    if list_void(operation):
        raise ApprovalRefused(
            "A key that approved this was revoked, or its person deactivated; another approver must sign.",
            rule="too_few_approvers",
        )
    used = OperationRun.objects.filter(operation=operation).aggregate(last=Max("use"))["last"] or 0
    if used >= operation.max_uses:
        raise ApprovalRefused(f"All {operation.max_uses} uses are spent; ask for a new approval.", rule="too_many_uses")
    if not is_idle_standing(operation):
        raise StateChanged("Its last use has not ended; wait for that.", param="op_id")
    if operation.op_class == BREAK_GLASS and (why := explain_unreviewed()):
        raise ApprovalRefused(why, rule="not_reviewed")
    record_event(
        actor=name_actor(proposer), action="operation.use", target=operation.printed_id, op_id=operation.printed_id,
        detail={"use": used + 1},
    )  # fmt: skip
    return plan_runs(operation, use=used + 1, started_by=proposer.name)
