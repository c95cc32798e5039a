"""What somebody did to a log is found, at the right entry and by its right name."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.audit_logs import (
    KEY,
    SIGNER,
    checkpoint_of,
    export,
    judge,
    make_body,
    make_chain,
    seal,
    witness,
)
from wire import auditlog
from wire.auditlog import (
    PROOF_FORMAT,
    USAGE_STATUS,
    AuditLogError,
    Entry,
    Kind,
    Record,
    Status,
    Stray,
    check_proof,
    entry_hash,
    inclusion_proof,
    leaf_hash,
    root,
    to_text,
    verify_export,
)

SIZE = 40
LOG = make_chain(make_body(number) for number in range(SIZE))
Tampered = tuple[list[Entry], int, Kind]


def renumber(entries: list[Entry]) -> list[Entry]:
    return [replace(entry, seq=seq) for seq, entry in enumerate(entries, 1)]


def flip(raw: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(raw))
    return bytes([*raw[:place], raw[place] ^ (1 << chance.randrange(8)), *raw[place + 1 :]])


def forge(seq: int, previous: bytes) -> Entry:
    body = make_body(999)
    return Entry(seq, previous, entry_hash(seq, previous, body), body)


def _edit_body(log: list[Entry], chance: random.Random) -> Tampered:
    at = chance.randrange(SIZE)
    log[at] = replace(log[at], body=flip(log[at].body or b"", chance), columns=None)
    return log, at + 1, Kind.EDITED


def _edit_columns(log: list[Entry], chance: random.Random) -> Tampered:
    at = chance.randrange(SIZE)
    log[at] = replace(log[at], columns={**(log[at].columns or {}), "action": "c.d"})
    return log, at + 1, Kind.EDITED


def _edit_hash(log: list[Entry], chance: random.Random) -> Tampered:
    at = chance.randrange(SIZE)
    log[at] = replace(log[at], hash=flip(log[at].hash, chance))
    return log, at + 1, Kind.EDITED


def _edit_previous(log: list[Entry], chance: random.Random) -> Tampered:
    at = chance.randrange(SIZE)
    log[at] = replace(log[at], prev_hash=flip(log[at].prev_hash, chance))
    return log, at + 1, Kind.EDITED


def _edit_and_hash_again(log: list[Entry], chance: random.Random) -> Tampered:
    at = chance.randrange(SIZE - 1)
    log[at] = forge(at + 1, log[at].prev_hash)
    return log, at + 1, Kind.EDITED


def _remove_event(log: list[Entry], chance: random.Random) -> Tampered:
    at = chance.randrange(SIZE)
    log[at] = replace(log[at], body=None, columns=None)
    return log, at + 1, Kind.MISSING


def _remove_some(log: list[Entry], chance: random.Random) -> Tampered:
    count = chance.randint(1, 5)
    at = chance.randrange(SIZE - count)
    del log[at : at + count]
    return log, at + 1, Kind.MISSING


def _remove_some_and_renumber(log: list[Entry], chance: random.Random) -> Tampered:
    log, seq, kind = _remove_some(log, chance)
    return renumber(log), seq, kind


def _swap(log: list[Entry], chance: random.Random) -> Tampered:
    first, second = sorted(chance.sample(range(SIZE), 2))
    log[first], log[second] = log[second], log[first]
    return log, first + 1, Kind.REORDERED


def _swap_and_renumber(log: list[Entry], chance: random.Random) -> Tampered:
    log, seq, kind = _swap(log, chance)
    return renumber(log), seq, kind


def _swap_contents(log: list[Entry], chance: random.Random) -> Tampered:
    first, second = sorted(chance.sample(range(SIZE), 2))
    one, other = log[first], log[second]
    log[first] = replace(one, body=other.body, columns=other.columns)
    log[second] = replace(other, body=one.body, columns=one.columns)
    return log, first + 1, Kind.REORDERED


def _move(log: list[Entry], chance: random.Random) -> Tampered:
    here, there = chance.sample(range(SIZE), 2)
    log.insert(there, log.pop(here))
    return log, min(here, there) + 1, Kind.REORDERED


def _insert_garbage(log: list[Entry], chance: random.Random) -> Tampered:
    at = chance.randrange(SIZE)
    log.insert(at, replace(forge(at + 1, log[at].prev_hash), hash=chance.randbytes(32)))
    return renumber(log), at + 1, Kind.INSERTED


def _insert_chained(log: list[Entry], chance: random.Random) -> Tampered:
    at = chance.randrange(SIZE)
    log.insert(at, forge(at + 1, log[at].prev_hash))
    return (renumber(log) if chance.random() < 0.5 else log), at + 1, Kind.INSERTED


def _insert_copy(log: list[Entry], chance: random.Random) -> Tampered:
    old = chance.randrange(SIZE)
    at = chance.randint(old + 1, SIZE)
    log.insert(at, log[old])
    return (renumber(log) if chance.random() < 0.5 else log), at + 1, Kind.INSERTED


TAMPERINGS: list[Callable[[list[Entry], random.Random], Tampered]] = [
    _edit_body,
    _edit_columns,
    _edit_hash,
    _edit_previous,
    _edit_and_hash_again,
    _remove_event,
    _remove_some,
    _remove_some_and_renumber,
    _swap,
    _swap_and_renumber,
    _swap_contents,
    _move,
    _insert_garbage,
    _insert_chained,
    _insert_copy,
]
ROUNDS = 67
"""Of 15 ways each: 1005 tamperings."""


@pytest.mark.parametrize("tamper", TAMPERINGS, ids=lambda tamper: tamper.__name__.strip("_"))
def test_every_random_tampering_is_found_where_and_as_what_it_is(tamper: Callable[..., Tampered]) -> None:
    for seed in range(ROUNDS):
        records, seq, kind = tamper(list(LOG), random.Random(seed))
        verdict = judge(records)
        assert verdict.status is Status.BROKEN
        assert (verdict.findings[0].seq, verdict.findings[0].kind) == (seq, kind), f"seed {seed}"


def sealed(log: list[Entry], *sizes: int) -> list[Record]:
    """Return a log with checkpoints of ``sizes`` where they belong."""
    records: list[Record] = []
    for entry in log:
        records += [entry, *([seal(log[: entry.seq])] if entry.seq in sizes else [])]
    return records


def test_an_untouched_log_is_good_and_says_what_agreed() -> None:
    verdict = judge([*sealed(LOG, 1, 20, SIZE), witness(LOG)])
    assert (verdict.status, verdict.size, verdict.seals, verdict.witnesses) == (Status.GOOD, SIZE, 3, 1)
    assert verdict.root == checkpoint_of(LOG).root
    assert judge([]).status is Status.GOOD
    assert judge([seal([]), *LOG]).status is Status.UNWITNESSED


def test_a_log_written_anew_from_somewhere_on_disagrees_with_its_checkpoints() -> None:
    forged = make_chain([*(entry.body or b"" for entry in LOG[:10]), *(make_body(n + 100) for n in range(30))])
    for claim in (seal(LOG[:20]), witness(LOG[:20])):
        verdict = judge([*forged[:20], claim, *forged[20:]])
        assert verdict.status is Status.INCONSISTENT
        assert (verdict.findings[0].kind, verdict.findings[0].seq) == (Kind.INCONSISTENT, 20)
    assert judge(forged, pinned=[checkpoint_of(LOG[:20])]).status is Status.INCONSISTENT
    assert judge([*forged[:10], seal(LOG[:10]), *forged[10:]]).status is Status.GOOD


@pytest.mark.parametrize("claim", [seal(LOG), witness(LOG)], ids=["checkpoint", "witness"])
def test_a_log_that_lost_its_end_is_shorter_than_what_was_signed(claim: Record) -> None:
    verdict = judge([*LOG[:30], claim])
    assert verdict.status is Status.TRUNCATED
    assert verdict.findings[0].seq == 31
    assert judge(LOG[:30], pinned=[checkpoint_of(LOG)]).status is Status.TRUNCATED
    assert judge([*LOG, claim]).status is Status.GOOD


def test_claims_that_nobody_signed_or_that_stand_in_the_wrong_place_are_told() -> None:
    other = replace(witness(LOG), signature=bytes(64))
    cases: list[list[Record]] = [
        [*LOG, other],
        [*LOG, auditlog.Seal(seal(LOG).note.replace("\n40\n", "\n41\n"))],
        [*LOG, auditlog.Seal("nothing")],
        [*LOG, seal(LOG[:20])],
        [*LOG, auditlog.Seal(auditlog.Checkpoint("other.org", 40, bytes(32)).note(KEY, SIGNER.sign(b"")))],
    ]
    for records in cases:
        assert judge(records).status is Status.INCONSISTENT


def test_a_box_that_makes_up_what_it_saw_changes_nothing_but_a_count() -> None:
    beyond, forged = make_chain(make_body(number) for number in range(SIZE + 5)), make_chain(make_body(n) for n in range(7, 27))
    notes = {
        "none": "", "another checkpoint": seal(LOG[:20]).note, "no note": "nonsense",
        "its own": witness(beyond).note.replace("\u2014 example.org", "\u2014 example.com"),
    }  # fmt: skip
    for name, note in notes.items():
        shorter = judge([*sealed(LOG, SIZE), replace(witness(beyond), note=note)])
        another = judge([*sealed(LOG[:20], 10), replace(witness(forged), note=note), *LOG[20:]])
        for verdict in (shorter, another):
            assert (verdict.status, verdict.witnesses, verdict.unproven) == (Status.GOOD, 0, 1), name
            assert "count for nothing" in verdict.lines()[-1]


def test_a_statement_from_before_boxes_showed_notes_counts_by_the_checkpoint_of_the_log() -> None:
    old = replace(witness(LOG), note="")
    assert judge([*sealed(LOG, SIZE), old]).witnesses == 1
    assert judge([*LOG, old]).unproven == 1


def test_a_broken_chain_is_told_before_what_follows_from_it() -> None:
    verdict = judge([*LOG[:9], *LOG[10:], seal(LOG), replace(witness(LOG), signature=bytes(64))])
    assert verdict.status is Status.BROKEN
    assert [found.kind for found in verdict.findings] == [Kind.MISSING, Kind.SIGNATURE]


def test_an_event_outside_the_chain_is_one_too_many() -> None:
    verdict = judge([*LOG, Stray("event 7")])
    assert (verdict.status, verdict.findings[0].kind) == (Status.BROKEN, Kind.INSERTED)


def test_an_export_says_the_same_as_the_log_it_was_made_of() -> None:
    records = [*sealed(LOG, 20), seal(LOG), witness(LOG)]
    assert verify_export(iter(export(records, size=SIZE).splitlines())) == judge(records)
    for tamper in TAMPERINGS:
        changed, seq, kind = tamper(list(LOG), random.Random(7))
        found = verify_export(iter(export(changed).splitlines())).findings[0]
        assert (found.seq, found.kind) == (seq, kind), tamper


def test_an_export_with_a_broken_line_or_without_its_end_is_not_good() -> None:
    lines = export(LOG, size=SIZE).splitlines()
    assert verify_export(iter(lines[:-1])).status is Status.TRUNCATED
    for junk in ("{", "[]", "{}", '{"seq": "x"}', "null", '{"seq": 5, "prev": "?", "hash": "", "body": ""}'):
        found = verify_export(iter([*lines[:5], junk, *lines[6:]])).findings[0]
        assert (found.kind, found.seq) == (Kind.EDITED, 5)
    for header in ("", "{}", "[]", '{"format": "muster-audit-export/v1"}', '{"format": "x"}'):
        with pytest.raises(AuditLogError):
            verify_export(iter([header]))


def make_proof(op_id: str = "op-3") -> dict[str, object]:
    leaves = [leaf_hash(entry.hash) for entry in LOG]
    events = [
        {
            "seq": entry.seq,
            "prev": to_text(entry.prev_hash),
            "hash": to_text(entry.hash),
            "body": to_text(entry.body or b""),
            "path": [to_text(node) for node in inclusion_proof(entry.seq - 1, SIZE, lambda lo, hi: root(leaves[lo:hi]))],
        }
        for entry in LOG
        if json.loads(entry.body or b"")["op_id"] == op_id
    ]
    return {"format": PROOF_FORMAT, "opId": op_id, "keys": [str(KEY)], "checkpoint": seal(LOG).note, "events": events}


def test_a_proof_holds_until_anything_in_it_is_changed() -> None:
    good = make_proof()
    assert check_proof(good) == 8
    assert check_proof(good, keys=[KEY]) == 8
    events = good["events"]
    assert isinstance(events, list)
    for name, value in (
        ("seq", 5),
        ("prev", to_text(bytes(32))),
        ("hash", to_text(bytes(32))),
        ("body", to_text(make_body(3, action="x.y"))),
        ("path", []),
        ("path", [to_text(bytes(32))] * 6),
    ):
        with pytest.raises(AuditLogError):
            check_proof(good | {"events": [events[0], events[1] | {name: value}]})
    stranger = auditlog.LogKey(KEY.name, bytes(32))
    for wrong in (good | {"opId": "op-4"}, good | {"events": []}, good | {"checkpoint": seal(LOG[:10]).note}, {}):
        with pytest.raises(AuditLogError):
            check_proof(wrong)
    with pytest.raises(AuditLogError, match="not signed"):
        check_proof(good, keys=[stranger])


@pytest.fixture
def alone(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a copy of the file in an empty folder, without any package installed."""
    copy = tmp_path / "auditlog.py"
    copy.write_bytes(Path(str(auditlog.__file__)).read_bytes())

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", str(copy), *words]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=30, check=False
        )

    return run


def test_the_file_alone_tells_good_broken_short_and_rewritten_logs_apart(
    alone: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    forged = make_chain(make_body(number + 100) for number in range(SIZE))
    cases: list[tuple[int, list[Record]]] = [
        (0, [*LOG, seal(LOG), witness(LOG)]),
        (1, [*LOG[:5], *LOG[6:], seal(LOG)]),
        (2, [*LOG[:30], seal(LOG)]),
        (3, [*forged, seal(LOG)]),
    ]
    for status, records in cases:
        (tmp_path / "log").write_text(export(records))
        done = alone("verify", "log", "--key", str(KEY))
        assert (done.returncode, done.stderr) == (status, ""), done
    (tmp_path / "log").write_text(export(cases[1][1]))
    assert "entry 6: missing" in alone("verify", "log").stdout
    (tmp_path / "log").write_text(export(LOG[:30]))
    (tmp_path / "kept").write_text(seal(LOG).note)
    assert [alone("verify", "log", *words).returncode for words in ([], ["--checkpoint", "kept"])] == [4, 2]


def test_the_file_alone_calls_a_log_unwitnessed_that_no_checkpoint_covers_with_or_without_a_key(
    alone: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    unproven = replace(witness(LOG), note="")
    cases: list[tuple[int, str, list[Record]]] = [
        (4, "unwitnessed: 40 entries verified", [*LOG]),
        (4, "no signed checkpoint covers any of it", [seal([]), *LOG]),
        (4, "show no checkpoint that the log signed", [*LOG, unproven]),
        (0, "entries 31 to 40 are covered by no signed checkpoint yet", [*LOG[:30], seal(LOG[:30]), *LOG[30:]]),
        (0, "good: 40 entries", [*LOG, witness(LOG)]),
        (0, "good: 0 entries", []),
        (1, "broken", [*LOG[:5], *LOG[6:]]),
    ]
    for status, words, records in cases:
        (tmp_path / "log").write_text(export(records))
        for key in ([], ["--key", str(KEY)]):
            done = alone("verify", "log", *key)
            assert (done.returncode, words in done.stdout) == (status, True), done
    (tmp_path / "log").write_text(export(LOG))
    (tmp_path / "kept").write_text(seal(LOG).note)
    assert alone("verify", "log", "--checkpoint", "kept").returncode == 0


def test_a_witness_signs_its_name_and_those_of_earlier_releases_are_said_not_to() -> None:
    named, old = witness(LOG), witness(LOG, name="")
    assert judge([*LOG, named]).unnamed == 0
    for edited in (replace(named, node="box-2"), replace(named, node="")):
        verdict = judge([*LOG, seal(LOG), edited])
        assert (verdict.status, verdict.findings[0].kind) == (Status.INCONSISTENT, Kind.SIGNATURE)
    for each in (old, replace(old, node="box-2")):
        verdict = judge([*LOG, seal(LOG), each])
        assert (verdict.status, verdict.witnesses, verdict.unnamed) == (Status.GOOD, 1, 1)
        assert "1 witness statements do not sign the name that they stand under" in verdict.lines()
    forged = make_chain(make_body(number + 100) for number in range(SIZE))
    assert "witness box-1 (which did not sign its name)" in judge([*forged, old]).findings[0].text


def test_an_export_of_an_earlier_release_is_read() -> None:
    text = export([*LOG, seal(LOG), witness(LOG, name="")]).replace("muster-audit-export/v2", "muster-audit-export/v1")
    verdict = verify_export(iter(text.splitlines()))
    assert (verdict.status, verdict.witnesses) == (Status.GOOD, 1)


def test_the_file_alone_checks_a_proof_and_never_mistakes_a_typing_error_for_a_short_log(
    alone: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "proof").write_text(json.dumps(make_proof()))
    assert alone("prove-check", "proof").returncode == 0
    (tmp_path / "proof").write_text(json.dumps(make_proof() | {"opId": "op-4"}))
    assert alone("prove-check", "proof").returncode == 1
    for words in (["verify"], ["verify", "nowhere"], ["judge", "proof"], ["verify", "proof"]):
        assert alone(*words).returncode == USAGE_STATUS
