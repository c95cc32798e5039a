"""Queue in front of each model, and the tenants in it: who is served when, the waits of the whole node, weights and rates.

Every decision is taken synchronously on the event loop, so there is no lock: waiting is one future per request.
The score is start-time fair queueing (Goyal, Vin and Cheng, 1996) with measured service time: virtual milliseconds, that is
slot time divided by weight. Whoever has had least is next. A rate is an exact moving window, in this process only.
"""

from __future__ import annotations

import asyncio
import copy
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from runner.config import read_switch
from runner.definitions.settings import Fairness
from runner.errors import (
    ConfigError,
    InvalidRequest,
    ModelQueueFull,
    QueueFull,
    QueueTimeout,
    RateLimitExceeded,
    RequestRefused,
    TenantQueueFull,
)
from runner.limits import limits as process_limits
from wire import clock

Priority = Literal["high", "normal", "low"]
CLASSES: dict[Priority, int] = {"low": 0, "normal": 1, "high": 2}
_HIGHEST = max(CLASSES.values())

ANONYMOUS = "anonymous"
DEFAULT = "default"
"""Stands for every tenant that has no variable of its own."""
_WEIGHT_PREFIX = "TENANT_WEIGHT_"
_RATE_PREFIX = "TENANT_RATE_LIMIT_"
_FALLBACK_VARIABLE = "DEFAULT_RATE_LIMIT"
_SWITCH_VARIABLE = "ENABLE_MULTI_TENANT"
_RATE = re.compile(r"\s*([0-9]{1,9})\s*req\s*/\s*([a-z]+)\s*", re.IGNORECASE)
_UNITS = {"s": "s", "sec": "s", "second": "s", "min": "min", "minute": "min", "h": "hour", "hour": "hour"}
_PERIODS_S = {"s": 1.0, "min": 60.0, "hour": 3600.0}


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
        self.active -= 1
        self.started_sum = self.started_sum - started_at if self.active else 0.0
        self.charged += (now - started_at) * 1000 / self.weight


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
    # Waiting lifts a request against those of other classes only. Were it lifted against its own class too, then every queue
    # whose waits come near ``starvation_s`` would serve whoever waits longest, and weights would mean nothing.
    highest = max(lifted for lifted, _, _ in heads)
    level = min((rank, head) for lifted, rank, head in heads if lifted == highest)[1].level
    return min((rank, head) for _, rank, head in heads if head.level == level)[1]


class WaitBudget:
    """Shared by all queues of the node: at most ``max_depth`` requests wait (MAX_QUEUE_DEPTH)."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._limits = process_limits().admission
        self.depth = 0
        self._samples: deque[tuple[float, int]] = deque()
        self._sum_us = 0

    @property
    def is_full(self) -> bool:
        return self.depth >= self.max_depth

    def add(self) -> None:
        self.depth += 1

    def remove(self) -> None:
        self.depth -= 1

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

    Beyond ``soft_inflight_per_key`` of the limits, running requests of a tenant stand behind others of equal score; their
    ``pending_*`` bound who may wait. ``weight_of``, not those limits, has the operator's weight of a tenant, above 0.
    """

    def __init__(self, *, slots: int, limits: Fairness, budget: WaitBudget, weight_of: Callable[[str], float]) -> None:
        self.slots = slots
        self._limits = limits
        self._bounds = process_limits().admission
        self._budget = budget
        self._weight_of = weight_of
        self._running: dict[Turn, Key] = {}
        self._busy: dict[str, Key] = {}
        self._idle: OrderedDict[str, tuple[float, Key]] = OrderedDict()
        self._floor = 0.0
        self.depth = 0
        self._numbered = 0
        self._service_s = self._bounds.assumed_service_s
        self._has_measured = False
        self._is_paused = False
        self._all_left = asyncio.Event()
        self.rejected_per_key_limit = 0
        self.rejected_executor_limit = 0

    @property
    def active(self) -> int:
        """Requests that run; above ``slots`` for a while after slots were taken away."""
        return len(self._running)

    async def enter(self, *, tenant: str, priority: Priority, timeout_s: float) -> Turn:
        """Take a slot, waiting for at most ``timeout_s`` seconds; give the turn back with ``leave``, in ``finally``.

        Raises TenantQueueFull, ModelQueueFull or QueueFull at once, QueueTimeout later, or what ``cancel_waiting`` was given.
        A free slot is taken without suspending.
        """
        now = clock.monotonic()
        if self.depth == 0 and len(self._running) < self.slots and not self._is_paused:
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

    def cancel_waiting(self, error: RequestRefused) -> None:
        """Refuse everybody who waits with ``error``. What runs goes on."""
        waiters = [waiter for key in self._busy.values() for line in key.lines for waiter in line]
        now = clock.monotonic()
        for waiter in waiters:
            self._refuse(waiter, copy.copy(error), now)

    def resize(self, slots: int) -> None:
        """Set the number of slots (0 or more). Fewer than run now stop nobody."""
        self.slots = slots
        self._grant(clock.monotonic())

    def pause(self) -> None:
        """Let nobody in until ``resume``; those who come wait. Pausing twice is pausing once."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False
        self._grant(clock.monotonic())

    async def wait_idle(self) -> None:
        """Return when nothing runs. Put a timeout around it, and ``pause`` before it, or the next request may run by then."""
        while self._running:
            self._all_left.clear()
            await self._all_left.wait()

    def list_accounts(self) -> list[tuple[Key, float]]:
        """Return the accounts of all tenants that are known, those with work first, each with its score now."""
        now = clock.monotonic()
        self._forget_idle(now)
        return [(key, key.score(now)) for key in (*self._busy.values(), *(key for _, key in self._idle.values()))]

    def retry_after_s(self) -> int:
        """Return the seconds in which what waits now is probably worked off, 1 to 60, from the average service time."""
        seconds = self._service_s * max(1, self.depth) / max(1, self.slots)
        return max(self._bounds.retry_least_s, min(self._bounds.retry_most_s, math.ceil(seconds)))

    def _line_up(self, tenant: str, level: int, now: float) -> Waiter:
        self._check_room(tenant)
        key = self._open_key(tenant, now)
        self._numbered += 1
        future: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        waiter = Waiter(key=key, level=level, since=now, number=self._numbered, turn=future)
        key.lines[level].append(waiter)
        key.pending += 1
        self.depth += 1
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
        elif self.depth >= self._limits.pending_per_executor:
            self.rejected_executor_limit += 1
            text = f"{self.depth} requests already wait for this model, {advice}"
            refusal = ModelQueueFull(text, retry_after_s=seconds, details={"queueDepth": self.depth})
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
        key = self._busy.get(tenant)
        if key is not None:
            return key
        self._forget_idle(now)
        # Whoever was away has saved up nothing, but still owes: it begins level with those who compete.
        if self._busy:
            self._floor = max(self._floor, min(other.score(now) for other in self._busy.values()))
        known = self._idle.pop(tenant, None)
        if known is None:
            key = Key(tenant=tenant, weight=self._weight_of(tenant), charged=self._floor)
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
        while self.depth and len(self._running) < self.slots and not self._is_paused:
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
        self.depth -= 1
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
        if waiter.is_in_line:
            self._remove(waiter)
            self._settle(waiter.key, clock.monotonic())
        # The grant may have come in the same tick as the cancellation.
        elif waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
            self.leave(waiter.turn.result())

    def _measure(self, service_s: float) -> None:
        share = 0.2 if self._has_measured else 1.0
        self._service_s += share * (service_s - self._service_s)
        self._has_measured = True


def clean_tenant(text: str) -> str:
    """Return the tenant that a request names (``X-Tenant-ID``), ``anonymous`` when it names none. Raises InvalidRequest."""
    tenant = text.strip()
    if not tenant:
        return ANONYMOUS
    if not _is_name(tenant):
        message = f"X-Tenant-ID must be at most {process_limits().admission.tenant_chars} printable ASCII characters"
        raise InvalidRequest(message, param="X-Tenant-ID")
    return tenant


def read_tenant_variables(env: Mapping[str, str], prefix: str) -> dict[str, tuple[str, str]]:
    """Return ``{tenant: (variable, its text)}`` of the variables ``<prefix><tenant>``. Raises ConfigError."""
    found: dict[str, tuple[str, str]] = {}
    for variable, text in env.items():
        if not variable.startswith(prefix):
            continue
        tenant = variable[len(prefix) :]
        if not tenant or tenant != tenant.strip() or not _is_name(tenant):
            shape = f"{prefix}<tenant>, the tenant at most {process_limits().admission.tenant_chars} printable ASCII characters"
            raise ConfigError(f"{variable!a} names no tenant: write {shape}")
        found[tenant] = (variable, text)
    return found


def read_weights(env: Mapping[str, str]) -> Callable[[str], float]:
    """Return the weight of a tenant as ``TENANT_WEIGHT_<tenant>=2.5`` sets it.

    Those without one have that of ``TENANT_WEIGHT_default``, or 1. Raises ConfigError.
    """
    weights = {
        tenant: _read_weight(variable, text) for tenant, (variable, text) in read_tenant_variables(env, _WEIGHT_PREFIX).items()
    }
    usual = weights.pop(DEFAULT, 1.0)
    return lambda tenant: weights.get(tenant, usual)


@dataclass(frozen=True, slots=True)
class Rate:
    """``limit`` requests per ``unit`` (s, min or hour)."""

    limit: int
    unit: str

    @property
    def period_s(self) -> float:
        return _PERIODS_S[self.unit]


class TenantRates:
    """The windows of all tenants. ``by_tenant`` are the tenants that have a rate of their own, ``usual`` is that of the others.

    Not ``is_multi_tenant``: everybody shares one window of the usual rate.
    """

    def __init__(self, *, by_tenant: Mapping[str, Rate], usual: Rate | None, is_multi_tenant: bool) -> None:
        self.is_multi_tenant = is_multi_tenant
        self._usual = usual
        self._own = {tenant: (rate, deque[float]()) for tenant, rate in by_tenant.items()} if is_multi_tenant else {}
        self._strangers: OrderedDict[str, deque[float]] = OrderedDict()
        self._shared: deque[float] = deque()

    def take(self, tenant: str) -> None:
        """Count a request that begins now. Raises RateLimitExceeded, and then counts nothing."""
        now = clock.monotonic()
        own = self._own.get(tenant)
        if own is not None:
            rate, window = own
            _take_from(window, rate, tenant, now)
        elif self._usual is not None:
            key = tenant if self.is_multi_tenant else DEFAULT
            _take_from(self._stranger_window(key, self._usual, now), self._usual, tenant, now)
            # Refused requests do not get here, so the windows stay in the order in which they will be empty.
            if key in self._strangers:
                self._strangers.move_to_end(key)

    def _stranger_window(self, key: str, rate: Rate, now: float) -> deque[float]:
        window = self._strangers.get(key)
        if window is not None:
            return window
        while self._strangers:
            oldest = next(iter(self._strangers.values()))
            if oldest and oldest[-1] > now - rate.period_s:
                break
            self._strangers.popitem(last=False)
        if len(self._strangers) >= process_limits().admission.tenant_windows:
            return self._shared
        window = self._strangers[key] = deque()
        return window


def _take_from(window: deque[float], rate: Rate, tenant: str, now: float) -> None:
    while window and window[0] <= now - rate.period_s:
        window.popleft()
    if len(window) >= rate.limit:
        wait_s = window[0] + rate.period_s - now
        reset_at = math.ceil(clock.unix_s() + wait_s)
        details: dict[str, object] = {"limit": rate.limit, "remaining": 0, "resetAt": reset_at}
        raise RateLimitExceeded(f"Tenant {tenant} exceeded {rate.limit} req/{rate.unit}", retry_after_s=wait_s, details=details)
    window.append(now)


def read_rates(env: Mapping[str, str]) -> TenantRates:
    """Return the rates of ``TENANT_RATE_LIMIT_<tenant>=100req/min`` (or req/s, req/hour).

    Other tenants have that of ``TENANT_RATE_LIMIT_default``, else of ``DEFAULT_RATE_LIMIT``, else none. With
    ``ENABLE_MULTI_TENANT=false`` all share that one. Raises ConfigError, which names the variable.
    """
    variables = read_tenant_variables(env, _RATE_PREFIX)
    rates = {tenant: _read_rate(variable, text) for tenant, (variable, text) in variables.items()}
    usual = rates.pop(DEFAULT, None)
    fallback_text = env.get(_FALLBACK_VARIABLE, "")
    fallback = _read_rate(_FALLBACK_VARIABLE, fallback_text) if fallback_text.strip() else None
    return TenantRates(
        by_tenant=rates,
        usual=usual if usual is not None else fallback,
        is_multi_tenant=read_switch(_SWITCH_VARIABLE, env.get(_SWITCH_VARIABLE, ""), default=True),
    )


def _read_rate(variable: str, text: str) -> Rate:
    match = _RATE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{variable} must look like 100req/min, 5req/s or 2000req/hour, not {text!r}")
    limit = int(match[1])
    if not 1 <= limit <= process_limits().admission.rate:
        raise ConfigError(f"{variable} must allow from 1 to {process_limits().admission.rate} requests, not {limit}")
    return Rate(limit, unit)


def _is_name(text: str) -> bool:
    return len(text) <= process_limits().admission.tenant_chars and text.isascii() and text.isprintable()


def _read_weight(variable: str, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight <= process_limits().admission.weight:
        raise ConfigError(
            f"{variable} must be a number above 0 and at most {process_limits().admission.weight:g}, such as 2.5, not {text!r}"
        )
    return weight
