"""Slot time between tenants: who is next, what is charged, what is remembered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine

import pytest

from runner.admission import FairQueue, KeyShare, QueueLimits, Turn, WaitBudget
from tests.fakes.queue_visitors import LONG_S, Visitors, settle


def finish_at_once(entering: Coroutine[object, object, Turn]) -> Turn:
    """Return what a coroutine returns that must not suspend."""
    with pytest.raises(StopIteration) as stopped:
        entering.send(None)
    turn = stopped.value.value
    assert isinstance(turn, Turn)
    return turn


def test_a_free_slot_is_taken_without_suspending() -> None:
    queue = FairQueue(slots=1, limits=QueueLimits(), budget=WaitBudget(1), weight_of=lambda _: 1.0)
    turn = finish_at_once(queue.enter(tenant="a", priority="normal", timeout_s=1.0))
    assert (turn.tenant, turn.waited_ms, queue.active, queue.depth) == ("a", 0.0, 1, 0)


async def test_requests_of_one_tenant_are_served_in_order_of_arrival() -> None:
    visitors = Visitors()
    await visitors.come("a1", "a2", "a3", "a4")
    assert (visitors.queue.active, visitors.queue.depth) == (1, 3)
    assert await visitors.serve_all(each_s=1.0) == ["a1", "a2", "a3", "a4"]
    assert (visitors.queue.active, visitors.queue.depth, visitors.budget.depth) == (0, 0, 0)


async def test_tenants_of_equal_score_take_turns() -> None:
    visitors = Visitors()
    await visitors.come("x1", "a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2")
    assert (await visitors.serve_all())[1:] == ["a1", "b1", "c1", "a2", "b2", "c2", "a3", "b3"]


async def test_a_weight_multiplies_the_share() -> None:
    visitors = Visitors(weight_of=lambda tenant: 3.0 if tenant == "b" else 1.0)
    visitors.queue.pause()
    await visitors.come(*(f"a{n}" for n in range(12)), *(f"b{n}" for n in range(12)))
    visitors.queue.resume()
    await settle()
    served = await visitors.serve_all(each_s=1.0)
    assert Counter(name[0] for name in served[:12]) == {"a": 3, "b": 9}


async def test_weights_of_one_two_and_four_hold_within_five_percent_of_slot_time_in_the_long_run() -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    visitors = Visitors(slots=3, weight_of=weights.__getitem__)
    service_s = {"a": 0.9, "b": 0.35, "c": 0.2}  # unlike sizes: shares are of time, not of requests
    used: Counter[str] = Counter()
    ends: dict[str, float] = {}
    came = 0
    for tenant in "abc" * 10:
        came += 1
        await visitors.come(f"{tenant}{came}")
    for _ in range(3000):
        for name in [name for name in visitors.turns if name not in ends]:
            ends[name] = visitors.clock.monotonic_s + service_s[name[0]]
        name = min(ends, key=ends.__getitem__)
        used[name[0]] += service_s[name[0]]  # type: ignore[assignment]  # a Counter of seconds
        await visitors.go(name, after_s=ends.pop(name) - visitors.clock.monotonic_s)
        came += 1
        await visitors.come(f"{name[0]}{came}")
    total = sum(used.values())
    for tenant, weight in weights.items():
        assert used[tenant] / total == pytest.approx(weight / 7, rel=0.05)


async def test_long_waits_do_not_turn_shares_into_first_come_first_served() -> None:
    visitors = Visitors(weight_of=lambda tenant: 4.0 if tenant == "b" else 1.0)
    visitors.queue.pause()
    await visitors.come(*(f"a{n}" for n in range(10)))
    visitors.clock.advance(15.0)  # one class up for all of a, none for b
    await visitors.come(*(f"b{n}" for n in range(10)))
    visitors.queue.resume()
    await settle()
    served = await visitors.serve_all(each_s=1.0)
    assert Counter(name[0] for name in served[:10]) == {"a": 2, "b": 8}


async def test_slot_time_decides_and_not_the_number_of_requests() -> None:
    visitors = Visitors()
    visitors.queue.pause()
    await visitors.come("a1", "a2", "b1", "b2", "b3", "b4")
    visitors.queue.resume()
    await settle()
    await visitors.go("a1", after_s=3.0)
    assert await visitors.serve_all(each_s=1.0) == ["a1", "b1", "b2", "b3", "a2", "b4"]


async def test_time_that_still_runs_counts() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "b1", "c1")
    await visitors.go("b1", after_s=1.0)
    await visitors.come("a2", "b2")
    visitors.clock.advance(4.0)  # nothing of a has finished yet
    assert [visitors.score_of(tenant) for tenant in "abc"] == [5000.0, 1000.0, 4000.0]
    await visitors.go("c1")
    assert visitors.served == ["a1", "b1", "c1", "b2"]


async def test_a_tenant_at_its_soft_cap_stands_behind_one_below_it_at_equal_score() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "b1", "a2", "b2")
    await visitors.go("b1")
    assert visitors.served[-1] == "b2"  # although a was served longer ago


async def test_the_soft_cap_can_be_borrowed_while_nobody_else_waits() -> None:
    visitors = Visitors(slots=3)
    await visitors.come("a1", "a2", "a3", "a4")
    assert visitors.served == ["a1", "a2", "a3"]
    await visitors.go("a1", after_s=1.0)
    assert visitors.served[-1] == "a4"


async def test_a_tenant_that_comes_gets_the_next_slot_of_one_who_borrowed_them_all() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "a2", "a3", "a4")
    visitors.clock.advance(0.5)
    await visitors.come("b1")
    await visitors.go("a1", after_s=0.1)
    assert visitors.served[-1] == "b1"


async def test_a_new_tenant_starts_at_the_lowest_score_of_those_that_compete() -> None:
    visitors = Visitors(slots=2, weight_of=lambda tenant: 2.0 if tenant == "b" else 1.0)
    await visitors.come("a1", "b1")
    visitors.clock.advance(5.0)
    await visitors.come("c1")
    assert [visitors.score_of(tenant) for tenant in "abc"] == [5000.0, 2500.0, 2500.0]


async def test_a_new_tenant_starts_where_the_last_one_ended_when_nobody_competes() -> None:
    visitors = Visitors()
    await visitors.come("a1")
    await visitors.go("a1", after_s=7.0)
    await visitors.come("b1")
    assert visitors.score_of("b") == 7000.0


async def test_a_tenant_that_was_away_has_saved_up_nothing_but_still_owes() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "b1", "c1")
    await visitors.go("b1", after_s=1.0)
    await visitors.go("c1", after_s=100.0)
    await visitors.go("a1", after_s=9.0)
    assert (visitors.score_of("a"), visitors.score_of("b"), visitors.score_of("c")) == (110_000.0, 1000.0, 100_000.0)
    await visitors.come("c2")
    await visitors.come("b2")
    assert visitors.score_of("b") == visitors.score_of("c") == 110_000.0
    visitors.clock.advance(50.0)
    await visitors.come("d1")
    assert visitors.score_of("d") == visitors.score_of("b") == 160_000.0
    await visitors.come("a2")
    assert visitors.score_of("a") == 160_000.0


async def test_a_debt_stays_while_the_tenant_is_away() -> None:
    visitors = Visitors(slots=2, weight_of=lambda tenant: 4.0 if tenant == "b" else 1.0)
    await visitors.come("a1", "b1")
    await visitors.go("a1", after_s=60.0)
    visitors.clock.advance(4.0)
    await visitors.come("c1", "d1", "a2")
    assert [visitors.score_of(tenant) for tenant in "abcd"] == [60_000.0, 16_000.0, 16_000.0, 16_000.0]


async def test_a_tenant_is_forgotten_after_the_idle_time_and_not_before() -> None:
    visitors = Visitors(limits=QueueLimits())
    await visitors.come("a1")
    await visitors.go("a1")
    visitors.clock.advance(299.0)
    assert visitors.known() == {"a"}
    visitors.clock.advance(1.0)
    assert visitors.known() == set()


async def test_accounts_of_tenants_that_never_come_back_are_bounded() -> None:
    visitors = Visitors()
    for number in range(1500):
        turn = await visitors.queue.enter(tenant=f"tenant-{number}", priority="normal", timeout_s=1.0)
        visitors.queue.leave(turn)
    known = visitors.known()
    assert len(known) == 1000
    assert "tenant-1499" in known


async def test_anonymous_requests_share_one_account() -> None:
    visitors = Visitors(slots=2)
    for _ in range(2):
        await visitors.queue.enter(tenant="anonymous", priority="normal", timeout_s=1.0)
    (share,) = visitors.queue.snapshot()
    assert (share.fairness_key, share.active) == ("anonymous", 2)


async def test_a_failed_request_is_charged_like_any_other() -> None:
    visitors = Visitors()
    turn = await visitors.queue.enter(tenant="a", priority="normal", timeout_s=1.0)
    try:
        visitors.clock.advance(2.0)
        raise RuntimeError("the engine broke off")
    except RuntimeError:
        visitors.queue.leave(turn)
    assert visitors.score_of("a") == 2000.0


async def test_leaving_twice_is_leaving_once() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "b1", "a2", "b2")
    turn = visitors.turns["a1"]
    await visitors.go("a1", after_s=1.0)
    visitors.queue.leave(turn)
    await settle()
    assert (visitors.queue.active, visitors.queue.depth) == (2, 1)
    other = Visitors()
    other.queue.leave(turn)
    assert other.queue.active == 0


async def test_the_snapshot_tells_what_each_tenant_has() -> None:
    visitors = Visitors(weight_of=lambda tenant: 2.0 if tenant == "b" else 1.0)
    await visitors.come("a1", "b1", "b2")
    visitors.clock.advance(4.0)
    assert visitors.queue.snapshot() == [
        KeyShare(fairness_key="a", pending=0, active=1, weight=1.0, score=4000.0, rejected=0),
        KeyShare(fairness_key="b", pending=2, active=0, weight=2.0, score=0.0, rejected=0),
    ]


async def test_a_turn_tells_how_long_it_waited() -> None:
    visitors = Visitors()
    await visitors.come("a1", "a2")
    await visitors.go("a1", after_s=1.25)
    assert visitors.turns["a2"].waited_ms == 1250.0
    assert visitors.turns["a2"].started_at == visitors.clock.monotonic_s


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    visitors = Visitors(weight_of=lambda _: weight)
    with pytest.raises(ValueError, match="weight"):
        await visitors.queue.enter(tenant="a", priority="normal", timeout_s=LONG_S)
    assert visitors.queue.active == 0
