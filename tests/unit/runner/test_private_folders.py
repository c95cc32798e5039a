"""Folders of sockets, and what killed runners leave of them."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.engines.private_folders import make_private_folder


@pytest.fixture(autouse=True)
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


DEAD_PID = 2**22 + 1
"""More than Linux ever gives to a process."""


def test_it_is_for_us_alone() -> None:
    assert stat.S_IMODE(make_private_folder("x").stat().st_mode) == 0o700


def test_what_a_killed_runner_left_is_removed_and_nothing_else(base: Path) -> None:
    gone = DEAD_PID
    left, other = base / f"muster-x-{gone}-abc", base / f"muster-y-{gone}-abc"
    kept = [other, base / "muster-x-abc", base / f"muster-x-{os.getppid()}-abc", base / "elsewhere"]
    for folder in (left, *kept):
        folder.mkdir()
    link = base / f"muster-x-{gone}-link"
    link.symlink_to(base / "elsewhere")
    mine = make_private_folder("x")
    assert not left.exists()
    assert all(folder.is_dir() for folder in (*kept, mine))
    assert link.is_symlink()


def test_a_long_temporary_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, base: Path) -> None:
    long = base / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = make_private_folder("x")
    try:
        assert len(str(made / "socket")) < 100
    finally:
        made.rmdir()
