"""Ledgers in real files, under a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runner.ledger.ledger import Ledger, OpAlreadyDone, OpIsRunning, OpOrder, OpStart, OpStarted, StaleFence
from wire.ids import new_uuid7

T0 = 1_745_880_000.0


class Clock:
    """Stands still until told."""

    def __init__(self, now: float = T0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened(directory: Path, clock: Clock | None = None) -> AsyncIterator[Ledger]:
    ledger = await Ledger.open(directory, clock=clock or Clock())
    try:
        yield ledger
    finally:
        await ledger.close()


async def spend(ledger: Ledger, nonce: str, *, expires_at: float) -> bool:
    """Whether a nonce was new; it is spent now."""
    return await ledger.spend_nonce(nonce, expires_at=expires_at) is not None


def order_of(op_id: str, *, slot: str, fence: int, expires_at: float, **details: Any) -> OpOrder:
    return OpOrder(op_key=op_id, slot=slot, fence=fence, expires_at=expires_at, **({"approval_id": op_id} | details))


async def begin_op(ledger: Ledger, op_id: str, *, slot: str, fence: int, expires_at: float, **details: Any) -> object:
    """What the ledger says to an operation that comes with a nonce of its own; see ``said``."""
    order = order_of(op_id, slot=slot, fence=fence, expires_at=expires_at, **details)
    return said(await ledger.begin_op(await spend_new(ledger, expires_at=expires_at), order))


async def spend_new(ledger: Ledger, *, expires_at: float) -> int:
    """The row of a nonce that nobody has seen."""
    spent = await ledger.spend_nonce(new_uuid7().hex, expires_at=expires_at)
    assert spent is not None
    return spent.run_id


async def end_op(ledger: Ledger, op_id: str, outcome: dict[str, object], **ending: Any) -> None:
    run = await ledger.find_op(op_id, 1)
    assert run is not None
    await ledger.finish_op(run.run_id, outcome, **ending)


def said(answer: OpStart) -> object:
    """``started``, ``running``, ``stale``, the outcome of what was done before, or an answer as it is."""
    match answer:
        case OpStarted():
            return "started"
        case OpIsRunning():
            return "running"
        case StaleFence():
            return "stale"
        case OpAlreadyDone(run):
            return run.outcome
        case _:
            return answer
