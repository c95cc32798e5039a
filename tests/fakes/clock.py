"""A clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from wire import clock


class VirtualClock:
    """A source of time that passes only when it is told to, or when somebody sleeps."""

    def __init__(self, *, unix_s: float = 1_800_000_000.0, monotonic_s: float = 1_000.0) -> None:
        self.unix_s, self.monotonic_s = unix_s, monotonic_s

    def time(self) -> float:
        """Return Unix seconds."""
        return self.unix_s

    def monotonic(self) -> float:
        """Return seconds of this clock."""
        return self.monotonic_s

    def sleep(self, seconds: float, /) -> None:
        """Let the time pass."""
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Let the time pass."""
        self.unix_s += seconds
        self.monotonic_s += seconds


@contextmanager
def virtual_clock() -> Iterator[VirtualClock]:
    """Have the whole process read a virtual clock until the block ends."""
    virtual = VirtualClock()
    before = clock.install(virtual)
    try:
        yield virtual
    finally:
        clock.install(before)
