"""CPU and memory of a child are what the child used, and processes that fail say why."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.processes import Child, core_busy_s, plan_cores

BURN = """
import subprocess, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
    return time.process_time()
if len(sys.argv) > 1:
    print(burn(float(sys.argv[1])), flush=True); sys.stdin.readline()
else:
    child = subprocess.Popen([sys.executable, "-c", CODE, "0.3"], stdin=sys.stdin, stdout=subprocess.PIPE)
    print(float(child.stdout.readline()) + burn(0.3), flush=True); sys.stdin.readline()
"""
"""Says how much processor time both processes have used by then."""


def test_cpu_time_of_a_process_and_its_children_is_counted(tmp_path: Path) -> None:
    code = BURN.replace("CODE", repr(BURN))
    child = Child("burner", [sys.executable, "-c", code], log_dir=tmp_path, talks=True)
    try:
        said_s = float(child.read_line(30))
        assert said_s >= 0.6
        assert said_s - 0.1 <= child.cpu_s() < 1.5 * said_s  # the kernel shows hundredths; each process is counted once
        assert child.rss_bytes() > 2_000_000
    finally:
        child.stop()


def test_an_idle_process_uses_nothing(tmp_path: Path) -> None:
    child = Child("idle", [sys.executable, "-c", "print('up', flush=True); input()"], log_dir=tmp_path, talks=True)
    try:
        child.read_line(30)
        before = child.cpu_s()
        assert child.cpu_s() - before < 0.05
    finally:
        child.stop()


def test_a_child_that_ends_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    child = Child("broken", [sys.executable, "-c", "import sys; sys.exit('no such database')"], log_dir=tmp_path)
    try:
        with pytest.raises(BenchmarkError, match="no such database"):
            child.wait_until(lambda: False, "it was to come up", 20)
    finally:
        child.stop()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin processes")
def test_the_measured_system_never_shares_a_core_with_the_load() -> None:
    plan = plan_cores(pin=True)
    assert not set(plan.system) & set(plan.around)
    assert not plan_cores(pin=False).is_pinned


def test_a_core_is_busy_no_longer_than_the_clock_runs() -> None:
    began, before = time.monotonic(), core_busy_s([0])
    while time.monotonic() - began < 0.1:
        pass
    assert 0.0 <= core_busy_s([0]) - before <= time.monotonic() - began + 0.1
    assert core_busy_s([]) == 0.0
