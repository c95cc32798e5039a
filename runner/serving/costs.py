"""What requests to remote models cost: set aside before they leave, put right when they are over, within a monthly cap.

Amounts are whole millionths of a unit of the settings' currency, and are rounded up. A price per million tokens is thereby
also the price of one token in millionths.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from fractions import Fraction

import msgspec

from runner.definitions.settings import Price, Remote
from runner.errors import SpendingCapReached, Unavailable
from runner.ledger.costs import CostState
from runner.ledger.database import LedgerError
from runner.ledger.ledger import Ledger
from runner.limits import limits
from runner.pool.models import Model
from runner.serving.request import Answer, Inference
from wire import clock
from wire.bridge import TokenCounts
from wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

MICROS = 1_000_000

NOT_BILLED = frozenset({400, 401, 402, 403, 404, 405, 413, 415, 422, 429})
"""Answers with which a provider turns a request away before it has generated anything."""


class _Limits(msgspec.Struct):
    """The fields of a body that bound its answer. ``object``: a wrong type is the provider's to complain about."""

    max_tokens: object = None
    max_completion_tokens: object = None
    max_output_tokens: object = None
    n: object = None
    best_of: object = None


_limits_decoder = msgspec.json.Decoder(_Limits)


@dataclass(frozen=True, slots=True)
class Spending:
    """What one tenant spent in a month. ``cap_micros`` None = no cap; ``spent_micros`` holds what is still set aside too."""

    tenant: str
    spent_micros: int
    cap_micros: int | None


@dataclass(frozen=True, slots=True)
class CostSummary:
    """The accounts of this month (UTC). ``requests``: how those that ended since the start did end, by model."""

    currency: str
    spendings: tuple[Spending, ...]
    requests: dict[tuple[str, CostState], int]


@dataclass(frozen=True, slots=True)
class Charge:
    """Money set aside for one request. ``price`` is the one it was set aside with; None = the model has none."""

    cost_id: str
    model_id: str
    price: Price | None


class Costs:
    """Keeps the accounts. ``remote`` gives the settings as they are now, ``clock`` is in Unix seconds."""

    def __init__(self, ledger: Ledger, remote: Callable[[], Remote], *, clock: Callable[[], float] = clock.unix_s) -> None:
        self._ledger = ledger
        self._remote = remote
        self._clock = clock
        self._ended: dict[tuple[str, CostState], int] = {}

    async def reserve(self, model: Model, request: Inference) -> Charge:
        """Set aside the most that a request may cost. A model without a price costs nothing, and no cap binds it.

        Raises SpendingCapReached; Unavailable when the ledger cannot be written, for then nothing may be spent.
        """
        remote, model_id, tenant = self._remote(), model.model_id, request.tenant
        month, price = self._month(), remote.prices.get(model_id)
        amount = estimate_cost(price, request.body)
        cap = None if price is None else _cap_micros(remote, tenant)
        try:
            cost_id = await self._ledger.reserve_cost(
                tenant=tenant, model_id=model_id, month=month, amount_micros=amount, cap_micros=cap
            )
            if cost_id is None:
                spent = await self._ledger.spent(tenant, month)
                raise self._refusal(remote, cap_micros=cap or 0, spent=spent, amount=amount, month=month)
        except LedgerError as error:
            log.error("cost was not reserved model=%s: %s", model_id, error)  # noqa: TRY400  # text for the owner
            raise Unavailable(
                "This node cannot write down what a request costs, so none leaves it.", retry_after_s=30
            ) from None
        return Charge(cost_id, model_id, price)

    async def settle(self, charge: Charge, answer: Answer | None, *, was_sent: bool) -> None:
        """Write down how a request ended: None = no answer came. Of a ledger that refuses, the charge goes on counting."""
        state, usage = _judge(answer, was_sent=was_sent)
        amount = None if usage is None else _cost(charge.price, usage.prompt_tokens, usage.completion_tokens)
        model_id, cost_id = charge.model_id, charge.cost_id
        try:
            # The entry is submitted before this first waits, and the ledger carries out what was submitted: a caller that is
            # cancelled here loses nothing.
            await self._ledger.settle_cost(cost_id, state=state, amount_micros=amount)
        except LedgerError as error:
            log.error("cost was not settled model=%s cost=%s state=%s: %s", model_id, cost_id, state, error)  # noqa: TRY400
            return
        self._ended[model_id, state] = self._ended.get((model_id, state), 0) + 1

    async def summary(self) -> CostSummary:
        """Return this month's accounts, tenants by name. Raises LedgerError."""
        remote = self._remote()
        spendings = await self._ledger.spendings(self._month())
        return CostSummary(
            currency=remote.currency,
            spendings=tuple(Spending(tenant, spent, _cap_micros(remote, tenant)) for tenant, spent in spendings),
            requests=dict(self._ended),
        )

    def _month(self) -> str:
        return datetime.fromtimestamp(self._clock(), UTC).strftime("%Y-%m")

    def _refusal(self, remote: Remote, *, cap_micros: int, spent: int, amount: int, month: str) -> SpendingCapReached:
        unit = remote.currency
        left = max(0, cap_micros - spent)
        return SpendingCapReached(
            f"This request may cost {amount / MICROS:.6f} {unit}, and {left / MICROS:.6f} {unit} of the monthly cap of"
            f" {cap_micros / MICROS:.2f} {unit} are left: limit max_tokens, or ask the owner of the node for a higher cap.",
            retry_after_s=min(limits().serving.cap_retry_s, _seconds_left(self._clock())),
            details={
                "cap": cap_micros / MICROS,
                "spent": spent / MICROS,
                "needed": amount / MICROS,
                "currency": unit,
                "month": month,
            },
        )


def estimate_cost(price: Price | None, body: bytes) -> int:
    """Return the most that a request with this body is expected to cost, in millionths; 0 without a price.

    Input: one token for three bytes of the body. Output: what the body allows, for each of the answers it asks for. A
    picture named by its address instead of its bytes is not counted.
    """
    if price is None:
        return 0
    output_tokens, answers = _read_limits(body)
    # Three bytes per token are fewer than most languages have: an estimate is rather too high than too low.
    return _cost(price, -(-len(body) // 3), output_tokens * answers)


def _read_limits(body: bytes) -> tuple[int, int]:
    try:
        given = _limits_decoder.decode(body)
    except UNREADABLE:
        given = _Limits()
    tokens = [_count(value) for value in (given.max_tokens, given.max_completion_tokens, given.max_output_tokens)]
    most = [value for value in tokens if value is not None]
    answers = max(_count(given.n) or 1, _count(given.best_of) or 1)
    return (max(most) if most else limits().serving.assumed_output_tokens), answers


def _count(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return None
    return math.ceil(min(value, limits().serving.output_tokens))


def _cost(price: Price | None, input_tokens: int, output_tokens: int) -> int:
    if price is None:
        return 0
    # Fractions: sums of floats could round one millionth the wrong way.
    exact = Fraction(str(price.input_per_million)) * max(0, input_tokens)
    exact += Fraction(str(price.output_per_million)) * max(0, output_tokens)
    return min(math.ceil(exact), limits().ledger.amount_micros)


def _judge(answer: Answer | None, *, was_sent: bool) -> tuple[CostState, TokenCounts | None]:
    if answer is None:
        return (CostState.FAILED_AFTER_SUBMIT if was_sent else CostState.FAILED_BEFORE_SUBMIT), None
    if answer.usage is not None:
        return CostState.SETTLED, answer.usage
    return (CostState.RELEASED if answer.status in NOT_BILLED else CostState.FAILED_USAGE_UNKNOWN), None


def _cap_micros(remote: Remote, tenant: str) -> int | None:
    cap = remote.cap_for(tenant)
    return None if cap is None else math.floor(Fraction(str(cap)) * MICROS)


def _seconds_left(now: float) -> float:
    today = datetime.fromtimestamp(now, UTC)
    year, month = (today.year + 1, 1) if today.month == 12 else (today.year, today.month + 1)
    return datetime(year, month, 1, tzinfo=UTC).timestamp() - now
