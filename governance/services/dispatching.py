"""Sending one queued run on its way: everything is verified once more from the signed bytes, and nothing is taken from rows.

The operation and the run are locked by the caller, and all that follows is written in that one transaction, the command for
the box included.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from django.db import connection, transaction
from django.db.models import Max

from core.hints import publish_hint
from core.limits import limits
from governance.errors import GovernanceError
from governance.models import Freeze, Operation, OperationRun
from governance.registry import Done, NotNow, OperationKind, RunOrder, Sent, find_kind
from governance.services.evidence import find_new_policy, find_policy, is_stopped_by_failure, list_proofs, read_stored
from governance.services.finishing import finish, postpone
from governance.services.lookup import hold_policies, is_current
from governance.services.reviews import explain_unreviewed
from governance.services.transitions import audit_run, drop_void, end_operation, skip_runs, tell_when_over
from governance.states import ApprovalEvent, ApprovalState, RunEvent, RunState, next_run
from governance.tokens import mint_token
from wire import clock
from wire.optoken.approval import (
    BREAK_GLASS,
    CLOCK_SKEW_S,
    POLICY_CHANGE,
    ApprovalError,
    Policy,
    Rule,
    Statement,
    verify_approval,
    verify_successor,
)

logger = logging.getLogger("muster.governance")

UNFREEZE = "unfreeze"
NOT_FROZEN = frozenset({UNFREEZE, POLICY_CHANGE})
"""What a freeze lets pass: its own end, and taking a stolen key out of the policy before that."""
_FENCE_LOCK = 0x6D73_666E
_IN_FLIGHT = [RunState.DISPATCHED.value, RunState.EXECUTING.value, RunState.UNKNOWN.value]


def dispatch(run: OperationRun, operation: Operation) -> None:
    """Send a queued run on its way, or say why not yet or not at all."""
    now = clock.now()
    if now >= operation.not_after:
        _end_unsent(run, operation, ApprovalEvent.EXPIRE, "the approved window is over", code="too_late", notice="expired")
        return
    if now < operation.not_before:
        wait_s = (operation.not_before - now).total_seconds()
        postpone(run, wait_s, message="its window has not begun")
        return
    hold_policies(to_change=operation.operation == POLICY_CHANGE)
    if not is_current(operation):
        reason = "the policy changed meanwhile"
        _end_unsent(run, operation, ApprovalEvent.BLOCK, reason, code="policy_changed", notice="blocked")
        return
    if (wait := _find_hindrance(run, operation)) is not None:
        postpone(run, limits().governance.run_retry_s, message=wait)
        return
    if operation.dispatched_at is None or operation.max_uses > 1:
        drop_void(operation)
        if operation.state != ApprovalState.APPROVED.value:
            return  # it waits for another signature, and its runs with it
    try:
        statement = _verify(run, operation, now.timestamp())
    except ApprovalError as error:
        _refuse(run, operation, error)
        return
    _send(run, operation, statement)


def _send(run: OperationRun, operation: Operation, statement: Statement) -> None:
    kind = find_kind(statement.operation)
    if run.fence is None:
        run.fence = _next_fence()
    order = _make_order(kind, run, operation, statement)
    if order is None:
        postpone(run, limits().governance.run_retry_s, message=f"{run.target} takes no operations at the moment")
        return
    try:
        with transaction.atomic():
            outcome = kind.carry_out(order)
    except GovernanceError as error:
        _mark_dispatched(operation)
        finish(run, RunEvent.FAIL, code=error.code.value.lower(), message=error.message)
        return
    match outcome:
        case Sent(node_id):
            _mark_dispatched(operation)
            _mark_sent(run, order, node_id)
        case Done(message, result):
            _mark_dispatched(operation)
            run.attempt += 1
            run.dispatched_at = clock.now()
            finish(run, RunEvent.SUCCEED, message=message, result=result)
        case NotNow(reason, retry_s):
            postpone(run, retry_s, message=reason)


def _mark_dispatched(operation: Operation) -> None:
    """Note that something was sent. What was only tried and not taken can still be withdrawn."""
    if operation.dispatched_at is None:
        operation.dispatched_at = clock.now()
        operation.save(update_fields=["dispatched_at", "updated_at"])


def _mark_sent(run: OperationRun, order: RunOrder, node_id: uuid.UUID) -> None:
    """Leave the run with its token where whoever reaches the node finds it."""
    run.node_id, run.token = node_id, order.token
    run.token_expires_at = datetime.fromtimestamp(order.token_expires_at, UTC)
    run.sent_at, run.contact_at, run.gateway_id, run.task_id = None, clock.now(), None, ""
    run.attempt += 1
    run.state = next_run(RunState(run.state), RunEvent.DISPATCH).value
    run.dispatched_at = run.dispatched_at or clock.now()
    run.message = ""
    run.save()
    audit_run(run, run.operation, "operation.dispatch", {"attempt": run.attempt, "fence": run.fence})
    publish_hint("operations", str(run.operation_id))
    publish_hint("commands", str(node_id))


def _make_order(kind: OperationKind, run: OperationRun, operation: Operation, statement: Statement) -> RunOrder | None:
    signer = kind.find_signer(run.target) if kind.is_remote else None
    if kind.is_remote and signer is None:
        return None
    proofs = list_proofs(operation)
    token, expires_at = "", 0
    if signer is not None:
        assert run.fence is not None
        expires_at = min(int(clock.unix_s()) + limits().governance.op_token_s, statement.not_after)
        token = mint_token(signer, statement, proofs, use=run.use, fence=run.fence, expires_at=expires_at)
    return RunOrder(
        run_id=run.pk, op_id=statement.op_id, use=run.use, operation=statement.operation, target=run.target,
        params=dict(statement.params), token=token, token_expires_at=expires_at, requested_by=statement.requested_by,
        approved_by=tuple(str(proof["approver"]) for proof in proofs),
    )  # fmt: skip


def _verify(run: OperationRun, operation: Operation, now_s: float) -> Statement:
    """Verify everything again from the signed bytes: rows may have been changed behind our back. Raises ApprovalError."""
    statement, proofs = read_stored(operation), list_proofs(operation)
    policy = find_policy(operation)
    if statement.operation == POLICY_CHANGE:
        _verify_change(statement, proofs, policy, now_s=now_s)
    else:
        verify_approval(statement, proofs, policy, now=now_s)
    _check_rows(run, operation, statement)
    return statement


def _verify_change(statement: Statement, proofs: Sequence[object], policy: Policy, *, now_s: float) -> None:
    """Raise ApprovalError unless a new policy is approved under the one in force and under itself.

    That the one in force has expired is no reason against it: nothing else could ever be approved again.
    """
    new = find_new_policy(statement)
    if new is None:
        raise ApprovalError(Rule.WRONG_POLICY, "the policy that was approved is not stored here")
    verify_successor(new.raw, statement, proofs, current=None if new.ref == policy.ref else policy)
    if not statement.not_before - CLOCK_SKEW_S <= now_s <= statement.not_after:
        raise ApprovalError(Rule.TOO_LATE, "the approved window is over, or has not begun; ask for it again")
    if now_s > new.expires_at:
        raise ApprovalError(Rule.POLICY_EXPIRED, "the new policy has expired already; draft one that lasts longer")


def _check_rows(run: OperationRun, operation: Operation, statement: Statement) -> None:
    """Raise ApprovalError when the rows say something else than what was signed, in what they are read for."""
    signed = (statement.op_id, statement.operation, statement.op_class, statement.requested_by, statement.max_uses)
    stored = (operation.printed_id, operation.operation, operation.op_class, operation.requested_by, operation.max_uses)
    # Version 1 does not say it, and rows of then may say what nobody signed.
    is_batch_changed = statement.version > 1 and statement.stops_on_failure != operation.stops_on_failure
    if signed != stored or is_batch_changed or statement.digest.hex() != operation.digest:
        raise ApprovalError(Rule.BAD_STATEMENT, "the row of this operation says something else than what was signed")
    if run.target not in statement.targets or statement.targets.index(run.target) != run.position:
        raise ApprovalError(Rule.BAD_STATEMENT, "this was not approved for that target, or not in that order")
    if not 1 <= run.use <= statement.max_uses:
        raise ApprovalError(Rule.TOO_MANY_USES, "every use that was approved is spent; ask for it again")


def _refuse(run: OperationRun, operation: Operation, error: ApprovalError) -> None:
    """End a run whose approvals do not hold, and the operation with it unless some of it is on its way."""
    logger.critical("approval_invalid op=%s rule=%s", operation.printed_id, error.rule)
    finish(run, RunEvent.FAIL, code="approval_invalid", message=f"The approvals do not hold ({error.rule}): {error}.")
    if operation.dispatched_at is None:
        end_operation(
            operation, ApprovalEvent.BLOCK, reason=f"its approvals do not hold ({error.rule})", code="approval_invalid"
        )


def _find_hindrance(run: OperationRun, operation: Operation) -> str | None:
    """Return why a run must wait, None when it need not."""
    if operation.operation not in NOT_FROZEN and Freeze.objects.filter(lifted_at=None).exists():
        return "everything is frozen"
    mates = OperationRun.objects.filter(operation=operation, use=run.use).exclude(pk=run.pk)
    before = mates.filter(position__lt=run.position, state=RunState.QUEUED.value)
    if not is_stopped_by_failure(operation):
        before = before.filter(due_at__lte=clock.now())  # one whose box is away does not hold up the others
    if before.exists() or mates.filter(state__in=_IN_FLIGHT).exists():
        return "waits for the one before it in the batch"
    if operation.op_class == BREAK_GLASS and operation.dispatched_at is None:
        return explain_unreviewed(but=operation) or None
    return None


def _end_unsent(run: OperationRun, operation: Operation, event: ApprovalEvent, reason: str, *, code: str, notice: str) -> None:
    """End what was never sent: the whole operation, or the rest of one of which some was sent."""
    if operation.dispatched_at is None:
        end_operation(operation, event, reason=reason, code=code, notice=notice)
        return
    skip_runs(operation, reason, code=code)
    tell_when_over(operation, run)


def _next_fence() -> int:
    """Return a number above every fence so far, also above those that a restored database has forgotten."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_FENCE_LOCK])
    last = OperationRun.objects.aggregate(last=Max("fence"))["last"] or 0
    now_ms = clock.unix_ms()
    if last > now_ms + limits().governance.fence_ahead_ms:
        # Boxes refuse a fence that lies more than a week ahead of their clock.
        logger.error("fence_ahead hours=%d; the clock was wrong once, see that it is right", (last - now_ms) // 3_600_000)
    return int(max(last + 1, now_ms))
