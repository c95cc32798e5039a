"""How one policy follows another: old and new people agree, no version is skipped and none comes back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.fakes.passkeys import Proof, SoftPasskey
from tests.fakes.policies import (
    NOW,
    Person,
    approve,
    make_change,
    make_link,
    make_people,
    make_policy_bytes,
    make_statement,
)
from wire.optoken.approval import (
    ApprovalError,
    Policy,
    Rule,
    Statement,
    read_policy,
    require_met,
    select_proofs,
    verify_chain,
    verify_successor,
)
from wire.optoken.proposal import DEFAULT_CLASSES

ADA, BOB, CLEO, DAN, EVE = PEOPLE = make_people(5)
FIRST_RAW = make_policy_bytes([ADA, BOB, CLEO])
FIRST = read_policy(FIRST_RAW)
SECOND_RAW = make_policy_bytes([ADA, DAN, EVE], version=2, previous=FIRST.ref.sha256)
SECOND = read_policy(SECOND_RAW)


def rule_of(raw: bytes, statement: Statement, proofs: Any, *, current: Policy | None) -> Rule:
    with pytest.raises(ApprovalError) as caught:
        verify_successor(raw, statement, proofs, current=current)
    return caught.value.rule


def change(raw: bytes, people: list[Person], *, under: Policy | None) -> tuple[bytes, Statement, list[Proof]]:
    statement = make_change(raw, under=under)
    return raw, statement, approve(statement, people)


def test_the_first_policy_is_signed_under_itself() -> None:
    assert verify_successor(*change(FIRST_RAW, [ADA, BOB], under=None), current=None) == FIRST
    assert rule_of(*change(FIRST_RAW, [ADA], under=None), current=None) is Rule.TOO_FEW_APPROVERS
    assert rule_of(*change(SECOND_RAW, [ADA, DAN], under=None), current=None) is Rule.WRONG_POLICY


def test_a_new_policy_is_signed_by_enough_of_the_old_and_of_the_new() -> None:
    assert verify_successor(*change(SECOND_RAW, [ADA, BOB, DAN], under=FIRST), current=FIRST) == SECOND
    assert verify_successor(*change(SECOND_RAW, [BOB, CLEO, DAN, EVE], under=FIRST), current=FIRST) == SECOND


CHANGE_ROWS: dict[str, tuple[list[Person], Rule]] = {
    "signed only by new keys": ([DAN, EVE], Rule.TOO_FEW_APPROVERS),
    "signed only by old keys": ([BOB, CLEO], Rule.TOO_FEW_APPROVERS),
    "one of the old, two of the new": ([ADA, DAN, EVE], Rule.TOO_FEW_APPROVERS),
    "two of the old, one of the new": ([ADA, BOB], Rule.TOO_FEW_APPROVERS),
    "nobody": ([], Rule.TOO_FEW_APPROVERS),
    "a stranger beside enough": ([ADA, BOB, DAN, Person("stranger")], Rule.UNKNOWN_KEY),
    "somebody twice": ([ADA, ADA, BOB, DAN], Rule.DUPLICATE_PROOF),
}


@pytest.mark.parametrize(("people", "rule"), CHANGE_ROWS.values(), ids=CHANGE_ROWS)
def test_a_change_without_both_quorums_is_refused(people: list[Person], rule: Rule) -> None:
    assert rule_of(*change(SECOND_RAW, people, under=FIRST), current=FIRST) is rule


def test_the_same_person_with_a_new_key_needs_others_to_say_so() -> None:
    renewed = replace(ADA, passkey=SoftPasskey())
    raw = make_policy_bytes([renewed, BOB, CLEO], version=2, previous=FIRST.ref.sha256)
    assert rule_of(*change(raw, [renewed, BOB], under=FIRST), current=FIRST) is Rule.TOO_FEW_APPROVERS
    assert verify_successor(*change(raw, [BOB, CLEO], under=FIRST), current=FIRST).ref.version == 2
    statement = make_change(raw, under=FIRST)
    both_keys = [ADA.approve(statement), renewed.approve(statement), BOB.approve(statement)]
    assert verify_successor(raw, statement, both_keys, current=FIRST).ref.version == 2


def test_a_key_that_changes_hands_proves_nothing_for_the_old_name() -> None:
    """The new policy gives Bob's passkey to Dan; what Bob signs is then not Dan's."""
    dan = replace(DAN, passkey=BOB.passkey)
    raw = make_policy_bytes([ADA, dan, CLEO], version=2, previous=FIRST.ref.sha256)
    assert rule_of(*change(raw, [ADA, BOB], under=FIRST), current=FIRST) is Rule.UNKNOWN_KEY


def test_the_requester_counts_on_neither_side() -> None:
    statement = make_change(SECOND_RAW, under=FIRST, requested_by="dan")
    proofs = approve(statement, [ADA, BOB, DAN])
    assert rule_of(SECOND_RAW, statement, proofs, current=FIRST) is Rule.REQUESTER_APPROVES


def test_policy_rollback_and_skipped_versions_are_refused() -> None:
    third_raw = make_policy_bytes([ADA, DAN, EVE], version=3, previous=SECOND.ref.sha256)
    third = change(third_raw, [ADA, DAN], under=SECOND)
    assert rule_of(*third, current=FIRST) is Rule.POLICY_ROLLBACK
    assert verify_successor(*third, current=SECOND).ref.version == 3
    again = change(SECOND_RAW, [ADA, BOB, DAN], under=FIRST)
    assert rule_of(*again, current=SECOND) is Rule.POLICY_ROLLBACK
    assert rule_of(*change(FIRST_RAW, [ADA, BOB], under=None), current=FIRST) is Rule.POLICY_ROLLBACK


def test_a_policy_that_follows_another_one_is_no_successor() -> None:
    other = read_policy(make_policy_bytes([ADA, BOB, CLEO], origins=["https://other.example"]))
    stranger = make_policy_bytes([ADA, BOB, CLEO], version=2, previous=other.ref.sha256)
    assert rule_of(*change(stranger, [ADA, BOB], under=FIRST), current=FIRST) is Rule.POLICY_ROLLBACK
    renamed = make_policy_bytes([ADA, BOB, CLEO], version=2, previous=FIRST.ref.sha256, policy_id="second")
    assert rule_of(*change(renamed, [ADA, BOB], under=FIRST), current=FIRST) is Rule.POLICY_ROLLBACK


def test_a_change_is_asked_for_under_the_policy_that_holds() -> None:
    assert rule_of(*change(SECOND_RAW, [ADA, BOB, DAN], under=SECOND), current=FIRST) is Rule.WRONG_POLICY


def test_the_document_is_the_one_that_was_approved() -> None:
    laxer = make_policy_bytes(
        [ADA, DAN, EVE],
        version=2,
        previous=FIRST.ref.sha256,
        classes={**DEFAULT_CLASSES, "node-evict": DEFAULT_CLASSES["node-drain"]},
    )
    _, statement, proofs = change(SECOND_RAW, [ADA, BOB, DAN], under=FIRST)
    assert rule_of(laxer, statement, proofs, current=FIRST) is Rule.WRONG_POLICY
    for params in ({"version": True, "sha256": FIRST.ref.sha256}, {}, {"sha256": FIRST.ref.sha256}):
        odd = make_change(FIRST_RAW, under=None, params=params)
        assert rule_of(FIRST_RAW, odd, approve(odd, [ADA, BOB]), current=None) is Rule.WRONG_POLICY


@pytest.mark.parametrize(
    ("operation", "op_class"), [("model-load", "model-load"), ("node-drain", "node-drain"), ("policy-change", "standing")]
)
def test_no_other_operation_changes_a_policy(operation: str, op_class: str) -> None:
    statement = make_change(SECOND_RAW, under=FIRST, operation=operation, op_class=op_class)
    assert rule_of(SECOND_RAW, statement, approve(statement, [ADA, BOB, DAN]), current=FIRST) is Rule.BAD_STATEMENT


def test_a_policy_that_could_never_be_changed_cannot_begin() -> None:
    raw = make_policy_bytes([ADA, BOB, CLEO], classes={"model-load": DEFAULT_CLASSES["model-load"]})
    assert rule_of(*change(raw, [ADA, BOB], under=None), current=None) is Rule.UNKNOWN_CLASS


def test_a_box_that_was_away_catches_up_and_keeps_what_held_until_a_bad_link() -> None:
    third_raw = make_policy_bytes([ADA, DAN, EVE], version=3, previous=SECOND.ref.sha256)
    links = [
        make_link(*change(FIRST_RAW, [ADA, BOB], under=None)),
        make_link(*change(SECOND_RAW, [ADA, BOB, DAN], under=FIRST)),
        make_link(*change(third_raw, [ADA, DAN], under=SECOND)),
    ]
    assert [policy.ref.version for policy in verify_chain(links, current=None)] == [1, 2, 3]
    assert [policy.ref.version for policy in verify_chain(links[1:], current=FIRST)] == [2, 3]
    assert verify_chain([], current=FIRST) == ()
    for broken in (links[::2], links[::-1], [links[0], links[0]]):
        with pytest.raises(ApprovalError):
            verify_chain(broken, current=None)


@pytest.mark.parametrize(
    "links", [None, {}, "x", [None], ["x"], [{}], [{"document": 7, "statement": 7, "proofs": []}]], ids=repr
)
def test_a_chain_of_anything_else_is_refused(links: Any) -> None:
    with pytest.raises(ApprovalError):
        verify_chain(links, current=None)


@pytest.mark.parametrize("proofs", [None, 7, {}, "x", [None], [{"keyid": []}]], ids=repr)
def test_the_proofs_of_a_change_are_a_list_of_proofs(proofs: Any) -> None:
    assert rule_of(SECOND_RAW, make_change(SECOND_RAW, under=FIRST), proofs, current=FIRST) in {
        Rule.UNKNOWN_KEY,
        Rule.BAD_PROOF,
    }
    assert select_proofs(proofs, FIRST) == []


def test_an_approval_survives_no_change_of_policy() -> None:
    statement = make_statement(FIRST, not_before=NOW)
    proofs = approve(statement, [ADA, BOB])
    assert require_met(statement, proofs, FIRST).is_met
    with pytest.raises(ApprovalError):
        require_met(statement, proofs, SECOND)
