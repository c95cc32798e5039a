"""Shares of counters: the rule by which an amount is dealt out to gateways, and PostgreSQL, which deals while Valkey is away.

Valkey's script (``gateway.request.budgets``) is the same rule. For each counter a dealer knows how much every gateway holds,
which is what it used and what it may still use. With the base, what gateways used that are gone, that is never more than the
amount. A dealer has an epoch: nothing is dealt out of a counter before all gateways that live have said in it what they hold.

A term is the epoch of PostgreSQL. While the newest is open PostgreSQL deals, else Valkey does; a term that was closed is never
opened again. Valkey's epoch is of a term too, and ends with the first gateway that knows of a later one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any, cast

import msgspec
from django.db import connection, transaction

_EPOCH = ""
"""Name of the row that holds the epoch."""
State = MutableMapping[str, str | int]


class Claim(msgspec.Struct, array_like=True, frozen=True):
    """What a gateway says of one counter: it used ``used`` and keeps ``keep`` above that.

    It wants ``need`` more, and something only if that is at least ``least``; 0 = it wants nothing and gives all back.
    """

    amount: int
    used: int
    keep: int
    need: int
    least: int
    ttl_s: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway asks of a dealer. ``claims``: by the name of the counter.

    ``new_id``: of an epoch that would begin now. ``known_id``: the epoch the gateway knows. ``says``: whether it says what it
    holds: 0 = it did already, 2 = some of it, 1 = with this the last of it. ``number``: grows with each order; what was
    overtaken by a later one changes nothing. ``parts``: without a need, a gateway takes one part of so many of what is free.
    """

    gateway: str
    new_id: str
    known_id: str
    says: int
    parts: float
    number: int
    term: int
    claims: Mapping[str, Claim]


class Holding(msgspec.Struct, array_like=True, frozen=True):
    """What the dealer says of one counter.

    ``held``: the gateway's share. ``possible``: how much more it could have if all others gave back. ``is_begun``: whether the
    base is known. ``is_wanted``: whether another gateway wants some. ``others``: who holds some too.
    """

    held: int
    possible: int
    is_begun: bool
    is_wanted: bool
    others: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True):
    """``holdings`` in the order of the claims; None = the gateway first has to say in this epoch what it holds.

    ``is_wanted``: whether some gateway wants more of any counter.
    """

    epoch: str
    term: int
    holdings: tuple[Holding, ...] | None
    is_wanted: bool = False
    is_closed: bool = False


def deal(epoch: State, counters: MutableMapping[str, State], order: Order, *, now: int, run: str = "") -> Answer:
    """Carry out an order on the state of a dealer, as Valkey's script does.

    ``run``: of the dealer's process; with another one everything begins anew. ``now``: whole seconds of the dealer's clock.
    """
    term = cast("int", epoch.get("term", 0))
    if not epoch or epoch["run"] != run or term < order.term:
        term = max(term, order.term)
        epoch.clear()
        epoch.update(id=order.new_id, run=run, term=term)
    id_ = cast("str", epoch["id"])
    mine, last = f"g:{order.gateway}", f"s:{order.gateway}"
    is_late = order.number <= cast("int", epoch.get(last, 0))
    if id_ != order.known_id or is_late or (not order.says and mine not in epoch):
        return Answer(id_, term, None)
    epoch[last] = order.number
    if order.says == 1:
        epoch[mine] = 1
    holdings = tuple(_deal_one(counters.setdefault(name, {}), claim, order, id_, now) for name, claim in order.claims.items())
    if any(counters[name].get(f"w:{order.gateway}") for name in order.claims):
        epoch["wanted"] = now + 2
    return Answer(id_, term, holdings, is_wanted=cast("int", epoch.get("wanted", 0)) >= now)


def _deal_one(counter: State, claim: Claim, order: Order, epoch: str, now: int) -> Holding:
    if counter.get("epoch") != epoch:
        counter.clear()
        counter["epoch"] = epoch
    for name in [name for name, until in counter.items() if name[:2] == "w:" and cast("int", until) < now]:
        del counter[name]

    def add_up(kind: str) -> int:
        return sum(cast("int", value) for name, value in counter.items() if name[:2] == kind and name[2:] != order.gateway)

    mine, want = f"h:{order.gateway}", f"w:{order.gateway}"
    is_wanted = any(name[:2] == "w:" and name != want for name in counter)
    base, free, possible = cast("int | None", counter.get("base")), 0, 0
    if base is not None:
        free = max(0, claim.amount - base - add_up("h:") - claim.used)
        possible = max(0, claim.amount - base - add_up("u:") - claim.used)
    keep = claim.keep
    if not order.says and mine not in counter:  # it was taken for gone
        keep = min(keep, free)
    free, possible = max(0, free - keep), max(0, possible - keep)
    give = min(claim.need, free)
    if give < claim.least:
        give = 0
    if base is not None:
        if claim.need > free and claim.least <= possible:
            counter[want] = now + 2  # as in the script: a mark is good for two seconds
        elif claim.least > 0 and not (is_wanted or want in counter):
            give = max(give, math.floor(free / order.parts))
    counter[mine], counter[f"u:{order.gateway}"] = claim.used + keep + give, claim.used
    others = tuple(sorted(name[2:] for name in counter if name[:2] == "h:" and name != mine))
    return Holding(claim.used + keep + give, possible, base is not None, is_wanted, others)


def deal_in_term(
    epoch: State,
    counters: MutableMapping[str, State],
    order: Order,
    *,
    now: int,
    reaches: bool,
    living: Collection[str],
) -> Answer:
    """Carry out an order; close the term once all gateways reach Valkey that live and have joined.

    ``reaches``: whether the gateway reaches Valkey. ``living``: the gateways that live, itself included.
    """
    term = cast("int", epoch.get("term", -1))
    if order.term <= term and "closed" in epoch:
        return Answer(cast("str", epoch["id"]), term, None, is_closed=True)
    answer = deal(epoch, counters, order, now=now)
    if answer.holdings is not None:
        epoch[f"r:{order.gateway}"] = int(reaches)
        if all(epoch.get(f"r:{one}") for one in list_joined(epoch) if one in living):
            epoch["closed"] = 1
    return answer


def begin(epoch: State, counter: State, *, epoch_id: str, base: int) -> None:
    """Let a counter begin with what gateways used that are gone."""
    if epoch.get("id") == epoch_id == counter.get("epoch"):
        counter.setdefault("base", base)


def absorb(epoch: State, counter: State, *, epoch_id: str, gateway: str, used: int) -> None:
    """Make what a gateway used that is gone a part of the base, once."""
    if epoch.get("id") == epoch_id == counter.get("epoch") and "base" in counter and f"h:{gateway}" in counter:
        del counter[f"h:{gateway}"]
        counter.pop(f"u:{gateway}", None)
        counter["base"] = cast("int", counter["base"]) + used


def list_joined(epoch: State) -> list[str]:
    """Return the ids of the gateways that have said in this epoch what they hold."""
    return [name[2:] for name in epoch if name[:2] == "g:"]


# PostgreSQL as the dealer: a row for the term, and one for each counter.

_LOCK = "SELECT pg_advisory_xact_lock(hashtext('muster.budgets'))"
_READ = "SELECT name, state::text FROM gateway_budgetshares WHERE name = ANY(%s)"
_WRITE = """
INSERT INTO gateway_budgetshares (name, state) SELECT * FROM unnest(%s::text[], %s::jsonb[])
    ON CONFLICT (name) DO UPDATE SET state = excluded.state
"""
_states = msgspec.json.Decoder(dict[str, str | int])


class DealerTable:
    """The dealer of a term, in PostgreSQL. Its functions run in a thread and raise DatabaseError."""

    def read_term(self) -> tuple[int, bool]:
        """Return the number of the newest term and whether it is open; 0 = there was none yet."""
        epoch = self._read([_EPOCH]).get(_EPOCH, {})
        return cast("int", epoch.get("term", 0)), bool(epoch) and "closed" not in epoch

    def read_counters(self, names: list[str]) -> dict[str, State] | None:
        """Return counters by name as they stand in the open term; None while Valkey deals."""
        return self._read(names) if self.read_term()[1] else None

    @transaction.atomic
    def deal(self, order: Order, *, now: int, reaches: bool, living: Collection[str]) -> Answer:
        """See ``deal_in_term``."""
        epoch, counters = self._lock(list(order.claims))
        before = epoch.get("term")
        answer = deal_in_term(epoch, counters, order, now=now, reaches=reaches, living=living)
        if epoch["term"] != before:
            with connection.cursor() as cursor:
                cursor.execute("DELETE FROM gateway_budgetshares")
        self._write({_EPOCH: epoch, **counters})
        return answer

    @transaction.atomic
    def begin(self, *, epoch_id: str, name: str, base: int) -> None:
        epoch, counters = self._lock([name])
        begin(epoch, counters.setdefault(name, {}), epoch_id=epoch_id, base=base)
        self._write(counters)

    @transaction.atomic
    def absorb(self, *, epoch_id: str, name: str, gateway: str, used: int) -> None:
        epoch, counters = self._lock([name])
        absorb(epoch, counters.setdefault(name, {}), epoch_id=epoch_id, gateway=gateway, used=used)
        self._write(counters)

    def list_joined(self) -> list[str]:
        return list_joined(self._read([_EPOCH]).get(_EPOCH, {}))

    def _lock(self, names: list[str]) -> tuple[State, dict[str, State]]:
        """Return the epoch and the counters of these names; no other gateway reads them before this transaction ends."""
        with connection.cursor() as cursor:
            cursor.execute(_LOCK)
        found = self._read([_EPOCH, *names])
        return found.pop(_EPOCH, {}), found

    def _read(self, names: list[str]) -> dict[str, State]:
        with connection.cursor() as cursor:
            cursor.execute(_READ, [names])
            return {name: cast("State", _states.decode(state)) for name, state in cursor.fetchall()}

    def _write(self, states: Mapping[str, State]) -> None:
        with connection.cursor() as cursor:
            cursor.execute(_WRITE, [list(states), [msgspec.json.encode(one).decode() for one in states.values()]])


def read_answer(said: list[Any]) -> Answer:  # Any: redis-py's nested lists of bytes
    """Read what Valkey's script answers."""
    id_, term, *rest = said
    holdings = tuple(
        Holding(int(held), int(possible), begun == b"1", wanted == b"1", tuple(sorted(who.decode().split())))
        for held, possible, begun, wanted, who in (rest[0] if rest else ())
    )
    return Answer(id_.decode(), int(term), holdings if rest else None, is_wanted=rest[1:] == [b"1"])
