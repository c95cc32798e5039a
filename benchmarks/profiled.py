"""Runs a module as ``python -m`` would, and profiles its main thread between SIGUSR1 and SIGUSR2.

    python -m benchmarks.profiled --to FILE controlplane.serve_gateway --port 8080

Between the signals it uses cProfile: exact counts and every built-in function (a ``write`` on a transport is the system
call), but calls cost more than they do in truth, so small functions look bigger than they are. Read shares, not times.
Each SIGUSR2 writes FILE anew.
"""

from __future__ import annotations

import argparse
import cProfile
import runpy
import signal
import sys
from pathlib import Path
from types import FrameType


class Recorder:
    """Switches the profiler of the main thread on and off."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._profile: cProfile.Profile | None = None

    def start(self, _signal: int, _frame: FrameType | None) -> None:
        """Begin a fresh profile."""
        if self._profile is None:
            self._profile = cProfile.Profile()
            self._profile.enable()

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """End the profile and write it, whole or not at all."""
        if self._profile is None:
            return
        self._profile.disable()
        draft = self._path.with_suffix(".draft")
        self._profile.dump_stats(draft)
        draft.replace(self._path)
        self._profile = None


def main(argv: list[str] | None = None) -> None:
    """Install the signals and become the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profiled")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("module")
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(argv)
    recorder = Recorder(arguments.to)
    signal.signal(signal.SIGUSR1, recorder.start)
    signal.signal(signal.SIGUSR2, recorder.stop)
    sys.argv = [arguments.module, *arguments.rest]
    runpy.run_module(arguments.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
