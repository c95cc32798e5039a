"""A clock that the test turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.fakes.waiting import takes_blocking
from wire import clock


class VirtualClock:
    """A source of time that passes only when it is told to, or when somebody sleeps."""

    def __init__(self, *, unix_s: float = 1_800_000_000.0) -> None:
        self.unix_s, self.monotonic_s = unix_s, 1_000.0

    def time(self) -> float:
        return self.unix_s

    def monotonic(self) -> float:
        return self.monotonic_s

    def sleep(self, seconds: float, /) -> None:
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        self.unix_s += seconds
        self.monotonic_s += seconds


class TickingClock(VirtualClock):
    """No two looks at it show the same time of day, so what is sorted by time has one order."""

    def time(self) -> float:
        self.unix_s += 0.0001
        return self.unix_s


class ShiftedClock:
    """The clock of the machine, set to another time of day."""

    def __init__(self, by_s: float) -> None:
        self._by_s = by_s

    def time(self) -> float:
        return time.time() + self._by_s

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float, /) -> None:
        takes_blocking(seconds)


def shift_clock(monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Set the clock of this process to another time of day until the test ends, for Django too."""
    clock.install(ShiftedClock(by_s))  # the fixture real_clock takes it away again
    monkeypatch.setattr("django.utils.timezone.now", clock.now)


def install_virtual_clock(*, unix_s: float = 1_800_000_000.0) -> VirtualClock:
    """Have the whole process read a virtual clock until the test ends: the fixture real_clock takes it away again."""
    virtual = VirtualClock(unix_s=unix_s)
    clock.install(virtual)
    return virtual


@contextmanager
def virtual_clock() -> Iterator[VirtualClock]:
    virtual = VirtualClock()
    before = clock.install(virtual)
    try:
        yield virtual
    finally:
        clock.install(before)
