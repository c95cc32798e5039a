"""Proofs of people, counted under a policy, and the change of that policy."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.examples import examples
from tests.fakes.passkeys import BACKED_UP, BACKUP_ELIGIBLE, USER_PRESENT, USER_VERIFIED, KeyFile, Proof, SoftPasskey, twin_of
from tests.fakes.policies import (
    Person,
    approve,
    edit_statement,
    make_change,
    make_link,
    make_people,
    make_policy,
    make_policy_bytes,
    make_statement,
    renamed,
)
from tests.fakes.signed_tokens import by_outcome
from wire.optoken.approval import (
    MAX_PROOFS,
    ApprovalError,
    Policy,
    Rule,
    Statement,
    check_proof,
    decode_bytes,
    encode_bytes,
    judge,
    read_policy,
    require_met,
    select_proofs,
    verify_chain,
    verify_successor,
)
from wire.optoken.documents import DEFAULT_CLASSES

PEOPLE = make_people(4, break_glass=True)
ADA, BOB, CLEO, DAN = PEOPLE
POLICY = make_policy(PEOPLE)
STATEMENT = make_statement(POLICY)


def rule_of(proofs: Any, statement: Statement = STATEMENT, policy: Policy = POLICY) -> Rule:
    with pytest.raises(ApprovalError) as caught:
        require_met(statement, proofs, policy)
    return caught.value.rule


def with_class(people: list[Person], **members: Any) -> tuple[Policy, Statement]:
    policy = make_policy(people, classes={"model-load": {**DEFAULT_CLASSES["model-load"], **members}})
    return policy, make_statement(policy)


def ada_with(**changes: Any) -> list[Proof]:
    return [ADA.approve(STATEMENT, key=ADA.passkey.misbehaving(**changes)), BOB.approve(STATEMENT)]


def edited(**members: Any) -> list[Proof]:
    """Ada's good proof with other members (``...`` leaves one out), and Bob's good one."""
    proof = {**ADA.approve(STATEMENT), **members}
    return [{name: value for name, value in proof.items() if value is not ...}, BOB.approve(STATEMENT)]


def test_two_people_approve_with_passkeys_of_any_kind_key_files_or_both() -> None:
    by_passkeys = approve(STATEMENT, [ADA, BOB])
    by_files = [person.approve(STATEMENT, key=person.key_file) for person in (ADA, BOB)]
    for proofs in (by_passkeys, by_files, [by_passkeys[0], by_files[1]], by_passkeys[::-1]):
        assert sorted(require_met(STATEMENT, proofs, POLICY).approved_by) == ["ada", "bob"]
    eve = replace(PEOPLE[0], name="eve", passkey=SoftPasskey(Ed25519PrivateKey.generate()))
    policy = make_policy([eve, BOB, CLEO])
    statement = make_statement(policy)
    assert require_met(statement, approve(statement, [eve, BOB]), policy).is_met
    # Browsers that do not speak of frames are believed.
    assert judge(STATEMENT, ada_with(client_changes={"crossOrigin": ..., "extra": {"any": [1.5]}}), POLICY).is_met


BARE = ADA.passkey.private_key.sign(STATEMENT.digest, ECDSA(SHA256()))  # type: ignore[call-arg, arg-type]  # a P-256 key

PROOF_ROWS: dict[Rule, dict[str, list[Any]]] = {
    Rule.DUPLICATE_PROOF: {"duplicate proof": approve(STATEMENT, [ADA, ADA]), "same person, two keys": [ADA.approve(STATEMENT),
            ADA.approve(STATEMENT, key=ADA.second)], "same person, passkey and key file": [ADA.approve(STATEMENT),
            ADA.approve(STATEMENT, key=ADA.key_file)]},
    Rule.TOO_FEW_APPROVERS: {"M-1 proofs": approve(STATEMENT, [ADA]), "no proof": []},
    Rule.UNKNOWN_KEY: {"same key under another approver": [ADA.approve(STATEMENT), renamed(ADA, "bob").approve(STATEMENT)],
        "an approver nobody named": [renamed(ADA, "eve").approve(STATEMENT)], "a key nobody named": [ADA.approve(STATEMENT,
            key=SoftPasskey())], "passkey shown as a key file": edited(type="ed25519", clientDataJSON=...,
            authenticatorData=...), "type unknown": edited(type="totp"), "type of the proof a list": edited(type=["webauthn"]),
        "keyid a number": edited(keyid=7), "keyid a list": edited(keyid=[ADA.passkey.keyid]),
        "keyid left out": edited(keyid=...), "approver a list": edited(approver=["ada"]),
        "approver in capitals": edited(approver="Ada"), "a proof that is text": ["proof"], "a proof that is null": [None]},
    Rule.WRONG_CHALLENGE: {"proof for another statement": [ADA.approve(edit_statement(STATEMENT, opId="op-2")),
            BOB.approve(STATEMENT)],
        "challenge padded": ada_with(client_changes={"challenge": encode_bytes(STATEMENT.digest) + "="}),
        "challenge in hex": ada_with(client_changes={"challenge": STATEMENT.digest.hex()}),
        "challenge a list": ada_with(client_changes={"challenge": [encode_bytes(STATEMENT.digest)]}),
        "challenge left out": ada_with(client_changes={"challenge": ...}), "challenge without the domain": ada_with(
        client_changes={"challenge": encode_bytes(hashlib.sha256(STATEMENT.raw).digest())})},
    Rule.BAD_SIGNATURE: {"key file proof for another statement": [ADA.approve(edit_statement(STATEMENT, opId="op-2"),
            key=ADA.key_file), BOB.approve(STATEMENT)], "one bad proof beside enough good ones": [*approve(STATEMENT, [ADA, BOB,
            CLEO]), {**DAN.approve(STATEMENT), "signature": ADA.approve(STATEMENT)["signature"]}],
        "a passkey's signature over the bare digest": edited(signature=encode_bytes(BARE)),
        "signed by another key file": [{**KeyFile().sign(STATEMENT.digest, approver="ada"), "keyid": ADA.key_file.keyid},
            BOB.approve(STATEMENT)], "signed by another key": [{**SoftPasskey().sign(STATEMENT.digest, approver="ada"),
            "keyid": ADA.passkey.keyid}, BOB.approve(STATEMENT)], "HMAC with public key bytes": edited(type="ed25519",
            keyid=ADA.key_file.keyid, clientDataJSON=..., authenticatorData=...,
            signature=encode_bytes(hmac.digest(ADA.key_file.public_key, STATEMENT.digest, "sha512"))),
        "flags edited after signing": edited(authenticatorData=encode_bytes(decode_bytes(ADA.approve(STATEMENT)[
        "authenticatorData"]) + b"\0")), "signature empty": edited(signature="")},
    Rule.NOT_VERIFIED_BY_USER: {"without user verification": ada_with(flags=USER_PRESENT),
        "without user presence": ada_with(flags=USER_VERIFIED)},
    Rule.WRONG_ORIGIN: {"wrong origin": ada_with(origin="https://muster.example.evil.example"),
        "origin without TLS": ada_with(origin="http://muster.example"),
        "origin with a port": ada_with(origin="https://muster.example:8443"),
        "origin a list": ada_with(client_changes={"origin": ["https://muster.example"]}),
        "origin an object": ada_with(client_changes={"origin": {}}), "origin null": ada_with(client_changes={"origin": None}),
        "origin left out": ada_with(client_changes={"origin": ...}), "wrong RP id": ada_with(rp_id="evil.example"),
        "cross-origin": ada_with(client_changes={"crossOrigin": True}),
        "cross-origin as text": ada_with(client_changes={"crossOrigin": "true"}),
        "cross-origin a list": ada_with(client_changes={"crossOrigin": []}),
        "cross-origin zero": ada_with(client_changes={"crossOrigin": 0}),
        "a top origin": ada_with(client_changes={"topOrigin": "https://muster.example"}), "authenticator data cut short":
        edited(authenticatorData=encode_bytes(decode_bytes(ADA.approve(STATEMENT)["authenticatorData"])[:36])),
        "no authenticator data": edited(authenticatorData="")},
    Rule.BAD_PROOF: {"webauthn.create": ada_with(client_type="webauthn.create"),
        "type a list": ada_with(client_changes={"type": ["webauthn.get"]}),
        "client data no JSON": edited(clientDataJSON=encode_bytes(b"{")),
        "client data no UTF-8": edited(clientDataJSON=encode_bytes(b"\xff\xfe")),
        "client data a list": edited(clientDataJSON=encode_bytes(b"[]")), "client data with a name twice": edited(
        clientDataJSON=encode_bytes(b'{"type":"webauthn.create","type":"webauthn.get"}')),
        "client data nested without end": edited(clientDataJSON=encode_bytes(b"[" * 60_000)),
        "client data without end": edited(clientDataJSON="A" * 1_000_000), "one member more": edited(comment="fine by me"),
        "one member less": edited(signature=...), "signature null": edited(signature=None),
        "signature a list": edited(signature=[]),
        "signature padded": edited(signature=ADA.approve(STATEMENT)["signature"] + "="),
        "signature in plain base64": edited(signature="+/+/"), "a crowd of proofs": approve(STATEMENT,
            [ADA]) * (MAX_PROOFS + 1)},
    Rule.WRONG_KEY_CLASS: {"a break-glass key for routine work": [ADA.approve(STATEMENT, key=ADA.break_glass),
            BOB.approve(STATEMENT)]},
}  # fmt: skip


@pytest.mark.parametrize(("proofs", "rule"), by_outcome(PROOF_ROWS))
def test_a_proof_that_is_almost_right_is_refused(proofs: list[Any], rule: Rule) -> None:
    assert rule_of(proofs) is rule


def test_a_second_spelling_of_a_signature_is_still_one_vote() -> None:
    """ECDSA allows (r, n - s) beside (r, s): harmless as long as people are counted, not signatures."""
    proof = ADA.approve(STATEMENT)
    assert check_proof(twin_of(proof), STATEMENT, POLICY).approver == "ada"
    assert rule_of([proof, twin_of(proof)]) is Rule.DUPLICATE_PROOF


def test_the_requester_counts_in_a_solo_class_alone() -> None:
    own = make_statement(POLICY, requested_by="ada")
    for people in ([ADA, BOB], [ADA, BOB, CLEO]):
        assert rule_of(approve(own, people), own) is Rule.REQUESTER_APPROVES
    assert require_met(own, approve(own, [BOB, CLEO]), POLICY).is_met
    policy = make_policy([ADA], classes={"model-load": {**DEFAULT_CLASSES["model-load"], "threshold": 1, "solo": True}})
    alone = make_statement(policy, requested_by="ada")
    assert require_met(alone, approve(alone, [ADA]), policy).approved_by == ("ada",)


def test_a_break_glass_key_opens_break_glass_and_nothing_else_does() -> None:
    statement = make_statement(POLICY, op_class="break-glass")
    assert require_met(statement, [ADA.approve(statement, key=ADA.break_glass)], POLICY).is_met
    assert rule_of(approve(statement, [ADA, BOB, CLEO]), statement) is Rule.WRONG_KEY_CLASS
    own = make_statement(POLICY, op_class="break-glass", requested_by="ada")
    assert rule_of([ADA.approve(own, key=ADA.break_glass)], own) is Rule.REQUESTER_APPROVES


CLASS_ROWS: dict[str, tuple[dict[str, Any], Rule]] = {
    "a class the policy has not": ({"op_class": "anything"}, Rule.UNKNOWN_CLASS),
    "a laxer class of other operations": ({"op_class": "node-drain"}, Rule.UNKNOWN_CLASS),
    "more uses than the class allows": ({"max_uses": 2}, Rule.TOO_MANY_USES),
    "more uses than standing allows": ({"op_class": "standing", "max_uses": 21}, Rule.TOO_MANY_USES),
    "a window too long": ({"not_after": STATEMENT.not_before + 24 * 3600 + 1}, Rule.WINDOW_TOO_LONG),
    "a window that never opens": ({"not_after": STATEMENT.not_before}, Rule.WINDOW_TOO_LONG),
    "a window that ends before it begins": ({"not_after": STATEMENT.not_before - 1}, Rule.WINDOW_TOO_LONG),
}


@pytest.mark.parametrize(("changes", "rule"), CLASS_ROWS.values(), ids=CLASS_ROWS)
def test_a_statement_keeps_to_its_class(changes: dict[str, Any], rule: Rule) -> None:
    statement = make_statement(POLICY, **changes)
    assert rule_of(approve(statement, PEOPLE), statement) is rule


@pytest.mark.parametrize("flags", [BACKUP_ELIGIBLE, BACKUP_ELIGIBLE | BACKED_UP, BACKED_UP])
def test_a_class_can_refuse_passkeys_that_can_be_copied(flags: int) -> None:
    policy, statement = with_class(PEOPLE, deviceBound=True)
    synced = ADA.passkey.misbehaving(flags=USER_PRESENT | USER_VERIFIED | flags)
    assert rule_of([ADA.approve(statement, key=synced)], statement, policy) is Rule.NOT_DEVICE_BOUND
    assert rule_of([ADA.approve(statement, key=ADA.key_file)], statement, policy) is Rule.NOT_DEVICE_BOUND
    assert require_met(statement, approve(statement, [ADA, BOB]), policy).is_met
    assert judge(STATEMENT, ada_with(flags=USER_PRESENT | USER_VERIFIED | flags), POLICY).is_met


def test_a_class_can_ask_for_a_proof_from_a_key_file() -> None:
    policy, statement = with_class(PEOPLE, fileProofs=1, deviceBound=True)
    verdict = judge(statement, approve(statement, [ADA, BOB]), policy)
    assert (verdict.missing, verdict.missing_file_proofs, verdict.is_met) == (0, 1, False)
    assert rule_of(approve(statement, [ADA, BOB]), statement, policy) is Rule.TOO_FEW_APPROVERS
    mixed = [ADA.approve(statement), BOB.approve(statement, key=BOB.key_file)]
    assert require_met(statement, mixed, policy).is_met


def test_groups_must_all_be_there_and_one_person_fills_one_factor() -> None:
    owners, operators = make_people(3, groups=["owners"]), [replace(p, groups=("operators",)) for p in make_people(6)[3:]]
    policy, statement = with_class([*owners, *operators], factors={"owners": 1, "operators": 1})
    assert require_met(statement, approve(statement, [owners[0], operators[0]]), policy).is_met
    assert rule_of(approve(statement, owners), statement, policy) is Rule.MISSING_FACTOR
    assert judge(statement, approve(statement, owners), policy).missing_factors == {"operators": 1}
    people = make_people(3, groups=["owners", "operators"])
    policy, statement = with_class(people, threshold=1, factors={"owners": 1, "operators": 1})
    assert rule_of(approve(statement, people[:1]), statement, policy) is Rule.TOO_FEW_APPROVERS
    assert require_met(statement, approve(statement, people[:2]), policy).is_met


def by_brute_force(people: list[frozenset[str]], factors: Mapping[str, int]) -> bool:
    slots = [group for group, count in factors.items() for _ in range(count)]
    return any(
        all(group in its for group, its in zip(slots, chosen, strict=True))
        for chosen in itertools.permutations(people, len(slots))
    )


GROUPS = ("a", "b", "c")
EVERYBODY = [replace(person, groups=GROUPS) for person in make_people(12)]
"""Enough that six factors find one person to spare beside any five."""


@examples(25)
@given(
    st.lists(st.frozensets(st.sampled_from(GROUPS)), min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(GROUPS), st.integers(1, 2), min_size=1),
)
def test_factors_are_filled_whenever_some_assignment_fills_them(
    its_groups: list[frozenset[str]], factors: dict[str, int]
) -> None:
    some = [replace(person, groups=tuple(sorted(its))) for person, its in zip(EVERYBODY, its_groups, strict=False)]
    policy, statement = with_class([*some, *EVERYBODY[len(some) :]], threshold=1, factors=factors)
    verdict = judge(statement, [person.approve(statement, key=person.key_file) for person in some], policy)
    assert (not verdict.missing_factors) is by_brute_force(its_groups, factors)
    missing = sum(verdict.missing_factors.values())
    assert 0 <= missing <= sum(factors.values())
    # What is said to be missing is enough: that many more people, each in every group, complete it.
    assert by_brute_force([*its_groups, *[frozenset(GROUPS)] * missing], factors)


@examples(25)
@given(
    st.lists(st.frozensets(st.sampled_from(GROUPS)), min_size=3, max_size=5),
    st.dictionaries(st.sampled_from(GROUPS), st.integers(1, 2), min_size=1),
)
def test_a_policy_is_good_exactly_when_any_one_person_may_lose_the_keys(
    its_groups: list[frozenset[str]], factors: dict[str, int]
) -> None:
    people = [replace(person, groups=tuple(sorted(its))) for person, its in zip(EVERYBODY, its_groups, strict=False)]
    survives = all(by_brute_force([*its_groups[:lost], *its_groups[lost + 1 :]], factors) for lost in range(len(people)))
    if survives:
        with_class(people, threshold=1, factors=factors)
    else:
        with pytest.raises(ApprovalError, match=r"needs .* and finds"):
            with_class(people, threshold=1, factors=factors)


@examples(25)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=6))  # fmt: skip
def test_anything_at_all_in_place_of_a_member_is_refused_and_never_breaks_the_verifier(odd: Any) -> None:
    for name in ("type", "approver", "keyid", "clientDataJSON", "authenticatorData", "signature"):
        with pytest.raises(ApprovalError):
            judge(STATEMENT, [{**ADA.approve(STATEMENT, key=ADA.passkey), name: odd}], POLICY)
    with pytest.raises(ApprovalError):
        require_met(STATEMENT, odd, POLICY)
    with pytest.raises(ApprovalError):
        judge(STATEMENT, [odd], POLICY)
    client = json.dumps({"type": "webauthn.get", "challenge": encode_bytes(STATEMENT.digest), "origin": repr(odd)})
    with pytest.raises(ApprovalError):
        judge(STATEMENT, [{**ADA.approve(STATEMENT), "clientDataJSON": encode_bytes(client.encode())}], POLICY)


def test_a_passkey_of_rsa_approves_with_its_own_signature_alone() -> None:
    passkeys = [SoftPasskey(private_key=rsa.generate_private_key(65537, 2048)) for _ in range(2)]
    people = [replace(ADA, passkey=passkeys[0]), BOB, CLEO, DAN]
    policy = make_policy(people)
    statement = make_statement(policy)
    proof = people[0].approve(statement)
    assert check_proof(proof, statement, policy).approver == people[0].name
    assert require_met(statement, [proof, BOB.approve(statement)], policy).is_met
    signed = passkeys[1].sign(statement.digest, approver=people[0].name)
    other = edit_statement(statement, opId="another")
    forged: list[Proof] = [
        {**signed, "keyid": proof["keyid"]}, {**proof, "signature": encode_bytes(b"\x00" * 256)},
        {**proof, "signature": encode_bytes(decode_bytes(proof["signature"]) + b"\x00")},
        {**BOB.approve(statement), "approver": people[0].name, "keyid": proof["keyid"]},
    ]  # fmt: skip
    for wrong in forged:
        with pytest.raises(ApprovalError) as caught:
            check_proof(wrong, statement, policy)
        assert caught.value.rule is Rule.BAD_SIGNATURE
    with pytest.raises(ApprovalError) as caught:
        check_proof(proof, other, policy)
    assert caught.value.rule is Rule.WRONG_CHALLENGE


ANN, BEN, CAT, DEE, ELI = make_people(5)
FIRST_RAW = make_policy_bytes([ANN, BEN, CAT])
FIRST = read_policy(FIRST_RAW)
SECOND_RAW = make_policy_bytes([ANN, DEE, ELI], version=2, previous=FIRST.ref.sha256)
SECOND = read_policy(SECOND_RAW)


def rule_of_change(raw: bytes, statement: Statement, proofs: Any, *, current: Policy | None) -> Rule:
    with pytest.raises(ApprovalError) as caught:
        verify_successor(raw, statement, proofs, current=current)
    return caught.value.rule


def change(raw: bytes, people: list[Person], *, under: Policy | None) -> tuple[bytes, Statement, list[Proof]]:
    statement = make_change(raw, under=under)
    return raw, statement, approve(statement, people)


def test_a_policy_is_signed_by_enough_of_the_old_and_of_the_new_and_the_first_under_itself() -> None:
    assert verify_successor(*change(FIRST_RAW, [ANN, BEN], under=None), current=None) == FIRST
    for people in ([ANN, BEN, DEE], [BEN, CAT, DEE, ELI]):
        assert verify_successor(*change(SECOND_RAW, people, under=FIRST), current=FIRST) == SECOND


CHANGE_ROWS: dict[str, tuple[list[Person], Rule]] = {
    "signed only by new keys": ([DEE, ELI], Rule.TOO_FEW_APPROVERS),
    "signed only by old keys": ([BEN, CAT], Rule.TOO_FEW_APPROVERS),
    "one of the old, two of the new": ([ANN, DEE, ELI], Rule.TOO_FEW_APPROVERS),
    "two of the old, one of the new": ([ANN, BEN], Rule.TOO_FEW_APPROVERS),
    "nobody": ([], Rule.TOO_FEW_APPROVERS),
    "a stranger beside enough": ([ANN, BEN, DEE, Person("stranger")], Rule.UNKNOWN_KEY),
    "somebody twice": ([ANN, ANN, BEN, DEE], Rule.DUPLICATE_PROOF),
}


@pytest.mark.parametrize(("people", "rule"), CHANGE_ROWS.values(), ids=CHANGE_ROWS)
def test_a_change_without_both_quorums_is_refused(people: list[Person], rule: Rule) -> None:
    assert rule_of_change(*change(SECOND_RAW, people, under=FIRST), current=FIRST) is rule


DAN_WITH_BENS_KEY = replace(DEE, passkey=BEN.passkey)
THIRD_RAW = make_policy_bytes([ANN, DEE, ELI], version=3, previous=SECOND.ref.sha256)
ELSEWHERE = read_policy(make_policy_bytes([ANN, BEN, CAT], origins=["https://other.example"]))
NO_CHANGE = {"model-load": DEFAULT_CLASSES["model-load"]}
BY_DAN = make_change(SECOND_RAW, under=FIRST, requested_by="dan")
SUCCESSOR_ROWS: dict[str, tuple[tuple[bytes, Statement, Any], Policy | None, Rule]] = {
    "the first, by one": (change(FIRST_RAW, [ANN], under=None), None, Rule.TOO_FEW_APPROVERS),
    "the second as the first": (change(SECOND_RAW, [ANN, DEE], under=None), None, Rule.WRONG_POLICY),
    "a key that changed hands": (  # what Bob signs is not Dan's
        change(make_policy_bytes([ANN, DAN_WITH_BENS_KEY, CAT], version=2, previous=FIRST.ref.sha256), [ANN, BEN], under=FIRST),
        FIRST, Rule.UNKNOWN_KEY,
    ),
    "its requester among its signers": (
        (SECOND_RAW, BY_DAN, approve(BY_DAN, [ANN, BEN, DEE])), FIRST, Rule.REQUESTER_APPROVES,
    ),
    "a version left out": (change(THIRD_RAW, [ANN, DEE], under=SECOND), FIRST, Rule.POLICY_ROLLBACK),
    "the same version again": (change(SECOND_RAW, [ANN, BEN, DEE], under=FIRST), SECOND, Rule.POLICY_ROLLBACK),
    "the first again": (change(FIRST_RAW, [ANN, BEN], under=None), FIRST, Rule.POLICY_ROLLBACK),
    "behind another policy": (
        change(make_policy_bytes([ANN, BEN, CAT], version=2, previous=ELSEWHERE.ref.sha256), [ANN, BEN], under=FIRST),
        FIRST, Rule.POLICY_ROLLBACK,
    ),
    "under another name": (
        change(make_policy_bytes([ANN, BEN, CAT], version=2, previous=FIRST.ref.sha256, policy_id="x"), [ANN], under=FIRST),
        FIRST, Rule.POLICY_ROLLBACK,
    ),
    "asked for under another policy": (change(SECOND_RAW, [ANN, BEN, DEE], under=SECOND), FIRST, Rule.WRONG_POLICY),
    "a policy that could never be changed": (
        change(make_policy_bytes([ANN, BEN, CAT], classes=NO_CHANGE), [ANN, BEN], under=None), None, Rule.UNKNOWN_CLASS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "current", "rule"), SUCCESSOR_ROWS.values(), ids=SUCCESSOR_ROWS)
def test_a_policy_that_does_not_follow_the_one_in_force_is_refused(
    asked: tuple[bytes, Statement, Any], current: Policy | None, rule: Rule
) -> None:
    assert rule_of_change(*asked, current=current) is rule


def test_the_same_person_with_a_new_key_needs_others_to_say_so() -> None:
    renewed = replace(ANN, passkey=SoftPasskey())
    raw = make_policy_bytes([renewed, BEN, CAT], version=2, previous=FIRST.ref.sha256)
    assert rule_of_change(*change(raw, [renewed, BEN], under=FIRST), current=FIRST) is Rule.TOO_FEW_APPROVERS
    assert verify_successor(*change(raw, [BEN, CAT], under=FIRST), current=FIRST).ref.version == 2
    statement = make_change(raw, under=FIRST)
    both_keys = [ANN.approve(statement), renewed.approve(statement), BEN.approve(statement)]
    assert verify_successor(raw, statement, both_keys, current=FIRST).ref.version == 2


def test_the_document_is_the_one_that_was_approved() -> None:
    classes = {**DEFAULT_CLASSES, "node-evict": DEFAULT_CLASSES["node-drain"]}
    laxer = make_policy_bytes([ANN, DEE, ELI], version=2, previous=FIRST.ref.sha256, classes=classes)
    _, statement, proofs = change(SECOND_RAW, [ANN, BEN, DEE], under=FIRST)
    assert rule_of_change(laxer, statement, proofs, current=FIRST) is Rule.WRONG_POLICY
    for params in ({"version": True, "sha256": FIRST.ref.sha256}, {}, {"sha256": FIRST.ref.sha256}):
        odd = make_change(FIRST_RAW, under=None, params=params)
        assert rule_of_change(FIRST_RAW, odd, approve(odd, [ANN, BEN]), current=None) is Rule.WRONG_POLICY


def test_no_other_operation_changes_a_policy_and_its_proofs_are_a_list_of_proofs() -> None:
    for operation, op_class in (("model-load", "model-load"), ("node-drain", "node-drain"), ("policy-change", "standing")):
        statement = make_change(SECOND_RAW, under=FIRST, operation=operation, op_class=op_class)
        assert rule_of_change(SECOND_RAW, statement, approve(statement, [ANN, BEN, DEE]), current=FIRST) is Rule.BAD_STATEMENT
    others: tuple[Any, ...] = (None, 7, {}, "x", [None], [{"keyid": []}])
    for proofs in others:
        rule = rule_of_change(SECOND_RAW, make_change(SECOND_RAW, under=FIRST), proofs, current=FIRST)
        assert rule in {Rule.UNKNOWN_KEY, Rule.BAD_PROOF}
        assert select_proofs(proofs, FIRST) == []


def test_a_box_that_was_away_catches_up_and_keeps_what_held_until_a_bad_link() -> None:
    links = [
        make_link(*change(FIRST_RAW, [ANN, BEN], under=None)),
        make_link(*change(SECOND_RAW, [ANN, BEN, DEE], under=FIRST)),
        make_link(*change(THIRD_RAW, [ANN, DEE], under=SECOND)),
    ]
    assert [policy.ref.version for policy in verify_chain(links, current=None)] == [1, 2, 3]
    assert [policy.ref.version for policy in verify_chain(links[1:], current=FIRST)] == [2, 3]
    assert verify_chain([], current=FIRST) == ()
    others: list[Any] = [None, {}, "x", [None], ["x"], [{}], [{"document": 7, "statement": 7, "proofs": []}]]
    for broken in (links[::2], links[::-1], [links[0], links[0]], *others):
        with pytest.raises(ApprovalError):
            verify_chain(broken, current=None)
