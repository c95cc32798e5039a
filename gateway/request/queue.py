"""Queue of a gateway process: who waits, in which tier, and who is next. No I/O, no clock.

Tiers come first. Inside a tier tenants share: whoever had least slot time for its weight is next, as on the runner (start-time
fair queueing; Goyal, Vin and Cheng, 1996). Inside a tenant the request comes first whose wait ends first. Only what was granted
out of the queue counts as had: while nobody waits there is nothing to share.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

TIERS = {"high": 2, "": 1, "low": 0}
"""By the priority of a job; empty = normal."""
_TIER_NAMES = {2: "high", 1: "normal", 0: "low"}
Paths = tuple[str, ...]


class Waiting(Protocol):
    """A request that waits. Times are clock.monotonic() seconds; ``due``: when its wait ends."""

    model: str
    paths: Paths
    tenant: str
    weight: float
    tier: int
    since: float
    due: float
    sequence: int


W = TypeVar("W", bound=Waiting)


@dataclass(slots=True, eq=False)
class Account:
    """What a tenant had of the slots. ``charged``: seconds of finished requests for its weight, or where it began."""

    tenant: str
    weight: float
    charged: float
    active: int = 0
    started_sum: float = 0.0
    waiting: int = 0
    last_granted: int = 0

    def score(self, now: float) -> float:
        """Return what it had, running requests included."""
        return self.charged + (self.active * now - self.started_sum) / self.weight


@dataclass(slots=True)
class WaitQueue(Generic[W]):
    """Who waits, by model and API paths. A request counts as a tier higher for every ``starvation_s`` that it waited."""

    starvation_s: float
    idle_tenants: int
    lines: dict[str, dict[Paths, dict[tuple[int, str], list[W]]]] = field(default_factory=dict)
    """By model, API paths, tier and tenant, ordered by when waits end; no model is there for which nobody waits."""
    _counts: Counter[str] = field(default_factory=Counter)
    """By model."""
    _accounts: dict[str, Account] = field(default_factory=dict)
    """Of tenants whose requests wait, or run and waited before."""
    _idle: dict[str, float] = field(default_factory=dict)
    """What others are charged with: they owe it when they come back. The one that left first comes first."""
    _floor: float = 0.0
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def models(self) -> list[str]:
        return list(self.lines)

    def holds(self, model: str, paths: Paths) -> bool:
        """Whether somebody waits for the model on these API paths."""
        lines = self.lines.get(model)
        return lines is not None and paths in lines

    def count(self, model: str) -> int:
        return self._counts[model]

    def counts(self) -> dict[str, int]:
        return {model: self._counts[model] for model in self.lines}

    def count_tiers(self) -> dict[str, int]:
        """Return how many wait, by the tier that they came with."""
        found = dict.fromkeys(_TIER_NAMES.values(), 0)
        for by_paths in self.lines.values():
            for lines in by_paths.values():
                for (tier, _tenant), line in lines.items():
                    found[_TIER_NAMES[tier]] += len(line)
        return found

    def count_tenant(self, tenant: str) -> int:
        account = self._accounts.get(tenant)
        return 0 if account is None else account.waiting

    def list_waiting(self, models: Iterable[str]) -> list[W]:
        return [one for model in models for lines in self.lines[model].values() for line in lines.values() for one in line]

    def add(self, waiter: W, now: float) -> None:
        lines = self.lines.setdefault(waiter.model, {}).setdefault(waiter.paths, {})
        insort(lines.setdefault((waiter.tier, waiter.tenant), []), waiter, key=_order)
        self._counts[waiter.model] += 1
        self._open(waiter.tenant, waiter.weight, now).waiting += 1

    def remove(self, waiter: W, now: float) -> bool:
        """Take somebody out; False: it is out already."""
        by_paths = self.lines.get(waiter.model, {})
        lines = by_paths.get(waiter.paths, {})
        line = lines.get((waiter.tier, waiter.tenant), [])
        if waiter not in line:
            return False
        line.remove(waiter)
        if not line:
            del lines[waiter.tier, waiter.tenant]
        if not lines:
            del by_paths[waiter.paths]
        self._counts[waiter.model] -= 1
        if not by_paths:
            del self.lines[waiter.model], self._counts[waiter.model]
        account = self._accounts[waiter.tenant]
        account.waiting -= 1
        self._settle(account)
        return True

    def choose(self, models: Iterable[str], is_served: Callable[[str, Paths], bool], now: float) -> W | None:
        """Return who is next among those who wait for these models on API paths that are served, None = nobody.

        Waiting lifts a request against those of other tiers only: were it lifted against its own too, weights would mean
        nothing in a queue whose waits come near ``starvation_s``.
        """
        heads: list[tuple[int, tuple[float, int, float, int], W]] = []
        for model in self.lines.keys() & models:
            for paths, lines in self.lines[model].items():
                if not is_served(model, paths):
                    continue
                for (tier, tenant), line in lines.items():
                    head, account = line[0], self._accounts[tenant]
                    lifted = min(2, tier + int((now - head.since) / self.starvation_s))
                    heads.append((lifted, (account.score(now), account.last_granted, head.due, head.sequence), head))
        if not heads:
            return None
        highest = max(lifted for lifted, _, _ in heads)
        tier = min((rank, head.tier) for lifted, rank, head in heads if lifted == highest)[1]
        rank_of = {rank: head for _, rank, head in heads if head.tier == tier}
        return rank_of[min(rank_of)]

    def count_ahead(
        self, model: str, *, tenant: str, weight: float, tier: int, before: tuple[float, int] = (math.inf, 0)
    ) -> int:
        """Return how many will probably be served before one who waits for a model, or would; ``before``: its due and sequence.

        All of higher tiers, those of its own tenant that end sooner, and of each other tenant as many as its share is.
        """
        ahead, own = 0, 0
        others: Counter[str] = Counter()
        for lines in self.lines.get(model, {}).values():
            for (other_tier, other), line in lines.items():
                if other_tier > tier:
                    ahead += len(line)
                elif other_tier == tier and other == tenant:
                    own += sum(_order(one) < before for one in line)
                elif other_tier == tier:
                    others[other] += len(line)
        for other, number in others.items():
            ahead += min(number, math.ceil((own + 1) * self._accounts[other].weight / weight))
        return ahead + own

    def begin(self, tenant: str, weight: float, now: float) -> Account:
        """Count a request that is granted out of the queue; ``end`` is called once with what is returned."""
        account = self._open(tenant, weight, now)
        account.active += 1
        account.started_sum += now
        account.last_granted = next(self._numbers)
        return account

    def end(self, account: Account, began: float, now: float) -> None:
        account.active -= 1
        account.started_sum = account.started_sum - began if account.active else 0.0
        account.charged += (now - began) / account.weight
        self._settle(account)

    def _open(self, tenant: str, weight: float, now: float) -> Account:
        account = self._accounts.get(tenant)
        if account is None:
            # Whoever was away has saved up nothing, but still owes: it begins level with those who compete.
            if self._accounts:
                self._floor = max(self._floor, min(other.score(now) for other in self._accounts.values()))
            charged = max(self._floor, self._idle.pop(tenant, 0.0))
            account = self._accounts[tenant] = Account(tenant, weight, charged)
        account.weight = weight
        return account

    def _settle(self, account: Account) -> None:
        if account.active or account.waiting or self._accounts.get(account.tenant) is not account:
            return
        del self._accounts[account.tenant]
        if not self._accounts:
            self._floor = max(self._floor, account.charged)
        self._idle[account.tenant] = account.charged
        while len(self._idle) > self.idle_tenants:
            del self._idle[next(iter(self._idle))]


def _order(waiter: Waiting) -> tuple[float, int]:
    return waiter.due, waiter.sequence
