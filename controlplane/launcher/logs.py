"""The log file of each part: appended to, cut when it grows, and read for the last line when a part dies."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import IO

from core.limits import limits


def open_log(path: Path) -> IO[bytes]:
    """Open ``path`` for a child to append to, mode 0600. A grown one is kept once as ``NAME.log.1``."""
    rotate(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")


def rotate(path: Path) -> None:
    """Move what ``path`` holds to ``NAME.log.1`` when it has grown beyond the limit; children keep writing to ``path``.

    They write in append mode, so a truncated file starts again at its beginning. A line written in between may be lost.
    """
    try:
        if path.stat().st_size <= limits().launcher.log_bytes:
            return
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        path.with_name(f"{path.name}.1").chmod(0o600)
        os.truncate(path, 0)
    except FileNotFoundError:
        return


def read_last_line(path: Path, *, since: int = 0) -> str:
    """Return the last line after byte ``since`` that says something, at most 200 characters, or ``nothing in its log``."""
    lines = [line.strip() for line in read_tail(path, since=since).splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing in its log"


def read_tail(path: Path, *, since: int = 0) -> str:
    """Return the last few kilobytes of ``path`` that were written after byte ``since``."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            begin = since if since <= size else 0
            stream.seek(max(begin, size - limits().launcher.log_tail_bytes))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
