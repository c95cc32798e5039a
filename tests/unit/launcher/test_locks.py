"""One holder at a time, told by process id, and a killed holder holds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.launcher import locks
from controlplane.launcher.environment import ROOT
from controlplane.launcher.locks import FileLock, LockHeld, acquire_patiently, read_holder

_HOLD = """
import sys, time
from pathlib import Path
from controlplane.launcher.locks import FileLock
FileLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with FileLock(path):
        assert read_holder(path) == os.getpid()
        with pytest.raises(LockHeld) as refused:
            FileLock(path).acquire()
        assert refused.value.holder == str(os.getpid())
    assert read_holder(path) is None
    with FileLock(path):
        assert read_holder(path) == os.getpid()


def test_a_holder_killed_with_9_holds_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout is not None
    with holder, holder.stdout as output:
        assert output.readline() == b"held\n"
        assert read_holder(path) == holder.pid
        holder.kill()
        holder.wait()
        assert read_holder(path) is None
        with FileLock(path):
            pass


class Clock:
    """Stands in for the clock: time passes while somebody sleeps, and only then."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_waiting_for_a_lock_ends_when_the_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    clock = Clock()
    monkeypatch.setattr(locks, "clock", clock)
    waited_for: list[str] = []
    with FileLock(path), pytest.raises(LockHeld):
        acquire_patiently(FileLock(path), deadline_s=5.0, on_wait=waited_for.append)
    assert waited_for == [str(os.getpid())]
    assert 5.0 <= clock.now < 6.0


def test_a_missing_file_has_no_holder(tmp_path: Path) -> None:
    assert read_holder(tmp_path / "none") is None
