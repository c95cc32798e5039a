"""Small files in the data folder that only their owner reads, replaced whole and on disk before anybody relies on them."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from runner.limits import limits


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step, readable by its owner alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_private(path: Path) -> bytes | None:
    """Return the content of a file, None when there is none. Raises OSError, and ValueError beyond 4096 bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(limits().operations.key_bytes + 1)
    except FileNotFoundError:
        return None
    if len(content) > limits().operations.key_bytes:
        raise ValueError(f"{path} has more than {limits().operations.key_bytes} bytes")
    return content


def remove_private(path: Path) -> None:
    """Remove a file, if it is there, for good. Raises OSError."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
