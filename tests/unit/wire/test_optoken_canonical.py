"""The bytes that are signed, against an encoder written from RFC 8785 alone."""

from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.optoken import NotCanonical, params_digest
from wire.optoken.canonical import MAX_INTEGER, canonical_bytes, spec_bytes

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
KEYS = st.text(st.characters(max_codepoint=0x7F), max_size=10)
LEAVES = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | TEXTS
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)
SHORT = {8: "\\b", 9: "\\t", 10: "\\n", 12: "\\f", 13: "\\r", 34: '\\"', 92: "\\\\"}


def encode_by_the_rfc(value: object) -> str:
    """RFC 8785 sections 3.2.2 and 3.2.3, read literally, for values without floats."""
    if isinstance(value, str):
        inner = (SHORT.get(ord(c)) or (f"\\u{ord(c):04x}" if ord(c) < 32 else c) for c in value)
        return '"' + "".join(inner) + '"'
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode("utf-16-be"))
        return "{" + ",".join(encode_by_the_rfc(name) + ":" + encode_by_the_rfc(value[name]) for name in names) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(encode_by_the_rfc, value)) + "]"
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


@settings(max_examples=60)
@given(VALUES)
def test_canonical_bytes_are_those_of_the_rfc(value: object) -> None:
    assert canonical_bytes(value) == encode_by_the_rfc(value).encode()


@settings(max_examples=60)
@given(VALUES)
def test_canonical_bytes_are_plain_json_sorted_and_compact(value: object) -> None:
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert canonical_bytes(value).decode() == plain
    assert json.loads(canonical_bytes(value)) == value


@settings(max_examples=60)
@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=5))
def test_the_order_of_members_does_not_change_the_bytes(members: dict[str, object]) -> None:
    turned = dict(reversed(members.items()))
    assert canonical_bytes(turned) == canonical_bytes(members)
    assert params_digest(turned) == params_digest(members)


@settings(max_examples=60)
@given(st.dictionaries(KEYS, st.integers(0, 9) | TEXTS | st.lists(TEXTS), min_size=1, max_size=5))
def test_no_object_has_the_same_bytes_at_both_levels(claims: dict[str, object]) -> None:
    assert spec_bytes(claims) != canonical_bytes(claims)


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        float("nan"),
        float("inf"),
        MAX_INTEGER + 1,
        -MAX_INTEGER - 1,
        "\ud800",
        b"bytes",
        {1: 2},
        {"ä": 1},
        {1, 2},
        pytest.param(object(), id="an object"),
    ],
    ids=repr,
)
def test_what_has_no_canonical_form_is_refused_at_any_depth(value: object) -> None:
    for nested in (value, [value], {"a": {"b": [value]}}):
        with pytest.raises(NotCanonical):
            canonical_bytes(nested)


def test_nesting_is_bounded_before_it_can_exhaust_the_stack() -> None:
    value: object = 0
    for _ in range(5000):
        value = [value]
    with pytest.raises(NotCanonical):
        canonical_bytes(value)


def test_the_digest_is_a_domain_separated_hash_of_the_canonical_bytes() -> None:
    expected = hashlib.sha256(b"op-params/v1\x00" + b'{"a":1,"b":["x"]}').hexdigest()
    assert params_digest({"b": ["x"], "a": 1}) == expected


def test_the_digest_leaves_out_the_token_and_what_is_null() -> None:
    covered = {"scope": "all"}
    assert params_digest({**covered, "tenantId": None, "verifiedOpToken": {"any": 1.5}}) == params_digest(covered)
    assert params_digest({"scope": {"tenantId": None}}) != params_digest({"scope": {}})


def test_a_digest_needs_parameters_with_canonical_form() -> None:
    with pytest.raises(NotCanonical):
        params_digest({"gpuFraction": 0.9})
