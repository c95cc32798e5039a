"""Budgets of one gateway process: what callers may use over all gateways, reserved at admission, settled at the end.

A counter is one limit or budget of an owner, of one day or month where it has one. Its amount is dealt out in Valkey: for each
gateway stands there how much it holds, which is what it used and what it may still use, and the sum is never more than the
amount. So a gateway admits from what it holds without asking anybody, and nothing it does can overspend. What it holds beyond
its use is given back every ``budget_round_s`` once another gateway wants it.

What gateways used that are gone is in PostgreSQL alone (``gateway.services.usage``). A counter that Valkey does not know begins
with that sum, and nothing is dealt out before. A Valkey that began anew (``run_id``, or no epoch) is told by each gateway what
it holds; before all that live have said so, no sum is asked for. While Valkey is away PostgreSQL deals by the same rule
(``gateway.services.shares``), once all gateways that live have told it what they hold.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec
import redis.asyncio
import redis.exceptions
from django.db import DatabaseError, InterfaceError

from core.limits import limits
from gateway import metrics
from gateway.errors import BudgetExhausted, BudgetUnknown
from gateway.services.shares import Answer, Claim, Holding, Order, read_answer
from gateway.values import BUDGETS_KEY, MILLION, BudgetKind, Caller, Counter, OwnedBudget, Price, find_window
from wire import clock

logger = logging.getLogger("muster.gateway")

_EPOCH = BUDGETS_KEY
# KEYS: the epoch, then the counters. ARGV: the fields of an Order in their order, where the claims are a JSON list.
# The rule is ``gateway.services.shares.deal``. Answers the epoch and its term, then for each counter the fields of a Holding;
# the epoch and its term alone to a gateway that has not said yet what it holds in it.
_DEAL = """
local epoch, gateway, now = KEYS[1], ARGV[1], tonumber(redis.call('TIME')[1])
local new_id, known_id, says, parts = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local number, term, claims = tonumber(ARGV[6]), tonumber(ARGV[7]), cjson.decode(ARGV[8])
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local known = redis.call('HMGET', epoch, 'id', 'run', 'term', 's:' .. gateway, 'g:' .. gateway)
local id, known_run, known_term, last, joined = unpack(known)
known_term = tonumber(known_term) or 0
if not id or known_run ~= run or known_term < term then
  known_term = math.max(known_term, term)
  redis.call('DEL', epoch)
  id, last, joined = new_id, false, false
  redis.call('HSET', epoch, 'id', id, 'run', run, 'term', tostring(known_term))
end
if id ~= known_id or number <= (tonumber(last) or 0) or (says == '0' and not joined) then return {id, tostring(known_term)} end
redis.call('HSET', epoch, 's:' .. gateway, tostring(number))
if says == '1' then redis.call('HSET', epoch, 'g:' .. gateway, '1') end
local answer = {}
local function text(figure) return string.format('%.0f', figure) end
for index, claim in ipairs(claims) do
  local key, amount, used, keep, need, least = KEYS[index + 1], claim[1], claim[2], claim[3], claim[4], claim[5]
  if redis.call('HGET', key, 'epoch') ~= id then
    redis.call('DEL', key)
    redis.call('HSET', key, 'epoch', id)
  end
  local base, others, others_used, is_wanted, wants, is_known, who = nil, 0, 0, false, false, false, {}
  local found = redis.call('HGETALL', key)
  for at = 1, #found, 2 do
    local name, value = found[at], found[at + 1]
    local kind, owner = string.sub(name, 1, 2), string.sub(name, 3)
    if name == 'base' then base = tonumber(value)
    elseif kind == 'w:' and tonumber(value) < now then redis.call('HDEL', key, name)
    elseif kind == 'w:' and owner == gateway then wants = true
    elseif kind == 'w:' then is_wanted = true
    elseif kind == 'h:' and owner == gateway then is_known = true
    elseif kind == 'h:' then others = others + tonumber(value); who[#who + 1] = owner
    elseif kind == 'u:' and owner ~= gateway then others_used = others_used + tonumber(value) end
  end
  local free, possible = 0, 0
  if base then
    free, possible = math.max(0, amount - base - others - used), math.max(0, amount - base - others_used - used)
  end
  if says == '0' and not is_known then keep = math.min(keep, free) end
  free, possible = math.max(0, free - keep), math.max(0, possible - keep)
  local give = math.min(need, free)
  if give < least then give = 0 end
  if base and need > free and least <= possible then
    redis.call('HSET', key, 'w:' .. gateway, tostring(now + 2))
    wants = true
  elseif base and least > 0 and not (is_wanted or wants) then
    give = math.max(give, math.floor(free / parts))
  end
  if wants then redis.call('HSET', epoch, 'wanted', tostring(now + 2)) end
  local held = text(used + keep + give)
  redis.call('HSET', key, 'h:' .. gateway, held, 'u:' .. gateway, text(used))
  redis.call('EXPIRE', key, claim[6])
  answer[index] = {held, text(possible), base and '1' or '0', is_wanted and '1' or '0', table.concat(who, ' ')}
end
local wanted = tonumber(redis.call('HGET', epoch, 'wanted')) or 0
return {id, tostring(known_term), answer, wanted >= now and '1' or '0'}
"""
# KEYS: the epoch, a counter. ARGV: the epoch it is for, the sum to begin with.
_BEGIN = """
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] or redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[1] then return 0 end
return redis.call('HSETNX', KEYS[2], 'base', ARGV[2])
"""
# KEYS: the epoch, a counter. ARGV: the epoch it is for, a gateway that is gone, what it used.
_ABSORB = """
if redis.call('HGET', KEYS[1], 'id') ~= ARGV[1] or redis.call('HGET', KEYS[2], 'epoch') ~= ARGV[1] then return 0 end
if redis.call('HEXISTS', KEYS[2], 'base') == 0 or redis.call('HDEL', KEYS[2], 'h:' .. ARGV[2]) == 0 then return 0 end
redis.call('HDEL', KEYS[2], 'u:' .. ARGV[2])
redis.call('HINCRBY', KEYS[2], 'base', ARGV[3])
return 1
"""
# A write, so that a Valkey that only reads does not count as there.
_PING = "return redis.call('HDEL', KEYS[1], 'nothing')"


class Spending(Protocol):
    """What PostgreSQL knows of gateways that are gone. Its functions run in a thread and raise DatabaseError."""

    def sum_before(self, counters: Collection[Counter], *, without: Collection[uuid.UUID]) -> dict[Counter, int] | None:
        """Return what all gateways but these used, None while another one lives."""

    def sum_of_gone(self, counter: Counter, gateway_id: uuid.UUID) -> int | None:
        """Return what a gateway used that is gone and whose requests are all closed, None when it is not."""


_UNITS = {
    BudgetKind.ALL_REQUESTS_PER_MINUTE: "requests per minute",
    BudgetKind.TOKENS_PER_MINUTE: "tokens per minute",
    BudgetKind.CONCURRENT_REQUESTS: "requests at a time",
    BudgetKind.TOKENS_PER_DAY: "tokens per day",
    BudgetKind.TOKENS_PER_MONTH: "tokens per month",
    BudgetKind.COST_PER_DAY: "a day",
    BudgetKind.COST_PER_MONTH: "a month",
}
_MINUTE = (BudgetKind.ALL_REQUESTS_PER_MINUTE, BudgetKind.TOKENS_PER_MINUTE)


@dataclass(slots=True, eq=False)
class _Entry:
    """What a request draws on a limit of a minute. ``at``: clock.monotonic() seconds."""

    at: float
    amount: int
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Share:
    """What this gateway has of a counter.

    ``cap`` is what it holds: ``used``, which includes what is reserved, never passes it but where an engine counts more.
    """

    counter: Counter
    label: str
    amount: int
    cap: int = 0
    used: int = 0
    booked: int = 0
    """Since the last round."""
    told: int = -1
    """What it had used when a dealer was last told."""
    open: int = 0
    """Reservations that are not settled."""
    possible: int = 0
    """How much more it could have got at ``asked_at`` if all others had given back."""
    asked_at: float = -math.inf
    touched_at: float = 0.0
    is_begun: bool = False
    is_wanted: bool = False
    entries: deque[_Entry] = field(default_factory=deque)

    def find_slack(self, now: float) -> int:
        """Return how much it may use without asking, at ``now`` (clock.monotonic())."""
        if self.entries:
            start = now - limits().gateway.rate_window_s
            while self.entries and self.entries[0].at <= start:
                entry = self.entries.popleft()
                entry.is_over = True
                self.used -= entry.amount
        return min(self.cap, self.amount) - self.used

    def book(self, amount: int, now: float) -> _Entry | None:
        self.used += amount
        self.booked += amount
        self.open += 1
        if self.counter.kind not in _MINUTE:
            return None
        entry = _Entry(now, amount)
        self.entries.append(entry)
        return entry

    def settle(self, reserved: int, actual: int, entry: _Entry | None) -> None:
        self.open -= 1
        if entry is None:
            self.used += actual - reserved
        elif not entry.is_over:
            entry.amount += actual - reserved
            self.used += actual - reserved


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request holds from ``book`` to ``settle``. ``tokens``, ``micros``: the most it may use and cost."""

    tokens: int
    micros: int
    prices: Mapping[str, Price]
    wanted: Sequence[tuple[Share, int]]
    drawn: Sequence[tuple[Share, int, _Entry | None]] = ()

    def find_lacking(self, now: float) -> list[tuple[Share, int]]:
        """Return the shares that have no room for it, at ``now`` (clock.monotonic()), and how much it wants of them."""
        return [one for one in self.wanted if not one[0].amount or (one[1] and one[1] > one[0].find_slack(now))]

    def book(self, now: float) -> None:
        """Take what it wants; nothing may be lacking."""
        self.drawn = [(share, amount, share.book(amount, now)) for share, amount in self.wanted]

    def settle(
        self,
        *,
        model: str = "",
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        cached_tokens: int = 0,
        is_estimated: bool = False,
    ) -> None:
        """Give back what it did not use; doing so again changes nothing. An estimate is never more than was reserved."""
        tokens = prompt_tokens + completion_tokens
        micros = self.prices.get(model, Price()).cost(
            prompt_tokens=prompt_tokens, completion_tokens=completion_tokens, cached_tokens=cached_tokens
        )
        if is_estimated:
            tokens, micros = min(tokens, self.tokens), min(micros, self.micros)
        drawn, self.drawn = self.drawn, ()
        for share, reserved, entry in drawn:
            share.settle(reserved, find_amount(share.counter.kind, tokens=tokens, micros=micros, requests=0), entry)


def find_amount(kind: BudgetKind, *, tokens: int, micros: int, requests: int = 1) -> int:
    """Return what a request draws on a counter of this kind; one that has ended (``requests`` 0) is none at a time."""
    if kind is BudgetKind.CONCURRENT_REQUESTS:
        return requests
    if kind is BudgetKind.ALL_REQUESTS_PER_MINUTE:
        return 1
    return micros if kind.is_cost else tokens


class Valkey(Protocol):
    """What is used of redis-py."""

    def eval(self, script: str, numkeys: int, *keys_and_args: str) -> Awaitable[Any]: ...  # Any: as in redis-py
    def hkeys(self, name: str) -> Awaitable[list[bytes]]: ...


class Dealer(Protocol):
    """Who deals out the counters (``gateway.services.shares``)."""

    async def deal(self, order: Order) -> Answer: ...
    async def begin(self, *, epoch_id: str, name: str, base: int) -> None: ...
    async def absorb(self, *, epoch_id: str, name: str, gateway: str, used: int) -> None: ...
    async def list_joined(self) -> list[str]: ...


_AWAY = (redis.exceptions.RedisError, DatabaseError, InterfaceError, OSError, TimeoutError)


class ValkeyDealer:
    """Valkey as the dealer."""

    def __init__(self, valkey: Valkey) -> None:
        self._valkey = valkey

    async def deal(self, order: Order) -> Answer:
        said = await self._valkey.eval(
            _DEAL, 1 + len(order.claims), _EPOCH, *order.claims, order.gateway, order.new_id, order.known_id, str(order.says),
            repr(order.parts), str(order.number), str(order.term), msgspec.json.encode(list(order.claims.values())).decode(),
        )  # fmt: skip
        return read_answer(said)

    async def begin(self, *, epoch_id: str, name: str, base: int) -> None:
        await self._valkey.eval(_BEGIN, 2, _EPOCH, name, epoch_id, str(base))

    async def absorb(self, *, epoch_id: str, name: str, gateway: str, used: int) -> None:
        await self._valkey.eval(_ABSORB, 2, _EPOCH, name, epoch_id, gateway, str(used))

    async def list_joined(self) -> list[str]:
        return [name[2:].decode() for name in await self._valkey.hkeys(_EPOCH) if name.startswith(b"g:")]

    async def ping(self) -> None:
        await self._valkey.eval(_PING, 1, _EPOCH)


class Terms(Protocol):
    """PostgreSQL as the dealer (``gateway.services.shares.DealerTable``). They run in a thread and raise DatabaseError."""

    def read_term(self) -> tuple[int, bool]: ...
    def deal(self, order: Order, *, now: int, reaches: bool, living: Collection[str]) -> Answer: ...
    def begin(self, *, epoch_id: str, name: str, base: int) -> None: ...
    def absorb(self, *, epoch_id: str, name: str, gateway: str, used: int) -> None: ...
    def list_joined(self) -> list[str]: ...


class TermDealer:
    """PostgreSQL as the dealer, for a gateway that reaches Valkey or not (``reaches``)."""

    reaches = False

    def __init__(self, terms: Terms, in_thread: Callable[..., Awaitable[Any]], living: Callable[[], Collection[str]]) -> None:
        self._terms, self._in_thread, self._living = terms, in_thread, living

    async def deal(self, order: Order) -> Answer:
        return cast(
            "Answer",
            await self._in_thread(
                self._terms.deal, order, now=int(clock.unix_s()), reaches=self.reaches, living=self._living()
            ),
        )  # fmt: skip

    async def begin(self, *, epoch_id: str, name: str, base: int) -> None:
        await self._in_thread(self._terms.begin, epoch_id=epoch_id, name=name, base=base)

    async def absorb(self, *, epoch_id: str, name: str, gateway: str, used: int) -> None:
        await self._in_thread(self._terms.absorb, epoch_id=epoch_id, name=name, gateway=gateway, used=used)

    async def list_joined(self) -> list[str]:
        return cast("list[str]", await self._in_thread(self._terms.list_joined))

    async def read_term(self) -> tuple[int, bool]:
        return cast("tuple[int, bool]", await self._in_thread(self._terms.read_term))


class Budgets:
    """All shares of one gateway process. Everything is called on the event loop; ``run`` deals with the dealers.

    ``find_others``: the ids of the other gateways that are alive. ``in_thread``: runs a function of ``spending`` or ``terms``.
    """

    def __init__(
        self,
        *,
        gateway_id: uuid.UUID,
        valkey: Valkey,
        spending: Spending,
        terms: Terms,
        in_thread: Callable[..., Awaitable[Any]],  # Any: of whatever function
        find_others: Callable[[], Collection[uuid.UUID]],
        currency: str,
    ) -> None:
        self._gateway = str(gateway_id)
        self._gateway_id = gateway_id
        self._spending, self._in_thread = spending, in_thread
        self._find_others, self._currency = find_others, currency
        self._valkey = ValkeyDealer(valkey)
        self._database = TermDealer(terms, in_thread, lambda: {self._gateway, *map(str, find_others())})
        self._dealer: ValkeyDealer | TermDealer = self._valkey
        self._limits = limits().gateway
        self._shares: dict[Counter, Share] = {}
        self._needs: dict[Share, list[int]] = {}
        self._asked: asyncio.Future[None] | None = None
        """Done when the next round is over."""
        self._wake = asyncio.Event()
        self._waiting = 0
        self._epoch = ""
        self._term: int | None = None
        """The newest that the gateway knows of, None before it asked."""
        self._term_read_at = self._pinged_at = -math.inf
        self._full_at = -math.inf
        """When the dealer is told of all shares again, and not only of those that changed (clock.monotonic())."""
        self._is_wanted = False
        """Whether a gateway wants more of something, so that all shares are told of."""
        self._failures = 0
        """Rounds since Valkey last answered."""
        self._orders = itertools.count(1)
        self._good_until = -math.inf
        """When this gateway may be taken for gone (clock.monotonic()), so that its shares belong to others."""
        self._looked_at: dict[tuple[Counter, str], float] = {}

    # of a request

    def draft(self, caller: Caller, *, prompt_tokens: int, completion_tokens: int, prices: Mapping[str, Price]) -> Reservation:
        """Return what a request would reserve of the hard budgets of its caller; nothing is taken yet."""
        tokens = prompt_tokens + completion_tokens
        costs = [price.cost(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens) for price in prices.values()]
        micros = max(costs, default=0)
        wanted = [
            (self._find_share(owned), find_amount(owned.budget.kind, tokens=tokens, micros=micros)) for owned in caller.budgets
        ]
        return Reservation(tokens, micros, prices, wanted)

    def must_ask(self, reservation: Reservation, now: float) -> bool:
        """Whether a dealer is asked before it is booked: something is lacking, or the shares may belong to others by now."""
        return now > self._good_until or bool(reservation.find_lacking(now))

    async def reserve(self, reservation: Reservation) -> None:
        """Book a reservation: of every budget or of none.

        Raises BudgetExhausted (429), and BudgetUnknown (503) while nobody can say.
        """
        for tries in itertools.count():
            now = clock.monotonic()
            lacking = reservation.find_lacking(now)
            if not lacking and now <= self._good_until:
                reservation.book(now)
                return
            for share, amount in lacking:
                self._require_possible(share, amount, now)
            if tries >= self._limits.budget_tries:
                self._give_up(lacking, tries)
            await self._ask(lacking, is_again=tries > 0)

    def _give_up(self, lacking: Sequence[tuple[Share, int]], tries: int) -> None:
        """Raise BudgetExhausted where gateways used the budget up, or after twice as many tries where they hold on to it.

        BudgetUnknown after as many where nobody said so.
        """
        recent = clock.monotonic() - 2 * self._limits.budget_round_s
        is_last = tries >= 2 * self._limits.budget_tries
        if lacking and all(share.is_begun and share.asked_at >= recent for share, _ in lacking):
            # What another gateway holds and does not use comes back with its next round, later where its dealer changes.
            if is_last or any(amount > share.possible for share, amount in lacking):
                raise self._say_exhausted(*lacking[0])
        elif is_last:
            raise self._say_unknown(lacking)

    def _find_share(self, owned: OwnedBudget) -> Share:
        counter = Counter(owned.owner, owned.budget.kind, find_window(owned.budget.kind, clock.now()))
        share = self._shares.get(counter)
        if share is None:
            share = self._shares[counter] = Share(counter, owned.label, owned.budget.amount)
        share.amount, share.label, share.touched_at = owned.budget.amount, owned.label, clock.monotonic()
        return share

    def _require_possible(self, share: Share, amount: int, now: float) -> None:
        if amount > share.amount or not share.amount:
            raise self._say_exhausted(share, amount)
        if (
            share.is_begun
            and now - share.asked_at < self._limits.budget_round_s
            and amount > (share.find_slack(now) + share.possible)
        ):
            raise self._say_exhausted(share, amount)

    async def _ask(self, lacking: Sequence[tuple[Share, int]], *, is_again: bool) -> None:
        if self._waiting >= self._limits.budget_waiting:
            raise self._say_unknown(lacking)
        self._waiting += 1
        try:
            if is_again:  # the others give back what they do not use
                await asyncio.sleep(self._limits.budget_round_s * 1.25)
            for share, amount in lacking:
                self._needs.setdefault(share, []).append(amount)
            if self._asked is None:
                self._asked = asyncio.get_running_loop().create_future()
            self._wake.set()
            with suppress(TimeoutError):
                async with asyncio.timeout(4 * self._limits.budget_valkey_s):
                    await asyncio.shield(self._asked)
        finally:
            self._waiting -= 1

    def _say_unknown(self, lacking: Iterable[tuple[Share, int]]) -> BudgetUnknown:
        for kind in {share.counter.kind for share, _ in lacking}:
            metrics.BUDGET_REFUSALS.labels(kind, "unknown").inc()
        return BudgetUnknown(retry_after_s=2)

    def _say_exhausted(self, share: Share, amount: int) -> BudgetExhausted:
        kind, label = share.counter.kind, share.label
        metrics.BUDGET_REFUSALS.labels(kind, "exhausted").inc()
        has = self._print(kind, share.amount)
        window_s = self._limits.rate_window_s
        wait_s, when = 1.0, "as soon as one of them ends"
        if share.counter.window.ends_at is not None:
            wait_s = max(1.0, (share.counter.window.ends_at - clock.now()).total_seconds())
            when = f"at {share.counter.window.ends_at:%Y-%m-%d %H:%M} UTC"
        elif kind in _MINUTE:
            oldest = share.entries[0].at if share.entries else clock.monotonic() - window_s
            wait_s = max(1.0, min(window_s, oldest + window_s - clock.monotonic()))
            when = f"in {math.ceil(wait_s)} s"
        if not share.amount:
            message = f"{label[0].upper()}{label[1:]} may use nothing: its budget is {has}. An operator can raise it."
        elif amount > share.amount:
            message = (
                f"The request may use up to {self._print(kind, amount)} with its prompt and max_tokens, and {label} has {has} "
                "in all; ask for a smaller max_tokens."
            )
        else:
            message = (
                f"The budget of {label} is used up: it has {has}, and the request may use {self._print(kind, amount)}. "
                f"It is free again {when}."
            )
        return BudgetExhausted(message, retry_after_s=wait_s)

    def _print(self, kind: BudgetKind, amount: int) -> str:
        figure = f"{amount / MILLION:,.6f}".rstrip("0").rstrip(".") + f" {self._currency}" if kind.is_cost else f"{amount:,}"
        return f"{figure} {_UNITS[kind]}"

    # with the dealers

    async def run(self) -> None:
        """Deal with Valkey or PostgreSQL for as long as the process lives."""
        held_at, task = -math.inf, asyncio.current_task()
        # A cancellation that comes while redis-py sends a command is lost in Python 3.11 (asyncio.wait_for).
        while task is None or not task.cancelling():
            # Without a share too: nothing is dealt out of a new epoch before all have said that they hold nothing.
            is_calm = not self._shares and not self._failures and self._dealer is self._valkey
            pause_s = self._limits.budget_hello_s if is_calm else self._limits.budget_round_s
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, held_at + pause_s - clock.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            is_due = clock.monotonic() >= held_at + pause_s
            if is_due:
                held_at = clock.monotonic()
            if is_due or not self._failures or self._dealer is self._database:  # a Valkey that is away is asked once a round
                await self.hold_round(is_due=is_due)
            asked, self._asked = self._asked, None
            if asked is not None and not asked.done():
                asked.set_result(None)
            if self._dealer is self._database:
                await self._ping()

    async def hold_round(self, *, is_due: bool = True) -> None:
        """Tell the dealer what was used, get what is needed, give back what others want."""
        needs, self._needs = self._needs, {}
        if is_due:
            self._forget_past()
        is_full = is_due and (self._is_wanted or clock.monotonic() >= self._full_at)
        shares = [
            one
            for one in self._shares.values()
            if is_full or one.is_wanted or one in needs or (is_due and one.told != one.used)
        ]
        if is_full:
            self._full_at = clock.monotonic() + self._limits.budget_hello_s
        try:
            await self._look_at_term(is_due=is_due)
            others = await self._find_dealer_and_deal(shares, needs)
            if others is None:
                self._full_at = -math.inf
                return
            if is_due and self._is_wanted and not is_full:  # of what is told of no more somebody wants some
                rest = [one for one in self._shares.values() if one not in shares]
                others += await self._find_dealer_and_deal(rest, {}) or []
            self._good_until = clock.monotonic() + self._limits.dead_s / 2
            await self._look_back(shares, needs, others)
        except _AWAY as error:
            metrics.BUDGET_ERRORS.labels("postgresql").inc()
            logger.warning("budgets.postgresql_away error=%s; the gateway uses what it holds", type(error).__name__)
            self._full_at = -math.inf
            return
        metrics.BUDGETS_HELD.set(len(self._shares))
        if is_due and any(share.is_wanted and share.cap > share.used for share in shares):
            self._wake.set()

    async def _look_at_term(self, *, is_due: bool) -> None:
        """Ask PostgreSQL now and then whether a term is open, because other gateways do not reach Valkey."""
        now = clock.monotonic()
        is_asked = self._term is None or (is_due and now >= self._term_read_at + self._limits.budget_hello_s)
        if self._dealer is self._database or not is_asked:
            return
        async with asyncio.timeout(self._limits.budget_database_s):
            term, is_open = await self._database.read_term()
        self._term_read_at, self._term = now, max(term, self._term or 0)
        if is_open and term == self._term:
            self._leave_valkey(term)

    def _leave_valkey(self, term: int) -> None:
        self._dealer, self._epoch, self._term = self._database, "", term
        self._database.reaches, self._pinged_at = not self._failures, clock.monotonic()
        logger.info("budgets.dealt_by_postgresql term=%d", term)

    async def _find_dealer_and_deal(
        self, shares: Sequence[Share], needs: dict[Share, list[int]]
    ) -> list[tuple[Share, str]] | None:
        """Deal with Valkey, and after it was away for two rounds with PostgreSQL; None = with nobody this time."""
        if self._dealer is self._valkey:
            try:
                async with asyncio.timeout(self._limits.budget_valkey_s):
                    others = await self._deal(shares, needs)
            except _AWAY as error:
                self._note_away(error)
                if self._failures < 2:
                    return None
                self._leave_valkey((self._term or 0) + 1)
            else:
                self._note_there()
                return others
        async with asyncio.timeout(self._limits.budget_database_s):
            return await self._deal(shares, needs)

    def _note_away(self, error: Exception) -> None:
        metrics.BUDGET_ERRORS.labels("valkey").inc()
        if not self._failures:
            metrics.VALKEY_AWAY_SINCE.set(clock.unix_s())
            logger.warning("budgets.valkey_away error=%s; each gateway uses what it holds", type(error).__name__)
        self._failures += 1

    def _note_there(self) -> None:
        if self._failures:
            metrics.VALKEY_AWAY_SINCE.set(0)
            logger.info("budgets.valkey_back")
        self._failures = 0

    async def _ping(self) -> None:
        """Find out now and then whether Valkey is there again."""
        if clock.monotonic() < self._pinged_at + self._limits.budget_hello_s:
            return
        try:
            async with asyncio.timeout(self._limits.budget_valkey_s):
                await self._valkey.ping()
        except _AWAY as error:
            self._note_away(error)
        else:
            self._note_there()
        self._database.reaches, self._pinged_at = not self._failures, clock.monotonic()

    async def _deal(self, shares: Sequence[Share], needs: dict[Share, list[int]]) -> list[tuple[Share, str]]:
        """Do one round with the dealer; return which gateways hold something of which counter."""
        answer = await self._send(shares, needs, says=0)
        if answer.is_closed:
            self._dealer, self._epoch, self._failures = self._valkey, "", 0
            self._wake.set()
            return []
        if answer.holdings is not None:
            return self._take(shares, answer.holdings)
        self._epoch = answer.epoch
        shares = list(self._shares.values())
        at_once = self._limits.budget_counters
        parts = [shares[start : start + at_once] for start in range(0, len(shares), at_once)] or [[]]
        others = []
        for number, part in enumerate(parts, 1):
            said = await self._send(part, needs, says=1 if number == len(parts) else 2)
            others += self._take(part, said.holdings or ())
        return others

    async def _send(self, shares: Sequence[Share], needs: dict[Share, list[int]], *, says: int) -> Answer:
        now, claims, percent = clock.monotonic(), {}, self._limits.budget_share_percent
        for share in shares:
            slack = max(0, share.find_slack(now))
            keep = min(slack, share.booked) if share.is_wanted else slack
            # What is said to be held may be used meanwhile, and nothing more: no answer may mean that it was heard.
            share.cap, share.booked, share.told = share.used + keep, 0, share.used
            wanted = needs.get(share, [])
            need, least = max(0, sum(wanted) - keep), max(1, min(wanted, default=1) - keep)
            if self._is_idle(share, now):
                share.cap = keep = least = 0
            claims[share.counter.key] = Claim(share.amount, share.used, keep, need, least, self._find_ttl(share))
        order = Order(
            gateway=self._gateway,
            new_id=uuid.uuid4().hex,
            known_id=self._epoch,
            says=says,
            parts=max(1.0, 100 / percent) if percent else 1 + len(self._find_others()),
            number=next(self._orders),
            term=self._term or 0,
            claims=claims,
        )
        answer = await self._dealer.deal(order)
        self._term, self._is_wanted = max(order.term, answer.term), answer.is_wanted
        return answer

    def _take(self, shares: Sequence[Share], holdings: Sequence[Holding]) -> list[tuple[Share, str]]:
        """Take what the dealer says of these shares; nothing changes where another epoch has begun meanwhile."""
        others, now = [], clock.monotonic()
        for share, one in zip(shares, holdings, strict=False):
            # Whatever somebody wrote into Valkey: no share is larger than the whole.
            share.cap, share.possible = min(one.held, max(share.amount, share.used)), one.possible
            share.is_begun, share.is_wanted, share.asked_at = one.is_begun, one.is_wanted, now
            others += [(share, name) for name in one.others]
        return others

    async def _look_back(self, shares: Sequence[Share], needs: dict[Share, list[int]], others: list[tuple[Share, str]]) -> None:
        dealer, now = self._dealer, clock.monotonic()
        new = [share for share in shares if not share.is_begun]
        if new:
            joined = [uuid.UUID(name) for name in await dealer.list_joined()]
            sums = await self._in_thread(self._spending.sum_before, [share.counter for share in new], without=joined)
            for share in new if sums is not None else ():
                await dealer.begin(epoch_id=self._epoch, name=share.counter.key, base=sums[share.counter])
            if sums is not None:
                async with asyncio.timeout(self._limits.budget_database_s):
                    await self._deal(new, needs)
        alive = {str(one) for one in self._find_others()}
        for share, name in others:
            look = (share.counter, name)
            if name in alive or not share.is_begun or now - self._looked_at.get(look, -math.inf) < self._limits.sweep_s:
                continue
            self._looked_at[look] = now
            total = await self._in_thread(self._spending.sum_of_gone, share.counter, uuid.UUID(name))
            if total is not None:
                await dealer.absorb(epoch_id=self._epoch, name=share.counter.key, gateway=name, used=total)
                del self._looked_at[look]

    def _is_idle(self, share: Share, now: float) -> bool:
        return not (share.open or share.used) and now - share.touched_at > self._limits.budget_idle_s

    def _forget_past(self) -> None:
        now, moment = clock.monotonic(), clock.now()
        for counter, share in list(self._shares.items()):
            ends_at = counter.window.ends_at
            is_past = ends_at is not None and ends_at < moment and not share.open
            if is_past or (self._is_idle(share, now) and share.cap == 0):
                del self._shares[counter]

    def _find_ttl(self, share: Share) -> int:
        ends_at = share.counter.window.ends_at
        left_s = (ends_at - clock.now()).total_seconds() if ends_at is not None else 0.0
        return int(max(0.0, left_s) + self._limits.budget_kept_s)
