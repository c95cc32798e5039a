"""The mutant runner tells tests that notice a defect from tests that do not, and both from tests that say nothing.

It finds by itself which tests reach a place, also from a process that a fixture started.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest

from controlplane.launcher.errors import LauncherError
from tools.mutants import run_mutants
from tools.reach import insert_note

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
    assert run_mutants(tmp_path, ["defences"], ENVIRONMENT) == 1
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


def make_shop(root: Path, *rows: tuple[str, str, str]) -> None:
    """Lay a tree below ``root`` with one mutant for each (name, old text, new text) and tests in two rings."""
    for folder, name, text in [("unit", "near", NEAR), ("rings/contract", "far", FAR)]:
        (root / "tests" / folder).mkdir(parents=True)
        (root / "tests" / folder / f"test_{name}.py").write_text(text)
    (root / "wire").mkdir()
    (root / "shop.py").write_text(SHOP)
    (root / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    table = [
        f"[[mutant]]\nid = '{name}'\narea = '{name.partition('-')[0]}'\nsays = ''\n"
        f"file = 'shop.py'\nold = '{old}'\nnew = '{new}'\n"
        for name, old, new in rows
    ]
    (root / "tests" / "mutants.toml").write_text("\n".join(table))


def test_a_mutant_without_tests_of_its_own_is_killed_by_the_first_that_reaches_it_ring_by_ring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    make_shop(
        tmp_path,
        ("sums-wrong", "return a + b", "return a - b"),
        ("sums-second", "return b", "return -b"),
        ("sums-nothing", "return 0", "return 1"),
        ("names-wrong", '{"one": 1}', '{"one": 2}'),
        ("names-equal", "if a:", "if a and True:"),
    )
    kills, reach = tmp_path / "kills.json", tmp_path / "reach.json"
    options = [f"--kills={kills}", f"--reach={reach}", "--at-once=1"]
    assert run_mutants(tmp_path, options, ENVIRONMENT) == 1
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
