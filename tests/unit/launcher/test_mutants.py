"""The mutant runner tells tests that notice a defect from tests that do not, and both from tests that say nothing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from controlplane.launcher.errors import LauncherError
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

@pytest.fixture
def looked_after():
    yield
    assert add(1, 2) == 3

def test_leaves_it(looked_after):
    pass

def test_left_out():
    pytest.skip("never runs")
"""


def make_tree(root: Path, *rows: tuple[str, str, str]) -> None:
    """Lay a tree below ``root`` with one row for each (test, old text, new text)."""
    (root / "tests").mkdir()
    (root / "product.py").write_text(PRODUCT)
    (root / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    (root / "tests" / "test_product.py").write_text(TESTS)
    table = [
        f"[[mutant]]\nrow = {number}\ntests = ['tests/test_product.py::{test}']\n"
        f"file = 'product.py'\nold = '{old}'\nnew = '{new}'\n"
        for number, (test, old, new) in enumerate(rows, 1)
    ]
    (root / "tests" / "defences.toml").write_text("\n".join(table))


def test_a_mutant_is_killed_by_a_failure_of_its_test_and_by_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_tree(
        tmp_path,
        ("test_sum", "a + b", "a - b"),
        ("test_type", "a + b", "a - b"),
        ("test_sum", "def add", "def sub"),
        ("test_given", "a + b", "a - b"),
        ("test_left_out", "a + b", "a - b"),
        ("test_sum", "a * b", "a - b"),
        ("test_sum", "a + b", "a +"),
        ("test_leaves_it", "a + b", "a - b"),
    )
    assert run_mutants(tmp_path, [], ENVIRONMENT) == 1
    *lines, last = [line for line in capfd.readouterr().out.splitlines() if line[:1] in {"M", "2"}]
    told = {line.split()[0]: line.partition(" min left  ")[2] for line in lines}
    assert told == {
        "M1": "killed",
        "M2": "SURVIVED",
        "M3": "broken: could not be collected",
        "M4": "broken: could not be set up",
        "M5": "broken: without the mutant, tests/test_product.py::test_left_out was skipped",
        "M6": "broken: product.py has the old text 0 times; it must have it once",
        "M7": "broken: product.py is no Python with the new text: invalid syntax (product.py, line 2)",
        "M8": "killed",
    }
    assert last.startswith("2 of 8 mutants killed; not killed: ")
    assert (tmp_path / "product.py").read_text() == PRODUCT


def test_only_the_rows_that_are_named_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_tree(tmp_path, ("test_sum", "a + b", "a - b"), ("test_type", "a + b", "a - b"))
    assert run_mutants(tmp_path, ["M1"], ENVIRONMENT) == 0
    assert "1 of 1 mutants killed\n" in capfd.readouterr().out
    with pytest.raises(LauncherError, match="no mutant for T99; it has M1, M2"):
        run_mutants(tmp_path, ["T99"], ENVIRONMENT)
