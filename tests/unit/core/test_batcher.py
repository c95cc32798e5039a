"""Calls that share a run, on a real event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from django.db import DataError, OperationalError

from core.db.threads import Batcher
from tests.fakes.waiting import turns


class Work:
    """A run that waits for its turn; values from 100 on are refused, and -1 is one that the database does not take."""

    def __init__(self, most: int = 3) -> None:
        self.runs: list[list[int]] = []
        self.turn = asyncio.Semaphore(0)
        self.is_away = False
        self.batcher = Batcher(self._run, most=most, spawn=asyncio.ensure_future)

    async def _run(self, values: list[int]) -> Sequence[str | Exception]:
        self.runs.append(values)
        await self.turn.acquire()
        if self.is_away:
            raise OperationalError("away")
        if -1 in values:
            raise DataError("no such value")
        return [ValueError(str(value)) if value >= 100 else f"answer {value}" for value in values]

    def ask(self, *values: int) -> list[asyncio.Task[str]]:
        return [asyncio.ensure_future(self.batcher.call(value)) for value in values]


async def test_what_comes_while_a_run_is_under_way_shares_the_next_one_up_to_a_bound() -> None:
    work = Work()
    tasks = work.ask(0)
    await turns(5)
    tasks += work.ask(1, 2, 103, 4)
    await turns(5)
    assert work.runs == [[0]]
    for _ in range(3):
        work.turn.release()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert work.runs == [[0], [1, 2, 103], [4]]
    assert [repr(answer) for answer in answers] == ["'answer 0'", "'answer 1'", "'answer 2'", "ValueError('103')", "'answer 4'"]
    again = work.ask(5)
    work.turn.release()
    assert await again[0] == "answer 5"


async def test_whoever_has_gone_is_not_run_for() -> None:
    work = Work()
    (first,) = work.ask(0)
    await turns(5)
    gone, last = work.ask(1, 2)
    await turns(5)
    work.turn.release()
    gone.cancel()
    await turns(5)
    work.turn.release()
    assert [await first, await last] == ["answer 0", "answer 2"]
    assert all(1 not in run for run in work.runs)


async def test_a_value_that_the_database_does_not_take_keeps_no_other_out_and_no_database_is_said_to_all() -> None:
    work = Work()
    tasks = work.ask(0, -1, 2)
    for _ in range(4):
        work.turn.release()
    first, bad, last = await asyncio.gather(*tasks, return_exceptions=True)
    assert (first, last, type(bad)) == ("answer 0", "answer 2", DataError)
    work.is_away = True
    tasks = work.ask(0, 1)
    for _ in range(2):
        work.turn.release()
    for task in tasks:
        with pytest.raises(OperationalError):
            await task
