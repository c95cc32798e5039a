"""From rows to what the verifier reads: statements, proofs, policies, and the bundle that convinces a stranger."""

from __future__ import annotations

from collections.abc import Sequence

from governance.errors import OperationNotFound
from governance.models import Decision, Operation, PolicyVersion
from governance.operations.lookup import find_operation
from wire.ids import parse_id
from wire.optoken.approval import (
    POLICY_CHANGE,
    ApprovalError,
    Policy,
    Statement,
    encode_bytes,
    judge,
    read_policy,
    read_statement,
    select_proofs,
)


def read_stored(operation: Operation) -> Statement:
    """Return the statement of an operation. Raises ApprovalError when the row was tampered with."""
    return read_statement(bytes(operation.statement))


def is_stopped_by_failure(operation: Operation) -> bool:
    """Return whether people signed that a failure stops the rest of a batch; a row that was tampered with stops as well."""
    try:
        return read_stored(operation).stops_on_failure
    except ApprovalError:
        return True


def find_policy(operation: Operation) -> Policy:
    """Return the policy under which an operation was asked for."""
    return read_policy(bytes(operation.policy.document))


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
            kept[decision.person_id] = decision
    return list(kept.values())


def count_rejections(decisions: Sequence[Decision]) -> int:
    """Return how many people reject."""
    return sum(not decision.is_approval and decision.withdrawn_at is None for decision in decisions)


def is_met(operation: Operation) -> bool:
    """Return whether the approvals of an operation satisfy its policy, a new policy's own threshold included."""
    statement, policy, proofs = read_stored(operation), find_policy(operation), list_proofs(operation)
    try:
        if not judge(statement, select_proofs(proofs, policy), policy).is_met:
            return False
        new = find_new_policy(statement)
        return new is None or judge(statement, select_proofs(proofs, new), new).is_met
    except ApprovalError:
        return False


def find_new_policy(statement: Statement) -> Policy | None:
    """Return the policy that a policy-change would bring in; None for every other operation."""
    if statement.operation != POLICY_CHANGE:
        return None
    row = PolicyVersion.objects.filter(sha256=str(statement.params.get("sha256", ""))).first()
    return None if row is None else read_policy(bytes(row.document))


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


def read_evidence(op_id: str) -> dict[str, object]:
    """Return what the stand-alone verifier checks of an operation; empty when there is no such operation.

    ``op_id``: printed or bare. Members: policies, statement, proofs, receipts (with the key of the box where it is known),
    decisions and state for the reader.
    """
    ident = parse_id("op", op_id)
    if ident is None:
        return {}
    try:
        operation = find_operation(ident)
    except OperationNotFound:
        return {}
    return {
        "policies": policy_chain(after_version=0, up_to=operation.policy.version),
        "statement": encode_bytes(bytes(operation.statement)),
        "proofs": list_lasting_proofs(operation),
        "decisions": [
            {"approver": each.person_name, "at": int(each.at.timestamp()), "broughtBy": each.brought_by}
            for each in list_lasting_approvals(operation)
        ],
        "receipts": [{"receipt": run.receipt, "publicKey": run.receipt_key} for run in operation.runs.all() if run.receipt],
        "state": operation.state,
        "runs": [{"target": run.target, "use": run.use, "state": run.state} for run in operation.runs.all()],
    }
