"""The table of rows and the tests agree."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.rings.contract import behaviours


def test_every_row_of_the_table_names_a_test_that_exists_and_every_row_is_there() -> None:
    rows = dict(line.split() for line in (behaviours.__doc__ or "").splitlines() if ".test_" in line)
    here = Path(__file__).parent
    found = {
        f"{path.stem}.{node.name}"
        for path in here.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    }
    assert set(rows.values()) <= found, set(rows.values()) - found
    assert set(rows) == {str(number) for number in range(3, 57)} | {"L1", "L2", "L3"}
