"""Costs of remote models: what is set aside, what is counted, and caps that many at once never exceed."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runner.definitions.fields import ModelDefinition
from runner.definitions.settings import Fairness, Price, Remote
from runner.engines.port import CHAT
from runner.errors import SpendingCapReached, Unavailable
from runner.ledger.costs import CostState
from runner.ledger.database import LedgerFull
from runner.ledger.ledger import Ledger
from runner.limits import limits
from runner.pool.models import Model
from runner.queue import FairQueue, WaitBudget
from runner.serving.costs import Costs, Spending, estimate_cost
from runner.serving.request import Answer, Inference
from tests.fakes.ledgers import T0, Clock, opened
from tests.fakes.limits import set_runner_limits
from tests.fakes.waiting import turns
from wire.bridge import TokenCounts

MODEL = "cloud-large"
PRICE = Price(input_per_million=2.5, output_per_million=10.0)
MONTH_END = 1_796_083_200.0
"""2026-12-01 00:00:00 UTC."""


@dataclasses.dataclass
class Books:
    """A cost keeper on a real ledger, the settings it reads and the clock of both."""

    costs: Costs
    ledger: Ledger
    clock: Clock
    remote: Remote

    async def spent(self, tenant: str = "t", month: str = "2026-11") -> int:
        return await self.ledger.spent(tenant, month)

    async def last_state(self) -> tuple[CostState, int, int]:
        (row,) = await self.ledger.cost_rows(1)
        return row.state, row.reserved_micros, row.counted_micros


@asynccontextmanager
async def books(folder: Path, *, cap: float | None = None, price: Price | None = PRICE) -> AsyncIterator[Books]:
    clock = Clock(MONTH_END - 10 * 86_400)
    async with opened(folder, clock) as ledger:
        kept = Books(
            Costs(ledger, lambda: kept.remote, clock=clock), ledger, clock,
            Remote(currency="EUR", monthly_cap=cap, prices={} if price is None else {MODEL: price}),
        )  # fmt: skip
        yield kept


def a_model(model_id: str = MODEL) -> Model:
    queue = FairQueue(slots=1, limits=Fairness(), budget=WaitBudget(10), weight_of=lambda _: 1.0)
    return Model(ModelDefinition(model_id=model_id, backend="openai_compatible"), queue, lambda: None)


def a_request(tenant: str = "t", **fields: object) -> Inference:
    return Inference("POST", CHAT, {}, json.dumps(fields).encode(), MODEL, tenant)


def answered(status: int = 200, *, prompt: int | None = None, completion: int = 0) -> Answer:
    usage = None if prompt is None else TokenCounts(prompt_tokens=prompt, completion_tokens=completion)
    return Answer(status, {}, usage=usage)


@pytest.mark.parametrize(
    ("fields", "output_tokens"),
    [
        (b"", 4096), (b',"max_tokens":10', 10), (b',"max_completion_tokens":11', 11), (b',"max_output_tokens":12', 12),
        (b',"max_tokens":1,"max_completion_tokens":500', 500), (b',"max_tokens":10,"n":3', 30),
        (b',"max_tokens":10,"best_of":4,"n":2', 40), (b',"max_tokens":"many"', 4096), (b',"max_tokens":true', 4096),
        (b',"max_tokens":0', 4096), (b',"max_tokens":-5', 4096), (b',"max_tokens":null', 4096),
    ],
)  # fmt: skip
def test_the_most_a_request_may_cost_is_its_bytes_in_and_its_limit_out(fields: bytes, output_tokens: int) -> None:
    body = b'{"a":1' + fields + b"}"
    input_tokens = (len(body) + 2) // 3
    assert estimate_cost(Price(input_per_million=1, output_per_million=1000), body) == input_tokens + 1000 * output_tokens


def test_estimates_are_rounded_up_and_bounded_whatever_the_body_is() -> None:
    for size, micros in ((27, 1), (30, 1), (31, 2)):
        assert estimate_cost(Price(input_per_million=0.1, output_per_million=0), b"x" * size) == micros
    for body in (b"", b"not json", b"[]", b"\xff", b'{"max_tokens":', b"[" * 5000):
        assert estimate_cost(Price(input_per_million=0, output_per_million=1), body) == 4096
    absurd = b'{"max_tokens":1' + b"0" * 300 + b',"n":1e300}'
    assert estimate_cost(Price(input_per_million=1, output_per_million=1e9), absurd) == limits().ledger.amount_micros


@pytest.mark.parametrize(
    ("answer", "was_sent", "state", "costs"),
    [
        (answered(prompt=7, completion=3), True, CostState.SETTLED, 48),  # 17.5 + 30, rounded up
        (answered(400, prompt=2), True, CostState.SETTLED, 5), (None, False, CostState.FAILED_BEFORE_SUBMIT, 0),
        (None, True, CostState.FAILED_AFTER_SUBMIT, None), (answered(), True, CostState.FAILED_USAGE_UNKNOWN, None),
        (answered(500), True, CostState.FAILED_USAGE_UNKNOWN, None),
        (answered(408), True, CostState.FAILED_USAGE_UNKNOWN, None), (answered(400), True, CostState.RELEASED, 0),
        (answered(429), True, CostState.RELEASED, 0),
    ],
)  # fmt: skip
async def test_a_request_costs_what_was_agreed_and_the_reservation_is_kept_wherever_the_provider_may_bill(
    tmp_path: Path, answer: Answer | None, was_sent: bool, state: CostState, costs: int | None
) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        before, reserved, counted = await kept.last_state()
        assert (before, counted) == (CostState.RESERVED, reserved)
        assert reserved > 1000
        kept.remote = dataclasses.replace(kept.remote, prices={MODEL: Price(input_per_million=99, output_per_million=99)})
        await kept.costs.settle(charge, answer, was_sent=was_sent)
        assert await kept.last_state() == (state, reserved, reserved if costs is None else costs)
        assert await kept.spent() == (reserved if costs is None else costs)


async def test_a_settlement_outlives_the_caller(tmp_path: Path) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request())
        settling = asyncio.create_task(kept.costs.settle(charge, answered(prompt=2), was_sent=True))
        await turns(1)
        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
        assert await kept.spent() == 5


async def test_a_request_that_the_cap_does_not_cover_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with books(tmp_path, cap=0.002) as kept:
        await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        spent = await kept.spent()
        with pytest.raises(SpendingCapReached) as caught:
            await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        refusal = caught.value
        assert (refusal.status, refusal.code, refusal.retry_after_s) == (429, "spending_cap_reached", 86_400)
        assert refusal.details == {
            "cap": 0.002, "spent": spent / 1e6, "needed": spent / 1e6, "currency": "EUR", "month": "2026-11",
        }  # fmt: skip
        assert await kept.spent() == spent
        kept.clock.now = MONTH_END - 60
        with pytest.raises(SpendingCapReached) as caught:
            await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        assert caught.value.retry_after_s == 60
        kept.clock.now = MONTH_END
        await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        assert await kept.spent(month="2026-12") == spent


async def test_a_model_without_a_price_is_counted_and_bound_by_no_cap(tmp_path: Path) -> None:
    async with books(tmp_path, cap=0, price=None) as kept:
        charge = await kept.costs.reserve(a_model(), a_request(max_tokens=10**6))
        await kept.costs.settle(charge, answered(prompt=10**6, completion=10**6), was_sent=True)
        assert await kept.last_state() == (CostState.SETTLED, 0, 0)
        summary = await kept.costs.summary()
        assert summary.spendings == (Spending("t", 0, 0),)
        assert summary.requests == {(MODEL, CostState.SETTLED): 1}


async def test_nothing_is_spent_when_it_cannot_be_written_down(tmp_path: Path) -> None:
    async with books(tmp_path) as kept:
        await kept.ledger.close()
        with pytest.raises(Unavailable, match="write down"):
            await kept.costs.reserve(a_model(), a_request())


async def test_a_settlement_that_cannot_be_written_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request())
        await kept.ledger.close()
        with caplog.at_level(logging.ERROR):
            await kept.costs.settle(charge, answered(prompt=2), was_sent=True)
        assert "not settled" in caplog.text
    async with opened(tmp_path, Clock(MONTH_END)) as ledger:
        await ledger.abandon_costs()
        assert await ledger.spent("t", "2026-11") > 5


MONTH = "2026-11"


async def reserve(ledger: Ledger, amount: int, *, cap: int | None = 1000, tenant: str = "t", month: str = MONTH) -> str | None:
    return await ledger.reserve_cost(tenant=tenant, model_id="gpt", month=month, amount_micros=amount, cap_micros=cap)


async def reserved(ledger: Ledger, amount: int) -> str:
    cost_id = await reserve(ledger, amount)
    assert cost_id is not None
    return cost_id


async def test_a_cap_covers_a_tenants_month_up_to_its_last_millionth(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        taken = [await reserve(ledger, amount) is not None for amount in (600, 401, 400, 1, 0)]
        assert taken == [True, False, True, False, True]
        assert await reserve(ledger, 1000, tenant="u")
        assert await reserve(ledger, 1000, month="2026-12")
        assert await reserve(ledger, 10**12, cap=None, tenant="rich")
        keys = (("t", MONTH), ("u", MONTH), ("t", "2026-12"), ("x", MONTH), ("rich", MONTH))
        assert [await ledger.spent(*key) for key in keys] == [1000, 1000, 1000, 0, 10**12]


async def test_many_at_once_never_spend_more_than_the_cap(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        answers = await asyncio.gather(*(reserve(ledger, 30) for _ in range(100)))
        assert sum(answer is not None for answer in answers) == 33
        assert await ledger.spent("t", MONTH) == 990


async def test_a_reservation_ends_once_and_counts_by_its_state(tmp_path: Path) -> None:
    endings = [
        (CostState.SETTLED, 70, 70), (CostState.SETTLED, 250, 250), (CostState.RELEASED, None, 0), (CostState.RELEASED, 70, 0),
        (CostState.FAILED_BEFORE_SUBMIT, None, 0), (CostState.FAILED_AFTER_SUBMIT, 30, 30),
        (CostState.FAILED_AFTER_SUBMIT, None, 100), (CostState.FAILED_USAGE_UNKNOWN, 5, 100),
    ]  # fmt: skip
    async with opened(tmp_path, Clock(T0 + 5)) as ledger:
        for state, amount, counted in endings:
            before, cost_id = await ledger.spent("t", MONTH), await reserved(ledger, 100)
            assert await ledger.settle_cost(cost_id, state=state, amount_micros=amount)
            assert not await ledger.settle_cost(cost_id, state=CostState.RELEASED)
            assert await ledger.spent("t", MONTH) == before + counted
            (row,) = await ledger.cost_rows(1)
            assert (row.cost_id, row.tenant, row.model_id, row.month) == (cost_id, "t", "gpt", MONTH)
            assert (row.state, row.reserved_micros, row.counted_micros) == (state, 100, counted)
            assert (row.created_at, row.settled_at) == (T0 + 5, T0 + 5)
        assert not await ledger.settle_cost("nobody", state=CostState.RELEASED)


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
        await turns(1)
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


async def test_amounts_and_endings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        cost_id = await reserved(ledger, 1)
        for month in ("2026-13", "2026-1", "2026-11-01", "", "2026-11\n"):
            with pytest.raises(ValueError, match="YYYY-MM"):
                await reserve(ledger, 1, month=month)
        for amount in (-1, 2**53 + 1):
            with pytest.raises(ValueError, match="amount"):
                await reserve(ledger, amount)
            with pytest.raises(ValueError, match="amount"):
                await ledger.settle_cost(cost_id, state=CostState.SETTLED, amount_micros=amount)
        for state in (CostState.RESERVED, CostState.ABANDONED, CostState.SETTLED):
            with pytest.raises(ValueError, match="does not end as"):
                await ledger.settle_cost(cost_id, state=state)
        assert await ledger.spent("t", MONTH) == 1
