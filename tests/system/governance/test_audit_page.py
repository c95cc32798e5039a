"""The viewer of the audit trail says whether the log still proves what it shows, and never reads all of it."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from pytest_django import Settings

from core.limits import limits
from governance.checkpoints import make_checkpoint
from governance.models import AuditEvent, WitnessStatement
from tests.system.governance.audit_rows import LOG_KEY, append, append_at_once, tamper

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


def test_an_event_is_shown_with_its_place_and_hash(boss: Client) -> None:
    append(3)
    event = AuditEvent.objects.select_related("entry").latest("pk")
    shown = bytes(event.entry.hash).hex()[:12]
    assert shown in read_list(boss)
    page = boss.get(reverse("admin:governance_auditevent_change", args=[event.pk])).content.decode()
    assert shown in page
    assert "agrees with its hash" in page


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
