"""Spent nonces, operations and fences: what makes one approval one operation, across restarts. All writes are on disk first."""

from __future__ import annotations

import hashlib
import json
import sqlite3

from runner.ledger.database import LedgerFull, transaction
from runner.ledger.rows import OpAlreadyDone, OpIsRunning, OpStart, OpStarted, StaleFence

MAX_NONCES = 50_000
MAX_OPS = 50_000
MAX_SLOTS = 10_000
NONCE_GRACE_S = 3600.0
"""How long a nonce is kept beyond its token's life: a clock set back by less brings no token back."""
OP_LIFE_S = 30 * 86_400.0
"""How long an operation is kept beyond its token's life. An approval lives for seven days at most, so none outlives it."""
INTERRUPTED: dict[str, object] = {"state": "interrupted"}
"""The outcome of an operation in whose midst the program ended."""


def spend_nonce(connection: sqlite3.Connection, nonce: str, *, expires_at: float, now: float) -> bool:
    """Return whether the nonce is new, and remember it. Raises LedgerFull."""
    digest = hashlib.sha256(nonce.encode("utf-8", "surrogatepass")).digest()
    with transaction(connection):
        connection.execute("DELETE FROM nonces WHERE expires_at < ?", (now - NONCE_GRACE_S,))
        added = connection.execute("INSERT OR IGNORE INTO nonces VALUES (?, ?)", (digest, expires_at)).rowcount == 1
        if added:
            # Forgetting the oldest instead would let their tokens in again.
            _refuse_beyond(connection, "SELECT count(*) FROM nonces", MAX_NONCES)
    return added


def begin_op(
    connection: sqlite3.Connection, op_id: str, *, slot: str, fence: int, max_uses: int, expires_at: float, now: float
) -> OpStart:
    """Book an operation, or say why it is not to be carried out. Raises LedgerFull.

    A repeated operation gets its recorded outcome whatever its fence: the first one may have been overtaken since.
    """
    with transaction(connection):
        connection.execute("DELETE FROM ops WHERE expires_at < ? AND outcome IS NOT NULL", (now - OP_LIFE_S,))
        found = connection.execute("SELECT uses, outcome FROM ops WHERE op_id = ?", (op_id,)).fetchone()
        if found is not None and found[1] is None:
            return OpIsRunning()
        if found is not None and found[0] >= max_uses:
            return OpAlreadyDone(json.loads(found[1]))
        last = connection.execute("SELECT fence FROM fences WHERE slot = ?", (slot,)).fetchone()
        if last is not None and fence <= last[0]:
            return StaleFence()
        connection.execute("INSERT INTO fences VALUES (?, ?) ON CONFLICT DO UPDATE SET fence = excluded.fence", (slot, fence))
        connection.execute(
            "INSERT INTO ops VALUES (?, ?, ?, 1, NULL, ?, ?) ON CONFLICT DO UPDATE SET slot = excluded.slot,"
            " fence = excluded.fence, uses = uses + 1, outcome = NULL, begun_at = excluded.begun_at,"
            " expires_at = max(expires_at, excluded.expires_at)",
            (op_id, slot, fence, now, expires_at),
        )
        _refuse_beyond(connection, "SELECT count(*) FROM ops", MAX_OPS)
        _refuse_beyond(connection, "SELECT count(*) FROM fences", MAX_SLOTS)
    return OpStarted()


def finish_op(connection: sqlite3.Connection, op_id: str, outcome: dict[str, object]) -> None:
    """Record how a begun operation went; without effect on one that is not running."""
    text = json.dumps(outcome)
    connection.execute("UPDATE ops SET outcome = ? WHERE op_id = ? AND outcome IS NULL", (text, op_id))


def interrupt_ops(connection: sqlite3.Connection) -> int:
    """Give every operation that runs no more the outcome ``INTERRUPTED``; return how many there were."""
    return connection.execute("UPDATE ops SET outcome = ? WHERE outcome IS NULL", (json.dumps(INTERRUPTED),)).rowcount


def _refuse_beyond(connection: sqlite3.Connection, count: str, limit: int) -> None:
    if connection.execute(count).fetchone()[0] > limit:
        raise LedgerFull(f"the ledger holds its {limit} entries; wait until some have expired")
