"""The audit log: its tree, its signatures, and what its verifier says of logs that were tampered with."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.fakes.audit_logs import (
    KEY,
    LOG,
    SIGNER,
    checkpoint_of,
    export,
    judge,
    make_body,
    make_chain,
    make_proof,
    seal,
    sealed,
    witness,
)
from wire import auditlog
from wire.auditlog import (
    AuditLogError,
    Checkpoint,
    Entry,
    Kind,
    LogKey,
    Record,
    Status,
    check_proof,
    consistency_proof,
    entry_hash,
    inclusion_proof,
    leaf_hash,
    open_note,
    root,
    to_bytes,
    to_text,
    verify_consistency,
    verify_export,
    verify_inclusion,
    verify_signature,
)

LEAVES = [
    leaf_hash(bytes.fromhex(text))
    for text in ("", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f")
]
"""The test data of the Certificate Transparency implementations (RFC 6962)."""
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
A, B, C = (
    "96a296d224f285c67bee93c30f8a309157f0daa35dc5b87e410b78630a09cfc7",
    "5f083f0a1a33ca076a95279832580db3e0ef4584bdff1f54c8a360f50de3031e",
    "6b47aaf29ee3c2af9af889bc1fb9254dabd31177f16232dd6aab035ca39bf6e4",
)
D, E, F = (
    "bc1a0643b12e4d2d7c77918f44e0f4f79a838b6cf9ec5b5c283e1f4d88599e6b",
    "ca854ea128ed050b41b35ffc1b87b8eb2bde461e9e3b5596ece6b9d5975a0ae0",
    "0ebc5d3437fbe2db158b9f126a1d118e308181031d0a949f8dededebc558ef6a",
)
INCLUSION = {(0, 1): [], (0, 8): [A, B, C], (5, 8): [D, E, ROOTS[4]], (2, 3): [ROOTS[2]], (1, 5): [ROOTS[1], B, D]}
CONSISTENCY = {(1, 1): [], (1, 8): [A, B, C], (6, 8): [F, E, ROOTS[4]], (2, 5): [B, D]}


def subtree(lo: int, hi: int) -> bytes:
    return root(LEAVES[lo:hi])


def test_roots_and_proofs_are_those_of_the_published_tree() -> None:
    assert [root(LEAVES[:size]).hex() for size in range(9)] == ROOTS
    for (index, size), proof in INCLUSION.items():
        assert [node.hex() for node in inclusion_proof(index, size, subtree)] == proof
    for (old, size), proof in CONSISTENCY.items():
        assert [node.hex() for node in consistency_proof(old, size, subtree)] == proof


def test_every_proof_of_every_small_tree_holds_and_no_changed_one_does() -> None:
    chance = random.Random(1)
    leaves = [leaf_hash(bytes([number])) for number in range(20)]

    def part(lo: int, hi: int) -> bytes:
        return root(leaves[lo:hi])

    for size in range(1, 21):
        now = part(0, size)
        for index in range(size):
            path = inclusion_proof(index, size, part)
            leaf = leaves[index]
            assert verify_inclusion(leaf=leaf, index=index, size=size, proof=path, expected=now)
            assert not verify_inclusion(leaf=leaf, index=index, size=size, proof=[*path, now], expected=now)
            assert not verify_inclusion(leaf=leaf_hash(leaf), index=index, size=size, proof=path, expected=now)
            assert not path or not verify_inclusion(leaf=leaf, index=index, size=size, proof=path[:-1], expected=now)
            assert not verify_inclusion(leaf=leaf, index=size, size=size, proof=path, expected=now)
        for old in range(size + 1):
            was, path = part(0, old), consistency_proof(old, size, part)
            assert verify_consistency(old=old, size=size, old_root=was, new_root=now, proof=path)
            assert not verify_consistency(old=old, size=size, old_root=was, new_root=now, proof=[*path, now])
            if 0 < old < size:
                place = chance.randrange(len(path))
                bent = [*path[:place], leaf_hash(path[place]), *path[place + 1 :]]
                assert not verify_consistency(old=old, size=size, old_root=was, new_root=now, proof=bent)
                assert not verify_consistency(old=old, size=size, old_root=leaf_hash(was), new_root=now, proof=path)


def test_what_the_library_signs_holds_and_hostile_encodings_do_not() -> None:
    for number in range(8):
        key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)
        public, message = key.public_key().public_bytes_raw(), bytes(number)
        signature = key.sign(message)
        assert verify_signature(public, message, signature)
        assert verify_signature(
            key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo), message, signature
        )
        order = 2**252 + 27742317777372353535851937790883648493
        too_large = signature[:32] + (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
        assert not verify_signature(public, message, too_large)
        assert not verify_signature(public[:31], message, signature)
        assert not verify_signature(public, message, signature[:63])
        assert not verify_signature(b"\xff" * 32, message, signature)


def test_a_verifier_key_is_read_as_other_tools_write_it() -> None:
    # The example of golang.org/x/mod/sumdb/note.
    text = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
    key = LogKey.parse(text)
    said = b"If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
    raw = to_bytes("x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=")
    assert str(key) == text
    assert raw[:4] == key.keyid
    assert verify_signature(key.public, said, raw[4:])
    for wrong in (text.replace("c74f", "c74e"), text.replace("Peter", "Paul"), "PeterNeumann", "", text[:-4]):
        with pytest.raises(AuditLogError):
            LogKey.parse(wrong)


def test_a_checkpoint_opens_with_the_key_that_signed_it_alone() -> None:
    signer = Ed25519PrivateKey.from_private_bytes(bytes(32))
    key = LogKey("example.org/log", signer.public_key().public_bytes_raw())
    checkpoint = Checkpoint("example.org/log", 7, bytes(32))
    note = checkpoint.note(key, signer.sign(checkpoint.text().encode()))
    assert note.startswith(f"example.org/log\n7\n{'A' * 43}=\n\n\u2014 example.org/log ")
    assert open_note(note, [key]) == checkpoint
    assert open_note(note + "\u2014 witness.example 3q2+7wAA\n", [key]) == checkpoint
    stranger = LogKey(key.name, Ed25519PrivateKey.from_private_bytes(b"\x01" * 32).public_key().public_bytes_raw())
    for wrong, keys in (
        (note, []),
        (note, [stranger]),
        (note.replace("\n7\n", "\n8\n"), [key]),
        (note.replace("\n7\n", "\n-7\n"), [key]),
        (note.replace("\n\n", "\n"), [key]),
        (note.replace("AAAA=", "AAA="), [key]),
        ("", [key]),
    ):
        with pytest.raises(AuditLogError):
            open_note(wrong, keys)


SIZE = len(LOG)
Tampered = tuple[list[Entry], int, Kind]


def renumber(entries: list[Entry]) -> list[Entry]:
    return [replace(entry, seq=seq) for seq, entry in enumerate(entries, 1)]


def flip(raw: bytes, chance: random.Random) -> bytes:
    place = chance.randrange(len(raw))
    return bytes([*raw[:place], raw[place] ^ (1 << chance.randrange(8)), *raw[place + 1 :]])


def forge(seq: int, previous: bytes) -> Entry:
    body = make_body(999)
    return Entry(seq, previous, entry_hash(seq, previous, body), body)


Tamper = Callable[[list[Entry], random.Random], Tampered]


def edit(change: Callable[[Entry, random.Random], Entry], kind: Kind = Kind.EDITED) -> Tamper:
    """Change one entry; what follows from it stays."""

    def tamper(log: list[Entry], chance: random.Random) -> Tampered:
        at = chance.randrange(SIZE - 1)
        log[at] = change(log[at], chance)
        return log, at + 1, kind

    return tamper


def numbered_anew(tamper: Tamper, share: float = 1.0) -> Tamper:
    """Do the same and give the entries the numbers of their places, or that in a share of cases."""

    def tamper_and_renumber(log: list[Entry], chance: random.Random) -> Tampered:
        log, seq, kind = tamper(log, chance)
        return (renumber(log) if chance.random() < share else log), seq, kind

    return tamper_and_renumber


def remove_some(log: list[Entry], chance: random.Random) -> Tampered:
    count = chance.randint(1, 5)
    at = chance.randrange(SIZE - count)
    del log[at : at + count]
    return log, at + 1, Kind.MISSING


def swap(log: list[Entry], chance: random.Random) -> Tampered:
    first, second = sorted(chance.sample(range(SIZE), 2))
    log[first], log[second] = log[second], log[first]
    return log, first + 1, Kind.REORDERED


def swap_contents(log: list[Entry], chance: random.Random) -> Tampered:
    first, second = sorted(chance.sample(range(SIZE), 2))
    one, other = log[first], log[second]
    log[first] = replace(one, body=other.body, columns=other.columns)
    log[second] = replace(other, body=one.body, columns=one.columns)
    return log, first + 1, Kind.REORDERED


def move(log: list[Entry], chance: random.Random) -> Tampered:
    here, there = chance.sample(range(SIZE), 2)
    log.insert(there, log.pop(here))
    return log, min(here, there) + 1, Kind.REORDERED


def insert(make: Callable[[Entry, random.Random], Entry]) -> Tamper:
    def tamper(log: list[Entry], chance: random.Random) -> Tampered:
        at = chance.randrange(SIZE)
        log.insert(at, make(log[at], chance))
        return log, at + 1, Kind.INSERTED

    return tamper


def insert_copy(log: list[Entry], chance: random.Random) -> Tampered:
    old = chance.randrange(SIZE)
    at = chance.randint(old + 1, SIZE)
    log.insert(at, log[old])
    return log, at + 1, Kind.INSERTED


TAMPERINGS: dict[str, Tamper] = {
    "edit the body": edit(lambda entry, chance: replace(entry, body=flip(entry.body or b"", chance), columns=None)),
    "edit the columns": edit(lambda entry, _: replace(entry, columns={**(entry.columns or {}), "action": "c.d"})),
    "edit the hash": edit(lambda entry, chance: replace(entry, hash=flip(entry.hash, chance))),
    "edit the hash before": edit(lambda entry, chance: replace(entry, prev_hash=flip(entry.prev_hash, chance))),
    "edit and hash again": edit(lambda entry, _: forge(entry.seq, entry.prev_hash)),
    "remove an event": edit(lambda entry, _: replace(entry, body=None, columns=None), Kind.MISSING), "remove some": remove_some,
    "remove some and renumber": numbered_anew(remove_some), "swap": swap, "swap and renumber": numbered_anew(swap),
    "swap contents": swap_contents, "move": move,
    "insert garbage": numbered_anew(insert(lambda entry, chance: replace(forge(entry.seq, entry.prev_hash),
            hash=chance.randbytes(32)))),
    "insert what is chained": numbered_anew(insert(lambda entry, _: forge(entry.seq, entry.prev_hash)), 0.5),
    "insert a copy": numbered_anew(insert_copy, 0.5),
}  # fmt: skip
ROUNDS = int(os.environ.get("MUSTER_TEST_MUTATIONS", "450")) // 75
"""Of each of 15 ways."""


@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS)
def test_every_random_tampering_is_found_where_and_as_what_it_is(tamper: Tamper) -> None:
    for seed in range(ROUNDS):
        records, seq, kind = tamper(list(LOG), random.Random(seed))
        verdict = judge(records)
        assert verdict.status is Status.BROKEN
        assert (verdict.findings[0].seq, verdict.findings[0].kind) == (seq, kind), f"seed {seed}"


def test_an_untouched_log_is_good_and_one_that_was_cut_or_written_anew_disagrees_with_what_was_signed() -> None:
    verdict = judge([*sealed(LOG, 1, 20, SIZE), witness(LOG)])
    assert (verdict.status, verdict.size, verdict.seals, verdict.witnesses) == (Status.GOOD, SIZE, 3, 1)
    assert verdict.root == checkpoint_of(LOG).root
    assert judge([]).status is Status.GOOD
    assert judge([seal([]), *LOG]).status is Status.UNWITNESSED
    forged = make_chain([*(entry.body or b"" for entry in LOG[:10]), *(make_body(n + 100) for n in range(30))])
    for sign in (seal, witness):
        verdict = judge([*forged[:20], sign(LOG[:20]), *forged[20:]])
        assert verdict.status is Status.INCONSISTENT
        assert (verdict.findings[0].kind, verdict.findings[0].seq) == (Kind.INCONSISTENT, 20)
        verdict = judge([*LOG[:30], sign(LOG)])
        assert (verdict.status, verdict.findings[0].seq) == (Status.TRUNCATED, 31)
        assert judge([*LOG, sign(LOG)]).status is Status.GOOD
    assert judge(forged, pinned=[checkpoint_of(LOG[:20])]).status is Status.INCONSISTENT
    assert judge([*forged[:10], seal(LOG[:10]), *forged[10:]]).status is Status.GOOD
    assert judge(LOG[:30], pinned=[checkpoint_of(LOG)]).status is Status.TRUNCATED


def test_claims_that_nobody_signed_or_that_stand_in_the_wrong_place_are_told() -> None:
    other = replace(witness(LOG), signature=bytes(64))
    cases: list[list[Record]] = [
        [*LOG, other], [*LOG, auditlog.Seal(seal(LOG).note.replace("\n40\n", "\n41\n"))], [*LOG, auditlog.Seal("nothing")],
        [*LOG, seal(LOG[:20])],
        [*LOG, auditlog.Seal(auditlog.Checkpoint("other.org", 40, bytes(32)).note(KEY, SIGNER.sign(b"")))],
    ]  # fmt: skip
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


def test_an_export_says_the_same_as_the_log_it_was_made_of() -> None:
    records = [*sealed(LOG, 20), seal(LOG), witness(LOG)]
    assert verify_export(iter(export(records, size=SIZE).splitlines())) == judge(records)
    for name, tamper in TAMPERINGS.items():
        changed, seq, kind = tamper(list(LOG), random.Random(7))
        found = verify_export(iter(export(changed).splitlines())).findings[0]
        assert (found.seq, found.kind) == (seq, kind), name


def test_an_export_with_a_broken_line_or_without_its_end_is_not_good() -> None:
    lines = export(LOG, size=SIZE).splitlines()
    assert verify_export(iter(lines[:-1])).status is Status.TRUNCATED
    for junk in ("{", "[]", "{}", '{"seq": "x"}', "null", '{"seq": 5, "prev": "?", "hash": "", "body": ""}'):
        found = verify_export(iter([*lines[:5], junk, *lines[6:]])).findings[0]
        assert (found.kind, found.seq) == (Kind.EDITED, 5)
    for header in ("", "{}", "[]", '{"format": "muster-audit-export/v1"}', '{"format": "x"}'):
        with pytest.raises(AuditLogError):
            verify_export(iter([header]))


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
