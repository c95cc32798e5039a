"""What Windows does in another way: locks of files, names that reach the disk, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

IS_WINDOWS = sys.platform == "win32" or not hasattr(os, "fork")
"""Whether there are neither sessions of processes nor signals to steer a program by."""


def lock_file(descriptor: int) -> None:
    """Lock an open file for this process until it is closed. Raises BlockingIOError when another one has it."""
    if not IS_WINDOWS:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    try:
        # One byte far behind the end, which nobody writes.
        os.lseek(descriptor, 1 << 30, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # of Windows alone
    except OSError as error:
        raise BlockingIOError(error.errno, "another process has it") from None


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk. Windows keeps them by itself, and opens no folder."""
    if IS_WINDOWS:
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def watch_signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None], others: Mapping[str, Callable[[], None]]) -> None:
    """Call ``stop`` on SIGTERM and on Ctrl-C, and ``others`` on their signals, by name, where there are these."""
    if not IS_WINDOWS:
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop)
        for name, call in others.items():
            loop.add_signal_handler(signal.Signals[name], call)
        return

    def hear(_signum: int, _frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(stop)

    for name in ("SIGINT", "SIGBREAK", "SIGTERM"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), hear)
