"""Files that only we may read, written whole or not at all, and lock files that the kernel releases when their holder dies."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from wire import clock


def replace_file(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace ``path`` with ``content`` atomically and durably. Raises OSError."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as stream:
            os.fchmod(fd, mode)
            stream.write(content)
            stream.flush()
            # Before the rename: after a power cut the name must not lead to an empty file.
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: Path, value: object) -> None:
    """Replace ``path`` with ``value`` as JSON, mode 0600. Raises OSError."""
    replace_file(path, f"{json.dumps(value, indent=2)}\n".encode())


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
    replace_file(path, f"{fresh}\n".encode())
    return fresh


class LockHeld(Exception):
    """Another process holds the lock; ``holder`` is what it wrote into it (its process id) or empty."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by process {holder or 'unknown'}")
        self.holder = holder


class FileLock:
    """An exclusive ``flock`` on a file that is never deleted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, *, within_s: float = 0.0, on_wait: Callable[[str], None] = lambda holder: None) -> None:
        """Take the lock and write our process id into it; ``on_wait(holder)`` is called once when it has to be waited for.

        Raises LockHeld when somebody else has it after ``within_s``, OSError when the file cannot be opened.
        """
        import fcntl  # Windows has none, and a node there takes none of these locks

        until, is_told = clock.monotonic() + within_s, False
        # O_CLOEXEC: a child that inherited the descriptor would hold the lock after us.
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
                if clock.monotonic() >= until:
                    os.close(fd)
                    raise LockHeld(holder) from None
            if not is_told:
                is_told = True
                on_wait(holder)
            clock.sleep(0.2)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> FileLock:
        if self._fd is None:
            self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def read_holder(path: Path) -> int | None:
    """Return the process id of whoever holds the lock on ``path``, or None when nobody does."""
    try:
        fd = os.open(path, os.O_RDWR | getattr(os, "O_CLOEXEC", 0))
    except OSError:
        return None
    import fcntl  # as above

    try:
        # Shared, so that of two who ask at once neither takes the other for the holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(fd)
