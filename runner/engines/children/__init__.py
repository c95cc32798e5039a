"""How far a library has read its weights: Linux counts the bytes a process reads. For libraries that say nothing themselves."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runner.limits import limits

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have Linux kill this process when the runner dies; elsewhere the closed standard input must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)


class Parent:
    """The runner at the other end of the pipes. Standard output is kept for our lines; what the engine prints goes to
    standard error.
    """

    def __init__(self) -> None:
        # A Ctrl-C in the terminal reaches the whole process group; when to stop is the parent's decision.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with(int(sys.argv[1]))
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def read_settings(self) -> dict[str, Any]:  # Any: JSON
        """Return the settings."""
        settings: dict[str, Any] = json.loads(sys.stdin.readline())
        return settings

    def say(self, **fields: object) -> None:
        """Send one line: ``stage`` and ``fraction``, or ``url`` (and ``info``), or ``error``."""
        with self._lock:
            self._out.write(json.dumps(fields) + "\n")
            self._out.flush()

    def wait_until_told(self) -> None:
        """Return when the runner closes standard input: unload and exit."""
        sys.stdin.read()


_COUNTERS = Path("/proc/self/io")


@contextmanager
def report_reading(parent: Parent, weights_bytes: int, stage: str = "reading weights") -> Iterator[None]:
    """Report the share of ``weights_bytes`` that was read since entering, a few times a second; nothing where no one counts.

    It stays below 1.0: when all is read, the library still has to convert and place it.
    """
    parent.say(stage=stage)
    done = threading.Event()
    start = _bytes_read()

    def watch() -> None:
        while start is not None and not done.wait(limits().children.reading_poll_s):
            now = _bytes_read()
            if now is not None and weights_bytes > 0:
                parent.say(stage=stage, fraction=round(min((now - start) / weights_bytes, 0.99), 3))

    watcher = threading.Thread(target=watch, name="reading", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _bytes_read() -> int | None:
    try:
        return int(_COUNTERS.read_text(encoding="ascii").partition("rchar: ")[2].split("\n", 1)[0])
    except (OSError, ValueError):
        return None
