"""Child processes of a run: started on chosen cores, logged to a file, accounted for and stopped."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from benchmarks.errors import BenchmarkError

ROOT = Path(__file__).resolve().parent.parent
_STOP_S = 10.0
_POLL_S = 0.05
_LOG_LINES = 15


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Which CPU cores a measured system and the programs around it run on; empty = wherever the kernel likes."""

    system: tuple[int, ...] = ()
    around: tuple[int, ...] = ()

    @property
    def is_pinned(self) -> bool:
        """Whether processes are pinned at all."""
        return bool(self.system)


def plan_cores(*, pin: bool) -> CorePlan:
    """Return one core for the measured system and the others for load, mock and nodes; unpinned when that cannot be."""
    if not pin or shutil.which("taskset") is None or not hasattr(os, "sched_getaffinity"):
        return CorePlan()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        return CorePlan()
    return CorePlan(system=(cores[0],), around=tuple(cores[1:]))


def pin_command(argv: Sequence[str], cores: Sequence[int]) -> list[str]:
    """Return ``argv`` behind taskset, which replaces itself by the program, so the pid stays the child's."""
    return ["taskset", "-c", ",".join(map(str, cores)), *argv] if cores else list(argv)


class Child:
    """One child process. ``read_line`` and ``send_line`` talk to its stdout and stdin; stderr goes to the log file."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_dir: Path,
        cores: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        talks: bool = False,
    ) -> None:
        self.name = name
        self.log_path = log_dir / f"{name}.log"
        self._log: IO[bytes] = self.log_path.open("wb")
        self._buffer = b""
        self.popen = subprocess.Popen(
            pin_command(argv, cores),
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else self._log,
            stderr=self._log,
            cwd=ROOT,
            env=dict(env) if env is not None else None,
        )

    def read_line(self, timeout_s: float) -> str:
        """Return the next line of stdout. Raises BenchmarkError when the process ends or stays silent."""
        stdout = self.popen.stdout
        if stdout is None:
            raise BenchmarkError(f"{self.name} was started without a pipe")
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(stdout.fileno(), 4096) if ready else b""
            if not data:
                raise BenchmarkError(f"{self.name} said nothing for {timeout_s:g} s or ended:\n{self.read_log_tail()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line.decode()

    def send_line(self, text: str) -> None:
        """Write one line to stdin. Raises BenchmarkError when the process has ended."""
        try:
            if self.popen.stdin is not None:
                self.popen.stdin.write(text.encode() + b"\n")
                self.popen.stdin.flush()
        except OSError as error:
            raise BenchmarkError(f"{self.name} has ended:\n{self.read_log_tail()}") from error

    def require_alive(self) -> None:
        """Raise BenchmarkError with the end of its log when the process has ended."""
        code = self.popen.poll()
        if code is not None:
            raise BenchmarkError(f"{self.name} ended with code {code}:\n{self.read_log_tail()}")

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until ``condition`` holds. Raises BenchmarkError when the process ends first or the time is over."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.require_alive()
            if time.monotonic() > deadline:
                raise BenchmarkError(f"{what} within {timeout_s:g} s: it did not.\n{self.read_log_tail()}")
            time.sleep(_POLL_S)

    def read_log_tail(self) -> str:
        """Return the end of what the process logged, with the path of the whole."""
        self._log.flush()
        tail = self.log_path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join([f"  | {line}" for line in tail] or ["  | (it logged nothing)"])

    def cpu_s(self) -> float:
        """Return user + system CPU seconds of the process and its children so far."""
        return tree_cpu_s(self.popen.pid)

    def main_thread_cpu_s(self) -> float:
        """Return the CPU seconds of the main thread alone; where an event loop runs in it, the rest is its helpers'."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for thread in psutil.Process(self.popen.pid).threads():
                if thread.id == self.popen.pid:
                    return thread.user_time + thread.system_time
        return 0.0

    def rss_bytes(self) -> int:
        """Return the resident memory of the process and its children; shared pages count once per process."""
        total = 0
        for process in walk_tree(self.popen.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL after ten seconds."""
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait(_STOP_S)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._log.close()


def core_busy_s(cores: Sequence[int]) -> float:
    """Return the seconds ``cores`` were busy since boot, whoever used them and time stolen by the host included."""
    if not cores:
        return 0.0
    busy = 0.0
    every_core = psutil.cpu_times(percpu=True)
    for core in cores:
        times = every_core[core]._asdict()
        # guest and guest_nice are already in user and nice.
        busy += sum(value for name, value in times.items() if name not in {"idle", "iowait", "guest", "guest_nice"})
    return busy


def tree_cpu_s(pid: int) -> float:
    """Return user + system CPU seconds of a process and all below it so far, children that have ended included."""
    total = 0.0
    for process in walk_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            # Ticks of 10 ms, or where Linux counts nanoseconds those of the living threads.
            total += max(times.user + times.system, _threads_cpu_s(process.pid))
            total += times.children_user + times.children_system
    return total


def tree_pss_bytes(pid: int) -> int | None:
    """Return the memory of a process and all below it, a page that n processes share counted as an n-th in each.

    None where the system does not tell (Linux does).
    """
    total = 0
    for process in walk_tree(pid):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except ProcessLookupError:
            continue  # it has just ended
        except OSError:
            return None
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _threads_cpu_s(pid: int) -> float:
    total_ns = 0
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def walk_tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it; nothing when it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
