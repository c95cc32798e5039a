"""What approvers do: approve with a proof, reject, withdraw. Every check that a node makes of a proof is made here first."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from django.db import transaction
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.errors import ApprovalRefused, NotPermitted, StateChanged
from governance.models import ApproverKey, Decision, Operation
from governance.operations.approvals import (
    audit_operation,
    drop_void,
    end_operation,
    explain_own_review,
    fall_short_if_needed,
    find_new_policy,
    find_operation,
    hold_policies,
    is_met,
    list_proofs,
    move_approval,
    require_current,
    require_nothing_on_its_way,
    require_state,
    tell,
)
from governance.operations.runs import plan_runs
from governance.states import ApprovalEvent, ApprovalState
from wire import clock
from wire.optoken.approval import (
    ApprovalError,
    Policy,
    Statement,
    check_proof,
    decode_bytes,
    judge,
    load_public_key,
    select_proofs,
)

if TYPE_CHECKING:
    from core.models import User


@transaction.atomic
def approve(*, op_id: uuid.UUID, user: User, proof: Mapping[str, object], brought_by: str, comment: str = "") -> Operation:
    """Keep an approval that holds; when the policy is satisfied with it, the operation is approved and set to work.

    ``proof``: as in ``wire.optoken.approval``, by a key of ``user``; one that was taken back or dropped never counts again.
    ``brought_by``: ``session:<person>`` or ``token:<name>#<key id>``. Approvals whose key was revoked since, or whose person
    was deactivated, do not count any more. Raises NotFound, StateChanged, NotPermitted, ApprovalRefused.
    """
    require_active(user)
    operation = find_operation(op_id, lock=True)
    require_state(operation, ApprovalState.PENDING)
    now = clock.now()
    if now >= operation.expires_at:
        raise StateChanged(_("Nobody approved this in time; ask for it again."), param="op_id")
    hold_policies(to_change=False)
    require_current(operation)
    key = _find_key(user, proof)
    drop_void(operation)
    statement, policy = operation.read_statement(), operation.policy.read_policy()
    if Decision.objects.filter(operation=operation, person=user, withdrawn_at=None).exists():
        raise ApprovalRefused(
            _("You decided about this already; one person counts once, with any key."), rule="duplicate_proof"
        )
    if why := explain_own_review(operation, policy, [user.get_username()]):
        raise ApprovalRefused(why, rule="reviewer_used_it", param="op_id")
    _check(statement, [*list_proofs(operation), dict(proof)], policy, find_new_policy(statement))
    _require_not_withdrawn(operation, key, proof)
    Decision.objects.create(
        operation=operation, person=user, person_name=user.get_username(), is_approval=True, key=key, proof=dict(proof),
        brought_by=brought_by, comment=comment.strip()[:limits().governance.decision_comment_chars],
    )  # fmt: skip
    ApproverKey.objects.filter(pk=key.pk).update(last_used_at=now)
    detail = {"digest": operation.digest, "key": key.thumbprint[:16], "kind": key.kind, "brought_by": brought_by}
    audit_operation(operation, "operation.approve", actor=f"user:{user.get_username()}", detail=detail)
    publish_hint("operations", str(operation.pk))
    # Read anew: what was read before lacks this decision.
    operation = find_operation(op_id)
    if is_met(operation):
        # The runs are planned and a worker is woken in the transaction of the last approval.
        move_approval(operation, ApprovalEvent.MEET)
        audit_operation(operation, "operation.approved", detail={"digest": operation.digest})
        tell(operation, "approved")
        if operation.max_uses == 1:
            plan_runs(operation, use=1, started_by=operation.requested_by)
    return operation


@transaction.atomic
def reject(*, op_id: uuid.UUID, user: User, comment: str) -> Operation:
    """Say no, with a reason. Ends the operation when enough people do.

    Raises NotFound, StateChanged, NotPermitted, ApprovalRefused.
    """
    require_active(user)
    operation = find_operation(op_id, lock=True)
    require_state(operation, ApprovalState.PENDING, ApprovalState.APPROVED)
    require_nothing_on_its_way(operation)
    policy, new = operation.policy.read_policy(), find_new_policy(operation.read_statement())
    if not any(user.get_username() in each.groups for each in (policy, new) if each is not None):
        raise NotPermitted(_("The policy does not name you as an approver."), param="op_id")
    why = comment.strip()
    if not why:
        raise ApprovalRefused(_("Say why you reject it; whoever asked will read that."), rule="reason_missing", param="comment")
    if user.get_username() == operation.requested_by:
        raise NotPermitted(_("You asked for this; cancel it instead."), param="op_id")
    _withdraw_own(operation, user)
    # No signature: saying no is the safe direction.
    Decision.objects.create(
        operation=operation, person=user, person_name=user.get_username(), is_approval=False,
        comment=why[: limits().governance.decision_comment_chars],
    )  # fmt: skip
    audit_operation(operation, "operation.reject", actor=f"user:{user.get_username()}")
    publish_hint("operations", str(operation.pk))
    operation = find_operation(op_id)
    rejections = sum(not each.is_approval and each.withdrawn_at is None for each in operation.decisions.all())
    if rejections >= policy.classes[operation.op_class].deny_threshold:
        if operation.state == ApprovalState.APPROVED.value:
            move_approval(operation, ApprovalEvent.FALL_SHORT)
        reason = f"rejected by {user.get_username()}: {why}"
        end_operation(operation, ApprovalEvent.REJECT, reason=reason, notice="rejected")
    else:
        fall_short_if_needed(operation)
    return operation


@transaction.atomic
def withdraw(*, op_id: uuid.UUID, user: User) -> Operation:
    """Take one's own decision back, until the operation is on its way; of a standing approval also between two uses.

    Raises NotFound, StateChanged, NotPermitted.
    """
    require_active(user)
    operation = find_operation(op_id, lock=True)
    require_state(operation, ApprovalState.PENDING, ApprovalState.APPROVED)
    require_nothing_on_its_way(operation)
    if not _withdraw_own(operation, user):
        raise NotPermitted(_("You have not decided about this, so there is nothing to take back."), param="op_id")
    publish_hint("operations", str(operation.pk))
    operation = find_operation(op_id)
    fall_short_if_needed(operation)
    return operation


def _withdraw_own(operation: Operation, user: User) -> bool:
    own = Decision.objects.filter(operation=operation, person=user, withdrawn_at=None)
    if not own.update(withdrawn_at=clock.now()):
        return False
    audit_operation(operation, "operation.withdraw", actor=f"user:{user.get_username()}")
    return True


def require_active(user: User) -> None:
    """Raise NotPermitted for a person who was deactivated, however they got here."""
    # Locked: nobody is deactivated until the transaction ends.
    people = type(user).objects.select_for_update(no_key=True)
    if people.filter(pk=user.pk, is_active=True).first() is None:
        raise NotPermitted(_("This person was deactivated and decides about nothing any more."), param="person")


def _find_key(user: User, proof: Mapping[str, object]) -> ApproverKey:
    # Held until the transaction ends: who revokes the key meanwhile finds the decision and voids it.
    keys = ApproverKey.objects.select_for_update(no_key=True).filter(user=user, revoked_at=None)
    key = keys.filter(keyid=str(proof.get("keyid", ""))[:300]).first()
    if key is None or proof.get("approver") != user.get_username():
        raise ApprovalRefused(_("This key is not one of yours, or it was revoked."), rule="unknown_key", param="proof")
    return key


def _require_not_withdrawn(operation: Operation, key: ApproverKey, proof: Mapping[str, object]) -> None:
    """Raise ApprovalRefused for a checked proof that stood once and was taken back, or dropped with its key or person."""
    # Everybody who may look at the operation could bring it again.
    past = [d.proof for d in operation.decisions.all() if d.withdrawn_at and d.proof and d.key_id == key.pk]
    if _identify_signature(key, proof) in {_identify_signature(key, each) for each in past}:
        raise ApprovalRefused(
            _(
                "This very signature was taken back, or dropped with its key or person, and never counts again. Sign "
                "anew; a key that makes the same signature each time, as key files do, cannot: use another key of yours, "
                "or ask for the operation again."
            ),
            rule="withdrawn_proof",
            param="proof",
        )


def _identify_signature(key: ApproverKey, proof: Mapping[str, object]) -> bytes | int:
    """Return what two proofs of a key have in common exactly when its owner signed once."""
    signature = decode_bytes(proof["signature"])
    if isinstance(load_public_key(decode_bytes(key.public_key)), EllipticCurvePublicKey):
        # Whoever sees an ECDSA signature can compute a second one; both have the same first number.
        return decode_dss_signature(signature)[0]
    return signature


def _check(statement: Statement, proofs: list[dict[str, object]], policy: Policy, new: Policy | None) -> None:
    """Check all proofs under the policy and under the one that would follow it; the newest one stands last."""
    judges = [policy] if new is None or new.ref == policy.ref else [policy, new]
    newest = proofs[-1]
    try:
        if not any(newest.get("keyid") in each.keys for each in judges):
            check_proof(newest, statement, policy)
        for each in judges:
            judge(statement, select_proofs(proofs, each), each)
    except ApprovalError as error:
        text = str(error)
        raise ApprovalRefused(f"{text[:1].upper()}{text[1:]}.", rule=error.rule.value, param="proof") from None
