"""The printed form of bearer credentials."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.credentials import (
    CREDENTIAL_PATTERN,
    CredentialKind,
    digest_credential,
    has_good_checksum,
    mint_credential,
    parse_keyid,
    read_keyid,
    verify_credential,
)

KINDS = st.sampled_from(list(CredentialKind))
ALPHABET = string.digits + string.ascii_letters


@given(KINDS)
def test_a_minted_credential_reads_back_as_its_own_kind_only(kind: CredentialKind) -> None:
    minted = mint_credential(kind)
    assert re.fullmatch(CREDENTIAL_PATTERN, minted.text)
    assert digest_credential(minted.text) == minted.digest
    assert len(minted.digest) == 32
    assert verify_credential(minted.text, minted.digest)
    for other in CredentialKind:
        expected = minted.keyid if other is kind else None
        assert parse_keyid(minted.text, other) == expected
        assert read_keyid(minted.text, other) == expected


@given(KINDS, st.data())
def test_a_credential_with_one_character_changed_is_never_taken(kind: CredentialKind, data: st.DataObject) -> None:
    minted = mint_credential(kind)
    place = data.draw(st.integers(0, len(minted.text) - 1))
    changed = data.draw(st.sampled_from(ALPHABET + "_- é\n").filter(lambda c: c != minted.text[place]))
    text = minted.text[:place] + changed + minted.text[place + 1 :]
    assert all(parse_keyid(text, other) is None for other in CredentialKind)
    assert not verify_credential(text, minted.digest)


@given(st.text(max_size=80))
def test_noise_is_no_credential(text: str) -> None:
    assert all(parse_keyid(text, kind) is None for kind in CredentialKind)


@pytest.mark.parametrize("spoil", [lambda t: t + "\n", lambda t: t + "a", lambda t: " " + t, lambda t: t[:-1], lambda t: t * 2])
def test_a_credential_with_something_around_it_is_refused(spoil: object) -> None:
    assert callable(spoil)
    text = spoil(mint_credential(CredentialKind.CLIENT).text)
    assert parse_keyid(text, CredentialKind.CLIENT) is None
    assert read_keyid(text, CredentialKind.CLIENT) is None


def test_the_checksum_covers_kind_and_key_id() -> None:
    text = mint_credential(CredentialKind.CLIENT).text
    assert has_good_checksum(text)
    assert not has_good_checksum("msw" + text[3:])
    assert not has_good_checksum(text[:4] + text[15:3:-1] + text[16:])


def test_the_published_pattern_finds_a_credential_inside_a_log_line() -> None:
    text = mint_credential(CredentialKind.WORKER).text
    assert [m.group(0) for m in re.finditer(CREDENTIAL_PATTERN, f'token="{text}" x')] == [text]


def test_two_credentials_share_nothing() -> None:
    minted = [mint_credential(CredentialKind.ADMIN) for _ in range(200)]
    assert len({m.keyid for m in minted}) == len({m.text for m in minted}) == len({m.digest for m in minted}) == 200
