"""A new node whose clock is ahead takes what was approved in its first minute; no loss of its memory brings anything back."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runner.config.values import OperationsConfig
from runner.ledger import Ledger
from runner.operations.gate import Gate, GateRules
from runner.operations.governance import Governance
from tests.fakes.approvals import Fleet, Issuer
from tests.fakes.ledgers import T0, Clock
from tests.unit.runner.test_gate_l2 import Door, refused
from wire.optoken import Level

WANTED = OperationsConfig(
    key_path=None, level=2, is_level_given=True, min_signers=2, runner_id="", ops_per_hour=99, counted_signers=None
)


@asynccontextmanager
async def started(data: Path, fleet: Fleet, *, true_time: float, ahead_s: float) -> AsyncIterator[Door]:
    """Start a node whose clock is so far ahead; people and control plane go by the true time."""
    clock = Clock(true_time + ahead_s)
    ledger = await Ledger.open(data, clock=clock)
    try:
        node = Governance(WANTED, data=data, name="box-7", ledger=ledger, clock=clock)
        await node.open()
        assert node._own_keys is not None
        kid, key = list(node._own_keys.read().items())[-1]
        rules = GateRules(
            key_path=node.key_path, level=Level.L2, min_signers=2, runner_id=node.runner_id, policy=lambda: fleet.policy
        )
        yield Door(Gate(rules, ledger=ledger, clock=clock), ledger, Issuer(fleet, node.runner_id, kid, key), Clock(true_time))
    finally:
        await ledger.close()


def lose(data: Path, *beginnings: str) -> None:
    """Remove the files whose names begin so."""
    for each in data.iterdir():
        if each.is_file() and each.name.startswith(beginnings):
            each.unlink()


@pytest.mark.parametrize("ahead_s", [-60, -30, 0, 30, 60])
async def test_a_new_node_takes_what_was_approved_in_its_first_moment(tmp_path: Path, ahead_s: float) -> None:
    async with started(tmp_path, Fleet(T0), true_time=T0 + 10, ahead_s=ahead_s) as door:
        await door.begin_and_end(op_id="op-1", requested_at=int(T0) + 10)


async def test_a_node_whose_clock_is_further_ahead_than_allowed_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(tmp_path, Fleet(T0), true_time=T0 + 10, ahead_s=62) as door:
        early = door.token(op_id="op-1", requested_at=int(T0) + 10)
        assert await refused(door, early, caplog) == "before_ledger"


@pytest.mark.parametrize("also_key", [False, True], ids=["the ledger alone", "the key too"])
@pytest.mark.parametrize("ahead_s", [0, 30])
async def test_an_approval_is_not_carried_out_again_after_the_memory_was_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead_s: float, *, also_key: bool
) -> None:
    fleet, moment = Fleet(T0), int(T0) + 10
    async with started(tmp_path, fleet, true_time=moment, ahead_s=ahead_s) as door:
        await door.begin_and_end(op_id="op-1", requested_at=moment)
        first = door.issuer.runner_id
    lose(tmp_path, *(["ledger", "identity"] if also_key else ["ledger"]))
    caplog.set_level(logging.INFO)
    async with started(tmp_path, fleet, true_time=moment + 5, ahead_s=ahead_s) as door:
        door.issuer.runner_id = first
        again = door.token(op_id="op-1", requested_at=moment, not_before=moment - 60, not_after=moment + 3600)
        assert await refused(door, again, caplog) == ("wrong_audience" if also_key else "before_ledger")


async def test_the_allowance_outlives_a_restart_and_a_key_that_was_put_back_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet, moment = Fleet(T0), int(T0) + 10
    data, key = tmp_path / "data", tmp_path / "data" / "identity.key"
    async with started(data, fleet, true_time=moment, ahead_s=30):
        saved = key.read_bytes()
    async with started(data, fleet, true_time=moment + 5, ahead_s=30) as door:
        await door.begin_and_end(op_id="op-1", requested_at=moment + 1)
    lose(data, "")
    async with started(data, fleet, true_time=moment + 8, ahead_s=30):
        key.write_bytes(saved)
    async with started(data, fleet, true_time=moment + 9, ahead_s=30) as door:
        again = door.token(op_id="op-1", requested_at=moment + 1, not_before=moment - 60, not_after=moment + 3600)
        assert await refused(door, again, caplog) == "before_ledger"
