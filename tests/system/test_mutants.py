"""The runner of mutants: what it does with a product of two lines and four tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controlplane.launcher.console import LauncherError
from tools.mutants import run_mutants

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
