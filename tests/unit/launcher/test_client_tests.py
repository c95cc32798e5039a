"""What the tests with the Node SDKs run on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import write_json
from tools import client_tests

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
