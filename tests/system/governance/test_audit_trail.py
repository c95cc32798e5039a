"""The audit trail only grows, whoever asks the database; its pages say whether it still proves what it shows."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.contrib.auth import get_user_model
from django.db import DatabaseError, connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from pytest_django import Settings

from core.limits import limits
from governance.audit import record_event
from governance.checkpoints import make_checkpoint
from governance.models import AuditCheckpoint, AuditEntry, AuditEvent, WitnessStatement
from tests.fakes.audit_logs import LOG_KEY, append, append_at_once, tamper
from wire.optoken.canonical import NotCanonical, canonical_bytes

TABLES = ["auditevent", "auditentry", "auditcheckpoint", "witnessstatement"]


@pytest.mark.django_db
@pytest.mark.parametrize(
    "detail",
    [
        {},
        {"b": 1, "a": {"zz": [], "z": {}, "Z": [1, -2, [True, False, None]]}},
        {"text": 'quote " slash / back \\ tab \t nl \n bell \x07 del \x7f \x1f é 漢 😀 \u2028'},
        {"large": 2**53 - 1, "k" * 50: "", "ab": 1, "b": 2, "aa": 3},
    ],
    ids=["empty", "nested", "text", "order"],
)
def test_the_database_writes_the_canonical_bytes_of_an_event(detail: dict[str, object]) -> None:
    target = 'a "target" \\ \t é'
    event = record_event(actor="user:Zoë", action="node.drain", target=target, detail=detail, op_id="op-1")
    event.refresh_from_db()
    at_us = (event.at - datetime(1970, 1, 1, tzinfo=UTC)) // (datetime.resolution)
    assert bytes(event.body) == canonical_bytes(
        {"actor": "user:Zoë", "action": "node.drain", "target": target, "detail": detail, "op_id": "op-1", "at_us": at_us}
    )


@pytest.mark.django_db
@pytest.mark.parametrize("detail", [{"share": 0.5}, {"é": 1}, {"n": 2**53}], ids=["float", "key", "integer"])
def test_a_detail_that_readers_could_read_differently_is_refused(detail: dict[str, object]) -> None:
    with pytest.raises(NotCanonical):
        record_event(actor="user:ada", action="node.drain", target="node_1", detail=detail)


@pytest.mark.django_db
def test_nobody_can_give_an_event_other_bytes_than_its_own() -> None:
    event = AuditEvent.objects.create(actor="user:eve", action="node.drain", body=b'{"actor":"user:ada"}')
    event.refresh_from_db()
    assert b'"actor":"user:eve"' in bytes(event.body)


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
    assert not AuditEntry.objects.exists()


def fill_tables() -> None:
    """Write one row into each table and let the chain be appended now, not at a commit that does not come."""
    record_event(actor="user:ada", action="node.drain", target="node_1")
    now = datetime.now(UTC)
    AuditCheckpoint.objects.create(size=1, root=bytes(32), frontier=b"", note="", made_at=now)
    WitnessStatement.objects.create(node_name="box", size=1, root=b"", signature=b"", public_key=b"", heard_at=now)
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


@pytest.mark.django_db
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("statement", ["UPDATE {} SET {} = {}", "DELETE FROM {}", "TRUNCATE {}", "TRUNCATE {} CASCADE"])
def test_the_database_refuses_to_change_or_remove_rows(statement: str, table: str) -> None:
    fill_tables()
    name = f"governance_{table}"
    column = {"auditevent": "actor", "auditentry": "seq", "auditcheckpoint": "note", "witnessstatement": "alarm"}[table]
    with connection.cursor() as cursor:
        # Tests switch this trigger off to clean up after themselves; the transaction of this one puts it back.
        cursor.execute(f"ALTER TABLE {name} ENABLE TRIGGER {name}_no_truncate")
        cursor.execute(f"SELECT * FROM {name}")
        before = cursor.fetchall()
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            cursor.execute(statement.format(name, column, column))
        cursor.execute(f"SELECT * FROM {name}")
        assert cursor.fetchall() == before != []


@pytest.mark.django_db
def test_the_orm_cannot_remove_events_either() -> None:
    event = record_event(actor="user:ada", action="node.drain", target="node_1")
    for attempt in (event.delete, AuditEvent.objects.all().delete, event.save):
        with pytest.raises(DatabaseError, match="append-only"), transaction.atomic():
            attempt()


pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    client = Client()
    client.force_login(get_user_model().objects.create_superuser(username="ada"))
    return client


def read_list(boss: Client) -> str:
    return boss.get(reverse("admin:governance_auditevent_changelist")).content.decode()


def test_the_list_says_what_was_verified_signed_and_witnessed(boss: Client, settings: Settings) -> None:
    assert "The audit log is empty" in read_list(boss)
    append(4)
    page = read_list(boss)
    assert "Entries 1 to 4 verified" in page
    assert "MUSTER_LOG_KEY is not set" in page
    settings.GOVERNANCE_LOG_KEY = LOG_KEY
    assert "No checkpoint yet" in read_list(boss)
    make_checkpoint(now=datetime(2026, 11, 2, 9, 8, 7, tzinfo=UTC))
    heard = datetime(2026, 11, 2, 10, 9, 8, tzinfo=UTC)
    seen = {"size": 4, "signature": b"", "public_key": b"", "heard_at": heard}
    WitnessStatement.objects.create(node_name="box-1", root=b"1", **seen)
    page = read_list(boss)
    assert "4 entries, signed 2026-11-02 09:08:07 UTC" in page
    assert "1 node witnessed it, last at 2026-11-02 10:09:08 UTC" in page
    assert "alarm" not in page
    WitnessStatement.objects.create(node_name="box-2", root=b"2", alarm=True, **seen)
    assert "1 alarm of nodes that saw another log" in read_list(boss)


def test_an_edited_row_is_told_on_the_list_and_on_its_page(boss: Client) -> None:
    append(5)
    event = AuditEvent.objects.get(target="t2")
    tamper(f"UPDATE governance_auditevent SET actor = 'user:bob' WHERE id = {event.pk}")
    assert "Broken at entry 3" in read_list(boss)
    page = boss.get(reverse("admin:governance_auditevent_change", args=[event.pk])).content.decode()
    assert "EDITED" in page
    tamper("DELETE FROM governance_auditentry WHERE seq = 3")
    page = boss.get(reverse("admin:governance_auditevent_change", args=[event.pk])).content.decode()
    assert "somebody wrote it past the log" in page
    assert "not in the chain" in read_list(boss)


def test_a_page_reads_only_the_end_of_a_long_log(boss: Client) -> None:
    append_at_once(limits().governance.audit_tail_entries + 5)
    with CaptureQueriesContext(connection) as queries:
        assert "Entries 6 to 1,005 verified" in read_list(boss)
    scans = [query["sql"] for query in queries if "governance_auditentry AS entry" in query["sql"]]
    assert len(scans) == 1
    assert scans[0].endswith("LIMIT 1000")
