"""What tenants spend with paid providers, against their monthly cap."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from runner.ledger import CostState, Ledger, LedgerFull
from tests.fakes.ledgers import T0, Clock, opened
from tests.fakes.limits import set_runner_limits

MONTH = "2026-11"


async def reserve(ledger: Ledger, amount: int, *, cap: int | None = 1000, tenant: str = "t", month: str = MONTH) -> str | None:
    return await ledger.reserve_cost(tenant=tenant, model_id="gpt", month=month, amount_micros=amount, cap_micros=cap)


async def reserved(ledger: Ledger, amount: int) -> str:
    cost_id = await reserve(ledger, amount)
    assert cost_id is not None
    return cost_id


async def test_a_cap_covers_up_to_its_last_millionth(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await reserve(ledger, 600)
        assert await reserve(ledger, 401) is None
        assert await reserve(ledger, 400)
        assert await reserve(ledger, 1) is None
        assert await reserve(ledger, 0)
        assert await ledger.spent("t", MONTH) == 1000


async def test_caps_are_per_tenant_and_month(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await reserve(ledger, 1000)
        assert await reserve(ledger, 1000, tenant="u")
        assert await reserve(ledger, 1000, month="2026-12")
        assert [await ledger.spent(*key) for key in (("t", MONTH), ("u", MONTH), ("t", "2026-12"), ("x", MONTH))] == [
            1000,
            1000,
            1000,
            0,
        ]


async def test_without_a_cap_everything_is_covered_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        assert await reserve(ledger, 10**12, cap=None)
        assert await ledger.spent("t", MONTH) == 10**12


async def test_many_at_once_never_spend_more_than_the_cap(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        answers = await asyncio.gather(*(reserve(ledger, 30) for _ in range(100)))
        assert sum(answer is not None for answer in answers) == 33
        assert await ledger.spent("t", MONTH) == 990


@pytest.mark.parametrize(
    ("state", "amount", "counted"),
    [
        (CostState.SETTLED, 70, 70),
        (CostState.SETTLED, 250, 250),
        (CostState.SETTLED, 0, 0),
        (CostState.RELEASED, None, 0),
        (CostState.RELEASED, 70, 0),
        (CostState.FAILED_BEFORE_SUBMIT, None, 0),
        (CostState.FAILED_AFTER_SUBMIT, 30, 30),
        (CostState.FAILED_AFTER_SUBMIT, None, 100),
        (CostState.FAILED_USAGE_UNKNOWN, None, 100),
        (CostState.FAILED_USAGE_UNKNOWN, 5, 100),
    ],
)
async def test_an_ended_reservation_counts_by_its_state(
    tmp_path: Path, state: CostState, amount: int | None, counted: int
) -> None:
    async with opened(tmp_path, Clock(T0 + 5)) as ledger:
        cost_id = await reserved(ledger, 100)
        assert await ledger.settle_cost(cost_id, state=state, amount_micros=amount)
        assert await ledger.spent("t", MONTH) == counted
        (row,) = await ledger.cost_rows(10)
        assert (row.cost_id, row.tenant, row.model_id, row.month) == (cost_id, "t", "gpt", MONTH)
        assert (row.state, row.reserved_micros, row.counted_micros) == (state, 100, counted)
        assert (row.created_at, row.settled_at) == (T0 + 5, T0 + 5)


async def test_a_reservation_ends_once(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        cost_id = await reserved(ledger, 100)
        assert await ledger.settle_cost(cost_id, state=CostState.SETTLED, amount_micros=40)
        assert not await ledger.settle_cost(cost_id, state=CostState.RELEASED)
        assert not await ledger.settle_cost("nobody", state=CostState.RELEASED)
        assert await ledger.spent("t", MONTH) == 40


async def test_what_a_dead_process_reserved_is_abandoned_and_goes_on_counting(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        await reserved(ledger, 100)
        await ledger.settle_cost(await reserved(ledger, 50), state=CostState.SETTLED, amount_micros=50)
    async with opened(tmp_path) as ledger:
        assert await ledger.abandon_costs() == 1
        assert await ledger.abandon_costs() == 0
        assert [row.state for row in await ledger.cost_rows(10)] == [CostState.SETTLED, CostState.ABANDONED]
        assert await ledger.spent("t", MONTH) == 150


async def test_a_cancelled_caller_leaves_nothing_reserved(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        reserving = asyncio.create_task(reserve(ledger, 100))
        await asyncio.sleep(0)
        reserving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reserving
        assert await ledger.spent("t", MONTH) == 0
        assert [row.state for row in await ledger.cost_rows(10)] == [CostState.RELEASED]


async def test_old_rows_go_and_the_sum_and_what_is_reserved_stay(tmp_path: Path) -> None:
    set_runner_limits(ledger={"costs": 5})
    async with opened(tmp_path) as ledger:
        pending = await reserved(ledger, 1)
        for _ in range(20):
            await ledger.settle_cost(await reserved(ledger, 10), state=CostState.SETTLED, amount_micros=10)
        rows = await ledger.cost_rows(100)
        assert (len(rows), rows[-1].cost_id) == (6, pending)
        assert await ledger.spent("t", MONTH) == 201


async def test_sums_of_bygone_years_go_and_others_are_never_forgotten(tmp_path: Path) -> None:
    set_runner_limits(ledger={"spendings": 2})
    async with opened(tmp_path) as ledger:
        await reserve(ledger, 1, month="2024-10")
        await reserve(ledger, 2, month="2024-11")
        await reserve(ledger, 4)
        assert [await ledger.spent("t", month) for month in ("2024-10", "2024-11", MONTH)] == [0, 2, 4]
        with pytest.raises(LedgerFull):
            await reserve(ledger, 8, tenant="u")
        assert await ledger.spent("u", MONTH) == 0


@pytest.mark.parametrize("month", ["2026-13", "2026-1", "26-01", "2026-11-01", "", "2026-11\n"])
async def test_a_month_has_one_form(tmp_path: Path, month: str) -> None:
    async with opened(tmp_path) as ledger:
        with pytest.raises(ValueError, match="YYYY-MM"):
            await reserve(ledger, 1, month=month)


async def test_amounts_and_endings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        cost_id = await reserved(ledger, 1)
        for amount in (-1, 2**53 + 1):
            with pytest.raises(ValueError, match="amount"):
                await reserve(ledger, amount)
            with pytest.raises(ValueError, match="amount"):
                await ledger.settle_cost(cost_id, state=CostState.SETTLED, amount_micros=amount)
        for state in (CostState.RESERVED, CostState.ABANDONED, CostState.SETTLED):
            with pytest.raises(ValueError, match="does not end as"):
                await ledger.settle_cost(cost_id, state=state)
        assert await ledger.spent("t", MONTH) == 1


async def test_the_sum_is_always_that_of_the_rows(tmp_path: Path) -> None:
    chance = random.Random(7)
    endings = [state for state in CostState if state not in {CostState.RESERVED, CostState.ABANDONED}]
    async with opened(tmp_path) as ledger:
        pending: list[str] = []
        for _ in range(80):
            if pending and chance.random() < 0.5:
                cost_id = pending.pop(chance.randrange(len(pending)))
                await ledger.settle_cost(cost_id, state=chance.choice(endings), amount_micros=chance.randrange(100))
            elif new_id := await reserve(ledger, chance.randrange(100)):
                pending.append(new_id)
            rows = await ledger.cost_rows(1000)
            assert await ledger.spent("t", MONTH) == sum(row.counted_micros for row in rows)
