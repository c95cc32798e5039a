"""The forms of a token and of a receipt: JSON, base64url, JWT, canonical bytes; and mutants of tokens of each level.

MUSTER_TEST_MUTATIONS: how many mutants of each kind of token.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import hmac
import json
import os
import random
import string
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.examples import examples
from tests.fakes.passkeys import KeyFile, SoftPasskey
from tests.fakes.policies import approve, edit_statement, make_policy, make_statement
from tests.fakes.signed_tokens import (
    BOX,
    KEY,
    MODEL,
    NOW,
    OTHER_KEY,
    PARAMS,
    PEOPLE,
    Token,
    by_outcome,
    make_l0,
    make_l1,
    make_l2,
    make_verifier,
    sign_claims,
    verify,
)
from wire.limits import WIRE
from wire.optoken.approval import (
    MAX_INTEGER,
    RECEIPT_DOMAIN,
    ApprovalError,
    canonical,
    decode_bytes,
    encode_bytes,
    read_canonical,
)
from wire.optoken.documents import DEFAULT_CLASSES, Receipt, ReceiptError, digest_result, read_receipt, sign_receipt
from wire.optoken.op_token import (
    NotCanonical,
    OpTokenError,
    Reason,
    canonical_bytes,
    decode_base64url,
    encode_token,
    make_runner_id,
    owns_runner_id,
    params_digest,
    read_token,
    sign_jwt,
)
from wire.optoken.verifier import Level, Operation


def refusal(value: object) -> Reason:
    with pytest.raises(OpTokenError) as caught:
        read_token(value)
    return caught.value.reason


def spell(token: dict[str, object], **changes: object) -> str:
    """The token as text, with members of ``opToken`` replaced by raw JSON."""
    claims = [f"{json.dumps(name)}: {changes.pop(name, json.dumps(item))}" for name, item in dict(token["opToken"]).items()]  # type: ignore[call-overload]  # an object in a test
    return f'{{"opToken": {{{", ".join(claims)}}}, "signature": "{token["signature"]}"}}'


@pytest.mark.parametrize("token", [make_l0(), make_l1()], ids=["L0", "L1"])
def test_every_way_to_carry_a_token_gives_the_same_token(token: dict[str, object]) -> None:
    text = json.dumps(token, indent=2)
    encoded = base64.urlsafe_b64encode(text.encode()).decode()
    ways = [token, text, f" {text}\n", encoded, encoded.rstrip("="), encoded + "\n", encode_token(token)]
    assert all(read_token(way) == read_token(token) for way in ways)
    assert all(verify(way).signers == ("admin1", "admin2") for way in ways)


def test_outer_members_that_are_not_known_are_kept_and_change_nothing() -> None:
    token = {**make_l1(), "statement": "eyJ2IjoxfQ", "proofs": [{"type": "ed25519", "ok": True, "no": None}]}
    read = read_token(token)
    assert dict(read.extra) == {"statement": "eyJ2IjoxfQ", "proofs": [{"type": "ed25519", "ok": True, "no": None}]}
    assert verify(token) == verify(make_l1())


def as_base64(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


def with_claim(item: object) -> dict[str, Any]:
    return {**make_l0(), "opToken": {**make_l0()["opToken"], "extra": item}}


def nest(opening: str, closing: str) -> str:
    depth = WIRE.token_bytes // len(opening) // 2
    return f'{{"opToken":{{}},"signature":"","x":{opening * depth}1{closing * depth}}}'[: WIRE.token_bytes]


LARGE = {**make_l0(), "x": "A" * 1_000_000}
WIDE = json.dumps(make_l0()).replace(", ", "," + " " * WIRE.token_bytes, 1)
ODD_NUMBERS = (
    "1.0", "1e3", "NaN", "Infinity", "-Infinity", "-0", "9007199254740992", "9" * 5000, '"\\ud800"', "01", "+1", "0x1",
)  # fmt: skip
TWICE = (
    '{"opToken":{"operation":"a","operation":"b"},"signature":""}', '{"opToken":{},"opToken":{},"signature":""}',
    '{"opToken":{"operation":"a","oper\\u0061tion":"b"},"signature":""}', '{"opToken":{},"signature":"a","signature":"a"}',
    '{"opToken":{},"signature":"","proofs":[{"a":1,"a":1}]}',
)  # fmt: skip
NO_TOKENS: dict[Reason, list[object]] = {
    Reason.MALFORMED: [
        *({"opToken": {**make_l0()["opToken"], "issuedAt": raw}, "signature": "00"} for raw in (1.0, float("nan"), 2**53)),
        {"opToken": {"operatiön": "a"}, "signature": ""}, {"opToken": {}, "sign\u0430ture": "", "signature": ""}, None, 7, 1.5,
        True, [], b"{}", "", "  ", "{", "[]", "null", "é", "\ud800", '{"a":1}x', "\ufeff{}", nest("[", "]"), nest('{"a":', "}"),
        {"opToken": {}, "signature": "", "x": json.loads("[" * 17 + "]" * 17)},
        *(spell(make_l0(), issuedAt=raw) for raw in ODD_NUMBERS),
    ],
    Reason.BAD_FIELD: [
        {}, {"opToken": {}}, {"signature": "00"}, {"opToken": [], "signature": "00"}, {"opToken": {}, "signature": 7},
        {"opToken": "{}", "signature": "00"},
        *(form(with_claim(item)) for form in (dict, json.dumps) for item in (True, None, {}, {"a": 1}, [1], [["a"]], [None])),
    ],
    Reason.DUPLICATE_KEY: [form(text) for form in (str, as_base64) for text in TWICE],
    Reason.TOO_LARGE: [
        LARGE, "A" * 1_000_000, " " * 1_000_000,
        *(form(text) for form in (str, as_base64) for text in (json.dumps(LARGE), WIDE)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("reason", NO_TOKENS)
def test_what_is_no_token_is_refused_by_its_reason_in_every_form(reason: Reason) -> None:
    for value in NO_TOKENS[reason]:
        assert refusal(value) is reason, repr(value)[:100]


def test_the_size_limit_is_exact() -> None:
    token = {**make_l0(), "x": ""}
    room = WIRE.token_bytes - len(json.dumps(token, separators=(",", ":")))
    largest = {**token, "x": "A" * room}
    text = json.dumps(largest, separators=(",", ":"))
    for value in (largest, text, encode_token(largest)):
        assert read_token(value).extra["x"] == "A" * room
    one_more = {**token, "x": "A" * (room + 1)}
    for value in (one_more, json.dumps(one_more, separators=(",", ":")), encode_token(one_more)):
        assert refusal(value) is Reason.TOO_LARGE


@examples(25)
@given(st.binary(max_size=64))
def test_base64url_has_one_spelling_with_and_without_padding(content: bytes) -> None:
    padded = base64.urlsafe_b64encode(content).decode()
    bare = padded.rstrip("=")
    assert decode_base64url(padded) == decode_base64url(bare) == content
    alphabet = string.ascii_letters + string.digits + "-_"
    spellings = [bare[:-1] + last for last in alphabet] if bare else []
    assert sum(decode_base64url(spelling) == content for spelling in spellings) == bool(bare)
    for other in ("a", "aa+a", "aa/a", "aaa a", "aaaa=", "aaaa====", "=", "aa==aa", "aaaé", "aaa\n"):
        assert decode_base64url(other) is None
    if padded != bare:
        assert decode_base64url(padded + "=") is None
        assert decode_base64url(padded[:-1]) == (None if padded.endswith("==") else content)


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
KEYS = st.text(st.characters(max_codepoint=0x7F), max_size=10)
LEAVES = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)


@examples(25)
@given(VALUES)
def test_canonical_bytes_are_those_of_the_rfc(value: object) -> None:
    assert canonical_bytes(value) == rfc8785.dumps(value)  # type: ignore[arg-type]  # what hypothesis makes is JSON


@pytest.mark.parametrize(
    "value",
    [1.0, float("nan"), float("inf"), MAX_INTEGER + 1, -MAX_INTEGER - 1, "\ud800", b"bytes", {1: 2}, {"ä": 1}, {1, 2},
        pytest.param(object(), id="an object")], ids=repr,
)  # fmt: skip
def test_what_has_no_canonical_form_is_refused_at_any_depth(value: object) -> None:
    for nested in (value, [value], {"a": {"b": [value]}}):
        with pytest.raises(NotCanonical):
            canonical_bytes(nested)


def test_the_digest_is_a_domain_separated_hash_of_all_but_the_token_and_what_is_null() -> None:
    expected = hashlib.sha256(b"op-params/v1\x00" + b'{"a":1,"b":["x"]}').hexdigest()
    assert params_digest({"b": ["x"], "a": 1, "c": None, "verifiedOpToken": {"any": 1.5}}) == expected
    assert params_digest({"scope": {"tenantId": None}}) != params_digest({"scope": {}})


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


def changed_claims(claims: dict[str, Any] = L0, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (claims | changes).items() if value is not ...}


def reason_of(token: object, level: Level = Level.L0, **request: Any) -> Reason:
    with pytest.raises(OpTokenError) as caught:
        verify(token, make_verifier(level), **request)
    return caught.value.reason


@pytest.mark.parametrize("header", [HEADER, {"alg": "HS256"}, {"typ": "JWT", "alg": "HS256"}])
def test_a_jwt_proves_what_the_json_form_of_its_claims_proves(header: object) -> None:
    assert verify(jwt(L0, header)) == verify(make_l0()) == verify(sign_jwt(KEY, L0)) == verify(f" {jwt(L0)}\n")
    assert verify(jwt(changed_claims(iat=NOW, nbf=NOW - 5, exp=NOW + 60, aud=BOX))) == verify(make_l0())
    for level in (Level.L0, Level.L1):
        assert verify(jwt(L1, header), make_verifier(level)) == verify(make_l1(), make_verifier(level))


ALG_NONE, ALG_ALONE = b'{"alg":"none"}', b'{"alg":"HS256"}'
SEGMENTS = jwt().split(".")
ATTACKS: dict[Reason, dict[str, str]] = {
    Reason.MALFORMED: {"alg none, unsigned": f"{b64(ALG_NONE)}.{SEGMENTS[1]}.", "alg none, signed": jwt(L0, {"alg": "none"}),
        "alg None in capitals": jwt(L0, {"alg": "NONE"}), "alg in small letters": jwt(L0, {"alg": "hs256"}),
        "alg HS512": jwt(L0, {"alg": "HS512"}, algorithm="sha512"), "alg HS384 named, HS256 used": jwt(L0, {"alg": "HS384"}),
        "alg RS256 with the MAC key": jwt(L0, {"alg": "RS256"}), "alg missing": jwt(L0, {"typ": "JWT"}), "alg a list": jwt(L0,
        {"alg": ["HS256"]}), "kid in the header": jwt(L0, {**HEADER, "kid": ""}), "kid in the header, a path": jwt(L0,
        {**HEADER, "kid": "../../dev/null"}), "kid of the header for L1": jwt(changed_claims(L1, kid=...), {**HEADER,
        "kid": L1["kid"]}), "a key in the header": jwt(L0, {**HEADER, "jwk": {"kty": "oct", "k": b64(KEY)}}),
        "an address in the header": jwt(L0, {**HEADER, "jku": "https://example.com"}), "crit in the header": jwt(L0,
        {**HEADER, "crit": ["exp"]}), "payload not encoded": jwt(L0, {**HEADER, "b64": False}), "compressed": jwt(L0,
        {**HEADER, "zip": "DEF"}), "header no object": jwt(L0, ["HS256"]), "payload no object": jwt([L0]),
        "payload with a float": jwt(changed_claims(issuedAt=NOW + 0.5)), "payload not UTF-8": jwt(b"\xff"),
        "payload nothing": jwt(b""), "payload padded": f"{SEGMENTS[0]}.{SEGMENTS[1]}=.{SEGMENTS[2]}",
        "four segments": f"{jwt()}.{SEGMENTS[0]}", "a blank inside": jwt().replace(".", ". ", 1)},
    Reason.DUPLICATE_KEY: {"alg twice": jwt(L0, b'{"alg":"none","alg":"HS256"}'),
        "payload with a name twice": jwt(b'{"nonce":"0123456789","nonce":"9876543210"}')},
    Reason.UNKNOWN_KEY: {"kid left out of L1": jwt(changed_claims(L1, kid=...)), "kid unknown in L1": jwt(changed_claims(L1,
        kid="2031-01"))},
    Reason.BAD_FIELD: {"payload the whole token": jwt(make_l0()), "exp in text": jwt(changed_claims(exp=str(NOW + 60))),
        "for several audiences": jwt(changed_claims(aud=[BOX, "box-9"])),
        "a claim that nobody honours": jwt(changed_claims(sub="ann")),
        "iat instead of issuedAt": jwt(changed_claims(issuedAt=..., iat=NOW)),
        "L1 beyond its closed members": jwt(changed_claims(L1, iat=NOW)), "a short nonce": jwt(changed_claims(nonce="short"))},
    Reason.BAD_SIGNATURE: {"another key": jwt(key=OTHER_KEY), "another algorithm behind HS256": jwt(algorithm="sha512"),
        "no signature": f"{SEGMENTS[0]}.{SEGMENTS[1]}.",
        "signature in hex": f"{SEGMENTS[0]}.{SEGMENTS[1]}.{hmac.digest(KEY, '.'.join(SEGMENTS[:2]).encode(), 'sha256').hex()}",
        "signature padded": f"{jwt()}=", "signature cut short": jwt()[:-2],
        "signature of the JSON form": f"{SEGMENTS[0]}.{SEGMENTS[1]}.{b64(bytes.fromhex(make_l0()['signature']))}",
        "a plain hash": f"{SEGMENTS[0]}.{SEGMENTS[1]}.{b64(hashlib.sha256('.'.join(SEGMENTS[:2]).encode()).digest())}",
        "header exchanged for an equal one": f"{b64(ALG_ALONE)}.{SEGMENTS[1]}.{SEGMENTS[2]}",
        "payload of another token": f"{SEGMENTS[0]}.{jwt(changed_claims(modelId='b')).split('.')[1]}.{SEGMENTS[2]}",
        "standard base64": f"{SEGMENTS[0]}.{SEGMENTS[1]}.{'+' * 43}"},
    Reason.TOO_LARGE: {"too large": jwt(changed_claims(modelId="m" * WIRE.token_bytes)),
        "much too large": f"{'A' * 10 * WIRE.token_bytes}.{SEGMENTS[1]}.{SEGMENTS[2]}"},
    Reason.EXPIRED: {"exp over, though issued just now": jwt(changed_claims(exp=NOW)),
        "exp does not make it live longer": jwt(changed_claims(issuedAt=NOW - 301, exp=NOW + 3600))},
    Reason.NOT_YET_VALID: {"nbf to come": jwt(changed_claims(nbf=NOW + 301)),
        "iat to come": jwt(changed_claims(iat=NOW + 301))},
    Reason.WRONG_AUDIENCE: {"for another audience": jwt(changed_claims(aud="box-9"))},
    Reason.WRONG_OPERATION: {"another operation": jwt(changed_claims(operation="model-unload"))},
    Reason.TOO_FEW_SIGNERS: {"one signer, named twice": jwt(changed_claims(signers=["ann", " ann"]))},
}  # fmt: skip


@pytest.mark.parametrize(("token", "reason"), by_outcome(ATTACKS))
def test_a_jwt_that_is_not_exactly_such_a_token_is_refused(token: str, reason: Reason) -> None:
    assert reason_of(token) is reason


OTHER_REQUESTS: list[tuple[dict[str, Any], Reason]] = [
    ({"operation": Operation.CACHE_FLUSH}, Reason.WRONG_OPERATION), ({"model_id": "other"}, Reason.WRONG_MODEL),
    ({"params": {"modelId": MODEL}}, Reason.WRONG_PARAMS), ({"now": NOW + 301}, Reason.EXPIRED),
    ({"now": NOW - 61}, Reason.NOT_YET_VALID),
]  # fmt: skip


def test_a_jwt_holds_for_its_own_request_and_level_alone() -> None:
    for request, reason in OTHER_REQUESTS:
        assert reason_of(jwt(L1), Level.L1, **request) is reason
    assert reason_of(jwt(L0), Level.L1) is Reason.LEVEL_TOO_LOW
    for claims in (L0, L1, dict(make_l2()["opToken"])):
        assert reason_of(jwt(claims), Level.L2) is Reason.LEVEL_TOO_LOW


@examples(25)
@given(st.integers(min_value=0, max_value=len(jwt()) - 1), st.characters(min_codepoint=33, max_codepoint=126))
def test_no_other_spelling_of_a_jwt_holds(index: int, letter: str) -> None:
    token = jwt()
    spoilt = token[:index] + letter + token[index + 1 :]
    if spoilt != token:
        with pytest.raises(OpTokenError):
            verify(spoilt)


@pytest.mark.parametrize("form", [make_l0(), jwt(L0)])
def test_only_the_names_that_count_make_enough_signers(form: object) -> None:
    for names in (None, frozenset({"admin1", "admin2", "x"})):
        assert verify(form, make_verifier(counted_signers=names)).signers == ("admin1", "admin2")
    for few in ({"admin1", "x"}, {"Admin1", "admin2"}):
        with pytest.raises(OpTokenError) as caught:
            verify(form, make_verifier(counted_signers=frozenset(few)))
        assert caught.value.reason is Reason.TOO_FEW_SIGNERS


RUNNER_KEY, OTHER_RUNNER_KEY = KeyFile(), KeyFile()
RUNNER_ID = make_runner_id("box-7", RUNNER_KEY.public_key)
RECEIPT = Receipt(
    op_id="op-1", use=1, statement_digest="ab" * 32, runner_id=RUNNER_ID, operation="model-load", outcome="succeeded",
    result_digest=digest_result({"status": "loaded", "seconds": 1.5}), fence=7, started_at=1_745_880_000,
    ended_at=1_745_880_060, checkpoint="1024",
)  # fmt: skip


def sign_members(key: KeyFile = RUNNER_KEY, **members: Any) -> str:
    """A receipt well signed over any members; ``...`` leaves one out."""
    envelope = read_canonical(decode_bytes(sign_receipt(RUNNER_KEY.private_key, RECEIPT)), limit=4096)
    changed = {**envelope["receipt"], **members}  # type: ignore[dict-item]  # an object in a test
    body = {name: value for name, value in changed.items() if value is not ...}
    signature = key.private_key.sign(RECEIPT_DOMAIN + canonical(body))
    return encode_bytes(canonical({"receipt": body, "signature": encode_bytes(signature)}))


def test_a_receipt_comes_back_as_it_was_signed_with_the_ed25519_key_of_its_box() -> None:
    for receipt in (RECEIPT, replace(RECEIPT, outcome="failed", statement_digest="", checkpoint=""), replace(RECEIPT, use=20)):
        assert read_receipt(sign_receipt(RUNNER_KEY.private_key, receipt), RUNNER_KEY.public_key) == receipt
    others = sign_receipt(OTHER_RUNNER_KEY.private_key, RECEIPT)
    # Bad signature; a good one of a node that has another name; keys of other kinds.
    for text, key in ((others, RUNNER_KEY.public_key), (others, OTHER_RUNNER_KEY.public_key)):
        with pytest.raises(ReceiptError):
            read_receipt(text, key)
    for public_key in (SoftPasskey().public_key, b"", b"no key"):
        with pytest.raises(ReceiptError):
            read_receipt(sign_receipt(RUNNER_KEY.private_key, RECEIPT), public_key)
    unreadable: list[dict[str, Any]] = [{"use": 0}, {"outcome": "fine"}, {"op_id": ""}, {"op_id": "a\nb"}, {"fence": 1.5}]
    for changes in unreadable:  # is not signed
        with pytest.raises(ReceiptError):
            sign_receipt(RUNNER_KEY.private_key, replace(RECEIPT, **changes))


RECEIPT_ROWS: dict[str, str] = {
    "version 2": sign_members(v=2), "version true": sign_members(v=True), "member left out": sign_members(fence=...),
    "member more": sign_members(note="x"), "outcome unknown": sign_members(outcome="fine"),
    "outcome a list": sign_members(outcome=["failed"]), "use 0": sign_members(use=0), "use true": sign_members(use=True),
    "time as text": sign_members(startedAt="now"), "digest in capitals": sign_members(resultDigest="AB" * 32),
    "digest too short": sign_members(resultDigest="ab"), "digest a number": sign_members(statementDigest=7),
    "runner id without a key": sign_members(runnerId="box-7"), "runner id a number": sign_members(runnerId=7),
    "another node": sign_members(runnerId=make_runner_id("box-7", OTHER_RUNNER_KEY.public_key)),
    "endless checkpoint": sign_members(checkpoint="1" * 301), "not base64url": "{}", "not JSON": encode_bytes(b"no"),
    "no envelope": encode_bytes(b"{}"), "too large": encode_bytes(canonical({"receipt": "x" * 9000, "signature": ""})),
    "no object": encode_bytes(canonical({"receipt": [], "signature": ""})),
    "signature a number": encode_bytes(canonical({"receipt": {}, "signature": 7})),
}  # fmt: skip


@pytest.mark.parametrize("text", RECEIPT_ROWS.values(), ids=RECEIPT_ROWS)
def test_a_receipt_has_exactly_its_members(text: str) -> None:
    with pytest.raises(ReceiptError):
        read_receipt(text, RUNNER_KEY.public_key)


@examples(25)
@given(st.data())
def test_no_flipped_bit_goes_unseen(data: st.DataObject) -> None:
    raw = bytearray(decode_bytes(sign_receipt(RUNNER_KEY.private_key, RECEIPT)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ReceiptError):
        read_receipt(encode_bytes(bytes(raw)), RUNNER_KEY.public_key)


def test_the_digest_of_a_result_does_not_depend_on_the_order_of_its_members() -> None:
    assert digest_result({"a": 1, "b": [1.5, None]}) == digest_result({"b": [1.5, None], "a": 1})
    assert digest_result({"a": 1}) != digest_result({"a": True})
    with pytest.raises(ValueError, match="JSON"):
        digest_result({"a": float("nan")})


def test_a_runner_id_names_the_key_of_its_box_and_nothing_else_does() -> None:
    name, _, fingerprint = RUNNER_ID.partition("#")
    assert (name, len(fingerprint), fingerprint) == ("box-7", 26, fingerprint.lower())
    assert owns_runner_id(RUNNER_ID, RUNNER_KEY.public_key)
    assert not owns_runner_id(RUNNER_ID, OTHER_RUNNER_KEY.public_key)
    around = [RUNNER_ID + "a", RUNNER_ID[:-1], RUNNER_ID.upper(), "x#" + RUNNER_ID, RUNNER_ID + "#", "bo\u0445#\u0430"]
    for strange in ("", "#", "box-7", "box-7#", "#" + fingerprint, *around):
        assert not owns_runner_id(strange, RUNNER_KEY.public_key), strange
    for name in ("", " ", "a#b", " node", "node\n", "\u202ebox", "x" * (WIRE.node_name_chars + 1)):
        with pytest.raises(ValueError, match="name of a node"):
            make_runner_id(name, RUNNER_KEY.public_key)


ROUNDS = int(os.environ.get("MUSTER_TEST_MUTATIONS", "400"))
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2**53 - 1, 2**64, 1.0, "", " ", "*", "1", "ada", "admin1", "zoe", "webauthn", "ed25519",
    "model-unload", [], ["ada"], ["a", "b"], [1], [[]], {}, {"a": 1}, "\x00", "ä", "\ud800", "=", "AA", "A" * 400, "L0", 300,
    "box-7", float("nan"),
)  # fmt: skip
THREE = make_policy(PEOPLE, classes={"model-load": {**DEFAULT_CLASSES["model-load"], "threshold": 3}})
ADA = PEOPLE[0]
STATEMENT = make_statement(THREE, params=PARAMS, targets=[BOX])
PROOFS = [*approve(STATEMENT, PEOPLE[:2]), PEOPLE[2].approve(STATEMENT, key=PEOPLE[2].key_file)]
OTHER = edit_statement(STATEMENT, opId="op-2")
STRAY = [ADA.approve(STATEMENT, key=key) for key in (ADA.second, ADA.key_file)] + [
    person.approve(OTHER, key=key) for person in PEOPLE[:3] for key in (person.passkey, person.key_file)
]
"""More proofs of one person, and proofs of another statement."""
TOKENS = {
    "L0": (make_l0(), make_verifier(Level.L0)), "L1": (make_l1(), make_verifier(Level.L1)),
    "L2": (make_l2(statement=STATEMENT, proofs=PROOFS), make_verifier(Level.L2, policy=THREE)),
}  # fmt: skip


def resigned(token: Token) -> Token:
    """The token as an issuer would sign it who wants it accepted: claims about the statement follow the statement."""
    try:
        digest = hashlib.sha256(b"op-statement/v1\x00" + decode_bytes(token.get("statement"))).hexdigest()
    except ApprovalError:
        digest = "0" * 64
    return {**token, **sign_claims({**token["opToken"], "stmtDigest": digest})}


def bend(raw: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(raw))
    spare = chance.choice(string.printable).encode() * chance.randrange(3)
    return raw[:at] + chance.choice([bytes([raw[at] ^ 1 << chance.randrange(8)]), spare]) + raw[at + 1 :]


def alter(holder: dict[str, Any], chance: random.Random) -> None:
    """Change one member: drop it, rename it, swap it, or put something odd or nearly right in its place."""
    name, other = chance.sample(sorted(holder), 2)
    value = holder[name]
    match chance.randrange(5):
        case 0:
            del holder[name]
        case 1:
            holder[name + chance.choice(["_", "s"])] = holder.pop(name)
        case 2:
            holder[name], holder[other] = holder[other], holder[name]
        case 3 if isinstance(value, int):
            holder[name] = value + chance.choice([-1, 1, 60, -300, 10**6])
        case 3 if isinstance(value, str) and value:
            holder[name] = bend(value.encode(), chance).decode("latin-1")
        case 3 if isinstance(value, list):
            holder[name] = chance.choice([value[:1], [*value, "admin3"], [*value, value[0]], [value]])
        case _:
            holder[name] = copy.deepcopy(chance.choice(ODD))


def change_the_text(token: Token, chance: random.Random) -> str:
    text = encode_token(token) if chance.random() < 0.3 else json.dumps(token)
    return bend(text.encode(), chance).decode("latin-1")


def change_a_member(token: Token, chance: random.Random) -> Token:
    alter(chance.choice([token, token["opToken"], token["opToken"], *token.get("proofs", [])]), chance)
    return token


def say_a_name_twice(token: Token, chance: random.Random) -> str:
    name = chance.choice(sorted(token["opToken"]))
    return json.dumps(token).replace('{"operation"', f'{{"{name}": {json.dumps(chance.choice(ODD))}, "operation"', 1)


def shuffle_what_means_nothing(token: Token, chance: random.Random) -> str:
    chance.shuffle(token.get("proofs", []))
    members = list(token.items())
    chance.shuffle(members)
    return json.dumps(dict(members), indent=chance.choice([None, 1]), ensure_ascii=chance.random() < 0.5)


# With the issuer's key


def alter_the_statement(token: Token, chance: random.Random) -> Token:
    return resigned({**token, "statement": encode_bytes(bend(STATEMENT.raw, chance))})


def alter_a_spelling(token: Token, chance: random.Random) -> Token:
    holder = chance.choice([token, *token["proofs"]])
    name = chance.choice([name for name in ("statement", "signature", "clientDataJSON", "authenticatorData") if name in holder])
    padded, bent = holder[name] + chance.choice("=\n A"), bend(holder[name].encode(), chance).decode("latin-1")
    holder[name] = chance.choice([padded, bent])
    return resigned(token) if holder is not token else token


def alter_a_proof(token: Token, chance: random.Random) -> Token:
    alter(chance.choice(token["proofs"]), chance)
    return resigned(token)


def swap_between_proofs(token: Token, chance: random.Random) -> Token:
    one, two = chance.sample(token["proofs"], 2)
    name = chance.choice(["signature", "approver", "keyid", "clientDataJSON", "authenticatorData", "type"])
    name = "signature" if one.get(name) == two.get(name) else name
    one[name], two[name] = two.get(name), one.get(name)
    return resigned(token)


def bring_a_stray_proof(token: Token, chance: random.Random) -> Token:
    token["proofs"][chance.choice([1, 2])] = chance.choice(STRAY)  # behind a proof of ADA
    if chance.random() < 0.3:
        token["proofs"][1:] = STRAY[:2]
    return resigned(token)


OF_STRANGERS = (change_the_text, change_a_member, say_a_name_twice, shuffle_what_means_nothing)
OF_THE_ISSUER = (alter_the_statement, alter_a_spelling, alter_a_proof, swap_between_proofs, bring_a_stray_proof)


def meaning(token: object) -> object:
    """What an accepted mutant must share with the original: all but the order of the proofs and the spelling of the MAC."""
    read = read_token(token)
    proofs: Any = read.extra.get("proofs", [])
    mac = bytes.fromhex(read.signature) if len(read.signature) == 64 else base64.urlsafe_b64decode(read.signature + "=")
    return dict(read.claims), mac, read.extra.get("statement"), sorted(json.dumps(proof, sort_keys=True) for proof in proofs)


CASES = [*((level, OF_STRANGERS) for level in TOKENS), ("L2", OF_THE_ISSUER)]


@pytest.mark.timeout(max(240, ROUNDS // 20))
@pytest.mark.parametrize(("level", "mutations"), CASES, ids=[*TOKENS, "L2 by its issuer"])
def test_of_mutated_tokens_only_those_of_the_same_meaning_are_accepted(
    level: str, mutations: tuple[Callable[[Token, random.Random], object], ...]
) -> None:
    chance, (token, verifier) = random.Random(f"mutations of {level}"), TOKENS[level]
    verify(token, verifier)
    assert level != "L2" or verify(resigned(token), verifier).approvers == ("ada", "bob", "cleo")
    original, accepted, refused = meaning(token), Counter[str](), Counter[str]()
    for number in range(ROUNDS):
        mutate = mutations[number % len(mutations)]
        mutant = mutate(copy.deepcopy(token), chance)
        try:
            verify(mutant, verifier)
        except OpTokenError as error:
            refused[mutate.__name__] += 1
            refused[str(error)] += 1
        else:
            assert meaning(mutant) == original, (mutate.__name__, mutant)
            accepted[mutate.__name__] += 1
    # The harness itself: the harmless change always passes, and every other kind is refused nearly always.
    for mutate in mutations:
        share = refused[mutate.__name__] * len(mutations) / ROUNDS
        assert share == 0 if mutate is shuffle_what_means_nothing else share > 0.8, mutate.__name__
    if mutations is OF_THE_ISSUER:
        wanted = {"bad_proof", "bad_proof_signature", "wrong_challenge", "unknown_key", "duplicate_proof"}
        assert wanted <= {reason.removeprefix("not_approved (").rstrip(")") for reason in refused}
