"""Break-glass uses and their reviews: no second use before somebody who had no part in the first has looked at it."""

from __future__ import annotations

from collections.abc import Iterable

from django.db import connection
from django.db.models import QuerySet

from governance.errors import InvalidProposal, NotPermitted
from governance.models import Operation, OperationRun
from governance.operations.evidence import list_lasting_proofs
from governance.states import RunState
from wire.optoken.approval import BREAK_GLASS, Policy

REVIEW = "break-glass-review"
_LOCK = 0x6D73_6267


def list_unreviewed() -> QuerySet[Operation]:
    """Return the break-glass operations that were used and that nobody has reviewed, oldest first."""
    done = Operation.objects.filter(operation=REVIEW, runs__state=RunState.SUCCEEDED.value, reviews__isnull=False)
    used = Operation.objects.filter(op_class=BREAK_GLASS, dispatched_at__isnull=False)
    return used.exclude(pk__in=done.values("reviews")).order_by("dispatched_at")


def explain_unreviewed(*, but: Operation | None = None) -> str:
    """Return what keeps break-glass from being used, "" = nothing; ``but``: the operation that asks.

    Others who ask wait until the transaction ends: of two uses at once, the second one sees the first.
    """
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
    rows = list_unreviewed() if but is None else list_unreviewed().exclude(pk=but.pk)
    found = rows.first()
    if found is None:
        return ""
    return f"The last break-glass, {found.printed_id}, has not been reviewed; propose its review first."


def require_reviewed() -> None:
    """Raise NotPermitted while a use of break-glass has not been reviewed."""
    if why := explain_unreviewed():
        raise NotPermitted(why, param="op_class")


def list_users(used: Operation) -> frozenset[str]:
    """Return who used a break-glass operation: who asked for it, who signed it, and who began it."""
    began = OperationRun.objects.filter(operation=used).exclude(started_by="").values_list("started_by", flat=True)
    return frozenset({used.requested_by, *(str(proof["approver"]) for proof in list_lasting_proofs(used)), *began})


def explain_own_review(review: Operation, policy: Policy, names: Iterable[str]) -> str:
    """Return why these people cannot sign an operation because it reviews what they used, "" = that does not hinder them.

    A class in which the requester counts (solo) says openly that nobody else need look, and hinders nobody.
    """
    rules = policy.classes.get(review.op_class)
    if review.operation != REVIEW or review.reviews is None or (rules is not None and rules.solo):
        return ""
    own = sorted(list_users(review.reviews).intersection(names))
    if not own:
        return ""
    return f"{', '.join(own)} used {review.reviews.printed_id}, so somebody else must review it."


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
            f"The review needs {rules.required} approvers who did not use it and do not ask for it. {', '.join(sorted(users))} "
            f"used it, which leaves {', '.join(left) or 'nobody'}. Have one of those who used it ask for the review, or name "
            "more approvers by a change of the policy.",
            param="targets",
        )
