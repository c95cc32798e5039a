"""How long to wait before a child that died is started again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """None at first, then exponential pauses from ``first_s`` to ``longest_s``; a run of ``healthy_s`` starts over."""

    first_s: float = 0.5
    longest_s: float = 15.0
    healthy_s: float = 10.0
    failures: int = 0

    def next_pause_s(self, ran_s: float) -> float:
        """Return the pause after a run of ``ran_s`` seconds that ended unasked."""
        if ran_s >= self.healthy_s:
            self.failures = 0
        pause = min(self.first_s * 2.0 ** min(self.failures - 1, 16), self.longest_s) if self.failures else 0.0
        self.failures += 1
        return pause
