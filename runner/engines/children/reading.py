"""How far a library has read its weights: Linux counts the bytes a process reads. For libraries that say nothing themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runner.engines.children.base import Parent
from runner.limits import limits

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
