"""Who is told what: rows of notices, written in the transaction of what they tell of. Sending them is ``delivery``."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import connection, transaction
from django.db.models import Q

from core.hints import UNREADABLE_KEY
from core.limits import limits
from governance.audit import record_event
from governance.models import AuditEvent, Notice, Operation, OperationRun, PolicyVersion, WebhookEndpoint
from wire import clock
from wire.optoken.approval import BREAK_GLASS, Policy, read_policy

RUN_EVENTS = frozenset({"succeeded", "failed", "unknown"})
_OF_REQUESTER_AND_SIGNERS = RUN_EVENTS | {"approved", "rejected", "expired", "blocked"}
_OF_EVERY_APPROVER = frozenset({"break_glass", "review_overdue", "frozen"})
NOTICE_EVENTS = _OF_REQUESTER_AND_SIGNERS | _OF_EVERY_APPROVER | {"proposed", "expiring_50", "expiring_90"}
"""These and FLEET_EVENTS have each a template of their name in ``templates/notices``."""
FLEET_EVENTS = frozenset({"drained", "ejected", "reload_failed", "messages_unreadable"})
"""What is told of a node, or of Valkey, as its audit event says."""
_UNREADABLE_LOCK = 0x6D73_6773_756E_7264
"""Key of an advisory lock: of two looks at once the second one sees what the first has told."""


def notify(operation: Operation | None, event: str, *, run: OperationRun | None = None) -> int:
    """Tell whoever an event concerns, and every webhook; return how many are told. Doing so again tells nobody twice.

    ``event``: one of NOTICE_EVENTS; ``operation`` None: of the whole control plane (frozen). Runs in the caller's transaction.
    ``run``: which carrying out succeeded or failed, so that each of a batch is told of. People are told by e-mail: nobody when
    MUSTER_MAIL_FROM is empty, nor who has no address. Raises ValueError for an event that does not exist.
    """
    if event not in NOTICE_EVENTS:
        raise ValueError(f"there is no notice {event!r}")
    name = f"{event}.{run.use}.{run.position}" if run is not None else event
    return _add(_list_concerned(operation, event), name, operation=operation)


def notify_of_event(audited: AuditEvent, event: str, *, usernames: Iterable[str]) -> int:
    """Tell these users, and every webhook, what an audit event says; return how many are told.

    ``event``: one of FLEET_EVENTS. Runs in the transaction that wrote ``audited``. Raises ValueError for another event.
    """
    if event not in FLEET_EVENTS:
        raise ValueError(f"there is no notice {event!r}")
    return _add(usernames, f"{event}.{audited.pk}", operation=None)


def notify_of_unreadable(total: int, *, now: datetime) -> bool:
    """Tell every approver, and every webhook, that workers set ``total`` messages aside so far.

    False when nothing is new, or they were told within notice_unreadable_s.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_UNREADABLE_LOCK])
        last = AuditEvent.objects.filter(action="messages.set_aside").last()
        if total == (0 if last is None else last.detail["total"]):
            return False
        if total == 0 or (last is not None and now - last.at < timedelta(seconds=limits().governance.notice_unreadable_s)):
            return False
        event = record_event(actor="system:worker", action="messages.set_aside", target=UNREADABLE_KEY, detail={"total": total})
        notify_of_event(event, "messages_unreadable", usernames=_list_concerned(None, "messages_unreadable"))
    return True


def list_requester_and_signers(op_id: uuid.UUID) -> set[str]:
    """Return the user names of who asked for an operation and of who signed for it and did not withdraw."""
    return _list_concerned(Operation.objects.get(pk=op_id), "approved")


def _list_concerned(operation: Operation | None, event: str) -> set[str]:
    """Return the user names of those whom an event concerns."""
    if operation is None:
        active = PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).first()
        return set() if active is None else set(_read(active).groups)
    if event in _OF_EVERY_APPROVER:
        return set(_read(operation.policy).groups)
    requester = operation.requested_by
    if event == "proposed":
        return _list_able(operation) - {requester}
    standing = operation.decisions.filter(withdrawn_at=None).values_list("person_name", flat=True)
    if event in _OF_REQUESTER_AND_SIGNERS:
        return {requester, *standing}
    return (_list_able(operation) - set(standing)) | {requester}


def _list_able(operation: Operation) -> set[str]:
    """Return who holds a key that may approve operations of that class."""
    is_break_glass = operation.op_class == BREAK_GLASS
    return {key.approver for key in _read(operation.policy).keys.values() if key.is_break_glass == is_break_glass}


def _read(row: PolicyVersion) -> Policy:
    return read_policy(bytes(row.document))


def _add(usernames: Iterable[str], event: str, *, operation: Operation | None) -> int:
    now = clock.now()
    notices = [
        Notice(operation=operation, event=event, webhook=webhook, due_at=now)
        for webhook in WebhookEndpoint.objects.filter(is_active=True)
    ]
    if settings.NOTICE_SENDER:
        people = get_user_model().objects.filter(~Q(email=""), username__in=set(usernames), is_active=True)
        notices += [Notice(operation=operation, event=event, person=person, due_at=now) for person in people]
    Notice.objects.bulk_create(notices, ignore_conflicts=True)
    return len(notices)
