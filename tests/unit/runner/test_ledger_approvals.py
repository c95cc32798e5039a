"""Nonces, operations and fences."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from runner.ledger import (
    FILE_NAME,
    Ledger,
    LedgerFull,
    OpAlreadyDone,
    OpIsRunning,
    OpStart,
    OpStarted,
    StaleFence,
    approvals,
)
from runner.limits import limits
from tests.fakes.ledgers import T0, Clock, opened
from tests.fakes.limits import set_runner_limits

EXPIRES = T0 + 300


def read_all(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.iterdir())


async def begin(ledger: Ledger, op_id: str = "op-1", *, slot: str = "model:a", fence: int = 7, max_uses: int = 1) -> OpStart:
    return await ledger.begin_op(op_id, slot=slot, fence=fence, max_uses=max_uses, expires_at=EXPIRES)


async def test_a_nonce_is_new_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await ledger.spend_nonce("n-1", expires_at=EXPIRES)
        assert not await ledger.spend_nonce("n-1", expires_at=EXPIRES + 1)
        assert await ledger.spend_nonce("n-2", expires_at=EXPIRES)


async def test_a_nonce_is_not_new_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await ledger.spend_nonce("n-1", expires_at=EXPIRES)
    async with opened(tmp_path) as ledger:
        assert not await ledger.spend_nonce("n-1", expires_at=EXPIRES)


async def test_of_many_who_bring_the_same_nonce_at_once_one_is_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        answers = await asyncio.gather(*(ledger.spend_nonce("n-1", expires_at=EXPIRES) for _ in range(50)))
    assert answers.count(True) == 1


async def test_a_nonce_is_remembered_for_longer_than_its_token_lives(tmp_path: Path) -> None:
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        assert await ledger.spend_nonce("n-1", expires_at=EXPIRES)
        clock.now = EXPIRES + limits().ledger.nonce_grace_s
        assert not await ledger.spend_nonce("n-1", expires_at=EXPIRES)
        clock.now += 1
        assert await ledger.spend_nonce("n-2", expires_at=clock.now)
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        assert connection.execute("SELECT count(*) FROM nonces").fetchone() == (1,)
    connection.close()


async def test_nonces_are_not_kept_in_clear(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger.spend_nonce("a-nonce-to-look-for", expires_at=EXPIRES)
    assert b"a-nonce-to-look-for" not in read_all(tmp_path)


async def test_a_full_memory_refuses_instead_of_forgetting(tmp_path: Path) -> None:
    set_runner_limits(ledger={"nonces": 3, "ops": 1})
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        for number in range(3):
            assert await ledger.spend_nonce(f"n-{number}", expires_at=EXPIRES)
        with pytest.raises(LedgerFull):
            await ledger.spend_nonce("n-3", expires_at=EXPIRES)
        assert not await ledger.spend_nonce("n-0", expires_at=EXPIRES)
        clock.now = EXPIRES + limits().ledger.nonce_grace_s + 1
        assert await ledger.spend_nonce("n-3", expires_at=EXPIRES)
        assert await begin(ledger) == OpStarted()
        with pytest.raises(LedgerFull):
            await begin(ledger, "op-2", fence=8)
        assert await begin(ledger) == OpIsRunning()


async def test_an_approval_is_one_operation(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await begin(ledger) == OpStarted()
        assert await begin(ledger, fence=8) == OpIsRunning()
        await ledger.finish_op("op-1", {"taskId": "load-1"})
        assert await begin(ledger, fence=8) == OpAlreadyDone({"taskId": "load-1"})
    async with opened(tmp_path) as ledger:
        assert await begin(ledger, fence=9) == OpAlreadyDone({"taskId": "load-1"})


async def test_of_many_who_bring_one_approval_at_once_one_begins(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        answers = await asyncio.gather(*(begin(ledger, fence=number) for number in range(1, 51)))
    assert answers.count(OpStarted()) == 1
    assert answers.count(OpIsRunning()) == 49


async def test_the_first_outcome_stays(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger)
        await ledger.finish_op("op-1", {"ok": True})
        await ledger.finish_op("op-1", {"ok": False})
        await ledger.finish_op("never begun", {"ok": True})
        assert await begin(ledger) == OpAlreadyDone({"ok": True})
        assert await begin(ledger, "never begun", fence=8) == OpStarted()


async def test_an_approval_for_several_uses_is_counted_down(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for use in range(3):
            assert await begin(ledger, fence=10 + use, max_uses=3) == OpStarted()
            assert await begin(ledger, fence=20 + use, max_uses=3) == OpIsRunning()
            await ledger.finish_op("op-1", {"use": use})
        assert await begin(ledger, fence=30, max_uses=3) == OpAlreadyDone({"use": 2})


async def test_an_operation_in_whose_midst_the_program_ended_is_interrupted(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger)
    async with opened(tmp_path) as ledger:
        assert await begin(ledger, fence=8) == OpAlreadyDone(approvals.INTERRUPTED)


@pytest.mark.parametrize("fence", [6, 7])
async def test_an_operation_that_was_overtaken_is_stale(tmp_path: Path, fence: int) -> None:
    async with opened(tmp_path) as ledger:
        assert await begin(ledger) == OpStarted()
        assert await begin(ledger, "op-2", fence=fence) == StaleFence()
    async with opened(tmp_path) as ledger:
        assert await begin(ledger, "op-2", fence=fence) == StaleFence()
        assert await begin(ledger, "op-2", slot="model:b", fence=fence) == OpStarted()
        assert await begin(ledger, "op-3", fence=8) == OpStarted()


async def test_a_stale_operation_leaves_no_trace(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger)
        await begin(ledger, "op-2", fence=1)
        assert await begin(ledger, "op-2", fence=8) == OpStarted()


async def test_a_repeated_operation_hears_its_outcome_even_when_it_was_overtaken(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger)
        await ledger.finish_op("op-1", {"ok": True})
        await begin(ledger, "op-2", fence=8)
        assert await begin(ledger, fence=7) == OpAlreadyDone({"ok": True})


async def test_a_caller_that_is_cancelled_leaves_no_operation_running(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        beginning = asyncio.create_task(begin(ledger))
        await asyncio.sleep(0)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning
        assert await begin(ledger, fence=8) == OpAlreadyDone(approvals.INTERRUPTED)


async def test_a_cancelled_repetition_does_not_end_the_operation_that_runs(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await begin(ledger) == OpStarted()
        repeating = asyncio.create_task(begin(ledger, fence=8))
        await asyncio.sleep(0)
        repeating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await repeating
        assert await begin(ledger, fence=9) == OpIsRunning()
