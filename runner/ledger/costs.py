"""What tenants spend with paid providers: reserved before a request leaves, put right when it is over.

The sum per tenant and month is kept beside the rows and changes with them, so it stays exact when old rows are dropped.
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass, fields
from enum import StrEnum

from runner.ledger.database import LedgerFull, transaction
from runner.limits import limits


class CostState(StrEnum):
    """What became of a reservation, and with that what it takes from the monthly cap."""

    RESERVED = "reserved"
    """The request is on its way; counts the reserved amount."""
    SETTLED = "settled"
    """Answered with its usage; counts the amount it really cost, be it more or less."""
    RELEASED = "released"
    """Given back by us before it cost anything; counts nothing."""
    FAILED_BEFORE_SUBMIT = "failed_before_submit"
    """Never reached the provider; counts nothing."""
    FAILED_AFTER_SUBMIT = "failed_after_submit"
    """Broke off when the provider had it; counts the amount the caller knows of, else the reserved one."""
    FAILED_USAGE_UNKNOWN = "failed_usage_unknown"
    """Answered or broke off, and the provider named no usage; counts the reserved amount."""
    ABANDONED = "abandoned"
    """The program ended meanwhile; counts the reserved amount, since it may have been billed."""


@dataclass(frozen=True, slots=True)
class CostRow:
    """One request to a paid provider. ``month``: ``YYYY-MM``. ``counted_micros``: what it takes from the cap as it stands."""

    cost_id: str
    tenant: str
    model_id: str
    month: str
    state: CostState
    reserved_micros: int
    counted_micros: int
    created_at: float
    settled_at: float | None


_MONTH = re.compile(r"[0-9]{4}-(0[1-9]|1[0-2])")
_FREE = (CostState.RELEASED, CostState.FAILED_BEFORE_SUBMIT)
_COST_PLAIN = tuple(part.name for part in fields(CostRow) if part.name != "state")


def check_month(month: str) -> None:
    """Raise ValueError for anything but ``YYYY-MM``."""
    if not _MONTH.fullmatch(month):
        raise ValueError(f"a month is YYYY-MM, not {month!r}")


def check_amount(amount_micros: int) -> None:
    """Raise ValueError for an amount that is negative or absurd."""
    if not 0 <= amount_micros <= limits().ledger.amount_micros:
        raise ValueError(f"an amount is between 0 and {limits().ledger.amount_micros} millionths, not {amount_micros}")


def reserve_cost(
    connection: sqlite3.Connection,
    cost_id: str,
    *,
    tenant: str,
    model_id: str,
    month: str,
    amount_micros: int,
    cap_micros: int | None,
    now: float,
) -> bool:
    """Reserve the amount when the cap covers it on top of all that counts already; return whether it does."""
    with transaction(connection):
        if cap_micros is not None and read_spent(connection, tenant, month) + amount_micros > cap_micros:
            return False
        connection.execute(
            "INSERT INTO costs (cost_id, tenant, model_id, month, state, reserved_micros, counted_micros, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (cost_id, tenant, model_id, month, CostState.RESERVED.value, amount_micros, amount_micros, now),
        )
        connection.execute(
            "DELETE FROM spendings WHERE month < ?", (f"{int(month[:4]) - limits().ledger.spending_years:04}{month[4:]}",)
        )
        _add_spending(connection, tenant, month, amount_micros)
        connection.execute(
            "DELETE FROM costs WHERE id <= (SELECT max(id) FROM costs) - ? AND state != ?",
            (limits().ledger.costs, CostState.RESERVED.value),
        )
    return True


def settle_cost(
    connection: sqlite3.Connection, cost_id: str, *, state: CostState, amount_micros: int | None, now: float
) -> bool:
    """End a reservation; return False when it is not reserved (any more), and nothing changes."""
    with transaction(connection):
        query = "SELECT tenant, month, reserved_micros FROM costs WHERE cost_id = ? AND state = ?"
        row = connection.execute(query, (cost_id, CostState.RESERVED.value)).fetchone()
        if row is None:
            return False
        tenant, month, reserved = row
        counted = _count(state, reserved=reserved, amount_micros=amount_micros)
        connection.execute(
            "UPDATE costs SET state = ?, counted_micros = ?, settled_at = ? WHERE cost_id = ?",
            (state.value, counted, now, cost_id),
        )
        _add_spending(connection, tenant, month, counted - reserved)
    return True


def abandon_costs(connection: sqlite3.Connection, *, now: float) -> int:
    """Turn every reservation into an abandoned one, which counts on; return how many there were."""
    query = "UPDATE costs SET state = ?, settled_at = ? WHERE state = ?"
    return connection.execute(query, (CostState.ABANDONED.value, now, CostState.RESERVED.value)).rowcount


def read_spent(connection: sqlite3.Connection, tenant: str, month: str) -> int:
    """Return what counts against the cap of a tenant in a month, in micro-units."""
    query = "SELECT counted_micros FROM spendings WHERE tenant = ? AND month = ?"
    row = connection.execute(query, (tenant, month)).fetchone()
    return 0 if row is None else int(row[0])


def read_rows(connection: sqlite3.Connection, limit: int) -> list[CostRow]:
    """Return the newest costs, newest first."""
    rows = connection.execute("SELECT * FROM costs ORDER BY id DESC LIMIT ?", (limit,))
    return [CostRow(state=CostState(row["state"]), **{name: row[name] for name in _COST_PLAIN}) for row in rows]


def _count(state: CostState, *, reserved: int, amount_micros: int | None) -> int:
    """Return what an ended reservation counts against the cap; see CostState for the reasons."""
    if state in _FREE:
        return 0
    if state is CostState.FAILED_USAGE_UNKNOWN or amount_micros is None:
        return reserved
    return amount_micros


def _add_spending(connection: sqlite3.Connection, tenant: str, month: str, amount_micros: int) -> None:
    connection.execute(
        "INSERT INTO spendings VALUES (?, ?, ?)"
        " ON CONFLICT DO UPDATE SET counted_micros = counted_micros + excluded.counted_micros",
        (tenant, month, amount_micros),
    )
    if connection.execute("SELECT count(*) FROM spendings").fetchone()[0] > limits().ledger.spendings:
        raise LedgerFull(f"the ledger holds the spending of {limits().ledger.spendings} tenants and months; name fewer tenants")
