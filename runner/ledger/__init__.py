"""What the box must not forget: one SQLite file with spent nonces, operations, load tasks, observations and costs."""

from runner.ledger.database import FILE_NAME, LedgerError, LedgerFull
from runner.ledger.ledger import Ledger
from runner.ledger.rows import (
    CostRow,
    CostState,
    OpAlreadyDone,
    OpIsRunning,
    OpStart,
    OpStarted,
    StaleFence,
    TaskRow,
    TaskState,
)

__all__ = [
    "FILE_NAME",
    "CostRow",
    "CostState",
    "Ledger",
    "LedgerError",
    "LedgerFull",
    "OpAlreadyDone",
    "OpIsRunning",
    "OpStart",
    "OpStarted",
    "StaleFence",
    "TaskRow",
    "TaskState",
]
