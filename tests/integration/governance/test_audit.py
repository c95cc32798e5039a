"""The audit trail only grows, whoever asks the database."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connection, transaction

from governance.audit import record_event
from governance.models import AuditEvent


@pytest.mark.django_db
def test_an_event_is_written_with_its_detail() -> None:
    record_event(actor="user:ada", action="node.drain", target="node_1", detail={"reason": "new fans"})
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.target, event.detail) == (
        "user:ada",
        "node.drain",
        "node_1",
        {"reason": "new fans"},
    )


@pytest.mark.django_db(transaction=True)
def test_an_event_outside_a_transaction_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="atomic"):
        record_event(actor="user:ada", action="node.drain", target="node_1")


@pytest.mark.django_db(transaction=True)
def test_an_event_goes_with_the_change_that_was_rolled_back() -> None:
    with transaction.atomic():
        record_event(actor="user:ada", action="node.drain", target="node_1")
        transaction.set_rollback(True)
    assert not AuditEvent.objects.exists()


@pytest.mark.django_db
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE governance_auditevent SET actor = 'user:eve'",
        "DELETE FROM governance_auditevent",
        "TRUNCATE governance_auditevent",
        "TRUNCATE governance_auditevent CASCADE",
    ],
)
def test_the_database_refuses_to_change_or_remove_events(statement: str) -> None:
    record_event(actor="user:ada", action="node.drain", target="node_1")
    with connection.cursor() as cursor:
        # Tests switch this trigger off to clean up after themselves; the transaction of this one puts it back.
        cursor.execute("ALTER TABLE governance_auditevent ENABLE TRIGGER governance_auditevent_no_truncate")
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            cursor.execute(statement)
    assert AuditEvent.objects.get().actor == "user:ada"


@pytest.mark.django_db
def test_the_orm_cannot_remove_events_either() -> None:
    event = record_event(actor="user:ada", action="node.drain", target="node_1")
    for attempt in (event.delete, AuditEvent.objects.all().delete, event.save):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            attempt()
