"""Log files stay small and their last words can be shown."""

from __future__ import annotations

from pathlib import Path

from controlplane.launcher.logs import open_log, read_last_line, read_tail, rotate
from core.limits import limits


def test_a_grown_log_is_kept_once_and_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "part.log"
    with open_log(path) as log:
        log.write(b"x" * (limits().launcher.log_bytes + 1))
        log.flush()
        rotate(path)
        log.write(b"after\n")
    assert path.read_bytes() == b"after\n"
    assert path.with_name("part.log.1").stat().st_size == limits().launcher.log_bytes + 1
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_last_line_that_says_something_is_found(tmp_path: Path) -> None:
    path = tmp_path / "part.log"
    assert read_last_line(path) == "nothing in its log"
    path.write_text("first\nlast words\n\n  \n")
    assert read_last_line(path) == "last words"


def test_only_what_was_written_since_is_read(tmp_path: Path) -> None:
    path = tmp_path / "part.log"
    path.write_text("old ready.\n")
    before = path.stat().st_size
    path.write_text("old ready.\nnew\n")
    assert read_tail(path, since=before) == "new\n"
    path.write_text("cut\n")
    assert read_tail(path, since=before) == "cut\n"
