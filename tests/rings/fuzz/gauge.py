"""What a process costs while it is tormented: time of its first thread, where the event loop is, and memory."""

from __future__ import annotations

from pathlib import Path

import psutil


class Gauge:
    """One process, by its id."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._schedule = Path(f"/proc/{pid}/task/{pid}/schedstat")

    def read_cpu_s(self) -> float:
        """Return seconds that its first thread has run, to the microsecond where the kernel tells."""
        try:
            return int(self._schedule.read_text().split()[0]) / 1e9
        except OSError:
            return next(thread.user_time + thread.system_time for thread in self._process.threads())

    def read_rss_bytes(self) -> int:
        """Return how much memory it holds."""
        return int(self._process.memory_info().rss)
