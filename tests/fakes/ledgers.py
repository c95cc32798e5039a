"""Ledgers in real files, under a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from runner.ledger import Ledger

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
