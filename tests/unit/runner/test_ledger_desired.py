"""Which models are desired after each way that operations can end, one after the other, and after the program's end."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

import pytest

from runner.ledger import FILE_NAME, DesiredModel, Ledger, LedgerFull, OpDetails, OpStarted, approvals
from runner.limits import limits
from tests.fakes.ledgers import T0, opened

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


async def begin(ledger: Ledger, op: Op, fence: int) -> str:
    details = OpDetails(operation=op.operation, model_id=op.model, ends=op.ends, adds_desired=op.keeps)
    started = await ledger.begin_op(
        f"op-{fence}", slot=f"model:{op.model}", fence=fence, max_uses=1, expires_at=T0 + 300, details=details
    )  # fmt: skip
    assert started == OpStarted()
    return f"op-{fence}"


async def end(ledger: Ledger, op: Op, fence: int) -> None:
    if op.outcome is not None:
        desired = row(op.model, fence) if op.keeps and op.outcome == DONE else None
        await ledger.finish_op(f"op-{fence}", op.outcome, desired=desired, has_ended=op.has_ended)


@pytest.mark.parametrize("name", list(ROWS))
async def test_what_is_desired_after_a_restart_follows_from_the_operations(tmp_path: Path, name: str) -> None:
    ops, expected = ROWS[name]
    async with opened(tmp_path) as ledger:
        for fence, op in enumerate(ops, start=1):
            await begin(ledger, op, fence)
            await end(ledger, op, fence)
    for _ in range(2):
        async with opened(tmp_path) as ledger:
            assert [model.model_id for model in await ledger.read_desired()] == expected
            assert sorted(ledger.desired_fences) == expected


async def test_an_unload_that_overtakes_the_writing_of_a_load_wins(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger, LOAD, 1)
        await begin(ledger, UNLOAD, 2)
        await end(ledger, UNLOAD, 2)
        await end(ledger, LOAD, 1)
        assert await ledger.read_desired() == []


async def test_a_row_that_was_put_back_after_the_unload_is_dropped_at_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for fence, op in enumerate([LOAD, UNLOAD], start=1):
            await begin(ledger, op, fence)
            await end(ledger, op, fence)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("INSERT INTO desired_models VALUES ('a', 1, x'00', x'00', 0)")
    async with opened(tmp_path) as ledger:
        assert await ledger.read_desired() == []


async def test_an_older_load_does_not_replace_what_a_newer_one_keeps(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger, LOAD, 1)
        await begin(ledger, LOAD, 2)
        await end(ledger, LOAD, 2)
        await end(ledger, LOAD, 1)
        assert [model.fence for model in await ledger.read_desired()] == [2]


async def test_a_repeated_outcome_changes_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger, LOAD, 1)
        await ledger.finish_op("op-1", FAILED)
        await end(ledger, LOAD, 1)
        assert await ledger.read_desired() == []


async def test_loads_that_never_ended_are_counted_over_restarts_until_one_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger, LOAD, 1)
        await end(ledger, LOAD, 1)
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


async def test_desired_models_cannot_pile_up(tmp_path: Path) -> None:
    async with opened(tmp_path):
        pass
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        rows = [(f"m{number}",) for number in range(limits().ledger.desired_models)]
        db.executemany("INSERT INTO desired_models VALUES (?, 1, x'00', x'00', 0)", rows)
    async with opened(tmp_path) as ledger:
        with pytest.raises(LedgerFull):
            await begin(ledger, LOAD, 1)
        assert await begin(ledger, Op("model-load", "a"), 1), "one that keeps nothing needs no room"


async def test_a_node_that_forgets_whom_it_trusted_keeps_nothing_loaded(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await begin(ledger, LOAD, 1)
        await end(ledger, LOAD, 1)
        await ledger.forget_trust()
        assert ledger.desired_fences == {}
        assert await ledger.read_desired() == []
