"""Carrying out what was approved: rows say what is due, workers take one at a time under its lease, nodes answer as events.

``due_at`` is the lease: taking a run moves it, so whoever dies, or stumbles over a run, leaves it to the next look and holds
up no other. What follows from the look is written in one transaction under the lock of the operation. Before a run is sent
everything is verified once more from the signed bytes, and nothing is taken from rows.

Who reaches nodes (gateways by their sockets, workers by HTTP) claims what it sends first. The node carries out each
(op_id, use) once, so a second sender does no harm.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models import BooleanField, ExpressionWrapper, Max, Q, QuerySet
from django.db.models.fields.json import KeyTextTransform
from django.utils.module_loading import import_string

from core.hints import publish_hint
from core.limits import limits
from governance.checkpoints import latest_checkpoint
from governance.errors import GovernanceError
from governance.models import Operation, OperationRun
from governance.operations.approvals import (
    audit_run,
    drop_void,
    end_operation,
    explain_unreviewed,
    find_new_policy,
    find_operation,
    hold_policies,
    is_anything_open,
    is_current,
    list_proofs,
    lock_run,
    read_freeze,
    skip_runs,
    sweep_operations,
    tell,
    tell_when_over,
)
from governance.registry import Done, JoinsTargets, NotNow, OperationKind, RunOrder, Sent, Signer, find_kind
from governance.states import FINAL_RUNS, ApprovalEvent, ApprovalState, RunEvent, RunState, next_run, sources_of
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
from wire.optoken.op_token import Binding, Grant, encode_token, params_digest, sign_l0, sign_l1, sign_l2

logger = logging.getLogger("muster.governance")

_WORKER = f"{socket.gethostname()}:{os.getpid()}"[:80]


def reconcile() -> int:
    """Sweep, then work on what is due; any number of processes may. Returns how many runs were looked at."""
    if not is_anything_open():
        return 0
    try:
        sweep_operations()
    finally:
        # What the sweep stumbles over does not keep approved operations from being carried out.
        done = run_due()
    return done


def run_due(limit: int = 50) -> int:
    """Work on whatever is due, oldest first, and return how many runs were looked at."""
    done = 0
    for _ in range(limit):
        if not work_on(None):
            return done
        done += 1
    return done


def work_on(run_id: uuid.UUID | None) -> bool:
    """Take one due run (that one, or the one that waits longest) and move it on; False when there is none to be had."""
    taken = _take(run_id)
    if taken is not None:
        _move_on(taken)
    return taken is not None


def plan_runs(operation: Operation, *, use: int, started_by: str) -> list[OperationRun]:
    """Write down one run for each target; those that are there already are left as they are."""
    # The first is due when the window opens; the end of each wakes the next, which otherwise looks for itself a little later.
    due_at = max(clock.now(), operation.not_before)
    statement = operation.read_statement()
    is_joint = _is_joint(statement)
    behind = timedelta() if is_joint else timedelta(seconds=limits().governance.run_lease_s)
    planned = [
        OperationRun(
            operation=operation, target=target, use=use, position=position, started_by=started_by,
            due_at=due_at + (behind if position else timedelta()),
        )
        for position, target in enumerate(statement.targets)
    ]  # fmt: skip
    OperationRun.objects.bulk_create(planned, ignore_conflicts=True)
    runs = list(OperationRun.objects.filter(operation=operation, use=use).order_by("position"))
    queued = [run.pk for run in runs if run.state == RunState.QUEUED.value]
    for pk in queued if is_joint else queued[:1]:
        OperationRun.objects.filter(pk=pk).update(due_at=due_at)
        wake_worker(pk)
    return runs


@transaction.atomic
def _take(run_id: uuid.UUID | None) -> uuid.UUID | None:
    now = clock.now()
    due = OperationRun.objects.select_for_update(skip_locked=True, of=("self",), no_key=True)
    due = due.filter(ended_at=None, due_at__lte=now, operation__state=ApprovalState.APPROVED.value)
    found = (due if run_id is None else due.filter(pk=run_id)).order_by("due_at", "position").first()
    if found is None:
        return None
    # The lease: whoever dies over the run leaves it to the next look, and holds up no other.
    OperationRun.objects.filter(pk=found.pk).update(
        due_at=now + timedelta(seconds=limits().governance.run_lease_s), lease_owner=_WORKER
    )
    return found.pk


@transaction.atomic
def _move_on(run_id: uuid.UUID) -> None:
    op_id = OperationRun.objects.values_list("operation_id", flat=True).get(pk=run_id)
    operation = find_operation(op_id, lock=True)
    run = OperationRun.objects.select_for_update(no_key=True).get(pk=run_id)
    run.operation = operation
    state = RunState(run.state)
    if operation.state != ApprovalState.APPROVED.value or state in FINAL_RUNS:
        return
    now = clock.now()
    if state is RunState.QUEUED:
        dispatch(run, operation)
    elif state in sources_of(RunEvent.REQUEUE) and not run.token:
        _requeue(run, "it was sent by an earlier release")
    elif now > max(operation.not_after, run.updated_at) + timedelta(seconds=limits().governance.run_silence_s):
        _give_up(run)
    else:
        OperationRun.objects.filter(pk=run.pk).update(due_at=now + timedelta(seconds=limits().governance.run_look_again_s))


def _give_up(run: OperationRun) -> None:
    if RunState(run.state) is not RunState.UNKNOWN:
        finish(run, RunEnd(RunEvent.LOSE, "box_lost", "The node has not been heard for a day."))
    message = "The node never came back to tell how it went; look at it by hand."
    finish(run, RunEnd(RunEvent.RESOLVE, "box_lost", message))


# Sending


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
    if (wait := _find_wait(run, operation)) is not None:
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
        finish(run, RunEnd(RunEvent.FAIL, error.code.value.lower(), error.message))
        return
    match outcome:
        case Sent(node_id):
            _mark_dispatched(operation)
            _mark_sent(run, order, node_id)
        case Done(message, result):
            _mark_dispatched(operation)
            run.attempt += 1
            run.dispatched_at = clock.now()
            finish(run, RunEnd(RunEvent.SUCCEED, message=message, result=result))
        case NotNow(reason, retry_s):
            postpone(run, retry_s, message=reason)


def _mark_dispatched(operation: Operation) -> None:
    # Only once something was sent: what was only tried and not taken can still be withdrawn.
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
        token = _mint_token(signer, statement, proofs, use=run.use, fence=run.fence, expires_at=expires_at)
    return RunOrder(
        run_id=run.pk, op_id=statement.op_id, use=run.use, operation=statement.operation, target=run.target,
        params=dict(statement.params), token=token, token_expires_at=expires_at, requested_by=statement.requested_by,
        approved_by=tuple(str(proof["approver"]) for proof in proofs),
    )  # fmt: skip


def _mint_token(
    signer: Signer, statement: Statement, proofs: Sequence[Mapping[str, object]], *, use: int, fence: int, expires_at: int
) -> str:
    """Return what a node must be shown before it acts, at the level of that node. It lives for minutes and is never logged."""
    now = int(clock.unix_s())
    model = statement.params.get("modelId")
    grant = Grant(
        operation=statement.operation,
        model_id=model if isinstance(model, str) else None,
        signers=[str(proof["approver"]) for proof in proofs],
        nonce=secrets.token_hex(16),
        issued_at=now,
    )
    if signer.level == "L0":
        return encode_token(sign_l0(signer.key, grant))
    checkpoint = latest_checkpoint()
    binding = Binding(
        audience=signer.audience,
        params_digest=params_digest(statement.params),
        op_id=statement.op_id,
        fence=fence,
        expires_at=expires_at,
        kid=signer.kid,
        statement_digest=statement.digest.hex(),
        checkpoint=None if checkpoint is None else f"{checkpoint.size}:{bytes(checkpoint.root).hex()}",
        use=use,
    )
    if signer.level == "L1":
        return encode_token(sign_l1(signer.key, grant, binding))
    return encode_token(sign_l2(signer.key, grant, binding, statement=statement.raw, proofs=proofs))


def _verify(run: OperationRun, operation: Operation, now_s: float) -> Statement:
    """Verify everything again from the signed bytes: rows may have been changed behind our back. Raises ApprovalError."""
    statement, proofs = operation.read_statement(), list_proofs(operation)
    policy = operation.policy.read_policy()
    if statement.operation == POLICY_CHANGE:
        _verify_change(statement, proofs, policy, now_s=now_s)
    else:
        verify_approval(statement, proofs, policy, now=now_s)
    _check_rows(run, operation, statement)
    return statement


def _verify_change(statement: Statement, proofs: Sequence[object], policy: Policy, *, now_s: float) -> None:
    """Raise ApprovalError unless a new policy is approved under the one in force and under itself."""
    new = find_new_policy(statement)
    if new is None:
        raise ApprovalError(Rule.WRONG_POLICY, "the policy that was approved is not stored here")
    # That the one in force has expired is no reason against it: nothing else could ever be approved again.
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
    message = f"The approvals do not hold ({error.rule}): {error}."
    finish(run, RunEnd(RunEvent.FAIL, "approval_invalid", message))
    if operation.dispatched_at is None:
        end_operation(
            operation, ApprovalEvent.BLOCK, reason=f"its approvals do not hold ({error.rule})", code="approval_invalid"
        )


def _is_joint(statement: Statement) -> bool:
    kind = find_kind(statement.operation)
    return isinstance(kind, JoinsTargets) and kind.is_joint(statement.params)


def _find_joint(operation: Operation) -> JoinsTargets | None:
    """Return the kind of an operation that all targets carry out together; None for any other."""
    try:
        is_joint = _is_joint(operation.read_statement())
    except ApprovalError:
        return None  # a row that was tampered with is refused before it is sent
    kind = find_kind(operation.operation)
    return kind if is_joint and isinstance(kind, JoinsTargets) else None


def _is_stopped_by_failure(operation: Operation) -> bool:
    try:
        return operation.read_statement().stops_on_failure
    except ApprovalError:
        # A row that was tampered with stops as well.
        return True


def _find_wait(run: OperationRun, operation: Operation) -> str | None:
    """Return why a run must wait, None when it need not."""
    if operation.operation not in NOT_FROZEN and read_freeze() is not None:
        return "everything is frozen"
    mates = OperationRun.objects.filter(operation=operation, use=run.use).exclude(pk=run.pk)
    joint = _find_joint(operation)
    if joint is not None:
        if wait := joint.explain_wait(list(mates.filter(state=RunState.QUEUED.value).values_list("target", flat=True))):
            return wait
    else:
        before = mates.filter(position__lt=run.position, state=RunState.QUEUED.value)
        if not _is_stopped_by_failure(operation):
            before = before.filter(due_at__lte=clock.now())  # one whose node is away does not hold up the others
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
        # Nodes refuse a fence that lies more than a week ahead of their clock.
        logger.error("fence_ahead hours=%d; the clock was wrong once, see that it is right", (last - now_ms) // 3_600_000)
    return int(max(last + 1, now_ms))


# The end of a run, and its wait


def wake_worker(
    run_id: uuid.UUID, *, after_s: float = 0.0, task: str = "governance.tasks.work", life_s: float = 60.0
) -> None:  # fmt: skip
    """Wake a worker for a run once the transaction is committed. ``life_s``: how long the message is worth anything."""

    def send() -> None:
        from celery.exceptions import CeleryError  # loaded by whoever sends a task at all
        from kombu.exceptions import KombuError

        wait = {"countdown": after_s} if after_s else {}
        try:
            import_string(settings.TASK_APP).send_task(task, args=[str(run_id)], expires=life_s + after_s, retry=False, **wait)
        # A lost message costs seconds: a sweep looks as well.
        except (OSError, KombuError, CeleryError) as error:
            logger.warning("run_not_rung run=%s error=%s; a sweep takes it up", run_id, type(error).__name__)

    transaction.on_commit(send)


def postpone(run: OperationRun, wait_s: float, *, message: str) -> None:
    """Look at a locked run again later, and say why."""
    due_at = clock.now() + timedelta(seconds=wait_s)
    text = message[: limits().governance.run_message_chars]
    # Nothing was heard of it, so ``updated_at``, from which a node's silence counts, stays.
    OperationRun.objects.filter(pk=run.pk).update(due_at=due_at, message=text, fence=run.fence)
    if text != run.message:
        publish_hint("operations", str(run.operation_id))


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ends. LOSE makes it unknown, to be resolved. ``receipt_key``: of the node that signed the receipt, SPKI DER."""

    event: RunEvent
    code: str = ""
    message: str = ""
    result: Mapping[str, object] | None = None
    receipt: str = ""
    receipt_key: str = ""


def finish(run: OperationRun, end: RunEnd) -> None:
    """Move a run on that is locked together with its operation; what waits for it is woken or skipped, and people are told."""
    now = clock.now()
    new = next_run(RunState(run.state), end.event)
    run.state, run.code, run.message = new.value, end.code[:80], end.message[: limits().governance.run_message_chars]
    run.result = dict(end.result) if end.result else run.result
    run.receipt, run.receipt_key = end.receipt or run.receipt, end.receipt_key or run.receipt_key
    run.ended_at = now if new in FINAL_RUNS else None
    run.fraction = 1.0 if new is RunState.SUCCEEDED else run.fraction
    run.eta_s = None
    run.token = ""
    run.due_at = now
    run.save()
    audit_run(run, run.operation, f"operation.run.{new.value}", {"code": run.code, "receipt": bool(run.receipt)})
    publish_hint("operations", str(run.operation_id))
    if new not in FINAL_RUNS:
        tell(run.operation, "unknown", run=run)
        return
    if new is not RunState.SUCCEEDED and _find_joint(run.operation) is not None:
        # Those that have begun free what they have by themselves, because this one does not come.
        skip_runs(run.operation, "an earlier one of the nodes that load together failed", code="batch_stopped")
    elif new is not RunState.SUCCEEDED and _is_stopped_by_failure(run.operation):
        skip_runs(run.operation, "an earlier one of this batch failed", code="batch_stopped", after=run)
    else:
        _wake_next(run)
    tell_when_over(run.operation, run)


def _wake_next(run: OperationRun) -> None:
    """Let the rest of the batch be looked at now: in their order, one goes on its way."""
    due_at = max(clock.now(), run.operation.not_before)
    waiting = OperationRun.objects.filter(operation_id=run.operation_id, use=run.use, state=RunState.QUEUED.value)
    if waiting.update(due_at=due_at):
        wake_worker(waiting.order_by("position").values_list("pk", flat=True)[0])


# What nodes report


@transaction.atomic
def note_progress(*, run_id: uuid.UUID, stage: str, fraction: float | None, eta_s: float | None, task_id: str = "") -> None:
    """Take down how far a run is. Without effect on one that has ended or was never sent.

    ``task_id``: how the node calls it, where that is to be asked for over HTTP.
    """
    rows, now = OperationRun.objects.filter(pk=run_id), clock.now()
    # A node may send any number, NaN and infinity included.
    share = None if fraction is None or not math.isfinite(fraction) else min(1.0, max(0.0, fraction))
    left_s = None if eta_s is None or not math.isfinite(eta_s) else max(0.0, eta_s)
    told = {"stage": stage[:200], "fraction": share, "eta_s": left_s, "contact_at": now, "updated_at": now}
    if task_id:
        told["task_id"] = task_id
    # Compare and set: what comes late does not bring an ended run back.
    if rows.filter(state=RunState.DISPATCHED.value).update(state=RunState.EXECUTING.value, **told):
        run = rows.select_related("operation").get()
        audit_run(run, run.operation, "operation.run.executing", {"attempt": run.attempt})
    elif not rows.filter(state=RunState.EXECUTING.value).update(**told):
        return
    publish_hint("operations", str(rows.values_list("operation_id", flat=True).get()))


@transaction.atomic
def finish_run(run_id: uuid.UUID, end: RunEnd) -> bool:
    """End a run as its node says. False when it had ended or that cannot be."""
    run = lock_run(run_id)
    if run is None or RunState(run.state) in FINAL_RUNS or RunState(run.state) not in sources_of(end.event):
        return False
    # A node cannot know how something went that was never sent to it, whatever it says.
    if run.dispatched_at is None:
        return False
    finish(run, end)
    return True


@transaction.atomic
def requeue_run(*, run_id: uuid.UUID, reason: str) -> bool:
    """Send a run again, with a new token: the node never heard of it. False when it is not on its way."""
    run = lock_run(run_id)
    if run is None or RunState(run.state) not in sources_of(RunEvent.REQUEUE):
        return False
    _requeue(run, reason)
    return True


def _requeue(run: OperationRun, reason: str) -> None:
    wait_s = min(limits().governance.run_pause_max_s, 0.5 * 2 ** min(run.attempt, 6))
    run.state = next_run(RunState(run.state), RunEvent.REQUEUE).value
    run.message, run.due_at = reason[: limits().governance.run_message_chars], clock.now() + timedelta(seconds=wait_s)
    run.token, run.sent_at, run.task_id = "", None, ""
    run.save()
    audit_run(run, run.operation, "operation.run.queued", {"attempt": run.attempt})
    publish_hint("operations", str(run.operation_id))
    wake_worker(run.pk, after_s=wait_s)


# For those who reach nodes


_WITH_NODES = (RunState.DISPATCHED.value, RunState.EXECUTING.value)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """A run as it was read. ``statement``: what people signed; ``op_id``: as it stands there.

    ``sent_at``: when the node was given this token, None = not yet. ``contact_at``: when it was last sent something about the
    run, or said something; ``gateway_id``: by which gateway. ``task_id``: how a node that is called over HTTP names it.
    """

    run_id: uuid.UUID
    node_id: uuid.UUID
    op_id: str
    use: int
    operation: str
    statement: bytes = field(repr=False)
    digest: str
    state: RunState
    token: str = field(repr=False)
    token_expires_at: datetime | None
    sent_at: datetime | None
    contact_at: datetime | None
    gateway_id: uuid.UUID | None
    task_id: str

    @property
    def has_ended(self) -> bool:
        """Whether nothing changes it any more."""
        return self.state in FINAL_RUNS

    @property
    def is_waiting(self) -> bool:
        """Whether it is to be given to its node, with the token that it has."""
        return self.state is RunState.DISPATCHED and self.sent_at is None and bool(self.token)


def list_nodes_with_runs() -> set[uuid.UUID]:
    return {node_id for node_id in _open().values_list("node_id", flat=True).distinct() if node_id is not None}


def list_node_runs(nodes: Collection[uuid.UUID], *, most: int, is_sent: bool) -> list[NodeRun]:
    """Return what is to be sent to these nodes, then what they have, the longest untouched first; ``is_sent``: only that."""
    was_sent = ExpressionWrapper(Q(sent_at__isnull=False), output_field=BooleanField())
    rows = _open().filter(node_id__in=nodes).order_by(was_sent, "contact_at")
    rows = rows.exclude(sent_at=None) if is_sent else rows.exclude(sent_at=None, token="")
    return [_read(row) for row in rows[:most]]


def list_unattended(
    nodes: Collection[uuid.UUID], *, unsent_since: datetime, silent_since: datetime, most: int
) -> list[uuid.UUID]:
    """Return the runs on these nodes that nobody has touched since then, the longest first: not sent yet, or sent."""
    waiting = Q(sent_at=None, contact_at__lte=unsent_since) & ~Q(token="")
    rows = _open().filter(waiting | Q(sent_at__isnull=False, contact_at__lte=silent_since), node_id__in=nodes)
    return list(rows.order_by("contact_at").values_list("pk", flat=True)[:most])


def find_node_run(run_id: uuid.UUID) -> NodeRun | None:
    return _first(OperationRun.objects.filter(pk=run_id))


def find_run_of(node_id: uuid.UUID, op_id: uuid.UUID, use: int) -> NodeRun | None:
    """Return the run that a node names, None when it has none such."""
    return _first(OperationRun.objects.filter(node_id=node_id, operation_id=op_id, use=use))


def claim_contact(run: NodeRun, *, gateway_id: uuid.UUID | None = None) -> bool:
    """Note that the node is sent something about a run now; False when anything happened to the run since it was read."""
    now = clock.now()
    # Compare and set: of two gateways that have read the same one sends.
    same = OperationRun.objects.filter(pk=run.run_id, state=run.state.value, sent_at=run.sent_at, contact_at=run.contact_at)
    # The node was not heard by that, so ``updated_at`` stays.
    return bool(same.update(sent_at=run.sent_at or now, contact_at=now, gateway_id=gateway_id))


def _open() -> QuerySet[OperationRun]:
    runs = OperationRun.objects.filter(ended_at=None, state__in=_WITH_NODES, node_id__isnull=False)
    return runs.select_related("operation")


def _first(rows: QuerySet[OperationRun]) -> NodeRun | None:
    row = rows.exclude(node_id=None).select_related("operation").first()
    return None if row is None else _read(row)


def _read(run: OperationRun) -> NodeRun:
    assert run.node_id is not None
    operation = run.operation
    return NodeRun(
        run.pk, run.node_id, operation.printed_id, run.use, operation.operation, bytes(operation.statement), operation.digest,
        RunState(run.state), run.token, run.token_expires_at, run.sent_at, run.contact_at, run.gateway_id, run.task_id,
    )  # fmt: skip


# What was done before


def last_run(operation: str, *, target: str, params: Mapping[str, object]) -> OperationRun | None:
    """Return the last time the same was done to the same target (the same model, where there is one); None = never."""
    ended = OperationRun.objects.filter(operation__operation=operation, target=target, ended_at__isnull=False)
    model = params.get("modelId")
    for run in ended.exclude(state=RunState.SKIPPED.value).select_related("operation").order_by("-ended_at")[:20]:
        if model is None or _model_of(run) == model:
            return run
    return None


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last success on one target about one ``subject``, with what people signed. ``ended_at``: when it ended."""

    op_id: uuid.UUID
    operation: str
    op_class: str
    target: str
    subject: str
    ended_at: datetime
    params: Mapping[str, object]


def list_last_successes(
    *, targets: Collection[str] | None, operations: Collection[str], member: str, subject: str | None = None
) -> list[LastRun]:
    """Return the last run of these operations that succeeded, for each target and each value of ``member`` in its result.

    ``targets`` None = all; ``subject``: this value alone.
    """
    rows = OperationRun.objects.filter(
        state=RunState.SUCCEEDED.value, operation__operation__in=operations, ended_at__isnull=False
    ).annotate(subject=KeyTextTransform(member, "result"))
    rows = rows if targets is None else rows.filter(target__in=targets)
    last = rows.filter(subject__isnull=False) if subject is None else rows.filter(subject=subject)
    last = last.order_by("target", "subject", "-ended_at").distinct("target", "subject")
    found = []
    for run in last.select_related("operation"):
        operation = run.operation
        # A row whose statement was changed in the database is left out: nobody signed what it says.
        with contextlib.suppress(ApprovalError):
            params = operation.read_statement().params
            found.append(LastRun(
                operation.pk, operation.operation, operation.op_class, run.target, str(run.subject),
                run.ended_at or clock.now(), params,
            ))  # fmt: skip
    return found


def _model_of(run: OperationRun) -> object:
    try:
        return run.operation.read_statement().params.get("modelId")
    except ApprovalError:
        return None  # changed in the database: this tells nothing about any model
