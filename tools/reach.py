"""Which tests reach which places of the product: notes put into a copy of the tree, and what they come to."""

from __future__ import annotations

import ast
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tools import reach_notes

PLUGIN = "wire.reached"
"""Where the notes are taken in a copy: every package may import ``wire``."""
Reach = dict[str, dict[str, float]]
"""Seconds of the tests (without parameters) that reach a place, by the name of the place."""


def place_plugin(copy: Path) -> None:
    """Put into a copy of the tree what takes the notes."""
    path = copy.joinpath(*PLUGIN.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    shutil.copy(reach_notes.__file__, path)
    (copy / reach_notes.FOLDER).mkdir()


def insert_note(tree: ast.Module, name: str, line: int) -> None:
    """Have the place ``name`` noted before the innermost statement that holds ``line``.

    For a place outside of functions every function of the module takes the note: somebody reads there what stands here.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    holding = [node for node in functions if node.body[0].lineno <= line <= (node.end_lineno or 0)]
    if not holding:
        for function in functions:
            function.body[:0] = _make_note(name, function.body[0].lineno)
        return
    span, statements, at = (0, 0), holding[-1].body, 0
    for node in ast.walk(holding[-1]):
        for field in ("body", "orelse", "finalbody"):
            value = getattr(node, field, [])
            found: list[ast.stmt] = value if isinstance(value, list) else []  # of a lambda it is an expression
            for number, statement in enumerate(found):
                first, last = statement.lineno, statement.end_lineno or 0
                if first <= line <= last and (first, -last) >= span:
                    span, statements, at = (first, -last), found, number
    statements[at:at] = _make_note(name, line)


def _make_note(name: str, line: int) -> list[ast.stmt]:
    made = ast.parse(f"try: __import__({PLUGIN!r}, None, None, ['note']).note({name!r})\nexcept ImportError: pass").body
    for node in ast.walk(made[0]):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler):
            node.lineno, node.end_lineno = line, 0  # it holds no line, so no other note goes into it
    return made


def read_reach(copy: Path, files: Mapping[str, str]) -> Reach:
    """Return the tests that passed and reached each place. ``files``: the module of each place.

    Of a module whose functions are never called (it may have none) it is the tests in the folders of its package.
    """
    folder = copy / reach_notes.FOLDER
    seconds = _read_ends(folder)
    reach: Reach = {name: {} for name in files}
    for path in folder.glob("*.notes"):
        for line in path.read_text(encoding="utf-8").splitlines():
            name, _, noted = line.partition("\t")
            test = _name_test(noted)
            reach[name] |= {each: took for each, took in seconds.items() if each == test or each.startswith(f"{test}::")}
    for name, file in files.items():
        if not reach[name]:
            package = f"/{file.partition('/')[0]}"
            reach[name] = {test: took for test, took in seconds.items() if package in test.partition("::")[0]}
    return reach


def _read_ends(folder: Path) -> dict[str, float]:
    """Return the seconds of each test that passed, over all of its parameters."""
    seconds, passed, failed = defaultdict[str, float](float), set[str](), set[str]()
    for path in folder.glob("*.ends"):
        for line in path.read_text(encoding="utf-8").splitlines():
            nodeid, how, took = line.rsplit("\t", 2)
            test = _name_test(nodeid)
            seconds[test] += float(took)
            if how == "call passed":
                passed.add(test)
            elif how.endswith("failed"):
                failed.add(test)
    return {test: seconds[test] for test in passed - failed}


def _name_test(nodeid: str) -> str:
    file, colons, name = nodeid.partition("::")
    return file + colons + name.partition("[")[0]
