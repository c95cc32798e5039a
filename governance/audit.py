"""The append-only audit log of what was done to the fleet: writing it, and reading it back as ``wire.auditlog`` verifies it.

The database refuses changes (migration 0002) and chains events by hash when their transaction commits (migration 0003).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection, transaction

from core.limits import limits
from governance.models import AuditEvent
from wire import clock
from wire.auditlog import Entry, Record, Seal, Stray, Witness, entry_hash
from wire.optoken.op_token import canonical_bytes

Detail = Mapping[str, object]


BACKUP_CREATED = "backup.create"
"""The action of a backup that was written."""


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
    rows = [AuditEvent(**{**asdict(event), "at": clock.now(), "detail": dict(event.detail)}) for event in events]
    for row in rows:
        # Raises for a detail that JSON readers could read differently, before it is written.
        canonical_bytes(row.detail)
    return AuditEvent.objects.bulk_create(rows)


def record_word(*, actor: str, action: str, target: str, detail: Detail | None = None, op_id: str = "") -> AuditEvent | None:
    """Write one event about what a node said, unless it caused ``audit_events_per_hour`` of the kind already: then return None.

    Otherwise as ``record_event``.
    """
    since = clock.now() - timedelta(hours=1)
    said = AuditEvent.objects.filter(action=action, actor=actor, at__gt=since).count()
    if said >= limits().governance.audit_events_per_hour:
        return None
    return record_event(actor=actor, action=action, target=target, detail=detail, op_id=op_id)


# Reading it back, however long it is

_ENTRIES = """
SELECT entry.seq, entry.prev_hash, entry.hash, event.body, event.action, event.actor,
       (extract(epoch FROM event.at) * 1000000)::bigint, event.detail::text, event.op_id, event.target
FROM governance_auditentry AS entry LEFT JOIN governance_auditevent AS event ON event.id = entry.event_id
"""
_SEALS = "SELECT size, note FROM governance_auditcheckpoint ORDER BY size"
_WITNESSES = "SELECT size, node_name, root, signature, public_key, note FROM governance_witnessstatement ORDER BY size, id"
_STRAYS = """
SELECT event.id FROM governance_auditevent AS event
WHERE NOT EXISTS (SELECT FROM governance_auditentry AS entry WHERE entry.event_id = event.id) ORDER BY event.id
"""

Row = tuple[Any, ...]
"""Columns of a query; what they are stands in its text."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The last entries of the log, checked: from ``first`` to ``last`` (both 0 = none). ``bad`` = the first that is wrong."""

    first: int
    last: int
    bad: int | None


def log_size() -> int:
    """Return the number of the last entry; 0 = none."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT coalesce(max(seq), 0) FROM governance_auditentry")
        (size,) = cursor.fetchone()
    return int(size)


def read_log() -> Iterator[Record]:
    """Yield the whole log in order, checkpoints and witnesses behind the entry they end with, strays last."""
    # All of it is of one moment, read in pieces: neither this process nor the server's cursor holds it whole.
    with _one_snapshot():
        streams: tuple[Iterator[tuple[int, int, Record]], ...] = (
            ((row[0], 0, _make_entry(row)) for row in _stream(f"{_ENTRIES} ORDER BY entry.seq")),
            ((size, 1, Seal(note)) for size, note in _stream(_SEALS)),
            ((size, 2, _make_witness(size, row)) for size, *row in _stream(_WITNESSES)),
        )
        for _size, _rank, record in heapq.merge(*streams, key=lambda item: item[:2]):
            yield record
        for (event_id,) in _stream(_STRAYS):
            yield Stray(f"event {event_id}")


def read_hashes(lo: int, hi: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and hash of the entries behind ``lo`` up to ``hi``."""
    with transaction.atomic():
        query = "SELECT seq, hash FROM governance_auditentry WHERE seq > %s AND seq <= %s ORDER BY seq"
        for seq, hashed in _stream(query, lo, hi):
            yield seq, bytes(hashed)


def find_last_event_at(*, action: str, target: str) -> datetime | None:
    """Return when something was last done to a target, None = never."""
    return AuditEvent.objects.filter(action=action, target=target).order_by("-id").values_list("at", flat=True).first()


def find_last_action_at(action: str) -> datetime | None:
    """Return when something was last done to any target, None = never."""
    return AuditEvent.objects.filter(action=action).order_by("-id").values_list("at", flat=True).first()


def find_last_event(*, action: str, target: str, detail: Mapping[str, object]) -> AuditEvent | None:
    """Return what was last done to a target with these members among its detail, None = never."""
    return AuditEvent.objects.filter(action=action, target=target, detail__contains=dict(detail)).order_by("-id").first()


def list_events(*, targets: Collection[str], before: datetime | None, most: int) -> list[AuditEvent]:
    """Return what was done to any of these targets, the newest first, from before a time; one query."""
    rows = AuditEvent.objects.filter(target__in=[target for target in targets if target])
    rows = rows if before is None else rows.filter(at__lt=before)
    return list(rows.defer("body").order_by("-pk")[:most])


def read_entries_of(op_id: str) -> list[Entry]:
    """Return the entries of an operation's events, oldest first."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_ENTRIES} WHERE event.op_id = %s AND event.op_id <> '' ORDER BY entry.seq", [op_id])
        return [_make_entry(row) for row in cursor.fetchall()]


def check_tail() -> Tail:
    """Check the last entries against each other and against the columns of their events."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_ENTRIES} ORDER BY entry.seq DESC LIMIT %s", [limits().governance.audit_tail_entries])
        tail = [_make_entry(row) for row in reversed(cursor.fetchall())]
    if not tail:
        return Tail(0, 0, None)
    previous: Entry | None = None
    for entry in tail:
        follows = previous is None or (entry.seq, entry.prev_hash) == (previous.seq + 1, previous.hash)
        if not (follows and _holds(entry)):
            return Tail(tail[0].seq, tail[-1].seq, entry.seq)
        previous = entry
    return Tail(tail[0].seq, tail[-1].seq, None)


def check_entry(seq: int) -> bool:
    """Return whether an entry's hash is that of its event's bytes, and these say what the columns show."""
    with connection.cursor() as cursor:
        cursor.execute(f"{_ENTRIES} WHERE entry.seq = %s", [seq])
        row = cursor.fetchone()
    return row is not None and _holds(_make_entry(row))


def _holds(entry: Entry) -> bool:
    body = entry.body
    if body is None or entry_hash(entry.seq, entry.prev_hash, body) != entry.hash:
        return False
    return bool(json.loads(body) == entry.columns)


def _make_entry(row: Row) -> Entry:
    seq, prev_hash, hashed, body, action, actor, at_us, detail, op_id, target = row
    if body is None:
        return Entry(seq, bytes(prev_hash), bytes(hashed), None)
    columns = {"action": action, "actor": actor, "at_us": at_us, "op_id": op_id, "target": target}
    return Entry(seq, bytes(prev_hash), bytes(hashed), bytes(body), columns | {"detail": json.loads(detail)})


def _make_witness(size: int, row: list[Any]) -> Witness:  # Any: columns, see _WITNESSES
    node_name, root, signature, public_key, note = row
    return Witness(node_name, size, bytes(root), bytes(signature), bytes(public_key), note)


def _stream(query: str, *values: int) -> Iterator[Row]:
    with connection.chunked_cursor() as cursor:
        cursor.execute(query, values)
        while rows := cursor.fetchmany(limits().governance.audit_read_rows):
            yield from rows


@contextmanager
def _one_snapshot() -> Iterator[None]:
    """Show all queries inside the same state of the database, unless the caller has a transaction already."""
    is_own = not connection.in_atomic_block
    with transaction.atomic():
        if is_own:
            with connection.cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        yield
