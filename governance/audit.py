"""The append-only trail of what was done to the fleet. The database refuses changes to it (migration 0002)."""

from __future__ import annotations

from collections.abc import Mapping

from django.db import transaction

from governance.models import AuditEvent

Detail = Mapping[str, object]


def record_event(*, actor: str, action: str, target: str, detail: Detail | None = None) -> AuditEvent:
    """Write one event in the transaction of the change that it describes, so neither exists without the other.

    ``actor`` is ``user:<name>``, ``token:<name>``, ``node:<name>`` or ``system:<part>``; ``action`` is
    ``<thing>.<verb>``; ``detail`` must be JSON and must hold no secret and no prompt.
    Raises RuntimeError outside a transaction.
    """
    if not transaction.get_connection().in_atomic_block:
        raise RuntimeError("record_event must run inside transaction.atomic(), together with the change it records")
    return AuditEvent.objects.create(actor=actor, action=action, target=target, detail=dict(detail or {}))
