"""Whose turn it is: what each tenant has had of a model, and the choice among those who wait. No asyncio scheduling here.

The score is start-time fair queueing (Goyal, Vin and Cheng, 1996) with measured service time: virtual milliseconds, that is
slot time divided by weight. Whoever has had least is next.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

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
