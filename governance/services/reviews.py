"""Break-glass uses and their reviews: no second use before the first was looked at."""

from __future__ import annotations

from django.db import connection
from django.db.models import QuerySet

from governance.errors import NotPermitted
from governance.models import Operation
from governance.states import RunState
from wire.optoken.approval import BREAK_GLASS

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
