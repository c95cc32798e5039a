"""Whatever order operations, repetitions, restarts and clocks come in: a use begins once, fences only grow, outcomes stay."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runner.ledger import OpAlreadyDone, OpDetails, OpIsRunning, OpStarted, StaleFence, TooManyOps, approvals
from runner.ledger.database import Database, open_database
from tests.fakes.ledgers import T0

OPS = st.sampled_from(["op-1", "op-2", "op-3", "op-4"])
SLOTS = st.sampled_from(["model:a", "model:b"])
HOURLY = 6


class LedgerMachine(RuleBasedStateMachine):
    """A ledger beside what it should remember."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ledger-machine-"))
        self.now = T0
        self.outcomes: dict[str, dict[str, object] | None] = {}
        self.begun: list[float] = []
        self.fences: dict[str, int] = {}

    @initialize()
    def start(self) -> None:
        self.database: Database = open_database(self.folder, now=self.now)

    def teardown(self) -> None:
        self.database.close()
        shutil.rmtree(self.folder)

    @rule(op=OPS, use=st.integers(1, 2), slot=SLOTS, fence=st.integers(1, 30))
    def begin(self, op: str, use: int, slot: str, fence: int) -> None:
        key = f"{op}.{use}"
        answer = approvals.begin_op(
            self.database.connection, key, slot=slot, fence=fence, max_uses=1, expires_at=self.now + 300, now=self.now,
            details=OpDetails(operation="model-load", approval_id=op, use=use, most_per_hour=HOURLY),
        )  # fmt: skip
        recent = [at for at in self.begun if at > self.now - approvals.HOUR_S]
        if key in self.outcomes:
            known = self.outcomes[key]
            assert answer == (OpIsRunning() if known is None else OpAlreadyDone(known))
        elif fence <= self.fences.get(slot, 0):
            assert answer == StaleFence()
        elif len(recent) >= HOURLY:
            assert isinstance(answer, TooManyOps)
            assert 0 < answer.retry_after_s <= approvals.HOUR_S
        else:
            assert answer == OpStarted()
            self.outcomes[key], self.fences[slot] = None, fence
            self.begun.append(self.now)

    @rule(op=OPS, use=st.integers(1, 2), number=st.integers(0, 3))
    def finish(self, op: str, use: int, number: int) -> None:
        key, outcome = f"{op}.{use}", {"state": "succeeded", "number": number}
        approvals.finish_op(self.database.connection, key, dict(outcome), receipt="", now=self.now)
        if key in self.outcomes and self.outcomes[key] is None:
            self.outcomes[key] = dict(outcome)

    @rule()
    def restart(self) -> None:
        self.database.close()
        self.database = open_database(self.folder, now=self.now)
        approvals.interrupt_ops(self.database.connection, now=self.now)
        for key, outcome in self.outcomes.items():
            self.outcomes[key] = outcome or dict(approvals.INTERRUPTED)

    @rule(seconds=st.integers(1, 2000))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @invariant()
    def everything_is_as_remembered(self) -> None:
        for key, outcome in self.outcomes.items():
            op, _, use = key.rpartition(".")
            row = approvals.find_op(self.database.connection, op, int(use))
            assert row is not None
            assert row.outcome == outcome


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
