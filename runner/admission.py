"""How many requests the engine gets at once: slots, and a short queue for the races between several gateways."""

from __future__ import annotations

import asyncio
from collections import deque

from runner.errors import BoxBusy


class Admission:
    """``slots`` requests run, ``queue_limit`` more may wait in order of arrival, the next is refused."""

    def __init__(self, *, slots: int, queue_limit: int) -> None:
        self.slots = slots
        self._queue_limit = queue_limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def active(self) -> int:
        """Requests that hold a slot."""
        return self._taken

    async def enter(self) -> None:
        """Take a slot, waiting for one if need be; pair with ``leave``. Raises BoxBusy when the queue is full."""
        if self._taken < self.slots:
            self._taken += 1
            return
        if len(self._waiting) >= self._queue_limit:
            raise BoxBusy(f"all {self.slots} slots are taken and {len(self._waiting)} requests wait")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.leave()  # the slot was handed over in the same tick: pass it on
            elif turn in self._waiting:
                self._waiting.remove(turn)
            raise

    def leave(self) -> None:
        """Give the slot back, or straight on to whoever waits longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._taken -= 1
