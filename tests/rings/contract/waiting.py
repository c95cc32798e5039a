"""Waiting for a condition with a deadline: the only way these tests let time pass."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast, overload

T = TypeVar("T")

DEADLINE_S = 30.0
"""For conditions that normally hold within milliseconds; generous because the machine may be loaded, or stand still."""
_PAUSE_S = 0.01


@overload
async def eventually(
    condition: Callable[[], Awaitable[T | None]], *, within_s: float = ..., what: str, pause_s: float = ...
) -> T: ...
@overload
async def eventually(condition: Callable[[], T | None], *, within_s: float = ..., what: str, pause_s: float = ...) -> T: ...
async def eventually(
    condition: Callable[[], Awaitable[T | None]] | Callable[[], T | None],
    *,
    within_s: float = DEADLINE_S,
    what: str,
    pause_s: float = _PAUSE_S,
) -> T:
    """Return the first truthy result of ``condition``. Raises AssertionError naming ``what`` at the deadline."""
    deadline = time.monotonic() + within_s
    while True:
        outcome = condition()
        result = await cast("Awaitable[T | None]", outcome) if inspect.isawaitable(outcome) else cast("T", outcome)
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what} (last value: {result!r})")
        await asyncio.sleep(pause_s)


def wait_until(condition: Callable[[], T], *, within_s: float = DEADLINE_S, what: str, pause_s: float = 0.05) -> T:
    """Do the same as ``eventually`` outside an event loop."""
    deadline = time.monotonic() + within_s
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what} (last value: {result!r})")
        time.sleep(pause_s)
