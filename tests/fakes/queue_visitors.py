"""Visitors of a fair queue: a clock that the test turns, and requests whose order of being served is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from runner.admission import FairQueue, Priority, QueueLimits, Turn, WaitBudget
from tests.fakes.clock import install_virtual_clock
from tests.fakes.waiting import turns

LONG_S = 1000.0


async def settle() -> None:
    await turns(6)


class Visitors:
    """A queue under test; ``served`` are the names of requests in the order in which they got a slot."""

    def __init__(
        self, *, slots: int = 1, limits: QueueLimits | None = None, max_depth: int = 1000,
        weight_of: Callable[[str], float] = lambda _: 1.0,
    ) -> None:  # fmt: skip
        self.clock = install_virtual_clock()
        self.budget = WaitBudget(max_depth)
        self.queue = FairQueue(slots=slots, limits=limits or QueueLimits(), budget=self.budget, weight_of=weight_of)
        self.served: list[str] = []
        self.turns: dict[str, Turn] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, priority: Priority = "normal", timeout_s: float = LONG_S) -> None:
        """Let requests come; the tenant of request ``a1`` is ``a``."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._visit(name, priority, timeout_s))
        await settle()

    async def go(self, name: str, *, after_s: float = 0.0) -> None:
        """Let a request end after so many seconds."""
        self.clock.advance(after_s)
        self.queue.leave(self.turns.pop(name))
        await settle()

    async def serve_all(self, *, each_s: float = 0.0) -> list[str]:
        """End what runs, one request at a time, until nothing is left; return who was served."""
        while self.turns:
            await self.go(next(iter(self.turns)), after_s=each_s)
        return self.served

    def score_of(self, tenant: str) -> float:
        return next(share.score for share in self.queue.snapshot() if share.fairness_key == tenant)

    def known(self) -> set[str]:
        return {share.fairness_key for share in self.queue.snapshot()}

    async def _visit(self, name: str, priority: Priority, timeout_s: float) -> None:
        turn = await self.queue.enter(tenant=name[0], priority=priority, timeout_s=timeout_s)
        self.served.append(name)
        self.turns[name] = turn
