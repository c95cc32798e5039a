"""Every way in which a token can be wrong at L0, L1 and L2, one row each.

Proofs of people are in test_approvals.py, what needs memory is in tests/unit/runner/test_gate.py.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes.policies import (
    Person,
    approve,
    edit_statement,
    make_people,
    make_policy,
    make_policy_bytes,
    make_statement,
)
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
    by_outcome,
    make_grant,
    make_l0,
    make_l1,
    make_l2,
    make_verifier,
    sign_claims,
    verify,
)
from wire.optoken.approval import Policy, Rule, Statement, encode_bytes
from wire.optoken.op_token import OpTokenError, Reason, params_digest
from wire.optoken.verifier import Level, Operation, Verifier

ADA, BOB = PEOPLE[:2]
L2 = make_verifier(Level.L2)


def refusal(token: object, verifier: Verifier | None = None, **request: Any) -> str:
    with pytest.raises(OpTokenError) as caught:
        verify(token, verifier, **request)
    assert (caught.value.reason is Reason.NOT_APPROVED) == bool(caught.value.rule)
    return caught.value.rule or caught.value.reason


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
    return {**token, "opToken": {**token["opToken"], **changes}}


def with_mac(token: Token, algorithm: str) -> Token:
    claims = token["opToken"]
    compact = "v" in claims
    text = json.dumps(claims, sort_keys=True, separators=(",", ":") if compact else None)
    return {**token, "signature": hmac.new(KEY, text.encode(), algorithm).hexdigest()}


def test_a_valid_token_proves_what_it_says() -> None:
    verified = verify(make_l0())
    assert (verified.level, verified.kid, verified.nonce) == (Level.L0, "", "0123456789abcdef")
    assert (verified.op_id, verified.fence, verified.max_uses) == (None, None, 1)
    assert (verified.signers, verified.expires_at) == (("admin1", "admin2"), NOW + 300)
    for level in (Level.L0, Level.L1):
        verified = verify(make_l1(expires_at=NOW + 120), make_verifier(level))
        assert (verified.level, verified.kid, verified.op_id, verified.fence) == (Level.L1, KID, "op-1", 7)
        assert (verified.expires_at, verified.max_uses) == (NOW + 120, 1)
    # As foreign issuers make one, with more than the specification has, and either spelling of a signature.
    claims = {"operation": "model-load", "modelId": MODEL, "issuedAt": NOW, "signers": ["ä", "b"], "nonce": "abc12345"}
    signature = hmac.new(KEY, json.dumps(claims, sort_keys=True).encode(), hashlib.sha256).hexdigest()
    assert verify(json.dumps({"opToken": claims, "signature": signature})).signers == ("ä", "b")
    assert verify(l0(container="vllm-0", priority=3)).level is Level.L0
    token = make_l1()
    mac = base64.urlsafe_b64decode(token["signature"] + "=")
    for spelling in (mac.hex(), token["signature"], token["signature"] + "="):
        assert verify({**token, "signature": spelling}).op_id == "op-1"


SIGNATURE_ROWS: dict[Reason, dict[str, Token]] = {
    Reason.BAD_SIGNATURE: {"wrong key, L0": make_l0(OTHER_KEY), "wrong key, L1": make_l1(OTHER_KEY),
        "known kid of another key": edited(make_l1(), kid=""), "algorithm swap to SHA-1": with_mac(make_l0(), "sha1"),
        "algorithm swap to SHA-512": with_mac(make_l1(), "sha512"), "algorithm swap to SHA-512, cut to length": {**make_l0(),
            "signature": with_mac(make_l0(), "sha512")["signature"][:64]},
        "algorithm none, named in the token": {**l1(alg="none"), "signature": ""}, "plain hash instead of a MAC": {**make_l0(),
            "signature": hashlib.sha256(json.dumps(make_l0()["opToken"], sort_keys=True).encode()).hexdigest()},
        "empty signature": {**make_l0(), "signature": ""}, "signature cut short": {**make_l0(),
            "signature": make_l0()["signature"][:-2]}, "signature with more behind it": {**make_l0(),
            "signature": make_l0()["signature"] + "00"}, "signature not ASCII": {**make_l0(), "signature": "é" * 64},
        "signature in digits of another script": {**make_l0(), "signature": "٣" * 64},
        "non-canonical encoding: blanks in the hex": {**make_l0(), "signature": " ".join(make_l0()["signature"])},
        "non-canonical encoding: capitals in the hex": {**make_l0(), "signature": make_l0()["signature"].upper()},
        "non-canonical encoding: base64url at L0": {**make_l0(),
            "signature": base64.urlsafe_b64encode(bytes.fromhex(make_l0()["signature"])).decode()},
        "non-canonical encoding: unused bits set": {**make_l1(),
            "signature": make_l1()["signature"][:-1] + chr(ord(make_l1()["signature"][-1]) + 1)},
        "L1 claims signed by the rule of L0": {**make_l1(), "signature": hmac.new(KEY, json.dumps(make_l1()["opToken"],
            sort_keys=True).encode(), "sha256").hexdigest()}, "L1 token stripped down to L0": {**make_l1(),
            "opToken": {name: item for name, item in make_l1()["opToken"].items() if name in make_l0()["opToken"]}},
        "L1 token without its version": {**make_l1(), "opToken": {name: item for name,
            item in make_l1()["opToken"].items() if name != "v"}}, "signature of another token": {**make_l0(),
            "signature": make_l0(nonce="another-nonce")["signature"]}},
    Reason.UNKNOWN_KEY: {"unknown kid": make_l1(kid="2031-01"), "unknown kid, edited into a signed token": edited(make_l1(),
            kid="2031-01"), "kid of another type": l1(kid=7), "kid left out": l1(kid=...)},
    Reason.BAD_FIELD: {"algorithm named in the token, well signed": l1(alg="HS256")},
    Reason.UNKNOWN_VERSION: {"version 2": l1(v=2), "version as text": l1(v="1")},
}  # fmt: skip


@pytest.mark.parametrize(("token", "reason"), by_outcome(SIGNATURE_ROWS))
def test_nobody_without_the_key_makes_a_token(token: Token, reason: Reason) -> None:
    assert refusal(token) is reason


def test_two_keys_are_valid_while_one_replaces_the_other_and_a_retired_one_opens_nothing() -> None:
    both, rotated = (make_verifier(Level.L1, keys={**old, "2026-11": OTHER_KEY}) for old in ({KID: KEY}, {}))
    assert verify(make_l1(), both).kid == KID
    assert [verify(make_l1(OTHER_KEY, kid="2026-11"), box).kid for box in (both, rotated)] == ["2026-11"] * 2
    assert (refusal(make_l1(OTHER_KEY), both), refusal(make_l1(), rotated)) == (Reason.BAD_SIGNATURE, Reason.UNKNOWN_KEY)


FLUSH, UNLOAD, RELOAD = Operation.CACHE_FLUSH, Operation.MODEL_UNLOAD, Operation.SETTINGS_RELOAD
BOX_ROWS: dict[str, tuple[Token, Verifier | None, dict[str, Any], Reason]] = {
    "L0 where the one key has a name": (make_l0(), make_verifier(keys={KID: KEY}), {}, Reason.UNKNOWN_KEY),
    "L0 at a node without keys": (make_l0(), make_verifier(keys={}), {}, Reason.UNKNOWN_KEY),
    "L0 at an L1 node": (make_l0(), make_verifier(Level.L1), {}, Reason.LEVEL_TOO_LOW),
    "L0 with members of L1 at an L1 node": (l0(aud=BOX, exp=NOW + 300), make_verifier(Level.L1), {}, Reason.LEVEL_TOO_LOW),
    "for another node": (make_l1(audience="box-8"), None, {}, Reason.WRONG_AUDIENCE),
    "shown to another node": (make_l1(), make_verifier(runner_id="box-8"), {}, Reason.WRONG_AUDIENCE),
    "for the node in capitals": (make_l1(audience="BOX-7"), None, {}, Reason.WRONG_AUDIENCE),
    "for no node": (make_l1(audience=""), None, {}, Reason.BAD_FIELD),
    "L0 from before the memory begins": (make_l0(), make_verifier(not_before=NOW + 1), {"now": NOW + 2}, Reason.BEFORE_LEDGER),
    "L1 from before the memory begins": (make_l1(), make_verifier(not_before=NOW + 1), {"now": NOW + 2}, Reason.BEFORE_LEDGER),
    "a parameter without canonical form": (make_l1(), None, {"params": {**PARAMS, "part": 0.5}}, Reason.UNSIGNABLE_PARAMS),
    "L1 that says null for no model": (l1(operation=FLUSH.value, modelId=None), None, {"operation": FLUSH, "model_id": None},
        Reason.BAD_FIELD),
    "two signers where three are needed": (make_l0(), make_verifier(min_signers=3), {}, Reason.TOO_FEW_SIGNERS),
    "digest in capitals": (l1(paramsDigest=params_digest(PARAMS).upper()), None, {}, Reason.WRONG_PARAMS),
    "digest cut short": (l1(paramsDigest=params_digest(PARAMS)[:-1]), None, {}, Reason.WRONG_PARAMS),
    "digest with more behind it": (l1(paramsDigest=params_digest(PARAMS) + "0"), None, {}, Reason.WRONG_PARAMS),
    "digest not ASCII": (l1(paramsDigest="ä"), None, {}, Reason.WRONG_PARAMS),
    **{f"{level} for {other.value}": (token, None, {"operation": other}, Reason.WRONG_OPERATION) for level, token in (("L0",
            make_l0()), ("L1", make_l1())) for other in (UNLOAD, FLUSH, RELOAD)},
    **{f"{level} for the model {model!r}": (make(modelId=model), None, {}, Reason.WRONG_MODEL) for level, make in (("L0", l0),
            ("L1", l1)) for model in ("*", "", "meta-llama/*", MODEL.lower(), MODEL + " ", "other", ...)},
    **{f"{level} without a model for {of.value} of {model!r}": (make(operation=of.value, modelId=...), None, {"operation": of,
            "model_id": model}, Reason.WRONG_MODEL) for level, make in (("L0", l0), ("L1", l1)) for of in (Operation.MODEL_LOAD,
            UNLOAD) for model in (None, "")},
    **{f"L0 flush of {model!r} for none": (l0(operation=FLUSH.value, modelId=model), None, {"operation": FLUSH,
            "model_id": None}, Reason.WRONG_MODEL) for model in (MODEL, "*", "")},
    **{f"L0 flush of {model!r} for one": (l0(operation=FLUSH.value, modelId=model), None, {"operation": FLUSH,
            "model_id": MODEL}, Reason.WRONG_MODEL) for model in (None, ...)},
}  # fmt: skip


@pytest.mark.parametrize(("token", "box", "request_", "reason"), BOX_ROWS.values(), ids=BOX_ROWS)
def test_a_token_is_for_its_box_its_operation_and_its_model(
    token: Token, box: Verifier | None, request_: dict[str, Any], reason: Reason
) -> None:
    assert refusal(token, box, **request_) is reason


def test_what_differs_in_nothing_that_counts_is_taken() -> None:
    token = make_l1()
    assert verify(token, params={**dict(reversed(PARAMS.items())), "tag": None, "verifiedOpToken": token}).op_id == "op-1"
    assert verify(make_l0(), params=changed(evictModel="the-model-everybody-uses")).level is Level.L0, "why there is an L1"
    for model_id in (None, ...):
        assert verify(l0(operation=FLUSH.value, modelId=model_id), operation=FLUSH, model_id=None).level is Level.L0
    for old in (make_l0(), make_l1()):
        assert verify(old, make_verifier(not_before=NOW), now=NOW + 2).nonce
    assert verify(make_l0(signers=["a", "b ", "c", "a"]), make_verifier(min_signers=3)).signers == ("a", "b", "c")
    assert verify(make_l0(signers=["a"]), make_verifier(min_signers=1)).signers == ("a",)
    assert verify(make_l1(statement_digest="ab" * 32, checkpoint="origin\n7\nroot")).level is Level.L1


TIME_ROWS: dict[str, tuple[Token, float, Reason | None]] = {
    "L0 expired by one second": (make_l0(), NOW + 301, Reason.EXPIRED),
    "L0 expired by a moment": (make_l0(), NOW + 300.001, Reason.EXPIRED), "L0 in its last second": (make_l0(), NOW + 300, None),
    "L0 from the future by one second too many": (make_l0(), NOW - 301, Reason.NOT_YET_VALID),
    "L0 from the future within the allowance": (make_l0(), NOW - 300, None),
    "L1 expired by one second": (make_l1(), NOW + 301, Reason.EXPIRED),
    "L1 expired by a moment": (make_l1(), NOW + 300.001, Reason.EXPIRED), "L1 in its last second": (make_l1(), NOW + 300, None),
    "L1 expires earlier when it says so": (make_l1(expires_at=NOW + 10), NOW + 11, Reason.EXPIRED),
    "L1 in the last second of its own": (make_l1(expires_at=NOW + 10), NOW + 10, None),
    "L1 from the future by one second too many": (make_l1(), NOW - 61, Reason.NOT_YET_VALID),
    "L1 from the future within the allowance": (make_l1(), NOW - 60, None),
    "L1 that lives one second too long": (make_l1(expires_at=NOW + 301), NOW, Reason.LIFETIME_TOO_LONG),
    "L1 that lives for a year": (make_l1(expires_at=NOW + 31_536_000), NOW, Reason.LIFETIME_TOO_LONG),
    "L1 that ends before it begins": (make_l1(expires_at=NOW - 1), NOW - 2, Reason.BAD_FIELD),
}  # fmt: skip


@pytest.mark.parametrize(("token", "now", "reason"), TIME_ROWS.values(), ids=TIME_ROWS)
def test_a_token_is_valid_for_its_minutes_only(token: Token, now: float, reason: Reason | None) -> None:
    if reason is None:
        assert verify(token, now=now).nonce
    else:
        assert refusal(token, now=now) is reason


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
def test_the_body_is_the_one_that_was_approved_even_where_the_issuer_says_otherwise(params: dict[str, object]) -> None:
    assert refusal(make_l1(), params=params) is Reason.WRONG_PARAMS
    assert refusal(make_l2(), L2, params=params) is Reason.WRONG_PARAMS
    if params:  # what names no model is refused as that before
        assert refusal(make_l2(params_digest=params_digest(params)), L2, params=params) is Reason.WRONG_PARAMS


def test_a_flush_is_the_one_that_was_approved() -> None:
    grant = make_grant(operation=FLUSH, model_id=None)
    token = make_l1(grant=grant, params_digest=params_digest(FLUSH_PARAMS))
    request: dict[str, Any] = {"operation": FLUSH, "model_id": None}
    assert verify(token, params=FLUSH_PARAMS, **request).op_id == "op-1"
    for changes in ({"scope": "all"}, {"tenantId": "community-y"}, {"tenantId": ...}, {"tag": "session"}):
        params = {name: value for name, value in {**FLUSH_PARAMS, **changes}.items() if value is not ...}
        assert refusal(token, params=params, **request) is Reason.WRONG_PARAMS, changes


@pytest.mark.parametrize("make", [l0, l1], ids=["L0", "L1"])
def test_a_reload_of_the_settings_is_of_no_model_and_its_token_for_nothing_else(make: Any) -> None:
    reload: dict[str, Any] = {"operation": Operation.SETTINGS_RELOAD, "model_id": None}
    token = make(operation="settings-reload", modelId=..., paramsDigest=params_digest({}) if make is l1 else ...)
    assert verify(token, **reload, params={}).signers
    assert refusal(token, **{**reload, "operation": Operation.CACHE_FLUSH}, params={}) is Reason.WRONG_OPERATION
    for model_id in (MODEL, "*", ""):
        assert refusal(make(operation="settings-reload", modelId=model_id), **reload, params={}) is Reason.WRONG_MODEL
        assert refusal(token, operation=Operation.SETTINGS_RELOAD, model_id=model_id, params={}) is Reason.WRONG_MODEL
        named = make(operation="settings-reload", modelId=model_id)
        assert refusal(named, operation=Operation.SETTINGS_RELOAD, model_id=model_id) is Reason.WRONG_MODEL


SIGNER_ROWS: dict[Reason, dict[str, object]] = {
    Reason.TOO_FEW_SIGNERS: {"one of two": ["admin1"], "nobody": [], "one twice": ["admin1", "admin1"],
        "one twice with blanks": ["admin1", " admin1", "admin1\t"]},
    Reason.BAD_FIELD: {"an empty name": ["admin1", ""], "a blank name": ["admin1", "admin2", " \n"],
        "a text": "admin1,admin2", "a number": 2, "left out": ..., "a crowd": [f"admin{number}" for number in range(65)],
        "an endless name": ["admin1", "a" * 201]},
}  # fmt: skip


@pytest.mark.parametrize("make", [l0, l1], ids=["L0", "L1"])
@pytest.mark.parametrize(("signers", "reason"), by_outcome(SIGNER_ROWS))
def test_distinct_signers_are_counted(make: Any, signers: object, reason: Reason) -> None:
    assert refusal(make(signers=signers)) is reason


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
    assert refusal(token) is Reason.BAD_FIELD


def test_a_refusal_shows_nothing_of_the_token() -> None:
    for token in (make_l0(OTHER_KEY), make_l1(audience="box-8"), make_l0(signers=["only-me"])):
        with pytest.raises(OpTokenError) as caught:
            verify(token)
        assert str(caught.value) == caught.value.reason.value
    assert KEY.decode() not in repr(make_verifier())
    with pytest.raises(OpTokenError) as caught:
        verify(make_l2(proofs=PROOFS[:1]), L2)
    assert str(caught.value) == "not_approved (too_few_approvers)"
    assert "ada" not in repr(make_verifier(Level.L2))


@pytest.mark.parametrize(
    "rules", [{"min_signers": 0}, {"runner_id": ""}, {"keys": {"": b"x" * 15}}, {"keys": {"": b""}}], ids=repr
)
def test_rules_that_would_accept_anything_are_no_rules(rules: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"signer|id|key"):
        make_verifier(**rules)


def reclaimed(token: Token, **changes: Any) -> Token:
    """The token with other claims, well signed by the issuer; ``...`` leaves one out."""
    claims = {name: value for name, value in {**token["opToken"], **changes}.items() if value is not ...}
    return {**token, **sign_claims(claims)}


def test_a_valid_l2_token_proves_who_approved_what() -> None:
    verified = verify(make_l2(), L2)
    assert (verified.level, verified.kid, verified.op_id, verified.fence) == (Level.L2, KID, "op-1", 7)
    assert (verified.approvers, verified.signers) == (("ada", "bob"), ("admin1", "admin2"))
    assert (verified.use, verified.max_uses, verified.op_key) == (1, 1, "op-1.1")
    assert (verified.op_class, verified.daily_cap, verified.not_after) == ("model-load", 0, NOW + 3600)
    assert verified.statement == STATEMENT


def test_an_l2_box_refuses_every_token_of_a_lower_level_and_everything_without_a_policy() -> None:
    stripped = {name: item for name, item in make_l2().items() if name != "statement"}
    for token in (make_l0(), make_l1(), stripped, {**make_l2(), **make_l0()}):  # the last: a statement beside it raises nothing
        assert refusal(token, L2) is Reason.LEVEL_TOO_LOW
    assert refusal(make_l2(), make_verifier(Level.L2, policy=None)) is Reason.NO_POLICY


@pytest.mark.parametrize("level", [Level.L0, Level.L1])
def test_a_box_of_a_lower_level_takes_an_l2_token_for_an_l1_token(level: Level) -> None:
    box = make_verifier(level, policy=None)
    verified = verify(make_l2(proofs=[]), box)
    assert (verified.level, verified.op_key, verified.max_uses, verified.statement) == (Level.L1, "op-1", 1, None)
    assert refusal(make_l2(OTHER_KEY), box) is Reason.BAD_SIGNATURE
    assert refusal(make_l2(), box, params={"modelId": MODEL}) is Reason.WRONG_PARAMS
    assert refusal(make_l2(use=2), box) == Rule.TOO_MANY_USES


# The signed part, as at L1

ISSUER_ROWS: dict[Reason, dict[str, Token]] = {
    Reason.BAD_SIGNATURE: {"wrong key": make_l2(OTHER_KEY),
        "HMAC with the bytes of a public key": make_l2(ADA.passkey.public_key), "algorithm swap": {**make_l2(),
            "signature": encode_bytes(hmac.digest(KEY, b"{}", "sha512"))}},
    Reason.UNKNOWN_KEY: {"unknown kid": make_l2(kid="2031-01")},
    Reason.WRONG_AUDIENCE: {"other runner's token": make_l2(audience="box-9")},
    Reason.EXPIRED: {"expired": make_l2(expires_at=NOW - 1, grant=make_grant(issued_at=NOW - 300))},
    Reason.NOT_YET_VALID: {"from the future": make_l2(grant=make_grant(issued_at=NOW + 61))},
    Reason.LIFETIME_TOO_LONG: {"lives too long": make_l2(expires_at=NOW + 301)},
    Reason.BAD_FIELD: {"without the digest of its statement": reclaimed(make_l2(), stmtDigest=...),
        "use 0": reclaimed(make_l2(), use=0), "use as text": reclaimed(make_l2(), use="1"),
        "no proofs at all": {name: item for name, item in make_l2().items() if name != "proofs"},
        "proofs that are no list": {**make_l2(), "proofs": {"0": PROOFS[0]}}, "something unsigned beside": {**make_l2(),
            "note": "hello"}},
    Reason.WRONG_STATEMENT: {"digest of another statement": reclaimed(make_l2(), stmtDigest="ab" * 32),
        "digest in capitals": reclaimed(make_l2(), stmtDigest=STATEMENT.digest.hex().upper()),
        "digest not ASCII": reclaimed(make_l2(), stmtDigest="ä" * 64), "another approval's id": reclaimed(make_l2(),
            opId="op-2")}, Reason.UNKNOWN_VERSION: {"stale version of the format": reclaimed(make_l2(), v=2)},
    Reason.TOO_LARGE: {"a token of a megabyte": {**make_l2(), "proofs": ["A" * 1_000_000]}},
}  # fmt: skip


@pytest.mark.parametrize(("token", "reason"), by_outcome(ISSUER_ROWS))
def test_the_signed_part_is_checked_as_at_l1(token: Token, reason: Reason) -> None:
    assert refusal(token, L2) is reason


# What people signed against what is asked; the policy, the window, the uses

GANG = make_people(4)
NEWER = make_policy(PEOPLE, version=2, previous=POLICY.ref.sha256)
EMERGENCY = make_people(3, break_glass=True)
STANDING = make_statement(POLICY, op_class="standing", params=PARAMS, max_uses=3)
TRUES, AWQ = {"modelId": MODEL, "force": True}, {"quantization": "awq"}
FLUSH_REQUEST: dict[str, Any] = {"operation": FLUSH, "model_id": None, "params": FLUSH_PARAMS}


def signed(statement: Statement, people: Sequence[Person] = (ADA, BOB), **changes: Any) -> Token:
    return make_l2(statement=statement, proofs=approve(statement, people), **changes)


def stated(policy: Policy = POLICY, people: Sequence[Person] = (ADA, BOB), **changes: Any) -> Token:
    return signed(make_statement(policy, **{"params": PARAMS, **changes}), people)


def flush(**params: object) -> Token:
    statement = make_statement(POLICY, operation="cache-flush", op_class="cache-flush", params=params)
    return signed(statement, grant=make_grant(operation=FLUSH, model_id=None), params_digest=params_digest(FLUSH_PARAMS))


L2_ROWS: dict[str, tuple[Token, dict[str, Any], str]] = {
    "statement altered by a byte": ({**make_l2(), "statement": encode_bytes(STATEMENT.raw.replace(b'"maxUses":1',
            b'"maxUses":9'))}, {}, Reason.WRONG_STATEMENT),
    "statement altered and bound anew": (make_l2(statement=edit_statement(STATEMENT, maxUses=9)), {}, Rule.TOO_MANY_USES),
    "a longer window": (make_l2(statement=edit_statement(STATEMENT, notAfter=STATEMENT.not_after + 1)), {},
        Rule.WRONG_CHALLENGE),
    "a target more": (make_l2(statement=edit_statement(STATEMENT, targets=[BOX, "box-9", "box-8"])), {}, Rule.WRONG_CHALLENGE),
    "approved for another node": (signed(edit_statement(STATEMENT, targets=["box-9"])), {}, Reason.WRONG_TARGET),
    "approved for wildcards": (signed(edit_statement(STATEMENT, targets=["*", "box-*", BOX + " x"])), {}, Reason.WRONG_TARGET),
    "one approved, true asked": (signed(make_statement(POLICY, params={"modelId": MODEL, "force": 1}),
            params_digest=params_digest(TRUES)), {"params": TRUES}, Reason.WRONG_PARAMS),
    **{f"a body with {name}, which nobody could sign": (make_l2(params_digest=params_digest(PARAMS if name == "a float" else {
    **PARAMS, "x": value})), {"params": {**PARAMS, "x": value}}, Reason.UNSIGNABLE_PARAMS) for name, value in (("a float", 0.5),
            ("null", {"inner": None}), ("lines", "two\nlines"), ("bidi", "\u202egnp.exe"))},
    "another flush": (flush(scope="all"), FLUSH_REQUEST, Reason.WRONG_PARAMS),
    "flush of another tenant": (flush(scope="tenant", tenantId="community-y"), FLUSH_REQUEST, Reason.WRONG_PARAMS),
    "flush of no tenant": (flush(scope="tenant"), FLUSH_REQUEST, Reason.WRONG_PARAMS),
    "a body without its model": (signed(make_statement(POLICY, params=AWQ), params_digest=params_digest(AWQ)), {"params": AWQ},
        Reason.WRONG_MODEL),
    "approved for another operation": (stated(operation="model-unload", op_class="model-unload"), {}, Reason.WRONG_OPERATION),
    "under a policy of the same people with other origins": (stated(make_policy(PEOPLE, origins=["https://elsewhere.example"]),
            PEOPLE), {}, Rule.WRONG_POLICY), "under a policy to come": (stated(NEWER, PEOPLE), {}, Rule.WRONG_POLICY),
    "under the policy of the attacker": (stated(make_policy(GANG), GANG[:2]), {}, Rule.WRONG_POLICY),
    "by people of the attacker": (stated(POLICY, GANG[:2]), {}, Rule.UNKNOWN_KEY),
    "M-1 proofs": (make_l2(proofs=PROOFS[:1]), {}, Rule.TOO_FEW_APPROVERS),
    "no proof": (make_l2(proofs=[]), {}, Rule.TOO_FEW_APPROVERS),
    "one proof and the names that the issuer lists": (make_l2(grant=make_grant(signers=["ada", "bob", "cleo"]),
            proofs=PROOFS[:1]), {}, Rule.TOO_FEW_APPROVERS),
    "a second use of what is approved for once": (make_l2(use=2), {}, Rule.TOO_MANY_USES),
    "a use more than people said": (signed(STANDING, use=4), {}, Rule.TOO_MANY_USES),
    **{f"a statement that is {name}": ({**make_l2(), "statement": statement}, {}, rule) for name, statement,
        rule in (("no text", 7, Rule.BAD_PROOF), ("null", None, Rule.BAD_PROOF), ("not JSON", encode_bytes(b"no"),
            Rule.NOT_CANONICAL), ("padded", encode_bytes(STATEMENT.raw) + "=", Rule.BAD_PROOF), ("empty", "",
            Rule.NOT_CANONICAL), ("led by a blank", " " + encode_bytes(STATEMENT.raw), Rule.BAD_PROOF), ("spaced",
            encode_bytes(STATEMENT.raw.replace(b'":', b'": ')), Rule.NOT_CANONICAL), ("a policy",
            encode_bytes(make_policy_bytes(PEOPLE)), Rule.BAD_STATEMENT))},
}  # fmt: skip


@pytest.mark.parametrize(("token", "request_", "outcome"), L2_ROWS.values(), ids=L2_ROWS)
def test_a_token_is_what_people_signed_under_the_policy_of_the_box(
    token: Token, request_: dict[str, Any], outcome: str
) -> None:
    assert refusal(token, L2, **request_) == outcome


def test_what_people_signed_is_taken_by_each_box_that_it_names_as_often_as_they_said() -> None:
    box_9 = make_verifier(Level.L2, runner_id="box-9")
    assert verify(make_l2(audience="box-9"), box_9).approvers == ("ada", "bob")
    assert verify(make_l2(grant=make_grant(signers=["zoe"])), L2).approvers == ("ada", "bob")
    assert verify(make_l2(), L2, params={**PARAMS, "tag": None, "verifiedOpToken": "x"}).approvers
    assert verify(flush(scope="tenant", tenantId="community-x"), L2, **FLUSH_REQUEST).op_class == "cache-flush"
    for use in (1, 2, 3):
        verified = verify(signed(STANDING, use=use), L2)
        assert (verified.use, verified.max_uses, verified.op_key) == (use, 3, f"op-1.{use}")
    policy = make_policy(EMERGENCY)
    statement = make_statement(policy, op_class="break-glass", params=PARAMS)
    proofs = [EMERGENCY[0].approve(statement, key=EMERGENCY[0].break_glass)]
    verified = verify(make_l2(statement=statement, proofs=proofs), make_verifier(Level.L2, policy=policy))
    assert (verified.op_class, verified.daily_cap, verified.approvers) == ("break-glass", 2, ("ada",))


WINDOW_ROWS = [(NOW, ""), (NOW - 60, ""), (NOW - 61, Rule.NOT_YET), (NOW + 600, ""), (NOW + 601, Rule.TOO_LATE)]


def test_an_approval_holds_in_its_window_and_under_its_policy_only() -> None:
    assert refusal(make_l2(), make_verifier(Level.L2, policy=NEWER)) == Rule.WRONG_POLICY
    policy = make_policy(PEOPLE, expires_at=NOW)
    token, box = stated(policy), make_verifier(Level.L2, policy=policy)
    assert verify(token, box, now=NOW).approvers
    assert refusal(token, box, now=NOW + 1) == Rule.POLICY_EXPIRED
    for now, rule in WINDOW_ROWS:
        statement = edit_statement(STATEMENT, notAfter=NOW + 600)
        token = signed(statement, grant=make_grant(issued_at=now), expires_at=now + 300)
        if rule:
            assert refusal(token, L2, now=now) == rule
        else:
            assert verify(token, L2, now=now).not_after == NOW + 600
