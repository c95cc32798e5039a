"""Pages of the list of operations, and what stands in cursors and idempotency keys."""

from __future__ import annotations

import base64
import uuid
from datetime import UTC, datetime, timedelta

from django.db.models import Q
from rest_framework.exceptions import ValidationError

from core.limits import limits
from governance.models import Operation
from governance.operations.reading import summarise
from governance.operations.values import OperationSummary

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def list_operations(
    *,
    limit: int,
    state: str | None = None,
    operation: str | None = None,
    requested_by: str | None = None,
    cursor: str | None = None,
) -> tuple[list[OperationSummary], str | None]:
    """Return a page of operations, newest first, and the cursor of the next one (None: it is the last).

    Rows that are added meanwhile shift nothing. Raises ValidationError for a cursor that is none.
    """
    wanted = {"state": state, "operation": operation, "requested_by": requested_by}
    rows = Operation.objects.filter(**{name: value for name, value in wanted.items() if value is not None})
    if cursor is not None:
        at, ident = _read_cursor(cursor)
        rows = rows.filter(Q(requested_at__lt=at) | Q(requested_at=at, id__lt=ident))
    parts = rows.select_related("policy", "adopts").prefetch_related("decisions", "runs")
    page = list(parts.order_by("-requested_at", "-id")[: limit + 1])
    shown = page[:limit]
    return summarise(shown), _make_cursor(shown[-1]) if len(page) > limit else None


def read_key(text: str | None) -> str | None:
    """Return an idempotency key as it is. Raises ValidationError."""
    if text is None:
        return None
    if not (1 <= len(text) <= limits().governance.idempotency_key_chars and text.isascii() and text.isprintable()):
        raise ValidationError(
            {"Idempotency-Key": [f"Give 1 to {limits().governance.idempotency_key_chars} visible ASCII characters."]}
        )
    return text


def _make_cursor(row: Operation) -> str:
    micros = (row.requested_at - _EPOCH) // timedelta(microseconds=1)
    return base64.urlsafe_b64encode(micros.to_bytes(8) + row.pk.bytes).decode()


def _read_cursor(text: str) -> tuple[datetime, uuid.UUID]:
    try:
        raw = base64.urlsafe_b64decode(text)
    except ValueError:
        raw = b""
    micros = int.from_bytes(raw[:8])
    if len(raw) != 24 or micros > 2**53:  # a time and an id
        raise ValidationError({"cursor": ["Give the next_cursor of a page of this list."]})
    return _EPOCH + timedelta(microseconds=micros), uuid.UUID(bytes=raw[8:])
