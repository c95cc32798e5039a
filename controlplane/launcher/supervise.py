"""Keeps the parts of an installation running: starts, waits, restarts with back-off, stops in order.

One thread, no asyncio: Linux ties a child's death signal to the thread that started it, and there is nothing to overlap.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

from controlplane.launcher.console import complain, progress
from controlplane.launcher.errors import LauncherError, StopRequested
from controlplane.launcher.logs import rotate
from controlplane.launcher.part import Part, PartSpec
from core.limits import limits
from wire import clock

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """The children of one ``up``. ``on_change`` is called whenever a process id changed.

    A part that is not ready ``late_after_s`` seconds after its start is named, and again after each such time.
    """

    def __init__(self, logs: Path, on_change: Callable[[], None], *, late_after_s: float | None = None) -> None:
        self.parts: dict[str, Part] = {}
        self._logs = logs
        self._on_change = on_change
        self._late_after_s = limits().launcher.late_s if late_after_s is None else late_after_s
        self._stop_signals_seen = 0
        self._rotated_at = clock.monotonic()
        self._wake_read, self._wake_write = _make_pipe()

    def listen_for_signals(self) -> None:
        """Take Ctrl-C, SIGTERM, SIGHUP and the death of children as wake-ups."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note_stop)
        signal.signal(signal.SIGCHLD, _note_nothing)

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the parts that run now."""
        return {name: part.process.pid for name, part in self.parts.items() if part.process is not None}

    def start(self, specs: Iterable[PartSpec]) -> None:
        """Start parts side by side; raises LauncherError when one cannot even be executed."""
        for spec in specs:
            part = Part(spec=spec, log_path=self._logs / f"{spec.name}.log")
            self.parts[spec.name] = part
            try:
                part.start()
            except OSError as error:
                raise LauncherError(f"cannot start {spec.name}: {error.strerror} ({error.filename})") from None
        self._on_change()

    def wait_ready(self, names: Sequence[str], on_ready: Callable[[str], None]) -> None:
        """Wait until each of ``names`` is ready; ``on_ready(name)`` as each becomes so.

        A part that dies is restarted; one that died three times or takes too long raises LauncherError with its last log line.
        Raises StopRequested on Ctrl-C and SIGTERM.
        """
        waiting = list(names)
        while waiting:
            self.check()
            for name in list(waiting):
                part = self.parts[name]
                if part.probe():
                    waiting.remove(name)
                    on_ready(name)
                elif part.backoff.failures >= limits().launcher.startup_failures:
                    raise LauncherError(f"{name} keeps dying: {part.last_line} (all of it: {part.log_path})")
                elif part.process and clock.monotonic() - part.started_at > part.spec.start_deadline_s:
                    raise LauncherError(
                        f"{name} is not ready after {part.spec.start_deadline_s:.0f} s. "
                        f"Last line: {part.last_line} (all of it: {part.log_path})"
                    )
            if waiting:
                self.sleep(limits().launcher.ready_poll_s)

    def run(self) -> None:
        """Keep everything running until Ctrl-C or SIGTERM, then raise StopRequested."""
        while True:
            self.check()
            self.sleep(self._next_wake_s())

    def check(self) -> None:
        """Notice children that ended, restart those whose pause is over. Raises StopRequested."""
        if self._stop_signals_seen:
            raise StopRequested
        changed = False
        for name, part in self.parts.items():
            status = part.reap()
            if status is not None:
                pause = part.backoff.next_pause_s(clock.monotonic() - part.started_at)
                part.restart_at = clock.monotonic() + pause
                last = part.last_line
                complain(f"{name} {describe_status(status)}, starting it again in {pause:.1f} s. Last line: {last}")
                changed = True
            if part.restart_at is not None and clock.monotonic() >= part.restart_at:
                changed = self._restart(name, part) or changed
            elif part.process is not None and not part.is_ready and part.backoff.failures and part.probe():
                progress(f"{name} is back (process {part.process.pid})")
            self._say_when_late(part)
        if changed:
            self._on_change()
        if clock.monotonic() - self._rotated_at > limits().launcher.log_rotate_s:
            self._rotated_at = clock.monotonic()
            for part in self.parts.values():
                rotate(part.log_path)

    def _say_when_late(self, part: Part) -> None:
        """Tell the person which part is awaited, and what it said last."""
        now = clock.monotonic()
        if part.process is None or part.is_ready or now - part.late_said_at < self._late_after_s:
            return
        part.late_said_at = now
        waited_s = now - part.started_at
        progress(f"Still waiting for {part.spec.name} after {waited_s:.0f} s. Last line: {part.last_line}")

    def stop(self, order: Sequence[Sequence[str]]) -> None:
        """Stop the parts, one group of names after the other; a second signal from the person shortens the patience."""
        self._stop_signals_seen = 0
        for group in order:
            self._stop_group([self.parts[name] for name in group if name in self.parts])

    def _stop_group(self, parts: Sequence[Part]) -> None:
        began = clock.monotonic()
        for part in parts:
            part.restart_at = None
            part.ask_to_stop()
        while any(part.process is not None for part in parts):
            for part in parts:
                late = clock.monotonic() - began > part.spec.stop_deadline_s
                if part.reap() is None and part.process is not None and (late or self._stop_signals_seen):
                    complain(f"{part.spec.name} did not stop in time; killed")
                    part.kill()
            if any(part.process is not None for part in parts):
                self.sleep(0.05)

    def _restart(self, name: str, part: Part) -> bool:
        try:
            part.start()
        except (OSError, LauncherError) as error:
            pause = part.backoff.next_pause_s(0.0)
            part.restart_at = clock.monotonic() + pause
            complain(f"{name} cannot be started ({error}), trying again in {pause:.1f} s")
            return False
        return True

    def _next_wake_s(self) -> float:
        """Return how long there is nothing to do unless a signal arrives."""
        now = clock.monotonic()
        if any(part.process is not None and not part.is_ready for part in self.parts.values()):
            return limits().launcher.ready_poll_s
        due = [part.restart_at - now for part in self.parts.values() if part.restart_at is not None]
        return max(0.0, min([*due, limits().launcher.log_rotate_s]))

    def sleep(self, seconds: float) -> None:
        """Sleep, but not beyond the next signal."""
        select.select([self._wake_read], [], [], seconds)
        try:
            os.read(self._wake_read, 512)
        except BlockingIOError:
            pass

    def _note_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stop_signals_seen += 1


def describe_status(status: int) -> str:
    """Return how a child ended: ``was killed by SIGKILL`` or ``ended with status 1``."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def _note_nothing(_number: int, _frame: FrameType | None) -> None:
    """Exist, so that SIGCHLD reaches the wake-up pipe."""


def _make_pipe() -> tuple[int, int]:
    ends = os.pipe()
    for fd in ends:
        os.set_blocking(fd, False)
    return ends
