"""Both profilers name the function that burns the time, between the signals and not before."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.hotspots import read_hotspots
from benchmarks.processes import Child

PROGRAM = """
import sys, time
def idle_part():
    pass
def busy_part():
    end = time.process_time() + 0.3
    while time.process_time() < end:
        idle_part()
print("up", flush=True)
while sys.stdin.readline():
    busy_part()
    print("burnt", flush=True)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("how", "suffix"), [("samples", ".stacks"), ("calls", ".pstats")])
def test_a_profile_names_what_burns_the_time(tmp_path: Path, how: str, suffix: str) -> None:
    (tmp_path / "burning.py").write_text(PROGRAM)
    path = tmp_path / f"profile{suffix}"
    argv = [sys.executable, "-m", "benchmarks.profiled", "--how", how, "--to", str(path), "burning"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = Child("profiled", argv, log_dir=tmp_path, env=env, talks=True)
    try:
        assert child.read_line(30) == "up"
        os.kill(child.popen.pid, signal.SIGUSR1)
        child.send_line("go")
        assert child.read_line(30) == "burnt"
        os.kill(child.popen.pid, signal.SIGUSR2)
        # The program waits in a system call; its handler runs as soon as that returns.
        child.send_line("go")
        child.wait_until(path.exists, "it was to write the profile", 30)
    finally:
        child.stop()
    by_total = sorted(read_hotspots(path, units=1), key=lambda spot: spot.total_share, reverse=True)
    assert any("busy_part" in spot.name and spot.total_share > 0.5 for spot in by_total[:4])
