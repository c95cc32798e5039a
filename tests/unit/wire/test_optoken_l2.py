"""Every way in which an L2 token can be wrong. The keys of the issuer are the attacker's here: only people's keys are not."""

from __future__ import annotations

import hmac
from typing import Any

import pytest

from tests.fakes.passkeys import USER_PRESENT
from tests.fakes.policies import approve, edit_statement, make_people, make_policy, make_policy_bytes, make_statement
from tests.fakes.signed_tokens import (
    BOX,
    FLUSH_PARAMS,
    KEY,
    KID,
    MODEL,
    NOW,
    OTHER_KEY,
    PARAMS,
    PEOPLE,
    POLICY,
    PROOFS,
    STATEMENT,
    Token,
    make_grant,
    make_l0,
    make_l1,
    make_l2,
    make_verifier,
    sign_claims,
    verify,
)
from wire.optoken import Level, Operation, OpTokenError, Reason, Rule, Verifier, params_digest
from wire.optoken.approval import Statement, encode_bytes

ADA, BOB, CLEO, DAN = PEOPLE
L2 = make_verifier(Level.L2)


def refusal(token: object, verifier: Verifier = L2, **request: Any) -> tuple[Reason, str]:
    with pytest.raises(OpTokenError) as caught:
        verify(token, verifier, **request)
    return caught.value.reason, caught.value.rule


def rule_of(token: object, verifier: Verifier = L2, **request: Any) -> str:
    reason, rule = refusal(token, verifier, **request)
    assert reason is Reason.NOT_APPROVED
    return rule


def reclaimed(token: Token, **changes: Any) -> Token:
    """The token with other claims, well signed by the issuer; ``...`` leaves one out."""
    claims = {name: value for name, value in {**token["opToken"], **changes}.items() if value is not ...}
    return {**token, **sign_claims(claims)}


def approved(**changes: Any) -> Token:
    """A token for a statement that differs and that Ada and Bob approved as it is."""
    statement = edit_statement(STATEMENT, **changes)
    return make_l2(statement=statement, proofs=approve(statement, [ADA, BOB]))


def test_a_valid_l2_token_proves_who_approved_what() -> None:
    verified = verify(make_l2(), L2)
    assert (verified.level, verified.kid, verified.op_id, verified.fence) == (Level.L2, KID, "op-1", 7)
    assert (verified.approvers, verified.signers) == (("ada", "bob"), ("admin1", "admin2"))
    assert (verified.use, verified.max_uses, verified.op_key) == (1, 1, "op-1.1")
    assert (verified.op_class, verified.daily_cap, verified.not_after) == ("model-load", 0, NOW + 3600)
    assert verified.statement == STATEMENT


def test_the_key_of_the_ledger_follows_the_level() -> None:
    assert verify(make_l0()).op_key is None
    assert verify(make_l1()).op_key == "op-1"
    assert verify(make_l2(), L2).op_key == "op-1.1"


@pytest.mark.parametrize("token", [make_l0(), make_l1()], ids=["L0", "L1"])
def test_an_l2_box_refuses_every_token_of_a_lower_level(token: Token) -> None:
    assert refusal(token) == (Reason.LEVEL_TOO_LOW, "")


def test_an_l2_box_refuses_a_token_whose_statement_was_stripped() -> None:
    token = make_l2()
    assert refusal({name: token[name] for name in ("opToken", "signature", "proofs")}) == (Reason.LEVEL_TOO_LOW, "")


def test_an_l0_token_is_not_raised_by_a_statement_beside_it() -> None:
    token = {**make_l2(), **make_l0()}
    assert refusal(token) == (Reason.LEVEL_TOO_LOW, "")


def test_a_box_without_a_policy_refuses_everything() -> None:
    assert refusal(make_l2(), make_verifier(Level.L2, policy=None)) == (Reason.NO_POLICY, "")


@pytest.mark.parametrize("level", [Level.L0, Level.L1])
def test_a_box_of_a_lower_level_takes_an_l2_token_for_an_l1_token(level: Level) -> None:
    box = make_verifier(level, policy=None)
    verified = verify(make_l2(proofs=[]), box)
    assert (verified.level, verified.op_key, verified.max_uses, verified.statement) == (Level.L1, "op-1", 1, None)
    assert refusal(make_l2(OTHER_KEY), box) == (Reason.BAD_SIGNATURE, "")
    assert refusal(make_l2(), box, params={"modelId": MODEL}) == (Reason.WRONG_PARAMS, "")
    assert refusal(make_l2(use=2), box) == (Reason.NOT_APPROVED, Rule.TOO_MANY_USES)


def test_the_names_that_the_issuer_lists_count_for_nothing() -> None:
    assert verify(make_l2(grant=make_grant(signers=["zoe"])), L2).approvers == ("ada", "bob")
    boasting = make_l2(grant=make_grant(signers=["ada", "bob", "cleo"]), proofs=PROOFS[:1])
    assert rule_of(boasting) == Rule.TOO_FEW_APPROVERS


# The signed part, as at L1

ISSUER_ROWS: dict[str, tuple[Token, Reason]] = {
    "wrong key": (make_l2(OTHER_KEY), Reason.BAD_SIGNATURE),
    "unknown kid": (make_l2(kid="2031-01"), Reason.UNKNOWN_KEY),
    "HMAC with the bytes of a public key": (make_l2(ADA.passkey.public_key), Reason.BAD_SIGNATURE),
    "algorithm swap": (
        {**make_l2(), "signature": encode_bytes(hmac.digest(KEY, b"{}", "sha512"))},
        Reason.BAD_SIGNATURE,
    ),
    "other runner's token": (make_l2(audience="box-9"), Reason.WRONG_AUDIENCE),
    "expired": (make_l2(expires_at=NOW - 1, grant=make_grant(issued_at=NOW - 300)), Reason.EXPIRED),
    "from the future": (make_l2(grant=make_grant(issued_at=NOW + 61)), Reason.NOT_YET_VALID),
    "lives too long": (make_l2(expires_at=NOW + 301), Reason.LIFETIME_TOO_LONG),
    "without the digest of its statement": (reclaimed(make_l2(), stmtDigest=...), Reason.BAD_FIELD),
    "digest of another statement": (reclaimed(make_l2(), stmtDigest="ab" * 32), Reason.WRONG_STATEMENT),
    "digest in capitals": (reclaimed(make_l2(), stmtDigest=STATEMENT.digest.hex().upper()), Reason.WRONG_STATEMENT),
    "digest not ASCII": (reclaimed(make_l2(), stmtDigest="ä" * 64), Reason.WRONG_STATEMENT),
    "another approval's id": (reclaimed(make_l2(), opId="op-2"), Reason.WRONG_STATEMENT),
    "use 0": (reclaimed(make_l2(), use=0), Reason.BAD_FIELD),
    "use as text": (reclaimed(make_l2(), use="1"), Reason.BAD_FIELD),
    "stale version of the format": (reclaimed(make_l2(), v=2), Reason.UNKNOWN_VERSION),
    "no proofs at all": ({name: item for name, item in make_l2().items() if name != "proofs"}, Reason.BAD_FIELD),
    "proofs that are no list": ({**make_l2(), "proofs": {"0": PROOFS[0]}}, Reason.BAD_FIELD),
    "something unsigned beside": ({**make_l2(), "note": "hello"}, Reason.BAD_FIELD),
    "a token of a megabyte": ({**make_l2(), "proofs": ["A" * 1_000_000]}, Reason.TOO_LARGE),
}


@pytest.mark.parametrize(("token", "reason"), ISSUER_ROWS.values(), ids=ISSUER_ROWS)
def test_the_signed_part_is_checked_as_at_l1(token: Token, reason: Reason) -> None:
    assert refusal(token) == (reason, "")


# What people signed against what is asked


def test_a_statement_altered_by_one_byte_is_another_statement() -> None:
    raw = STATEMENT.raw.replace(b'"maxUses":1', b'"maxUses":9')
    token = {**make_l2(), "statement": encode_bytes(raw)}
    assert refusal(token) == (Reason.WRONG_STATEMENT, "")
    rebound = edit_statement(STATEMENT, maxUses=9)
    assert rule_of(make_l2(statement=rebound)) == Rule.TOO_MANY_USES
    moved = edit_statement(STATEMENT, notAfter=STATEMENT.not_after + 1)
    assert rule_of(make_l2(statement=moved)) == Rule.WRONG_CHALLENGE


def test_a_changed_list_of_targets_is_not_what_was_signed() -> None:
    widened = edit_statement(STATEMENT, targets=[BOX, "box-9", "box-8"])
    assert rule_of(make_l2(statement=widened)) == Rule.WRONG_CHALLENGE
    assert refusal(approved(targets=["box-9"])) == (Reason.WRONG_TARGET, "")
    assert refusal(approved(targets=["*", "box-*", BOX + " x"])) == (Reason.WRONG_TARGET, "")
    box_9 = make_verifier(Level.L2, runner_id="box-9")
    assert verify(make_l2(audience="box-9"), box_9).approvers == ("ada", "bob")


BODIES: dict[str, dict[str, object]] = {
    "changed evictModel": {**PARAMS, "evictModel": "the-model-everybody-uses"},
    "evictModel added": {**{name: value for name, value in PARAMS.items() if name != "evictModel"}, "evictModel": "x"},
    "member added": {**PARAMS, "force": True},
    "member left out": {name: value for name, value in PARAMS.items() if name != "quantization"},
    "number as text": {**PARAMS, "maxContextLength": "32768"},
    "number as a truth value": {**PARAMS, "overrides": {"target_inflight": True, "flags": ["a", "b"]}},
    "nothing": {"modelId": MODEL},
}


@pytest.mark.parametrize("params", BODIES.values(), ids=BODIES)
def test_the_body_is_what_people_signed_even_when_the_issuer_says_otherwise(params: dict[str, object]) -> None:
    assert refusal(make_l2(), params=params) == (Reason.WRONG_PARAMS, "")
    assert refusal(make_l2(params_digest=params_digest(params)), params=params) == (Reason.WRONG_PARAMS, "")


def test_one_and_true_are_different_parameters() -> None:
    ones = {"modelId": MODEL, "force": 1}
    statement = make_statement(POLICY, params=ones)
    trues = {"modelId": MODEL, "force": True}
    token = make_l2(statement=statement, proofs=approve(statement, [ADA, BOB]), params_digest=params_digest(trues))
    assert refusal(token, params=trues) == (Reason.WRONG_PARAMS, "")


def test_nulls_and_the_token_itself_are_no_part_of_the_body() -> None:
    assert verify(make_l2(), L2, params={**PARAMS, "tag": None, "verifiedOpToken": "x"}).approvers


@pytest.mark.parametrize("value", [0.5, {"inner": None}, "two\nlines", "\u202egnp.exe"], ids=["float", "null", "line", "bidi"])
def test_a_body_that_nobody_could_sign_is_refused_by_name(value: object) -> None:
    params = {**PARAMS, "x": value}
    digest = params_digest(PARAMS) if isinstance(value, float) else params_digest(params)
    assert refusal(make_l2(params_digest=digest), params=params) == (Reason.UNSIGNABLE_PARAMS, "")


def make_flush(**params: object) -> tuple[Statement, Token]:
    statement = make_statement(POLICY, operation="cache-flush", op_class="cache-flush", params=params)
    grant = make_grant(operation=Operation.CACHE_FLUSH, model_id=None)
    token = make_l2(
        grant=grant, statement=statement, proofs=approve(statement, [ADA, BOB]), params_digest=params_digest(FLUSH_PARAMS)
    )
    return statement, token


def test_a_flush_is_the_one_that_was_approved() -> None:
    request: dict[str, Any] = {"operation": Operation.CACHE_FLUSH, "model_id": None, "params": FLUSH_PARAMS}
    assert verify(make_flush(scope="tenant", tenantId="community-x")[1], L2, **request).op_class == "cache-flush"
    for other in ({"scope": "all"}, {"scope": "tenant", "tenantId": "community-y"}, {"scope": "tenant"}):
        assert refusal(make_flush(**other)[1], **request) == (Reason.WRONG_PARAMS, "")


def test_a_body_without_its_model_is_not_what_was_approved() -> None:
    statement = make_statement(POLICY, params={"quantization": "awq"})
    token = make_l2(
        statement=statement, proofs=approve(statement, [ADA, BOB]), params_digest=params_digest({"quantization": "awq"})
    )
    assert refusal(token, params={"quantization": "awq"}) == (Reason.WRONG_MODEL, "")


def test_an_approval_for_one_operation_permits_no_other() -> None:
    statement = make_statement(POLICY, operation="model-unload", op_class="model-unload", params=PARAMS)
    token = make_l2(statement=statement, proofs=approve(statement, [ADA, BOB]))
    assert refusal(token) == (Reason.WRONG_OPERATION, "")


# The policy, the window, the uses


def test_an_approval_under_another_policy_is_refused() -> None:
    newer = make_policy(PEOPLE, version=2, previous=POLICY.ref.sha256)
    assert rule_of(make_l2(), make_verifier(Level.L2, policy=newer)) == Rule.WRONG_POLICY
    lax = make_policy(PEOPLE, origins=["https://elsewhere.example"])
    statement = make_statement(lax, params=PARAMS)
    assert rule_of(make_l2(statement=statement, proofs=approve(statement, PEOPLE))) == Rule.WRONG_POLICY
    future = make_statement(newer, params=PARAMS)
    assert rule_of(make_l2(statement=future, proofs=approve(future, PEOPLE))) == Rule.WRONG_POLICY


def test_the_policy_of_the_attacker_is_not_the_policy_of_the_box() -> None:
    gang = make_people(4)
    theirs = make_policy(gang)
    statement = make_statement(theirs, params=PARAMS)
    assert rule_of(make_l2(statement=statement, proofs=approve(statement, gang[:2]))) == Rule.WRONG_POLICY
    named_as_ours = make_statement(POLICY, params=PARAMS)
    assert rule_of(make_l2(statement=named_as_ours, proofs=approve(named_as_ours, gang[:2]))) == Rule.UNKNOWN_KEY


def test_an_expired_policy_approves_nothing() -> None:
    policy = make_policy(PEOPLE, expires_at=NOW)
    statement = make_statement(policy, params=PARAMS)
    token = make_l2(statement=statement, proofs=approve(statement, [ADA, BOB]))
    box = make_verifier(Level.L2, policy=policy)
    assert verify(token, box, now=NOW).approvers
    assert rule_of(token, box, now=NOW + 1) == Rule.POLICY_EXPIRED


WINDOW_ROWS = [
    (NOW, None), (NOW - 60, None), (NOW - 61, Rule.NOT_YET), (NOW + 600, None), (NOW + 601, Rule.TOO_LATE),
]  # fmt: skip


@pytest.mark.parametrize(("now", "rule"), WINDOW_ROWS)
def test_an_approval_holds_in_its_window_only(now: int, rule: Rule | None) -> None:
    statement = edit_statement(STATEMENT, notAfter=NOW + 600)
    token = make_l2(
        grant=make_grant(issued_at=now), expires_at=now + 300, statement=statement, proofs=approve(statement, [ADA, BOB])
    )
    if rule is None:
        assert verify(token, L2, now=now).not_after == NOW + 600
    else:
        assert rule_of(token, now=now) == rule


@pytest.mark.parametrize("skew", range(-60, 61, 5))
def test_a_valid_token_holds_on_every_box_whose_clock_is_a_minute_off(skew: int) -> None:
    for age in (0, 1, 100, 239):
        assert verify(make_l2(), L2, now=NOW + age + skew).approvers == ("ada", "bob")


def test_a_standing_approval_is_used_as_often_as_people_said() -> None:
    statement = make_statement(POLICY, op_class="standing", params=PARAMS, max_uses=3)
    proofs = approve(statement, [ADA, BOB])
    for use in (1, 2, 3):
        verified = verify(make_l2(statement=statement, proofs=proofs, use=use), L2)
        assert (verified.use, verified.max_uses, verified.op_key) == (use, 3, f"op-1.{use}")
    assert rule_of(make_l2(statement=statement, proofs=proofs, use=4)) == Rule.TOO_MANY_USES
    assert rule_of(make_l2(use=2)) == Rule.TOO_MANY_USES


def test_break_glass_tells_the_box_its_daily_cap() -> None:
    people = make_people(3, break_glass=True)
    policy = make_policy(people)
    statement = make_statement(policy, op_class="break-glass", params=PARAMS)
    proofs = [people[0].approve(statement, key=people[0].break_glass)]
    verified = verify(make_l2(statement=statement, proofs=proofs), make_verifier(Level.L2, policy=policy))
    assert (verified.op_class, verified.daily_cap, verified.approvers) == ("break-glass", 2, ("ada",))


# The proofs: each wrong one once here, all of them in test_approval_proofs.py


def test_m_minus_one_proofs_are_too_few() -> None:
    assert rule_of(make_l2(proofs=PROOFS[:1])) == Rule.TOO_FEW_APPROVERS
    assert rule_of(make_l2(proofs=[])) == Rule.TOO_FEW_APPROVERS


def test_no_proof_can_be_counted_twice() -> None:
    assert rule_of(make_l2(proofs=[PROOFS[0], PROOFS[0]])) == Rule.DUPLICATE_PROOF
    second = ADA.approve(STATEMENT, key=ADA.second)
    assert rule_of(make_l2(proofs=[PROOFS[0], second])) == Rule.DUPLICATE_PROOF
    assert rule_of(make_l2(proofs=[PROOFS[0], {**PROOFS[0], "approver": "bob"}])) == Rule.UNKNOWN_KEY


def test_a_passkey_that_did_not_check_its_user_approves_nothing() -> None:
    careless = ADA.approve(STATEMENT, key=ADA.passkey.misbehaving(flags=USER_PRESENT))
    assert rule_of(make_l2(proofs=[careless, PROOFS[1]])) == Rule.NOT_VERIFIED_BY_USER


STATEMENTS_OF_ANY_KIND: dict[str, tuple[object, str]] = {
    "no text": (7, Rule.BAD_PROOF),
    "null": (None, Rule.BAD_PROOF),
    "padded": (encode_bytes(STATEMENT.raw) + "=", Rule.BAD_PROOF),
    "with blanks": (" " + encode_bytes(STATEMENT.raw), Rule.BAD_PROOF),
    "not JSON": (encode_bytes(b"no"), Rule.NOT_CANONICAL),
    "empty": ("", Rule.NOT_CANONICAL),
    "blanks in the JSON": (encode_bytes(STATEMENT.raw.replace(b'":', b'": ')), Rule.NOT_CANONICAL),
    "a policy instead": (encode_bytes(make_policy_bytes(PEOPLE)), Rule.BAD_STATEMENT),
}


@pytest.mark.parametrize(("statement", "rule"), STATEMENTS_OF_ANY_KIND.values(), ids=STATEMENTS_OF_ANY_KIND)
def test_a_statement_has_one_form(statement: object, rule: str) -> None:
    assert rule_of({**make_l2(), "statement": statement}) == rule


def test_a_refusal_names_its_rule_and_nothing_of_the_token() -> None:
    with pytest.raises(OpTokenError) as caught:
        verify(make_l2(proofs=PROOFS[:1]), L2)
    assert str(caught.value) == "not_approved (too_few_approvers)"
    assert "ada" not in repr(make_verifier(Level.L2))
