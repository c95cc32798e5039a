"""Clock of a process: the time of day, and seconds that never go back. Tests put another source in its place.

Nothing else in the product reads ``time`` or ``datetime.now``; a lint holds it to that. The age of a row is reckoned by the
clock of the database (``nodes.services.clock``), because machines of one installation need not agree.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol


class Source(Protocol):
    """Where the time comes from; the module ``time`` is one."""

    def time(self) -> float:
        """Return Unix seconds."""

    def monotonic(self) -> float:
        """Return seconds since any moment, never less than before."""

    def sleep(self, seconds: float, /) -> None:
        """Hold up the calling thread."""


_source: Source = time


def install(source: Source) -> Source:
    """Read the time from ``source`` from now on; return the source before it."""
    global _source
    before, _source = _source, source
    return before


def now() -> datetime:
    """Return the time of day, in UTC."""
    return datetime.fromtimestamp(_source.time(), UTC)


def unix_s() -> float:
    """Return Unix seconds."""
    return _source.time()


def unix_ms() -> int:
    """Return whole Unix milliseconds."""
    return int(_source.time() * 1000)


def monotonic() -> float:
    """Return seconds since any moment, never less than before: for durations and deadlines within this process."""
    return _source.monotonic()


def sleep(seconds: float) -> None:
    """Hold up the calling thread. Coroutines use ``asyncio.sleep``, whose time is that of their loop."""
    _source.sleep(seconds)
