"""Operation tokens as compact JWTs: the same claims and checks as the JSON form, and nothing that a JWT can do beside."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.signed_tokens import BOX, KEY, MODEL, NOW, OTHER_KEY, make_l0, make_l1, make_l2, make_verifier, verify
from wire.limits import WIRE
from wire.optoken import Level, Operation, OpTokenError, Reason, sign_jwt

HEADER = {"alg": "HS256", "typ": "JWT"}
L0: dict[str, Any] = dict(make_l0()["opToken"])
L1: dict[str, Any] = dict(make_l1()["opToken"])


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def jwt(claims: object = L0, header: object = HEADER, *, key: bytes = KEY, algorithm: str = "sha256") -> str:
    """A JWT made with nothing of the code under test; bytes stand for themselves."""
    parts = [part if isinstance(part, bytes) else json.dumps(part).encode() for part in (header, claims)]
    signed = ".".join(map(b64, parts))
    return f"{signed}.{b64(hmac.digest(key, signed.encode(), algorithm))}"


def changed(claims: dict[str, Any] = L0, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (claims | changes).items() if value is not ...}


def reason_of(token: object, level: Level = Level.L0, **request: Any) -> Reason:
    with pytest.raises(OpTokenError) as caught:
        verify(token, make_verifier(level), **request)
    return caught.value.reason


@pytest.mark.parametrize("header", [HEADER, {"alg": "HS256"}, {"typ": "JWT", "alg": "HS256"}])
def test_a_jwt_proves_what_the_json_form_of_its_claims_proves(header: object) -> None:
    assert verify(jwt(L0, header)) == verify(make_l0())
    for level in (Level.L0, Level.L1):
        assert verify(jwt(L1, header), make_verifier(level)) == verify(make_l1(), make_verifier(level))


def test_what_we_sign_is_what_others_make() -> None:
    assert verify(sign_jwt(KEY, L0)) == verify(jwt(L0)) == verify(f" {jwt(L0)}\n")


def test_registered_claims_that_hold_change_nothing() -> None:
    claims = changed(iat=NOW, nbf=NOW - 5, exp=NOW + 60, aud=BOX)
    assert verify(jwt(claims)) == verify(make_l0())


ALG_NONE, ALG_ALONE = b'{"alg":"none"}', b'{"alg":"HS256"}'
SEGMENTS = jwt().split(".")
ATTACKS: dict[str, tuple[str, Reason]] = {
    "alg none, unsigned": (f"{b64(ALG_NONE)}.{SEGMENTS[1]}.", Reason.MALFORMED),
    "alg none, signed": (jwt(L0, {"alg": "none"}), Reason.MALFORMED),
    "alg None in capitals": (jwt(L0, {"alg": "NONE"}), Reason.MALFORMED),
    "alg in small letters": (jwt(L0, {"alg": "hs256"}), Reason.MALFORMED),
    "alg HS512": (jwt(L0, {"alg": "HS512"}, algorithm="sha512"), Reason.MALFORMED),
    "alg HS384 named, HS256 used": (jwt(L0, {"alg": "HS384"}), Reason.MALFORMED),
    "alg RS256 with the MAC key": (jwt(L0, {"alg": "RS256"}), Reason.MALFORMED),
    "alg missing": (jwt(L0, {"typ": "JWT"}), Reason.MALFORMED),
    "alg a list": (jwt(L0, {"alg": ["HS256"]}), Reason.MALFORMED),
    "alg twice": (jwt(L0, b'{"alg":"none","alg":"HS256"}'), Reason.DUPLICATE_KEY),
    "kid in the header": (jwt(L0, {**HEADER, "kid": ""}), Reason.MALFORMED),
    "kid in the header, a path": (jwt(L0, {**HEADER, "kid": "../../dev/null"}), Reason.MALFORMED),
    "kid of the header for L1": (jwt(changed(L1, kid=...), {**HEADER, "kid": L1["kid"]}), Reason.MALFORMED),
    "kid left out of L1": (jwt(changed(L1, kid=...)), Reason.UNKNOWN_KEY),
    "kid unknown in L1": (jwt(changed(L1, kid="2031-01")), Reason.UNKNOWN_KEY),
    "a key in the header": (jwt(L0, {**HEADER, "jwk": {"kty": "oct", "k": b64(KEY)}}), Reason.MALFORMED),
    "an address in the header": (jwt(L0, {**HEADER, "jku": "https://example.com"}), Reason.MALFORMED),
    "crit in the header": (jwt(L0, {**HEADER, "crit": ["exp"]}), Reason.MALFORMED),
    "payload not encoded": (jwt(L0, {**HEADER, "b64": False}), Reason.MALFORMED),
    "compressed": (jwt(L0, {**HEADER, "zip": "DEF"}), Reason.MALFORMED),
    "header no object": (jwt(L0, ["HS256"]), Reason.MALFORMED),
    "payload no object": (jwt([L0]), Reason.MALFORMED),
    "payload the whole token": (jwt(make_l0()), Reason.BAD_FIELD),
    "payload with a name twice": (jwt(b'{"nonce":"0123456789","nonce":"9876543210"}'), Reason.DUPLICATE_KEY),
    "payload with a float": (jwt(changed(issuedAt=NOW + 0.5)), Reason.MALFORMED),
    "payload not UTF-8": (jwt(b"\xff"), Reason.MALFORMED),
    "payload nothing": (jwt(b""), Reason.MALFORMED),
    "another key": (jwt(key=OTHER_KEY), Reason.BAD_SIGNATURE),
    "another algorithm behind HS256": (jwt(algorithm="sha512"), Reason.BAD_SIGNATURE),
    "no signature": (f"{SEGMENTS[0]}.{SEGMENTS[1]}.", Reason.BAD_SIGNATURE),
    "signature in hex": (
        f"{SEGMENTS[0]}.{SEGMENTS[1]}.{hmac.digest(KEY, '.'.join(SEGMENTS[:2]).encode(), 'sha256').hex()}",
        Reason.BAD_SIGNATURE,
    ),
    "signature padded": (f"{jwt()}=", Reason.BAD_SIGNATURE),
    "signature cut short": (jwt()[:-2], Reason.BAD_SIGNATURE),
    "signature of the JSON form": (
        f"{SEGMENTS[0]}.{SEGMENTS[1]}.{b64(bytes.fromhex(make_l0()['signature']))}",
        Reason.BAD_SIGNATURE,
    ),
    "a plain hash": (
        f"{SEGMENTS[0]}.{SEGMENTS[1]}.{b64(hashlib.sha256('.'.join(SEGMENTS[:2]).encode()).digest())}",
        Reason.BAD_SIGNATURE,
    ),
    "payload padded": (f"{SEGMENTS[0]}.{SEGMENTS[1]}=.{SEGMENTS[2]}", Reason.MALFORMED),
    "header exchanged for an equal one": (f"{b64(ALG_ALONE)}.{SEGMENTS[1]}.{SEGMENTS[2]}", Reason.BAD_SIGNATURE),
    "payload of another token": (
        f"{SEGMENTS[0]}.{jwt(changed(modelId='b')).split('.')[1]}.{SEGMENTS[2]}",
        Reason.BAD_SIGNATURE,
    ),
    "four segments": (f"{jwt()}.{SEGMENTS[0]}", Reason.MALFORMED),
    "a blank inside": (jwt().replace(".", ". ", 1), Reason.MALFORMED),
    "standard base64": (f"{SEGMENTS[0]}.{SEGMENTS[1]}.{'+' * 43}", Reason.BAD_SIGNATURE),
    "too large": (jwt(changed(modelId="m" * WIRE.token_bytes)), Reason.TOO_LARGE),
    "much too large": (f"{'A' * 10 * WIRE.token_bytes}.{SEGMENTS[1]}.{SEGMENTS[2]}", Reason.TOO_LARGE),
    "exp over, though issued just now": (jwt(changed(exp=NOW)), Reason.EXPIRED),
    "exp in text": (jwt(changed(exp=str(NOW + 60))), Reason.BAD_FIELD),
    "nbf to come": (jwt(changed(nbf=NOW + 301)), Reason.NOT_YET_VALID),
    "iat to come": (jwt(changed(iat=NOW + 301)), Reason.NOT_YET_VALID),
    "for another audience": (jwt(changed(aud="box-9")), Reason.WRONG_AUDIENCE),
    "for several audiences": (jwt(changed(aud=[BOX, "box-9"])), Reason.BAD_FIELD),
    "a claim that nobody honours": (jwt(changed(sub="ann")), Reason.BAD_FIELD),
    "exp does not make it live longer": (jwt(changed(issuedAt=NOW - 301, exp=NOW + 3600)), Reason.EXPIRED),
    "iat instead of issuedAt": (jwt(changed(issuedAt=..., iat=NOW)), Reason.BAD_FIELD),
    "L1 beyond its closed members": (jwt(changed(L1, iat=NOW)), Reason.BAD_FIELD),
    "another operation": (jwt(changed(operation="model-unload")), Reason.WRONG_OPERATION),
    "one signer, named twice": (jwt(changed(signers=["ann", " ann"])), Reason.TOO_FEW_SIGNERS),
    "a short nonce": (jwt(changed(nonce="short")), Reason.BAD_FIELD),
}


@pytest.mark.parametrize(("token", "reason"), ATTACKS.values(), ids=ATTACKS.keys())
def test_a_jwt_that_is_not_exactly_such_a_token_is_refused(token: str, reason: Reason) -> None:
    assert reason_of(token) is reason


def test_a_jwt_never_reaches_a_level_that_asks_for_more() -> None:
    assert reason_of(jwt(L0), Level.L1) is Reason.LEVEL_TOO_LOW
    for claims in (L0, L1, dict(make_l2()["opToken"])):
        assert reason_of(jwt(claims), Level.L2) is Reason.LEVEL_TOO_LOW


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"operation": Operation.CACHE_FLUSH}, Reason.WRONG_OPERATION),
        ({"model_id": "other"}, Reason.WRONG_MODEL),
        ({"params": {"modelId": MODEL}}, Reason.WRONG_PARAMS),
        ({"now": NOW + 301}, Reason.EXPIRED),
        ({"now": NOW - 61}, Reason.NOT_YET_VALID),
    ],
)
def test_a_jwt_holds_for_its_own_request_alone(request_: dict[str, Any], reason: Reason) -> None:
    assert reason_of(jwt(L1), Level.L1, **request_) is reason


@given(st.integers(min_value=0, max_value=len(jwt()) - 1), st.characters(min_codepoint=33, max_codepoint=126))
def test_no_other_spelling_of_a_jwt_holds(index: int, letter: str) -> None:
    token = jwt()
    spoilt = token[:index] + letter + token[index + 1 :]
    if spoilt != token:
        with pytest.raises(OpTokenError):
            verify(spoilt)


@pytest.mark.parametrize("form", [make_l0, lambda: jwt(L0)])
def test_only_the_names_that_count_make_enough_signers(form: Any) -> None:
    for names, holds in (
        (None, True),
        ({"admin1", "admin2", "x"}, True),
        ({"admin1", "x"}, False),
        ({"Admin1", "admin2"}, False),
    ):
        verifier = make_verifier(counted_signers=None if names is None else frozenset(names))
        if holds:
            assert verify(form(), verifier).signers == ("admin1", "admin2")
        else:
            with pytest.raises(OpTokenError) as caught:
                verify(form(), verifier)
            assert caught.value.reason is Reason.TOO_FEW_SIGNERS
