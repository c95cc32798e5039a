"""The keys that a box makes: who it is, and what its tokens are signed with."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from runner.errors import ConfigError
from runner.limits import limits
from runner.operations.identity import FILE_NAME, load_identity
from runner.operations.keys import KeyRing
from runner.operations.op_keys import OpKeys, TooManyKeys
from tests.fakes.ledgers import T0
from wire.optoken import owns_runner_id


def test_an_identity_is_made_once_and_names_its_key(tmp_path: Path) -> None:
    made = load_identity(tmp_path, "attic")
    assert made.certified_id.startswith("attic#")
    assert owns_runner_id(made.certified_id, made.public_key)
    again = load_identity(tmp_path, "attic")
    assert (again.certified_id, again.public_key) == (made.certified_id, made.public_key)
    assert stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]
    assert load_identity(tmp_path / "other", "attic").certified_id != made.certified_id


@pytest.mark.parametrize("content", [b"", b"no key", b"x" * 5000], ids=["empty", "text", "too long"])
def test_a_damaged_identity_ends_the_box_instead_of_making_it_another_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    with pytest.raises(ConfigError, match="put back the one that was there"):
        load_identity(tmp_path, "attic")
    assert (tmp_path / FILE_NAME).read_bytes() == content


@pytest.mark.parametrize("name", ["a#b", " attic", "x" * 101], ids=["mark", "blank", "long"])
def test_a_name_that_could_be_read_in_two_ways_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--name"):
        load_identity(tmp_path, name)


def test_the_first_key_is_made_once_and_a_key_ring_reads_it(tmp_path: Path) -> None:
    keys = OpKeys(tmp_path / "op-keys")
    keys.ensure(T0)
    keys.ensure(T0 + 10)
    (kid,) = keys.list_kids()
    assert dict(KeyRing(keys.folder).read()) == keys.read()
    assert len(keys.read()[kid]) == 64
    assert stat.S_IMODE((keys.folder / f"{kid}.key").stat().st_mode) == 0o600


def test_a_renewed_key_leaves_the_old_one_valid_for_a_day(tmp_path: Path) -> None:
    keys = OpKeys(tmp_path)
    keys.ensure(T0)
    (old,) = keys.list_kids()
    new = keys.renew(T0 + 1000)
    assert keys.list_kids() == [old, new]
    assert keys.drop_retired(T0 + 1000 + limits().operations.op_key_overlap_s - 1) == []
    assert keys.drop_retired(T0 + 1000 + limits().operations.op_key_overlap_s) == [old]
    assert keys.list_kids() == [new]
    assert keys.drop_retired(T0 + 100 * limits().operations.op_key_overlap_s) == [], "the newest is never dropped"


def test_the_newest_key_is_the_last_one_even_when_the_clock_was_set_back(tmp_path: Path) -> None:
    keys = OpKeys(tmp_path)
    keys.ensure(T0)
    first = keys.renew(T0 - 5000)
    assert keys.renew(T0 - 9000) == keys.list_kids()[-1]
    assert keys.list_kids()[1] == first


def test_keys_cannot_pile_up(tmp_path: Path) -> None:
    keys = OpKeys(tmp_path)
    for _ in range(limits().operations.op_keys):
        keys.renew(T0)
    with pytest.raises(TooManyKeys):
        keys.renew(T0)
    assert keys.renew(T0 + 2 * limits().operations.op_key_overlap_s) in keys.list_kids()


def test_files_that_the_box_did_not_make_are_not_handed_over(tmp_path: Path) -> None:
    keys = OpKeys(tmp_path)
    keys.ensure(T0)
    (tmp_path / "other.key").write_bytes(b"k" * 40)
    (tmp_path / ".0000000001-abcd.key.tmp").write_bytes(b"k" * 40)
    assert len(keys.read()) == 1
