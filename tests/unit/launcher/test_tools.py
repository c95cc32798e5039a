"""What a newcomer types, what is installed and by which hashes, and the runner of mutants."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

import pytest

from controlplane.launcher import installer
from controlplane.launcher.attach import run_down, run_manage
from controlplane.launcher.cli import _parse, name_node, take_data
from controlplane.launcher.demo import run_demo
from controlplane.launcher.environment import ROOT, SETS, lock_file
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import write_json
from controlplane.launcher.places import default_data
from tools import client_tests, vllm_tests
from tools.mutants import run_mutants

# the command line


def test_words_reach_the_command_they_are_for_and_options_of_other_programs_are_handed_on() -> None:
    for words, rest in (
        (["node", "--gateway", "http://x", "--help"], ["--gateway", "http://x", "--help"]),
        (["conformance", "--base-url", "http://x", "--help"], ["--base-url", "http://x", "--help"]),
        (["bench", "--data", "x"], ["--data", "x"]),
        (["test", "-k", "name", "--fast", "tests/unit"], ["-k", "name", "tests/unit"]),
        (["test", "--vllm", "-x"], ["-x"]),
        (["test", "--mutants", "T11", "F28"], ["T11", "F28"]),
    ):
        options, left = _parse(words)
        assert left == rest
        for switch in ("fast", "vllm", "clients", "mutants"):
            assert getattr(options, switch, False) is (f"--{switch}" in words)
    options, _ = _parse(["up"])
    assert (options.host, options.port, options.gateway_port, options.with_node) == ("127.0.0.1", 8000, 8080, True)
    assert options.data == default_data()
    options, _ = _parse(["demo", "governance", "--json", "--data", "/d"])
    assert (options.what, options.as_json, options.data) == ("governance", True, Path("/d"))


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
    if data is not None and "--data" not in rest:
        options, left = _parse(["manage", *words])
        assert (options.data, left) == (data, rest)


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


def test_where_nothing_runs_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DATABASE_URL")
    words = f"no Muster runs on {tmp_path}: start it with ./muster up"
    with pytest.raises(LauncherError, match=words):
        run_demo(tmp_path, as_json=False)
    with pytest.raises(LauncherError, match=words):
        run_manage(tmp_path, ["check"])
    assert run_down(tmp_path) == 0
    assert capsys.readouterr().out == f"Not running: {tmp_path}\n"


# the installer


def test_what_pip_is_configured_to_use_reaches_uv() -> None:
    lines = [
        ":env:.find-links='/from/variable'", "global.find-links='/from/global'", "install.index-url='https://install/simple'",
        "global.index-url='https://global/simple'", "global.cert='/etc/ca.pem'", "", "list.format='columns'", "nonsense",
        "global.proxy=not quoted",
    ]  # fmt: skip
    settings = {"find-links": "/from/variable", "index-url": "https://install/simple", "cert": "/etc/ca.pem"}
    assert installer.parse_pip_settings(lines) == settings
    more = {"extra-index-url": "https://b/simple\nfile:///c", "no-index": "true", "trusted-host": "a"}
    assert installer.uv_options({**settings, **more}) == [
        "--index-strategy", "unsafe-best-match", "--default-index", "https://install/simple", "--extra-index-url",
        "https://b/simple", "--extra-index-url", "file:///c", "--find-links", "/from/variable", "--allow-insecure-host", "a",
        "--no-index",
    ]  # fmt: skip
    assert installer.uv_environment({"cert": "/ca.pem", "default-timeout": "180"}) == {
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert installer.uv_environment({}) == {}


def test_each_lock_file_holds_everything_of_the_smaller_ones() -> None:
    def pins(name: str) -> set[str]:
        return {line.split(" ")[0] for line in lock_file(name).read_text().splitlines() if "==" in line and line[0].isalnum()}

    for bigger, held in SETS.items():
        for smaller in held:
            assert pins(smaller) <= pins(bigger), f"{bigger}.txt lacks pins of {smaller}.txt: run requirements/lock.sh"
    lines = [
        "a==1 \\", "    --hash=sha256:00", "b==2 ; sys_platform == 'win32' \\", "# via a", "c==3 ; sys_platform != 'win32'",
    ]  # fmt: skip
    assert installer.count_pins("\n".join(lines)) == 2, "pins of other systems are not counted"


@pytest.mark.parametrize("has_uv", [True, False])
def test_whatever_installs_takes_nothing_without_a_hash_that_was_locked(tmp_path: Path, *, has_uv: bool) -> None:
    """Both ways in turn: uv is said to fail where it is there, so that pip has to do it."""
    calls, python = tmp_path / "calls", tmp_path / "python"
    answers = "exit 0" if has_uv else "exit 1"
    python.write_text(f"""#!/bin/sh
echo "$@" >> {calls}
case "$*" in
    "-m uv --version") {answers} ;;
    "-m uv pip install"*) exit 1 ;;
esac
""")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    lock, uv_lock = tmp_path / "lock.txt", tmp_path / "uv.txt"
    lock.write_text("one==1 --hash=sha256:00\n")
    uv_lock.write_text("uv==1 --hash=sha256:00\n")
    installer.install(python, lock, uv_lock)
    installs = [call for call in calls.read_text().splitlines() if " install " in call]
    assert [call.split()[1] for call in installs] == (["uv", "pip"] if has_uv else ["pip", "uv", "pip"])
    assert all("--require-hashes" in call.split() for call in installs)


# what the optional tests run on

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


def test_packages_of_a_changed_lock_file_are_installed_once_without_install_scripts(folder: Path) -> None:
    assert client_tests.client_environment(folder) == {"MUSTER_TEST_CLIENTS": "1"}
    assert not (folder / "called").exists()
    (folder / client_tests.TESTS / "node" / "package-lock.json").write_text(LOCK_TEXT + "\n")
    put_program(folder, "npm", "echo E401 >&2; exit 1")
    for _ in range(2):
        with pytest.raises(LauncherError, match=r"cannot install package-lock\.json: E401\. Check the network"):
            client_tests.client_environment(folder)
    put_program(folder, "npm", 'echo "$@" > called')
    client_tests.client_environment(folder)
    said = (folder / "called").read_text()
    assert said.startswith(f"ci --prefix {folder / client_tests.TESTS / 'node'} ")
    assert "--ignore-scripts" in said
    (folder / "called").unlink()
    client_tests.client_environment(folder)
    assert not (folder / "called").exists()


def test_every_package_is_pinned_and_locked_with_its_hash() -> None:
    wanted = json.loads((ROOT / client_tests.TESTS / "node" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert [name for name, version in wanted.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    locked = json.loads((ROOT / client_tests.TESTS / "node" / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert [name for name, entry in locked.items() if name and not entry["integrity"].startswith("sha512-")] == []
    assert [name for name, entry in locked.items() if entry.get("hasInstallScript")] == []
    pins = (ROOT / vllm_tests.REQUIREMENTS).read_text(encoding="utf-8").splitlines()
    assert {bool(re.fullmatch(r"[a-z-]+==[\d.]+", pin)) for pin in pins if pin and not pin.startswith(("#", "--"))} == {True}


# the runner of mutants

ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
PRODUCT = "def add(a, b):\n    return a + b\n"
TESTS = """
import pytest

from product import add

@pytest.fixture
def three():
    if add(1, 2) != 3:
        raise RuntimeError
    return 3

def test_sum():
    assert add(1, 2) == 3

def test_type():
    assert isinstance(add(1, 2), int)

def test_given(three):
    assert three == 3

def test_left_out():
    pytest.skip("never runs")
"""
ROWS = (
    ("test_sum", "a + b", "a - b", "killed"),
    ("test_type", "a + b", "a - b", "SURVIVED"),
    ("test_sum", "def add", "def sub", "broken: could not be collected"),
    ("test_given", "a + b", "a - b", "broken: could not be set up"),
    ("test_left_out", "a + b", "a - b", "broken: without the mutant, tests/test_product.py::test_left_out was skipped"),
    ("test_sum", "a * b", "a - b", "broken: product.py has the old text 0 times; it must have it once"),
    ("test_sum", "a + b", "a +", "broken: product.py is no Python with the new text: invalid syntax (product.py, line 2)"),
)


def test_a_mutant_is_killed_by_a_failure_of_its_test_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "product.py").write_text(PRODUCT)
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (tmp_path / "tests" / "test_product.py").write_text(TESTS)
    table = [
        f"[[mutant]]\nrow = {number}\ntests = ['tests/test_product.py::{test}']\n"
        f"file = 'product.py'\nold = '{old}'\nnew = '{new}'\n"
        for number, (test, old, new, _) in enumerate(ROWS, 1)
    ]
    (tmp_path / "tests" / "defences.toml").write_text("\n".join(table))
    assert run_mutants(tmp_path, ["defences"], ENVIRONMENT) == 1
    *lines, last = [line for line in capfd.readouterr().out.splitlines() if line[:1] in {"M", "1"}]
    told = {line.split()[0]: line.partition(" min left  ")[2] for line in lines}
    assert told == {f"M{number}": row[3] for number, row in enumerate(ROWS, 1)}
    assert last.startswith("1 of 7 mutants killed; not killed: ")
    assert (tmp_path / "product.py").read_text() == PRODUCT
    assert run_mutants(tmp_path, ["M1"], ENVIRONMENT) == 0
    assert "1 of 1 mutants killed\n" in capfd.readouterr().out
    with pytest.raises(LauncherError, match="no mutant for T99; there are M1, M2"):
        run_mutants(tmp_path, ["T99"], ENVIRONMENT)
