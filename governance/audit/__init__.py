"""The append-only trail of what was done to the fleet: writing it. Reading it back is ``reading``.

The database refuses changes (migration 0002) and chains events by hash when their transaction commits (migration 0003).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

from django.db import transaction

from core.limits import limits
from governance.models import AuditEvent
from wire import clock
from wire.optoken.canonical import canonical_bytes

Detail = Mapping[str, object]


def record_event(*, actor: str, action: str, target: str, detail: Detail | None = None, op_id: str = "") -> AuditEvent:
    """Write one event in the transaction of the change that it describes, so neither exists without the other.

    ``actor`` is ``user:<name>``, ``token:<name>``, ``node:<name>`` or ``system:<part>``; ``action`` is
    ``<thing>.<verb>``; ``detail`` must be JSON without floats and must hold no secret, no prompt and no personal data:
    digests and ids. ``op_id`` names the operation that the event belongs to.
    Raises RuntimeError outside a transaction, NotCanonical for a detail that JSON readers could read differently.
    """
    (event,) = record_events([Event(actor=actor, action=action, target=target, detail=detail or {}, op_id=op_id)])
    return event


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What ``record_events`` takes of one event, as ``record_event`` does."""

    actor: str
    action: str
    target: str
    detail: Detail
    op_id: str = ""


def record_events(events: Iterable[Event]) -> list[AuditEvent]:
    """Write events in one statement; otherwise as ``record_event``."""
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("an event must be written inside transaction.atomic(), together with the change it records")
    rows = [AuditEvent(**{**asdict(event), "detail": dict(event.detail)}) for event in events]
    for row in rows:
        canonical_bytes(row.detail)
    return AuditEvent.objects.bulk_create(rows)


def record_word(*, actor: str, action: str, target: str, detail: Detail | None = None, op_id: str = "") -> AuditEvent | None:
    """Write one event about what a box said, unless it caused ``audit_events_per_hour`` of the kind already: then return None.

    Otherwise as ``record_event``.
    """
    since = clock.now() - timedelta(hours=1)
    said = AuditEvent.objects.filter(action=action, actor=actor, at__gt=since).count()
    if said >= limits().governance.audit_events_per_hour:
        return None
    return record_event(actor=actor, action=action, target=target, detail=detail, op_id=op_id)
