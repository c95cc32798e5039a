"""What a newcomer sees, and what is handed on untouched."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.launcher.attach import run_down, run_manage
from controlplane.launcher.cli import _parse, name_node, take_data
from controlplane.launcher.demo import run_demo
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.places import default_data


def test_options_of_other_programs_are_handed_on() -> None:
    assert _parse(["node", "--gateway", "http://x", "--help"])[1] == ["--gateway", "http://x", "--help"]
    assert _parse(["bench", "--data", "x"])[1] == ["--data", "x"]
    options, rest = _parse(["test", "-k", "name", "--fast", "tests/unit"])
    assert options.fast
    assert not options.vllm
    assert rest == ["-k", "name", "tests/unit"]
    options, rest = _parse(["test", "--vllm", "-x"])
    assert (options.fast, options.vllm, options.clients, rest) == (False, True, False, ["-x"])
    options, rest = _parse(["test", "--mutants", "T11", "F28"])
    assert (options.mutants, options.fast, rest) == (True, False, ["T11", "F28"])
    options, rest = _parse(["test", "--clients", "-x"])
    assert (options.fast, options.vllm, options.clients, rest) == (False, False, True, ["-x"])


@pytest.mark.parametrize(
    ("words", "data", "rest"),
    [
        (["--data", "/d", "allow_model", "--data", "x"], Path("/d"), ["allow_model", "--data", "x"]),
        (["--data=/d", "shell"], Path("/d"), ["shell"]),
        (["allow_model", "x", "--data", "/d"], Path("/d"), ["allow_model", "x"]),
        (["allow_model", "--data=/d", "x"], Path("/d"), ["allow_model", "x"]),
        (["shell", "--", "--data", "x"], None, ["shell", "--", "--data", "x"]),
        (["shell", "--data"], None, ["shell", "--data"]),
    ],
)
def test_the_installation_is_named_anywhere_among_the_words(words: list[str], data: Path | None, rest: list[str]) -> None:
    assert take_data(words) == (data, rest)


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "/d", "manage", "allow_model", "x"], ["manage", "--data", "/d", "allow_model", "x"],
        ["manage", "allow_model", "x", "--data=/d"],
    ],
)  # fmt: skip
def test_manage_finds_its_installation_wherever_it_is_named(words: list[str]) -> None:
    options, rest = _parse(words)
    assert (options.data, rest) == (Path("/d"), ["allow_model", "x"])


@pytest.mark.parametrize("words", [["--data=/d", "down"], ["down", "--data", "/d"]])
def test_every_command_takes_its_installation_before_and_after_its_name(words: list[str]) -> None:
    assert _parse(words)[0].data == Path("/d")


def test_a_demo_without_an_installation_says_so(tmp_path: Path) -> None:
    with pytest.raises(LauncherError, match=f"no Muster runs on {tmp_path}: start it with ./muster up"):
        run_demo(tmp_path, as_json=False)


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


def test_up_has_the_documented_defaults() -> None:
    options, _ = _parse(["up"])
    assert (options.host, options.port, options.gateway_port, options.with_node) == ("127.0.0.1", 8000, 8080, True)
    assert options.data == default_data()


def test_manage_says_when_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL")
    with pytest.raises(LauncherError, match=f"no Muster runs on {tmp_path}: start it with ./muster up"):
        run_manage(tmp_path, ["check"])


def test_down_where_nothing_runs_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_down(tmp_path) == 0
    assert capsys.readouterr().out == f"Not running: {tmp_path}\n"


@pytest.mark.parametrize("command", ["up", "down", "credentials", "manage", "demo", "test", "check", "lock"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _parse([command, "--help"])
    assert ended.value.code in {0, None}
    assert f"./muster {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["upp"], "invalid choice: 'upp'"),
        (["demo", "fireworks"], "invalid choice: 'fireworks'"),
        *(
            (["up", f"--port={text}"], f"argument --port: {text!r} is no port; use a whole number from 1 to 65535")
            for text in ("70000", "abc", "-1", "8e3")
        ),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        _parse(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
