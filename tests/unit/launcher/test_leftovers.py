"""What an earlier run left behind is ended; what only shares a process id with it is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.launcher.files import write_json
from controlplane.launcher.leftovers import end_leftovers
from controlplane.launcher.processes import identify

_SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(_SLEEP, start_new_session=True, env={**os.environ, "MUSTER_RUN_ID": "the run of this test"})
    yield child
    child.kill()
    child.wait()


def _record(path: Path, pid: int, identity: str | None, run_id: str = "no run") -> Path:
    write_json(path, {"run_id": run_id, "children": {"control": {"pid": pid, "identity": identity}}})
    return path


def test_a_child_of_an_earlier_run_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", sleeper.pid, identify(sleeper.pid)))
    assert sleeper.wait(timeout=30) != 0


def test_a_stranger_with_the_same_id_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", sleeper.pid, "boot/12345"))
    assert sleeper.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of a process")
def test_a_grandchild_is_found_by_its_run(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", 1, "nobody", run_id="the run of this test"))
    assert sleeper.wait(timeout=30) != 0


def test_a_missing_or_broken_record_is_no_error(tmp_path: Path) -> None:
    end_leftovers(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    end_leftovers(tmp_path / "broken.json")
