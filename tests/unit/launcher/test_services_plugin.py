"""The plugin that gives the tests their servers, and keeps tests from leaking rows into each other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane.launcher.environment import ROOT
from tests.services_plugin import LONGEST, SharedServerScheduling, keep_bytecode, patient_url, rank_test, redis_url_of_worker

_LEAKING = """
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


def test_bytecode_is_kept_although_the_environment_forbids_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")  # so that it is put back as it was, also where it was not set
    monkeypatch.delenv("PYTHONPYCACHEPREFIX")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "imported.py").write_text("")
    keep_bytecode(tmp_path / "kept")
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (str(tmp_path / "kept"), False)
    subprocess.run([sys.executable, "-S", "-c", "import imported"], cwd=tmp_path, check=True, timeout=60)
    assert list((tmp_path / "kept").rglob("imported.*.pyc"))
    assert not (tmp_path / "__pycache__").exists()


def test_who_lets_bytecode_be_written_keeps_it_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    keep_bytecode(tmp_path)
    assert sys.pycache_prefix is None


@pytest.mark.timeout(150)
def test_leaking_tests_fail_and_skipped_pages_fail_in_ci(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(_LEAKING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-c",
        "pyproject.toml",
        str(tmp_path / "test_sample.py"),
    ]
    environment = {**os.environ, "CI": "true"}
    answer = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False, timeout=120)
    assert answer.returncode == 1
    assert "1 passed, 1 skipped, 2 errors" in answer.stdout, answer.stdout + answer.stderr
    assert answer.stdout.count("an async test commits for real") >= 2
    assert "1 × no browser" in answer.stdout
    assert "CI: browser tests were skipped" in answer.stdout


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
