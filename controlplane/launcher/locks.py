"""A lock file that the kernel releases when its holder dies, also after ``kill -9``."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from wire import clock


class LockHeld(Exception):
    """Another process holds the lock; ``holder`` is what it wrote into it (its process id) or empty."""

    def __init__(self, holder: str) -> None:
        super().__init__(f"held by process {holder or 'unknown'}")
        self.holder = holder


class FileLock:
    """An exclusive ``flock`` on a file that is never deleted. Children do not inherit it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock and write our process id into it.

        Raises LockHeld when somebody else has it, OSError when the file cannot be opened.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise LockHeld(holder) from None
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
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def acquire_patiently(lock: FileLock, *, deadline_s: float, on_wait: Callable[[str], None]) -> None:
    """Take ``lock``, waiting up to ``deadline_s`` for another holder; ``on_wait(holder)`` is called once when we must wait.

    Raises LockHeld when the time is over.
    """
    until = clock.monotonic() + deadline_s
    waiting = False
    while True:
        try:
            lock.acquire()
            return
        except LockHeld as held:
            if clock.monotonic() >= until:
                raise
            if not waiting:
                waiting = True
                on_wait(held.holder)
        clock.sleep(0.2)


def read_holder(path: Path) -> int | None:
    """Return the process id of whoever holds the lock on ``path``, or None when nobody does."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(fd, 32, 0).decode(errors="replace").strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(fd)
