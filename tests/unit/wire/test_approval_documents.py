"""Statements and policies: one spelling, no member more or less; and the evidence of an operation as an auditor reads it."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import dsa, ec, rsa, x25519
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.examples import examples
from tests.fakes.passkeys import KeyFile, SoftPasskey, spki_of
from tests.fakes.policies import (
    ANN,
    NOW,
    OTHER_BOX_KEY,
    PROVEN,
    SECOND,
    Person,
    make_batch,
    make_bundle,
    make_people,
    make_policy_bytes,
    make_receipt,
    make_statement,
)
from wire.optoken import approval
from wire.optoken.approval import (
    BREAK_GLASS,
    MAX_INTEGER,
    MAX_POLICY_BYTES,
    MAX_STATEMENT_BYTES,
    STATEMENT_DOMAIN,
    ApprovalError,
    PolicyRef,
    Rule,
    Statement,
    canonical,
    decode_bytes,
    digest_words,
    encode_bytes,
    load_public_key,
    policy_words,
    read_canonical,
    read_policy,
    read_statement,
    verify_bundle,
    verify_receipts,
)
from wire.optoken.documents import DEFAULT_CLASSES, build_statement, digest_reason
from wire.optoken.op_token import make_runner_id

PEOPLE = make_people(3)
POLICY = read_policy(make_policy_bytes(PEOPLE))
STATEMENT = make_statement(POLICY)

TEXTS = st.text(st.characters(exclude_categories=["C", "Zl", "Zp", "Zs"]) | st.just(" "), max_size=20)
NAMES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=10)
LEAVES = st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=4), max_leaves=6
)
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=4)


def rule_of(read: Any, *arguments: Any, **named: Any) -> Rule:
    with pytest.raises(ApprovalError) as caught:
        read(*arguments, **named)
    return caught.value.rule


@examples(25)
@given(DOCUMENTS)
def test_canonical_bytes_are_those_of_another_implementation_of_the_rfc(value: dict[str, Any]) -> None:
    assert canonical(value) == rfc8785.dumps(value)
    assert read_canonical(canonical(value), limit=10**6) == value


@examples(25)
@given(DOCUMENTS, st.sampled_from([{"indent": 1}, {"separators": (", ", ": ")}, {"ensure_ascii": True}, {"reverse": True}]))
def test_every_other_spelling_of_a_document_is_refused(value: dict[str, Any], style: dict[str, Any]) -> None:
    turned = dict(sorted(value.items(), reverse=True)) if style.pop("reverse", False) else value
    spelled = json.dumps(turned, **{"separators": (",", ":"), "ensure_ascii": False, **style}).encode()
    if spelled == canonical(value):
        return
    assert rule_of(read_canonical, spelled, limit=10**6) is Rule.NOT_CANONICAL


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b"7", b"null", b'{"a":1.0}', b'{"a":1e3}', b'{"a":-0}', b'{"a":NaN}', b'{"a":null}', b'{"a":01}',
        b'{"a":1,"a":1}', b'{"b":1,"a":1}', b'{"a":1} ', b'\xef\xbb\xbf{"a":1}', b'{"a":"\xff"}', b'{"a":"\\u0061"}',
        b'{"a":"\\ud800"}', b'{"a":"x\\ny"}', '{"a":"\u202ex"}'.encode(), '{"a":"\u200bx"}'.encode(), '{"ä":1}'.encode(),
        b'{"a":"\x7f"}', b'{"a":9007199254740992}', b'{"a":' + b"9" * 5000 + b"}", b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}",
        b'{"a":"' + b"x" * 20_000 + b'"}'], ids=range(27),
)  # fmt: skip
def test_what_is_not_canonical_is_refused(raw: bytes) -> None:
    assert rule_of(read_canonical, raw, limit=20_000) is Rule.NOT_CANONICAL


def test_what_cannot_be_signed_and_other_spellings_of_bytes_are_refused() -> None:
    for value in (1.0, None, float("nan"), b"x", {1: 2}, {("a",): 1}, {"ä": 1}, "\ud800", object(), {1, 2}):
        for nested in ({"a": value}, {"a": [value]}, {"a": {"b": value}}):
            assert rule_of(canonical, nested) is Rule.NOT_CANONICAL
    others = ("=", "AA==", "A", "AB", "A A", "AA\n", "+/+/", "é", "QQ=", None, 7, b"QQ", ["QQ"], "A" * 200_000)
    for text in others:
        assert rule_of(decode_bytes, text) is Rule.BAD_PROOF


def test_words_are_those_of_the_published_examples() -> None:
    """The example of the proquint paper: 127.0.0.1 is lusab-babad, 63.84.220.193 is gutih-tugad."""
    assert digest_words(bytes([127, 0, 0, 1, 63, 84, 220, 193]) + bytes(24)) == "lusab-babad-gutih-tugad-babab-babab"
    assert len(digest_words(STATEMENT.digest).split("-")) == 6
    assert policy_words(STATEMENT.digest.hex()).startswith(digest_words(STATEMENT.digest) + "-")
    assert len(policy_words(STATEMENT.digest.hex()).split("-")) == 12


# Statements


def spelled(statement: Statement = STATEMENT, **members: Any) -> bytes:
    """The bytes of the valid statement with other members; ``...`` leaves one out, ``class_`` stands for ``class``."""
    changed = json.loads(statement.raw) | {name.rstrip("_"): value for name, value in members.items()}
    return canonical({name: value for name, value in changed.items() if value is not ...})


def test_a_statement_is_what_was_proposed() -> None:
    assert read_statement(STATEMENT.raw) == STATEMENT
    assert STATEMENT.raw == spelled()
    assert (STATEMENT.reason_digest, STATEMENT.policy) == (digest_reason("needed"), POLICY.ref)
    assert STATEMENT.digest.hex() == hashlib.sha256(STATEMENT_DOMAIN + STATEMENT.raw).hexdigest()


BATCH = make_statement(POLICY, targets=["box-7", "box-8"], stops_on_failure=False)
EARLIER = (
    b'{"class":"model-load","maxUses":1,"notAfter":1745883600,"notBefore":1745880000,"opId":"op-1","operation":"model-load",'
    b'"params":{"modelId":"org/model"},"policy":{"id":"main","sha256":"00","version":1},"reasonDigest":"ab",'
    b'"requestedAt":1745880000,"requestedBy":"zoe","targets":["box-7","box-8"],"v":1}'
)
"""A batch as the first format wrote it."""


def test_a_batch_says_what_a_failure_does_to_the_rest_and_one_of_the_first_format_stops() -> None:
    assert (json.loads(BATCH.raw)["v"], json.loads(BATCH.raw)["stopsOnFailure"]) == (2, False)
    assert not read_statement(BATCH.raw).stops_on_failure
    stopping = make_statement(POLICY, targets=["box-7", "box-8"])
    assert read_statement(stopping.raw).stops_on_failure
    assert stopping.digest != BATCH.digest
    alone = make_statement(POLICY, stops_on_failure=False)  # of one target: as nodes have always read it
    assert (alone.raw, json.loads(alone.raw)["v"], alone.stops_on_failure) == (STATEMENT.raw, 1, True)
    earlier = read_statement(EARLIER)
    assert earlier.stops_on_failure
    assert earlier.digest.hex() == hashlib.sha256(b"op-statement/v1\x00" + EARLIER).hexdigest()


BATCH_ROWS: dict[str, dict[str, Any]] = {
    "the member missing": {"stopsOnFailure": ...}, "the member as a number": {"stopsOnFailure": 0},
    "the member as text": {"stopsOnFailure": "false"}, "the member in the first format": {"v": 1}, "a format to come": {"v": 3},
}  # fmt: skip


STATEMENT_ROWS: dict[str, dict[str, Any]] = {
    "version 2 without its member": {"v": 2}, "version true": {"v": True}, "version as text": {"v": "1"},
    "a member more": {"note": "x"}, "a member less": {"reasonDigest": ...}, "opId empty": {"opId": ""},
    "opId a number": {"opId": 7}, "opId with outer blanks": {"opId": " op-1"}, "opId endless": {"opId": "x" * 301},
    "class empty": {"class_": ""}, "no targets": {"targets": []}, "targets as text": {"targets": "box-7"},
    "one target twice": {"targets": ["box-7", "box-7"]}, "an empty target": {"targets": [""]},
    "a target with outer blanks": {"targets": ["box-7 "]}, "a target that is a number": {"targets": [7]},
    "a target that is a list": {"targets": [["box-7"]]},
    "a crowd of targets": {"targets": [f"box-{number}" for number in range(65)]},
    "params a list": {"params": []}, "policy as text": {"policy": "main"},
    "policy with a member more": {"policy": {"id": "main", "version": 1, "sha256": "x", "url": "y"}},
    "policy version 0": {"policy": {"id": "main", "version": 0, "sha256": "x"}},
    "policy version true": {"policy": {"id": "main", "version": True, "sha256": "x"}},
    "requestedBy empty": {"requestedBy": ""}, "requestedAt negative": {"requestedAt": -1},
    "notBefore true": {"notBefore": True}, "notAfter as text": {"notAfter": "1"}, "maxUses 0": {"maxUses": 0},
}  # fmt: skip


MEMBER_ROWS = {name: spelled(**members) for name, members in STATEMENT_ROWS.items()} | {
    f"of a batch: {name}": spelled(BATCH, **members) for name, members in BATCH_ROWS.items()
}


@pytest.mark.parametrize("raw", MEMBER_ROWS.values(), ids=MEMBER_ROWS)
def test_a_statement_has_exactly_its_members(raw: bytes) -> None:
    assert rule_of(read_statement, raw) is Rule.BAD_STATEMENT


def test_documents_have_a_bounded_size() -> None:
    large = canonical(json.loads(STATEMENT.raw) | {"params": {"x": "y" * MAX_STATEMENT_BYTES}})
    assert rule_of(read_statement, large) is Rule.NOT_CANONICAL
    assert rule_of(read_policy, edited(origins=["x" * 300 + str(number) for number in range(300)])) is Rule.NOT_CANONICAL
    assert MAX_POLICY_BYTES == 65_536


def test_a_proposal_that_nobody_could_read_is_no_statement() -> None:
    fields: dict[str, Any] = {
        "op_id": "op-1", "operation": "model-load", "op_class": "model-load", "targets": ["box-7"], "requested_by": "zoe",
        "policy_ref": PolicyRef("main", 1, "0" * 64), "reason": "any text,\nalso several lines", "requested_at": NOW,
        "not_before": NOW, "not_after": NOW + 60, "max_uses": 1,
    }  # fmt: skip
    assert build_statement(**fields, params={"n": 1}).params == {"n": 1}
    assert rule_of(build_statement, **fields, params={"n": 0.5}) is Rule.NOT_CANONICAL
    assert rule_of(build_statement, **fields, params={"n": None}) is Rule.NOT_CANONICAL
    assert rule_of(build_statement, **{**fields, "targets": []}, params={}) is Rule.BAD_STATEMENT


# Policies


def edited(people: list[Person] = PEOPLE, **members: Any) -> bytes:
    """The bytes of the valid policy with other members; ``...`` leaves one out."""
    classes = {name: dict(needs) for name, needs in DEFAULT_CLASSES.items() if name != BREAK_GLASS}
    changed = json.loads(make_policy_bytes(people, classes={})) | {"classes": classes} | members
    return canonical({name: value for name, value in changed.items() if value is not ...})


def with_class(name: str = "model-load", people: list[Person] = PEOPLE, **members: Any) -> bytes:
    classes = {**DEFAULT_CLASSES, name: {**DEFAULT_CLASSES.get(name, DEFAULT_CLASSES["model-load"]), **members}}
    plain = {key: dict(value) for key, value in classes.items() if key != BREAK_GLASS or name == BREAK_GLASS}
    return edited(people, classes=plain)


def approver(**members: Any) -> dict[str, Any]:
    own: dict[str, Any] = json.loads(make_policy_bytes(PEOPLE))["approvers"][0]
    return {name: value for name, value in {**own, **members}.items() if value is not ...}


def with_key(**members: Any) -> bytes:
    key = {**approver()["keys"][0], **members}
    first = approver(keys=[{name: value for name, value in key.items() if value is not ...}])
    return edited(approvers=[first, *json.loads(make_policy_bytes(PEOPLE))["approvers"][1:]])


def other_key(key: Any) -> str:
    return encode_bytes(key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


REST = json.loads(make_policy_bytes(PEOPLE))["approvers"][1:]
ADA = PEOPLE[0]
COMPRESSED = bytes.fromhex(
    "3039301306072a8648ce3d020106082a8648ce3d030107032200"
) + ADA.passkey.private_key.public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)

POLICY_ROWS: dict[str, bytes] = {
    "version 2 of the format": edited(v=2), "version true of the format": edited(v=True), "a member more": edited(note="x"),
    "a member less": edited(logKeys=...), "version 0": edited(version=0),
    "a first version with a previous one": edited(previous="ab"), "a second version without a previous one": edited(version=2),
    "previous a number": edited(version=2, previous=7), "issuedAt as text": edited(issuedAt="now"),
    "expires before it was issued": edited(expiresAt=NOW - 90_000), "origins as text": edited(origins="https://muster.example"),
    "an origin twice": edited(origins=["https://a.example", "https://a.example"]),
    "an RP id that is a number": edited(rpIds=[7]), "no approvers": edited(approvers=[]),
    "approvers as an object": edited(approvers={}), "an approver that is text": edited(approvers=["ada"]),
    "an approver twice": edited(approvers=[approver(), approver(keys=REST[0]["keys"]), REST[1]]),
    "an approver with outer blanks": edited(approvers=[approver(id="ada "), *REST]),
    "an approver without keys": edited(approvers=[approver(keys=[]), *REST]),
    "an approver with many keys": edited(approvers=[approver(keys=approver()["keys"] * 3), *REST]),
    "an approver with a member more": edited(approvers=[approver(mail="x"), *REST]),
    "duplicate groups": edited(approvers=[approver(groups=["a", "a"]), *REST]),
    "groups of lists": edited(approvers=[approver(groups=[["a"]]), *REST]),
    "same key under two approvers": edited(approvers=[approver(), {**REST[0], "keys": approver()["keys"]}, REST[1]]),
    "same key under two approvers and two ids": edited(approvers=[approver(), {**REST[0], "keys": [{**approver()["keys"][0],
            "keyid": "other"}]}, REST[1]]),
    "same key as passkey and key file": edited(approvers=[approver(keys=[approver()["keys"][2], {**approver()["keys"][2],
            "keyid": "x", "type": "webauthn"}]), *REST]),
    "two keys of one id": edited(approvers=[approver(keys=[approver()["keys"][0], {**approver()["keys"][1],
            "keyid": ADA.passkey.keyid}]), *REST]), "key type unknown": with_key(type="totp"),
    "key type a list": with_key(type=["webauthn"]), "key type left out": with_key(type=...),
    "a P-256 key file": with_key(type="ed25519"), "break glass as a number": with_key(breakGlass=1),
    "break glass as text": with_key(breakGlass="no"), "keyid empty": with_key(keyid=""),
    "no key": with_key(publicKey=encode_bytes(b"no key")),
    "a key in PEM": with_key(publicKey=encode_bytes(b"-----BEGIN PUBLIC KEY-----")),
    "a short RSA key": with_key(publicKey=other_key(rsa.generate_private_key(65537, 1024))),
    "a P-384 key": with_key(publicKey=other_key(ec.generate_private_key(ec.SECP384R1()))),
    "a secp256k1 key": with_key(publicKey=other_key(ec.generate_private_key(ec.SECP256K1()))),
    "an X25519 key": with_key(publicKey=other_key(x25519.X25519PrivateKey.generate())),
    "a compressed P-256 key": with_key(publicKey=encode_bytes(COMPRESSED)),
    "a key with more behind it": with_key(publicKey=encode_bytes(ADA.passkey.public_key + b"\0")),
    "a key of an unknown algorithm": with_key(publicKey=encode_bytes(bytes.fromhex("302a300506032b6509032100") + bytes(32))),
    "classes a list": edited(classes=[]),
    "a crowd of classes": edited(classes={f"c{number}": dict(DEFAULT_CLASSES["model-load"]) for number in range(65)}),
    "a class that is text": edited(classes={"model-load": "2 of 3"}), "a class with a member more": with_class(note="x"),
    "a class without a member": edited(classes={"model-load": {"threshold": 2}}), "threshold 0": with_class(threshold=0),
    "threshold true": with_class(threshold=True), "threshold as text": with_class(threshold="2"),
    "M = N": with_class("policy-change", threshold=3), "M > N": with_class("policy-change", threshold=4),
    "a policy that fewer may change than may load": with_class(people=make_people(4), threshold=3),
    "a policy that fewer may change than a factor asks for": with_class(people=make_people(4, groups=["owners"]),
        factors={"owners": 3}), "a policy that one may change alone": with_class("policy-change", solo=True),
    "deny threshold 0": with_class(denyThreshold=0), "no uses": with_class(maxUses=0),
    "no time to use it": with_class(usableS=0), "solo as a number": with_class(solo=1),
    "device bound as text": with_class(deviceBound="yes"), "factors a list": with_class(factors=["owners"]),
    "a factor of nobody": with_class(factors={"owners": 1}), "a factor of 0": with_class(factors={"owners": 0}),
    "a factor of true": with_class(factors={"owners": True}),
    "a factor without end": with_class(factors={"owners": MAX_INTEGER}), "more key files than people": with_class(fileProofs=3),
    "operations as text": with_class(operations="model-load"), "proposers of lists": with_class(proposers=[["ada"]]),
    "break-glass without a key for it": with_class(BREAK_GLASS, threshold=1, dailyCap=2),
    "break-glass without a cap": with_class(BREAK_GLASS, make_people(3, break_glass=True), threshold=1, dailyCap=0),
    "break-glass that one lost key ends": with_class(BREAK_GLASS, [*make_people(1, break_glass=True), *make_people(4)[1:]],
        threshold=1, dailyCap=2),
}  # fmt: skip


@pytest.mark.parametrize("raw", POLICY_ROWS.values(), ids=POLICY_ROWS)
def test_a_policy_that_could_mislead_or_lock_out_is_refused(raw: bytes) -> None:
    assert rule_of(read_policy, raw) in {Rule.BAD_POLICY, Rule.BAD_PROOF}


def test_the_rows_above_differ_from_a_policy_that_is_read() -> None:
    for raw in (edited(), with_class(), with_key(), with_class(threshold=2, solo=True), with_class(fileProofs=2)):
        assert read_policy(raw).ref.version == 1
    with_factors = edited(
        make_people(3, groups=["owners"]), classes={"x": {**DEFAULT_CLASSES["unfreeze"], "factors": {"owners": 2}}}
    )
    assert read_policy(with_factors).classes["x"].required == 2


def test_more_proofs_than_a_token_may_carry_are_never_required() -> None:
    crowd = [Person(f"p{number}") for number in range(18)]
    assert rule_of(make_policy_bytes, crowd, classes={"x": {"operations": ["x"], "threshold": 17}}) is Rule.BAD_POLICY
    assert make_policy_bytes(crowd, classes={"x": {"operations": ["x"], "threshold": 16}})


def test_a_key_has_one_encoding_and_no_weakness() -> None:
    rsa_keys = {
        bits_and_exponent: spki_of(rsa.generate_private_key(bits_and_exponent[1], bits_and_exponent[0]))
        for bits_and_exponent in ((2048, 65537), (1024, 65537), (2048, 3))
    }
    for key in (SoftPasskey().public_key, KeyFile().public_key, rsa_keys.pop((2048, 65537))):
        assert load_public_key(key) is not None
    weak = dsa.generate_private_key(1024).public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    for key in (COMPRESSED, b"", weak, *rsa_keys.values()):
        assert rule_of(load_public_key, key) is Rule.BAD_POLICY


def list_points_of_small_order() -> list[bytes]:
    """Return every encoding of a point of edwards25519 that is neutral after three doublings, also those with y beyond p.

    RFC 8032 section 5.1: -x^2 + y^2 = 1 + d x^2 y^2 modulo p.
    """
    p = 2**255 - 19
    d = -121665 * pow(121666, -1, p) % p

    def roots(square: int) -> set[int]:
        root = pow(square, (p + 3) // 8, p)
        return {r for each in (root, root * pow(2, (p - 1) // 4, p)) for r in (each % p, -each % p) if r * r % p == square % p}

    # Order 1 and 2: x = 0. Order 4: y = 0. Order 8: doubling leads to y = 0, so x^2 = -y^2 and d y^4 + 2 y^2 - 1 = 0.
    of_order_8 = {y for root in roots(1 + d) for y in roots((root - 1) * pow(d, -1, p))}
    found = {0, 1, p - 1} | of_order_8
    assert len(of_order_8) == 2
    again = {y + p for y in found if y + p < 2**255}
    return [(y | sign << 255).to_bytes(32, "little") for y in sorted(found | again) for sign in (0, 1)]


SPKI_OF_ED25519 = bytes.fromhex("302a300506032b6570032100")


@pytest.mark.parametrize("point", list_points_of_small_order(), ids=bytes.hex)
def test_a_key_for_which_anybody_could_sign_is_refused(point: bytes) -> None:
    forged = b"\x01" + bytes(31) + bytes(32)  # made without any key: R is the neutral point and S is 0
    key = Ed25519PublicKey.from_public_bytes(point)

    def is_taken(message: bytes) -> bool:
        with contextlib.suppress(InvalidSignature):
            key.verify(forged, message)
            return True
        return False

    assert any(is_taken(bytes([n])) for n in range(64))
    assert rule_of(load_public_key, SPKI_OF_ED25519 + point) is Rule.BAD_POLICY


@examples(25)
@given(st.sampled_from(sorted(json.loads(POLICY.raw))), VALUES)
def test_anything_at_all_in_place_of_a_member_is_refused_and_never_breaks_the_reader(name: str, odd: Any) -> None:
    for raw in (edited(**{name: odd}), with_key(publicKey=odd), with_class(factors=odd), edited(approvers=[odd])):
        with contextlib.suppress(ApprovalError):
            assert read_policy(raw).raw == raw


PROGRAM = Path(approval.__file__)


def test_the_program_imports_nothing_of_ours() -> None:
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in modules} - sys.stdlib_module_names == {"cryptography"}


CHANGED_BATCH = make_batch(format_version=2)
CHANGED_BATCH["statement"] = encode_bytes(
    canonical(json.loads(decode_bytes(CHANGED_BATCH["statement"])) | {"stopsOnFailure": True})
)

BUNDLE_ROWS: dict[str, tuple[dict[str, Any], Rule]] = {
    "no policies": ({"policies": []}, Rule.WRONG_POLICY), "policies as text": ({"policies": "x"}, Rule.BAD_POLICY),
    "policies without the first": ({"policies": make_bundle()["policies"][1:]}, Rule.WRONG_POLICY),
    "policies without the one that is named": ({"policies": make_bundle()["policies"][:1]}, Rule.WRONG_POLICY),
    "another end of a batch": (CHANGED_BATCH, Rule.WRONG_CHALLENGE), "proofs left out": ({"proofs": None}, Rule.WRONG_POLICY),
    "statement left out": ({"statement": None}, Rule.BAD_PROOF),
    "statement changed": ({"statement": encode_bytes(PROVEN.raw.replace(b'"requestedBy":"zoe"', b'"requestedBy":"zo3"'))},
        Rule.WRONG_CHALLENGE),
    "requester among the approvers": ({"statement": encode_bytes(PROVEN.raw.replace(b'"requestedBy":"zoe"',
            b'"requestedBy":"ada"'))}, Rule.WRONG_CHALLENGE),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "rule"), BUNDLE_ROWS.values(), ids=BUNDLE_ROWS)
def test_evidence_that_does_not_hold_is_refused(changes: dict[str, Any], rule: Rule) -> None:
    with pytest.raises(ApprovalError) as caught:
        verify_bundle(make_bundle(**changes))
    assert caught.value.rule is rule


def test_evidence_names_the_policy_the_statement_and_who_approved() -> None:
    policy, statement, verdict = verify_bundle(make_bundle())
    assert (policy, statement, verdict.approved_by) == (SECOND, PROVEN, ("ada", "dan"))
    assert [receipt["outcome"] for receipt in verify_receipts(make_bundle(), statement)] == ["succeeded"]
    assert verify_receipts({}, statement) == []


RECEIPT_ROWS: dict[str, Any] = {
    "of another operation": [make_receipt(statement_digest="ab" * 32)], "of no statement": [make_receipt(statement_digest="")],
    "of a node that was not asked": [make_receipt(OTHER_BOX_KEY, runner_id=make_runner_id("box-8", OTHER_BOX_KEY.public_key))],
    "signed by another node": [make_receipt(KeyFile())],
    "checked with another key": [{**make_receipt(), "publicKey": encode_bytes(KeyFile().public_key)}],
    "checked with a passkey": [{**make_receipt(), "publicKey": encode_bytes(ANN.passkey.public_key)}],
    "not a list": {"receipt": "x"}, "null": [None], "with a member more": [{**make_receipt(), "note": "x"}],
}  # fmt: skip


@pytest.mark.parametrize("receipts", RECEIPT_ROWS.values(), ids=RECEIPT_ROWS)
def test_receipts_of_others_are_refused(receipts: Any) -> None:
    with pytest.raises(ApprovalError) as caught:
        verify_receipts(make_bundle(receipts=receipts), PROVEN)
    assert caught.value.rule in {Rule.BAD_RECEIPT, Rule.BAD_PROOF}
