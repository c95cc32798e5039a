"""What somebody with the keys of the control plane and real approvals can still not do: repeat, reorder, block for good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.errors import OpTokenRefused
from tests.fakes.approvals import Fleet
from tests.fakes.ledgers import T0, Clock
from tests.unit.runner.test_gate_l2 import MODEL, NOW, Door, door_in, refused
from wire.optoken import Operation

WEEK_S = 7 * 86_400


def lose_the_ledger(tmp_path: Path) -> None:
    for each in (tmp_path / "data").iterdir():
        each.unlink()


async def carry_out(door: Door, operation: Operation, params: dict[str, object], **changes: Any) -> None:
    model = params.get("modelId")
    assert model is None or isinstance(model, str)
    token = door.issuer.token(operation.value, params, now=door.clock.now, **changes)
    admitted = await door.gate.admit(token, operation=operation, model_id=model, params=params)
    await door.gate.finish(admitted, {"state": "succeeded"})


async def test_an_approval_from_before_the_ledger_was_lost_is_not_carried_out_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(T0)
    signed: dict[str, Any] = {"op_id": "op-1", "requested_at": int(NOW), "op_class": "standing", "max_uses": 5}
    async with door_in(tmp_path, fleet=fleet) as door:
        await door.begin_and_end(**signed)
    lose_the_ledger(tmp_path)
    async with door_in(tmp_path, fleet=fleet) as door:
        door.ledger.born_at = door.clock.now = NOW + 600
        again = door.token(**{**signed, "not_before": int(NOW) - 60, "not_after": int(NOW) + 3600})
        assert await refused(door, again, caplog) == "before_ledger"
        await door.begin_and_end(op_id="op-2", requested_at=int(NOW) + 600)


async def test_an_approval_that_says_it_was_asked_for_later_waits_until_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with door_in(tmp_path) as door:
        late = {"op_id": "op-1", "requested_at": int(NOW) + 61}
        assert await refused(door, door.token(**late), caplog) == "not_yet_valid"
        await door.begin_and_end(op_id="op-1", requested_at=int(NOW) + 60)


async def test_an_old_load_does_not_evict_what_was_loaded_since(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with door_in(tmp_path) as door:
        held_back = door.token(fence=5)  # makes room by unloading org/other
        await carry_out(door, Operation.MODEL_LOAD, {"modelId": "org/other"}, fence=6)
        assert await refused(door, held_back, caplog) == "stale_fence"


async def test_an_old_load_does_not_bring_back_what_was_evicted_since(tmp_path: Path) -> None:
    async with door_in(tmp_path) as door:
        other: dict[str, object] = {"modelId": "org/other"}
        held_back = door.issuer.token("model-load", other, now=NOW, fence=5)
        await door.begin_and_end(fence=6)
        with pytest.raises(OpTokenRefused):
            await door.gate.admit(held_back, operation=Operation.MODEL_LOAD, model_id="org/other", params=other)
        assert door.gate.refusals == {"stale_fence": 1}


async def test_no_fence_blocks_a_model_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with door_in(tmp_path) as door:
        for fence in (2**53 - 1, int(NOW + WEEK_S) * 1000 + 1):
            assert await refused(door, door.token(fence=fence), caplog) == "bad_field"
        await carry_out(door, Operation.MODEL_LOAD, {"modelId": MODEL}, fence=int(NOW + WEEK_S) * 1000)


async def test_a_clock_that_was_a_year_ahead_for_a_moment_makes_the_box_forget_nothing(tmp_path: Path) -> None:
    fleet = Fleet(T0)
    async with door_in(tmp_path, fleet=fleet) as door:
        await door.begin_and_end(op_id="op-1")
        door.clock.now = NOW + 29 * 86_400
        await door.begin_and_end(op_id="op-2")
        door.ledger._clock = Clock(NOW + 365 * 86_400)
        await door.begin_and_end(op_id="op-3", not_after=int(door.clock.now) + 3600)
        door.ledger._clock, door.clock.now = door.clock, NOW + 60
        again = await door.admit(
            door.token(op_id="op-1", requested_at=int(NOW), not_before=int(NOW) - 60, not_after=int(NOW) + 3600)
        )
    assert again.recorded == {"state": "succeeded"}
