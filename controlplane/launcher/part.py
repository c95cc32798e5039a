"""One supervised child: how it is started, when it counts as ready, how it is stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from controlplane.launcher.backoff import Backoff
from controlplane.launcher.logs import open_log, read_last_line
from controlplane.launcher.processes import Child, Command, identify, send_group, start
from core.limits import limits
from wire import clock

_CAN_PEEK = hasattr(os, "waitid")


@dataclass(frozen=True, slots=True)
class PartSpec:
    """What a part is. ``command`` is asked anew at each start, after ``before_start`` has cleared the ground."""

    name: str
    command: Callable[[], Command]
    is_ready: Callable[[int], bool]
    before_start: Callable[[], None] | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_deadline_s: float = field(default_factory=lambda: limits().launcher.stop_s)
    start_deadline_s: float = field(default_factory=lambda: limits().launcher.start_s)


@dataclass(slots=True)
class Part:
    """A part with its process. ``restart_at`` (monotonic) is set while it is down and waits for its next start.

    ``late_said_at`` (monotonic): when the person was last told that it is not ready yet. ``logged_before``: bytes
    of its log that are of earlier starts.
    """

    spec: PartSpec
    log_path: Path
    backoff: Backoff = field(default_factory=Backoff)
    process: Child | None = None
    identity: str = ""
    started_at: float = 0.0
    late_said_at: float = 0.0
    logged_before: int = 0
    is_ready: bool = False
    restart_at: float | None = None

    def start(self) -> None:
        """Start the child. Raises OSError when it cannot be executed and LauncherError when the ground is not clear."""
        if self.spec.before_start:
            self.spec.before_start()
        with open_log(self.log_path) as log:
            self.logged_before = self.log_path.stat().st_size
            self.process = start(self.spec.command(), log)
        self.identity = identify(self.process.pid) or ""
        self.started_at = self.late_said_at = clock.monotonic()
        self.is_ready = False
        self.restart_at = None

    @property
    def last_line(self) -> str:
        """What it logged last since it was started."""
        return read_last_line(self.log_path, since=self.logged_before)

    def probe(self) -> bool:
        """Return whether the part is ready, asking it when it was not yet."""
        if not self.is_ready and self.process is not None:
            self.is_ready = self.spec.is_ready(self.process.pid)
        return self.is_ready

    def reap(self) -> int | None:
        """Return the exit status when the child has ended since the last call, with all it had started ended too."""
        process = self.process
        if process is None:
            return None
        if _CAN_PEEK:
            # Look without reaping: until it is reaped its process group number cannot become somebody else's.
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        elif process.poll() is None:
            return None
        send_group(process.pid, signal.SIGKILL)
        status = process.wait()
        self.process = None
        self.is_ready = False
        return status

    def ask_to_stop(self) -> None:
        """Send the signal for an orderly stop."""
        if self.process is not None:
            # Not ``Popen.send_signal``: that reaps a child which has ended already, and then nobody can tell how.
            os.kill(self.process.pid, self.spec.stop_signal)

    def kill(self) -> None:
        """Kill the child and everything in its process group."""
        if self.process is not None:
            send_group(self.process.pid, signal.SIGKILL)
