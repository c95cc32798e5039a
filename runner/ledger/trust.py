"""What the box believes and has seen: the policies it pinned, one after the other, and single facts by name."""

from __future__ import annotations

import json
import sqlite3

from runner.ledger.database import transaction
from runner.ledger.rows import PolicyRow


def read_policies(connection: sqlite3.Connection) -> list[PolicyRow]:
    """Return the pinned policies, version 1 first."""
    rows = connection.execute("SELECT version, document, statement, proofs FROM policies ORDER BY version")
    return [PolicyRow(row["version"], row["document"], row["statement"], json.loads(row["proofs"])) for row in rows]


def add_policy(connection: sqlite3.Connection, policy: PolicyRow, *, now: float) -> None:
    """Pin the next policy. A version that is there already stays as it is."""
    connection.execute(
        "INSERT OR IGNORE INTO policies VALUES (?, ?, ?, ?, ?)",
        (policy.version, policy.document, policy.statement, json.dumps(policy.proofs), now),
    )


def read_fact(connection: sqlite3.Connection, name: str) -> str | None:
    """Return a fact, or None."""
    row = connection.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
    return None if row is None else str(row[0])


def write_fact(connection: sqlite3.Connection, name: str, value: str) -> None:
    """Replace a fact."""
    connection.execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", (name, value))


def forget_trust(connection: sqlite3.Connection, *names: str) -> None:
    """Drop every pinned policy, what was approved under them to stay loaded, and the facts of these names, all at once."""
    with transaction(connection):
        connection.execute("DELETE FROM policies")
        connection.execute("DELETE FROM desired_models")
        for name in names:
            connection.execute("DELETE FROM facts WHERE name = ?", (name,))
