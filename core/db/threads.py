"""Running ORM work beside an event loop: a few threads, a bounded queue, bounded waits, connections given back.

The loop that relays tokens must never wait for SQL; everything that needs the ORM there goes through here. What callers ask for
and what the process does by itself have threads of their own: many callers must not hold up a heartbeat.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from django.db import OperationalError, close_old_connections

from core.db import Patience, limit_patience
from wire import clock

P = ParamSpec("P")
R = TypeVar("R")

DATABASE_S = 5.0
"""What one call may take in all, the wait for a thread included; and how long the process's own work bears silence."""
MAX_WAITING = 1_000
"""Calls that run or wait for a thread at once; one more is refused."""
_THREADS = 4
_UPKEEP_THREADS = 4

_pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="orm")
_pulse_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pulse")
_upkeep_pool = ThreadPoolExecutor(max_workers=_UPKEEP_THREADS, thread_name_prefix="upkeep")
_room = threading.BoundedSemaphore(MAX_WAITING)


class DatabaseBusy(OperationalError):
    """The database did not answer in time, or too many calls wait for it already. Trying again later may help."""


async def run_in_database(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run ``function`` in a thread of the ORM pool and return its result, within ``DATABASE_S`` seconds.

    A call that nobody waits for any more is not begun. One that had begun may still come to its end in the database.
    Raises DatabaseBusy, and whatever ``function`` raises.
    """
    if not _room.acquire(blocking=False):
        raise DatabaseBusy(f"{MAX_WAITING} calls wait for the database already; please retry")
    due_at = clock.monotonic() + DATABASE_S
    abandoned = threading.Event()

    def call() -> R:
        try:
            if abandoned.is_set() or clock.monotonic() >= due_at:
                raise DatabaseBusy("no database thread was free in time; please retry")
            with limit_patience(Patience(silence_s=DATABASE_S, ends_at=due_at)):
                return _with_connection(lambda: function(*args, **kwargs))
        finally:
            _room.release()

    loop = asyncio.get_running_loop()
    answer: asyncio.Future[R] = loop.create_future()
    # Not cancelled with its caller: a queued job gives its room back when a thread has taken it off the queue.
    _pool.submit(call).add_done_callback(lambda job: _tell(loop, answer, job))
    limit = asyncio.timeout(DATABASE_S)
    try:
        async with limit:
            return await answer
    except TimeoutError:
        if not limit.expired():
            raise
        raise DatabaseBusy("the database did not answer in time; please retry") from None
    finally:
        abandoned.set()


async def run_upkeep(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run work that the process does by itself, one piece at a time per loop; it is never refused and may take long.

    It ends when the database is silent for ``DATABASE_S`` seconds. Raises DatabaseError then, and whatever ``function`` raises.
    """
    return await _run_on(_upkeep_pool, lambda: function(*args, **kwargs))


async def run_pulse(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run what tells others that the process is alive, as ``run_upkeep`` does, behind nothing else that it has to do.

    Many boxes that leave at once, or rows that somebody holds, fill the threads of upkeep; a process that is silent meanwhile
    is taken for dead and its requests for lost.
    """
    return await _run_on(_pulse_pool, lambda: function(*args, **kwargs))


async def _run_on(pool: ThreadPoolExecutor, work: Callable[[], R]) -> R:
    def call() -> R:
        with limit_patience(Patience(silence_s=DATABASE_S)):
            return _with_connection(work)

    return await asyncio.get_running_loop().run_in_executor(pool, call)


def _with_connection(work: Callable[[], R]) -> R:
    close_old_connections()
    try:
        return work()
    finally:
        close_old_connections()


def _tell(loop: asyncio.AbstractEventLoop, answer: asyncio.Future[R], job: Future[R]) -> None:
    """Hand a thread's result to the loop, which may have ended meanwhile."""

    def settle() -> None:
        error = job.exception()
        if answer.done():
            return
        if error is None:
            answer.set_result(job.result())
        else:
            answer.set_exception(error)

    with suppress(RuntimeError):
        loop.call_soon_threadsafe(settle)
