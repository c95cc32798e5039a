"""Reading what stands in ``verifiedOpToken``."""

from __future__ import annotations

import base64
import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.signed_tokens import make_l0, make_l1, verify
from wire.limits import WIRE
from wire.optoken import OpTokenError, Reason, encode_token, read_token
from wire.optoken.signed_token import decode_base64url


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


def test_a_token_cannot_be_changed_once_it_is_read() -> None:
    token = make_l0()
    read = read_token(token)
    token["opToken"]["nonce"] = "changed later"
    assert read.claims["nonce"] == "0123456789abcdef"
    with pytest.raises(TypeError):
        read.claims["nonce"] = "x"  # type: ignore[index]  # that is the point


@pytest.mark.parametrize(
    "value", [None, 7, 1.5, True, [], b"{}", "", "  ", "{", "[]", "null", "é", "\ud800", '{"a":1}x', "\ufeff{}"]
)
def test_what_is_no_token_at_all_is_malformed(value: object) -> None:
    assert refusal(value) is Reason.MALFORMED


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"opToken": {}},
        {"signature": "00"},
        {"opToken": [], "signature": "00"},
        {"opToken": {}, "signature": 7},
        {"opToken": "{}", "signature": "00"},
    ],
    ids=repr,
)
def test_a_token_has_claims_and_a_signature(value: object) -> None:
    assert refusal(value) is Reason.BAD_FIELD


@pytest.mark.parametrize("item", [True, None, {}, {"a": 1}, [1], [["a"]], [None]], ids=repr)
def test_a_claim_is_text_an_integer_or_a_list_of_texts(item: object) -> None:
    token = make_l0()
    token["opToken"]["extra"] = item
    assert refusal(token) is Reason.BAD_FIELD
    assert refusal(json.dumps(token)) is Reason.BAD_FIELD


@pytest.mark.parametrize(
    "raw", ["1.0", "1e3", "NaN", "Infinity", "-Infinity", "-0", "9007199254740992", "9" * 5000, '"\\ud800"', "01", "+1", "0x1"]
)
def test_numbers_and_texts_that_readers_disagree_on_are_malformed(raw: str) -> None:
    assert refusal(spell(make_l0(), issuedAt=raw)) is Reason.MALFORMED


@pytest.mark.parametrize("raw", [1.0, float("nan"), 2**53])
def test_the_same_numbers_are_malformed_in_an_object(raw: object) -> None:
    token = make_l0()
    token["opToken"]["issuedAt"] = raw
    assert refusal(token) is Reason.MALFORMED


@pytest.mark.parametrize(
    "text",
    [
        '{"opToken":{"operation":"a","operation":"b"},"signature":""}',
        '{"opToken":{"operation":"a","oper\\u0061tion":"b"},"signature":""}',
        '{"opToken":{},"opToken":{},"signature":""}',
        '{"opToken":{},"signature":"a","signature":"a"}',
        '{"opToken":{},"signature":"","proofs":[{"a":1,"a":1}]}',
    ],
)
def test_a_key_that_stands_twice_is_refused_wherever_it_stands(text: str) -> None:
    assert refusal(text) is Reason.DUPLICATE_KEY
    assert refusal(base64.urlsafe_b64encode(text.encode()).decode()) is Reason.DUPLICATE_KEY


def test_keys_are_ascii() -> None:
    assert refusal({"opToken": {"operatiön": "a"}, "signature": ""}) is Reason.MALFORMED
    # CYRILLIC SMALL LETTER A looks like the Latin one.
    assert refusal({"opToken": {}, "sign\u0430ture": "", "signature": ""}) is Reason.MALFORMED


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_nesting_is_refused_however_it_comes(opening: str) -> None:
    depth = WIRE.token_bytes // len(opening) // 2
    closing = "]" if opening == "[" else "}"
    text = f'{{"opToken":{{}},"signature":"","x":{opening * depth}1{closing * depth}}}'[: WIRE.token_bytes]
    assert refusal(text) is Reason.MALFORMED
    assert refusal({"opToken": {}, "signature": "", "x": json.loads("[" * 17 + "]" * 17)}) is Reason.MALFORMED


def test_a_token_of_a_megabyte_is_refused_in_every_form() -> None:
    token = {**make_l0(), "x": "A" * 1_000_000}
    text = json.dumps(token)
    for value in (token, text, base64.urlsafe_b64encode(text.encode()).decode(), "A" * 1_000_000, " " * 1_000_000):
        assert refusal(value) is Reason.TOO_LARGE


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


def test_blanks_inside_a_token_count_too() -> None:
    text = json.dumps(make_l0()).replace(", ", "," + " " * WIRE.token_bytes, 1)
    assert refusal(text) is Reason.TOO_LARGE
    assert refusal(base64.urlsafe_b64encode(text.encode()).decode()) is Reason.TOO_LARGE


@given(st.binary(max_size=64))
def test_base64url_has_one_spelling_with_and_without_padding(content: bytes) -> None:
    padded = base64.urlsafe_b64encode(content).decode()
    bare = padded.rstrip("=")
    assert decode_base64url(padded) == decode_base64url(bare) == content
    alphabet = string.ascii_letters + string.digits + "-_"
    spellings = [bare[:-1] + last for last in alphabet] if bare else []
    assert sum(decode_base64url(spelling) == content for spelling in spellings) == bool(bare)
    if padded != bare:
        assert decode_base64url(padded + "=") is None
        assert decode_base64url(padded[:-1]) == (None if padded.endswith("==") else content)


@pytest.mark.parametrize("text", ["a", "aa+a", "aa/a", "aaa a", "aaaa=", "aaaa====", "=", "aa==aa", "aaaé", "aaa\n"])
def test_other_base64_is_refused(text: str) -> None:
    assert decode_base64url(text) is None
