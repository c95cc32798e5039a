"""A ledger of the first version is brought up to date in place, and nothing in it is lost."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from runner.ledger import FILE_NAME, Ledger, LedgerError, OpAlreadyDone, OpDetails, OpStarted, StaleFence, approvals
from runner.ledger.database import SCHEMA_VERSION
from tests.fakes.ledgers import T0, opened

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
    for each in (old, new):
        each.mkdir()
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
