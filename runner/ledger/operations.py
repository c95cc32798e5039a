"""Operations of a runner: a row each, from the spent nonce of its token to its receipt, and what they leave to be loaded.

What makes one approval one run across restarts. Whatever is written is on disk before its caller hears of it. Times are Unix
seconds.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import dataclass, fields
from enum import StrEnum

from runner.ledger.database import LedgerError, LedgerFull, transaction
from runner.limits import limits


class RunState(StrEnum):
    """Where a run stands on the runner. All but ``spent`` and ``running`` are final."""

    SPENT = "spent"
    """The nonce of its token is used up, and nothing has begun; it stays so where the token was refused or repeated a run."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The program ended in its midst, or cut it off."""


class RunEvent(StrEnum):
    """What happens to a run."""

    BEGIN = "begin"
    SUCCEED = "succeed"
    FAIL = "fail"
    INTERRUPT = "interrupt"


TRANSITIONS: dict[tuple[RunState, RunEvent], RunState] = {
    (RunState.SPENT, RunEvent.BEGIN): RunState.RUNNING,
    (RunState.RUNNING, RunEvent.SUCCEED): RunState.SUCCEEDED,
    (RunState.RUNNING, RunEvent.FAIL): RunState.FAILED,
    (RunState.RUNNING, RunEvent.INTERRUPT): RunState.INTERRUPTED,
}
FINAL_STATES = frozenset(TRANSITIONS.values()) - {old for old, _ in TRANSITIONS}
_BEFORE = {new: old for (old, _), new in TRANSITIONS.items()}
"""The one state from which each other is reached."""

INTERRUPTED: dict[str, object] = {"state": RunState.INTERRUPTED.value}
"""The outcome of an operation in whose midst the program ended."""
LOAD_INTERRUPTED = "the runner ended while the model was being loaded; load it again"
HOUR_S = 3600.0
DAY_S = 86_400.0

BY_APPROVAL = "SELECT * FROM operations WHERE approval_id = ? AND use = ? AND op_key IS NOT NULL"
BY_TASK = "SELECT * FROM operations WHERE task_id = ?"
_BY_ID = "SELECT * FROM operations WHERE id = ?"
_BY_KEY = "SELECT * FROM operations WHERE op_key = ?"
_COUNT_BEGUN = "SELECT count(*) FROM operations WHERE op_key IS NOT NULL"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOrder:
    """An operation that a token permits, and how many of its kind the runner takes.

    ``op_key``: tells the run from all others. ``slot``: what it changes, where none with a lower ``fence`` may follow it;
    ``other_slots``: what it changes beside that. ``expires_at``: when its approval can no longer be used; it is remembered for
    longer. ``approval_id`` and ``use``: which use of which approval it is. ``statement_digest``: of what people signed, hex, ""
    below L2. ``checkpoint``: of the audit log, as the token named it. ``most_per_hour``: operations of all kinds that may begin
    within an hour; ``most_per_day``: those of ``op_class`` within 24 h; None = no limit. ``ends``: the model that it unloads
    and that is no longer desired then, None = none. ``adds_desired``: it needs room for one more desired model.
    """

    op_key: str
    slot: str
    fence: int
    expires_at: float
    operation: str = ""
    model_id: str | None = None
    approval_id: str = ""
    use: int = 1
    op_class: str = ""
    statement_digest: str = ""
    checkpoint: str = ""
    most_per_hour: int | None = None
    most_per_day: int | None = None
    other_slots: tuple[str, ...] = ()
    ends: str | None = None
    adds_desired: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A row. ``op_key`` and ``fence``: None for a load without an approval; ``begun_at``: None where nothing has begun.

    ``outcome``: how it ended (plain JSON with its ``state``), None before. ``task_id``: of the load that it began, with the
    ``stage`` and the ``fraction`` (0.0 to 1.0) at which that stands, and in ``error`` why it was cut off.
    """

    run_id: int
    op_key: str | None
    operation: str
    model_id: str | None
    approval_id: str
    use: int
    fence: int | None
    statement_digest: str
    checkpoint: str
    ends: str | None
    state: RunState
    outcome: dict[str, object] | None
    receipt: str
    begun_at: float | None
    ended_at: float | None
    task_id: str | None
    stage: str
    fraction: float | None
    error: str | None


_PLAIN = tuple(part.name for part in fields(Run) if part.name not in {"state", "outcome"})


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """A model that an approval keeps loaded. ``fence``: of the load that was approved.

    ``document``: what the runner accepted, with the op token and its proofs; ``seal``: the runner's signature over it.
    ``unfinished``: loads that were begun since and in whose midst the program ended, one after the other.
    """

    model_id: str
    fence: int
    document: bytes
    seal: bytes
    unfinished: int = 0


@dataclass(frozen=True, slots=True)
class OpStarted:
    """The operation may be carried out now; say with ``finish_op`` how it went."""

    run: Run


@dataclass(frozen=True, slots=True)
class OpIsRunning:
    """The operation was begun before and has not ended."""


@dataclass(frozen=True, slots=True)
class OpAlreadyDone:
    """The operation was carried out before; ``run`` says how it went."""

    run: Run


@dataclass(frozen=True, slots=True)
class StaleFence:
    """A later operation has been accepted for the same slot, so this one would undo it."""


@dataclass(frozen=True, slots=True)
class TooManyOps:
    """As many operations began within ``within_s`` seconds as may; the next is let in after ``retry_after_s``."""

    most: int
    within_s: float
    retry_after_s: float
    is_of_class: bool


OpStart = OpStarted | OpIsRunning | OpAlreadyDone | StaleFence | TooManyOps


def spend_nonce(db: sqlite3.Connection, nonce: str, *, expires_at: float, now: float) -> Run | None:
    """Spend the nonce of a token and return its row; None when it was spent before. Raises LedgerFull."""
    digest = hashlib.sha256(nonce.encode("utf-8", "surrogatepass")).digest()
    with transaction(db):
        expired_at = now - limits().ledger.nonce_grace_s
        db.execute(
            "DELETE FROM operations WHERE nonce_expires_at < ? AND op_key IS NULL AND task_id IS NULL", (expired_at,)
        )  # fmt: skip
        spent = db.execute(
            "INSERT INTO operations (nonce, nonce_expires_at, state) VALUES (?, ?, ?) ON CONFLICT DO NOTHING RETURNING *",
            (digest, expires_at, RunState.SPENT.value),
        ).fetchone()
        if spent is None:
            return None
        # Forgetting the oldest instead would let their tokens in again.
        if _count(db, "SELECT count(*) FROM operations WHERE nonce_expires_at >= ?", expired_at) > limits().ledger.nonces:
            raise _full(limits().ledger.nonces)
    return _make_run(spent)


def begin_op(db: sqlite3.Connection, run_id: int, order: OpOrder, *, now: float) -> OpStart:
    """Begin the operation that a token permits whose nonce is spent, or say why it is not carried out. Raises LedgerFull.

    A repeated operation gets its recorded outcome whatever its fence: the first one may have been overtaken since.
    """
    with transaction(db):
        return _begin(db, run_id, order, now)


def _begin(db: sqlite3.Connection, run_id: int, order: OpOrder, now: float) -> OpStart:
    if _count(db, _COUNT_BEGUN) > limits().ledger.ops // 2:
        # Only where room is needed: a clock that was set forward for a moment then makes nothing be forgotten.
        db.execute(
            "DELETE FROM operations WHERE op_key IS NOT NULL AND state != ? AND expires_at < ?",
            (RunState.RUNNING.value, now - limits().ledger.op_life_s),
        )
    known = find_run(db, _BY_KEY, order.op_key)
    if known is not None and known.outcome is not None:
        return OpAlreadyDone(known)
    if known is not None:
        return OpIsRunning()
    slots = sorted({order.slot, *order.other_slots})
    marks = [db.execute("SELECT fence FROM fences WHERE slot = ?", (slot,)).fetchone() for slot in slots]
    if any(mark is not None and order.fence <= mark[0] for mark in marks):
        return StaleFence()
    too_many = _count_recent(db, order, now)
    if too_many is not None:
        return too_many
    # Refused before anything begins: an outcome must always find its place.
    bounds = limits().ledger
    rooms = (
        (_COUNT_BEGUN, 1, bounds.ops), ("SELECT count(*) FROM fences", marks.count(None), bounds.fences),
        ("SELECT count(*) FROM desired_models", int(order.adds_desired), bounds.desired_models),
    )  # fmt: skip
    for count, added, most in rooms:
        if added and _count(db, count) + added > most:
            raise _full(most)
    raised = "INSERT INTO fences VALUES (?, ?) ON CONFLICT DO UPDATE SET fence = excluded.fence"
    db.executemany(raised, [(slot, order.fence) for slot in slots])
    begun = db.execute(
        "UPDATE operations SET state = ?, op_key = ?, slot = ?, fence = ?, begun_at = ?, expires_at = ?, operation = ?,"
        " model_id = ?, approval_id = ?, use = ?, op_class = ?, statement_digest = ?, checkpoint = ?, ends = ?"
        " WHERE id = ? AND state = ? RETURNING *",
        (
            RunState.RUNNING.value, order.op_key, order.slot, order.fence, now, order.expires_at, order.operation,
            order.model_id, order.approval_id, order.use, order.op_class, order.statement_digest, order.checkpoint, order.ends,
            run_id, _BEFORE[RunState.RUNNING].value,
        ),
    ).fetchone()  # fmt: skip
    if begun is None:
        raise LedgerError("the token of this operation has begun another one")
    return OpStarted(_make_run(begun))


def _count_recent(db: sqlite3.Connection, order: OpOrder, now: float) -> TooManyOps | None:
    """Return which limit does not leave room for one more. What began "later than now", before a clock was set back, counts."""
    for most, within_s, op_class in (
        (order.most_per_hour, HOUR_S, None), (order.most_per_day, DAY_S, order.op_class)
    ):  # fmt: skip
        if most is None:
            continue
        begun = db.execute(
            "SELECT begun_at FROM operations WHERE begun_at > ? AND op_key IS NOT NULL AND op_class = coalesce(?, op_class)"
            " ORDER BY begun_at DESC",
            (now - within_s, op_class),
        )
        times = [row[0] for row in begun]  # the newest first
        if len(times) >= most:
            # The one that has to grow old enough is the one that uses up the last place.
            retry_after_s = within_s if most == 0 else times[most - 1] + within_s - now
            return TooManyOps(most, within_s, max(1.0, retry_after_s), is_of_class=op_class is not None)
    return None


def start_load(
    db: sqlite3.Connection, task_id: str, *, run_id: int | None, model_id: str, stage: str, now: float
) -> int:  # fmt: skip
    """Write down that a load begins, for the run that asked for it; None = nobody did, and the load is a run of its own.

    Return the run. Beyond the newest ``tasks`` of the limits, ended loads without an approval are forgotten.
    """
    with transaction(db):
        if run_id is None:
            run_id = int(db.execute("INSERT INTO operations (state) VALUES (?)", (RunState.SPENT.value,)).lastrowid or 0)
        db.execute(
            "UPDATE operations SET state = ?, task_id = ?, operation = 'model-load', model_id = coalesce(model_id, ?),"
            " stage = ?, fraction = 0.0, begun_at = coalesce(begun_at, ?) WHERE id = ? AND outcome IS NULL",
            (RunState.RUNNING.value, task_id, model_id, stage, now, run_id),
        )
        db.execute(
            "DELETE FROM operations WHERE task_id IS NOT NULL AND op_key IS NULL AND state != ?"
            " AND coalesce(nonce_expires_at, 0) < ? AND id NOT IN"
            " (SELECT id FROM operations WHERE task_id IS NOT NULL ORDER BY begun_at DESC, id DESC LIMIT ?)",
            (RunState.RUNNING.value, now - limits().ledger.nonce_grace_s, limits().ledger.tasks),
        )
    return run_id


def save_progress(db: sqlite3.Connection, run_id: int, stage: str, fraction: float | None) -> None:
    """Write down where a load stands; without effect on one that has ended."""
    db.execute(
        "UPDATE operations SET stage = ?, fraction = ? WHERE id = ? AND state = ?",
        (stage, fraction, run_id, RunState.RUNNING.value),
    )


def finish_op(
    db: sqlite3.Connection, run_id: int, outcome: dict[str, object], *, receipt: str, now: float,
    desired: DesiredModel | None = None, has_ended: bool = False, error: str | None = None,
) -> None:  # fmt: skip
    """Record how a run ended, and what is to be loaded from now on; without effect on one that is not running.

    ``desired``: the model that it keeps loaded. ``has_ended``: the model that it unloads (``OpOrder.ends``) is unloaded.
    ``error``: why a load was cut off.
    """
    after = RunState(str(outcome["state"]))
    with transaction(db):
        found = db.execute(
            "UPDATE operations SET state = ?, outcome = ?, receipt = ?, ended_at = ?, error = ?"
            " WHERE id = ? AND state = ? RETURNING fence, ends",
            (after.value, _encode(outcome), receipt, now, error, run_id, _BEFORE[after].value),
        ).fetchone()
        if found is None:
            return
        if has_ended:
            db.execute("DELETE FROM desired_models WHERE model_id = ? AND fence <= ?", (found["ends"], found["fence"]))
        if desired is not None:
            db.execute(
                "INSERT INTO desired_models (model_id, fence, document, seal) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " fence = excluded.fence, document = excluded.document, seal = excluded.seal, unfinished = 0"
                " WHERE excluded.fence > fence",
                (desired.model_id, desired.fence, desired.document, desired.seal),
            )
            # An unload that was approved later may have ended before this load was written down.
            _drop_ended(db, RunState.SUCCEEDED, "model-unload")


def certify_op(db: sqlite3.Connection, run_id: int, outcome: dict[str, object], *, receipt: str) -> Run:
    """Give an interrupted run the receipt that it lacks, with the outcome that was signed; return it as it stands then."""
    db.execute(
        "UPDATE operations SET outcome = ?, receipt = ? WHERE id = ? AND state = ? AND receipt = ''",
        (_encode(outcome), receipt, run_id, RunState.INTERRUPTED.value),
    )
    return _make_run(db.execute(_BY_ID, (run_id,)).fetchone())


def interrupt_ops(db: sqlite3.Connection, *, now: float) -> list[Run]:
    """Give every run that goes on no more the outcome ``INTERRUPTED``; return them."""
    with transaction(db):
        cut_off = db.execute(
            "UPDATE operations SET state = ?, outcome = '{}', ended_at = ?, error = iif(task_id IS NULL, NULL, ?)"
            " WHERE state = ? RETURNING *",
            (RunState.INTERRUPTED.value, now, LOAD_INTERRUPTED, _BEFORE[RunState.INTERRUPTED].value),
        ).fetchall()
        _drop_ended(db, RunState.SUCCEEDED, "model-unload")
        # Nothing is loaded now, and to unload the model of an interrupted operation was the last that people approved.
        _drop_ended(db, RunState.INTERRUPTED, None)
    return [_make_run(row) for row in cut_off]


def _drop_ended(db: sqlite3.Connection, state: RunState, operation: str | None) -> None:
    """Have no model desired that a later operation in this state was to unload. ``operation``: of this kind alone."""
    db.execute(
        "DELETE FROM desired_models WHERE EXISTS (SELECT 1 FROM operations WHERE operations.ends = desired_models.model_id"
        " AND operations.fence > desired_models.fence AND operations.state = ? AND operation = coalesce(?, operation))",
        (state.value, operation),
    )


def find_run(db: sqlite3.Connection, query: str, *values: object) -> Run | None:
    """Return the first row of one of the ``BY_`` queries."""
    row = db.execute(query, values).fetchone()
    return None if row is None else _make_run(row)


def _make_run(row: sqlite3.Row) -> Run:
    state, ended = RunState(row["state"]), row["outcome"]
    outcome = None if ended is None else {"state": state.value, **json.loads(ended)}
    return Run(run_id=row["id"], state=state, outcome=outcome, **{name: row[name] for name in _PLAIN if name != "run_id"})


def _encode(outcome: dict[str, object]) -> str:
    """Return an outcome as it is kept: its state has a column of its own."""
    return json.dumps({name: value for name, value in outcome.items() if name != "state"})


def read_desired(db: sqlite3.Connection) -> list[DesiredModel]:
    """Return the models that are to be loaded, in the order in which they were approved."""
    query = "SELECT model_id, fence, document, seal, unfinished FROM desired_models ORDER BY fence, model_id"
    return [DesiredModel(*row) for row in db.execute(query)]


def _count(db: sqlite3.Connection, query: str, *values: object) -> int:
    return int(db.execute(query, values).fetchone()[0])


def _full(most: int) -> LedgerFull:
    return LedgerFull(f"the ledger holds its {most} entries; wait until some have expired")
