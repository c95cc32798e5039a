"""The file itself: opened for one process, private, durable, and moved aside when it cannot be read any more."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runner.errors import RunnerError
from runner.limits import limits
from runner.system import lock_file, sync_folder

log = logging.getLogger(__name__)

FILE_NAME = "ledger.sqlite3"
LOCK_NAME = "ledger.lock"
SCHEMA_VERSION = 5
_COMPANIONS = ("", "-wal", "-shm")
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_FIRST_SCHEMA = """
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
_SECOND_SCHEMA = """
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
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID
"""
_THIRD_SCHEMA = """
ALTER TABLE ops ADD COLUMN ends TEXT;
CREATE TABLE desired_models (
    model_id TEXT PRIMARY KEY, fence INTEGER NOT NULL, document BLOB NOT NULL, seal BLOB NOT NULL,
    unfinished INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID
"""
# Fences and desired models stay beside the operations, because they must outlive them: an operation is forgotten a month
# after its approval has ended, and neither may an older one follow then nor a model cease to be loaded.
_FOURTH_SCHEMA = """
CREATE TABLE operations (
    id INTEGER PRIMARY KEY AUTOINCREMENT, nonce BLOB UNIQUE, nonce_expires_at REAL, op_key TEXT UNIQUE, slot TEXT,
    fence INTEGER, expires_at REAL, operation TEXT NOT NULL DEFAULT '', model_id TEXT, approval_id TEXT NOT NULL DEFAULT '',
    use INTEGER NOT NULL DEFAULT 1, op_class TEXT NOT NULL DEFAULT '', statement_digest TEXT NOT NULL DEFAULT '',
    checkpoint TEXT NOT NULL DEFAULT '', ends TEXT, task_id TEXT UNIQUE, stage TEXT NOT NULL DEFAULT '', fraction REAL,
    error TEXT, state TEXT NOT NULL, outcome TEXT, receipt TEXT NOT NULL DEFAULT '', begun_at REAL, ended_at REAL
);
CREATE INDEX operations_by_nonce_expiry ON operations (nonce_expires_at);
CREATE INDEX operations_by_begin ON operations (begun_at);
CREATE INDEX operations_by_approval ON operations (approval_id, use);
INSERT INTO operations (nonce, nonce_expires_at, state) SELECT digest, expires_at, 'spent' FROM nonces ORDER BY expires_at;
INSERT INTO operations (
    op_key, slot, fence, expires_at, operation, model_id, approval_id, use, op_class, statement_digest, checkpoint, ends, state,
    outcome, receipt, begun_at, ended_at
) SELECT
    op_id, slot, fence, expires_at, operation, model_id, approval_id, use, op_class, statement_digest, checkpoint, ends,
    iif(outcome IS NULL, 'running', coalesce(json_extract(outcome, '$.state'), 'succeeded')), json_remove(outcome, '$.state'),
    receipt, begun_at, ended_at
FROM ops ORDER BY begun_at;
DROP TABLE nonces;
DROP TABLE ops
"""
# ``is_taken``: nothing of it is to be told any more; ``ended_at`` None: its request runs.
_FIFTH_SCHEMA = """
CREATE TABLE tickets (
    ticket_id TEXT PRIMARY KEY, expires_at REAL NOT NULL, report TEXT NOT NULL, begun_at REAL NOT NULL, ended_at REAL,
    is_taken INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE INDEX tickets_by_expiry ON tickets (expires_at);
CREATE INDEX tickets_to_tell ON tickets (begun_at) WHERE NOT is_taken
"""
_TASK_STATES = {"loading": "running", "completed": "succeeded", "failed": "failed", "interrupted": "interrupted"}


def _move_tasks(connection: sqlite3.Connection) -> None:
    """Make a row of ``operations`` of each load task, with the answer that whoever asks for it was given."""
    for row in connection.execute("SELECT * FROM tasks ORDER BY started_at, rowid").fetchall():
        state, result = _TASK_STATES[row["state"]], json.loads(row["result"])
        receipt = result.pop("receipt", "")
        body = {
            "taskId": row["task_id"], "status": row["state"], "modelId": row["model_id"], "stage": row["stage"],
            "progress": 1.0 if state == "succeeded" else round(row["fraction"] or 0.0, 3),
            **({"error": row["error"]} if row["error"] else {}), **result, "startedAt": int(row["started_at"]),
        }  # fmt: skip
        outcome = {"running": None, "interrupted": "{}"}.get(state, json.dumps({"status": 200, "body": body}))
        connection.execute(
            "INSERT INTO operations (task_id, model_id, operation, stage, fraction, error, state, outcome, receipt, begun_at,"
            " ended_at) VALUES (?, ?, 'model-load', ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row["task_id"], row["model_id"], row["stage"], row["fraction"],
                row["error"] if state == "interrupted" else None, state, outcome, receipt, row["started_at"],
                row["finished_at"],
            ),
        )  # fmt: skip
    connection.execute("DROP TABLE tasks")


_Step = str | Callable[[sqlite3.Connection], None]
_STEPS: tuple[tuple[_Step, ...], ...] = (
    (_FIRST_SCHEMA,), (_SECOND_SCHEMA,), (_THIRD_SCHEMA,), (_FOURTH_SCHEMA, _move_tasks), (_FIFTH_SCHEMA,),
)  # fmt: skip
"""What makes a file of version n+1 out of one of version n; a new file takes every step, so that there is one kind of file."""


class LedgerError(RunnerError):
    """The ledger cannot be opened, read or written; the text names the file and what to do."""


class LedgerFull(LedgerError):
    """A table that must not forget has reached its bound, so nothing more is accepted."""


@dataclass(frozen=True, slots=True)
class Database:
    """An open ledger file and the lock that keeps other processes out. ``is_new``: nothing was found that could be read.

    ``born_at``: Unix seconds since when it remembers.
    """

    connection: sqlite3.Connection
    lock: int
    is_new: bool
    born_at: float

    def close(self) -> None:
        """Close the file and let another process have it."""
        try:
            self.connection.close()
        finally:
            os.close(self.lock)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Do all or nothing of what the block writes; on disk when it returns."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def open_database(directory: Path, *, now: float) -> Database:
    """Open or make the ledger in ``directory``, which is made as well. To be called in the thread that will use it.

    Raises LedgerError: not writable, in use by another process, or written by a later version.
    """
    path = directory / FILE_NAME
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _lock(directory / LOCK_NAME)
    except OSError as error:
        raise LedgerError(f"{directory} cannot hold the ledger: {error.strerror}; choose another data directory") from None
    try:
        return _open_locked(path, lock, now)
    except BaseException as error:
        os.close(lock)
        if isinstance(error, sqlite3.Error | OSError):
            raise LedgerError(f"{path} cannot be opened: {error}; free space or mend its permissions") from None
        raise


def _lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock_file(descriptor)
    except BlockingIOError:
        os.close(descriptor)
        raise LedgerError(
            f"{path.parent} is in use by another runner; stop that one or choose another data directory"
        ) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _open_locked(path: Path, lock: int, now: float) -> Database:
    try:
        return _open_file(path, lock, now)
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _DAMAGED:
            raise
        damage = str(error)
    kept = _move_aside(path, now)
    log.error("ledger is damaged, a new one begins; tokens issued before now are refused kept=%s error=%s", kept, damage)
    return _open_file(path, lock, now)


def _open_file(path: Path, lock: int, now: float) -> Database:
    _make_private(path)
    # Autocommit: transactions are begun and ended by name, in one place.
    connection = sqlite3.connect(path, timeout=limits().ledger.busy_s, isolation_level=None)
    connection.row_factory = sqlite3.Row
    try:
        # With both of them a commit is on disk before its caller hears of it, and a kill leaves all of it or nothing.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        _check_pages(connection)
        born_at = _read_birth(connection, path)
        is_new = born_at is None
        if born_at is None:
            born_at = now
            _create_tables(connection, now)
            log.info("new operation ledger created (older tokens are refused) path=%s", path)
    except BaseException:
        connection.close()
        raise
    return Database(connection, lock, is_new, born_at)


def _make_private(path: Path) -> None:
    # SQLite gives its companions the mode of the file.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if hasattr(os, "fchmod"):  # Windows has it from Python 3.13 on
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)
    sync_folder(path.parent)


def _check_pages(connection: sqlite3.Connection) -> None:
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        error = sqlite3.DatabaseError(str(found).partition("\n")[0])
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _read_birth(connection: sqlite3.Connection, path: Path) -> float | None:
    """Return since when the ledger remembers, after bringing its tables up to date; None when the file has none yet."""
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version == 0:
        return None
    if not 0 < version <= SCHEMA_VERSION:
        raise LedgerError(
            f"{path} was written by another version of this program (its ledger is of version {version}, this program reads up "
            f"to {SCHEMA_VERSION}) and is left as it is; start that version again, or choose another data directory"
        )
    if version < SCHEMA_VERSION:
        upgrade(connection, version)
        log.info("ledger brought up to date path=%s from=%d to=%d", path, version, SCHEMA_VERSION)
    row = connection.execute("SELECT born_at FROM born").fetchone()
    return None if row is None else float(row[0])


def _create_tables(connection: sqlite3.Connection, now: float) -> None:
    with transaction(connection):
        _take_steps(connection, 0)
        connection.execute("INSERT INTO born VALUES (?)", (now,))


def upgrade(connection: sqlite3.Connection, version: int) -> None:
    """Bring the tables of an earlier version up to date; whatever ends it in its midst leaves them as they were."""
    with transaction(connection):
        _take_steps(connection, version)


def _take_steps(connection: sqlite3.Connection, version: int) -> None:
    for step in [step for steps in _STEPS[version:] for step in steps]:
        if callable(step):
            step(connection)
        else:
            for statement in step.split(";"):
                connection.execute(statement)
    connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")


def _move_aside(path: Path, now: float) -> Path:
    kept = path.with_name(f"{path.name}.damaged-{int(now)}")
    for suffix in _COMPANIONS:
        companion = path.with_name(path.name + suffix)
        if companion.exists():
            companion.replace(kept.with_name(kept.name + suffix))
    sync_folder(path.parent)
    return kept
