"""Every way in which a token can be wrong at L0 and L1, one case each. Statements and proofs are in test_optoken_l2.py and
test_approval_*.py, what needs memory is in test_gate.py.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest

from tests.fakes.signed_tokens import (
    BOX,
    FLUSH_PARAMS,
    KEY,
    KID,
    MODEL,
    NOW,
    OTHER_KEY,
    PARAMS,
    Token,
    make_grant,
    make_l0,
    make_l1,
    make_verifier,
    sign_claims,
    verify,
)
from wire.optoken import Level, Operation, OpTokenError, Reason, Verifier, params_digest


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


SIGNATURE_ROWS: dict[str, tuple[Token, Reason]] = {
    "wrong key, L0": (make_l0(OTHER_KEY), Reason.BAD_SIGNATURE),
    "wrong key, L1": (make_l1(OTHER_KEY), Reason.BAD_SIGNATURE),
    "unknown kid": (make_l1(kid="2031-01"), Reason.UNKNOWN_KEY),
    "unknown kid, edited into a signed token": (edited(make_l1(), kid="2031-01"), Reason.UNKNOWN_KEY),
    "known kid of another key": (edited(make_l1(), kid=""), Reason.BAD_SIGNATURE),
    "kid of another type": (l1(kid=7), Reason.UNKNOWN_KEY),
    "kid left out": (l1(kid=...), Reason.UNKNOWN_KEY),
    "algorithm swap to SHA-1": (with_mac(make_l0(), "sha1"), Reason.BAD_SIGNATURE),
    "algorithm swap to SHA-512": (with_mac(make_l1(), "sha512"), Reason.BAD_SIGNATURE),
    "algorithm swap to SHA-512, cut to length": (
        {**make_l0(), "signature": with_mac(make_l0(), "sha512")["signature"][:64]},
        Reason.BAD_SIGNATURE,
    ),
    "algorithm none, named in the token": ({**l1(alg="none"), "signature": ""}, Reason.BAD_SIGNATURE),
    "algorithm named in the token, well signed": (l1(alg="HS256"), Reason.BAD_FIELD),
    "plain hash instead of a MAC": (
        {**make_l0(), "signature": hashlib.sha256(json.dumps(make_l0()["opToken"], sort_keys=True).encode()).hexdigest()},
        Reason.BAD_SIGNATURE,
    ),
    "empty signature": ({**make_l0(), "signature": ""}, Reason.BAD_SIGNATURE),
    "signature cut short": ({**make_l0(), "signature": make_l0()["signature"][:-2]}, Reason.BAD_SIGNATURE),
    "signature with more behind it": ({**make_l0(), "signature": make_l0()["signature"] + "00"}, Reason.BAD_SIGNATURE),
    "signature not ASCII": ({**make_l0(), "signature": "é" * 64}, Reason.BAD_SIGNATURE),
    "signature in digits of another script": ({**make_l0(), "signature": "٣" * 64}, Reason.BAD_SIGNATURE),
    "non-canonical encoding: blanks in the hex": (
        {**make_l0(), "signature": " ".join(make_l0()["signature"])},
        Reason.BAD_SIGNATURE,
    ),
    "non-canonical encoding: capitals in the hex": (
        {**make_l0(), "signature": make_l0()["signature"].upper()},
        Reason.BAD_SIGNATURE,
    ),
    "non-canonical encoding: base64url at L0": (
        {**make_l0(), "signature": base64.urlsafe_b64encode(bytes.fromhex(make_l0()["signature"])).decode()},
        Reason.BAD_SIGNATURE,
    ),
    "non-canonical encoding: unused bits set": (
        # The last of 43 characters carries four bits; the next letter differs in the two that carry nothing.
        {**make_l1(), "signature": make_l1()["signature"][:-1] + chr(ord(make_l1()["signature"][-1]) + 1)},
        Reason.BAD_SIGNATURE,
    ),
    "L1 claims signed by the rule of L0": (
        {
            **make_l1(),
            "signature": hmac.new(KEY, json.dumps(make_l1()["opToken"], sort_keys=True).encode(), "sha256").hexdigest(),
        },
        Reason.BAD_SIGNATURE,
    ),
    "L1 token stripped down to L0": (
        {**make_l1(), "opToken": {name: item for name, item in make_l1()["opToken"].items() if name in make_l0()["opToken"]}},
        Reason.BAD_SIGNATURE,
    ),
    "L1 token without its version": (
        {**make_l1(), "opToken": {name: item for name, item in make_l1()["opToken"].items() if name != "v"}},
        Reason.BAD_SIGNATURE,
    ),
    "signature of another token": (
        {**make_l0(), "signature": make_l0(nonce="another-nonce")["signature"]},
        Reason.BAD_SIGNATURE,
    ),
    "version 2": (l1(v=2), Reason.UNKNOWN_VERSION),
    "version as text": (l1(v="1"), Reason.UNKNOWN_VERSION),
}


@pytest.mark.parametrize(("token", "reason"), SIGNATURE_ROWS.values(), ids=SIGNATURE_ROWS)
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
    "evictModel added to none": {**changed(), "evictModels": ["x"]},
    "evictModel left out": changed(evictModel=...),
    "evictModel null": changed(evictModel=None),
    "changed quantization": changed(quantization="fp16"),
    "changed maxContextLength": changed(maxContextLength=32769),
    "number as text": changed(maxContextLength="32768"),
    "number as a truth value": changed(overrides={"target_inflight": True, "flags": ["a", "b"]}),
    "changed override": changed(overrides={"target_inflight": 5, "flags": ["a", "b"]}),
    "changed order in a list": changed(overrides={"target_inflight": 4, "flags": ["b", "a"]}),
    "one member more": changed(force=True),
    "one member less": changed(overrides=...),
    "no body at all": {},
    "another model beside the same modelId": changed(modelid="x"),
}


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


SIGNER_ROWS: dict[str, tuple[object, Reason]] = {
    "one of two": (["admin1"], Reason.TOO_FEW_SIGNERS),
    "nobody": ([], Reason.TOO_FEW_SIGNERS),
    "one twice": (["admin1", "admin1"], Reason.TOO_FEW_SIGNERS),
    "one twice with blanks": (["admin1", " admin1", "admin1\t"], Reason.TOO_FEW_SIGNERS),
    "an empty name": (["admin1", ""], Reason.BAD_FIELD),
    "a blank name": (["admin1", "admin2", " \n"], Reason.BAD_FIELD),
    "a text": ("admin1,admin2", Reason.BAD_FIELD),
    "a number": (2, Reason.BAD_FIELD),
    "left out": (..., Reason.BAD_FIELD),
    "a crowd": ([f"admin{number}" for number in range(65)], Reason.BAD_FIELD),
    "an endless name": (["admin1", "a" * 201], Reason.BAD_FIELD),
}


@pytest.mark.parametrize("make", [l0, l1], ids=["L0", "L1"])
@pytest.mark.parametrize(("signers", "reason"), SIGNER_ROWS.values(), ids=SIGNER_ROWS)
def test_distinct_signers_are_counted(make: Any, signers: object, reason: Reason) -> None:
    assert reason_of(make(signers=signers)) is reason


def test_the_box_says_how_many_signers_it_needs() -> None:
    three = make_verifier(min_signers=3)
    assert reason_of(make_l0(), three) is Reason.TOO_FEW_SIGNERS
    assert verify(make_l0(signers=["a", "b ", "c", "a"]), three).signers == ("a", "b", "c")
    assert verify(make_l0(signers=["a"]), make_verifier(min_signers=1)).signers == ("a",)


FIELD_ROWS: dict[str, Token] = {
    "L0 nonce left out": l0(nonce=...),
    "L0 nonce too short to be one": l0(nonce="1234567"),
    "L0 nonce endless": l0(nonce="1" * 201),
    "L0 nonce a number": l0(nonce=12345678),
    "L0 issuedAt left out": l0(issuedAt=...),
    "L0 issuedAt as text": l0(issuedAt=str(NOW)),
    "L0 issuedAt negative": l0(issuedAt=-1),
    "L0 operation left out": l0(operation=...),
    "L0 operation in a list": l0(operation=["model-load"]),
    "L1 aud left out": l1(aud=...),
    "L1 aud a list": l1(aud=[BOX]),
    "L1 exp left out": l1(exp=...),
    "L1 exp as text": l1(exp=str(NOW + 300)),
    "L1 opId left out": l1(opId=...),
    "L1 opId empty": l1(opId=""),
    "L1 fence left out": l1(fence=...),
    "L1 fence zero": l1(fence=0),
    "L1 fence as text": l1(fence="7"),
    "L1 paramsDigest left out": l1(paramsDigest=...),
    "L1 paramsDigest empty": l1(paramsDigest=""),
    "L1 nonce left out": l1(nonce=...),
    "L1 issuedAt left out": l1(issuedAt=...),
    "L1 signers left out": l1(signers=...),
    "L1 operation left out": l1(operation=...),
    "L1 with a member nobody knows": l1(scope="all"),
}


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
