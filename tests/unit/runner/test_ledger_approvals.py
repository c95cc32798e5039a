"""What the ledger remembers of nonces, approvals and operations, and which models are desired after them."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.ledger import (
    FILE_NAME,
    DesiredModel,
    Ledger,
    LedgerFull,
    OpAlreadyDone,
    OpDetails,
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


async def test_of_many_who_bring_the_same_nonce_at_once_one_is_first(tmp_path: Path) -> None:
    clock, text = Clock(), "a-nonce-to-look-for"
    async with opened(tmp_path, clock) as ledger:
        answers = await asyncio.gather(*(ledger.spend_nonce(text, expires_at=EXPIRES) for _ in range(50)))
        assert answers.count(True) == 1
    assert text.encode() not in read_all(tmp_path)
    async with opened(tmp_path, clock) as ledger:
        clock.now = EXPIRES + limits().ledger.nonce_grace_s
        assert not await ledger.spend_nonce(text, expires_at=EXPIRES), "it is remembered for longer than its token lives"
        clock.now += 1
        assert await ledger.spend_nonce("n-2", expires_at=clock.now)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM nonces").fetchone() == (1,)


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


async def test_a_caller_that_is_cancelled_leaves_no_operation_running_and_ends_none_that_runs(tmp_path: Path) -> None:
    async def cancel(beginning: asyncio.Task[OpStart]) -> None:
        await asyncio.sleep(0)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning

    async with opened(tmp_path) as ledger:
        await cancel(asyncio.create_task(begin(ledger)))
        assert await begin(ledger, fence=8) == OpAlreadyDone(approvals.INTERRUPTED)
        assert await begin(ledger, "op-2", fence=9) == OpStarted()
        await cancel(asyncio.create_task(begin(ledger, "op-2", fence=10)))
        assert await begin(ledger, "op-2", fence=11) == OpIsRunning()


async def test_of_many_who_bring_one_approval_at_once_one_begins(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        answers = await asyncio.gather(*(begin(ledger, fence=number) for number in range(1, 51)))
    assert answers.count(OpStarted()) == 1
    assert answers.count(OpIsRunning()) == 49


async def test_an_approval_for_several_uses_is_counted_down(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for use in range(3):
            assert await begin(ledger, fence=10 + use, max_uses=3) == OpStarted()
            assert await begin(ledger, fence=20 + use, max_uses=3) == OpIsRunning()
            await ledger.finish_op("op-1", {"use": use})
        assert await begin(ledger, fence=30, max_uses=3) == OpAlreadyDone({"use": 2})


@pytest.mark.parametrize("fence", [6, 7])
async def test_an_operation_that_was_overtaken_is_stale(tmp_path: Path, fence: int) -> None:
    async with opened(tmp_path) as ledger:
        assert await begin(ledger) == OpStarted()
        assert await begin(ledger, "op-2", fence=fence) == StaleFence()
    async with opened(tmp_path) as ledger:
        assert await begin(ledger, "op-2", fence=fence) == StaleFence()
        assert await begin(ledger, "op-2", slot="model:b", fence=fence) == OpStarted()
        assert await begin(ledger, "op-3", fence=8) == OpStarted()


DONE: dict[str, object] = {"state": "succeeded"}
FAILED: dict[str, object] = {"state": "failed"}


@dataclass(frozen=True)
class Op:
    """One operation. ``outcome`` None: the program ends in its midst. ``has_ended``: what it ends is unloaded."""

    operation: str
    model: str
    outcome: dict[str, object] | None = None
    keeps: bool = False
    ends: str | None = None
    has_ended: bool = False


def row(model: str = "a", fence: int = 1) -> DesiredModel:
    return DesiredModel(model, fence, b"document", b"seal")


LOAD = Op("model-load", "a", DONE, keeps=True)
UNLOAD = Op("model-unload", "a", DONE, ends="a", has_ended=True)
REPLACE = Op("model-load", "b", DONE, keeps=True, ends="a", has_ended=True)

ROWS: dict[str, tuple[list[Op], list[str]]] = {
    "a load that keeps": ([LOAD], ["a"]),
    "a load that does not keep": ([Op("model-load", "a", DONE)], []),
    "a load that failed": ([Op("model-load", "a", FAILED)], []),
    "a load cut off": ([Op("model-load", "a", None, keeps=True)], []),
    "a load cut off in good order": ([Op("model-load", "a", approvals.INTERRUPTED)], []),
    "then loaded without keeping": ([LOAD, Op("model-load", "a", DONE)], ["a"]),
    "then flushed": ([LOAD, Op("cache-flush", "a", DONE)], ["a"]),
    "then unloaded": ([LOAD, UNLOAD], []),
    "then an unload that failed": ([LOAD, Op("model-unload", "a", FAILED, ends="a")], ["a"]),
    "then an unload cut off": ([LOAD, Op("model-unload", "a", None, ends="a")], []),
    "then an unload cut off in good order": ([LOAD, Op("model-unload", "a", approvals.INTERRUPTED, ends="a")], []),
    "unloaded and loaded again": ([LOAD, UNLOAD, LOAD], ["a"]),
    "another one unloaded": ([LOAD, Op("model-unload", "b", DONE, ends="b", has_ended=True)], ["a"]),
    "replaced": ([LOAD, REPLACE], ["b"]),
    "replaced, and the load failed after it": ([LOAD, Op("model-load", "b", FAILED, ends="a", has_ended=True)], []),
    "to be replaced, and the load failed before it": ([LOAD, Op("model-load", "b", FAILED, ends="a")], ["a"]),
    "to be replaced by one that was loaded already": ([LOAD, Op("model-load", "b", DONE, ends="a")], ["a"]),
    "a replacement cut off": ([LOAD, Op("model-load", "b", None, keeps=True, ends="a")], []),
}  # fmt: skip


async def begin_op(ledger: Ledger, op: Op, fence: int) -> str:
    details = OpDetails(operation=op.operation, model_id=op.model, ends=op.ends, adds_desired=op.keeps)
    started = await ledger.begin_op(
        f"op-{fence}", slot=f"model:{op.model}", fence=fence, max_uses=1, expires_at=T0 + 300, details=details
    )  # fmt: skip
    assert started == OpStarted()
    return f"op-{fence}"


async def end_op(ledger: Ledger, op: Op, fence: int) -> None:
    if op.outcome is not None:
        desired = row(op.model, fence) if op.keeps and op.outcome == DONE else None
        await ledger.finish_op(f"op-{fence}", op.outcome, desired=desired, has_ended=op.has_ended)


@pytest.mark.parametrize("name", list(ROWS))
async def test_what_is_desired_after_a_restart_follows_from_the_operations(tmp_path: Path, name: str) -> None:
    ops, expected = ROWS[name]
    async with opened(tmp_path) as ledger:
        for fence, op in enumerate(ops, start=1):
            await begin_op(ledger, op, fence)
            await end_op(ledger, op, fence)
    for _ in range(2):
        async with opened(tmp_path) as ledger:
            assert [model.model_id for model in await ledger.read_desired()] == expected
            assert sorted(ledger.desired_fences) == expected


@pytest.mark.parametrize(("newer", "kept"), [(UNLOAD, []), (LOAD, [2]), (Op("model-load", "a", FAILED), [1])])
async def test_of_two_operations_that_end_in_the_other_order_the_newer_one_counts(
    tmp_path: Path, newer: Op, kept: list[int]
) -> None:
    async with opened(tmp_path) as ledger:
        await begin_op(ledger, LOAD, 1)
        await begin_op(ledger, newer, 2)
        for op, fence in ((newer, 2), (LOAD, 1)):
            await end_op(ledger, op, fence)
        assert [model.fence for model in await ledger.read_desired()] == kept
        await ledger.finish_op("op-1", FAILED)  # a repeated outcome changes nothing
        assert [model.fence for model in await ledger.read_desired()] == kept


async def test_a_row_that_was_put_back_after_the_unload_is_dropped_at_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for fence, op in enumerate([LOAD, UNLOAD], start=1):
            await begin_op(ledger, op, fence)
            await end_op(ledger, op, fence)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("INSERT INTO desired_models VALUES ('a', 1, x'00', x'00', 0)")
    async with opened(tmp_path) as ledger:
        assert await ledger.read_desired() == []


async def test_loads_that_never_ended_are_counted_over_restarts_until_one_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin_op(ledger, LOAD, 1)
        await end_op(ledger, LOAD, 1)
    for count in (1, 2):
        async with opened(tmp_path) as ledger:
            (model,) = await ledger.read_desired()
            await ledger.count_unfinished(model, has_ended=False)
            assert [each.unfinished for each in await ledger.read_desired()] == [count]
    async with opened(tmp_path) as ledger:
        await ledger.count_unfinished(row(fence=7), has_ended=True)
        assert [each.unfinished for each in await ledger.read_desired()] == [2], "that is of another load"
        await ledger.count_unfinished(row(), has_ended=True)
        assert [each.unfinished for each in await ledger.read_desired()] == [0]
        await ledger.forget_trust()
        assert (ledger.desired_fences, await ledger.read_desired()) == ({}, [])


async def test_desired_models_cannot_pile_up(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        rows = [(f"m{number}",) for number in range(limits().ledger.desired_models)]
        db.executemany("INSERT INTO desired_models VALUES (?, 1, x'00', x'00', 0)", rows)
    async with opened(tmp_path) as ledger:
        with pytest.raises(LedgerFull):
            await begin_op(ledger, LOAD, 1)
        assert await begin_op(ledger, Op("model-load", "a"), 1), "one that keeps nothing needs no room"
