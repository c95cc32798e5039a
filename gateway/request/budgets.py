"""Budgets of one gateway process: what callers may use over all gateways, reserved at admission, settled at the end.

A counter is one limit or budget of an owner, of one day or month where it has one. Its amount is dealt out in Valkey: for each
gateway stands there how much it holds, which is what it used and what it may still use, and the sum is never more than the
amount. So a gateway admits from what it holds without asking anybody, and nothing it does can overspend. What it holds beyond
its use is given back every ``budget_round_s`` once another gateway wants it.

What gateways used that are gone is in PostgreSQL alone (``gateway.services.usage``). A counter that Valkey does not know begins
with that sum, and nothing is dealt out before. A Valkey that began anew (``run_id``, or no epoch) is told by each gateway what
it holds; before all that live have said so, no sum is asked for. While Valkey is away each admits from what it holds.
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
from gateway.errors import BudgetExhausted, BudgetUnknown
from gateway.values import MILLION, BudgetKind, Caller, Counter, OwnedBudget, Price, find_window
from wire import clock

logger = logging.getLogger("muster.gateway")

_EPOCH = "{muster.budgets}"
# KEYS: the epoch, then the counters. ARGV: gateway, id of an epoch that begins now, the epoch it knows, whether it says what it
# holds (1 = with this the last of it, 2 = some of it), how many gateways share, and a JSON list of [amount, used, what it keeps
# above that, need, smallest need (0 = it gives all back), seconds to live, 1 = there is no sum to begin with].
# Answers the epoch alone to a gateway that has not said yet what it holds in it; else for each counter what it holds now, what
# it could have more if all others gave back, whether the sum to begin with is known, whether another one wants some, and who
# holds some too.
_DEAL = """
local epoch, gateway, now = KEYS[1], ARGV[1], tonumber(redis.call('TIME')[1])
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
local id = redis.call('HGET', epoch, 'id')
if not id or redis.call('HGET', epoch, 'run') ~= run then
  redis.call('DEL', epoch)
  id = ARGV[2]
  redis.call('HSET', epoch, 'id', id, 'run', run)
end
if id ~= ARGV[3] or (ARGV[4] == '0' and redis.call('HEXISTS', epoch, 'g:' .. gateway) == 0) then return {id} end
if ARGV[4] == '1' then redis.call('HSET', epoch, 'g:' .. gateway, '1') end
local answer, share = {id}, tonumber(ARGV[5])
local function text(number) return string.format('%.0f', number) end
for index, asked in ipairs(cjson.decode(ARGV[6])) do
  local key, amount, used, floor, need, least = KEYS[index + 1], asked[1], asked[2], asked[2] + asked[3], asked[4], asked[5]
  if redis.call('HGET', key, 'epoch') ~= id then
    redis.call('DEL', key)
    redis.call('HSET', key, 'epoch', id)
    if asked[7] == 1 then redis.call('HSET', key, 'base', '0') end
  end
  local base, others, others_used, is_wanted, wants, who = nil, 0, 0, false, false, {}
  local found = redis.call('HGETALL', key)
  for at = 1, #found, 2 do
    local name, value = found[at], found[at + 1]
    local kind, owner = string.sub(name, 1, 2), string.sub(name, 3)
    if name == 'base' then base = tonumber(value)
    elseif kind == 'w:' and tonumber(value) < now then redis.call('HDEL', key, name)
    elseif kind == 'w:' and owner == gateway then wants = true
    elseif kind == 'w:' then is_wanted = true
    elseif kind == 'h:' and owner ~= gateway then others = others + tonumber(value); who[#who + 1] = owner
    elseif kind == 'u:' and owner ~= gateway then others_used = others_used + tonumber(value) end
  end
  local give, possible = 0, 0
  if base then
    local free = math.max(0, amount - base - others - floor)
    possible = math.max(0, amount - base - others_used - floor)
    give = math.min(need, free)
    if give < least then give = 0 end
    if need > free and least <= possible then
      redis.call('HSET', key, 'w:' .. gateway, tostring(now + 2))
    elseif least > 0 and not (is_wanted or wants) then
      give = math.max(give, math.floor(free / share))
    end
  end
  redis.call('HSET', key, 'h:' .. gateway, text(floor + give), 'u:' .. gateway, text(used))
  redis.call('EXPIRE', key, asked[6])
  local flags = {base and '1' or '0', is_wanted and '1' or '0'}
  answer[#answer + 1] = {text(floor + give), text(possible), flags[1], flags[2], table.concat(who, ' ')}
end
return answer
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


class Spending(Protocol):
    """What PostgreSQL knows of gateways that are gone. Its functions run in a thread and raise DatabaseError."""

    def sum_before(self, counter: Counter, *, without: Collection[uuid.UUID]) -> int | None:
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
        self, *, model: str = "", prompt_tokens: int = 0, completion_tokens: int = 0, is_estimated: bool = False
    ) -> None:
        """Give back what it did not use; doing so again changes nothing. An estimate is never more than was reserved."""
        tokens = prompt_tokens + completion_tokens
        micros = self.prices.get(model, Price()).cost(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
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


def _name_key(share: Share) -> str:
    counter = share.counter
    return f"{_EPOCH}:{counter.owner}:{counter.kind}:{counter.window.name}"


class Valkey(Protocol):
    """What is used of redis-py."""

    def eval(self, script: str, numkeys: int, *keys_and_args: str) -> Awaitable[Any]: ...  # Any: as in redis-py
    def hkeys(self, name: str) -> Awaitable[list[bytes]]: ...


_AWAY = (redis.exceptions.RedisError, OSError, TimeoutError)


class Budgets:
    """All shares of one gateway process. Everything is called on the event loop; ``run`` deals with Valkey.

    ``find_others``: the ids of the other gateways that are alive. ``in_thread``: runs a function of ``spending``.
    """

    def __init__(
        self,
        *,
        gateway_id: uuid.UUID,
        valkey: Valkey,
        spending: Spending,
        in_thread: Callable[..., Awaitable[Any]],  # Any: of whatever function
        find_others: Callable[[], Collection[uuid.UUID]],
        currency: str,
    ) -> None:
        self._gateway = str(gateway_id)
        self._gateway_id = gateway_id
        self._valkey, self._spending, self._in_thread = valkey, spending, in_thread
        self._find_others, self._currency = find_others, currency
        self._limits = limits().gateway
        self._shares: dict[Counter, Share] = {}
        self._needs: dict[Share, list[int]] = {}
        self._asked: asyncio.Future[None] | None = None
        """Done when the next round is over."""
        self._wake = asyncio.Event()
        self._waiting = 0
        self._epoch = ""
        self._looked_at: dict[tuple[Counter, str], float] = {}
        self.is_away = False

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

    async def reserve(self, reservation: Reservation) -> None:
        """Book a reservation: of every budget or of none.

        Raises BudgetExhausted (429), and BudgetUnknown (503) while nobody can say.
        """
        for tries in itertools.count():
            now = clock.monotonic()
            lacking = reservation.find_lacking(now)
            if not lacking:
                reservation.book(now)
                return
            for share, amount in lacking:
                self._require_possible(share, amount, now)
                if tries >= self._limits.budget_tries:
                    raise self._say_exhausted(share, amount) if share.is_begun else BudgetUnknown(retry_after_s=2)
            await self._ask(lacking, is_again=tries > 0)

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
        if self.is_away:
            # Limits of now and of a minute are dealt out evenly to who holds none; budgets of money are not guessed at.
            if share.is_begun:
                raise self._say_exhausted(share, amount)
            if share.counter.kind.is_budget:
                raise BudgetUnknown(retry_after_s=2)
            share.cap = max(1, share.amount // (1 + len(self._find_others())))
            share.is_begun = True
        elif (
            share.is_begun
            and now - share.asked_at < self._limits.budget_round_s
            and amount > (share.find_slack(now) + share.possible)
        ):
            raise self._say_exhausted(share, amount)

    async def _ask(self, lacking: Iterable[tuple[Share, int]], *, is_again: bool) -> None:
        if self._waiting >= self._limits.budget_waiting:
            raise BudgetUnknown(retry_after_s=2)
        self._waiting += 1
        try:
            if is_again and not self.is_away:  # the others give back what they do not use
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

    def _say_exhausted(self, share: Share, amount: int) -> BudgetExhausted:
        kind, label = share.counter.kind, share.label
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

    # with Valkey

    async def run(self) -> None:
        """Deal with Valkey for as long as the process lives."""
        held_at = -math.inf
        while True:
            # Without a share too: nothing is dealt out of a new Valkey before all have said that they hold nothing.
            pause_s = self._limits.budget_round_s if self._shares else self._limits.budget_hello_s
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, held_at + pause_s - clock.monotonic())):
                    await self._wake.wait()
            self._wake.clear()
            is_due = clock.monotonic() >= held_at + pause_s
            if is_due:
                held_at = clock.monotonic()
            if is_due or not self.is_away:  # who waits while it is away is told so
                await self.hold_round(is_due=is_due)
            asked, self._asked = self._asked, None
            if asked is not None and not asked.done():
                asked.set_result(None)

    async def hold_round(self, *, is_due: bool = True) -> None:
        """Tell Valkey what was used, get what is needed, give back what others want."""
        needs, self._needs = self._needs, {}
        if is_due:
            self._forget_past()
        shares = (
            list(self._shares.values())
            if is_due
            else [*needs, *(s for s in self._shares.values() if s.is_wanted and s not in needs)]
        )
        try:
            async with asyncio.timeout(self._limits.budget_valkey_s):
                others = await self._deal(shares, needs)
        except _AWAY as error:
            if not self.is_away:
                logger.warning("budgets.valkey_away error=%s; each gateway uses what it holds", type(error).__name__)
            self.is_away = True
            return
        if self.is_away:
            logger.info("budgets.valkey_back")
        self.is_away = False
        try:
            await self._look_back(shares, needs, others)
        except (*_AWAY, DatabaseError, InterfaceError) as error:
            logger.warning("budgets.sum_unknown error=%s", type(error).__name__)
        if is_due and any(share.is_wanted and share.cap > share.used for share in shares):
            self._wake.set()

    async def _deal(self, shares: Sequence[Share], needs: dict[Share, list[int]]) -> list[tuple[Share, str]]:
        """Do one round with Valkey; return which gateways hold something of which counter."""
        answer = await self._send(shares, needs, says="0")
        if len(answer) == 1 and (shares or answer[0].decode() != self._epoch):
            self._epoch = answer[0].decode()
            shares = list(self._shares.values())
            at_once = self._limits.budget_counters
            parts = [shares[start : start + at_once] for start in range(0, len(shares), at_once)] or [[]]
            others = []
            for number, part in enumerate(parts, 1):
                said = await self._send(part, needs, says="1" if number == len(parts) else "2")
                others += self._take(part, said)
            return others
        return self._take(shares, answer)

    async def _send(self, shares: Sequence[Share], needs: dict[Share, list[int]], *, says: str) -> list[Any]:
        now, asked = clock.monotonic(), []
        for share in shares:
            slack = max(0, share.find_slack(now))
            keep = min(slack, share.booked) if share.is_wanted else slack
            # What is said to be held may be used meanwhile, and nothing more: no answer may mean that it was heard.
            share.cap, share.booked = share.used + keep, 0
            wanted = needs.get(share, [])
            need, least = max(0, sum(wanted) - keep), max(1, min(wanted, default=1) - keep)
            if self._is_idle(share, now):
                share.cap = keep = least = 0
            asked.append(
                [share.amount, share.used, keep, need, least, self._find_ttl(share), int(not share.counter.kind.is_budget)]
            )
        sharing = 1 + len(self._find_others())
        return cast(
            "list[Any]",
            await self._valkey.eval(
                _DEAL, 1 + len(shares), _EPOCH, *map(_name_key, shares), self._gateway, uuid.uuid4().hex,
                self._epoch, says, str(sharing), msgspec.json.encode(asked).decode(),
            ),
        )  # fmt: skip

    def _take(self, shares: Sequence[Share], answer: list[Any]) -> list[tuple[Share, str]]:
        others, now = [], clock.monotonic()
        for share, (held, possible, is_begun, is_wanted, who) in zip(shares, answer[1:], strict=True):
            # Whatever somebody wrote into Valkey: no share is larger than the whole.
            share.cap, share.possible = min(int(held), max(share.amount, share.used)), int(possible)
            share.is_begun, share.is_wanted, share.asked_at = is_begun == b"1", is_wanted == b"1", now
            others += [(share, name) for name in who.decode().split()]
        return others

    async def _look_back(self, shares: Sequence[Share], needs: dict[Share, list[int]], others: list[tuple[Share, str]]) -> None:
        new = [share for share in shares if not share.is_begun]
        if new:
            names = await self._valkey.hkeys(_EPOCH)
            joined = [uuid.UUID(name[2:].decode()) for name in names if name.startswith(b"g:")]
            begun = False
            for share in new:
                total = await self._in_thread(self._spending.sum_before, share.counter, without=joined)
                if total is not None:
                    await self._valkey.eval(_BEGIN, 2, _EPOCH, _name_key(share), self._epoch, str(total))
                    begun = True
            if begun:
                async with asyncio.timeout(self._limits.budget_valkey_s):
                    await self._deal(new, needs)
        alive, now = {str(one) for one in self._find_others()}, clock.monotonic()
        for share, name in others:
            look = (share.counter, name)
            if name in alive or not share.is_begun or now - self._looked_at.get(look, -math.inf) < self._limits.sweep_s:
                continue
            self._looked_at[look] = now
            total = await self._in_thread(self._spending.sum_of_gone, share.counter, uuid.UUID(name))
            if total is not None:
                await self._valkey.eval(_ABSORB, 2, _EPOCH, _name_key(share), self._epoch, name, str(total))
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
