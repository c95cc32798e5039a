"""Files that only we may read, written whole or not at all."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Replace ``path`` with ``text`` atomically and durably, mode 0600. Raises OSError."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, value: object) -> None:
    """Replace ``path`` with ``value`` as JSON, mode 0600. Raises OSError."""
    write_private(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in ``path``; an empty one when the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def read_or_create_secret(path: Path) -> str:
    """Return the random text kept in ``path``, made on first use (256 bits, mode 0600). Raises OSError."""
    try:
        kept = path.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        kept = ""
    if kept:
        return kept
    fresh = base64.urlsafe_b64encode(os.urandom(32)).decode().rstrip("=")
    write_private(path, fresh + "\n")
    return fresh
