"""Every way in which a token can be wrong at L0, L1 and L2, one row each.

Proofs of people are in test_approvals.py, what needs memory is in tests/unit/runner/test_gate.py.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest

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
from tests.fakes.tables import by_outcome
from wire.optoken import Level, Operation, OpTokenError, Reason, Rule, Verifier, params_digest
from wire.optoken.approval import Statement, encode_bytes


def reason_of(token: object, verifier: Verifier | None = None, **request: Any) -> Reason:
    with pytest.raises(OpTokenError) as caught:
        verify(token, verifier, **request)
    return caught.value.reason


def l0(**changes: Any) -> Token:
    """An L0 token correctly signed over changed claims; a claim changed to ``...`` is left out."""
    return resign(make_l0(), changes)


def l1(**changes: Any) -> Token:
    """As ``l0``, for L1."""
    return resign(make_l1(), changes)


def resign(token: Token, changes: dict[str, Any]) -> Token:
    claims = token["opToken"] | changes
    return sign_claims({name: value for name, value in claims.items() if value is not ...})


def edited(token: Token, **changes: Any) -> Token:
    """A token with changed claims and the signature it had."""
    return {**token, "opToken": {**token["opToken"], **changes}}


def with_mac(token: Token, algorithm: str) -> Token:
    claims = token["opToken"]
    compact = "v" in claims
    text = json.dumps(claims, sort_keys=True, separators=(",", ":") if compact else None)
    return {**token, "signature": hmac.new(KEY, text.encode(), algorithm).hexdigest()}


def test_a_valid_l0_token_proves_what_it_says() -> None:
    verified = verify(make_l0())
    assert (verified.level, verified.kid, verified.nonce) == (Level.L0, "", "0123456789abcdef")
    assert (verified.op_id, verified.fence, verified.max_uses) == (None, None, 1)
    assert verified.signers == ("admin1", "admin2")
    assert verified.expires_at == NOW + 300


@pytest.mark.parametrize("level", [Level.L0, Level.L1])
def test_a_valid_l1_token_proves_what_it_says_at_either_box(level: Level) -> None:
    verified = verify(make_l1(expires_at=NOW + 120), make_verifier(level))
    assert (verified.level, verified.kid, verified.op_id, verified.fence) == (Level.L1, KID, "op-1", 7)
    assert (verified.expires_at, verified.max_uses) == (NOW + 120, 1)


def test_an_l0_signature_is_made_as_foreign_issuers_make_it() -> None:
    claims = {"operation": "model-load", "modelId": MODEL, "issuedAt": NOW, "signers": ["ä", "b"], "nonce": "abc12345"}
    signature = hmac.new(KEY, json.dumps(claims, sort_keys=True).encode(), hashlib.sha256).hexdigest()
    assert verify(json.dumps({"opToken": claims, "signature": signature})).signers == ("ä", "b")


def test_an_l0_token_may_say_more_than_the_specification() -> None:
    assert verify(l0(container="vllm-0", priority=3)).level is Level.L0


def test_an_l1_signature_may_be_hex_or_base64url() -> None:
    token = make_l1()
    mac = base64.urlsafe_b64decode(token["signature"] + "=")
    for spelling in (mac.hex(), token["signature"], token["signature"] + "="):
        assert verify({**token, "signature": spelling}).op_id == "op-1"


SIGNATURE_ROWS: dict[Reason, dict[str, Token]] = {
    Reason.BAD_SIGNATURE: {
        "wrong key, L0": make_l0(OTHER_KEY),
        "wrong key, L1": make_l1(OTHER_KEY),
        "known kid of another key": edited(make_l1(), kid=""),
        "algorithm swap to SHA-1": with_mac(make_l0(), "sha1"),
        "algorithm swap to SHA-512": with_mac(make_l1(), "sha512"),
        "algorithm swap to SHA-512, cut to length": {**make_l0(), "signature": with_mac(make_l0(), "sha512")["signature"][:64]},
        "algorithm none, named in the token": {**l1(alg="none"), "signature": ""},
        "plain hash instead of a MAC": {
            **make_l0(),
            "signature": hashlib.sha256(json.dumps(make_l0()["opToken"], sort_keys=True).encode()).hexdigest(),
        },
        "empty signature": {**make_l0(), "signature": ""},
        "signature cut short": {**make_l0(), "signature": make_l0()["signature"][:-2]},
        "signature with more behind it": {**make_l0(), "signature": make_l0()["signature"] + "00"},
        "signature not ASCII": {**make_l0(), "signature": "é" * 64},
        "signature in digits of another script": {**make_l0(), "signature": "٣" * 64},
        "non-canonical encoding: blanks in the hex": {**make_l0(), "signature": " ".join(make_l0()["signature"])},
        "non-canonical encoding: capitals in the hex": {**make_l0(), "signature": make_l0()["signature"].upper()},
        "non-canonical encoding: base64url at L0": {
            **make_l0(),
            "signature": base64.urlsafe_b64encode(bytes.fromhex(make_l0()["signature"])).decode(),
        },
        # The last of 43 characters carries four bits; the next letter differs in the two that carry nothing.
        "non-canonical encoding: unused bits set": {
            **make_l1(),
            "signature": make_l1()["signature"][:-1] + chr(ord(make_l1()["signature"][-1]) + 1),
        },
        "L1 claims signed by the rule of L0": {
            **make_l1(),
            "signature": hmac.new(KEY, json.dumps(make_l1()["opToken"], sort_keys=True).encode(), "sha256").hexdigest(),
        },
        "L1 token stripped down to L0": {
            **make_l1(),
            "opToken": {name: item for name, item in make_l1()["opToken"].items() if name in make_l0()["opToken"]},
        },
        "L1 token without its version": {
            **make_l1(),
            "opToken": {name: item for name, item in make_l1()["opToken"].items() if name != "v"},
        },
        "signature of another token": {**make_l0(), "signature": make_l0(nonce="another-nonce")["signature"]},
    },
    Reason.UNKNOWN_KEY: {
        "unknown kid": make_l1(kid="2031-01"),
        "unknown kid, edited into a signed token": edited(make_l1(), kid="2031-01"),
        "kid of another type": l1(kid=7),
        "kid left out": l1(kid=...),
    },
    Reason.BAD_FIELD: {"algorithm named in the token, well signed": l1(alg="HS256")},
    Reason.UNKNOWN_VERSION: {"version 2": l1(v=2), "version as text": l1(v="1")},
}


@pytest.mark.parametrize(("token", "reason"), by_outcome(SIGNATURE_ROWS))
def test_nobody_without_the_key_makes_a_token(token: Token, reason: Reason) -> None:
    assert reason_of(token) is reason


def test_a_retired_key_opens_nothing() -> None:
    rotated = make_verifier(Level.L1, keys={"2026-11": OTHER_KEY})
    assert reason_of(make_l1(), rotated) is Reason.UNKNOWN_KEY
    assert verify(make_l1(OTHER_KEY, kid="2026-11"), rotated).kid == "2026-11"


def test_two_keys_are_valid_while_one_replaces_the_other() -> None:
    both = make_verifier(Level.L1, keys={KID: KEY, "2026-11": OTHER_KEY})
    assert {verify(make_l1(), both).kid, verify(make_l1(OTHER_KEY, kid="2026-11"), both).kid} == {KID, "2026-11"}
    assert reason_of(make_l1(OTHER_KEY), both) is Reason.BAD_SIGNATURE


def test_l0_needs_the_one_key_without_a_name() -> None:
    assert reason_of(make_l0(), make_verifier(keys={KID: KEY})) is Reason.UNKNOWN_KEY


def test_an_l0_token_is_refused_at_an_l1_box_however_good_it_is() -> None:
    assert reason_of(make_l0(), make_verifier(Level.L1)) is Reason.LEVEL_TOO_LOW
    assert reason_of(l0(aud=BOX, exp=NOW + 300), make_verifier(Level.L1)) is Reason.LEVEL_TOO_LOW


def test_another_boxs_token_is_refused() -> None:
    assert reason_of(make_l1(audience="box-8")) is Reason.WRONG_AUDIENCE
    assert reason_of(make_l1(), make_verifier(runner_id="box-8")) is Reason.WRONG_AUDIENCE
    assert reason_of(make_l1(audience="BOX-7")) is Reason.WRONG_AUDIENCE
    assert reason_of(make_l1(audience="")) is Reason.BAD_FIELD


TIME_ROWS: dict[str, tuple[Token, float, Reason | None]] = {
    "L0 expired by one second": (make_l0(), NOW + 301, Reason.EXPIRED),
    "L0 expired by a moment": (make_l0(), NOW + 300.001, Reason.EXPIRED),
    "L0 in its last second": (make_l0(), NOW + 300, None),
    "L0 from the future by one second too many": (make_l0(), NOW - 301, Reason.NOT_YET_VALID),
    "L0 from the future within the allowance": (make_l0(), NOW - 300, None),
    "L1 expired by one second": (make_l1(), NOW + 301, Reason.EXPIRED),
    "L1 expired by a moment": (make_l1(), NOW + 300.001, Reason.EXPIRED),
    "L1 in its last second": (make_l1(), NOW + 300, None),
    "L1 expires earlier when it says so": (make_l1(expires_at=NOW + 10), NOW + 11, Reason.EXPIRED),
    "L1 in the last second of its own": (make_l1(expires_at=NOW + 10), NOW + 10, None),
    "L1 from the future by one second too many": (make_l1(), NOW - 61, Reason.NOT_YET_VALID),
    "L1 from the future within the allowance": (make_l1(), NOW - 60, None),
    "L1 that lives one second too long": (make_l1(expires_at=NOW + 301), NOW, Reason.LIFETIME_TOO_LONG),
    "L1 that lives for a year": (make_l1(expires_at=NOW + 31_536_000), NOW, Reason.LIFETIME_TOO_LONG),
    "L1 that ends before it begins": (make_l1(expires_at=NOW - 1), NOW - 2, Reason.BAD_FIELD),
}


@pytest.mark.parametrize(("token", "now", "reason"), TIME_ROWS.values(), ids=TIME_ROWS)
def test_a_token_is_valid_for_its_minutes_only(token: Token, now: float, reason: Reason | None) -> None:
    if reason is None:
        assert verify(token, now=now).nonce
    else:
        assert reason_of(token, now=now) is reason


@pytest.mark.parametrize("token", [make_l0(), make_l1()], ids=["L0", "L1"])
def test_what_was_issued_before_the_memory_begins_is_refused(token: Token) -> None:
    assert reason_of(token, make_verifier(not_before=NOW + 1), now=NOW + 2) is Reason.BEFORE_LEDGER
    assert verify(token, make_verifier(not_before=NOW), now=NOW + 2).nonce


def changed(**members: object) -> dict[str, object]:
    return {name: value for name, value in {**PARAMS, **members}.items() if value is not ...}


BODY_ROWS: dict[str, dict[str, object]] = {
    "changed evictModel": changed(evictModel="the-model-everybody-uses"),
    "evictModel added to none": {**changed(), "evictModels": ["x"]}, "evictModel left out": changed(evictModel=...),
    "evictModel null": changed(evictModel=None), "changed quantization": changed(quantization="fp16"),
    "changed maxContextLength": changed(maxContextLength=32769), "number as text": changed(maxContextLength="32768"),
    "number as a truth value": changed(overrides={"target_inflight": True, "flags": ["a", "b"]}),
    "changed override": changed(overrides={"target_inflight": 5, "flags": ["a", "b"]}),
    "changed order in a list": changed(overrides={"target_inflight": 4, "flags": ["b", "a"]}),
    "one member more": changed(force=True), "one member less": changed(overrides=...), "no body at all": {},
    "another model beside the same modelId": changed(modelid="x"),
}  # fmt: skip


@pytest.mark.parametrize("params", BODY_ROWS.values(), ids=BODY_ROWS)
def test_the_body_is_the_one_that_was_approved(params: dict[str, object]) -> None:
    assert reason_of(make_l1(), params=params) is Reason.WRONG_PARAMS


def test_the_order_of_members_and_the_token_itself_do_not_matter_to_the_body() -> None:
    token = make_l1()
    assert verify(token, params={**dict(reversed(PARAMS.items())), "tag": None, "verifiedOpToken": token}).op_id == "op-1"


@pytest.mark.parametrize(
    "params",
    [
        {**FLUSH_PARAMS, "scope": "all"},
        {**FLUSH_PARAMS, "tenantId": "community-y"},
        {"scope": "all"},
        {**FLUSH_PARAMS, "tag": "session"},
    ],
    ids=["changed scope", "changed tenantId", "tenantId left out", "tag added"],
)
def test_a_flush_is_the_one_that_was_approved(params: dict[str, object]) -> None:
    grant = make_grant(operation=Operation.CACHE_FLUSH, model_id=None)
    token = make_l1(grant=grant, params_digest=params_digest(FLUSH_PARAMS))
    request: dict[str, Any] = {"operation": Operation.CACHE_FLUSH, "model_id": None}
    assert verify(token, params=FLUSH_PARAMS, **request).op_id == "op-1"
    assert reason_of(token, params=params, **request) is Reason.WRONG_PARAMS


def test_a_parameter_without_canonical_form_is_refused_by_name() -> None:
    assert reason_of(make_l1(), params={**PARAMS, "fraction": 0.5}) is Reason.UNSIGNABLE_PARAMS


def test_l0_does_not_cover_parameters_which_is_why_there_is_an_l1() -> None:
    assert verify(make_l0(), params=changed(evictModel="the-model-everybody-uses")).level is Level.L0


@pytest.mark.parametrize("token", [make_l0(), make_l1()], ids=["L0", "L1"])
@pytest.mark.parametrize("operation", [Operation.MODEL_UNLOAD, Operation.CACHE_FLUSH, Operation.SETTINGS_RELOAD])
def test_a_token_permits_its_operation_only(token: Token, operation: Operation) -> None:
    assert reason_of(token, operation=operation) is Reason.WRONG_OPERATION


@pytest.mark.parametrize("make", [l0, l1], ids=["L0", "L1"])
@pytest.mark.parametrize("model_id", ["*", "", "meta-llama/*", MODEL.lower(), MODEL + " ", "other", ...], ids=repr)
def test_a_token_permits_its_model_only_and_knows_no_wildcard(make: Any, model_id: Any) -> None:
    assert reason_of(make(modelId=model_id)) is Reason.WRONG_MODEL


@pytest.mark.parametrize("make", [l0, l1], ids=["L0", "L1"])
@pytest.mark.parametrize("operation", [Operation.MODEL_LOAD, Operation.MODEL_UNLOAD])
def test_a_token_without_a_model_neither_loads_nor_unloads(make: Any, operation: Operation) -> None:
    token = make(operation=operation.value, modelId=...)
    assert reason_of(token, operation=operation, model_id=None) is Reason.WRONG_MODEL
    assert reason_of(token, operation=operation, model_id="") is Reason.WRONG_MODEL


@pytest.mark.parametrize("make", [l0, l1], ids=["L0", "L1"])
def test_a_reload_of_the_settings_is_of_no_model_and_its_token_for_nothing_else(make: Any) -> None:
    reload: dict[str, Any] = {"operation": Operation.SETTINGS_RELOAD, "model_id": None}
    token = make(operation="settings-reload", modelId=..., paramsDigest=params_digest({}) if make is l1 else ...)
    assert verify(token, **reload, params={}).signers
    assert reason_of(token, **{**reload, "operation": Operation.CACHE_FLUSH}, params={}) is Reason.WRONG_OPERATION
    for model_id in (MODEL, "*", ""):
        assert reason_of(make(operation="settings-reload", modelId=model_id), **reload, params={}) is Reason.WRONG_MODEL
        assert reason_of(token, operation=Operation.SETTINGS_RELOAD, model_id=model_id, params={}) is Reason.WRONG_MODEL
        named = make(operation="settings-reload", modelId=model_id)
        assert reason_of(named, operation=Operation.SETTINGS_RELOAD, model_id=model_id) is Reason.WRONG_MODEL


@pytest.mark.parametrize("model_id", [None, ...], ids=["null", "left out"])
def test_an_l0_flush_without_a_model_permits_only_a_flush_without_a_model(model_id: Any) -> None:
    token = l0(operation="cache-flush", modelId=model_id)
    assert verify(token, operation=Operation.CACHE_FLUSH, model_id=None).level is Level.L0
    assert reason_of(token, operation=Operation.CACHE_FLUSH, model_id=MODEL) is Reason.WRONG_MODEL


@pytest.mark.parametrize("model_id", [MODEL, "*", ""])
def test_a_flush_without_a_model_needs_a_token_without_one(model_id: str) -> None:
    token = l0(operation="cache-flush", modelId=model_id)
    assert reason_of(token, operation=Operation.CACHE_FLUSH, model_id=None) is Reason.WRONG_MODEL


def test_l1_leaves_a_model_out_and_never_says_null() -> None:
    token = l1(operation="cache-flush", modelId=None)
    assert reason_of(token, operation=Operation.CACHE_FLUSH, model_id=None) is Reason.BAD_FIELD


SIGNER_ROWS: dict[Reason, dict[str, object]] = {
    Reason.TOO_FEW_SIGNERS: {
        "one of two": ["admin1"],
        "nobody": [],
        "one twice": ["admin1", "admin1"],
        "one twice with blanks": ["admin1", " admin1", "admin1\t"],
    },
    Reason.BAD_FIELD: {
        "an empty name": ["admin1", ""], "a blank name": ["admin1", "admin2", " \n"], "a text": "admin1,admin2", "a number": 2,
        "left out": ..., "a crowd": [f"admin{number}" for number in range(65)], "an endless name": ["admin1", "a" * 201],
    },
}  # fmt: skip


@pytest.mark.parametrize("make", [l0, l1], ids=["L0", "L1"])
@pytest.mark.parametrize(("signers", "reason"), by_outcome(SIGNER_ROWS))
def test_distinct_signers_are_counted(make: Any, signers: object, reason: Reason) -> None:
    assert reason_of(make(signers=signers)) is reason


def test_the_box_says_how_many_signers_it_needs() -> None:
    three = make_verifier(min_signers=3)
    assert reason_of(make_l0(), three) is Reason.TOO_FEW_SIGNERS
    assert verify(make_l0(signers=["a", "b ", "c", "a"]), three).signers == ("a", "b", "c")
    assert verify(make_l0(signers=["a"]), make_verifier(min_signers=1)).signers == ("a",)


FIELD_ROWS: dict[str, Token] = {
    "L0 nonce left out": l0(nonce=...), "L0 nonce too short to be one": l0(nonce="1234567"),
    "L0 nonce endless": l0(nonce="1" * 201), "L0 nonce a number": l0(nonce=12345678), "L0 issuedAt left out": l0(issuedAt=...),
    "L0 issuedAt as text": l0(issuedAt=str(NOW)), "L0 issuedAt negative": l0(issuedAt=-1),
    "L0 operation left out": l0(operation=...), "L0 operation in a list": l0(operation=["model-load"]),
    "L1 aud left out": l1(aud=...), "L1 aud a list": l1(aud=[BOX]), "L1 exp left out": l1(exp=...),
    "L1 exp as text": l1(exp=str(NOW + 300)), "L1 opId left out": l1(opId=...), "L1 opId empty": l1(opId=""),
    "L1 fence left out": l1(fence=...), "L1 fence zero": l1(fence=0), "L1 fence as text": l1(fence="7"),
    "L1 paramsDigest left out": l1(paramsDigest=...), "L1 paramsDigest empty": l1(paramsDigest=""),
    "L1 nonce left out": l1(nonce=...), "L1 issuedAt left out": l1(issuedAt=...), "L1 signers left out": l1(signers=...),
    "L1 operation left out": l1(operation=...), "L1 with a member nobody knows": l1(scope="all"),
}  # fmt: skip


@pytest.mark.parametrize("token", FIELD_ROWS.values(), ids=FIELD_ROWS)
def test_every_claim_is_there_and_of_its_type(token: Token) -> None:
    assert reason_of(token) is Reason.BAD_FIELD


@pytest.mark.parametrize(
    "digest", [params_digest(PARAMS).upper(), params_digest(PARAMS)[:-1], params_digest(PARAMS) + "0", "ä"]
)
def test_a_digest_has_one_spelling(digest: str) -> None:
    assert reason_of(l1(paramsDigest=digest)) is Reason.WRONG_PARAMS


def test_a_statement_digest_and_a_checkpoint_may_come_along() -> None:
    assert verify(make_l1(statement_digest="ab" * 32, checkpoint="origin\n7\nroot")).level is Level.L1


def test_a_refusal_shows_nothing_of_the_token() -> None:
    for token in (make_l0(OTHER_KEY), make_l1(audience="box-8"), make_l0(signers=["only-me"])):
        with pytest.raises(OpTokenError) as caught:
            verify(token)
        assert str(caught.value) == caught.value.reason.value
    assert KEY.decode() not in repr(make_verifier())


@pytest.mark.parametrize(
    "rules", [{"min_signers": 0}, {"runner_id": ""}, {"keys": {"": b"x" * 15}}, {"keys": {"": b""}}], ids=repr
)
def test_rules_that_would_accept_anything_are_no_rules(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"signer|id|key"):
        make_verifier(**rules)


def test_a_box_without_keys_accepts_nothing() -> None:
    assert reason_of(make_l0(), make_verifier(keys={})) is Reason.UNKNOWN_KEY


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

ISSUER_ROWS: dict[Reason, dict[str, Token]] = {
    Reason.BAD_SIGNATURE: {
        "wrong key": make_l2(OTHER_KEY),
        "HMAC with the bytes of a public key": make_l2(ADA.passkey.public_key),
        "algorithm swap": {**make_l2(), "signature": encode_bytes(hmac.digest(KEY, b"{}", "sha512"))},
    },
    Reason.UNKNOWN_KEY: {"unknown kid": make_l2(kid="2031-01")},
    Reason.WRONG_AUDIENCE: {"other runner's token": make_l2(audience="box-9")},
    Reason.EXPIRED: {"expired": make_l2(expires_at=NOW - 1, grant=make_grant(issued_at=NOW - 300))},
    Reason.NOT_YET_VALID: {"from the future": make_l2(grant=make_grant(issued_at=NOW + 61))},
    Reason.LIFETIME_TOO_LONG: {"lives too long": make_l2(expires_at=NOW + 301)},
    Reason.BAD_FIELD: {
        "without the digest of its statement": reclaimed(make_l2(), stmtDigest=...),
        "use 0": reclaimed(make_l2(), use=0),
        "use as text": reclaimed(make_l2(), use="1"),
        "no proofs at all": {name: item for name, item in make_l2().items() if name != "proofs"},
        "proofs that are no list": {**make_l2(), "proofs": {"0": PROOFS[0]}},
        "something unsigned beside": {**make_l2(), "note": "hello"},
    },
    Reason.WRONG_STATEMENT: {
        "digest of another statement": reclaimed(make_l2(), stmtDigest="ab" * 32),
        "digest in capitals": reclaimed(make_l2(), stmtDigest=STATEMENT.digest.hex().upper()),
        "digest not ASCII": reclaimed(make_l2(), stmtDigest="ä" * 64),
        "another approval's id": reclaimed(make_l2(), opId="op-2"),
    },
    Reason.UNKNOWN_VERSION: {"stale version of the format": reclaimed(make_l2(), v=2)},
    Reason.TOO_LARGE: {"a token of a megabyte": {**make_l2(), "proofs": ["A" * 1_000_000]}},
}


@pytest.mark.parametrize(("token", "reason"), by_outcome(ISSUER_ROWS))
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


def test_an_approved_flush_is_the_one_that_people_signed() -> None:
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


def test_m_minus_one_proofs_are_too_few() -> None:
    assert rule_of(make_l2(proofs=PROOFS[:1])) == Rule.TOO_FEW_APPROVERS
    assert rule_of(make_l2(proofs=[])) == Rule.TOO_FEW_APPROVERS


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
