"""The ledger's file, its upgrade, the tasks and observations in it, and any order of operations and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sqlite3
import stat
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runner.definitions.plan import Observation
from runner.ledger import (
    FILE_NAME,
    DesiredModel,
    Ledger,
    LedgerError,
    LedgerFull,
    OpAlreadyDone,
    OpDetails,
    OpIsRunning,
    OpStart,
    OpStarted,
    StaleFence,
    TaskRow,
    TaskState,
    TooManyOps,
    approvals,
    history,
)
from runner.ledger.database import LOCK_NAME, SCHEMA_VERSION, Database, open_database
from runner.limits import limits
from tests.fakes.examples import examples
from tests.fakes.ledgers import T0, Clock, opened
from tests.fakes.limits import set_runner_limits
from tests.fakes.waiting import eventually, turns


def ledger_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("ledger")}


def damaged_files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if ".damaged-" in path.name]


def modes_in(directory: Path) -> dict[str, int]:
    return {path.name: mode_of(path) for path in directory.iterdir()}


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_ledger_is_new_once_and_one_programs_until_it_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "box"
    async with opened(folder, Clock()) as ledger:
        assert (ledger.is_new, ledger.born_at) == (True, T0)
        with pytest.raises(LedgerError, match="in use by another runner"):
            await Ledger.open(folder)
    await ledger.close()
    with pytest.raises(LedgerError, match="closed"):
        await ledger.spend_nonce("n-1", expires_at=T0)
    async with opened(folder, Clock(T0 + 1000)) as ledger:
        assert (ledger.is_new, ledger.born_at) == (False, T0)


async def test_only_the_owner_reads_the_files_and_every_commit_is_on_disk(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch(mode=0o644)
    (tmp_path / FILE_NAME).chmod(0o644)
    async with opened(tmp_path) as ledger:
        await ledger.spend_nonce("n-1", expires_at=T0)
        modes = modes_in(tmp_path)
        pragmas = ("journal_mode", "synchronous")
        settings = await ledger._run(lambda db: [db.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas])
    assert settings == ["wal", 2], "every commit is on disk before it is believed"
    assert modes == dict.fromkeys((FILE_NAME, FILE_NAME + "-wal", FILE_NAME + "-shm", LOCK_NAME), 0o600)
    async with opened(tmp_path / "made-here"):
        assert mode_of(tmp_path / "made-here") == 0o700


@pytest.mark.parametrize("damage", ["no database", "cut in half", "pages overwritten", "last page overwritten", "empty"])
async def test_a_damaged_file_is_moved_aside(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / FILE_NAME
    async with opened(tmp_path) as ledger:
        assert await ledger.spend_nonce("n-1", expires_at=T0 + 300)
    content = path.read_bytes()
    spoilt = {
        "no database": b"this is no database, but long enough to be taken for one" * 100, "empty": b"",
        "cut in half": content[: len(content) // 8192 * 4096],
        "pages overwritten": content[:4096] + b"\xff" * (len(content) - 4096),
        "last page overwritten": content[:-4096] + b"\xff" * 4096,
    }[damage]  # fmt: skip
    path.write_bytes(spoilt)
    async with opened(tmp_path, Clock(T0 + 60)) as ledger:
        assert (ledger.is_new, ledger.born_at) == (True, T0 + 60), "it counts as lost"
        assert await ledger.spend_nonce("n-1", expires_at=T0 + 300)
    assert [kept.read_bytes() for kept in damaged_files(tmp_path)] == ([spoilt] if spoilt else [])
    assert ("ledger is damaged" in caplog.text) is bool(spoilt)


async def test_a_place_that_cannot_hold_a_ledger_is_named(tmp_path: Path) -> None:
    before = ledger_threads()
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="choose another data directory"):
        await Ledger.open(tmp_path / "file")
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(LedgerError, match=FILE_NAME):
        await Ledger.open(tmp_path)
    (tmp_path / FILE_NAME).rmdir()
    async with opened(tmp_path):
        pass
    await eventually(lambda: ledger_threads() <= before)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.execute("PRAGMA user_version=99")
    with pytest.raises(LedgerError, match="another version"):
        await Ledger.open(tmp_path)
    assert not damaged_files(tmp_path)


async def test_what_was_submitted_is_done_before_the_file_closes(tmp_path: Path) -> None:
    ledger = await Ledger.open(tmp_path, clock=Clock())
    spending = [asyncio.create_task(ledger.spend_nonce(f"n-{number}", expires_at=T0 + 300)) for number in range(20)]
    await turns(1)
    await ledger.close()
    assert all(await asyncio.gather(*spending))
    async with opened(tmp_path) as ledger:
        assert not await ledger.spend_nonce("n-19", expires_at=T0 + 300)


async def test_a_failing_disk_is_our_error(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger._run(lambda db: db.execute("PRAGMA max_page_count=1"))
        with pytest.raises(LedgerError, match="full"):
            await asyncio.gather(*(ledger.spend_nonce(f"n-{number}", expires_at=T0 + 300) for number in range(200)))
        # The failed write was undone, so the connection is fit for the next one.
        await ledger._run(lambda db: db.execute("PRAGMA max_page_count=10000"))
        assert await ledger.spend_nonce("after", expires_at=T0 + 300)


async def test_a_disk_that_hangs_is_given_up_and_the_queue_in_front_of_it_is_bounded(tmp_path: Path) -> None:
    release, usual_s = threading.Event(), limits().ledger.answer_s
    set_runner_limits(ledger={"waiting": 5})
    async with opened(tmp_path) as ledger:
        set_runner_limits(ledger={"answer_s": 0.05})
        try:
            with pytest.raises(LedgerError, match="did not answer"):
                await ledger._run(lambda _: release.wait(30))
            set_runner_limits(ledger={"answer_s": usual_s})
            waiting = [asyncio.create_task(ledger.spent("t", "2026-11")) for _ in range(5)]
            await turns(1)
            with pytest.raises(LedgerError, match="too slow"):
                await ledger.spent("t", "2026-11")
        finally:
            release.set()
        assert sum(isinstance(got, LedgerError) for got in await asyncio.gather(*waiting, return_exceptions=True)) <= 1
        assert await ledger.spent("t", "2026-11") == 0


FIRST = """
CREATE TABLE born (born_at REAL NOT NULL);
CREATE TABLE nonces (digest BLOB PRIMARY KEY, expires_at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX nonces_by_expiry ON nonces (expires_at);
CREATE TABLE ops (
    op_id TEXT PRIMARY KEY, slot TEXT NOT NULL, fence INTEGER NOT NULL, uses INTEGER NOT NULL, outcome TEXT,
    begun_at REAL NOT NULL, expires_at REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE fences (slot TEXT PRIMARY KEY, fence INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE tasks (
    task_id TEXT PRIMARY KEY, model_id TEXT NOT NULL, state TEXT NOT NULL, stage TEXT NOT NULL, fraction REAL,
    started_at REAL NOT NULL, finished_at REAL, error TEXT, result TEXT NOT NULL
);
CREATE INDEX tasks_by_start ON tasks (started_at);
CREATE TABLE observations (
    id INTEGER PRIMARY KEY, backend TEXT NOT NULL, model_id TEXT NOT NULL, plan_key TEXT NOT NULL,
    weights_bytes INTEGER NOT NULL, kv_bytes INTEGER NOT NULL, measured_bytes INTEGER NOT NULL,
    load_s REAL NOT NULL, loaded_at REAL NOT NULL
);
CREATE INDEX observations_by_plan ON observations (model_id, plan_key);
CREATE TABLE costs (
    id INTEGER PRIMARY KEY, cost_id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, model_id TEXT NOT NULL, month TEXT NOT NULL,
    state TEXT NOT NULL, reserved_micros INTEGER NOT NULL, counted_micros INTEGER NOT NULL, created_at REAL NOT NULL,
    settled_at REAL
);
CREATE INDEX costs_by_state ON costs (state);
CREATE TABLE spendings (
    tenant TEXT NOT NULL, month TEXT NOT NULL, counted_micros INTEGER NOT NULL, PRIMARY KEY (tenant, month)
) WITHOUT ROWID;
"""
"""What a file of version 1 consists of, written out: code that changes must not change it."""


def write_first(directory: Path) -> None:
    """A file of version 1 with an operation that was done, one that was cut off, and a spent nonce."""
    with contextlib.closing(sqlite3.connect(directory / FILE_NAME)) as db, db:
        db.executescript(FIRST)
        db.execute("INSERT INTO born VALUES (?)", (T0 - 1000,))
        done = json.dumps({"status": 202, "body": {"taskId": "load-1"}})
        db.execute("INSERT INTO ops VALUES ('op-1', 'model:a', 7, 1, ?, ?, ?)", (done, T0 - 100, T0 + 200))
        db.execute("INSERT INTO ops VALUES ('op-2', 'model:b', 3, 1, NULL, ?, ?)", (T0 - 50, T0 + 250))
        db.execute("INSERT INTO fences VALUES ('model:a', 7)")
        db.execute("PRAGMA user_version=1")


def shape_of(directory: Path) -> tuple[int, list[tuple[object, ...]], dict[str, list[tuple[object, ...]]]]:
    """The version, the indices and the columns of every table of a file."""
    with contextlib.closing(sqlite3.connect(directory / FILE_NAME)) as db:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        tables = [row[0] for row in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        indices = db.execute("SELECT name, tbl_name, sql FROM sqlite_master WHERE type = 'index' ORDER BY name").fetchall()
        return version, indices, {name: db.execute(f"PRAGMA table_info({name})").fetchall() for name in sorted(tables)}


async def test_an_upgraded_file_is_like_a_new_one(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    write_first(old)
    for each in (old, new):
        async with opened(each):
            pass
    assert shape_of(old) == shape_of(new)
    assert shape_of(old)[0] == SCHEMA_VERSION == 3


async def test_nothing_is_lost_and_what_was_written_goes_on_working(tmp_path: Path) -> None:
    write_first(tmp_path)
    async with opened(tmp_path) as ledger:
        assert (ledger.is_new, ledger.born_at) == (False, T0 - 1000)
        again = await ledger.begin_op("op-1", slot="model:a", fence=8, max_uses=1, expires_at=T0 + 300)
        assert again == OpAlreadyDone({"status": 202, "body": {"taskId": "load-1"}})
        cut = await ledger.find_op("op-2", 1)
        assert cut is not None
        assert (cut.outcome, cut.operation, cut.receipt) == (approvals.INTERRUPTED, "", "")
        assert await ledger.begin_op("op-3", slot="model:a", fence=7, max_uses=1, expires_at=T0 + 300) == StaleFence()
        details = OpDetails(operation="model-load", model_id="a", approval_id="op-4", use=2)
        begun = await ledger.begin_op("op-4.2", slot="model:a", fence=9, max_uses=1, expires_at=T0 + 300, details=details)
        assert begun == OpStarted()
    async with opened(tmp_path) as ledger:
        found = await ledger.find_op("op-4", 2)
        assert found is not None
        assert (found.op_key, found.model_id, found.outcome) == ("op-4.2", "a", approvals.INTERRUPTED)
        assert await ledger.find_op("op-4", 1) is None


async def test_an_upgrade_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    write_first(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as db, db:
        db.execute("CREATE TABLE policies (taken TEXT)")
    before = shape_of(tmp_path)
    for _ in range(2):
        with pytest.raises(LedgerError, match="policies already exists"):
            await Ledger.open(tmp_path)
    assert shape_of(tmp_path) == before


TASK = TaskRow(
    task_id="load-1", model_id="org/model", state=TaskState.LOADING, stage="reading weights", fraction=0.25, started_at=T0
)
SEEN = Observation(
    backend="llamacpp", model_id="m", plan_key="k", weights_bytes=10, kv_bytes=2, measured_bytes=13, load_s=1.5, loaded_at=T0
)


async def test_unfinished_tasks_are_interrupted_and_finished_ones_are_not(tmp_path: Path) -> None:
    failed = replace(
        TASK, task_id="failed", state=TaskState.FAILED, error="no memory", finished_at=T0, result={"ä": [1.5, None]}
    )
    async with opened(tmp_path) as ledger:
        for task in (replace(TASK, task_id="late", started_at=T0 + 1), TASK, replace(TASK, task_id="failed"), failed):
            await ledger.save_task(task)
    async with opened(tmp_path) as ledger:
        interrupted = await ledger.interrupt_tasks(T0 + 50)
        ended: dict[str, Any] = {"state": TaskState.INTERRUPTED, "finished_at": T0 + 50, "error": history.INTERRUPTED}
        assert interrupted == [
            replace(TASK, task_id=name, started_at=at, **ended) for name, at in (("load-1", T0), ("late", T0 + 1))
        ]
        assert [await ledger.read_task(task.task_id) for task in interrupted] == interrupted
        assert (await ledger.read_task("failed"), await ledger.read_task("nobody")) == (failed, None)
        assert await ledger.interrupt_tasks(T0 + 60) == []


async def test_the_newest_tasks_are_kept_and_running_ones_always(tmp_path: Path) -> None:
    set_runner_limits(ledger={"tasks": 3})
    async with opened(tmp_path) as ledger:
        await ledger.save_task(TASK)
        for number in range(2, 7):
            await ledger.save_task(replace(TASK, state=TaskState.COMPLETED, task_id=f"load-{number}", started_at=T0 + number))
        assert [task.task_id for task in await ledger.recent_tasks(10)] == ["load-6", "load-5", "load-4", "load-1"]


async def test_observations_come_newest_first_and_are_bounded_per_plan_and_in_all(tmp_path: Path) -> None:
    set_runner_limits(ledger={"observations_of_plan": 3, "observations": 10})
    async with opened(tmp_path) as ledger:
        assert await ledger.last_load_s("m", "k") is None
        await ledger.add_observation(replace(SEEN, backend="vllm", plan_key="v", load_s=9.0))
        await ledger.add_observation(replace(SEEN, plan_key="seldom", load_s=7.0))
        for number in range(9):
            await ledger.add_observation(replace(SEEN, load_s=float(number)))
        assert await ledger.last_load_s("m", "k") == 8.0
        assert [seen.load_s for seen in await ledger.observations("llamacpp")] == [8.0, 7.0, 6.0, 7.0]
        assert await ledger.observations("llamacpp", 1) == [replace(SEEN, load_s=8.0)]
        for number in range(20):
            await ledger.add_observation(replace(SEEN, plan_key=f"k{number}", load_s=100.0))
        assert len(await ledger.observations("llamacpp")) == 10


OPS = st.sampled_from(["op-1", "op-2", "op-3", "op-4"])
SLOTS = st.sampled_from(["model:a", "model:b"])
HOURLY = 6


class LedgerMachine(RuleBasedStateMachine):
    """A ledger beside what it should remember."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-machine-"))
        self.now = T0
        self.outcomes: dict[str, dict[str, object] | None] = {}
        self.begun: list[float] = []
        self.fences: dict[str, int] = {}

    @initialize()
    def start(self) -> None:
        self.database: Database = open_database(self.folder, now=self.now)

    def teardown(self) -> None:
        self.database.close()
        shutil.rmtree(self.folder)

    @rule(op=OPS, use=st.integers(1, 2), slot=SLOTS, fence=st.integers(1, 30))
    def begin(self, op: str, use: int, slot: str, fence: int) -> None:
        key = f"{op}.{use}"
        answer = approvals.begin_op(
            self.database.connection, key, slot=slot, fence=fence, max_uses=1, expires_at=self.now + 300, now=self.now,
            details=OpDetails(operation="model-load", approval_id=op, use=use, most_per_hour=HOURLY),
        )  # fmt: skip
        recent = [at for at in self.begun if at > self.now - approvals.HOUR_S]
        if key in self.outcomes:
            known = self.outcomes[key]
            assert answer == (OpIsRunning() if known is None else OpAlreadyDone(known))
        elif fence <= self.fences.get(slot, 0):
            assert answer == StaleFence()
        elif len(recent) >= HOURLY:
            assert isinstance(answer, TooManyOps)
            assert 0 < answer.retry_after_s <= approvals.HOUR_S
        else:
            assert answer == OpStarted()
            self.outcomes[key], self.fences[slot] = None, fence
            self.begun.append(self.now)

    @rule(op=OPS, use=st.integers(1, 2), number=st.integers(0, 3))
    def finish(self, op: str, use: int, number: int) -> None:
        key, outcome = f"{op}.{use}", {"state": "succeeded", "number": number}
        approvals.finish_op(self.database.connection, key, dict(outcome), receipt="", now=self.now)
        if key in self.outcomes and self.outcomes[key] is None:
            self.outcomes[key] = dict(outcome)

    @rule()
    def restart(self) -> None:
        self.database.close()
        self.database = open_database(self.folder, now=self.now)
        approvals.interrupt_ops(self.database.connection, now=self.now)
        for key, outcome in self.outcomes.items():
            self.outcomes[key] = outcome or dict(approvals.INTERRUPTED)

    @rule(seconds=st.integers(1, 2000))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def everything_is_as_remembered(self) -> None:
        for key, outcome in self.outcomes.items():
            op, _, use = key.rpartition(".")
            row = approvals.find_op(self.database.connection, op, int(use))
            assert row is not None
            assert row.outcome == outcome


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(examples(8), stateful_step_count=30)


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
        await turns(1)
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
async def test_of_two_operations_that_end_in_the_other_order_the_newer_counts(
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
