"""The queue: tiers, shares of tenants, deadlines inside a tenant, the guard against starvation, and estimates."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gateway.request.queue import TIERS, Account, WaitQueue

PATHS = ("/v1/chat/completions",)
_numbers = itertools.count(1)


@dataclass(eq=False)
class Waiter:
    """A request that waits."""

    tenant: str = "t"
    tier: int = 1
    since: float = 0.0
    due: float = 30.0
    weight: float = 1.0
    model: str = "m"
    paths: tuple[str, ...] = PATHS
    sequence: int = field(default_factory=lambda: next(_numbers))


def queue(*waiters: Waiter) -> WaitQueue[Waiter]:
    made: WaitQueue[Waiter] = WaitQueue(starvation_s=10.0, idle_tenants=5)
    for waiter in waiters:
        made.add(waiter, 0.0)
    return made


def take(waiting: WaitQueue[Waiter], now: float = 0.0, models: tuple[str, ...] = ("m",)) -> Waiter:
    """Take who is next out of the queue."""
    found = waiting.choose(models, lambda model, paths: True, now)
    assert found is not None
    assert waiting.remove(found, now)
    assert not waiting.remove(found, now)
    return found


def test_tiers_come_first_and_inside_a_tenant_the_wait_that_ends_first() -> None:
    low, late, soon, high = Waiter(tier=TIERS["low"]), Waiter(due=30.0), Waiter(due=5.0), Waiter(tier=TIERS["high"], due=60.0)
    waiting = queue(low, late, soon, high)
    assert [take(waiting) for _ in range(4)] == [high, soon, late, low]
    assert not waiting.lines
    assert waiting.choose(["m"], lambda model, paths: True, 0.0) is None


def test_who_waits_is_counted_by_the_tier_that_it_came_with() -> None:
    waiting = queue(Waiter(), Waiter(tenant="u"), Waiter(model="other"), high := Waiter(tier=TIERS["high"]))
    assert waiting.count_tiers() == {"high": 1, "normal": 3, "low": 0}
    assert waiting.remove(high, 60.0)
    assert waiting.count_tiers() == {"high": 0, "normal": 3, "low": 0}


def test_only_what_is_served_is_chosen() -> None:
    here, elsewhere = Waiter(), Waiter(model="other")
    embed = Waiter(paths=("/v1/embeddings",), due=1.0)
    waiting = queue(here, elsewhere, embed)
    assert waiting.choose(["m"], lambda model, paths: paths == PATHS, 0.0) is here
    assert waiting.choose(["none"], lambda model, paths: True, 0.0) is None
    assert (waiting.counts(), waiting.count_tenant("t"), "other" in waiting.lines) == ({"m": 2, "other": 1}, 3, True)
    assert waiting.list_waiting(["other"]) == [elsewhere]


def test_who_waited_long_counts_as_a_tier_higher_and_nobody_starves() -> None:
    low = Waiter(tier=TIERS["low"], tenant="slow")
    waiting = queue(low)
    served: list[Waiter] = []
    now = 0.0
    while low not in served:
        waiting.add(Waiter(tier=TIERS["high"], tenant="fast", since=now), now)
        served.append(take(waiting, now))
        now += 1.0
        assert now < 60
    assert now >= 20  # two tiers of ten seconds


def serve(waiting: WaitQueue[Waiter], slots: int, until: float, weights: dict[str, float], seed: int = 1) -> Counter[str]:
    """Have tenants that always have something waiting share some slots; return the seconds that each had."""
    chance, had, now = random.Random(seed), Counter[str](), 0.0  # a schedule
    running: list[tuple[float, float, str, Account]] = []
    for tenant, weight in weights.items():
        for _ in range(3):
            waiting.add(Waiter(tenant=tenant, weight=weight, since=now, due=now + 1e9), now)
    while now < until:
        while len(running) < slots:
            one = take(waiting, now)
            account = waiting.begin(one.tenant, one.weight, now)
            running.append((now + chance.uniform(0.5, 3.0) * (3 if one.tenant == "long" else 1), now, one.tenant, account))
            waiting.add(Waiter(tenant=one.tenant, weight=one.weight, since=now, due=now + 1e9), now)
        running.sort(key=lambda entry: entry[0])
        now, began, tenant, account = running.pop(0)
        waiting.end(account, began, now)
        had[tenant] += now - began  # type: ignore[assignment]  # seconds
    return had


@pytest.mark.parametrize("weights", [{"a": 1.0, "long": 1.0}, {"a": 1.0, "b": 1.0, "c": 2.0}, {"long": 3.0, "b": 1.0}])
def test_tenants_share_the_time_of_slots_by_their_weights_within_ten_percent(weights: dict[str, float]) -> None:
    had = serve(WaitQueue(starvation_s=10.0, idle_tenants=5), 4, 2_000.0, weights)
    whole, all_weights = sum(had.values()), sum(weights.values())
    for tenant, weight in weights.items():
        assert had[tenant] / whole == pytest.approx(weight / all_weights, rel=0.1)


def test_who_was_away_saved_up_nothing() -> None:
    waiting = queue(Waiter(tenant="busy"))
    for now in range(100):
        one = take(waiting, now)
        account = waiting.begin(one.tenant, 1.0, now)
        waiting.add(Waiter(tenant="busy"), now)
        waiting.end(account, now, now + 1.0)
    for _ in range(10):
        waiting.add(Waiter(tenant="new"), 100.0)
        waiting.add(Waiter(tenant="busy"), 100.0)
    order = []
    for now in range(100, 106):
        one = take(waiting, now)
        waiting.end(waiting.begin(one.tenant, 1.0, now), now, now + 1.0)
        order.append(one.tenant)
    assert Counter(order) == {"busy": 3, "new": 3}


def test_who_leaves_for_a_moment_comes_back_with_what_it_had() -> None:
    waiting = queue(Waiter(tenant="patient"))
    waiting.end(waiting.begin("greedy", 1.0, 0.0), 0.0, 10.0)
    waiting.add(Waiter(tenant="greedy", due=1.0), 10.0)
    assert take(waiting, 10.0).tenant == "patient"


def test_what_idle_tenants_had_is_forgotten_in_the_end() -> None:
    waiting = queue()
    for number in range(20):
        waiting.end(waiting.begin(f"t{number}", 1.0, 0.0), 0.0, 1.0)
    assert len(waiting._idle) == 5


def test_how_many_are_ahead_depends_on_tier_tenant_and_share() -> None:
    waiting = queue(
        *[Waiter(tenant="crowd") for _ in range(10)], Waiter(tenant="mine", due=5.0), Waiter(tier=TIERS["high"]),
        Waiter(tier=TIERS["low"]),
    )  # fmt: skip
    # One of the high tier, one of my own, and of the crowd as many as I have then.
    assert waiting.count_ahead("m", tenant="mine", weight=1.0, tier=TIERS[""]) == 1 + 1 + 2
    assert waiting.count_ahead("m", tenant="mine", weight=1.0, tier=TIERS[""], before=(4.0, 0)) == 1 + 1
    assert waiting.count_ahead("m", tenant="crowd", weight=1.0, tier=TIERS[""]) == 1 + 10 + 1
    assert waiting.count_ahead("m", tenant="mine", weight=1.0, tier=TIERS["high"]) == 1
    assert waiting.count_ahead("other", tenant="mine", weight=1.0, tier=0) == 0
