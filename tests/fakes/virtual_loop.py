"""An event loop on a virtual clock, which moves by itself to the next timer as soon as nothing real is under way.

Under way is what the loop waits for that no timer tells of: jobs of any ThreadPoolExecutor (the ORM's threads, the ledger's),
statements of a LoopConnection, and blocks of ``underway`` (commands to Valkey). They are counted, so that a wait of 30 s takes
no such time and is never cut short by a slow machine. Real sockets are waited for while the clock stands.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, thread
from contextlib import ExitStack, contextmanager
from typing import Any

from core.db.loop import LoopConnection
from tests.fakes.clock import VirtualClock
from tests.fakes.waiting import takes
from wire import clock

STUCK_S = 30.0
"""Real seconds after which whatever is under way is taken to be stuck, and the loop raises instead of waiting on."""


class Stuck(AssertionError):
    """Something real is under way and does not end, or there is nothing left that could ever wake the loop."""


class _Clock(VirtualClock):
    """The clock of a loop. A thread that sleeps wakes at once: what it does takes no virtual time."""

    def sleep(self, seconds: float, /) -> None:
        """Return at once."""


class _Selector(selectors.DefaultSelector):
    """Looks at real sockets, and turns the clock where the loop would wait for a timer and nothing is under way."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready; an empty list once the clock stands where the next timer is due."""
        if timeout is not None and timeout <= 0:
            return super().select(0)
        busy = self.loop.underway_now  # read before the look: whoever ends rings the loop first
        events = super().select(0)
        if events:
            return events
        if busy:
            events = super().select(STUCK_S)
            if not events:
                raise Stuck(f"under way without an end: {', '.join(busy)}")
            return events
        return self.loop.idle(timeout)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Use as ``loop_factory``. While it lives, ``wire.clock`` reads the time of this loop, ``clock`` (see VirtualClock).

    One at a time per process. ``close`` gives the clock back.
    """

    def __init__(self) -> None:
        self.clock = _Clock()
        self._before = clock.install(self.clock)
        self._lock = threading.Lock()
        self._underway: Counter[str] = Counter()
        self._quiet: list[asyncio.Future[None]] = []
        selector = _Selector()
        selector.loop = self
        self._counted = ExitStack()
        self._counted.enter_context(_count_executors(self))
        self._counted.enter_context(_count_statements(self))
        super().__init__(selector)

    def time(self) -> float:
        return self.clock.monotonic_s

    def close(self) -> None:
        if not self.is_closed():
            self._counted.close()
            clock.install(self._before)
        super().close()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Wait for the threads of ``to_thread``; a plain thread does that, which nothing else counts."""
        del timeout
        with self.underway("shutdown of threads"):
            await super().shutdown_default_executor()

    @property
    def underway_now(self) -> list[str]:
        with self._lock:
            return list(self._underway.elements())

    def begin(self, what: str) -> None:
        """Count one thing more that is under way; callable from any thread."""
        with self._lock:
            self._underway[what] += 1

    def end(self, what: str) -> None:
        """Count one less. Call it after everything that it leads to was handed to the loop; callable from any thread."""
        with self._lock:
            self._underway[what] -= 1
        if not self.is_closed():
            self.call_soon_threadsafe(_nothing)

    @contextmanager
    def underway(self, what: str) -> Iterator[None]:
        self.begin(what)
        try:
            yield
        finally:
            self.end(what)

    async def settle(self) -> None:
        """Return when everything has happened that can happen before the clock moves."""
        quiet: asyncio.Future[None] = self.create_future()
        self._quiet.append(quiet)
        await quiet

    async def pass_time(self, seconds: float) -> None:
        """Let so much time pass, with every timer on its way, and settle."""
        await takes(seconds)
        await self.settle()

    def idle(self, timeout: float | None) -> list[tuple[selectors.SelectorKey, int]]:
        """Called where nothing is left to do at this moment: tell who waits for that, else turn the clock by ``timeout``."""
        if self._quiet:
            for waiting in self._quiet:
                if not waiting.done():
                    waiting.set_result(None)
            self._quiet.clear()
        elif timeout is None:
            raise Stuck("nothing is under way, and no timer runs")
        else:
            self.clock.advance(timeout)
        return []


def _nothing() -> None:
    """Wakes the loop."""


@contextmanager
def _count_executors(loop: VirtualLoop) -> Iterator[None]:
    """Count every job of every thread pool from its submission until all that its end calls was called."""
    submit, run = ThreadPoolExecutor.submit, thread._WorkItem.run

    def submit_counted(pool: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job = _Counted(function)
        loop.begin(job.name)
        try:
            return submit(pool, job, *args, **kwargs)
        except BaseException:
            loop.end(job.name)
            raise

    def run_counted(item: Any) -> None:
        job = item.fn
        try:
            run(item)
        finally:
            if isinstance(job, _Counted):
                loop.end(job.name)

    with _replaced(ThreadPoolExecutor, "submit", submit_counted), _replaced(thread._WorkItem, "run", run_counted):
        yield


@contextmanager
def _count_statements(loop: VirtualLoop) -> Iterator[None]:
    """Count every statement of a LoopConnection until what its end calls was called, or its connection was closed."""
    send, close = LoopConnection.send, LoopConnection.close
    running: dict[LoopConnection, object] = {}

    def end(connection: LoopConnection, statement: object) -> None:
        if connection in running and running[connection] is statement:
            del running[connection]
            loop.end("statement")

    def send_counted(connection: LoopConnection, name: str, values: Sequence[bytes], **calls: Callable[..., None]) -> None:
        statement = object()

        def take_end(error: Exception | None) -> None:
            loop.begin("end of a statement")
            end(connection, statement)
            try:
                calls["on_done"](error)
            finally:
                loop.end("end of a statement")

        running[connection] = statement
        loop.begin("statement")
        send(connection, name, values, on_sent=calls["on_sent"], on_done=take_end)

    def close_counted(connection: LoopConnection) -> None:
        end(connection, running.get(connection))
        close(connection)

    with _replaced(LoopConnection, "send", send_counted), _replaced(LoopConnection, "close", close_counted):
        yield


class _Counted:
    """A job that was counted when it was submitted."""

    __slots__ = ("_function", "name")

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.name = f"job {getattr(function, '__qualname__', function)!s}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


@contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
