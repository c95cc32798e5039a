"""How tests wait: for a condition, with a deadline. Nothing else in the tests sleeps."""

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
    condition: Callable[[], Awaitable[T | None]], what: str = ..., *, within_s: float = ..., pause_s: float = ...
) -> T: ...
@overload
async def eventually(
    condition: Callable[[], T | None], what: str = ..., *, within_s: float = ..., pause_s: float = ...
) -> T: ...
async def eventually(
    condition: Callable[[], Awaitable[T | None]] | Callable[[], T | None], what: str = "", *, within_s: float = DEADLINE_S,
    pause_s: float = _PAUSE_S,
) -> T:  # fmt: skip
    """Return the first truthy result of ``condition``. Raises AssertionError at the deadline, naming ``what`` or the condition.

    The deadline is one of the real clock, whatever clock the test turns. A condition that raises ends the wait.
    """
    deadline = time.monotonic() + within_s
    while True:
        outcome = condition()
        result = await cast("Awaitable[T | None]", outcome) if inspect.isawaitable(outcome) else cast("T", outcome)
        if result:
            return result
        assert time.monotonic() < deadline, _explain(condition, what, within_s, result)
        await asyncio.sleep(pause_s)


def wait_until(
    condition: Callable[[], T | None], what: str = "", *, within_s: float = DEADLINE_S, pause_s: float = _PAUSE_S
) -> T:
    """Do the same as ``eventually`` outside an event loop."""
    deadline = time.monotonic() + within_s
    while True:
        result = condition()
        if result:
            return result
        assert time.monotonic() < deadline, _explain(condition, what, within_s, result)
        time.sleep(pause_s)


async def turns(number: int = 1) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def takes(seconds: float) -> None:
    """Be what lies outside of us, an engine or a network, which needs so long. Not a wait of a test for anything."""
    await asyncio.sleep(seconds)


def takes_blocking(seconds: float) -> None:
    time.sleep(seconds)


def _explain(condition: Callable[[], object], what: str, within_s: float, last: object) -> str:
    if not what:
        try:
            what = " ".join(inspect.getsource(condition).split())
        except (OSError, TypeError):
            what = repr(condition)
    return f"not within {within_s:g} s: {what} (last value: {last!r})"
