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
from controlplane.launcher.processes import find_by_variable, identify, wait_gone

_SLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run that is called like ``tmp_path``; it ends well when its input does."""
    environment = {**os.environ, "MUSTER_RUN_ID": str(tmp_path)}
    child = subprocess.Popen(_SLEEP, start_new_session=True, env=environment, stdin=subprocess.PIPE)
    try:
        # The kernel shows the environment of a process a moment after its program has replaced ours.
        if sys.platform == "linux":
            assert wait_gone(lambda: find_by_variable("MUSTER_RUN_ID", str(tmp_path)) == [child.pid], 30.0)
        yield child
    finally:
        child.kill()
        child.communicate()


def _record(path: Path, pid: int, identity: str | None, run_id: str = "no run") -> Path:
    write_json(path, {"run_id": run_id, "children": {"control": {"pid": pid, "identity": identity}}})
    return path


def test_a_child_of_an_earlier_run_is_ended(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", sleeper.pid, identify(sleeper.pid)))
    assert sleeper.wait(timeout=30) != 0


def test_a_stranger_with_the_same_id_is_left_alone(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", sleeper.pid, "boot/12345"))
    sleeper.communicate(timeout=30)
    assert sleeper.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux shows the environment of a process")
def test_a_grandchild_is_found_by_its_run(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    end_leftovers(_record(tmp_path / "children.json", 1, "nobody", run_id=str(tmp_path)))
    assert sleeper.wait(timeout=30) != 0


def test_a_missing_or_broken_record_is_no_error(tmp_path: Path) -> None:
    end_leftovers(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    end_leftovers(tmp_path / "broken.json")
