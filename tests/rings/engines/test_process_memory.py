"""Memory of real processes: counted once, whole trees, survivors included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from runner.telemetry import Telemetry, open_telemetry
from runner.telemetry.processes import find_tree, measure_host_bytes

MIB = 1024 * 1024
HELD_MB = 64

PARENT = f"""
import os, sys
block = bytearray(os.urandom(1024)) * (1024 * {HELD_MB})
child = os.fork()
if child == 0:
    sys.stdin.buffer.read()
    os._exit(0)
print(child, flush=True)
sys.stdin.buffer.read()
os.waitpid(child, 0)
"""
"""Allocates, then forks: parent and child have the same pages."""

ORPHAN = """
import os, subprocess, sys
child = subprocess.Popen(["cat"])
print(child.pid, flush=True)
if sys.argv[1:] == ["exit"]:
    os._exit(0)
child.wait()
"""

pytestmark = pytest.mark.timeout(180)

Start = Callable[..., tuple[subprocess.Popen[bytes], int]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start programs that print the id of their child and end, both, when their input does."""
    started: list[tuple[subprocess.Popen[bytes], int]] = []

    def launch(program: str, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        started.append((process, int(process.stdout.readline())))
        return started[-1]

    yield launch
    for process, child in started:
        with process:
            pass  # closes its input and waits for it
        try:
            psutil.Process(child).wait(30)
        except psutil.NoSuchProcess:
            pass


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    """The telemetry of this machine."""
    opened = open_telemetry()
    yield opened
    opened.close()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs /proc/PID/smaps_rollup")
def test_memory_that_parent_and_child_share_is_counted_once(start: Start, telemetry: Telemetry) -> None:
    process, child = start(PARENT)
    tree = telemetry.measure([process.pid])
    assert set(tree.pids) == {process.pid, child}
    resident_mb = sum(psutil.Process(pid).memory_info().rss for pid in tree.pids) / MIB
    assert HELD_MB <= tree.host_bytes / MIB < HELD_MB + 32
    assert resident_mb > 2 * HELD_MB


def test_several_roots_are_measured_together_and_each_process_once(start: Start, telemetry: Telemetry) -> None:
    first, first_child = start(ORPHAN)
    second, second_child = start(ORPHAN)
    tree = telemetry.measure([first.pid, first_child, second.pid])
    assert set(tree.pids) == {first.pid, first_child, second.pid, second_child}


def test_a_process_that_outlives_its_engine_is_still_found(start: Start, telemetry: Telemetry) -> None:
    process, child = start(ORPHAN, "exit")
    process.wait(30)
    assert telemetry.measure([process.pid]).pids == (child,)


def test_an_engine_that_has_ended_holds_nothing(start: Start, telemetry: Telemetry) -> None:
    process, child = start(ORPHAN)
    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie, which nobody has waited for yet
    tree = telemetry.measure([process.pid])
    assert (tree.host_bytes, tree.pids) == (0, ())
    assert find_tree([child]) == ()


def test_a_process_whose_maps_cannot_be_read_counts_with_its_resident_memory(start: Start, tmp_path: Path) -> None:
    process, _ = start(PARENT)
    os.kill(process.pid, signal.SIGSTOP)  # it may still take memory on its way to its input
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        assert measure_host_bytes(process.pid, proc=tmp_path) == psutil.Process(process.pid).memory_info().rss > HELD_MB * MIB
    finally:
        os.kill(process.pid, signal.SIGCONT)


def test_a_process_that_is_gone_holds_nothing() -> None:
    assert measure_host_bytes(2**22 + 1) == 0


def test_the_host_is_read_as_the_kernel_tells(telemetry: Telemetry) -> None:
    give_up_at = time.monotonic() + 30
    while True:
        before = psutil.virtual_memory().available
        reading = telemetry.sample()
        if reading.kind == "gpu":
            pytest.skip("this machine has GPUs, so the reading is not that of its host")
        after = psutil.virtual_memory().available
        assert 0 < reading.total_mb <= psutil.virtual_memory().total // MIB
        assert reading.used_mb + reading.free_mb == reading.total_mb
        if reading.free_mb <= max(before, after) // MIB + 512:
            break
        assert time.monotonic() < give_up_at, "more is free than the kernel says, and not for a moment only"
    assert abs(reading.at - time.time()) < 60.0
