"""Mutants: hand-made defects of tests/defences.toml, each of which the tests of its row must notice.

A mutant is applied to a copy of the tree, never to the tree. It is killed when a named test fails there; a test that cannot be
collected, set up or ended in time says nothing about the promise, so such a mutant is broken and counts as a survivor does.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.launcher.console import say
from controlplane.launcher.errors import LauncherError
from wire import clock

TABLE = Path("tests", "defences.toml")
_KINDS = {"threat": "T", "failure": "F", "mutant": "M"}
"""Lists of the table, and the letter of a row that has no name of its own: threat 3 is T3."""
_LEFT_BEHIND = shutil.ignore_patterns(
    ".venv*", ".git", ".muster", ".*_cache", ".hypothesis", "__pycache__", "node_modules", "results", "*.log"
)
_AT_ONCE = 2
_TEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Change:
    """One text of one file that is replaced by another."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the file below ``root``. Raises LauncherError unless the text is there once, and is Python afterwards."""
        path = root / self.file
        source = path.read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise LauncherError(f"{self.file} has the old text {source.count(self.old)} times; it must have it once")
        changed = source.replace(self.old, self.new)
        if path.suffix == ".py":
            try:
                compile(changed, self.file, "exec")
            except SyntaxError as error:
                raise LauncherError(f"{self.file} is no Python with the new text: {error}") from None
        path.write_text(changed, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Mutant:
    """What breaks the promise of ``row``; ``tests`` are ``file::name``. Two changes where either defence alone suffices."""

    row: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]


def read_table(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the lists of the table of a tree."""
    with (root / TABLE).open("rb") as file:
        return tomllib.load(file)


def read_mutants(table: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Mutant]:
    """Return the mutants of a table by the name of their row."""
    found: dict[str, Mutant] = {}
    for kind, letter in _KINDS.items():
        for row in table.get(kind, ()):
            if "old" in row:
                name = f"{letter}{row['row']}"
                changes = [Change(one["file"], one["old"], one["new"]) for one in (row, *row.get("also", ()))]
                found[name] = Mutant(name, tuple(row["tests"]), tuple(changes))
    return found


def run_mutants(root: Path, names: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the mutants of ``names`` (none = all), two at once. Returns 1 unless every one of them is killed."""
    known = read_mutants(read_table(root))
    if unknown := [name for name in names if name not in known]:
        raise LauncherError(f"{TABLE} has no mutant for {', '.join(unknown)}; it has {', '.join(known)}")
    chosen = [known[name] for name in names or known]
    tests = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    say(f"{len(tests)} tests must pass before their mutants mean anything")
    sound = _run_in_copy(root, tests, environment)
    began, outcomes = clock.monotonic(), dict[str, str]()
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        running = {pool.submit(_judge, root, mutant, sound, environment): mutant for mutant in chosen}
        for done in as_completed(running):
            row = running[done].row
            outcomes[row], seconds = done.result()
            left_s = (clock.monotonic() - began) / len(outcomes) * (len(chosen) - len(outcomes))
            say(f"{row:<6} {seconds:6.1f} s  {len(outcomes)}/{len(chosen)}, {left_s / 60:.0f} min left  {outcomes[row]}")
    alive = [row for row, outcome in outcomes.items() if outcome != "killed"]
    say(
        f"{len(outcomes) - len(alive)} of {len(outcomes)} mutants killed"
        + (f"; not killed: {' '.join(alive)}" if alive else "")
    )
    return 1 if alive else 0


def _judge(root: Path, mutant: Mutant, sound: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str, float]:
    """Return what became of a mutant, and the seconds it took. ``sound``: what the tests said without it."""
    began = clock.monotonic()
    for test in mutant.tests:
        if sound[test] != "passed":
            return f"broken: without the mutant, {test} {sound[test]}", 0.0
    try:
        said = set(_run_in_copy(root, mutant.tests, environment, mutant).values())
    except LauncherError as error:
        return f"broken: {error}", clock.monotonic() - began
    seconds = clock.monotonic() - began
    if "failed" in said:
        return "killed", seconds
    return "SURVIVED" if said == {"passed"} else f"broken: {', '.join(sorted(said))}", seconds


def _run_in_copy(
    root: Path, tests: Sequence[str], environment: Mapping[str, str], mutant: Mutant | None = None
) -> dict[str, str]:
    """Return for each test ``passed``, ``failed``, or in other words why it said neither. Raises LauncherError."""
    with tempfile.TemporaryDirectory(prefix="muster-mutant-") as folder:
        copy, report, output = Path(folder, "tree"), Path(folder, "report.xml"), Path(folder, "output")
        shutil.copytree(root, copy, ignore=_LEFT_BEHIND, symlinks=True)
        if (root / ".venv").exists():
            (copy / ".venv").symlink_to(root / ".venv")
        if mutant is not None:
            for change in mutant.changes:
                change.apply(copy)
        options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", *options, *(["-x"] if mutant else []), *tests]
        kept = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
        with output.open("wb") as stream:
            process = subprocess.Popen(command, cwd=copy, env=kept, stdout=stream, stderr=subprocess.STDOUT)
        try:
            process.wait(_TEST_S * len(tests))
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
        if not report.exists():
            *_, last = ["no output", *output.read_text(encoding="utf-8", errors="replace").splitlines()]
            raise LauncherError(f"the tests wrote no report; their last line: {last}")
        return _read_report(report, tests)


def _read_report(report: Path, tests: Sequence[str]) -> dict[str, str]:
    """Return what pytest's report says of each test, over all of its parameters."""
    said: dict[str, set[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  # pytest wrote it, for us, a moment ago
        name = f"{case.get('classname')}.{case.get('name', '').partition('[')[0]}"
        outcome = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        if any(error.get("message", "").startswith("failed on teardown") for error in case.iter("error")):
            outcome = "failure"  # a fixture that looks at what a test leaves behind is a part of the test
        said.setdefault(name, set()).add(outcome)
    names = {test: test.replace("/", ".").replace(".py::", ".").replace("::", ".") for test in tests}
    return {test: _sum_up(said.get(name, set())) for test, name in names.items()}


def _sum_up(outcomes: set[str]) -> str:
    words = {"failure": "failed", "error": "could not be set up", "passed": "passed", "skipped": "was skipped"}
    return next((word for outcome, word in words.items() if outcome in outcomes), "could not be collected")
