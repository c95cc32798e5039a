"""Running ORM work beside an event loop: a few threads, a bounded queue, bounded waits, connections given back.

The loop that relays tokens must never wait for SQL; everything that needs the ORM there goes through here. What callers ask for
and what the process does by itself have threads of their own: many callers must not hold up a heartbeat.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import Any, Generic, ParamSpec, TypeVar

from django.db import DatabaseError, DataError, InterfaceError, OperationalError, close_old_connections, connections

from core.db.base import DatabaseWrapper, WaitLimit, limit_waits
from core.limits import limits
from wire import clock

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")


class _Room:
    """Counts the calls that run or wait for a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.taken = 0

    def take(self) -> bool:
        """Count one more call; False = no more may wait."""
        with self._lock:
            if self.taken >= limits().core.database_waiting:
                return False
            self.taken += 1
            return True

    def give_back(self) -> None:
        with self._lock:
            self.taken -= 1


_room = _Room()


def count_calls() -> int:
    """Return how many calls for callers run or wait for a thread of this process."""
    return _room.taken


@cache
def _pool(name: str, threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)


class DatabaseBusy(OperationalError):
    """The database did not answer in time, or too many calls wait for it already. Trying again later may help."""


async def run_in_database(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run ``function`` in a thread of the ORM pool and return its result, within ``database_s`` seconds.

    One that had begun may still come to its end in the database when nobody waits for it any more.
    Raises DatabaseBusy, and whatever ``function`` raises.
    """
    if not _room.take():
        raise DatabaseBusy(f"{limits().core.database_waiting} calls wait for the database already; please retry")
    limit_s = limits().core.database_s
    due_at = clock.monotonic() + limit_s
    abandoned = threading.Event()

    def call() -> R:
        try:
            # What nobody waits for any more is not begun.
            if abandoned.is_set() or clock.monotonic() >= due_at:
                raise DatabaseBusy("no database thread was free in time; please retry")
            with limit_waits(WaitLimit(silence_s=limit_s, ends_at=due_at)):
                return _with_connection(lambda: function(*args, **kwargs))
        finally:
            _room.give_back()

    loop = asyncio.get_running_loop()
    answer: asyncio.Future[R] = loop.create_future()
    # Not cancelled with its caller: a queued job gives its room back when a thread has taken it off the queue.
    _pool("orm", limits().core.database_threads).submit(call).add_done_callback(lambda job: _tell(loop, answer, job))
    limit = asyncio.timeout(limit_s)
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

    It ends when the database is silent for ``database_s`` seconds. Raises DatabaseError then, and whatever ``function`` raises.
    """
    return await _run_on(_pool("upkeep", limits().core.database_upkeep_threads), lambda: function(*args, **kwargs))


async def run_pulse(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run what tells others that the process is alive, as ``run_upkeep`` does, behind nothing else that it has to do."""
    # Many nodes that leave at once, or rows that somebody holds, fill the threads of upkeep; a process that is silent
    # meanwhile is taken for dead and its requests for lost.
    return await _run_on(_pool("pulse", 1), lambda: function(*args, **kwargs))


async def _run_on(pool: ThreadPoolExecutor, work: Callable[[], R]) -> R:
    def call() -> R:
        with limit_waits(WaitLimit(silence_s=limits().core.database_s)):
            return with_kept_connection(work)

    return await asyncio.get_running_loop().run_in_executor(pool, call)


def with_kept_connection(work: Callable[[], R]) -> R:
    """Run ``work`` on a connection that this thread keeps for its next work: what comes every second is cheaper than one.

    For threads that a process has few of and that live as long as it does. Each work of a thread has to bear with the limits
    (``limit_waits``) of the first: they are the connection's. Raises whatever ``work`` raises; the connection is closed then
    unless it is as good as new.
    """
    connection = connections["default"]
    assert isinstance(connection, DatabaseWrapper)
    connection.close_if_left()
    try:
        return work()
    finally:
        connection.keep()
        close_old_connections()


class Batcher(Generic[A, R]):
    """Values that come while ``run`` is under way share its next run: many at once cost the database hardly more than one.

    ``run`` answers each value by a result or an error, in order. ``most`` values share a run. ``spawn`` makes the task that
    runs, and ends it when the process stops.
    """

    def __init__(
        self,
        run: Callable[[list[A]], Awaitable[Sequence[R | Exception]]],
        *,
        most: int,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._run = run
        self._most = most
        self._spawn = spawn
        self._waiting: deque[tuple[A, asyncio.Future[R]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def call(self, value: A) -> R:
        """Return what a run answers to ``value``. Raises its error; one that ``run`` raised goes to all that share the run."""
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((value, answer))
        if self._task is None or self._task.done():
            self._task = self._spawn(self._work())
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            batch = [one for one in taken if not one[1].done()]  # else whoever asked is gone
            try:
                await self._answer(batch)
            finally:
                for _, answer in batch:
                    answer.cancel()  # of no effect once it is known

    async def _answer(self, batch: Sequence[tuple[A, asyncio.Future[R]]]) -> None:
        try:
            results = await self._run([value for value, _ in batch]) if batch else ()
        except DataError as error:
            if len(batch) > 1:  # one value that the database does not take must not keep the others out
                for one in batch:
                    await self._answer([one])
                return
            results = [error]
        except (DatabaseError, InterfaceError) as error:
            results = [error] * len(batch)
        for (_, answer), result in zip(batch, results, strict=True):
            if answer.done():
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)


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
