"""The chain of the audit log and its checkpoints: one order, no gap, no fork, and whatever was done to it is found."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path

import psycopg
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.contrib.auth import get_user_model
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connection, transaction
from django.test import Client
from django.urls import reverse
from pytest_django import Settings

from controlplane.commands import Command
from core.limits import limits
from governance.audit import check_tail, record_event
from governance.checkpoints import (
    AuditLogBroken,
    InvalidWitness,
    UnknownSize,
    WitnessStatus,
    checkpoint_if_due,
    consistency,
    inclusion,
    log_keys,
    make_checkpoint,
    read_status,
    record_witness,
    root_at,
)
from governance.models import AuditCheckpoint, AuditEntry, AuditEvent, WitnessStatement
from tests.fakes.audit_logs import (
    LOG_KEY,
    TABLES,
    append,
    append_at_once,
    chain_events,
    database_url,
    judge_database,
    raw_connection,
    sizes,
    tamper,
)
from tests.fakes.examples import TIMES
from tests.fakes.waiting import wait_until
from wire import auditlog
from wire.auditlog import Checkpoint, Kind, LogKey, Status, leaf_hash, root, verify_consistency, verify_inclusion
from wire.contract import ErrorCode
from wire.optoken.approval import decode_bytes
from wire.optoken.op_token import NotCanonical, canonical_bytes

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(120)]
COMMITTED = pytest.mark.django_db(transaction=True)
APPENDERS = min(64, 12 * TIMES)
EVENTS_EACH = 12
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


@COMMITTED
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
    verdict = judge_database()
    assert (verdict.status, verdict.size) == (Status.GOOD, APPENDERS * kept)


def is_blocked(pid: int) -> bool:
    """Return whether the server's process ``pid`` waits for a lock."""
    with raw_connection() as session:
        return session.execute("SELECT cardinality(pg_blocking_pids(%s)) > 0", [pid]).fetchone() == (True,)


@COMMITTED
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
    assert judge_database().status is Status.GOOD


@COMMITTED
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
    assert judge_database().status is Status.GOOD


@COMMITTED
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


EVENT, ENTRY = "UPDATE governance_auditevent SET ", "UPDATE governance_auditentry SET "
NO_EVENT, NO_ENTRY = "DELETE FROM governance_auditevent WHERE id = {4}", "DELETE FROM governance_auditentry WHERE seq = 4"
TAMPERED: dict[str, tuple[int, Kind, list[str]]] = {
    "actor": (4, Kind.EDITED, [EVENT + "actor = 'user:bob' WHERE id = {4}"]),
    "detail": (4, Kind.EDITED, [EVENT + "detail = '{{\"n\": 4}}' WHERE id = {4}"]),
    "time": (4, Kind.EDITED, [EVENT + "at = at + interval '1 microsecond' WHERE id = {4}"]),
    "operation": (4, Kind.EDITED, [EVENT + "op_id = 'op-2' WHERE id = {4}"]),
    "body": (4, Kind.EDITED, [EVENT + "body = body || ' ' WHERE id = {4}"]),
    "hash": (4, Kind.EDITED, [ENTRY + "hash = sha256('x') WHERE seq = 4"]), "event gone": (4, Kind.MISSING, [NO_EVENT]),
    "event and entry gone": (4, Kind.MISSING, [NO_EVENT, NO_ENTRY]), "entry gone": (4, Kind.MISSING, [NO_ENTRY]),
    "contents swapped": (4, Kind.REORDERED, [ENTRY + "event_id = 0 WHERE seq = 4", ENTRY + "event_id = {4} WHERE seq = 7",
            ENTRY + "event_id = {7} WHERE seq = 4"]),
    "numbers swapped": (4, Kind.REORDERED, [ENTRY + "seq = 99 WHERE seq = 4", ENTRY + "seq = 4 WHERE seq = 7",
            ENTRY + "seq = 7 WHERE seq = 99"]), "event without an entry": (9, Kind.INSERTED, [FORGED]),
    "entry in between": (4, Kind.INSERTED, [FORGED, ENTRY + "seq = -seq WHERE seq > 3", ENTRY + "seq = 1 - seq WHERE seq < 0",
            FORGED_ENTRY]),
}  # fmt: skip


@pytest.mark.parametrize(("seq", "kind", "statements"), TAMPERED.values(), ids=TAMPERED)
def test_what_a_superuser_did_to_the_tables_is_found(seq: int, kind: Kind, statements: list[str], tmp_path: Path) -> None:
    append(8)
    ids = [0, *AuditEvent.objects.order_by("pk").values_list("pk", flat=True)]
    tamper(*(statement.format(*ids) for statement in statements))
    found = judge_database().findings[0]
    assert (found.seq, found.kind) == (seq, kind)
    call_command(Command("audit"), "export", str(tmp_path / "log"), stdout=StringIO())
    with (tmp_path / "log").open() as lines:
        exported = auditlog.verify_export(lines)
    assert exported.findings[0] == found
    is_of_an_entry = "without an entry" not in str(statements) and seq != 9
    assert check_tail().bad is not None or not is_of_an_entry


def run(*words: str) -> tuple[int, str]:
    output = StringIO()
    try:
        call_command(Command("audit"), *words, stdout=output)
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
    chain_events()
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


@pytest.mark.parametrize("text", ["", "short", "!" * 43, "é"])
def test_a_checkpoint_needs_a_key_and_one_that_is_none_is_told_without_showing_it(text: str, settings: Settings) -> None:
    append(1)
    settings.GOVERNANCE_LOG_KEY = text
    if text:
        with pytest.raises(ImproperlyConfigured, match="MUSTER_LOG_KEY") as told:
            log_keys()
        assert text not in str(told.value)
        return
    assert checkpoint_if_due() is None
    with pytest.raises(CommandError, match="MUSTER_LOG_KEY"):
        run("checkpoint")


def test_a_proof_of_an_operation_holds_without_the_database(tmp_path: Path) -> None:
    append(3)
    append(2, op_id="op-1")
    make_checkpoint(now=AuditEvent.objects.latest("at").at)
    append(3, op_id="op-1")
    run("prove", "op-1", "--out", str(tmp_path / "proof"))
    stranger = str(LogKey("muster.local/audit", bytes(32)))
    for words, status in ((["prove-check", "proof"], 0), (["prove-check", "proof", "--key", stranger], 1)):
        command = [sys.executable, "-I", str(auditlog.__file__), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == status, done
    assert AuditCheckpoint.objects.count() == 2
    assert '"events"' in run("prove", "op-1")[1]


NOW = datetime(2026, 11, 2, 9, tzinfo=UTC)
BOX = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
BOX_KEY = BOX.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def tell(
    size: int, seen_root: bytes, *, signer: Ed25519PrivateKey = BOX, note: str = "", signed_as: str = "node#abc"
) -> WitnessStatus:
    """Let a node say what it saw; ``signed_as`` "": as nodes of earlier releases do."""
    signature = signer.sign(Checkpoint("muster.local/audit", size, seen_root).witness_message(signed_as))
    return record_witness(
        node_name="box", runner_id="node#abc", size=size, root=seen_root, signature=signature, public_key=BOX_KEY, note=note
    )


def sign_note(size: int, seen_root: bytes) -> str:
    """Return a checkpoint that only whoever has the key of the log can have signed."""
    checkpoint = Checkpoint("muster.local/audit", size, seen_root)
    key = Ed25519PrivateKey.from_private_bytes(decode_bytes(LOG_KEY))
    own = LogKey("muster.local/audit", key.public_key().public_bytes_raw())
    return checkpoint.note(own, key.sign(checkpoint.text().encode()))


def make() -> AuditCheckpoint:
    made = make_checkpoint(now=NOW)
    assert made is not None
    return made


def test_a_checkpoint_is_due_after_enough_entries_or_enough_time() -> None:
    assert checkpoint_if_due(now=NOW) is None
    append(1)
    first = checkpoint_if_due(now=NOW)
    assert first is not None
    append(2)
    assert checkpoint_if_due(now=NOW + timedelta(minutes=4, seconds=59)) is None
    later = checkpoint_if_due(now=NOW + timedelta(minutes=5))
    assert later is not None
    assert (first.size, later.size) == (1, 3)
    assert checkpoint_if_due(now=NOW + timedelta(days=1)) is None
    append_at_once(limits().governance.checkpoint_entries - 1)
    assert checkpoint_if_due(now=NOW + timedelta(minutes=6)) is None
    append(1)
    full = checkpoint_if_due(now=NOW + timedelta(minutes=6))
    assert full is not None
    assert full.size == 3 + limits().governance.checkpoint_entries


def test_every_proof_between_any_two_sizes_holds_with_checkpoints_anywhere() -> None:
    for size in (3, 4, 6):
        append(size - AuditEntry.objects.count())
        make()
    append(7)
    leaves = [leaf_hash(bytes(entry.hash)) for entry in AuditEntry.objects.order_by("seq")]
    for new in range(1, 14):
        now = root(leaves[:new])
        assert root_at(new) == now
        for old in range(new + 1):
            was, proof = root(leaves[:old]), consistency(old, new)
            assert verify_consistency(old=old, size=new, old_root=was, new_root=now, proof=proof)
        for seq in range(1, new + 1):
            assert verify_inclusion(leaf=leaves[seq - 1], index=seq - 1, size=new, proof=inclusion(seq, new), expected=now)
    for refused in ((0, 3), (4, 3), (1, 14)):
        with pytest.raises(UnknownSize):
            inclusion(*refused)
    for refused in ((-1, 3), (4, 3), (1, 14)):
        with pytest.raises(UnknownSize):
            consistency(*refused)


def test_no_checkpoint_is_signed_over_a_gap_or_on_top_of_a_changed_one() -> None:
    append(5)
    make()
    append(3)
    tamper("UPDATE governance_auditcheckpoint SET frontier = sha256('x') || sha256('y'), root = sha256('z')")
    leaves = [leaf_hash(bytes(entry.hash)) for entry in AuditEntry.objects.order_by("seq")]
    assert bytes(make().root) == root(leaves)
    append(2)
    tamper("DELETE FROM governance_auditentry WHERE seq = 9")
    with pytest.raises(AuditLogBroken, match="Entry 9") as caught:
        make()
    assert (caught.value.status, caught.value.code) == (500, ErrorCode.INTERNAL_ERROR)


def test_a_box_that_saw_what_the_log_says_is_kept_as_a_witness_once() -> None:
    append(4)
    seen = make()
    for _ in range(3):
        assert tell(4, bytes(seen.root)) is WitnessStatus.OK
    append(3)
    assert tell(4, bytes(seen.root)) is WitnessStatus.OK
    assert [(row.size, row.alarm, row.note) for row in WitnessStatement.objects.all()] == [(4, False, seen.note)]
    assert not AuditEvent.objects.filter(action="audit.witness_alarm").exists()
    verdict = judge_database()
    assert (verdict.status, verdict.witnesses, verdict.unproven) == (Status.GOOD, 1, 0)


def test_a_box_that_makes_up_a_checkpoint_or_did_not_sign_leaves_no_mark_on_the_log() -> None:
    append(5)
    note = make().note
    forged = Ed25519PrivateKey.generate()
    checkpoint = Checkpoint("muster.local/audit", 900, bytes(32))
    key = LogKey("muster.local/audit", forged.public_key().public_bytes_raw())
    for shown in ("", note, checkpoint.note(key, forged.sign(checkpoint.text().encode())), note.replace("\n5\n", "\n900\n")):
        for size in (900, 3, 5):
            with pytest.raises(InvalidWitness, match="shows no checkpoint"):
                tell(size, bytes(32), note=shown)
    for size, seen, signer in ((5, root_at(5), forged), (5, b"short", BOX), (-1, bytes(32), BOX), (2**63, bytes(32), BOX)):
        with pytest.raises(InvalidWitness):
            tell(size, seen, signer=signer)
    assert not WitnessStatement.objects.exists()
    assert not AuditEvent.objects.filter(action="audit.witness_alarm").exists()
    assert judge_database().status is Status.GOOD


def restore_older_dump(size: int) -> None:
    """Put the database back to when it had ``size`` entries: checkpoints and witnesses of later are gone as well."""
    tamper(
        f"DELETE FROM governance_auditevent WHERE id IN (SELECT event_id FROM governance_auditentry WHERE seq > {size})",
        f"DELETE FROM governance_auditentry WHERE seq > {size}",
        f"DELETE FROM governance_auditcheckpoint WHERE size > {size}",
        f"DELETE FROM governance_witnessstatement WHERE size > {size}",
    )


def test_an_older_dump_that_was_restored_is_told_by_a_box_that_saw_more() -> None:
    append(5)
    make()
    append(4)
    seen = make()
    restore_older_dump(6)
    assert judge_database().status is Status.GOOD
    assert tell(9, bytes(seen.root), note=seen.note) is WitnessStatus.BEHIND
    alarm = AuditEvent.objects.get(action="audit.witness_alarm")
    assert (alarm.target, alarm.detail["status"], alarm.detail["seen_size"], alarm.detail["log_size"]) == (
        "box", "behind", 9, 6,
    )  # fmt: skip
    assert judge_database().status is Status.TRUNCATED
    append(5)
    for _ in range(2):
        assert tell(9, bytes(seen.root), note=seen.note) is WitnessStatus.INCONSISTENT
    assert AuditEvent.objects.filter(action="audit.witness_alarm").count() == 1
    assert judge_database().status is Status.INCONSISTENT


def test_a_log_written_anew_with_all_its_checkpoints_is_told_by_a_box() -> None:
    append(6)
    made = make()
    seen = bytes(made.root)
    assert tell(6, seen) is WitnessStatus.OK
    restore_older_dump(2)
    append(8)
    make()
    assert judge_database().status is Status.GOOD
    assert tell(6, seen, note=made.note) is WitnessStatus.INCONSISTENT
    assert AuditEvent.objects.filter(action="audit.witness_alarm").count() == 1
    assert judge_database().status is Status.INCONSISTENT


def test_a_stolen_box_cannot_fill_the_log_with_alarms() -> None:
    append(3)
    make()
    for number in range(1000, 1000 + limits().governance.audit_alarms_per_hour + 3):
        assert tell(number, bytes(32), note=sign_note(number, bytes(32))) is WitnessStatus.BEHIND
    assert AuditEvent.objects.filter(action="audit.witness_alarm").count() == limits().governance.audit_alarms_per_hour
    assert tell(3, root_at(3)) is WitnessStatus.OK
    assert WitnessStatement.objects.filter(alarm=False).count() == 1


def test_a_box_is_kept_under_the_name_it_signed_and_one_of_an_earlier_release_under_the_one_it_is_called_by() -> None:
    append(5)
    assert tell(5, bytes(make().root), signed_as="") is WitnessStatus.OK
    append(1)
    second = make()
    assert tell(6, bytes(second.root)) is WitnessStatus.OK
    with pytest.raises(InvalidWitness):
        tell(6, bytes(second.root), signed_as="another#abc")
    assert list(WitnessStatement.objects.order_by("size").values_list("node_name", flat=True)) == ["box", "node#abc"]
    assert read_status().nodes == 1
    verdict = judge_database()
    assert (verdict.status, verdict.witnesses, verdict.unnamed) == (Status.GOOD, 2, 1)
    tamper("UPDATE governance_witnessstatement SET node_name = 'other#abc' WHERE size = 6")
    assert judge_database().status is Status.INCONSISTENT


# The trail and its pages


@pytest.mark.parametrize(
    "detail",
    [{}, {"b": 1, "a": {"zz": [], "z": {}, "Z": [1, -2, [True, False, None]]}},
        {"text": 'quote " slash / back \\ tab \t nl \n bell \x07 del \x7f \x1f é 漢 😀 \u2028'}, {"large": 2**53 - 1,
            "k" * 50: "", "ab": 1, "b": 2, "aa": 3}], ids=["empty", "nested", "text", "order"],
)  # fmt: skip
def test_the_database_writes_the_canonical_bytes_of_an_event(detail: dict[str, object]) -> None:
    target = 'a "target" \\ \t é'
    event = record_event(actor="user:Zoë", action="node.drain", target=target, detail=detail, op_id="op-1")
    event.refresh_from_db()
    at_us = (event.at - datetime(1970, 1, 1, tzinfo=UTC)) // (datetime.resolution)
    assert bytes(event.body) == canonical_bytes(
        {"actor": "user:Zoë", "action": "node.drain", "target": target, "detail": detail, "op_id": "op-1", "at_us": at_us}
    )


def test_no_event_has_a_detail_that_readers_could_read_differently_or_other_bytes_than_its_own() -> None:
    for detail in ({"share": 0.5}, {"é": 1}, {"n": 2**53}):
        with pytest.raises(NotCanonical):
            record_event(actor="user:ada", action="node.drain", target="node_1", detail=detail)
    event = AuditEvent.objects.create(actor="user:eve", action="node.drain", body=b'{"actor":"user:ada"}')
    event.refresh_from_db()
    assert b'"actor":"user:eve"' in bytes(event.body)


@COMMITTED
def test_an_event_outside_a_transaction_is_a_defect() -> None:
    with pytest.raises(RuntimeError, match="atomic"):
        record_event(actor="user:ada", action="node.drain", target="node_1")


def fill_tables() -> None:
    """Write one row into each table and let the chain be appended now, not at a commit that does not come."""
    record_event(actor="user:ada", action="node.drain", target="node_1")
    now = datetime.now(UTC)
    AuditCheckpoint.objects.create(size=1, root=bytes(32), frontier=b"", note="", made_at=now)
    WitnessStatement.objects.create(node_name="box", size=1, root=b"", signature=b"", public_key=b"", heard_at=now)
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")


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


@pytest.fixture
def boss() -> Client:
    client = Client()
    client.force_login(get_user_model().objects.create_superuser(username="ada"))
    return client


def read_list(boss: Client) -> str:
    return boss.get(reverse("admin:governance_auditevent_changelist")).content.decode()


@pytest.mark.django_db(transaction=True)
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
