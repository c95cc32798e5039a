"""The ledger's file, its upgrade, the tasks and observations in it, and any order of operations and restarts."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import sqlite3
import stat
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runner.definitions.plan import Observation
from runner.ledger import ledger as operations
from runner.ledger.database import (
    FILE_NAME,
    LOCK_NAME,
    SCHEMA_VERSION,
    Database,
    LedgerError,
    LedgerFull,
    open_database,
    upgrade,
)
from runner.ledger.ledger import INTERRUPTED, DesiredModel, Ledger, RunState, TooManyOps
from runner.limits import limits
from tests.fakes.examples import examples
from tests.fakes.ledgers import T0, Clock, begin_op, end_op, opened, order_of, said, spend, spend_new
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
        await spend(ledger, "n-1", expires_at=T0)
    async with opened(folder, Clock(T0 + 1000)) as ledger:
        assert (ledger.is_new, ledger.born_at) == (False, T0)


async def test_only_the_owner_reads_the_files_and_every_commit_is_on_disk(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).touch(mode=0o644)
    (tmp_path / FILE_NAME).chmod(0o644)
    async with opened(tmp_path) as ledger:
        await spend(ledger, "n-1", expires_at=T0)
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
        assert await spend(ledger, "n-1", expires_at=T0 + 300)
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
        assert await spend(ledger, "n-1", expires_at=T0 + 300)
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
    spending = [asyncio.create_task(spend(ledger, f"n-{number}", expires_at=T0 + 300)) for number in range(20)]
    await turns(1)
    await ledger.close()
    assert all(await asyncio.gather(*spending))
    async with opened(tmp_path) as ledger:
        assert not await spend(ledger, "n-19", expires_at=T0 + 300)


async def test_a_failing_disk_is_our_error(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await ledger._run(lambda db: db.execute("PRAGMA max_page_count=1"))
        with pytest.raises(LedgerError, match="full"):
            await asyncio.gather(*(spend(ledger, f"n-{number}", expires_at=T0 + 300) for number in range(900)))
        # The failed write was undone, so the connection is fit for the next one.
        await ledger._run(lambda db: db.execute("PRAGMA max_page_count=10000"))
        assert await spend(ledger, "after", expires_at=T0 + 300)


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
    assert shape_of(old)[0] == SCHEMA_VERSION == 5


async def test_nothing_is_lost_and_what_was_written_goes_on_working(tmp_path: Path) -> None:
    write_first(tmp_path)
    async with opened(tmp_path) as ledger:
        assert (ledger.is_new, ledger.born_at) == (False, T0 - 1000)
        again = await begin_op(ledger, "op-1", slot="model:a", fence=8, expires_at=T0 + 300)
        assert again == {"state": "succeeded", "status": 202, "body": {"taskId": "load-1"}}
        cut = await ledger.find_op("op-2", 1)
        assert cut is not None
        assert (cut.outcome, cut.operation, cut.receipt) == (INTERRUPTED, "", "")
        assert await begin_op(ledger, "op-3", slot="model:a", fence=7, expires_at=T0 + 300) == "stale"
        details = {"operation": "model-load", "model_id": "a", "approval_id": "op-4", "use": 2}
        assert await begin_op(ledger, "op-4.2", slot="model:a", fence=9, expires_at=T0 + 300, **details) == "started"
    async with opened(tmp_path) as ledger:
        found = await ledger.find_op("op-4", 2)
        assert found is not None
        assert (found.op_key, found.model_id, found.outcome) == ("op-4.2", "a", INTERRUPTED)
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


SECOND = """
ALTER TABLE ops ADD COLUMN operation TEXT NOT NULL DEFAULT '';
ALTER TABLE ops ADD COLUMN model_id TEXT;
ALTER TABLE ops ADD COLUMN approval_id TEXT NOT NULL DEFAULT '';
ALTER TABLE ops ADD COLUMN use INTEGER NOT NULL DEFAULT 1;
ALTER TABLE ops ADD COLUMN op_class TEXT NOT NULL DEFAULT '';
ALTER TABLE ops ADD COLUMN statement_digest TEXT NOT NULL DEFAULT '';
ALTER TABLE ops ADD COLUMN checkpoint TEXT NOT NULL DEFAULT '';
ALTER TABLE ops ADD COLUMN ended_at REAL;
ALTER TABLE ops ADD COLUMN receipt TEXT NOT NULL DEFAULT '';
UPDATE ops SET approval_id = op_id;
CREATE INDEX ops_by_begin ON ops (begun_at);
CREATE INDEX ops_by_approval ON ops (approval_id, use);
CREATE TABLE policies (
    version INTEGER PRIMARY KEY, document BLOB NOT NULL, statement BLOB NOT NULL, proofs TEXT NOT NULL, pinned_at REAL NOT NULL
);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
"""
THIRD = """
ALTER TABLE ops ADD COLUMN ends TEXT;
CREATE TABLE desired_models (
    model_id TEXT PRIMARY KEY, fence INTEGER NOT NULL, document BLOB NOT NULL, seal BLOB NOT NULL,
    unfinished INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
"""
"""What makes a file of version 3 out of one of version 1, written out as well."""
BODY: dict[str, object] = {"modelId": "a", "gpuMemoryUsedMB": None, "loadTimeMs": 12, "keptLoaded": True}
OPS_OF_THIRD: dict[str, tuple[object, ...]] = {
    # slot, fence, outcome, begun, operation, model, approval, use, class, digest, checkpoint, ended, receipt, ends
    "done.1": ("model:a", 7, {"state": "succeeded", "status": 200, "body": BODY}, -90.0, "model-load", "a", "done", 1, "load",
               "d1", "c1", -80.0, "receipt of done", None),
    "failed.2": ("model:b", 5, {"state": "failed", "status": 409, "body": {"error": {"code": "x"}}}, -70.0, "model-unload", "b",
                 "failed", 2, "load", "d2", "c2", -60.0, "receipt of failed", "b"),
    "cut.1": ("cache", 6, {"state": "interrupted"}, -50.0, "cache-flush", None, "cut", 1, "", "d3", "", -40.0, "", None),
    "signed.1": ("cache", 4, {"state": "interrupted", "body": {"loaded": []}}, -55.0, "cache-flush", None, "signed", 1, "",
                 "d4", "", -45.0, "receipt of signed", None),
    "old": ("model:c", 3, {"status": 202, "body": {"taskId": "load-1"}}, -950.0, "", None, "old", 1, "", "", "", None, "",
            None),
    "running.1": ("model:d", 9, None, -10.0, "model-unload", "d", "running", 1, "load", "d5", "c5", None, "", "d"),
}  # fmt: skip
TASKS_OF_THIRD = [
    ("load-1", "a", "completed", "ready", 1.0, T0 - 90.5, T0 - 80, None, '{"gpuMemoryUsedMB": null, "receipt": "signed too"}'),
    ("load-2", "b", "failed", "reading", 0.12345, T0 - 70, T0 - 60, "no memory", '{"code": "model_load_failed"}'),
    ("load-3", "c", "interrupted", "reading", None, T0 - 50, T0 - 40, "the load was cancelled", "{}"),
    ("load-4", "d", "loading", "reading", 0.5, T0 - 5, None, None, "{}"),
]
LATER = T0 + 3600


def write_third(directory: Path) -> None:
    """A file of version 3 with an operation in each stage, loads, spent nonces, and all that stands beside them."""
    directory.mkdir(exist_ok=True)
    with contextlib.closing(sqlite3.connect(directory / FILE_NAME, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode=WAL")
        db.executescript(FIRST + SECOND + THIRD)
        db.execute("INSERT INTO born VALUES (?)", (T0 - 1000,))
        for nonce, expires_at in (("n-live", LATER), ("n-other", LATER + 1), ("n-old", T0 - 9000)):
            db.execute("INSERT INTO nonces VALUES (?, ?)", (hashlib.sha256(nonce.encode()).digest(), expires_at))
        for key, (slot, fence, outcome, begun, *named, ended, receipt, ends) in OPS_OF_THIRD.items():
            written = None if outcome is None else json.dumps(outcome)
            times = (T0 + float(str(begun)), LATER), None if ended is None else T0 + float(str(ended))
            values = (key, slot, fence, 1, written, *times[0], *named, times[1], receipt, ends)
            db.execute(f"INSERT INTO ops VALUES ({', '.join('?' * 17)})", values)
        db.executemany("INSERT INTO fences VALUES (?, ?)", [("model:a", 7), ("model:b", 8), ("model:d", 9), ("model:gone", 50)])
        db.executemany("INSERT INTO tasks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", TASKS_OF_THIRD)
        db.execute("INSERT INTO observations VALUES (1, 'llamacpp', 'm', 'k', 10, 2, 13, 1.5, ?)", (T0,))
        db.execute("INSERT INTO costs VALUES (1, 'c-1', 't', 'm', '2026-11', 'reserved', 100, 100, ?, NULL)", (T0,))
        db.execute("INSERT INTO spendings VALUES ('t', '2026-11', 100)")
        db.execute("INSERT INTO policies VALUES (1, x'01', x'02', '[{}]', ?)", (T0,))
        db.execute("INSERT INTO facts VALUES ('box', '{}')")
        db.executemany("INSERT INTO desired_models VALUES (?, ?, x'01', x'02', 1)", [("a", 7), ("d", 8)])
        db.execute("PRAGMA user_version=3")


def read_rows(directory: Path, *tables: str) -> dict[str, list[tuple[object, ...]]]:
    with contextlib.closing(sqlite3.connect(directory / FILE_NAME)) as db:
        return {name: db.execute(f"SELECT * FROM {name} ORDER BY 1").fetchall() for name in tables}


BESIDE = ("born", "fences", "observations", "costs", "spendings", "policies", "facts")
"""What an upgrade to version 4 does not touch."""


async def require_upgraded(folder: Path) -> None:
    """Fail unless the ledger knows whatever stood in the file of ``write_third``."""
    async with opened(folder, Clock(T0 + 1)) as ledger:
        assert (ledger.is_new, ledger.born_at) == (False, T0 - 1000)
        for nonce in ("n-live", "n-other"):
            assert not await spend(ledger, nonce, expires_at=LATER), "a spent nonce is new again"
        for slot, fence in (("model:a", 7), ("model:b", 8), ("model:d", 9), ("model:gone", 50)):
            assert await begin_op(ledger, f"late {slot}", slot=slot, fence=fence, expires_at=LATER) == "stale"
        for key, (place, mark, outcome, begun, *named, ended, receipt, ends) in OPS_OF_THIRD.items():
            operation, model_id, approval_id, use, _, digest, checkpoint = named
            run = await ledger.find_op(str(approval_id), int(str(use)))
            assert run is not None
            told = {"state": "succeeded", **outcome} if isinstance(outcome, dict) else INTERRUPTED
            ended_at = T0 + float(str(ended)) if ended is not None else T0 + 1 if outcome is None else None
            assert (run.op_key, run.fence, run.outcome, run.receipt) == (key, mark, told, receipt)
            assert (run.operation, run.model_id, run.statement_digest, run.checkpoint, run.ends) == (
                operation, model_id, digest, checkpoint, ends,
            )  # fmt: skip
            assert (run.begun_at, run.ended_at) == (T0 + float(str(begun)), ended_at)
            again = await begin_op(ledger, key, slot=str(place), fence=99, expires_at=LATER, approval_id="another")
            assert again == told, "carried out again"
        assert [model.model_id for model in await ledger.read_desired()] == ["a"], "the unload of d was cut off"


async def test_a_file_of_version_3_is_upgraded_with_every_operation_and_what_stands_beside(tmp_path: Path) -> None:
    folder = tmp_path / "third"
    write_third(folder)
    before = read_rows(folder, *BESIDE)
    await require_upgraded(folder)
    assert read_rows(folder, *BESIDE) == before
    async with opened(tmp_path / "new"):
        pass
    assert shape_of(folder) == shape_of(tmp_path / "new")
    async with opened(folder) as ledger:
        cut = await ledger.find_op("cut", 1)
        assert cut is not None
        for receipt in ("the first", "the second"):
            certified = await ledger.certify_op(cut.run_id, {**INTERRUPTED, "body": {"loaded": [receipt]}}, receipt=receipt)
            assert (certified.outcome, certified.receipt) == ({**INTERRUPTED, "body": {"loaded": ["the first"]}}, "the first")
        signed = await ledger.find_op("signed", 1)
        assert signed is not None
        assert (await ledger.certify_op(signed.run_id, INTERRUPTED, receipt="another")).receipt == "receipt of signed"


async def test_loads_of_version_3_are_answered_as_before(tmp_path: Path) -> None:
    write_third(tmp_path)
    async with opened(tmp_path, Clock(T0 + 1)) as ledger:
        runs = [await ledger.find_load(f"load-{number}") for number in (1, 2, 3, 4)]
    done, failed, cancelled, cut = (run for run in runs if run is not None)
    started = {"startedAt": int(T0 - 91), "gpuMemoryUsedMB": None}
    shown = {"taskId": "load-1", "status": "completed", "modelId": "a", "stage": "ready", "progress": 1.0, **started}
    assert (done.outcome, done.receipt) == ({"state": "succeeded", "status": 200, "body": shown}, "signed too")
    shown = {
        "taskId": "load-2", "status": "failed", "modelId": "b", "stage": "reading", "progress": 0.123, "error": "no memory",
        "code": "model_load_failed", "startedAt": int(T0 - 70),
    }  # fmt: skip
    assert (failed.outcome, failed.receipt) == ({"state": "failed", "status": 200, "body": shown}, "")
    assert (cancelled.state, cancelled.fraction, cancelled.error) == (RunState.INTERRUPTED, None, "the load was cancelled")
    assert (cut.state, cut.fraction, cut.error, cut.ended_at) == (
        RunState.INTERRUPTED, 0.5, operations.LOAD_INTERRUPTED, T0 + 1,
    )  # fmt: skip


async def test_an_upgrade_that_is_killed_at_any_statement_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    folder, tables = tmp_path / "third", ("ops", "nonces", "tasks", "fences", "desired_models")
    write_third(folder)
    before, shape, images = read_rows(folder, *tables), shape_of(folder), list[Path]()

    def take_image(_statement: str) -> None:
        images.append(shutil.copytree(folder, tmp_path / f"killed-{len(images)}", ignore=shutil.ignore_patterns("*-shm")))

    with contextlib.closing(sqlite3.connect(folder / FILE_NAME, isolation_level=None)) as db:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA cache_size=1")  # so that pages reach the disk before the commit
        db.set_trace_callback(take_image)
        upgrade(db, 3)
        take_image("after the commit")
    versions = [shape_of(image)[0] for image in images]
    assert versions == [3] * (len(images) - 1) + [5]
    assert len(images) > len(TASKS_OF_THIRD) + 10, "not every statement was seen"
    for image in images[:-1]:
        assert (read_rows(image, *tables), shape_of(image)) == (before, shape)
    for image in images:
        await require_upgraded(image)


async def test_a_file_of_a_later_version_is_refused_in_words_and_left_as_it_is(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await spend(ledger, "n-1", expires_at=LATER)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as db:
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION + 1}")
    content = (tmp_path / FILE_NAME).read_bytes()
    words = (
        f"{FILE_NAME} was written by another version of this program (its ledger is of version 6, this program reads up to 5) "
        "and is left as it is; start that version again, or choose another data directory"
    )
    for _ in range(2):
        with pytest.raises(LedgerError, match=re.escape(words)):
            await Ledger.open(tmp_path)
    assert (tmp_path / FILE_NAME).read_bytes() == content
    assert not damaged_files(tmp_path)


SEEN = Observation(
    backend="llamacpp", model_id="m", plan_key="k", weights_bytes=10, kv_bytes=2, measured_bytes=13, load_s=1.5, loaded_at=T0
)


async def test_unfinished_loads_are_interrupted_and_finished_ones_are_not(tmp_path: Path) -> None:
    outcome: dict[str, object] = {"state": "failed", "status": 200, "body": {"ä": [1.5, None]}}
    async with opened(tmp_path) as ledger:
        run_id = await ledger.start_load("load-1", run_id=None, model_id="org/model", stage="waiting")
        await ledger.save_progress(run_id, "reading weights", 0.25)
        failed = await ledger.start_load("failed", run_id=None, model_id="org/model", stage="waiting")
        await ledger.finish_op(failed, outcome, receipt="signed")
        await ledger.finish_op(failed, {"state": "succeeded"}, receipt="another")
        await ledger.save_progress(failed, "late", 0.5)
    for now in (T0 + 50, T0 + 60):
        async with opened(tmp_path, Clock(now)) as ledger:
            cut, ended = await ledger.find_load("load-1"), await ledger.find_load("failed")
            assert cut is not None
            assert (cut.model_id, cut.state, cut.stage, cut.fraction, cut.begun_at, cut.ended_at, cut.error) == (
                "org/model", RunState.INTERRUPTED, "reading weights", 0.25, T0, T0 + 50, operations.LOAD_INTERRUPTED,
            )  # fmt: skip
            assert ended is not None
            assert (ended.state, ended.stage, ended.outcome, ended.receipt) == (RunState.FAILED, "waiting", outcome, "signed")
            assert await ledger.find_load("nobody") is None


async def test_the_newest_loads_are_kept_and_running_and_approved_ones_always(tmp_path: Path) -> None:
    set_runner_limits(ledger={"tasks": 3})
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        await ledger.start_load("running", run_id=None, model_id="m", stage="waiting")
        assert await begin(ledger) == "started"
        approved = await ledger.find_op("op-1", 1)
        assert approved is not None
        assert await ledger.start_load("approved", run_id=approved.run_id, model_id="m", stage="waiting") == approved.run_id
        await end_op(ledger, "op-1", DONE)
        for number in range(2, 7):
            clock.now += 1
            run_id = await ledger.start_load(f"load-{number}", run_id=None, model_id="m", stage="waiting")
            await ledger.finish_op(run_id, DONE)
        names = ["running", "approved", *(f"load-{number}" for number in range(2, 7))]
        kept = [name for name in names if await ledger.find_load(name) is not None]
        assert kept == ["running", "approved", "load-4", "load-5", "load-6"]


async def test_a_load_without_an_approval_keeps_the_nonce_of_its_token(tmp_path: Path) -> None:
    set_runner_limits(ledger={"tasks": 0})
    async with opened(tmp_path) as ledger:
        spent = await ledger.spend_nonce("n-1", expires_at=EXPIRES)
        assert spent is not None
        run_id = await ledger.start_load("load-1", run_id=spent.run_id, model_id="m", stage="waiting")
        await ledger.finish_op(run_id, DONE)
        other = await ledger.start_load("load-2", run_id=None, model_id="m", stage="waiting")
        await ledger.finish_op(other, DONE)
        await ledger.start_load("load-3", run_id=None, model_id="m", stage="waiting")
        assert [await ledger.find_load(f"load-{number}") is not None for number in (1, 2, 3)] == [True, False, True]
        assert not await spend(ledger, "n-1", expires_at=EXPIRES)


async def test_no_question_finds_a_row_that_only_holds_a_spent_nonce(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await spend(ledger, "n-1", expires_at=EXPIRES)
        assert await ledger.find_op("", 1) is None


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


@pytest.mark.parametrize("event", list(operations.RunEvent))
@pytest.mark.parametrize("state", list(RunState))
async def test_a_run_goes_on_as_the_table_says_and_not_otherwise(
    tmp_path: Path, state: RunState, event: operations.RunEvent
) -> None:
    async with opened(tmp_path) as ledger:
        run_id = await spend_new(ledger, expires_at=EXPIRES)
        if state is not RunState.SPENT:
            await ledger.begin_op(run_id, order_of("op-1", slot="a", fence=1, expires_at=EXPIRES))
        if state in operations.FINAL_STATES:
            await ledger.finish_op(run_id, {"state": state.value, "body": 1}, receipt="first")
        before = await ledger._run(lambda db: operations.find_run(db, "SELECT * FROM operations WHERE id = ?", run_id))
        assert before is not None
        assert before.state is state
        wanted = operations.TRANSITIONS.get((state, event), state)
        if event is operations.RunEvent.BEGIN:
            with pytest.raises(LedgerError) if wanted is state else contextlib.nullcontext():
                await ledger.begin_op(run_id, order_of("op-2", slot="b", fence=2, expires_at=EXPIRES))
            assert (await ledger.find_op("op-2", 1) is None) is (wanted is state)
        else:
            ended = {"succeed": "succeeded", "fail": "failed", "interrupt": "interrupted"}[event.value]
            await ledger.finish_op(run_id, {"state": ended, "body": 2}, receipt="second")
        after = await ledger._run(lambda db: operations.find_run(db, "SELECT * FROM operations WHERE id = ?", run_id))
        assert after is not None
        assert after.state is wanted
        assert after == before or wanted is not state, "an event that the table does not name changed something"


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
        self.receipts: dict[str, str] = {}
        self.nonces: dict[str, float] = {}
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
        order = order_of(
            key, slot=slot, fence=fence, expires_at=self.now + 300, operation="model-load", approval_id=op, use=use,
            most_per_hour=HOURLY,
        )  # fmt: skip
        spent = self.spend(f"{key}-{len(self.nonces)}")
        assert spent is not None
        answer = said(operations.begin_op(self.database.connection, spent.run_id, order, now=self.now))
        recent = [at for at in self.begun if at > self.now - operations.HOUR_S]
        if key in self.outcomes:
            known = self.outcomes[key]
            assert answer == (known or "running")
        elif fence <= self.fences.get(slot, 0):
            assert answer == "stale"
        elif len(recent) >= HOURLY:
            assert isinstance(answer, TooManyOps)
            assert 0 < answer.retry_after_s <= operations.HOUR_S
        else:
            assert answer == "started"
            self.outcomes[key], self.fences[slot] = None, fence
            self.begun.append(self.now)

    @rule(op=OPS, use=st.integers(1, 2), number=st.integers(0, 3))
    def finish(self, op: str, use: int, number: int) -> None:
        key, outcome = f"{op}.{use}", {"state": "succeeded", "number": number}
        run = operations.find_run(self.database.connection, operations.BY_APPROVAL, op, use)
        assert (run is not None) == (key in self.outcomes)
        if run is not None:
            receipt = f"of {outcome}"
            operations.finish_op(self.database.connection, run.run_id, dict(outcome), receipt=receipt, now=self.now)
            if self.outcomes[key] is None:
                self.outcomes[key], self.receipts[key] = dict(outcome), receipt

    @rule(op=OPS, use=st.integers(1, 2), number=st.integers(0, 3))
    def certify(self, op: str, use: int, number: int) -> None:
        key, outcome = f"{op}.{use}", {**INTERRUPTED, "body": number}
        run = operations.find_run(self.database.connection, operations.BY_APPROVAL, op, use)
        if run is not None:
            operations.certify_op(self.database.connection, run.run_id, dict(outcome), receipt=f"of {number}")
            if self.outcomes[key] == INTERRUPTED and not self.receipts.get(key):
                self.outcomes[key], self.receipts[key] = dict(outcome), f"of {number}"

    @rule(number=st.integers(0, 5))
    def replay(self, number: int) -> None:
        """Bring a nonce again, of whatever became an operation or was refused; a new one is let in."""
        live = [nonce for nonce, expires_at in self.nonces.items() if expires_at >= self.now]
        if number < len(live):
            assert self.spend(live[number]) is None
        else:
            assert self.spend(f"alone-{len(self.nonces)}") is not None

    def spend(self, nonce: str) -> operations.Run | None:
        expires_at = self.now + 300
        self.nonces.setdefault(nonce, expires_at)
        return operations.spend_nonce(self.database.connection, nonce, expires_at=expires_at, now=self.now)

    @rule()
    def restart(self) -> None:
        self.database.close()
        self.database = open_database(self.folder, now=self.now)
        operations.interrupt_ops(self.database.connection, now=self.now)
        for key, outcome in self.outcomes.items():
            self.outcomes[key] = outcome or dict(INTERRUPTED)

    @rule(seconds=st.integers(1, 2000))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def everything_is_as_remembered(self) -> None:
        for key, outcome in self.outcomes.items():
            op, _, use = key.rpartition(".")
            run = operations.find_run(self.database.connection, operations.BY_APPROVAL, op, int(use))
            assert run is not None
            assert (run.outcome, run.receipt) == (outcome, self.receipts.get(key, ""))
        marks = dict(self.database.connection.execute("SELECT slot, fence FROM fences").fetchall())
        assert marks == self.fences


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(examples(8), stateful_step_count=30)


EXPIRES = T0 + 300


def read_all(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.iterdir())


async def begin(ledger: Ledger, op_id: str = "op-1", *, slot: str = "model:a", fence: int = 7) -> object:
    return await begin_op(ledger, op_id, slot=slot, fence=fence, expires_at=EXPIRES)


async def test_of_many_who_bring_the_same_nonce_at_once_one_is_first(tmp_path: Path) -> None:
    clock, text = Clock(), "a-nonce-to-look-for"
    async with opened(tmp_path, clock) as ledger:
        answers = await asyncio.gather(*(spend(ledger, text, expires_at=EXPIRES) for _ in range(50)))
        assert answers.count(True) == 1
    assert text.encode() not in read_all(tmp_path)
    async with opened(tmp_path, clock) as ledger:
        clock.now = EXPIRES + limits().ledger.nonce_grace_s
        assert not await spend(ledger, text, expires_at=EXPIRES), "it is remembered for longer than its token lives"
        clock.now += 1
        assert await spend(ledger, "n-2", expires_at=clock.now)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        assert connection.execute("SELECT count(*) FROM operations").fetchone() == (1,)


async def test_a_full_memory_refuses_instead_of_forgetting(tmp_path: Path) -> None:
    set_runner_limits(ledger={"nonces": 3, "ops": 1})
    clock = Clock()
    async with opened(tmp_path, clock) as ledger:
        for number in range(3):
            assert await spend(ledger, f"n-{number}", expires_at=EXPIRES)
        with pytest.raises(LedgerFull):
            await spend(ledger, "n-3", expires_at=EXPIRES)
        assert not await spend(ledger, "n-0", expires_at=EXPIRES)
        clock.now = EXPIRES + limits().ledger.nonce_grace_s + 1
        assert await spend(ledger, "n-3", expires_at=EXPIRES)
        assert await begin(ledger) == "started"
        with pytest.raises(LedgerFull):
            await begin(ledger, "op-2", fence=8)
        assert await begin(ledger) == "running"


async def test_a_caller_that_is_cancelled_leaves_no_operation_running_and_ends_none_that_runs(tmp_path: Path) -> None:
    async def cancel(op_id: str, fence: int) -> None:
        order = order_of(op_id, slot="model:a", fence=fence, expires_at=EXPIRES)
        beginning = asyncio.create_task(ledger.begin_op(await spend_new(ledger, expires_at=EXPIRES), order))
        await turns(1)
        beginning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await beginning

    async with opened(tmp_path) as ledger:
        await cancel("op-1", 7)
        assert await begin(ledger, fence=8) == INTERRUPTED
        assert await begin(ledger, "op-2", fence=9) == "started"
        await cancel("op-2", 10)
        assert await begin(ledger, "op-2", fence=11) == "running"


async def test_of_many_who_bring_one_approval_at_once_one_begins(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        answers = await asyncio.gather(*(begin(ledger, fence=number) for number in range(1, 51)))
    assert answers.count("started") == 1
    assert answers.count("running") == 49


@pytest.mark.parametrize("fence", [6, 7])
async def test_an_operation_that_was_overtaken_is_stale(tmp_path: Path, fence: int) -> None:
    async with opened(tmp_path) as ledger:
        assert await begin(ledger) == "started"
        assert await begin(ledger, "op-2", fence=fence) == "stale"
    async with opened(tmp_path) as ledger:
        assert await begin(ledger, "op-2", fence=fence) == "stale"
        assert await begin(ledger, "op-2", slot="model:b", fence=fence) == "started"
        assert await begin(ledger, "op-3", fence=8) == "started"


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
    "a load cut off in good order": ([Op("model-load", "a", INTERRUPTED)], []),
    "then loaded without keeping": ([LOAD, Op("model-load", "a", DONE)], ["a"]),
    "then flushed": ([LOAD, Op("cache-flush", "a", DONE)], ["a"]),
    "then unloaded": ([LOAD, UNLOAD], []),
    "then an unload that failed": ([LOAD, Op("model-unload", "a", FAILED, ends="a")], ["a"]),
    "then an unload cut off": ([LOAD, Op("model-unload", "a", None, ends="a")], []),
    "then an unload cut off in good order": ([LOAD, Op("model-unload", "a", INTERRUPTED, ends="a")], []),
    "unloaded and loaded again": ([LOAD, UNLOAD, LOAD], ["a"]),
    "another one unloaded": ([LOAD, Op("model-unload", "b", DONE, ends="b", has_ended=True)], ["a"]),
    "replaced": ([LOAD, REPLACE], ["b"]),
    "replaced, and the load failed after it": ([LOAD, Op("model-load", "b", FAILED, ends="a", has_ended=True)], []),
    "to be replaced, and the load failed before it": ([LOAD, Op("model-load", "b", FAILED, ends="a")], ["a"]),
    "to be replaced by one that was loaded already": ([LOAD, Op("model-load", "b", DONE, ends="a")], ["a"]),
    "a replacement cut off": ([LOAD, Op("model-load", "b", None, keeps=True, ends="a")], []),
}  # fmt: skip


async def start(ledger: Ledger, op: Op, fence: int) -> str:
    details = {"operation": op.operation, "model_id": op.model, "ends": op.ends, "adds_desired": op.keeps}
    started = await begin_op(ledger, f"op-{fence}", slot=f"model:{op.model}", fence=fence, expires_at=T0 + 300, **details)
    assert started == "started"
    return f"op-{fence}"


async def end(ledger: Ledger, op: Op, fence: int) -> None:
    if op.outcome is not None:
        desired = row(op.model, fence) if op.keeps and op.outcome == DONE else None
        await end_op(ledger, f"op-{fence}", op.outcome, desired=desired, has_ended=op.has_ended)


@pytest.mark.parametrize("name", list(ROWS))
async def test_what_is_desired_after_a_restart_follows_from_the_operations(tmp_path: Path, name: str) -> None:
    ops, expected = ROWS[name]
    async with opened(tmp_path) as ledger:
        for fence, op in enumerate(ops, start=1):
            await start(ledger, op, fence)
            await end(ledger, op, fence)
    for _ in range(2):
        async with opened(tmp_path) as ledger:
            assert [model.model_id for model in await ledger.read_desired()] == expected
            assert sorted(ledger.desired_fences) == expected


@pytest.mark.parametrize(("newer", "kept"), [(UNLOAD, []), (LOAD, [2]), (Op("model-load", "a", FAILED), [1])])
async def test_of_two_operations_that_end_in_the_other_order_the_newer_counts(
    tmp_path: Path, newer: Op, kept: list[int]
) -> None:
    async with opened(tmp_path) as ledger:
        await start(ledger, LOAD, 1)
        await start(ledger, newer, 2)
        for op, fence in ((newer, 2), (LOAD, 1)):
            await end(ledger, op, fence)
        assert [model.fence for model in await ledger.read_desired()] == kept
        await end_op(ledger, "op-1", FAILED)  # a repeated outcome changes nothing
        assert [model.fence for model in await ledger.read_desired()] == kept


async def test_a_row_that_was_put_back_after_the_unload_is_dropped_at_the_start(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        for fence, op in enumerate([LOAD, UNLOAD], start=1):
            await start(ledger, op, fence)
            await end(ledger, op, fence)
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("INSERT INTO desired_models VALUES ('a', 1, x'00', x'00', 0)")
    async with opened(tmp_path) as ledger:
        assert await ledger.read_desired() == []


async def test_loads_that_never_ended_are_counted_over_restarts_until_one_ends(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await start(ledger, LOAD, 1)
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
            await start(ledger, LOAD, 1)
        assert await start(ledger, Op("model-load", "a"), 1), "one that keeps nothing needs no room"
