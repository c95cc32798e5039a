"""How long to wait before a child that died is started again."""

from __future__ import annotations

from dataclasses import dataclass

from core.limits import limits


@dataclass(slots=True)
class Backoff:
    """None at first, then exponential pauses from ``restart_first_s`` on; a run of ``restart_healthy_s`` starts over."""

    failures: int = 0

    def next_pause_s(self, ran_s: float) -> float:
        """Return the pause after a run of ``ran_s`` seconds that ended unasked."""
        bounds = limits().launcher
        if ran_s >= bounds.restart_healthy_s:
            self.failures = 0
        pause = min(bounds.restart_first_s * 2.0 ** min(self.failures - 1, 16), bounds.restart_max_s) if self.failures else 0.0
        self.failures += 1
        return pause
