"""Visits of people to the approvals: what they missed since the last one, and the mark up to which they have seen it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from django.db import transaction
from django.db.models import Exists, OuterRef, Q

from core.limits import limits
from governance.models import Decision, Freeze, Operation, OperationRun, PolicyVersion, SeenMark
from governance.operations.queries import OperationSummary, summarise_all, with_parts
from governance.states import ApprovalState, RunState
from wire import clock

if TYPE_CHECKING:
    from core.models import User


@dataclass(frozen=True, slots=True)
class Missed:
    """What happened since ``since`` and up to ``until`` without a person. Newest first, few of each.

    ``decided``: operations that others decided; ``failed``: operations of which a run failed or whose outcome is not known;
    ``freezes`` began or ended then; ``is_first``: the person has marked nothing as seen yet.
    """

    since: datetime
    until: datetime
    is_first: bool
    decided: Sequence[OperationSummary]
    failed: Sequence[OperationSummary]
    policies: Sequence[PolicyVersion]
    freezes: Sequence[Freeze]

    @property
    def count(self) -> int:
        return len(self.decided) + len(self.failed) + len(self.policies) + len(self.freezes)


def read_missed(user: User) -> Missed:
    """Return what the person missed since the mark they set last."""
    now, most = clock.now(), limits().governance.missed_rows
    mark = SeenMark.objects.filter(user=user).first()
    first_at = now - timedelta(seconds=limits().governance.missed_first_s)
    since = max(now - timedelta(seconds=limits().governance.missed_most_s), mark.seen_at if mark is not None else first_at)
    own = Exists(Decision.objects.filter(operation=OuterRef("pk"), person=user, withdrawn_at=None))
    theirs = Operation.objects.exclude(state=ApprovalState.PENDING.value).exclude(requested_by=user.get_username())
    decided = list(with_parts(theirs.filter(~own, decided_at__gt=since)).order_by("-decided_at")[:most])
    bad = OperationRun.objects.filter(
        Q(state=RunState.FAILED.value, ended_at__gt=since) | Q(state=RunState.UNKNOWN.value, updated_at__gt=since),
        operation=OuterRef("pk"),
    )
    failed = list(with_parts(Operation.objects.filter(Exists(bad))).order_by("-updated_at")[:most])
    told = {operation.pk for operation in failed}
    decided = [operation for operation in decided if operation.pk not in told]
    lines = summarise_all([*decided, *failed])
    return Missed(
        since=since,
        until=now,
        is_first=mark is None,
        decided=lines[: len(decided)],
        failed=lines[len(decided) :],
        policies=list(PolicyVersion.objects.filter(activated_at__gt=since).order_by("-activated_at")[:most]),
        freezes=list(Freeze.objects.filter(Q(frozen_at__gt=since) | Q(lifted_at__gt=since)).order_by("-frozen_at")[:most]),
    )


@transaction.atomic
def mark_seen(*, user: User, until: datetime) -> None:
    """Note that a person has seen everything up to a moment: no later than now, no earlier than the mark there is."""
    until = min(until, clock.now())
    SeenMark.objects.get_or_create(user=user, defaults={"seen_at": until})
    SeenMark.objects.filter(user=user, seen_at__lt=until).update(seen_at=until)
