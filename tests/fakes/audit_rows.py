"""Rows of the audit log in the database, and raw connections to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from django.conf import settings
from django.db import connection, transaction

from controlplane.management.commands.audit import verify_database
from governance import checkpoints
from governance.audit import record_event
from governance.models import AuditEntry
from wire.auditlog import Verdict

LOG_KEY = "BQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQU"
"""32 bytes 05 as base64url."""
TABLES = ("auditevent", "auditentry", "auditcheckpoint", "witnessstatement")


def append(count: int, *, op_id: str = "") -> None:
    for number in range(count):
        with transaction.atomic():
            record_event(actor="user:ada", action="test.append", target=f"t{number}", detail={"n": number}, op_id=op_id)
    chain_events()


def chain_events() -> None:
    """Have the database chain what it was told, as it does at a commit: a test inside one transaction has none."""
    if connection.in_atomic_block:
        with connection.cursor() as cursor:
            cursor.execute("SET CONSTRAINTS ALL IMMEDIATE; SET CONSTRAINTS ALL DEFERRED")


def append_at_once(count: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO governance_auditevent (at, actor, action, target, detail) "
            "SELECT now(), 'user:ada', 'test.append', 't' || n, jsonb_build_object('n', n) FROM generate_series(1, %s) AS n",
            [count],
        )
    chain_events()


def judge_database() -> Verdict:
    chain_events()
    return verify_database(checkpoints.log_keys())


def database_url() -> str:
    """Return a URL of the test database, for connections that are not Django's."""
    from urllib.parse import urlsplit, urlunsplit

    return urlunsplit(urlsplit(settings.DATABASE_URL)._replace(path=f"/{connection.settings_dict['NAME']}"))


@contextmanager
def raw_connection() -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    with psycopg.connect(database_url()) as session:
        yield session


def tamper(*statements: str) -> None:
    """Run statements as somebody who may switch off every trigger and drop every constraint of the log."""
    chain_events()
    with connection.cursor() as cursor:
        for table in TABLES:
            cursor.execute(f"ALTER TABLE governance_{table} DISABLE TRIGGER USER")
        try:
            for statement in statements:
                cursor.execute(statement)
        finally:
            for table in TABLES:
                cursor.execute(f"ALTER TABLE governance_{table} ENABLE TRIGGER USER")
                cursor.execute(f"ALTER TABLE governance_{table} DISABLE TRIGGER governance_{table}_no_truncate")


def sizes() -> list[int]:
    return list(AuditEntry.objects.order_by("seq").values_list("seq", flat=True))
