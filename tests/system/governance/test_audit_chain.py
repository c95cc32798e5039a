"""The chain has one order, no gap and no fork, whoever appends at once and whatever dies; and what was done to it is found."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import psycopg
import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from pytest_django import Settings

from governance.audit import record_event
from governance.audit.reading import check_tail
from governance.checkpoints import checkpoint_if_due, log_keys, make_checkpoint
from governance.models import AuditCheckpoint, AuditEntry, AuditEvent
from tests.fakes.waiting import wait_until
from tests.system.governance.audit_rows import (
    LOG_KEY,
    TABLES,
    append,
    database_url,
    judge,
    raw_connection,
    sizes,
    tamper,
)
from wire import auditlog
from wire.auditlog import Kind, Status, Verifier, read_records

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]
APPENDERS = int(os.environ.get("MUSTER_TEST_APPENDERS", "64"))
EVENTS_EACH = int(os.environ.get("MUSTER_TEST_EVENTS_EACH", "12"))
INSERT = """
INSERT INTO governance_auditevent (at, actor, action, target, detail, op_id) VALUES (now(), 'user:eve', 'a.b', %s, '{}', '')
"""
FORGED = """
INSERT INTO governance_auditevent (at, actor, action, target, detail, op_id, body)
VALUES (now(), 'user:eve', 'a.b', 'forged', '{{}}', '', 'x')
"""
FORGED_ENTRY = """
INSERT INTO governance_auditentry (seq, event_id, prev_hash, hash)
SELECT 4, max(id), sha256('x'), sha256('y') FROM governance_auditevent
"""


@pytest.fixture(autouse=True)
def log_key(settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_KEY


def test_an_entry_comes_with_the_commit_and_not_before() -> None:
    with transaction.atomic():
        event = record_event(actor="user:ada", action="test.append", target="t")
        assert not AuditEntry.objects.exists()
    entry = AuditEntry.objects.get()
    assert (entry.seq, entry.event_id, bytes(entry.prev_hash)) == (1, event.pk, bytes(32))
    assert judge().status is Status.GOOD


@pytest.mark.timeout(240)
def test_many_appenders_at_once_make_one_chain_in_the_order_of_their_commits() -> None:
    start, may_wait_s = threading.Barrier(APPENDERS), 90

    def append_some(number: int) -> None:
        with psycopg.connect(database_url()) as session:
            start.wait(may_wait_s)
            for event in range(EVENTS_EACH):
                session.execute(INSERT, [f"{number}"])
                if event % 3 == 0:
                    session.execute(INSERT, [f"{number} twice"])
                if event % 5 == 4:
                    session.rollback()
                session.commit()

    with ThreadPoolExecutor(APPENDERS) as pool:
        list(pool.map(append_some, range(APPENDERS)))
    kept = sum((2 if event % 3 == 0 else 1) for event in range(EVENTS_EACH) if event % 5 != 4)

    assert sizes() == list(range(1, APPENDERS * kept + 1))
    verdict = judge()
    assert (verdict.status, verdict.size) == (Status.GOOD, APPENDERS * kept)


def is_blocked(pid: int) -> bool:
    """Return whether the server's process ``pid`` waits for a lock."""
    with raw_connection() as session:
        return session.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid]).fetchone() == (True,)


def test_whoever_appends_never_waits_for_a_row_while_others_wait_for_the_chain() -> None:
    # Each writes its event first and then touches the row that the other's foreign key check needs at commit.
    with raw_connection() as setup:
        setup.execute("CREATE TABLE chain_parent (id int PRIMARY KEY)")
        setup.execute("CREATE TABLE chain_child (parent int REFERENCES chain_parent DEFERRABLE INITIALLY DEFERRED)")
        setup.execute("INSERT INTO chain_parent VALUES (1), (2)")
    try:
        with raw_connection() as one, raw_connection() as other, ThreadPoolExecutor(2) as pool:
            one.execute(INSERT, ["one"])
            one.execute("INSERT INTO chain_child VALUES (1)")
            other.execute("SELECT * FROM chain_parent WHERE id = 1 FOR UPDATE")
            other.execute(INSERT, ["other"])
            waiting = pool.submit(one.commit)
            wait_until(lambda: is_blocked(one.info.backend_pid), what="the commit waits for the row")
            pool.submit(other.commit).result(30)
            waiting.result(30)
    finally:
        with raw_connection() as session:
            session.execute("DROP TABLE chain_child, chain_parent")
    assert [event.target for event in AuditEvent.objects.order_by("entry__seq")] == ["other", "one"]
    assert judge().status is Status.GOOD


def test_an_appender_with_an_old_snapshot_fails_whole_and_leaves_no_fork() -> None:
    with raw_connection() as session:
        session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        session.execute("SELECT count(*) FROM governance_auditentry")
        session.execute(INSERT, ["late"])
        append(1)
        with pytest.raises(psycopg.errors.UniqueViolation):
            session.commit()
        session.rollback()
    assert [event.target for event in AuditEvent.objects.all()] == ["t0"]
    assert judge().status is Status.GOOD


def test_a_process_killed_while_it_appends_leaves_a_whole_chain() -> None:
    command = [sys.executable, "-m", "tests.system.governance.audit_process"]
    name = f"killed {os.getpid()}"
    environment = {**os.environ, "DATABASE_URL": database_url(), "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    environment["PGAPPNAME"] = name
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = 0
        try:
            while told < 40:
                told = int(process.stdout.readline())
            assert count_backends(name) == 1
        finally:
            process.kill()
        process.wait(10)
    wait_until(lambda: count_backends(name) == 0, what="the server is through with what the process had begun")
    verdict = judge()
    assert verdict.status is Status.GOOD
    assert verdict.size == AuditEvent.objects.count() >= told
    assert sizes() == list(range(1, verdict.size + 1))


def count_backends(name: str) -> int:
    """Return how many connections of the program ``name`` the server knows."""
    with raw_connection() as session:
        found = session.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name]).fetchone()
        assert found is not None
        return int(str(found[0]))


def test_a_role_that_may_only_insert_and_select_still_appends_and_can_do_no_more() -> None:
    with raw_connection() as session:
        session.execute("CREATE ROLE muster_test_app")
        session.execute(f"GRANT SELECT ON {', '.join(f'governance_{table}' for table in TABLES)} TO muster_test_app")
        session.execute("GRANT INSERT ON governance_auditevent TO muster_test_app")
        session.execute("GRANT USAGE ON SEQUENCE governance_auditevent_id_seq TO muster_test_app")
        session.execute("SET LOCAL ROLE muster_test_app")
        session.execute("CREATE TEMPORARY TABLE governance_auditentry (LIKE public.governance_auditentry)")
        session.execute("CREATE TEMPORARY TABLE governance_auditpending (event_id bigint)")
        session.execute(INSERT, ["by the role"])
        session.execute("SET CONSTRAINTS ALL IMMEDIATE")
        assert session.execute("SELECT seq FROM public.governance_auditentry").fetchall() == [(1,)]
        session.execute("DROP TABLE pg_temp.governance_auditentry")
        for refused in (
            "INSERT INTO governance_auditentry (seq, event_id, prev_hash, hash) VALUES (2, 2, 'x', 'y')",
            "SELECT governance_chain_event(max(id)) FROM governance_auditevent",
            "ALTER TABLE governance_auditevent DISABLE TRIGGER governance_auditevent_note",
            "DELETE FROM governance_auditevent",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege), session.transaction():
                session.execute(refused)
        session.rollback()


@pytest.mark.parametrize(
    ("seq", "kind", "statements"),
    [
        (4, Kind.EDITED, ["UPDATE governance_auditevent SET actor = 'user:bob' WHERE id = {4}"]),
        (4, Kind.EDITED, ["UPDATE governance_auditevent SET detail = '{{\"n\": 4}}' WHERE id = {4}"]),
        (4, Kind.EDITED, ["UPDATE governance_auditevent SET at = at + interval '1 microsecond' WHERE id = {4}"]),
        (4, Kind.EDITED, ["UPDATE governance_auditevent SET op_id = 'op-2' WHERE id = {4}"]),
        (4, Kind.EDITED, ["UPDATE governance_auditevent SET body = body || ' ' WHERE id = {4}"]),
        (4, Kind.EDITED, ["UPDATE governance_auditentry SET hash = sha256('x') WHERE seq = 4"]),
        (4, Kind.MISSING, ["DELETE FROM governance_auditevent WHERE id = {4}"]),
        (
            4,
            Kind.MISSING,
            ["DELETE FROM governance_auditevent WHERE id = {4}", "DELETE FROM governance_auditentry WHERE seq = 4"],
        ),
        (4, Kind.MISSING, ["DELETE FROM governance_auditentry WHERE seq = 4"]),
        (
            4,
            Kind.REORDERED,
            [
                "UPDATE governance_auditentry SET event_id = 0 WHERE seq = 4",
                "UPDATE governance_auditentry SET event_id = {4} WHERE seq = 7",
                "UPDATE governance_auditentry SET event_id = {7} WHERE seq = 4",
            ],
        ),
        (
            4,
            Kind.REORDERED,
            [
                "UPDATE governance_auditentry SET seq = 99 WHERE seq = 4",
                "UPDATE governance_auditentry SET seq = 4 WHERE seq = 7",
                "UPDATE governance_auditentry SET seq = 7 WHERE seq = 99",
            ],
        ),
        (9, Kind.INSERTED, [FORGED]),
        (
            4,
            Kind.INSERTED,
            [
                FORGED,
                "UPDATE governance_auditentry SET seq = -seq WHERE seq > 3",
                "UPDATE governance_auditentry SET seq = 1 - seq WHERE seq < 0",
                FORGED_ENTRY,
            ],
        ),
    ],
    ids=[
        "actor",
        "detail",
        "time",
        "operation",
        "body",
        "hash",
        "event gone",
        "event and entry gone",
        "entry gone",
        "contents swapped",
        "numbers swapped",
        "event without an entry",
        "entry in between",
    ],
)
def test_what_a_superuser_did_to_the_tables_is_found(seq: int, kind: Kind, statements: list[str], tmp_path: Path) -> None:
    append(8)
    ids = [0, *AuditEvent.objects.order_by("pk").values_list("pk", flat=True)]
    tamper(*(statement.format(*ids) for statement in statements))
    found = judge().findings[0]
    assert (found.seq, found.kind) == (seq, kind)

    call_command("audit", "export", str(tmp_path / "log"), stdout=StringIO())
    with (tmp_path / "log").open() as lines:
        exported = auditlog.verify_export(lines)
    assert exported.findings[0] == found
    is_of_an_entry = "without an entry" not in str(statements) and seq != 9
    assert check_tail().bad is not None or not is_of_an_entry


def test_a_log_that_lost_its_end_or_was_written_anew_is_told_by_its_checkpoints() -> None:
    append(6)
    checkpoint_if_due()
    tamper("DELETE FROM governance_auditevent WHERE id IN (SELECT event_id FROM governance_auditentry WHERE seq > 4)")
    tamper("DELETE FROM governance_auditentry WHERE seq > 4")
    assert judge().status is Status.TRUNCATED
    append(3)
    verdict = judge()
    assert verdict.status is Status.INCONSISTENT
    assert verdict.findings[0].seq == 6
    assert check_tail().bad is None


def run(*words: str) -> tuple[int, str]:
    output = StringIO()
    try:
        call_command("audit", *words, stdout=output)
    except SystemExit as ended:
        return int(str(ended.code)), output.getvalue()
    return 0, output.getvalue()


def test_the_command_ends_with_a_status_for_each_outcome(tmp_path: Path, settings: Settings) -> None:
    assert run("verify")[0] == 0
    append(5)
    status, text = run("verify")
    assert (status, "minutes old. Its first checkpoint is made soon" in text) == (0, True)
    assert "\n5\n" in run("checkpoint")[1]
    status, text = run("verify")
    assert (status, "5 entries verified" in text, "1 checkpoints" in text) == (0, True, True)
    run("export", str(tmp_path / "good"))
    assert run("verify", str(tmp_path / "good"))[0] == 0

    settings.GOVERNANCE_LOG_KEY = "A" * 43
    assert run("verify")[0] == 3
    old = auditlog.LogKey.parse(auditlog.read_header((tmp_path / "good").read_text().splitlines()[0])[1][0].__str__())
    assert run("verify", "--key", str(old))[0] == 0
    settings.GOVERNANCE_LOG_KEY = LOG_KEY
    tamper("DELETE FROM governance_auditentry WHERE seq = 5", "DELETE FROM governance_auditevent WHERE target = 't4'")
    assert run("verify")[0] == 2
    tamper("DELETE FROM governance_auditevent WHERE target = 't1'")
    status, text = run("verify")
    assert (status, "entry 2: missing" in text) == (1, True)
    for words in (["verify", str(tmp_path / "nowhere")], ["prove", "op-9"], ["verify", "--key", "x"]):
        with pytest.raises(CommandError) as refused:
            run(*words)
        assert refused.value.returncode == auditlog.USAGE_STATUS


def test_a_log_from_which_the_checkpoints_are_gone_is_unwitnessed(tmp_path: Path, settings: Settings) -> None:
    with connection.cursor() as cursor:
        cursor.execute(INSERT.replace("now()", "now() - interval '11 minutes'"), ["old"])
    append(4)
    run("checkpoint")
    assert run("verify")[0] == 0
    tamper("DELETE FROM governance_auditcheckpoint")
    for words in ((), ("--key", str(log_keys()[0]))):
        status, text = run("verify", *words)
        assert (status, text.startswith("unwitnessed: 5 entries")) == (4, True)
    run("export", str(tmp_path / "log"))
    assert run("verify", str(tmp_path / "log"))[0] == 4
    settings.GOVERNANCE_LOG_KEY = ""
    assert "set MUSTER_LOG_KEY" in run("verify")[1]


def test_a_checkpoint_needs_a_key(settings: Settings) -> None:
    append(1)
    settings.GOVERNANCE_LOG_KEY = ""
    assert checkpoint_if_due() is None
    with pytest.raises(CommandError, match="MUSTER_LOG_KEY"):
        run("checkpoint")


def test_a_proof_of_an_operation_holds_without_the_database(tmp_path: Path) -> None:
    append(3)
    append(2, op_id="op-1")
    make_checkpoint(now=AuditEvent.objects.latest("at").at)
    append(3, op_id="op-1")
    run("prove", "op-1", "--out", str(tmp_path / "proof"))
    for words, status in ((["prove-check", "proof"], 0), (["prove-check", "proof", "--key", _stranger()], 1)):
        command = [sys.executable, "-I", str(auditlog.__file__), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == status, done
    assert AuditCheckpoint.objects.count() == 2
    assert '"events"' in run("prove", "op-1")[1]


def _stranger() -> str:
    return str(auditlog.LogKey("muster.local/audit", bytes(32)))


def test_an_export_is_checked_line_by_line_and_never_held_whole(tmp_path: Path) -> None:
    append(30)
    checkpoint_if_due()
    run("export", str(tmp_path / "log"))
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1 + 30 + 1
    origin, keys, size = auditlog.read_header(lines[0])
    verifier = Verifier(keys=keys, origin=origin, size_claimed=size)
    for record in read_records(iter(lines[1:])):
        verifier.feed(record)
    assert verifier.finish() == judge()


def test_rows_from_before_the_chain_are_in_it_after_the_migration() -> None:
    append(3)
    with connection.cursor() as cursor:
        cursor.execute("SELECT seq, hash, event_id FROM governance_auditentry ORDER BY seq")
        before = cursor.fetchall()
    try:
        call_command("migrate", "governance", "0002", verbosity=0)
        with connection.cursor() as cursor:
            cursor.execute(
                "INSERT INTO governance_auditevent (at, actor, action, target, detail) "
                "VALUES ('2026-01-02 03:04:05.000006Z', 'user:bob', 'a.b', 'x', '{\"reason\": \"fans\"}')"
            )
    finally:
        call_command("migrate", verbosity=0)
        with connection.cursor() as cursor:
            for table in TABLES:
                cursor.execute(f"ALTER TABLE governance_{table} DISABLE TRIGGER governance_{table}_no_truncate")
    verdict = judge()
    assert (verdict.status, verdict.size) == (Status.GOOD, 4)
    with connection.cursor() as cursor:
        cursor.execute("SELECT seq, hash, event_id FROM governance_auditentry ORDER BY seq LIMIT 3")
        assert cursor.fetchall() == before
    old = AuditEvent.objects.get(actor="user:bob")
    assert bytes(old.body) == (
        b'{"action":"a.b","actor":"user:bob","at_us":1767323045000006,"detail":{"reason":"fans"},"op_id":"","target":"x"}'
    )
    append(1)
    assert judge().size == 5
