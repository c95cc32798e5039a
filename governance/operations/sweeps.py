"""What time does to operations: reminders, expiry, and the end of those whose policy is gone. Idempotent; run every few s.

Each operation is looked at again under its lock, and one that somebody else holds is left for the next sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

from django.db import transaction
from django.db.models import Exists, F, Max, OuterRef, Q, QuerySet
from django.db.models.functions import Coalesce

from core.limits import limits
from governance.models import Decision, Operation, OperationRun, PolicyVersion
from governance.operations.lookup import take_operation
from governance.operations.reviews import list_unreviewed
from governance.operations.runs import run_due
from governance.operations.transitions import drop_void, end_operation, tell
from governance.states import OPEN_RUNS, ApprovalEvent, ApprovalState
from wire import clock
from wire.optoken.approval import BREAK_GLASS

_OPEN = [state.value for state in OPEN_RUNS]
_UNDECIDED = [ApprovalState.PENDING.value, ApprovalState.APPROVED.value]


def reconcile() -> int:
    """Sweep, then work on what is due; any number of processes may. Returns how many runs were looked at.

    What the sweep stumbles over does not keep approved operations from being carried out.
    """
    if not is_anything_open():
        return 0
    try:
        sweep_operations()
    finally:
        done = run_due()
    return done


def sweep_operations() -> int:
    """Remind, expire, block, and take approvals of revoked keys out; returns how many operations were changed."""
    return _warn() + _expire() + block_stale() + _drop_void() + _claim_reviews()


def is_anything_open() -> bool:
    """Whether an operation is pending or approved, or was used and nobody was reminded to review it: time changes no other."""
    unreviewed = Q(op_class=BREAK_GLASS, dispatched_at__isnull=False, warned_percent__lt=100)
    return Operation.objects.filter(Q(state__in=_UNDECIDED) | unreviewed).exists()


def block_stale() -> int:
    """Block what was asked for under a policy that is no longer active and is not on its way; returns how many.

    Not the very change that put the active one in force: it is being carried out.
    """
    gone = [PolicyVersion.State.SUPERSEDED, PolicyVersion.State.DROPPED]
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
    """Take approvals out whose key was revoked or whose person was deactivated."""
    void = Decision.objects.filter(void_at__isnull=False, withdrawn_at=None)
    rows = _not_on_its_way().filter(pk__in=void.values("operation"))
    return _each(rows, lambda operation: bool(drop_void(operation)))


def _end_each(rows: QuerySet[Operation], event: ApprovalEvent, *, notice: str, reason: str) -> int:
    def end(operation: Operation) -> bool:
        end_operation(operation, event, reason=reason, notice=notice)
        return True

    return _each(rows, end)


def _each(rows: QuerySet[Operation], change: Callable[[Operation], bool]) -> int:
    """Change every operation that is among the rows still once it is locked; returns how many were."""
    changed = 0
    for op_id in list(rows.order_by("requested_at").values_list("pk", flat=True)[: limits().governance.sweep_batch]):
        with transaction.atomic():
            operation = take_operation(op_id)
            # An approval may have been counted between the look and the lock.
            if operation is not None and rows.filter(pk=op_id).exists():
                changed += change(operation)
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
            if Operation.objects.filter(pk=operation.pk, warned_percent__lt=100).update(warned_percent=100):
                tell(operation, "review_overdue")
                claimed += 1
    return claimed
