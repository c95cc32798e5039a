"""Receipts, and the names of boxes that carry the key which signs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.passkeys import KeyFile, SoftPasskey
from wire.limits import WIRE
from wire.optoken.approval import RECEIPT_DOMAIN, canonical, decode_bytes, encode_bytes, read_canonical
from wire.optoken.identity import make_runner_id, owns_runner_id
from wire.optoken.receipt import Receipt, ReceiptError, digest_result, read_receipt, sign_receipt

KEY, OTHER = KeyFile(), KeyFile()
BOX = make_runner_id("box-7", KEY.public_key)
RECEIPT = Receipt(
    op_id="op-1", use=1, statement_digest="ab" * 32, runner_id=BOX, operation="model-load", outcome="succeeded",
    result_digest=digest_result({"status": "loaded", "seconds": 1.5}), fence=7, started_at=1_745_880_000,
    ended_at=1_745_880_060, checkpoint="1024",
)  # fmt: skip


def sign_members(key: KeyFile = KEY, **members: Any) -> str:
    """A receipt well signed over any members; ``...`` leaves one out."""
    envelope = read_canonical(decode_bytes(sign_receipt(KEY.private_key, RECEIPT)), limit=4096)
    changed = {**envelope["receipt"], **members}  # type: ignore[dict-item]  # an object in a test
    body = {name: value for name, value in changed.items() if value is not ...}
    signature = key.private_key.sign(RECEIPT_DOMAIN + canonical(body))
    return encode_bytes(canonical({"receipt": body, "signature": encode_bytes(signature)}))


def test_a_receipt_comes_back_as_it_was_signed() -> None:
    for receipt in (RECEIPT, replace(RECEIPT, outcome="failed", statement_digest="", checkpoint=""), replace(RECEIPT, use=20)):
        assert read_receipt(sign_receipt(KEY.private_key, receipt), KEY.public_key) == receipt


def test_a_receipt_signed_by_another_box_is_refused() -> None:
    text = sign_receipt(OTHER.private_key, RECEIPT)
    for key in (KEY, OTHER):  # Bad signature; and a good one of a box that has another name.
        with pytest.raises(ReceiptError):
            read_receipt(text, key.public_key)


ROWS: dict[str, str] = {
    "version 2": sign_members(v=2),
    "version true": sign_members(v=True),
    "member left out": sign_members(fence=...),
    "member more": sign_members(note="x"),
    "outcome unknown": sign_members(outcome="fine"),
    "outcome a list": sign_members(outcome=["failed"]),
    "use 0": sign_members(use=0),
    "use true": sign_members(use=True),
    "time as text": sign_members(startedAt="now"),
    "digest in capitals": sign_members(resultDigest="AB" * 32),
    "digest too short": sign_members(resultDigest="ab"),
    "digest a number": sign_members(statementDigest=7),
    "runner id without a key": sign_members(runnerId="box-7"),
    "runner id a number": sign_members(runnerId=7),
    "another box": sign_members(runnerId=make_runner_id("box-7", OTHER.public_key)),
    "endless checkpoint": sign_members(checkpoint="1" * 301),
    "not base64url": "{}",
    "not JSON": encode_bytes(b"no"),
    "no envelope": encode_bytes(b"{}"),
    "too large": encode_bytes(canonical({"receipt": "x" * 9000, "signature": ""})),
    "no object": encode_bytes(canonical({"receipt": [], "signature": ""})),
    "signature a number": encode_bytes(canonical({"receipt": {}, "signature": 7})),
}


@pytest.mark.parametrize("text", ROWS.values(), ids=ROWS)
def test_a_receipt_has_exactly_its_members(text: str) -> None:
    with pytest.raises(ReceiptError):
        read_receipt(text, KEY.public_key)


@pytest.mark.parametrize("public_key", [SoftPasskey().public_key, b"", b"no key"], ids=["passkey", "empty", "none"])
def test_only_an_ed25519_key_signs_receipts(public_key: bytes) -> None:
    with pytest.raises(ReceiptError):
        read_receipt(sign_receipt(KEY.private_key, RECEIPT), public_key)


@pytest.mark.parametrize(
    "changes", [{"use": 0}, {"outcome": "fine"}, {"op_id": ""}, {"op_id": "a\nb"}, {"fence": 1.5}], ids=repr
)
def test_what_could_not_be_read_is_not_signed(changes: dict[str, Any]) -> None:
    with pytest.raises(ReceiptError):
        sign_receipt(KEY.private_key, replace(RECEIPT, **changes))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_flipped_bit_goes_unseen(data: st.DataObject) -> None:
    raw = bytearray(decode_bytes(sign_receipt(KEY.private_key, RECEIPT)))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ReceiptError):
        read_receipt(encode_bytes(bytes(raw)), KEY.public_key)


def test_the_digest_of_a_result_does_not_depend_on_the_order_of_its_members() -> None:
    assert digest_result({"a": 1, "b": [1.5, None]}) == digest_result({"b": [1.5, None], "a": 1})
    assert digest_result({"a": 1}) != digest_result({"a": True})
    with pytest.raises(ValueError, match="JSON"):
        digest_result({"a": float("nan")})


def test_a_runner_id_names_the_key_of_its_box() -> None:
    name, _, fingerprint = BOX.partition("#")
    assert (name, len(fingerprint), fingerprint) == ("box-7", 26, fingerprint.lower())
    assert owns_runner_id(BOX, KEY.public_key)
    assert not owns_runner_id(BOX, OTHER.public_key)


STRANGE_IDS = (
    "", "#", "box-7", "box-7#", "#" + BOX.partition("#")[2], BOX + "a", BOX[:-1], BOX.upper(), "x#" + BOX, BOX + "#",
    "bo\u0445#\u0430",
)  # fmt: skip


@pytest.mark.parametrize("runner_id", STRANGE_IDS, ids=range(len(STRANGE_IDS)))
def test_nothing_else_is_the_runner_id_of_a_key(runner_id: str) -> None:
    assert not owns_runner_id(runner_id, KEY.public_key)


@pytest.mark.parametrize("name", ["", " ", "a#b", " box", "box\n", "\u202ebox", "x" * (WIRE.node_name_chars + 1)], ids=range(7))
def test_a_name_that_could_be_read_in_two_ways_makes_no_runner_id(name: str) -> None:
    with pytest.raises(ValueError, match="name of a box"):
        make_runner_id(name, KEY.public_key)
