"""The check of governed operations ends the installation that it has started, however it ends itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from controlplane.launcher.environment import ROOT
from controlplane.launcher.processes import find_by_directory

pytestmark = pytest.mark.timeout(180)
WITHIN_S = 60.0


def _wait(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until, f"not within {WITHIN_S} s: {what}"
        time.sleep(0.05)


def _installation(place: Path) -> list[int]:
    """Return the processes that name a folder on their command line, and those of PostgreSQL beneath it."""
    named = [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(place / "data") in " ".join(process.info["cmdline"] or ())
    ]
    return [*named, *find_by_directory(place / "data" / "postgres" / "data")]


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.skipif(sys.platform != "linux", reason="needs the death signal")),
    ],
)
def test_the_installation_ends_with_the_program_that_started_it(number: signal.Signals, status: int) -> None:
    with tempfile.TemporaryDirectory(prefix="muster-govcheck-test-", dir="/tmp") as name:
        place = Path(name)
        program = [sys.executable, "-m", "benchmarks.govcheck", "--only", "refusals", "--data", name]
        with (place / "said").open("wb") as said:
            check = subprocess.Popen(program, cwd=ROOT, stdout=said, stderr=said, env=dict(os.environ))
        try:
            log = place / "up.log"
            _wait(lambda: log.exists() and "postgres is ready" in log.read_text(), "the installation is starting")
            assert _installation(place)
            check.send_signal(number)
            assert check.wait(WITHIN_S) == status
            _wait(lambda: not _installation(place), "the installation has ended")
        finally:
            if check.poll() is None:
                check.kill()
                check.wait()
        assert log.read_text().endswith("Stopping\nStopped\n")
