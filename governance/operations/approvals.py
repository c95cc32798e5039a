"""Approvals: under which policy, by which proofs, moved on by compare-and-set, ended by people or by time, and reviewed.

Locks are taken in one order everywhere: the person who decides, the operation, its runs, the policies, the key that signed,
the decisions, the fence. Whoever needs several operations skips those that somebody else holds. So nobody ever waits in a
circle.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from datetime import timedelta

from django.db import connection, transaction
from django.db.models import Exists, F, Max, OuterRef, Q, QuerySet
from django.db.models.functions import Coalesce
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import Detail, record_event
from governance.errors import ApprovalRefused, InvalidProposal, NeedsApproval, NoPolicy, NotFound, StateChanged
from governance.models import Decision, Freeze, Operation, OperationRun, PolicyVersion
from governance.notices import notify
from governance.registry import RunOrder
from governance.states import APPROVALS, FINAL_RUNS, OPEN_RUNS, ApprovalEvent, ApprovalState, RunState
from wire import clock
from wire.ids import format_id
from wire.optoken.approval import (
    BREAK_GLASS,
    POLICY_CHANGE,
    ApprovalError,
    Policy,
    Statement,
    encode_bytes,
    judge,
    select_proofs,
)

logger = logging.getLogger("muster.governance")

SYSTEM = "system:governance"
REVIEW = "break-glass-review"
_POLICY_LOCK = 0x6D73_706C
_REVIEW_LOCK = 0x6D73_6267
_OPEN = [state.value for state in OPEN_RUNS]
_UNDECIDED = [ApprovalState.PENDING.value, ApprovalState.APPROVED.value]
# What the audit trail calls an end. ``operation.reject`` is what one person says, and may not suffice.
_ENDINGS = {
    ApprovalEvent.REJECT: "operation.rejected",
    ApprovalEvent.EXPIRE: "operation.expire",
    ApprovalEvent.CANCEL: "operation.cancel",
    ApprovalEvent.BLOCK: "operation.block",
}


def find_operation(op_id: uuid.UUID, *, lock: bool = False) -> Operation:
    """Return an operation with its policy, decisions and runs, locked if so. Raises NotFound."""
    operation = _select(op_id, lock=lock, skip_locked=False)
    if operation is None:
        raise NotFound(_("There is no operation %(format_id)s.") % {"format_id": format_id("op", op_id)}, param="op_id")
    return operation


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


def require_state(operation: Operation, *states: ApprovalState) -> None:
    if ApprovalState(operation.state) not in states:
        why = f" ({operation.state_reason})" if operation.state_reason else ""
        raise StateChanged(
            _("This operation is %(state)s%(why)s; nothing can be decided about it any more.")
            % {"state": operation.state, "why": why},
            param="op_id",
        )


# Policy and freeze, which every move looks at


def hold_policies(*, to_change: bool) -> None:
    """Keep the active policy what it is until the transaction ends; ``to_change``: be the only one who looks at it."""
    # Shared among those who only look: they need not wait for each other.
    name = "pg_advisory_xact_lock" if to_change else "pg_advisory_xact_lock_shared"
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {name}(%s)", [_POLICY_LOCK])


def is_current(operation: Operation) -> bool:
    """Return whether the policy of an operation is the active one, read now."""
    active = PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).values_list("pk", flat=True).first()
    if active is not None:
        return bool(active == operation.policy_id)
    # The first policy of all is signed under itself.
    is_draft = PolicyVersion.objects.filter(pk=operation.policy_id, state=PolicyVersion.State.DRAFT).exists()
    return is_draft and operation.adopts_id == operation.policy_id


def require_current(operation: Operation) -> None:
    """Raise ApprovalRefused when the policy changed since; the sweep then blocks the operation."""
    if not is_current(operation):
        raise ApprovalRefused(
            _("The policy changed since this was asked for (under version %(version)s); ask for it again.")
            % {"version": operation.policy.version},
            rule="wrong_policy",
        )


def read_freeze() -> Freeze | None:
    return Freeze.objects.filter(lifted_at=None).first()


# Moves and ends


def move_approval(operation: Operation, event: ApprovalEvent, *, reason: str = "") -> None:
    """Move the approval of a locked operation on. Raises StateChanged when the event does not happen in its state."""
    old = ApprovalState(operation.state)
    new = APPROVALS.get((old, event))
    if new is None:
        raise StateChanged(_("This operation is %(value)s already; look at it again.") % {"value": old.value}, param="op_id")
    now = clock.now()
    changes: dict[str, object] = {"state": new.value, "state_reason": reason[:300], "updated_at": now}
    changes["decided_at"] = None if new is ApprovalState.PENDING else now
    if not Operation.objects.filter(pk=operation.pk, state=old.value).update(**changes):
        raise StateChanged(_("Somebody else moved this operation on at the same moment; look at it again."), param="op_id")
    for field, value in changes.items():
        setattr(operation, field, value)
    publish_hint("operations", str(operation.pk))


def require_nothing_on_its_way(operation: Operation) -> None:
    """Raise StateChanged once anything was sent on its way: from then on only another operation undoes it."""
    # Between two uses of a standing approval nothing is on its way, so it can be ended then.
    if operation.dispatched_at is None or is_idle_standing(operation):
        return
    if operation.max_uses > 1:
        raise StateChanged(_("A use of this is on its way; wait until that has ended."), param="op_id")
    raise StateChanged(_("This operation is on its way already; propose another one that undoes it."), param="op_id")


def is_idle_standing(operation: Operation) -> bool:
    """Return whether it is a standing approval of which no use is being carried out."""
    return operation.max_uses > 1 and not OperationRun.objects.filter(operation=operation, state__in=_OPEN).exists()


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
    audit_operation(operation, _ENDINGS[event], actor=actor, detail={"digest": operation.digest})
    if notice:
        tell(operation, notice)


def skip_runs(operation: Operation, reason: str, *, code: str = "", after: OperationRun | None = None) -> None:
    """End the runs of a locked operation that have not begun; ``after``: only those behind it in its use."""
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


def audit_operation(operation: Operation, action: str, *, actor: str = SYSTEM, detail: Detail | None = None) -> None:
    record_event(actor=actor, action=action, target=operation.printed_id, op_id=operation.printed_id, detail=detail)


def audit_run(run: OperationRun, operation: Operation, action: str, detail: Detail) -> None:
    about = {"target": run.target, "use": run.use, "digest": operation.digest}
    audit_operation(operation, action, detail={**about, **detail})


def tell(operation: Operation | None, event: str, *, run: OperationRun | None = None) -> None:
    """Write the notices of an event."""
    try:
        with transaction.atomic():
            notify(operation, event, run=run)
    # A stored policy that cannot be read any more costs the notices and nothing else.
    except ApprovalError as error:
        logger.critical("notice_not_written op=%s event=%s rule=%s", operation and operation.printed_id, event, error.rule)


def tell_when_over(operation: Operation, run: OperationRun) -> None:
    """Tell people how a use went, once nothing of it is open."""
    states = set(OperationRun.objects.filter(operation=operation, use=run.use).values_list("state", flat=True))
    if states <= {state.value for state in FINAL_RUNS}:
        tell(operation, "succeeded" if states == {RunState.SUCCEEDED.value} else "failed", run=run)


# Approvals that do not suffice any more


def fall_short_if_needed(operation: Operation) -> None:
    """Move an approved operation back to pending when its approvals do not suffice any more."""
    if operation.state != ApprovalState.APPROVED.value or is_met(operation):
        return
    move_approval(operation, ApprovalEvent.FALL_SHORT)
    audit_operation(operation, "operation.fall_short", detail={"digest": operation.digest})


def list_void(operation: Operation) -> list[Decision]:
    """Return the approvals that stand although their key was revoked or their person was off since, if only for a moment."""
    return [d for d in operation.decisions.all() if d.void_at is not None and d.withdrawn_at is None]


def drop_void(operation: Operation) -> None:
    """Withdraw the approvals of revoked keys and deactivated people from a locked operation that is not on its way."""
    # What a node was sent before holds, since only a new policy tells nodes of a key.
    void, now = list_void(operation), clock.now()
    for decision in void:
        decision.withdrawn_at = now
        decision.save(update_fields=["withdrawn_at"])
        is_revoked = decision.key is not None and decision.key.revoked_at is not None
        why = "key_revoked" if is_revoked else "person_inactive"
        audit_operation(operation, "operation.withdraw", detail={"decision": decision.pk, "why": why})
    if void:
        publish_hint("operations", str(operation.pk))
        fall_short_if_needed(operation)


# Break-glass: no second use before somebody who had no part in the first has looked at it


def list_unreviewed() -> QuerySet[Operation]:
    """Return the break-glass operations that were used and that nobody has reviewed, oldest first."""
    done = Operation.objects.filter(operation=REVIEW, runs__state=RunState.SUCCEEDED.value, reviews__isnull=False)
    used = Operation.objects.filter(op_class=BREAK_GLASS, dispatched_at__isnull=False)
    return used.exclude(pk__in=done.values("reviews")).order_by("dispatched_at")


def explain_unreviewed(*, but: Operation | None = None) -> str:
    """Return what keeps break-glass from being used, "" = nothing; ``but``: the operation that asks."""
    # Others who ask wait until the transaction ends: of two uses at once, the second one sees the first.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_REVIEW_LOCK])
    rows = list_unreviewed() if but is None else list_unreviewed().exclude(pk=but.pk)
    found = rows.first()
    return f"The last break-glass, {found.printed_id}, has not been reviewed; propose its review first." if found else ""


def list_users(used: Operation) -> frozenset[str]:
    """Return who used a break-glass operation: who asked for it, who signed it, and who began it."""
    began = OperationRun.objects.filter(operation=used).exclude(started_by="").values_list("started_by", flat=True)
    return frozenset({used.requested_by, *(str(proof["approver"]) for proof in list_lasting_proofs(used)), *began})


def explain_own_review(review: Operation, policy: Policy, names: Iterable[str]) -> str:
    """Return why these people cannot sign an operation because it reviews what they used, "" = that does not hinder them."""
    # A class in which the requester counts (solo) says openly that nobody else need look, and hinders nobody.
    rules = policy.classes.get(review.op_class)
    if review.operation != REVIEW or review.reviews is None or (rules is not None and rules.solo):
        return ""
    own = sorted(list_users(review.reviews).intersection(names))
    return f"{', '.join(own)} used {review.reviews.printed_id}, so somebody else must review it." if own else ""


def require_reviewers(used: Operation, *, policy: Policy, op_class: str, proposer_name: str) -> None:
    """Raise InvalidProposal when too few could sign the review of a break-glass operation that this proposer asks for."""
    rules = policy.classes.get(op_class)
    if rules is None or rules.solo:
        return
    users = list_users(used)
    able = {key.approver for key in policy.keys.values() if not key.is_break_glass}
    left = sorted(able - users - {proposer_name})
    if len(left) < rules.required:
        raise InvalidProposal(
            _(
                "The review needs %(required)s approvers who did not use it and do not ask for it. %(users)s used it, "
                "which leaves %(left)s. Have one of those who used it ask for the review, or name more approvers by a "
                "change of the policy."
            )
            % {"required": rules.required, "users": ", ".join(sorted(users)), "left": ", ".join(left) or _("nobody")},
            param="targets",
        )


# What time does. Each operation is looked at again under its lock, and one that is held is left for the next sweep


def sweep_operations() -> int:
    """Remind, expire, block, and take approvals of revoked keys out; returns how many operations were changed."""
    return _warn() + _expire() + block_stale() + _drop_void() + _claim_reviews()


def is_anything_open() -> bool:
    """Whether an operation is pending or approved, or was used and nobody was reminded to review it: time changes no other."""
    unreviewed = Q(op_class=BREAK_GLASS, dispatched_at__isnull=False, warned_percent__lt=100)
    return Operation.objects.filter(Q(state__in=_UNDECIDED) | unreviewed).exists()


def block_stale() -> int:
    """Block what was asked for under a policy that is no longer active and is not on its way; returns how many."""
    gone = [PolicyVersion.State.SUPERSEDED, PolicyVersion.State.DROPPED]
    # Not the very change that put the active one in force: it is being carried out.
    stale = _not_on_its_way().filter(policy__state__in=gone).exclude(adopts__state=PolicyVersion.State.ACTIVE)
    return _end_each(stale, ApprovalEvent.BLOCK, notice="blocked", reason="the policy changed meanwhile")


def _not_on_its_way() -> QuerySet[Operation]:
    """Return what may still end: undecided, or approved and unsent, or a standing approval between two uses."""
    runs = OperationRun.objects.filter(operation=OuterRef("pk"), state__in=_OPEN)
    is_idle = Q(max_uses__gt=1) & ~Exists(runs)
    return Operation.objects.filter(is_idle | Q(dispatched_at=None) | Q(state=_UNDECIDED[0]), state__in=_UNDECIDED)


def _expire() -> int:
    now = clock.now()
    late = Operation.objects.filter(state=ApprovalState.PENDING.value, expires_at__lte=now)
    unused = _not_on_its_way().filter(state=ApprovalState.APPROVED.value, dispatched_at=None, not_after__lte=now)
    # A standing approval with uses left: its end is no news, so nobody is told.
    left = _not_on_its_way().filter(state=ApprovalState.APPROVED.value, dispatched_at__isnull=False, not_after__lte=now)
    left = left.annotate(used=Coalesce(Max("runs__use"), 0)).filter(used__lt=F("max_uses"))
    return (
        _end_each(late, ApprovalEvent.EXPIRE, notice="expired", reason="nobody decided in time")
        + _end_each(unused, ApprovalEvent.EXPIRE, notice="expired", reason="it was not used in time")
        + _end_each(left, ApprovalEvent.EXPIRE, notice="", reason="its window is over")
    )


def _drop_void() -> int:
    void = Decision.objects.filter(void_at__isnull=False, withdrawn_at=None)
    rows = _not_on_its_way().filter(pk__in=void.values("operation"))
    return _each(rows, drop_void)


def _end_each(rows: QuerySet[Operation], event: ApprovalEvent, *, notice: str, reason: str) -> int:
    return _each(rows, lambda operation: end_operation(operation, event, reason=reason, notice=notice))


def _each(rows: QuerySet[Operation], change: Callable[[Operation], object]) -> int:
    """Change every operation that is among the rows still once it is locked; returns how many were."""
    changed = 0
    for op_id in list(rows.order_by("requested_at").values_list("pk", flat=True)[: limits().governance.sweep_batch]):
        with transaction.atomic():
            operation = _select(op_id, lock=True, skip_locked=True)
            # An approval may have been counted between the look and the lock.
            if operation is not None and rows.filter(pk=op_id).exists():
                change(operation)
                changed += 1
    return changed


def _warn() -> int:
    """Remind at half and at nine tenths of the time that an operation may wait."""
    now, warned = clock.now(), 0
    warnings = (limits().governance.approval_last_warning_percent, limits().governance.approval_warning_percent)
    waiting = Operation.objects.filter(state=ApprovalState.PENDING.value, expires_at__gt=now, warned_percent__lt=warnings[0])
    for operation in waiting.order_by("expires_at")[: limits().governance.sweep_batch]:
        passed = (now - operation.requested_at) / (operation.expires_at - operation.requested_at) * 100
        reached = next((percent for percent in warnings if passed >= percent), 0)
        if reached <= operation.warned_percent:
            continue
        with transaction.atomic():
            # Compare and set: of two sweeps at once one reminds.
            changed = Operation.objects.filter(
                pk=operation.pk, state=ApprovalState.PENDING.value, warned_percent=operation.warned_percent
            ).update(warned_percent=reached)
            if changed:
                tell(operation, f"expiring_{reached}")
                warned += 1
    return warned


def _claim_reviews() -> int:
    """Remind everyone once of a break-glass that nobody reviewed within a day."""
    due = list_unreviewed().filter(
        dispatched_at__lte=clock.now() - timedelta(seconds=limits().governance.review_s), warned_percent__lt=100
    )
    claimed = 0
    for operation in due[: limits().governance.sweep_batch]:
        with transaction.atomic():
            # As above: of two sweeps at once one reminds.
            if Operation.objects.filter(pk=operation.pk, warned_percent__lt=100).update(warned_percent=100):
                tell(operation, "review_overdue")
                claimed += 1
    return claimed


# The policy in force, and what stands under it


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
        raise NoPolicy(_("There is no approval policy yet. Draft the first one and have it signed, then ask again."))
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
    elif not PolicyVersion.objects.filter(activated_at__isnull=False).exists():
        # Before the first policy nobody could approve, so the operator decides alone; the audit log says so. One that was in
        # force and has expired opens nothing again.
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
