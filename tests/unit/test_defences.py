"""docs/threats.md and docs/failures.md are made from defences.toml; ``python -m tests.unit.test_defences`` writes them anew."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tools.mutants import read_defects, read_mutants, read_table

ROOT = Path(__file__).resolve().parents[2]
TABLE = read_table(ROOT)
MUTANTS = read_mutants(TABLE)
DEFECTS = read_defects(ROOT)
WRITTEN = "`python -m tests.unit.test_defences` writes this page from `tests/defences.toml`, which names the tests of each row."
PROVEN = "`./muster test --mutants {row}` puts a defect into a copy of the program: the tests of the row must notice it."
THREATS = f"""# Threats

{WRITTEN}
{PROVEN.format(row="T11")}
See also [failures](failures.md), and [what an operator does](secure.md).

| | Threat | Defence |
|---|---|---|
"""
FAILURES = f"""# Failures

{WRITTEN}
{PROVEN.format(row="F28")}
See also [threats](threats.md). *No test*: nothing checks it.

| | Failure | What callers and operators see |
|---|---|---|
"""


def render(head: str, letter: str, rows: list[dict[str, Any]], seen: str) -> str:
    """Return a page: its head and a line for each row."""
    untested = {False: "; *no test*", True: ""}
    return head + "".join(
        f"| {letter}{row['row']} | {row['what']} | {row[seen]}{untested[bool(row['tests'])]} |\n" for row in rows
    )


PAGES = {
    ROOT / "docs" / "threats.md": render(THREATS, "T", TABLE["threat"], "defence"),
    ROOT / "docs" / "failures.md": render(FAILURES, "F", TABLE["failure"], "sees"),
}


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the tests of a file: ``name``, or ``Class::name``."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    scopes = [("", body), *((f"{node.name}::", node.body) for node in body if isinstance(node, ast.ClassDef))]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(f"{scope}{node.name}" for scope, nodes in scopes for node in nodes if isinstance(node, functions))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pages_are_true_to_the_table(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == PAGES[page], "run python -m tests.unit.test_defences"


def test_every_threat_and_every_failure_has_its_row() -> None:
    threats = sorted(row["row"] for row in TABLE["threat"])
    assert threats == list(range(1, len(threats) + 1))
    failures = sorted(row["row"] for row in TABLE["failure"])
    assert failures == list(range(1, len(failures) + 1))
    assert (len(threats) >= 30, len(failures) >= 40) == (True, True)


def test_every_named_test_exists() -> None:
    named = {test for rows in TABLE.values() for row in rows for test in row["tests"]}
    assert not {test for test in named if not exists(*test.split("::", 1))}


def exists(path: str, name: str) -> bool:
    return (ROOT / path).is_file() and name in names_in(path)


def test_each_change_of_every_mutant_has_one_place_and_says_who_would_suffer() -> None:
    changes = {f"{row} {change.file}": change for row, mutant in MUTANTS.items() for change in mutant.changes}
    changes |= {name: defect.change for name, defect in DEFECTS.items()}
    assert not {name for name, change in changes.items() if read(change.file).count(change.old) != 1}
    assert not {name for name, change in changes.items() if change.new == change.old}
    assert all(mutant.tests for mutant in MUTANTS.values())
    assert not {name for name, defect in DEFECTS.items() if not defect.says.endswith(".")}


@cache
def read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_a_hundred_mutants_have_names_of_their_own_that_are_no_area() -> None:
    areas = {defect.area for defect in DEFECTS.values()}
    assert len(DEFECTS) >= 100
    assert areas.isdisjoint(DEFECTS)
    assert areas.isdisjoint(MUTANTS)


if __name__ == "__main__":
    for page, text in PAGES.items():
        page.write_text(text, encoding="utf-8")
