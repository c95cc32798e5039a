"""The programs as a person starts them: their help before anything is installed, and what stops them with one line."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from controlplane.env import LOG_LEVELS
from controlplane.launcher.environment import ROOT
from tests.services_plugin import keep_bytecode

pytestmark = pytest.mark.timeout(240)
# -I -S: no site-packages, so this fails when the launcher needs anything that is not in the standard library.
BARE = ("-I", "-S", "muster")
COMMANDS = {"up", "down", "credentials", "manage", "demo", "node", "trust", "test", "check", "bench", "lock"}
NEEDY = ("conformance", "bench", "node", "trust", "sign", "keys", "approve", "manage allow_model", "audit verify")
LEAKING = """
import pytest

@pytest.mark.django_db
async def test_leaks():
    pass

async def test_leaks_by_fixture(db):
    pass

async def test_needs_no_rows():
    pass

@pytest.mark.browser
def test_of_a_page():
    pytest.skip("no browser")
"""
PRODUCTION = {
    "MUSTER_SECRET_KEY": "0123456789abcdef" * 4,
    "MUSTER_DEBUG": "off",
    "MUSTER_BEHIND_TLS": "true",
    "MUSTER_ALLOWED_HOSTS": "muster.example.com",
    "MUSTER_CSRF_TRUSTED_ORIGINS": "https://muster.example.com",
    "MUSTER_PUBLIC_URL": "https://muster.example.com",
}


def run(
    *words: str, root: Path = ROOT, variables: Mapping[str, str] = MappingProxyType({})
) -> subprocess.CompletedProcess[str]:
    """Run Python with these words in our repository, or another, and with more variables."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *words], cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=180
    )


@pytest.fixture(scope="module")
def bare_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout in which nothing has been installed, as far as the launcher reaches."""
    root = tmp_path_factory.mktemp("checkout")
    packages = ("controlplane", "core", "wire")
    modules = ("controlplane/env.py", "core/limits.py", "wire/clock.py", "wire/limits.py")
    for name in ("muster", *(f"{package}/__init__.py" for package in packages), *modules):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for folder in ("controlplane/launcher", "controlplane/management", "requirements"):
        shutil.copytree(ROOT / folder, root / folder)
    return root


def test_help_names_every_command_without_anything_installed() -> None:
    answer = run(*BARE, "--help")
    assert answer.returncode == 0
    assert set(re.findall(r"^    (\w+)\b", answer.stdout, re.MULTILINE)) >= COMMANDS


@pytest.mark.parametrize("command", NEEDY)
def test_no_help_installs_anything(command: str, bare_checkout: Path) -> None:
    before = set(bare_checkout.iterdir())
    answer = run(*BARE, *command.split(), "--help", root=bare_checkout)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout.startswith(f"usage: ./muster {command.split(maxsplit=1)[0]} ")
    page = re.search(r"\b(docs|benchmarks)/[\w-]+\.md", answer.stdout)
    assert page is not None
    assert (ROOT / page[0]).is_file()
    assert set(bare_checkout.iterdir()) == before


@pytest.mark.parametrize("words", [["manage", "--help"], ["manage"], ["manage", "help"]], ids=" ".join)
def test_the_help_of_manage_lists_our_commands_and_none_of_djangos_dangerous_ones(words: list[str]) -> None:
    said = run(*BARE, *words).stdout
    assert "./muster manage" in said
    assert re.search(r"^  allow_model +Let clients use a model\.", said, re.MULTILINE)
    assert not re.search(r"^ +(flush|dumpdata|runserver)", said, re.MULTILINE)


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "controlplane.serve_control", "--port", "0"],
        ["-m", "controlplane.serve_gateway", "--port", "0"],
        ["-m", "controlplane.serve_worker"],
        ["manage.py", "check"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("MUSTER_LOG_LEVEL", "verbose", f"must be one of {', '.join(LOG_LEVELS)}, not 'verbose'"),
        ("MUSTER_TRUSTED_PROXIES", "proxy.example", ""),
    ],
)
def test_a_setting_that_cannot_be_used_stops_every_program_with_one_line(
    program: list[str], name: str, value: str, words: str
) -> None:
    ended = run(*program, variables={name: value})
    assert (ended.returncode, ended.stdout) == (1, "")
    assert re.fullmatch(rf"muster: {name}\b.*{re.escape(words)}.*\n", ended.stderr)


def test_a_busy_port_is_one_line_and_exit_status_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("-m", "controlplane.serve_control", "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 1
    assert "already in use" in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(("proxies", "found"), [("127.0.0.1", ""), ("", "controlplane.W001")])
def test_a_production_environment_has_no_warning_and_one_without_its_proxy_has(proxies: str, found: str) -> None:
    settings = {**PRODUCTION, "MUSTER_TRUSTED_PROXIES": proxies}
    ended = run("manage.py", "check", "--deploy", "--fail-level", "WARNING", variables=settings)
    assert (ended.returncode, found in ended.stderr) == (1 if found else 0, True), ended.stderr


def test_who_signs_on_a_desk_needs_nothing_of_the_server(tmp_path: Path) -> None:
    program = (
        "import sys; from controlplane.approver_cli import main; code = main(sys.argv[1:]); "
        "assert not {'django', 'celery', 'psycopg'} & set(sys.modules); sys.exit(code)"
    )
    ended = run("-c", program, "keys", "show", "--dir", str(tmp_path))
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "There is no key file" in ended.stdout


def test_bytecode_is_kept_although_the_environment_forbids_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")  # so that it is put back as it was, also where it was not set
    monkeypatch.delenv("PYTHONPYCACHEPREFIX")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "imported.py").write_text("")
    keep_bytecode(tmp_path / "kept")
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(tmp_path / "kept"), False)
    assert run("-S", "-c", "import imported", root=tmp_path).returncode == 0
    assert list((tmp_path / "kept").rglob("imported.*.pyc"))
    assert not (tmp_path / "__pycache__").exists()


def test_leaking_tests_fail_and_skipped_pages_fail_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(LEAKING)
    answer = run(
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        "pyproject.toml",
        str(tmp_path / "test_sample.py"),
        variables={"CI": "true"},
    )
    assert answer.returncode == 1
    assert "1 passed, 1 skipped, 2 errors" in answer.stdout, answer.stdout + answer.stderr
    assert answer.stdout.count("an async test commits for real") >= 2
    assert "1 × no browser" in answer.stdout
    assert "CI: browser tests were skipped" in answer.stdout
