"""What requests to remote models cost: estimated and set aside, settled by their usage, refused at the cap."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runner.admission import FairQueue, QueueLimits, WaitBudget
from runner.definitions.definition import ModelDefinition
from runner.definitions.sections import Price, Remote
from runner.engines.port import CHAT
from runner.errors import SpendingCapReached, Unavailable
from runner.ledger import CostState, Ledger
from runner.limits import limits
from runner.pool import Model
from runner.serving.costs import Costs, Spending, estimate_cost
from runner.serving.request import Inference
from runner.serving.service import Answer
from tests.fakes.ledgers import Clock, opened
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
            Costs(ledger, lambda: kept.remote, clock=clock),
            ledger,
            clock,
            Remote(currency="EUR", monthly_cap=cap, prices={} if price is None else {MODEL: price}),
        )
        yield kept


def a_model(model_id: str = MODEL) -> Model:
    queue = FairQueue(slots=1, limits=QueueLimits(), budget=WaitBudget(10), weight_of=lambda _: 1.0)
    return Model(ModelDefinition(model_id=model_id, backend="openai_compatible"), queue, lambda: None)


def a_request(tenant: str = "t", **fields: object) -> Inference:
    return Inference("POST", CHAT, {}, json.dumps(fields).encode(), MODEL, tenant)


def answered(status: int = 200, *, prompt: int | None = None, completion: int = 0) -> Answer:
    usage = None if prompt is None else TokenCounts(prompt_tokens=prompt, completion_tokens=completion)
    return Answer(status, {}, usage=usage)


# ---- the estimate ----


@pytest.mark.parametrize(
    ("fields", "output_tokens"),
    [
        (b"", 4096),
        (b',"max_tokens":10', 10),
        (b',"max_completion_tokens":11', 11),
        (b',"max_output_tokens":12', 12),
        (b',"max_tokens":1,"max_completion_tokens":500', 500),
        (b',"max_tokens":10,"n":3', 30),
        (b',"max_tokens":10,"best_of":4,"n":2', 40),
        (b',"max_tokens":"many"', 4096),
        (b',"max_tokens":true', 4096),
        (b',"max_tokens":0', 4096),
        (b',"max_tokens":-5', 4096),
        (b',"max_tokens":null', 4096),
    ],
)
def test_the_most_a_request_may_cost_is_its_bytes_in_and_its_limit_out(fields: bytes, output_tokens: int) -> None:
    body = b'{"a":1' + fields + b"}"
    input_tokens = (len(body) + 2) // 3
    assert estimate_cost(Price(input_per_million=1, output_per_million=1000), body) == input_tokens + 1000 * output_tokens


def test_amounts_are_rounded_up_to_a_millionth_and_not_a_millionth_further() -> None:
    assert estimate_cost(Price(input_per_million=0.1, output_per_million=0), b"x" * 27) == 1
    assert estimate_cost(Price(input_per_million=0.1, output_per_million=0), b"x" * 30) == 1
    assert estimate_cost(Price(input_per_million=0.1, output_per_million=0), b"x" * 31) == 2
    assert estimate_cost(Price(input_per_million=0, output_per_million=0), b"x") == 0


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"\xff", b'{"max_tokens":', b"[" * 5000])
def test_a_body_that_cannot_be_read_is_estimated_as_one_without_limits(body: bytes) -> None:
    assert estimate_cost(Price(input_per_million=0, output_per_million=1), body) == 4096


def test_an_absurd_limit_is_not_an_absurd_number() -> None:
    body = b'{"max_tokens":1' + b"0" * 300 + b',"n":1e300}'
    assert estimate_cost(Price(input_per_million=1, output_per_million=1e9), body) == limits().ledger.amount_micros


# ---- how a request ends ----


async def test_an_answer_with_usage_is_settled_at_what_it_cost(tmp_path: Path) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        state, reserved, counted = await kept.last_state()
        assert (state, counted) == (CostState.RESERVED, reserved)
        assert reserved > 1000
        await charge.settle(answered(prompt=7, completion=3), was_sent=True)
        assert await kept.last_state() == (CostState.SETTLED, reserved, 48)  # 17.5 + 30, rounded up
        assert await kept.spent() == 48


async def test_an_answer_may_cost_more_than_was_set_aside(tmp_path: Path) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request(max_tokens=1))
        await charge.settle(answered(prompt=1000, completion=1000), was_sent=True)
        assert await kept.spent() == 12_500


@pytest.mark.parametrize(
    ("answer", "was_sent", "state", "keeps"),
    [
        (None, False, CostState.FAILED_BEFORE_SUBMIT, False),
        (None, True, CostState.FAILED_AFTER_SUBMIT, True),
        (answered(), True, CostState.FAILED_USAGE_UNKNOWN, True),
        (answered(500), True, CostState.FAILED_USAGE_UNKNOWN, True),
        (answered(408), True, CostState.FAILED_USAGE_UNKNOWN, True),
        (answered(400), True, CostState.RELEASED, False),
        (answered(429), True, CostState.RELEASED, False),
    ],
)
async def test_a_reservation_is_kept_wherever_the_provider_may_bill(
    tmp_path: Path, answer: Answer | None, was_sent: bool, state: CostState, keeps: bool
) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        await charge.settle(answer, was_sent=was_sent)
        ended, reserved, counted = await kept.last_state()
        assert (ended, counted) == (state, reserved if keeps else 0)


async def test_usage_of_an_error_answer_is_billed(tmp_path: Path) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request())
        await charge.settle(answered(400, prompt=2), was_sent=True)
        assert await kept.last_state() == (CostState.SETTLED, (await kept.last_state())[1], 5)


async def test_a_settlement_outlives_the_caller(tmp_path: Path) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request())
        settling = asyncio.create_task(charge.settle(answered(prompt=2), was_sent=True))
        await asyncio.sleep(0)
        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
        assert await kept.spent() == 5


async def test_a_price_that_changes_meanwhile_does_not_change_what_was_agreed(tmp_path: Path) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request())
        kept.remote = dataclasses.replace(kept.remote, prices={MODEL: Price(input_per_million=99, output_per_million=99)})
        await charge.settle(answered(prompt=2), was_sent=True)
        assert await kept.spent() == 5


# ---- the cap ----


async def test_a_request_that_the_cap_does_not_cover_is_refused_with_the_numbers(tmp_path: Path) -> None:
    async with books(tmp_path, cap=0.002) as kept:
        await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        spent = await kept.spent()
        with pytest.raises(SpendingCapReached) as caught:
            await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        refusal = caught.value
        assert (refusal.status, refusal.code) == (429, "spending_cap_reached")
        assert refusal.details == {
            "cap": 0.002, "spent": spent / 1e6, "needed": spent / 1e6, "currency": "EUR", "month": "2026-11",
        }  # fmt: skip
        assert refusal.retry_after_s == 86_400
        assert await kept.spent() == spent
        kept.clock.now = MONTH_END - 60
        with pytest.raises(SpendingCapReached) as caught:
            await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        assert caught.value.retry_after_s == 60
        kept.clock.now = MONTH_END
        await kept.costs.reserve(a_model(), a_request(max_tokens=100))
        assert await kept.spent(month="2026-12") == spent


async def test_a_settlement_makes_room_under_the_cap(tmp_path: Path) -> None:
    async with books(tmp_path, cap=0.002) as kept:
        charge = await kept.costs.reserve(a_model(), a_request(max_tokens=150))
        await charge.settle(answered(prompt=1, completion=1), was_sent=True)
        await kept.costs.reserve(a_model(), a_request(max_tokens=150))


async def test_caps_are_those_of_the_settings_as_they_are_now(tmp_path: Path) -> None:
    async with books(tmp_path, cap=0) as kept:
        with pytest.raises(SpendingCapReached):
            await kept.costs.reserve(a_model(), a_request())
        kept.remote = dataclasses.replace(kept.remote, caps={"rich": 5.0})
        await kept.costs.reserve(a_model(), a_request("rich"))
        with pytest.raises(SpendingCapReached):
            await kept.costs.reserve(a_model(), a_request())
        kept.remote = dataclasses.replace(kept.remote, monthly_cap=None)
        await kept.costs.reserve(a_model(), a_request())


async def test_a_model_without_a_price_is_counted_and_bound_by_no_cap(tmp_path: Path) -> None:
    async with books(tmp_path, cap=0, price=None) as kept:
        charge = await kept.costs.reserve(a_model(), a_request(max_tokens=10**6))
        await charge.settle(answered(prompt=10**6, completion=10**6), was_sent=True)
        assert await kept.last_state() == (CostState.SETTLED, 0, 0)
        summary = await kept.costs.summary()
        assert summary.spendings == (Spending("t", 0, 0),)
        assert summary.requests == {(MODEL, CostState.SETTLED): 1}


async def test_many_at_once_stay_within_the_cap(tmp_path: Path) -> None:
    async with books(tmp_path, cap=0.01) as kept:
        asked = (kept.costs.reserve(a_model(), a_request(max_tokens=100)) for _ in range(30))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, SpendingCapReached)]
        assert 0 < len(refused) < 30
        assert await kept.spent() <= 10_000 < await kept.spent() * (31 - len(refused)) / (30 - len(refused))


# ---- the books ----


async def test_the_summary_shows_every_tenant_of_the_month(tmp_path: Path) -> None:
    async with books(tmp_path, cap=3) as kept:
        kept.remote = dataclasses.replace(kept.remote, caps={"b": 7.5})
        for tenant in ("b", "a"):
            charge = await kept.costs.reserve(a_model(), a_request(tenant))
            await charge.settle(answered(prompt=2), was_sent=True)
        kept_open = await kept.costs.reserve(a_model(), a_request("a", max_tokens=1))
        del kept_open
        summary = await kept.costs.summary()
        assert (summary.month, summary.currency, summary.unsettled) == ("2026-11", "EUR", 0)
        assert summary.spendings == (Spending("a", await kept.spent("a"), 3_000_000), Spending("b", 5, 7_500_000))
        assert summary.spendings[0].spent_micros > 5
        assert summary.requests == {(MODEL, CostState.SETTLED): 2}
        kept.clock.now = MONTH_END
        assert (await kept.costs.summary()).spendings == ()


async def test_nothing_is_spent_when_it_cannot_be_written_down(tmp_path: Path) -> None:
    async with books(tmp_path) as kept:
        await kept.ledger.close()
        with pytest.raises(Unavailable, match="write down"):
            await kept.costs.reserve(a_model(), a_request())


async def test_a_settlement_that_cannot_be_written_is_logged_and_does_not_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with books(tmp_path) as kept:
        charge = await kept.costs.reserve(a_model(), a_request())
        await kept.ledger.close()
        with caplog.at_level(logging.ERROR):
            await charge.settle(answered(prompt=2), was_sent=True)
        assert "not settled" in caplog.text
    async with opened(tmp_path, Clock(MONTH_END)) as ledger:
        await ledger.abandon_costs()
        assert await ledger.spent("t", "2026-11") > 5
