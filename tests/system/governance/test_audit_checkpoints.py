"""Checkpoints, proofs over them, and boxes that remember what the log said."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test.utils import CaptureQueriesContext
from pytest_django import Settings

from core.limits import limits
from governance.checkpoints import (
    AuditLogBroken,
    InvalidWitness,
    UnknownSize,
    WitnessStatus,
    checkpoint_if_due,
    consistency,
    inclusion,
    latest_checkpoint,
    log_public_key,
    make_checkpoint,
    read_status,
    record_witness,
    root_at,
)
from governance.models import AuditCheckpoint, AuditEntry, AuditEvent, WitnessStatement
from tests.system.governance.audit_rows import LOG_KEY, append, append_at_once, judge, tamper
from wire.auditlog import (
    Checkpoint,
    LogKey,
    Status,
    leaf_hash,
    open_note,
    root,
    verify_consistency,
    verify_inclusion,
)
from wire.contract import ErrorCode
from wire.optoken.approval import decode_bytes

pytestmark = pytest.mark.django_db(transaction=True)
NOW = datetime(2026, 11, 2, 9, tzinfo=UTC)
BOX = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32)
BOX_KEY = BOX.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture(autouse=True)
def log_key(settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_KEY


def tell(
    size: int, seen_root: bytes, *, signer: Ed25519PrivateKey = BOX, note: str = "", signed_as: str = "box#abc"
) -> WitnessStatus:
    """Let a box say what it saw; ``signed_as`` "": as boxes of earlier releases do."""
    signature = signer.sign(Checkpoint("muster.local/audit", size, seen_root).witness_message(signed_as))
    return record_witness(
        node_name="box", runner_id="box#abc", size=size, root=seen_root, signature=signature, public_key=BOX_KEY, note=note
    )


def sign_note(size: int, seen_root: bytes) -> str:
    """Return a checkpoint that only whoever has the key of the log can have signed."""
    checkpoint, key = Checkpoint("muster.local/audit", size, seen_root), log_key_of()
    return checkpoint.note(
        LogKey("muster.local/audit", key.public_key().public_bytes_raw()), key.sign(checkpoint.text().encode())
    )


def log_key_of() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(decode_bytes(LOG_KEY))


def make() -> AuditCheckpoint:
    made = make_checkpoint(now=NOW)
    assert made is not None
    return made


def test_a_checkpoint_is_signed_over_every_entry_and_opens_with_the_key_of_the_log() -> None:
    append(7)
    made = make()
    leaves = [leaf_hash(bytes(entry.hash)) for entry in AuditEntry.objects.order_by("seq")]
    opened = open_note(made.note, [LogKey.parse(log_public_key())])
    assert opened == Checkpoint("muster.local/audit", 7, root(leaves))
    assert latest_checkpoint() == made
    assert make_checkpoint(now=NOW) is None


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


def test_a_checkpoint_reads_only_what_is_new() -> None:
    append(20)
    make()
    append(3)
    with CaptureQueriesContext(connection) as queries:
        make()
    read = [query["sql"] for query in queries if "SELECT seq, hash" in query["sql"]]
    assert len(read) == 1
    assert "seq > 20 AND seq <= 23" in read[0]


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
    verdict = judge()
    assert (verdict.status, verdict.witnesses, verdict.unproven) == (Status.GOOD, 1, 0)


def test_a_box_that_makes_up_a_checkpoint_leaves_no_mark_on_the_log() -> None:
    append(5)
    note = make().note
    forged = Ed25519PrivateKey.generate()
    checkpoint = Checkpoint("muster.local/audit", 900, bytes(32))
    key = LogKey("muster.local/audit", forged.public_key().public_bytes_raw())
    for shown in ("", note, checkpoint.note(key, forged.sign(checkpoint.text().encode())), note.replace("\n5\n", "\n900\n")):
        for size in (900, 3, 5):
            with pytest.raises(InvalidWitness, match="shows no checkpoint"):
                tell(size, bytes(32), note=shown)
    assert not WitnessStatement.objects.exists()
    assert not AuditEvent.objects.filter(action="audit.witness_alarm").exists()
    assert judge().status is Status.GOOD


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
    assert judge().status is Status.GOOD

    assert tell(9, bytes(seen.root), note=seen.note) is WitnessStatus.BEHIND
    alarm = AuditEvent.objects.get(action="audit.witness_alarm")
    assert (alarm.target, alarm.detail["status"], alarm.detail["seen_size"], alarm.detail["log_size"]) == (
        "box",
        "behind",
        9,
        6,
    )
    assert judge().status is Status.TRUNCATED
    append(5)
    for _ in range(2):
        assert tell(9, bytes(seen.root), note=seen.note) is WitnessStatus.INCONSISTENT
    assert AuditEvent.objects.filter(action="audit.witness_alarm").count() == 1
    assert judge().status is Status.INCONSISTENT


def test_a_log_written_anew_with_all_its_checkpoints_is_told_by_a_box() -> None:
    append(6)
    made = make()
    seen = bytes(made.root)
    assert tell(6, seen) is WitnessStatus.OK
    restore_older_dump(2)
    append(8)
    make()
    assert judge().status is Status.GOOD
    assert tell(6, seen, note=made.note) is WitnessStatus.INCONSISTENT
    assert AuditEvent.objects.filter(action="audit.witness_alarm").count() == 1
    assert judge().status is Status.INCONSISTENT


def test_a_statement_that_the_box_did_not_sign_counts_for_nothing() -> None:
    append(3)
    with pytest.raises(InvalidWitness):
        tell(3, root_at(3), signer=Ed25519PrivateKey.generate())
    with pytest.raises(InvalidWitness):
        tell(3, b"short")
    for size in (-1, 2**63):
        with pytest.raises(InvalidWitness):
            tell(size, bytes(32))
    assert not WitnessStatement.objects.exists()


def test_a_stolen_box_cannot_fill_the_log_with_alarms() -> None:
    append(3)
    make()
    for number in range(1000, 1000 + limits().governance.audit_alarms_per_hour + 3):
        assert tell(number, bytes(32), note=sign_note(number, bytes(32))) is WitnessStatus.BEHIND
    assert AuditEvent.objects.filter(action="audit.witness_alarm").count() == limits().governance.audit_alarms_per_hour
    assert tell(3, root_at(3)) is WitnessStatus.OK
    assert WitnessStatement.objects.filter(alarm=False).count() == 1


@pytest.mark.parametrize("text", ["short", "!" * 43, "é"])
def test_a_log_key_that_is_none_is_told_without_showing_it(text: str, settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = text
    with pytest.raises(ImproperlyConfigured, match="MUSTER_LOG_KEY") as told:
        log_public_key()
    assert text not in str(told.value)


def test_a_box_is_kept_under_the_name_it_signed_and_one_of_an_earlier_release_under_the_one_it_is_called_by() -> None:
    append(5)
    first = make_checkpoint(now=NOW)
    assert first is not None
    assert tell(5, bytes(first.root), signed_as="") is WitnessStatus.OK
    append(1)
    second = make_checkpoint(now=NOW)
    assert second is not None
    assert tell(6, bytes(second.root)) is WitnessStatus.OK
    with pytest.raises(InvalidWitness):
        tell(6, bytes(second.root), signed_as="another#abc")
    assert list(WitnessStatement.objects.order_by("size").values_list("node_name", flat=True)) == ["box", "box#abc"]
    assert read_status().boxes == 1
    verdict = judge()
    assert (verdict.status, verdict.witnesses, verdict.unnamed) == (Status.GOOD, 2, 1)
    tamper("UPDATE governance_witnessstatement SET node_name = 'other#abc' WHERE size = 6")
    assert judge().status is Status.INCONSISTENT
