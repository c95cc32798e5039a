"""Evidence: what rows say of an operation as the verifier reads it, and the guard of changes that need an approved run."""

from __future__ import annotations

from collections.abc import Sequence

from governance.errors import NeedsApproval, NoPolicy
from governance.models import Decision, Operation, OperationRun, PolicyVersion
from governance.registry import RunOrder
from governance.states import ApprovalState, RunState
from wire.optoken.approval import POLICY_CHANGE, ApprovalError, Policy, Statement, encode_bytes, judge, select_proofs


def is_stopped_by_failure(operation: Operation) -> bool:
    """Return whether people signed that a failure stops the rest of a batch."""
    try:
        return operation.read_statement().stops_on_failure
    except ApprovalError:
        # A row that was tampered with stops as well: what was signed cannot be read.
        return True


def find_new_policy(statement: Statement) -> Policy | None:
    """Return the policy that a policy-change would bring in; None for every other operation."""
    if statement.operation != POLICY_CHANGE:
        return None
    row = PolicyVersion.objects.filter(sha256=str(statement.params.get("sha256", ""))).first()
    return None if row is None else row.read_policy()


def active_policy() -> tuple[PolicyVersion, Policy] | None:
    """Return the policy in force; None before the first one."""
    row = PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).first()
    return None if row is None else (row, row.read_policy())


def require_policy() -> tuple[PolicyVersion, Policy]:
    """Return the policy in force. Raises NoPolicy."""
    found = active_policy()
    if found is None:
        raise NoPolicy("There is no approval policy yet. Draft the first one and have it signed, then ask again.")
    return found


def policy_chain(*, after_version: int, up_to: int | None = None) -> list[dict[str, object]]:
    """Return the policies after a version, oldest first, each with the statement and the proofs that brought it in.

    ``up_to``: the last version, None = the newest.
    """
    rows = PolicyVersion.objects.filter(version__gt=after_version, activated_at__isnull=False).order_by("version")
    if up_to is not None:
        rows = rows.filter(version__lte=up_to)
    chain: list[dict[str, object]] = []
    for row in rows:
        made = Operation.objects.prefetch_related("decisions").get(adopts=row)
        chain.append(
            {
                "document": encode_bytes(bytes(row.document)),
                "statement": encode_bytes(bytes(made.statement)),
                "proofs": list_lasting_proofs(made),
            }
        )
    return chain


def list_proofs(operation: Operation) -> list[dict[str, object]]:
    """Return the proofs that stand: of approvals that were not withdrawn, oldest first."""
    standing = [d for d in operation.decisions.all() if d.is_approval and d.withdrawn_at is None]
    return [dict(decision.proof) for decision in sorted(standing, key=lambda d: d.at) if decision.proof]


def list_lasting_proofs(operation: Operation) -> list[dict[str, object]]:
    """Return the proofs of ``list_lasting_approvals``."""
    return [dict(decision.proof) for decision in list_lasting_approvals(operation) if decision.proof]


def list_lasting_approvals(operation: Operation) -> list[Decision]:
    """Return the approvals that stand, and those that stood when something was sent: what auditors are shown.

    Of a person who signed again after taking it back, the last one.
    """
    sent_at = operation.dispatched_at
    kept: dict[int, Decision] = {}
    for decision in sorted(operation.decisions.all(), key=lambda d: d.at):
        stood = decision.withdrawn_at is None or (sent_at is not None and decision.withdrawn_at > sent_at)
        if decision.is_approval and decision.proof and stood:
            # Of a person who signed again after taking it back, the last one.
            kept[decision.person_id] = decision
    return list(kept.values())


def count_rejections(decisions: Sequence[Decision]) -> int:
    """Return how many people reject."""
    return sum(not decision.is_approval and decision.withdrawn_at is None for decision in decisions)


def is_met(operation: Operation) -> bool:
    """Return whether the approvals of an operation satisfy its policy, a new policy's own threshold included."""
    statement, policy, proofs = operation.read_statement(), operation.policy.read_policy(), list_proofs(operation)
    try:
        if not judge(statement, select_proofs(proofs, policy), policy).is_met:
            return False
        new = find_new_policy(statement)
        return new is None or judge(statement, select_proofs(proofs, new), new).is_met
    except ApprovalError:
        return False


def is_governed() -> bool:
    # From the first active policy on, for good: one that has expired opens nothing again.
    return PolicyVersion.objects.filter(activated_at__isnull=False).exists()


def require_approval(operation: str, *, order: RunOrder | None, instead: str = "") -> None:
    """Let a governed change pass when it carries out an approved run of that operation. Raises NeedsApproval.

    ``instead``: a sentence that names what is allowed without approval, "" = nothing that is like it.
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
        # Before the first policy nobody could approve, so the operator decides alone; the audit log says so.
        return
    words = f"This needs approval: propose {operation} under Approvals, and others sign it."
    raise NeedsApproval(f"{words} {instead}".strip(), param="operation")


def _is_signed(run: OperationRun, order: RunOrder) -> bool:
    """Return whether the order asks for what people signed: for this target, with these parameters."""
    try:
        statement = run.operation.read_statement()
    except ApprovalError:
        return False
    return order.target in statement.targets and dict(order.params) == dict(statement.params)
