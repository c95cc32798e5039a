"""How many requests an engine child serves at once, how many may wait, and the threads that do the work."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from runner.engines.children.web import Refusal
from runner.limits import limits

Item = TypeVar("Item")


class Slots:
    """``count`` worker threads and a bounded line of those who wait for one, first come first served. One event loop only."""

    def __init__(self, *, count: int, max_waiting: int) -> None:
        self._count = count
        self._max_waiting = max_waiting
        self._line: deque[asyncio.Future[None]] = deque()
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="slot")
        self.running = 0

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    async def take(self) -> None:
        """Wait for a slot. Raises Refusal (503) when the line is full."""
        if self.running < self._count and not self._line:
            self.running += 1
            return
        if len(self._line) >= self._max_waiting:
            raise Refusal("the engine has as many requests waiting as it may", code="queue_full", status=503)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            else:
                self._line.remove(turn)
            raise

    def give_back(self) -> None:
        """Free a slot: the next in line has it, else nobody."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1

    def start(self, work: Callable[[], None]) -> Future[None]:
        """Run ``work`` in a thread; the slot taken before is free again when it has really ended, not earlier."""
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)

        def ended(_future: Future[None]) -> None:
            try:
                loop.call_soon_threadsafe(self.give_back)
            except RuntimeError:  # the loop is closed: the process ends
                return

        future.add_done_callback(ended)
        return future

    def close(self) -> None:
        """Take no more work; do not wait for what runs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Pipe(Generic[Item]):
    """Results of a worker thread on their way to the event loop: bounded, and either side can end it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Item | None] = asyncio.Queue()  # bounded by the credits below
        self._poll_s = limits().children.slot_poll_s
        self._credits = threading.Semaphore(limits().children.results_ahead)
        self._left = threading.Event()

    @property
    def is_left(self) -> bool:
        """Whether the reader has gone; the worker asks between steps."""
        return self._left.is_set()

    def put(self, item: Item) -> bool:
        """From the worker: hand over a result, waiting while the reader is far behind. False = the reader has gone."""
        while not self._credits.acquire(timeout=self._poll_s):
            if self._left.is_set():
                return False
        return self._call(item) and not self._left.is_set()

    def end(self) -> None:
        """From the worker: nothing more comes."""
        self._call(None)

    async def get(self) -> Item | None:
        """From the loop: the next result, None at the end."""
        item = await self._items.get()
        self._credits.release()
        return item

    def leave(self) -> None:
        """From the loop: nobody reads any more."""
        self._left.set()

    def _call(self, item: Item | None) -> bool:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop is closed: the process ends
            return False
        return True
