"""The queue in front of one model: slots, who waits for them, what each tenant has had, and the waits of the whole box.

Every decision is taken synchronously on the event loop, so there is no lock: waiting is one future per request.
The score is start-time fair queueing (Goyal, Vin and Cheng, 1996) with measured service time: virtual milliseconds, that is
slot time divided by weight. Whoever has had least is next.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from runner.errors import ModelQueueFull, QueueFull, QueueTimeout, RequestRefused, TenantQueueFull
from runner.limits import limits as process_limits
from wire import clock

Priority = Literal["high", "normal", "low"]
CLASSES: dict[Priority, int] = {"low": 0, "normal": 1, "high": 2}
_HIGHEST = max(CLASSES.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    """Limits of one model's queue. A key is a tenant.

    Beyond ``soft_inflight_per_key`` running requests a key stands behind others of equal score. ``pending_*`` bound who may
    wait.
    """

    soft_inflight_per_key: int = 1
    pending_per_key: int = 32
    pending_per_executor: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyShare:
    """What one tenant has and had of a model. ``score`` is in milliseconds of slot time per unit of weight."""

    fairness_key: str
    pending: int
    active: int
    weight: float
    score: float
    rejected: int


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """The right to use one slot, until ``FairQueue.leave``. ``started_at`` is on the queue's clock, in seconds."""

    tenant: str
    waited_ms: float
    started_at: float


@dataclass(slots=True, eq=False)
class Key:
    """The account of one tenant with one model; ``lines`` are its waiting requests, first come first, one line per class."""

    tenant: str
    weight: float
    charged: float
    """Virtual milliseconds of finished work, and of what it was set to when it began to compete."""
    active: int = 0
    started_sum: float = 0.0
    pending: int = 0
    last_granted: int = 0
    rejected: int = 0
    lines: tuple[deque[Waiter], ...] = field(default_factory=lambda: tuple(deque() for _ in CLASSES))

    @property
    def is_busy(self) -> bool:
        """Whether it has anything running or waiting."""
        return self.active > 0 or self.pending > 0

    def score(self, now: float) -> float:
        """Return its virtual milliseconds, running work included up to ``now``."""
        return self.charged + (self.active * now - self.started_sum) * 1000 / self.weight

    def start(self, now: float, *, number: int) -> None:
        """Begin to count a request that runs; ``number`` grows with each one granted."""
        self.active += 1
        self.started_sum += now
        self.last_granted = number

    def finish(self, started_at: float, now: float) -> None:
        """Charge a request that ran, well or not."""
        self.active -= 1
        self.started_sum = self.started_sum - started_at if self.active else 0.0
        self.charged += (now - started_at) * 1000 / self.weight

    def share(self, now: float) -> KeyShare:
        """Return the account as it is shown."""
        return KeyShare(
            fairness_key=self.tenant,
            pending=self.pending,
            active=self.active,
            weight=self.weight,
            score=self.score(now),
            rejected=self.rejected,
        )


@dataclass(slots=True, eq=False)
class Waiter:
    """One request in a line. ``since`` is on the queue's clock, ``number`` its place in order of arrival."""

    key: Key
    level: int
    since: float
    number: int
    turn: asyncio.Future[Turn]
    is_in_line: bool = True


def choose_next(keys: Iterable[Key], *, now: float, soft_inflight: int, starvation_s: float) -> Waiter:
    """Return who is served next: highest class, lowest score, below the soft cap, longest not served. Somebody must wait.

    For every ``starvation_s`` that a request has waited it counts as one class higher.
    Waiting lifts a request against those of other classes only. Were it lifted against its own class too, then every queue
    whose waits come near ``starvation_s`` would serve whoever waits longest, and weights would mean nothing.
    """
    heads: list[tuple[int, tuple[float, bool, int, int], Waiter]] = []
    for key in keys:
        if not key.pending:
            continue
        score, is_at_cap = key.score(now), key.active >= soft_inflight
        for line in key.lines:
            if line:
                head = line[0]
                lifted = min(_HIGHEST, head.level + int((now - head.since) / starvation_s))
                heads.append((lifted, (score, is_at_cap, key.last_granted, head.number), head))
    highest = max(lifted for lifted, _, _ in heads)
    level = min((rank, head) for lifted, rank, head in heads if lifted == highest)[1].level
    return min((rank, head) for _, rank, head in heads if head.level == level)[1]


class WaitBudget:
    """Shared by all queues of the box: at most ``max_depth`` requests wait (MAX_QUEUE_DEPTH)."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._limits = process_limits().admission
        self._depth = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._sum_us = 0

    @property
    def depth(self) -> int:
        """Requests that wait now."""
        return self._depth

    @property
    def is_full(self) -> bool:
        """Whether nobody else may wait."""
        return self._depth >= self.max_depth

    def add(self) -> None:
        """Count a request that begins to wait; pair with ``remove``."""
        self._depth += 1

    def remove(self) -> None:
        """Count a request that no longer waits, whatever ended it."""
        self._depth -= 1

    def observe(self, wait_ms: float) -> None:
        """Record the wait of a request that was let in, 0 for one that found a free slot."""
        # Whole microseconds, because a running sum of floats drifts.
        sample_us = int(wait_ms * 1000)
        self._samples.append((clock.monotonic(), sample_us))
        self._sum_us += sample_us
        if len(self._samples) > self._limits.wait_samples:
            self._drop_oldest()

    @property
    def avg_wait_ms(self) -> float:
        """Mean wait in milliseconds of the last 5 minutes, at most 1000 requests; 0 when there were none."""
        self._drop_outdated()
        return self._sum_us / 1000 / len(self._samples) if self._samples else 0.0

    @property
    def p95_wait_ms(self) -> float:
        """The wait in milliseconds that 95 % of the same requests did not exceed (nearest rank); 0 when there were none."""
        self._drop_outdated()
        if not self._samples:
            return 0.0
        waits = sorted(sample_us for _, sample_us in self._samples)
        return waits[math.ceil(0.95 * len(waits)) - 1] / 1000

    def _drop_outdated(self) -> None:
        oldest = clock.monotonic() - self._limits.wait_window_s
        while self._samples and self._samples[0][0] < oldest:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._sum_us -= self._samples.popleft()[1]


class FairQueue:
    """``slots`` requests of one model run at once, the others wait their turn. For use on one event loop.

    ``weight_of`` is the operator's weight of a tenant, above 0.
    """

    def __init__(
        self,
        *,
        slots: int,
        limits: QueueLimits,
        budget: WaitBudget,
        weight_of: Callable[[str], float],
    ) -> None:
        self._slots = _checked_slots(slots)
        self._limits = limits
        self._bounds = process_limits().admission
        self._budget = budget
        self._weight_of = weight_of
        self._running: dict[Turn, Key] = {}
        self._busy: dict[str, Key] = {}
        self._idle: OrderedDict[str, tuple[float, Key]] = OrderedDict()
        self._floor = 0.0
        self._depth = 0
        self._numbered = 0
        self._service_s = self._bounds.assumed_service_s
        self._has_measured = False
        self._is_paused = False
        self._all_left = asyncio.Event()
        self.rejected_per_key_limit = 0
        self.rejected_executor_limit = 0

    @property
    def slots(self) -> int:
        """Requests that may run at once."""
        return self._slots

    @property
    def active(self) -> int:
        """Requests that run; above ``slots`` for a while after slots were taken away."""
        return len(self._running)

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return self._depth

    async def enter(self, *, tenant: str, priority: Priority, timeout_s: float) -> Turn:
        """Take a slot, waiting for at most ``timeout_s`` seconds; give the turn back with ``leave``, in ``finally``.

        Raises TenantQueueFull, ModelQueueFull or QueueFull at once, QueueTimeout later, or what ``cancel_waiting`` was given.
        A free slot is taken without suspending.
        """
        now = clock.monotonic()
        if self._depth == 0 and len(self._running) < self._slots and not self._is_paused:
            return self._start(self._open_key(tenant, now), now, waited_ms=0.0)
        waiter = self._line_up(tenant, CLASSES[priority], now)
        timer = waiter.turn.get_loop().call_later(max(0.0, timeout_s), self._expire, waiter, timeout_s)
        turn: Turn | None = None
        try:
            turn = await waiter.turn
            return turn
        finally:
            timer.cancel()
            if turn is None:
                self._abandon(waiter)

    def leave(self, turn: Turn) -> None:
        """Charge the time since the grant to the tenant and let the next one in. Further calls do nothing."""
        key = self._running.pop(turn, None)
        if key is None:
            return
        now = clock.monotonic()
        key.finish(turn.started_at, now)
        self._measure(now - turn.started_at)
        self._settle(key, now)
        self._grant(now)
        if not self._running:
            self._all_left.set()

    def cancel_waiting(self, error: RequestRefused) -> int:
        """Refuse everybody who waits with ``error``; return how many. What runs goes on."""
        waiters = [waiter for key in self._busy.values() for line in key.lines for waiter in line]
        now = clock.monotonic()
        for waiter in waiters:
            self._refuse(waiter, copy.copy(error), now)
        return len(waiters)

    def resize(self, slots: int) -> None:
        """Set the number of slots (0 or more). Fewer than run now stop nobody. Raises ValueError."""
        self._slots = _checked_slots(slots)
        self._grant(clock.monotonic())

    def pause(self) -> None:
        """Let nobody in until ``resume``; those who come wait. Pausing twice is pausing once."""
        self._is_paused = True

    def resume(self) -> None:
        """Let requests in again."""
        self._is_paused = False
        self._grant(clock.monotonic())

    async def wait_idle(self) -> None:
        """Return when nothing runs. Put a timeout around it, and ``pause`` before it, or the next request may run by then."""
        while self._running:
            self._all_left.clear()
            await self._all_left.wait()

    def snapshot(self) -> list[KeyShare]:
        """Return the accounts of all tenants that are known, those with work first."""
        now = clock.monotonic()
        self._forget_idle(now)
        return [key.share(now) for key in (*self._busy.values(), *(key for _, key in self._idle.values()))]

    def retry_after_s(self) -> int:
        """Return the seconds in which what waits now is probably worked off, 1 to 60, from the average service time."""
        seconds = self._service_s * max(1, self._depth) / max(1, self._slots)
        return max(self._bounds.retry_least_s, min(self._bounds.retry_most_s, math.ceil(seconds)))

    def _line_up(self, tenant: str, level: int, now: float) -> Waiter:
        self._check_room(tenant)
        key = self._open_key(tenant, now)
        self._numbered += 1
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        waiter = Waiter(key=key, level=level, since=now, number=self._numbered, turn=future)
        key.lines[level].append(waiter)
        key.pending += 1
        self._depth += 1
        self._budget.add()
        return waiter

    def _check_room(self, tenant: str) -> None:
        # A refused stranger gets no account: refusals must not cost memory.
        key = self._busy.get(tenant)
        seconds = self.retry_after_s()
        advice = f"retry in {seconds} second{'' if seconds == 1 else 's'}"
        refusal: RequestRefused
        if key is not None and key.pending >= self._limits.pending_per_key:
            self.rejected_per_key_limit += 1
            text = f"{key.pending} requests of tenant {tenant} already wait for this model, {advice}"
            refusal = TenantQueueFull(text, retry_after_s=seconds, details={"queueDepth": key.pending})
        elif self._depth >= self._limits.pending_per_executor:
            self.rejected_executor_limit += 1
            text = f"{self._depth} requests already wait for this model, {advice}"
            refusal = ModelQueueFull(text, retry_after_s=seconds, details={"queueDepth": self._depth})
        elif self._budget.is_full:
            text = f"Queue depth {self._budget.depth}/{self._budget.max_depth}, {advice}"
            details: dict[str, object] = {"queueDepth": self._budget.depth, "avgWaitMs": round(self._budget.avg_wait_ms)}
            refusal = QueueFull(text, retry_after_s=seconds, details=details)
        else:
            return
        if key is not None:
            key.rejected += 1
        raise refusal

    def _open_key(self, tenant: str, now: float) -> Key:
        """Return the tenant's account, ready to compete: whoever was away has saved up nothing, but still owes."""
        key = self._busy.get(tenant)
        if key is not None:
            return key
        self._forget_idle(now)
        if self._busy:
            self._floor = max(self._floor, min(other.score(now) for other in self._busy.values()))
        known = self._idle.pop(tenant, None)
        if known is None:
            key = Key(tenant=tenant, weight=_checked_weight(self._weight_of(tenant)), charged=self._floor)
        else:
            key = known[1]
            key.charged = max(key.charged, self._floor)
        self._busy[tenant] = key
        return key

    def _settle(self, key: Key, now: float) -> None:
        if key.is_busy:
            return
        del self._busy[key.tenant]
        if not self._busy:
            self._floor = max(self._floor, key.charged)
        self._idle[key.tenant] = (now, key)
        self._forget_idle(now)

    def _forget_idle(self, now: float) -> None:
        # In order of going idle, so the first that stays ends the search.
        oldest = now - self._bounds.idle_tenant_s
        while self._idle:
            since, _ = next(iter(self._idle.values()))
            if since > oldest and len(self._idle) <= self._bounds.idle_tenants:
                return
            self._idle.popitem(last=False)

    def _start(self, key: Key, now: float, *, waited_ms: float) -> Turn:
        self._numbered += 1
        key.start(now, number=self._numbered)
        turn = Turn(key.tenant, waited_ms, now)
        self._running[turn] = key
        self._budget.observe(waited_ms)
        return turn

    def _grant(self, now: float) -> None:
        while self._depth and len(self._running) < self._slots and not self._is_paused:
            waiter = choose_next(
                self._busy.values(),
                now=now,
                soft_inflight=self._limits.soft_inflight_per_key,
                starvation_s=self._bounds.starvation_s,
            )
            self._remove(waiter)
            if waiter.turn.done():  # cancelled in this very tick: its task has not run yet
                self._settle(waiter.key, now)
                continue
            waiter.turn.set_result(self._start(waiter.key, now, waited_ms=(now - waiter.since) * 1000))

    def _remove(self, waiter: Waiter) -> None:
        waiter.is_in_line = False
        waiter.key.lines[waiter.level].remove(waiter)
        waiter.key.pending -= 1
        self._depth -= 1
        self._budget.remove()

    def _refuse(self, waiter: Waiter, error: RequestRefused, now: float) -> None:
        if not waiter.is_in_line:
            return
        self._remove(waiter)
        self._settle(waiter.key, now)
        if not waiter.turn.done():
            waiter.turn.set_exception(error)

    def _expire(self, waiter: Waiter, timeout_s: float) -> None:
        seconds = self.retry_after_s()
        text = f"no slot of this model became free within {timeout_s:g} s, retry in {seconds} s"
        details: dict[str, object] = {"queueDepth": self._budget.depth, "avgWaitMs": round(self._budget.avg_wait_ms)}
        self._refuse(waiter, QueueTimeout(text, retry_after_s=seconds, details=details), clock.monotonic())

    def _abandon(self, waiter: Waiter) -> None:
        """Undo the place or, when the grant came in the same tick as the cancellation, the grant."""
        if waiter.is_in_line:
            self._remove(waiter)
            self._settle(waiter.key, clock.monotonic())
        elif waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
            self.leave(waiter.turn.result())

    def _measure(self, service_s: float) -> None:
        share = 0.2 if self._has_measured else 1.0
        self._service_s += share * (service_s - self._service_s)
        self._has_measured = True


def _checked_slots(slots: int) -> int:
    if slots < 0:
        raise ValueError(f"a queue cannot have {slots} slots")
    return slots


def _checked_weight(weight: float) -> float:
    if not 0 < weight < math.inf:
        raise ValueError(f"a weight must be above 0 and finite, not {weight}")
    return weight
