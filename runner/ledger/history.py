"""Load tasks, and what loads really took."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import fields

from runner.definitions.plan import Observation
from runner.ledger.database import transaction
from runner.ledger.rows import TaskRow, TaskState
from runner.limits import limits

_TASK_PLAIN = tuple(part.name for part in fields(TaskRow) if part.name not in {"state", "result"})
_OBSERVED = tuple(part.name for part in fields(Observation))

INTERRUPTED = "the runner ended while the model was being loaded; load it again"


def save_task(connection: sqlite3.Connection, task: TaskRow) -> None:
    """Insert the task or replace what was known of it; beyond the newest ``tasks`` of the limits, ended ones are forgotten."""
    values = (
        task.task_id, task.model_id, TaskState(task.state).value, task.stage, task.fraction, task.started_at,
        task.finished_at, task.error, json.dumps(task.result),
    )  # fmt: skip
    with transaction(connection):
        connection.execute(
            "INSERT OR REPLACE INTO tasks (task_id, model_id, state, stage, fraction, started_at, finished_at, error, result)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            values,
        )
        connection.execute(
            "DELETE FROM tasks WHERE state != ? AND task_id NOT IN"
            " (SELECT task_id FROM tasks ORDER BY started_at DESC, rowid DESC LIMIT ?)",
            (TaskState.LOADING.value, limits().ledger.tasks),
        )


def read_task(connection: sqlite3.Connection, task_id: str) -> TaskRow | None:
    """Return a task, or None."""
    row = connection.execute("SELECT * FROM tasks WHERE task_id = ?", (task_id,)).fetchone()
    return None if row is None else _make_task(row)


def interrupt_tasks(connection: sqlite3.Connection, *, now: float) -> list[TaskRow]:
    """End every task that is still loading as interrupted; return them as they are now, oldest first."""
    rows = connection.execute(
        "UPDATE tasks SET state = ?, finished_at = ?, error = ? WHERE state = ? RETURNING *",
        (TaskState.INTERRUPTED.value, now, INTERRUPTED, TaskState.LOADING.value),
    ).fetchall()
    return sorted((_make_task(row) for row in rows), key=lambda task: task.started_at)


def recent_tasks(connection: sqlite3.Connection, limit: int) -> list[TaskRow]:
    """Return the newest tasks, newest first."""
    query = "SELECT * FROM tasks ORDER BY started_at DESC, rowid DESC LIMIT ?"
    return [_make_task(row) for row in connection.execute(query, (limit,))]


def add_observation(connection: sqlite3.Connection, seen: Observation) -> None:
    """Remember what a load took; per model and plan the newest ``observations_of_plan`` are kept."""
    plan = (seen.backend, seen.model_id, seen.plan_key)
    sizes = (seen.weights_bytes, seen.kv_bytes, seen.measured_bytes, seen.load_s, seen.loaded_at)
    with transaction(connection):
        connection.execute(
            "INSERT INTO observations (backend, model_id, plan_key, weights_bytes, kv_bytes, measured_bytes, load_s, loaded_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            plan + sizes,
        )
        connection.execute(
            "DELETE FROM observations WHERE id IN (SELECT id FROM observations WHERE backend = ? AND model_id = ?"
            " AND plan_key = ? ORDER BY id DESC LIMIT -1 OFFSET ?)",
            (*plan, limits().ledger.observations_of_plan),
        )
        connection.execute(
            "DELETE FROM observations WHERE id <= (SELECT max(id) FROM observations) - ?", (limits().ledger.observations,)
        )


def read_observations(connection: sqlite3.Connection, backend: str, limit: int) -> list[Observation]:
    """Return what was observed with a backend, newest first."""
    rows = connection.execute("SELECT * FROM observations WHERE backend = ? ORDER BY id DESC LIMIT ?", (backend, limit))
    return [Observation(**{name: row[name] for name in _OBSERVED}) for row in rows]


def read_last_load_s(connection: sqlite3.Connection, model_id: str, plan_key: str) -> float | None:
    """Return how long the last load of this model with these settings took, in seconds; None when there was none."""
    query = "SELECT load_s FROM observations WHERE model_id = ? AND plan_key = ? ORDER BY id DESC LIMIT 1"
    row = connection.execute(query, (model_id, plan_key)).fetchone()
    return None if row is None else float(row[0])


def _make_task(row: sqlite3.Row) -> TaskRow:
    plain = {name: row[name] for name in _TASK_PLAIN}
    return TaskRow(state=TaskState(row["state"]), result=json.loads(row["result"]), **plain)
