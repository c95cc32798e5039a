"""The queue of one model: shares by weight, limits, priorities, and nobody lost in any order of events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.admission import FairQueue, KeyShare, Priority, QueueLimits, Turn, WaitBudget
from runner.errors import ModelQueueFull, ModelUnloading, QueueFull, QueueTimeout, TenantQueueFull
from tests.fakes.clock import install_virtual_clock
from tests.fakes.examples import examples
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


async def test_tenants_of_equal_score_take_turns() -> None:
    visitors = Visitors()
    await visitors.come("x1", "a1", "a2", "a3", "b1", "b2", "b3", "c1", "c2")
    assert (await visitors.serve_all())[1:] == ["a1", "b1", "c1", "a2", "b2", "c2", "a3", "b3"]


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


async def refused(visitors: Visitors, name: str) -> BaseException:
    """Return the error with which a request is turned away without waiting."""
    await visitors.come(name)
    error = visitors.tasks[name].exception()
    assert error is not None
    return error


async def test_a_tenant_may_have_only_so_many_requests_waiting() -> None:
    visitors = Visitors(limits=QueueLimits(pending_per_key=2))
    await visitors.come("a1", "a2", "a3")
    error = await refused(visitors, "a4")
    assert isinstance(error, TenantQueueFull)
    assert (error.code, error.status, error.details) == ("fairness_key_queue_full", 429, {"queueDepth": 2})
    await visitors.come("b1")
    assert not visitors.tasks["b1"].done()
    assert (visitors.queue.rejected_per_key_limit, visitors.queue.rejected_executor_limit) == (1, 0)
    assert {share.fairness_key: share.rejected for share in visitors.queue.snapshot()} == {"a": 1, "b": 0}


async def test_a_model_has_only_so_many_requests_waiting() -> None:
    visitors = Visitors(limits=QueueLimits(pending_per_executor=2))
    await visitors.come("a1", "a2", "b1")
    error = await refused(visitors, "c1")
    assert isinstance(error, ModelQueueFull)
    assert (error.code, error.status, error.details) == ("executor_queue_full", 429, {"queueDepth": 2})
    assert (visitors.queue.rejected_per_key_limit, visitors.queue.rejected_executor_limit) == (0, 1)
    assert visitors.known() == {"a", "b"}  # a refused stranger leaves no account


async def test_the_box_has_only_so_many_requests_waiting_over_all_models() -> None:
    budget = WaitBudget(2)
    queues = [FairQueue(slots=1, limits=QueueLimits(), budget=budget, weight_of=lambda _: 1.0) for _ in range(2)]
    tasks = [
        asyncio.create_task(queue.enter(tenant="a", priority="normal", timeout_s=LONG_S)) for queue in queues for _ in range(2)
    ]
    await settle()
    assert (budget.depth, [queue.depth for queue in queues]) == (2, [1, 1])
    with pytest.raises(QueueFull, match="Queue depth 2/2") as caught:
        await queues[0].enter(tenant="b", priority="high", timeout_s=LONG_S)
    assert caught.value.status == 503
    assert queues[0].cancel_waiting(ModelUnloading("gone")) == 1
    assert budget.depth == 1
    assert isinstance((await asyncio.gather(*tasks[:2], return_exceptions=True))[1], ModelUnloading)
    for task in tasks:
        task.cancel()
    await settle()
    assert budget.depth == 0


async def test_a_full_box_tells_its_depth_its_average_wait_and_when_to_come_again() -> None:
    visitors = Visitors(max_depth=2)
    await visitors.come("a1", "a2")
    await visitors.go("a1", after_s=2.5)  # one waited 0 ms, the next 2500 ms
    await visitors.come("a3", "a4")
    error = await refused(visitors, "b1")
    assert isinstance(error, QueueFull)
    assert (error.code, error.status, error.retry_after_s) == ("queue_full", 503, 5)
    assert error.message == "Queue depth 2/2, retry in 5 seconds"
    assert error.details == {"queueDepth": 2, "avgWaitMs": 1250}


async def test_the_advice_when_to_come_again_stays_between_one_second_and_sixty() -> None:
    visitors = Visitors(max_depth=1)
    await visitors.come("a1")
    await visitors.go("a1", after_s=0.001)
    await visitors.come("a2", "a3")
    error = await refused(visitors, "a4")
    assert isinstance(error, QueueFull)
    assert (error.retry_after_s, error.message) == (1, "Queue depth 1/1, retry in 1 second")
    await visitors.go("a2", after_s=10_000.0)
    await visitors.come("a5")
    error = await refused(visitors, "a6")
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 60


async def test_a_request_that_waited_too_long_is_refused_and_its_place_given_up() -> None:
    visitors = Visitors()
    await visitors.come("a1")
    await visitors.come("a2", timeout_s=0.02)
    with pytest.raises(QueueTimeout, match=r"within 0\.02 s") as caught:
        await asyncio.wait_for(visitors.tasks["a2"], 30.0)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)
    assert (visitors.queue.depth, visitors.budget.depth) == (0, 0)
    await visitors.come("b1")
    await visitors.go("a1")
    assert visitors.served == ["a1", "b1"]


async def test_a_cancelled_request_leaves_the_queue_at_once() -> None:
    visitors = Visitors()
    await visitors.come("a1", "a2", "b1")
    visitors.tasks["a2"].cancel()
    await settle()
    assert (visitors.queue.depth, visitors.budget.depth, visitors.tasks["a2"].cancelled()) == (1, 1, True)
    assert await visitors.serve_all() == ["a1", "b1"]


async def test_a_slot_granted_to_a_request_that_is_cancelled_in_the_same_tick_is_passed_on() -> None:
    visitors = Visitors()
    await visitors.come("a1", "a2", "b1")
    visitors.queue.leave(visitors.turns.pop("a1"))
    granted = next(task for task in ("a2", "b1") if visitors.queue.snapshot()[0].fairness_key == task[0])
    visitors.tasks[granted].cancel()
    await settle()
    other = "b1" if granted == "a2" else "a2"
    assert visitors.tasks[granted].cancelled()
    assert list(visitors.turns) == [other]
    assert await visitors.serve_all() == ["a1", other]
    assert visitors.queue.active == 0


async def test_cancellation_just_before_a_grant_loses_no_slot() -> None:
    visitors = Visitors()
    await visitors.come("a1", "a2")
    visitors.tasks["a2"].cancel()
    visitors.queue.leave(visitors.turns.pop("a1"))
    await settle()
    assert (visitors.queue.active, visitors.queue.depth, visitors.tasks["a2"].cancelled()) == (0, 0, True)


async def test_refusal_and_cancellation_in_the_same_tick_lose_nothing() -> None:
    visitors = Visitors()
    await visitors.come("a1", "a2", "a3")
    visitors.tasks["a2"].cancel()
    assert visitors.queue.cancel_waiting(ModelUnloading("gone")) == 2
    visitors.tasks["a3"].cancel()
    await settle()
    assert (visitors.queue.depth, visitors.budget.depth) == (0, 0)
    assert visitors.tasks["a2"].cancelled()
    assert visitors.tasks["a3"].cancelled()


async def test_a_drain_refuses_who_waits_and_lets_finish_who_runs() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "b1", "a2", "b2")
    visitors.queue.pause()
    idle = asyncio.create_task(visitors.queue.wait_idle())
    assert visitors.queue.cancel_waiting(ModelUnloading("the model is being unloaded")) == 2
    await settle()
    for name in ("a2", "b2"):
        error = visitors.tasks[name].exception()
        assert isinstance(error, ModelUnloading)
        assert error.code == "model_unloading"
    assert visitors.tasks["a2"].exception() is not visitors.tasks["b2"].exception()
    await visitors.go("a1")
    assert not idle.done()
    await visitors.go("b1")
    await asyncio.wait_for(idle, 30.0)
    await asyncio.wait_for(visitors.queue.wait_idle(), 30.0)


async def test_nobody_is_let_in_during_a_pause_and_everybody_after_it() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1")
    visitors.queue.pause()
    visitors.queue.pause()
    await visitors.come("b1", "c1")
    await visitors.go("a1")
    assert (visitors.served, visitors.queue.active, visitors.queue.depth) == (["a1"], 0, 2)
    visitors.queue.resume()
    await settle()
    assert visitors.served == ["a1", "b1", "c1"]


async def test_more_slots_let_those_in_who_wait_and_fewer_stop_nobody() -> None:
    visitors = Visitors(slots=0)
    await visitors.come("a1", "b1", "c1", "d1")
    assert visitors.served == []
    visitors.queue.resize(3)
    await settle()
    assert visitors.served == ["a1", "b1", "c1"]
    visitors.queue.resize(1)
    assert (visitors.queue.slots, visitors.queue.active) == (1, 3)
    await visitors.go("a1")
    await visitors.go("b1")
    assert visitors.served == ["a1", "b1", "c1"]
    await visitors.go("c1")
    assert visitors.served[-1] == "d1"
    with pytest.raises(ValueError, match="-1 slots"):
        visitors.queue.resize(-1)


async def test_a_higher_priority_goes_first_whatever_the_score() -> None:
    visitors = Visitors()
    await visitors.come("a1")
    await visitors.come("b1", priority="low")
    await visitors.come("c1", priority="normal")
    await visitors.come("a2", priority="high")
    await visitors.go("a1", after_s=5.0)
    assert await visitors.serve_all() == ["a1", "a2", "c1", "b1"]


@pytest.mark.parametrize("low", ["b1", "ax"], ids=["of another tenant", "of its own"])
async def test_a_low_request_is_not_starved_by_a_stream_of_high_ones(low: str) -> None:
    visitors = Visitors(limits=QueueLimits())
    await visitors.come("a0", priority="high")
    await visitors.come(low, priority="low")
    for number in range(1, 40):
        await visitors.come(f"a{number}", priority="high")
        await visitors.go(f"a{number - 1}", after_s=1.0)
        if low in visitors.served:
            break
    assert visitors.served.index(low) == 20  # two classes up after 20 s, and of lower score from the start


async def test_waiting_long_gives_a_greedy_tenant_nothing_over_a_modest_one_of_higher_priority() -> None:
    visitors = Visitors()
    await visitors.come("x1")
    await visitors.come("a1", priority="low")
    await visitors.go("x1", after_s=1.0)
    await visitors.come("b1", priority="low")
    await visitors.come(*(f"a{n}" for n in range(2, 8)), priority="low")
    visitors.clock.advance(60.0)  # a runs all the time, and its waiting requests rise to the highest class
    await visitors.come("b2", priority="high")
    await visitors.go("a1")
    assert visitors.served[-1] == "b1"
    await visitors.go("b1", after_s=1.0)
    assert visitors.served[-1] == "b2"


async def test_waits_are_averaged_over_the_last_five_minutes() -> None:
    clock = install_virtual_clock()
    budget = WaitBudget(16)
    assert (budget.avg_wait_ms, budget.p95_wait_ms, budget.max_depth) == (0.0, 0.0, 16)
    budget.observe(9000.0)
    clock.advance(200.0)
    for number in range(1, 101):
        budget.observe(float(number))
    assert budget.avg_wait_ms == pytest.approx((9000 + 5050) / 101)
    clock.advance(101.0)
    assert (budget.avg_wait_ms, budget.p95_wait_ms) == (50.5, 95.0)
    clock.advance(300.0)
    assert (budget.avg_wait_ms, budget.p95_wait_ms) == (0.0, 0.0)


def test_only_the_last_thousand_waits_are_kept() -> None:
    budget = WaitBudget(16)
    for number in range(5000):
        budget.observe(0.0 if number < 4000 else 2.0)
    assert (budget.avg_wait_ms, budget.p95_wait_ms) == (2.0, 2.0)


@dataclass
class Request:
    """What a random run knows of one request."""

    task: asyncio.Task[Turn]
    is_cancelled: bool = False
    has_left: bool = False


TENANTS = st.sampled_from("abcd")
PRIORITIES: st.SearchStrategy[Priority] = st.sampled_from(("high", "normal", "low"))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), TENANTS, PRIORITIES),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("resize"), st.integers(0, 4)),
        st.tuples(st.just("pass"), st.floats(0.0, 30.0)),
        st.tuples(st.sampled_from(("pause", "resume", "refuse", "settle", "settle", "settle"))),
    ),
    max_size=60,
)


class RandomRun:
    """A queue and what should be true of it, whatever happens in whatever order, several things in one tick included."""

    def __init__(self) -> None:
        self.clock = install_virtual_clock()
        self.budget = WaitBudget(12)
        limits = QueueLimits(pending_per_key=5, pending_per_executor=10)
        self.queue = FairQueue(slots=2, limits=limits, budget=self.budget, weight_of=lambda _: 1.0)
        self.requests: list[Request] = []
        self.is_paused = False
        self.most_active = 2

    def running(self) -> list[Request]:
        return [
            request
            for request in self.requests
            if request.task.done() and not request.task.cancelled() and not request.task.exception() and not request.has_left
        ]

    def waiting(self) -> list[Request]:
        return [request for request in self.requests if not request.task.done()]

    async def step(self, name: str, *arguments: object) -> None:
        match name, *arguments:
            case "enter", str(tenant), ("high" | "normal" | "low") as priority:
                entering = self.queue.enter(tenant=tenant, priority=priority, timeout_s=LONG_S)
                self.requests.append(Request(asyncio.create_task(entering)))
            case "leave", int(index):
                running = self.running()
                if running:
                    request = running[index % len(running)]
                    request.has_left = True
                    self.queue.leave(request.task.result())
            case "cancel", int(index):
                waiting = self.waiting()
                if waiting:
                    request = waiting[index % len(waiting)]
                    request.is_cancelled = True
                    request.task.cancel()
            case "resize", int(slots):
                self.queue.resize(slots)
                self.most_active = max(self.most_active, slots)
            case "pass", float(seconds):
                self.clock.advance(seconds)
            case "pause", *_:
                self.queue.pause()
                self.is_paused = True
            case "resume", *_:
                self.queue.resume()
                self.is_paused = False
            case "refuse", *_:
                self.queue.cancel_waiting(ModelUnloading("gone"))
            case _:
                await settle()
                self.check()

    def check(self) -> None:
        running, waiting = self.running(), self.waiting()
        assert self.queue.active == len(running)
        assert self.queue.depth == self.budget.depth == len(waiting)
        assert not any(request.is_cancelled for request in waiting)
        assert self.is_paused or not waiting or self.queue.active >= self.queue.slots
        assert self.queue.active <= max(self.queue.slots, self.most_active)
        self.most_active = max(self.queue.slots, self.queue.active)
        shares = self.queue.snapshot()
        assert sum(share.pending for share in shares) == len(waiting)
        assert sum(share.active for share in shares) == len(running)
        assert all(share.score >= 0 for share in shares)


@examples(50)
@given(steps=STEPS)
def test_whatever_happens_nobody_is_lost_and_no_slot_stays_free_while_somebody_waits(steps: list[tuple[object, ...]]) -> None:
    async def go_through() -> None:
        run = RandomRun()
        for name, *arguments in steps:
            await run.step(str(name), *arguments)
        await settle()
        run.check()
        run.queue.resume()
        run.queue.resize(1)
        run.is_paused = False
        await settle()
        for _ in range(len(run.requests)):
            for request in run.running():
                request.has_left = True
                run.queue.leave(request.task.result())
            await settle()
        assert all(request.task.done() for request in run.requests)
        assert (run.queue.active, run.queue.depth, run.budget.depth) == (0, 0, 0)
        for request in run.requests:
            if not request.task.cancelled():
                request.task.exception()  # refusals were expected

    with asyncio.Runner() as runner:
        runner.run(go_through())
