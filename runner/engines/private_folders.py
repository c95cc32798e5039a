"""Folders for the sockets of servers we start: ours alone, short enough for a socket's path, gone also after a crash."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import psutil

from runner.limits import limits


def make_private_folder(name: str) -> Path:
    """Return a new folder that only we may enter; remove those of runners that were killed before they could. Blocks."""
    usual = Path(tempfile.gettempdir())
    # A socket's path has room for some hundred characters, and our names take up to 40.
    base = usual if len(str(usual)) <= limits().engines.folder_chars else Path("/tmp")  # noqa: S108  # mkdtemp makes it private
    prefix = f"muster-{name}-"
    for folder in base.glob(f"{prefix}*-*"):
        owner = folder.name.removeprefix(prefix).partition("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)) and _is_our_folder(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))


def _is_our_folder(path: Path) -> bool:
    """Whether it is a folder, no link to one, that belongs to us: anybody may write to the place where it lies."""
    try:
        return path.lstat().st_uid == os.getuid() and path.is_dir() and not path.is_symlink()
    except OSError:
        return False
