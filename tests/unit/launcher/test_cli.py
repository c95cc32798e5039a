"""What a newcomer sees, and what is handed on untouched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.launcher.attach import run_down, run_manage
from controlplane.launcher.cli import _parse, _take_data, name_node
from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.places import default_data

COMMANDS = ("up", "down", "manage", "demo", "node", "trust", "test", "check", "bench", "lock")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # -I -S: no site-packages, so this fails when the launcher needs anything that is not in the standard library.
    command = [sys.executable, "-I", "-S", str(ROOT / "muster"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def test_help_names_every_command_without_anything_installed() -> None:
    answer = _run("--help")
    assert answer.returncode == 0
    assert all(f"\n    {command} " in answer.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", ["up", "down", "manage", "demo", "test", "check", "lock"])
def test_every_command_explains_itself(command: str) -> None:
    answer = _run(command, "--help")
    assert answer.returncode == 0
    assert f"./muster {command}" in answer.stdout


def test_a_wrong_command_is_refused() -> None:
    answer = _run("upp")
    assert answer.returncode == 2
    assert "invalid choice: 'upp'" in answer.stderr


def test_options_of_other_programs_are_handed_on() -> None:
    assert _parse(["node", "--gateway", "http://x", "--help"])[1] == ["--gateway", "http://x", "--help"]
    assert _parse(["bench", "--data", "x"])[1] == ["--data", "x"]
    options, rest = _parse(["test", "-k", "name", "--fast", "tests/unit"])
    assert options.fast
    assert not options.vllm
    assert rest == ["-k", "name", "tests/unit"]
    options, rest = _parse(["test", "--vllm", "-x"])
    assert (options.fast, options.vllm, options.clients, rest) == (False, True, False, ["-x"])
    options, rest = _parse(["test", "--clients", "-x"])
    assert (options.fast, options.vllm, options.clients, rest) == (False, False, True, ["-x"])


@pytest.mark.parametrize(
    ("words", "data", "rest"),
    [
        (["--data", "/d", "allow_model", "--data", "x"], Path("/d"), ["allow_model", "--data", "x"]),
        (["--data=/d", "shell"], Path("/d"), ["shell"]),
        (["shell", "--data", "x"], default_data(), ["shell", "--data", "x"]),
    ],
)
def test_only_a_leading_data_option_belongs_to_manage(words: list[str], data: Path, rest: list[str]) -> None:
    assert _take_data(words) == (data, rest)


def test_trust_means_the_box_it_is_told_of_or_the_local_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUSTER_DATA", raising=False)
    installation, box = tmp_path / "installation", tmp_path / "box"
    (installation / "node").mkdir(parents=True)
    (installation / "up.lock").touch()
    (box / "node").mkdir(parents=True)
    words = ["babab-dabab"]
    assert name_node([*words, "--data", str(installation)]) == [*words, "--data", str(installation / "node")]
    assert name_node([f"--data={box}", *words, "--forget"]) == [*words, "--forget", "--data", str(box)]
    assert name_node(words)[:2] == [*words, "--data"]
    assert Path(name_node(words)[2]) in {default_data(), default_data() / "node"}
    monkeypatch.setenv("MUSTER_DATA", str(box))
    assert name_node(words) == words


def test_the_demo_knows_what_it_can_show() -> None:
    options, _ = _parse(["demo", "governance", "--json", "--data", "/d"])
    assert (options.what, options.as_json, options.data) == ("governance", True, Path("/d"))
    assert "invalid choice: 'fireworks'" in _run("demo", "fireworks").stderr


def test_up_has_the_documented_defaults() -> None:
    options, _ = _parse(["up"])
    assert (options.host, options.port, options.gateway_port, options.with_node) == ("127.0.0.1", 8000, 8080, True)
    assert options.data == default_data()


def test_a_port_out_of_range_is_refused() -> None:
    answer = _run("up", "--port", "70000")
    assert answer.returncode == 2
    assert "70000 is no port" in answer.stderr


def test_manage_says_when_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL")
    with pytest.raises(LauncherError, match=f"no Muster runs on {tmp_path}: start it with ./muster up"):
        run_manage(tmp_path, ["check"])


def test_down_where_nothing_runs_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_down(tmp_path) == 0
    assert capsys.readouterr().out == f"Nothing runs on {tmp_path}\n"
