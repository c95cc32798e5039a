"""The queue of one model: shares by weight, limits, priorities, and nobody lost in any order of events."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.admission import FairQueue, Priority, QueueLimits, Turn, WaitBudget
from runner.errors import ModelQueueFull, ModelUnloading, QueueFull, QueueTimeout, TenantQueueFull
from tests.fakes.clock import install_virtual_clock
from tests.fakes.examples import examples
from tests.fakes.queue_visitors import LONG_S, Visitors, settle


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


async def test_the_soft_cap_is_borrowed_while_nobody_else_waits_and_then_stands_behind() -> None:
    visitors = Visitors(slots=2)
    await visitors.come("a1", "a2", "a3", "a4")
    assert visitors.served == ["a1", "a2"]
    visitors.clock.advance(0.5)
    await visitors.come("b1")
    await visitors.go("a1", after_s=0.1)
    assert visitors.served[-1] == "b1"
    equal = Visitors(slots=2)
    await equal.come("a1", "b1", "a2", "b2")
    await equal.go("b1")
    assert equal.served[-1] == "b2"  # although a was served longer ago


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


async def test_a_tenant_is_forgotten_after_the_idle_time_and_accounts_are_bounded() -> None:
    visitors = Visitors()
    for number in range(1500):
        turn = await visitors.queue.enter(tenant=f"tenant-{number}", priority="normal", timeout_s=1.0)
        visitors.queue.leave(turn)
    assert (len(visitors.known()), "tenant-1499" in visitors.known()) == (1000, True)
    visitors.clock.advance(299.0)
    assert visitors.known()
    visitors.clock.advance(1.0)
    assert visitors.known() == set()


async def refused(visitors: Visitors, name: str) -> BaseException:
    """Return the error with which a request is turned away without waiting."""
    await visitors.come(name)
    error = visitors.tasks[name].exception()
    assert error is not None
    return error


async def test_a_tenant_and_a_model_have_only_so_many_requests_waiting() -> None:
    visitors = Visitors(limits=QueueLimits(pending_per_key=2))
    await visitors.come("a1", "a2", "a3")
    error = await refused(visitors, "a4")
    assert isinstance(error, TenantQueueFull)
    assert (error.code, error.status, error.details) == ("fairness_key_queue_full", 429, {"queueDepth": 2})
    await visitors.come("b1")
    assert not visitors.tasks["b1"].done()
    assert (visitors.queue.rejected_per_key_limit, visitors.queue.rejected_executor_limit) == (1, 0)
    assert {share.fairness_key: share.rejected for share in visitors.queue.snapshot()} == {"a": 1, "b": 0}
    visitors = Visitors(limits=QueueLimits(pending_per_executor=2))
    await visitors.come("a1", "a2", "b1")
    error = await refused(visitors, "c1")
    assert isinstance(error, ModelQueueFull)
    assert (error.code, error.status, error.details) == ("executor_queue_full", 429, {"queueDepth": 2})
    assert (visitors.queue.rejected_per_key_limit, visitors.queue.rejected_executor_limit) == (0, 1)
    assert visitors.known() == {"a", "b"}  # a refused stranger leaves no account


async def test_the_box_has_only_so_many_requests_waiting_over_all_models() -> None:
    first, second = Visitors(max_depth=2), Visitors()
    second.queue = FairQueue(slots=1, limits=QueueLimits(), budget=first.budget, weight_of=lambda _: 1.0)
    await first.come("a1", "a2")
    await second.come("a1", "a2")
    assert (first.budget.depth, first.queue.depth, second.queue.depth) == (2, 1, 1)
    assert isinstance(await refused(first, "b1"), QueueFull)
    assert first.queue.cancel_waiting(ModelUnloading("gone")) == 1
    assert first.budget.depth == 1
    await settle()
    assert isinstance(first.tasks["a2"].exception(), ModelUnloading)
    second.tasks["a2"].cancel()
    await settle()
    assert first.budget.depth == 0


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
    for wait_s, advice_s in ((0.001, 1), (10_000.0, 60)):
        visitors = Visitors(max_depth=1)
        await visitors.come("a1", "a2")
        await visitors.go("a1", after_s=wait_s)
        await visitors.come("a3")
        error = await refused(visitors, "a4")
        assert isinstance(error, QueueFull)
        assert error.retry_after_s == advice_s


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


async def test_waits_are_averaged_over_the_last_five_minutes_and_the_last_thousand() -> None:
    clock, budget = install_virtual_clock(), WaitBudget(16)
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
        st.tuples(st.just("enter"), TENANTS, PRIORITIES), st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)), st.tuples(st.just("resize"), st.integers(0, 4)),
        st.tuples(st.just("pass"), st.floats(0.0, 30.0)),
        st.tuples(st.sampled_from(("pause", "resume", "refuse", "settle", "settle", "settle"))),
    ),
    max_size=60,
)  # fmt: skip


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
                    for _ in range(1 + index % 2):  # leaving twice is leaving once
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
