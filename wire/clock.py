"""Clock of a process: the time of day, and seconds that never go back. Tests put another source in its place.

Nothing else in the product reads ``time`` or ``datetime.now``; a lint holds it to that. The age of a row is reckoned by the
clock of the database (``nodes.models``), because machines of one installation need not agree.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

from wire.limits import WIRE


class Source(Protocol):
    """Where the time comes from; the module ``time`` is one."""

    def time(self) -> float:
        """Return Unix seconds."""

    def monotonic(self) -> float:
        """Return seconds since any moment, never less than before."""

    def sleep(self, seconds: float, /) -> None:
        """Hold up the calling thread."""


_source: Source = time
_beat_at: float | None = None
_stood_s = 0.0


def install(source: Source) -> Source:
    """Read the time from ``source`` from now on, as a process that never stood still; return the source before it."""
    global _source, _beat_at, _stood_s
    before, _source, _beat_at, _stood_s = _source, source, None, 0.0
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


def awake() -> float:
    """Return seconds like ``monotonic``, without those in which this process stood still (stopped, swapped out, asleep).

    For the silence of others: nobody listened to them meanwhile, and what they said may wait unread. ``standstill_s``
    of a pause count. In a process that never calls ``beat`` it is ``monotonic``.
    """
    now = _source.monotonic()
    if _beat_at is not None and now - _beat_at > WIRE.standstill_s:
        return _beat_at + WIRE.standstill_s - _stood_s
    # All of it is one call: dispatch asks for each link and request.
    return now - _stood_s


def beat() -> float:
    """Note that the process runs; return for how long it stood still before, 0 = it did not."""
    global _beat_at, _stood_s
    now = _source.monotonic()
    pause_s = 0.0 if _beat_at is None else max(0.0, now - _beat_at - WIRE.standstill_s)
    _beat_at, _stood_s = now, _stood_s + pause_s
    return pause_s


def sleep(seconds: float) -> None:
    """Hold up the calling thread. Coroutines use ``asyncio.sleep``, whose time is that of their loop."""
    _source.sleep(seconds)
