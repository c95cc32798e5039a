"""Keeps the parts of an installation running: starts, waits, restarts with back-off, stops in order."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from controlplane.launcher.console import LauncherError, StopRequested, complain, progress
from controlplane.launcher.processes import Child, Command, identify, send_group, start
from core.limits import limits
from wire import clock

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CAN_PEEK = hasattr(os, "waitid")


def open_log(path: Path) -> IO[bytes]:
    """Open ``path`` for a child to append to, mode 0600. A grown one is kept once as ``NAME.log.1``."""
    rotate(path)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")


def rotate(path: Path) -> None:
    """Move what ``path`` holds to ``NAME.log.1`` when it has grown beyond the limit; children keep writing to ``path``."""
    try:
        if path.stat().st_size <= limits().launcher.log_bytes:
            return
        shutil.copyfile(path, path.with_name(f"{path.name}.1"))
        path.with_name(f"{path.name}.1").chmod(0o600)
        # Children write in append mode, so each goes on at the new beginning. A line written in between may be lost.
        os.truncate(path, 0)
    except FileNotFoundError:
        return


def read_last_line(path: Path, *, since: int = 0) -> str:
    """Return the last line after byte ``since`` that says something, at most 200 characters, or ``nothing in its log``."""
    lines = [line.strip() for line in read_tail(path, since=since).splitlines() if line.strip()]
    return _shorten(lines[-1])[:200] if lines else "nothing in its log"


def _shorten(line: str) -> str:
    """Return what a person reads of a line: of one in JSON the event, what it names, and the end of a traceback."""
    try:
        said = json.loads(line)
        fields = [
            f"{name}={value}" for name, value in said.items() if name not in {"time", "level", "logger", "event", "exception"}
        ]
        trace = str(said.get("exception", "")).strip().splitlines()[-1:]
        return " ".join([str(said["event"]), *fields, *trace])
    except (ValueError, AttributeError, KeyError, TypeError):
        return line


def read_tail(path: Path, *, since: int = 0) -> str:
    """Return the last few kilobytes of ``path`` that were written after byte ``since``."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            # A log that is shorter than it was has been rotated since: all of it is of this start.
            begin = since if since <= size else 0
            stream.seek(max(begin, size - limits().launcher.log_tail_bytes))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


@dataclass(slots=True)
class Backoff:
    """No pause at first, then exponential ones from ``restart_first_s`` on; a run of ``restart_healthy_s`` starts over."""

    failures: int = 0

    def next_pause_s(self, ran_s: float) -> float:
        """Return the pause after a run of ``ran_s`` seconds that ended unasked."""
        bounds = limits().launcher
        if ran_s >= bounds.restart_healthy_s:
            self.failures = 0
        # The exponent is bounded: a part that dies for weeks must not make a number that no float holds.
        pause = min(bounds.restart_first_s * 2.0 ** min(self.failures - 1, 16), bounds.restart_max_s) if self.failures else 0.0
        self.failures += 1
        return pause


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


class Supervisor:
    """The children of one ``up``. ``on_change`` is called whenever a process id changed."""

    # One thread, no asyncio: Linux ties a child's death signal to the thread that started it, and there is nothing to overlap.

    def __init__(self, logs: Path, on_change: Callable[[], None]) -> None:
        self.parts: dict[str, Part] = {}
        self._logs = logs
        self._on_change = on_change
        self._stop_signals_seen = 0
        self._rotated_at = clock.monotonic()
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)

    def listen_for_signals(self) -> None:
        """Take Ctrl-C, SIGTERM, SIGHUP and the death of children as wake-ups."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._note_stop)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # without a handler nothing reaches the wake-up pipe

    @property
    def pids(self) -> dict[str, int]:
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
        now = clock.monotonic()
        if part.process is None or part.is_ready or now - part.late_said_at < limits().launcher.late_s:
            return
        part.late_said_at = now
        waited_s = now - part.started_at
        progress(f"Still waiting for {part.spec.name} after {waited_s:.0f} s. Last line: {part.last_line}")

    def stop(self, order: Sequence[Sequence[str]]) -> None:
        """Stop the parts, one group of names after the other; with a second signal from the person they are killed."""
        # The signal that asked for the stop is not the second one, which kills.
        self._stop_signals_seen = 0
        for group in order:
            self._stop_group([self.parts[name] for name in group if name in self.parts])

    def _stop_group(self, parts: Sequence[Part]) -> None:
        began = clock.monotonic()
        for part in parts:
            part.restart_at = None
            if part.process is not None:
                # Not ``Popen.send_signal``: that reaps a child which has ended already, and then nobody can tell how.
                os.kill(part.process.pid, part.spec.stop_signal)
        while any(part.process is not None for part in parts):
            for part in parts:
                late = clock.monotonic() - began > part.spec.stop_deadline_s
                if part.reap() is None and part.process is not None and (late or self._stop_signals_seen):
                    complain(f"{part.spec.name} did not stop in time; killed")
                    send_group(part.process.pid, signal.SIGKILL)
            if any(part.process is not None for part in parts):
                self.sleep(0.05)

    def _restart(self, name: str, part: Part) -> bool:
        try:
            part.start()
        # At the start such an error ends it; later the other parts go on, and this one is tried again.
        except (OSError, LauncherError) as error:
            pause = part.backoff.next_pause_s(0.0)
            part.restart_at = clock.monotonic() + pause
            complain(f"{name} cannot be started ({error}), trying again in {pause:.1f} s")
            return False
        return True

    def _next_wake_s(self) -> float:
        now = clock.monotonic()
        if any(part.process is not None and not part.is_ready for part in self.parts.values()):
            return limits().launcher.ready_poll_s
        due = [part.restart_at - now for part in self.parts.values() if part.restart_at is not None]
        return max(0.0, min([*due, limits().launcher.log_rotate_s]))

    def sleep(self, seconds: float) -> None:
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
