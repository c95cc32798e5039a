"""How many requests wait on the box, over all models, and how long those waited that were let in lately."""

from __future__ import annotations

import math
from collections import deque

from runner.limits import limits
from wire import clock


class WaitBudget:
    """Shared by all queues of the box: at most ``max_depth`` requests wait (MAX_QUEUE_DEPTH)."""

    def __init__(self, max_depth: int) -> None:
        self.max_depth = max_depth
        self._limits = limits().admission
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
