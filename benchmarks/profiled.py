"""Runs a module as ``python -m`` would, and profiles its main thread between SIGUSR1 and SIGUSR2.

    python -m benchmarks.profiled --how samples --to FILE controlplane.serve_gateway --port 8080

``samples``: looks at the stack once per millisecond of CPU time, or per tick of the kernel. Cheap, so shares are true;
a built-in function counts for the line that called it, and the event loop's own work for the callback after it. FILE
holds collapsed stacks, one ``outer;…;inner count`` per line, which flame graph tools read.
``calls``: cProfile. Exact counts, and built-in functions by name, but every call costs more than it does in truth, so
small functions look several times dearer than they are. FILE is for ``python -m pstats``.

Each SIGUSR2 writes FILE anew.
"""

from __future__ import annotations

import argparse
import cProfile
import runpy
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Protocol

_INTERVAL_S = 0.001


class Recorder(Protocol):
    """A profiler that can be switched."""

    def start(self) -> None:
        """Begin a fresh profile."""

    def stop(self, path: Path) -> None:
        """End the profile and write it."""


class CallRecorder:
    """Counts and times every call of the main thread."""

    def __init__(self) -> None:
        self._profile = cProfile.Profile()

    def start(self) -> None:
        """Begin a fresh profile, in CPU time: a neighbour who takes the core shall not show as a slow function."""
        self._profile = cProfile.Profile(time.thread_time)
        self._profile.enable()

    def stop(self, path: Path) -> None:
        """End the profile and write it for pstats."""
        self._profile.disable()
        self._profile.dump_stats(path)


class SampleRecorder:
    """Counts the stacks of the main thread, seen once per millisecond of CPU time."""

    def __init__(self) -> None:
        self._stacks: Counter[tuple[CodeType, ...]] = Counter()

    def start(self) -> None:
        """Begin a fresh profile."""
        self._stacks.clear()
        signal.signal(signal.SIGPROF, self._look)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)

    def stop(self, path: Path) -> None:
        """End the profile and write collapsed stacks."""
        signal.setitimer(signal.ITIMER_PROF, 0)
        lines = [f"{';'.join(map(name_code, stack))} {count}" for stack, count in self._stacks.most_common()]
        path.write_text("\n".join(lines) + "\n")

    def _look(self, _signal: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None:
            stack.append(frame.f_code)
            frame = frame.f_back
        self._stacks[tuple(reversed(stack))] += 1


def name_code(code: CodeType) -> str:
    """Return ``folder/file.py:line name``."""
    folder_and_file = "/".join(Path(code.co_filename).parts[-2:])
    return f"{folder_and_file}:{code.co_firstlineno} {code.co_qualname}"


def main(argv: list[str] | None = None) -> None:
    """Install the signals and become the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled")
    parser.add_argument("--how", choices=("samples", "calls"), default="samples")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("module")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    path: Path = arguments.to
    recorder: Recorder = SampleRecorder() if arguments.how == "samples" else CallRecorder()

    def stop(_signal: int, _frame: FrameType | None) -> None:
        draft = path.with_suffix(".draft")
        recorder.stop(draft)
        draft.replace(path)  # there whole or not at all: somebody waits for it

    signal.signal(signal.SIGUSR1, lambda _signal, _frame: recorder.start())
    signal.signal(signal.SIGUSR2, stop)
    sys.argv = [arguments.module, *arguments.rest]
    runpy.run_module(arguments.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
