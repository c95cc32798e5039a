"""The one door of governed changes that the control plane makes itself: an approved run, or no policy yet."""

from __future__ import annotations

from governance.errors import NeedsApproval
from governance.models import OperationRun, PolicyVersion
from governance.operations.evidence import read_stored
from governance.registry import RunOrder
from governance.states import ApprovalState, RunState
from wire.optoken.approval import ApprovalError


def is_governed() -> bool:
    """Return whether governed changes need approval: from the first active policy on, for good."""
    return PolicyVersion.objects.filter(activated_at__isnull=False).exists()


def require_approval(operation: str, *, order: RunOrder | None, instead: str = "") -> None:
    """Let a governed change pass when it carries out an approved run of that operation. Raises NeedsApproval.

    ``instead``: a sentence that names what is allowed without approval, "" = nothing that is like it.
    Before the first policy there is nobody who could approve, so the operator decides alone; the audit trail says so.
    """
    if order is not None:
        run = OperationRun.objects.select_related("operation").filter(pk=order.run_id).first()
        if (
            run is not None
            and run.operation.operation == order.operation == operation
            and run.operation.state == ApprovalState.APPROVED.value
            and run.state == RunState.QUEUED.value
            and run.target == order.target
            and _is_signed(run, order)
        ):
            return
    elif not is_governed():
        return
    words = f"This needs approval: propose {operation} under Approvals, and others sign it."
    raise NeedsApproval(f"{words} {instead}".strip(), param="operation")


def _is_signed(run: OperationRun, order: RunOrder) -> bool:
    """Return whether the order asks for what people signed: for this target, with these parameters."""
    try:
        statement = read_stored(run.operation)
    except ApprovalError:
        return False
    return order.target in statement.targets and dict(order.params) == dict(statement.params)
