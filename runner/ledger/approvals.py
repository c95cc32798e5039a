"""Spent nonces, operations and fences: what makes one approval one operation, across restarts. All writes are on disk first."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from dataclasses import fields

from runner.ledger.database import LedgerFull, transaction
from runner.ledger.rows import (
    DesiredModel,
    OpAlreadyDone,
    OpDetails,
    OpIsRunning,
    OpRow,
    OpStart,
    OpStarted,
    StaleFence,
    TooManyOps,
)
from runner.limits import limits

INTERRUPTED: dict[str, object] = {"state": "interrupted"}
"""The outcome of an operation in whose midst the program ended."""
HOUR_S = 3600.0
DAY_S = 86_400.0
_DROP_UNLOADED = """
DELETE FROM desired_models WHERE EXISTS (
    SELECT 1 FROM ops WHERE ops.ends = desired_models.model_id AND ops.fence > desired_models.fence
    AND ops.operation = 'model-unload' AND json_extract(ops.outcome, '$.state') = 'succeeded'
)"""
_DROP_CUT_OFF = """
DELETE FROM desired_models WHERE EXISTS (
    SELECT 1 FROM ops WHERE ops.ends = desired_models.model_id AND ops.fence > desired_models.fence
    AND json_extract(ops.outcome, '$.state') = 'interrupted'
)"""
_OP_PLAIN = tuple(part.name for part in fields(OpRow) if part.name not in {"op_key", "outcome"})


def spend_nonce(connection: sqlite3.Connection, nonce: str, *, expires_at: float, now: float) -> bool:
    """Return whether the nonce is new, and remember it. Raises LedgerFull."""
    digest = hashlib.sha256(nonce.encode("utf-8", "surrogatepass")).digest()
    with transaction(connection):
        connection.execute("DELETE FROM nonces WHERE expires_at < ?", (now - limits().ledger.nonce_grace_s,))
        added = connection.execute("INSERT OR IGNORE INTO nonces VALUES (?, ?)", (digest, expires_at)).rowcount == 1
        if added:
            # Forgetting the oldest instead would let their tokens in again.
            _refuse_beyond(connection, "SELECT count(*) FROM nonces", limits().ledger.nonces)
    return added


def begin_op(
    connection: sqlite3.Connection, op_id: str, *, slot: str, fence: int, max_uses: int, expires_at: float,
    details: OpDetails, now: float,
) -> OpStart:  # fmt: skip
    """Book an operation, or say why it is not to be carried out. Raises LedgerFull.

    A repeated operation gets its recorded outcome whatever its fence: the first one may have been overtaken since.
    """
    with transaction(connection):
        if connection.execute("SELECT count(*) FROM ops").fetchone()[0] > limits().ledger.ops // 2:
            # Only where room is needed: a clock that was set forward for a moment then makes nothing be forgotten.
            connection.execute(
                "DELETE FROM ops WHERE expires_at < ? AND outcome IS NOT NULL", (now - limits().ledger.op_life_s,)
            )
        found = connection.execute("SELECT uses, outcome, receipt FROM ops WHERE op_id = ?", (op_id,)).fetchone()
        if found is not None and found["outcome"] is None:
            return OpIsRunning()
        if found is not None and found["uses"] >= max_uses:
            return OpAlreadyDone(json.loads(found["outcome"]), found["receipt"])
        slots = {slot, *details.other_slots}
        if any(_is_overtaken(connection, each, fence) for each in slots):
            return StaleFence()
        too_many = _count_recent(connection, details, now)
        if too_many is not None:
            return too_many
        raised = "INSERT INTO fences VALUES (?, ?) ON CONFLICT DO UPDATE SET fence = excluded.fence"
        connection.executemany(raised, [(each, fence) for each in sorted(slots)])
        connection.execute(
            "INSERT INTO ops (op_id, slot, fence, uses, begun_at, expires_at, operation, model_id, approval_id, use, op_class,"
            " statement_digest, checkpoint, ends) VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET slot = excluded.slot, fence = excluded.fence, uses = uses + 1, outcome = NULL,"
            " begun_at = excluded.begun_at, expires_at = max(expires_at, excluded.expires_at), ended_at = NULL, receipt = '',"
            " checkpoint = excluded.checkpoint, ends = excluded.ends",
            (
                op_id, slot, fence, now, expires_at, details.operation, details.model_id, details.approval_id, details.use,
                details.op_class, details.statement_digest, details.checkpoint, details.ends,
            ),
        )  # fmt: skip
        _refuse_beyond(connection, "SELECT count(*) FROM ops", limits().ledger.ops)
        _refuse_beyond(connection, "SELECT count(*) FROM fences", limits().ledger.fences)
        if details.adds_desired:  # refused before it is carried out: an outcome must always find its place
            _refuse_beyond(connection, "SELECT count(*) + 1 FROM desired_models", limits().ledger.desired_models)
    return OpStarted()


def _is_overtaken(connection: sqlite3.Connection, slot: str, fence: int) -> bool:
    last = connection.execute("SELECT fence FROM fences WHERE slot = ?", (slot,)).fetchone()
    return last is not None and fence <= last[0]


def finish_op(
    connection: sqlite3.Connection, op_id: str, outcome: dict[str, object], *, receipt: str, now: float,
    desired: DesiredModel | None = None, has_ended: bool = False,
) -> None:  # fmt: skip
    """Record how a begun operation went, and what is to be loaded from now on; without effect on one that is not running.

    ``desired``: the model that it keeps loaded. ``has_ended``: the model that it unloads (``OpDetails.ends``) is unloaded.
    """
    with transaction(connection):
        found = connection.execute(
            "UPDATE ops SET outcome = ?, receipt = ?, ended_at = ? WHERE op_id = ? AND outcome IS NULL RETURNING fence, ends",
            (json.dumps(outcome), receipt, now, op_id),
        ).fetchone()
        if found is None:
            return
        if has_ended:
            connection.execute("DELETE FROM desired_models WHERE model_id = ? AND fence <= ?", (found["ends"], found["fence"]))
        if desired is not None:
            connection.execute(
                "INSERT INTO desired_models (model_id, fence, document, seal) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " fence = excluded.fence, document = excluded.document, seal = excluded.seal, unfinished = 0"
                " WHERE excluded.fence > fence",
                (desired.model_id, desired.fence, desired.document, desired.seal),
            )
            # An unload that was approved later may have ended before this load was written down.
            connection.execute(_DROP_UNLOADED)


def read_desired(connection: sqlite3.Connection) -> list[DesiredModel]:
    """Return the models that are to be loaded, in the order in which they were approved."""
    query = "SELECT model_id, fence, document, seal, unfinished FROM desired_models ORDER BY fence, model_id"
    return [DesiredModel(*row) for row in connection.execute(query)]


def count_unfinished(connection: sqlite3.Connection, model_id: str, fence: int, *, has_ended: bool) -> None:
    """Count a load of a desired model as begun, or, when it ended in whatever way, forget that loads did not."""
    query = "UPDATE desired_models SET unfinished = CASE WHEN ? THEN 0 ELSE unfinished + 1 END WHERE model_id = ? AND fence = ?"
    connection.execute(query, (has_ended, model_id, fence))


def certify_op(connection: sqlite3.Connection, op_id: str, outcome: dict[str, object], *, receipt: str) -> OpRow | None:
    """Give an ended operation the receipt that it lacks, with the outcome that was signed; return it as it stands then."""
    connection.execute(
        "UPDATE ops SET outcome = ?, receipt = ? WHERE op_id = ? AND outcome IS NOT NULL AND receipt = ''",
        (json.dumps(outcome), receipt, op_id),
    )
    return read_op(connection, op_id)


def read_op(connection: sqlite3.Connection, op_id: str) -> OpRow | None:
    """Return an operation, or None when it was never begun here."""
    return _make_op(connection.execute("SELECT * FROM ops WHERE op_id = ?", (op_id,)).fetchone())


def find_op(connection: sqlite3.Connection, approval_id: str, use: int) -> OpRow | None:
    """Return one use of an approval, or None when it was never begun here."""
    query = "SELECT * FROM ops WHERE approval_id = ? AND use = ?"
    return _make_op(connection.execute(query, (approval_id, use)).fetchone())


def _make_op(row: sqlite3.Row | None) -> OpRow | None:
    if row is None:
        return None
    plain = {name: row[name] for name in _OP_PLAIN}
    return OpRow(op_key=row["op_id"], outcome=None if row["outcome"] is None else json.loads(row["outcome"]), **plain)


def interrupt_ops(connection: sqlite3.Connection, *, now: float) -> int:
    """Give every operation that runs no more the outcome ``INTERRUPTED``; return how many there were.

    A model that an interrupted operation was to unload is no longer desired: nothing is loaded now, and to unload it was the
    last that people approved.
    """
    with transaction(connection):
        count = connection.execute(
            "UPDATE ops SET outcome = ?, ended_at = ? WHERE outcome IS NULL", (json.dumps(INTERRUPTED), now)
        ).rowcount
        connection.execute(_DROP_UNLOADED)
        connection.execute(_DROP_CUT_OFF)
    return count


def _count_recent(connection: sqlite3.Connection, details: OpDetails, now: float) -> TooManyOps | None:
    """Return which limit does not leave room for one more. What began "later than now", before a clock was set back, counts."""
    if details.most_per_hour is not None:
        begun = "SELECT begun_at FROM ops WHERE begun_at > ? ORDER BY begun_at DESC"
        times = [row[0] for row in connection.execute(begun, (now - HOUR_S,))]
        if len(times) >= details.most_per_hour:
            return _say_when(times, details.most_per_hour, HOUR_S, now, is_of_class=False)
    if details.most_per_day is not None:
        begun = "SELECT begun_at FROM ops WHERE begun_at > ? AND op_class = ? ORDER BY begun_at DESC"
        times = [row[0] for row in connection.execute(begun, (now - DAY_S, details.op_class))]
        if len(times) >= details.most_per_day:
            return _say_when(times, details.most_per_day, DAY_S, now, is_of_class=True)
    return None


def _say_when(times: list[float], most: int, within_s: float, now: float, *, is_of_class: bool) -> TooManyOps:
    """``times``: the newest first; the one that has to grow old enough is the one that uses up the last place."""
    retry_after_s = within_s if most == 0 else times[most - 1] + within_s - now
    return TooManyOps(most, within_s, max(1.0, retry_after_s), is_of_class)


def _refuse_beyond(connection: sqlite3.Connection, count: str, limit: int) -> None:
    if connection.execute(count).fetchone()[0] > limit:
        raise LedgerFull(f"the ledger holds its {limit} entries; wait until some have expired")
