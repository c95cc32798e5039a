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
SPENT = "SELECT counted_micros FROM spendings WHERE tenant = ? AND month = ?"
_COST_PLAIN = tuple(part.name for part in fields(CostRow) if part.name != "state")


def check_month(month: str) -> None:
    """Raise ValueError for anything but ``YYYY-MM``."""
    if not _MONTH.fullmatch(month):
        raise ValueError(f"a month is YYYY-MM, not {month!r}")


def check_amount(amount_micros: int) -> None:
    """Raise ValueError for an amount that is negative or absurd."""
    if not 0 <= amount_micros <= limits().ledger.amount_micros:
        raise ValueError(f"an amount is between 0 and {limits().ledger.amount_micros} millionths, not {amount_micros}")


def reserve_cost(db: sqlite3.Connection, cost: CostRow, *, cap_micros: int | None) -> bool:
    """Reserve an amount when the cap covers it on top of all that counts already; return whether it does."""
    with transaction(db):
        spent = db.execute(SPENT, (cost.tenant, cost.month)).fetchone()
        if cap_micros is not None and (spent[0] if spent else 0) + cost.reserved_micros > cap_micros:
            return False
        db.execute(
            "INSERT INTO costs (cost_id, tenant, model_id, month, state, reserved_micros, counted_micros, created_at)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                cost.cost_id, cost.tenant, cost.model_id, cost.month, cost.state.value, cost.reserved_micros,
                cost.counted_micros, cost.created_at,
            ),
        )  # fmt: skip
        oldest = f"{int(cost.month[:4]) - limits().ledger.spending_years:04}{cost.month[4:]}"
        db.execute("DELETE FROM spendings WHERE month < ?", (oldest,))
        _add_spending(db, cost.tenant, cost.month, cost.counted_micros)
        db.execute(
            "DELETE FROM costs WHERE id <= (SELECT max(id) FROM costs) - ? AND state != ?",
            (limits().ledger.costs, CostState.RESERVED.value),
        )
    return True


def settle_cost(
    db: sqlite3.Connection, cost_id: str, *, state: CostState, amount_micros: int | None, now: float
) -> bool:  # fmt: skip
    """End a reservation; return False when it is not reserved (any more), and nothing changes."""
    with transaction(db):
        query = "SELECT tenant, month, reserved_micros FROM costs WHERE cost_id = ? AND state = ?"
        row = db.execute(query, (cost_id, CostState.RESERVED.value)).fetchone()
        if row is None:
            return False
        tenant, month, reserved = row
        if state in _FREE:
            counted = 0
        elif state is CostState.FAILED_USAGE_UNKNOWN or amount_micros is None:
            counted = reserved
        else:
            counted = amount_micros
        db.execute(
            "UPDATE costs SET state = ?, counted_micros = ?, settled_at = ? WHERE cost_id = ?",
            (state.value, counted, now, cost_id),
        )
        _add_spending(db, tenant, month, counted - reserved)
    return True


def make_cost(row: sqlite3.Row) -> CostRow:
    """Return what a row of ``costs`` says."""
    return CostRow(state=CostState(row["state"]), **{name: row[name] for name in _COST_PLAIN})


def _add_spending(db: sqlite3.Connection, tenant: str, month: str, amount_micros: int) -> None:
    db.execute(
        "INSERT INTO spendings VALUES (?, ?, ?)"
        " ON CONFLICT DO UPDATE SET counted_micros = counted_micros + excluded.counted_micros",
        (tenant, month, amount_micros),
    )
    if db.execute("SELECT count(*) FROM spendings").fetchone()[0] > limits().ledger.spendings:
        raise LedgerFull(f"the ledger holds the spending of {limits().ledger.spendings} tenants and months; name fewer tenants")
