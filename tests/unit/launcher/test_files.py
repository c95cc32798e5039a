"""Secrets are for their owner only, and a file is never half written."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.launcher.files import read_json, read_or_create_secret, write_json, write_private


def test_a_secret_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    first = read_or_create_secret(path)
    assert len(first) >= 43
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_or_create_secret(path) == first


def test_an_empty_secret_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("\n")
    assert read_or_create_secret(tmp_path / "secret")


def test_a_file_that_was_open_to_others_is_closed_when_replaced(tmp_path: Path) -> None:
    path = tmp_path / "ready.json"
    path.write_text("old")
    path.chmod(0o644)
    write_json(path, {"new": 1})
    assert read_json(path) == {"new": 1}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "directory"
    target.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_private(target, "text")
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("content", ["", "[1]", "{broken", '"text"'])
def test_what_is_no_object_reads_as_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    assert read_json(path) == {}
    assert read_json(tmp_path / "missing") == {}
