"""What the box must not forget: one SQLite file with spent nonces, operations, policies, load tasks, observations and costs."""

from runner.ledger.database import FILE_NAME, LedgerError, LedgerFull
from runner.ledger.ledger import Ledger
from runner.ledger.rows import (
    CostRow,
    CostState,
    DesiredModel,
    OpAlreadyDone,
    OpDetails,
    OpIsRunning,
    OpRow,
    OpStart,
    OpStarted,
    PolicyRow,
    StaleFence,
    TaskRow,
    TaskState,
    TooManyOps,
)

__all__ = [
    "FILE_NAME",
    "CostRow",
    "CostState",
    "DesiredModel",
    "Ledger",
    "LedgerError",
    "LedgerFull",
    "OpAlreadyDone",
    "OpDetails",
    "OpIsRunning",
    "OpRow",
    "OpStart",
    "OpStarted",
    "PolicyRow",
    "StaleFence",
    "TaskRow",
    "TaskState",
    "TooManyOps",
]
