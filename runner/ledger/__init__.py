"""What a runner must not forget: one SQLite file with operations, fences, policies, observations and costs."""

from runner.ledger.costs import CostRow, CostState
from runner.ledger.database import FILE_NAME, LedgerError, LedgerFull
from runner.ledger.ledger import (
    INTERRUPTED,
    DesiredModel,
    Ledger,
    OpAlreadyDone,
    OpIsRunning,
    OpOrder,
    OpStart,
    OpStarted,
    PolicyRow,
    Run,
    RunState,
    StaleFence,
    TooManyOps,
)

__all__ = [
    "FILE_NAME",
    "INTERRUPTED",
    "CostRow",
    "CostState",
    "DesiredModel",
    "Ledger",
    "LedgerError",
    "LedgerFull",
    "OpAlreadyDone",
    "OpIsRunning",
    "OpOrder",
    "OpStart",
    "OpStarted",
    "PolicyRow",
    "Run",
    "RunState",
    "StaleFence",
    "TooManyOps",
]
