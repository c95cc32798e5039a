"""Mutants: hand-made defects, each of which the tests must notice.

A mutant is applied to a copy of the tree, never to the tree. It is killed when a test fails there; a test that cannot be
collected, set up or ended in time says nothing, so a mutant of which nothing else is known is broken and counts as a survivor
does. A row of tests/defences.toml names the tests of its promise. Those of tests/mutants.toml name none: each gets the tests
that reach its place, ring by ring, the most specific first.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.launcher.console import LauncherError, say
from tools.reach import PLUGIN, Reach, insert_note, place_plugin, read_reach
from wire import clock

TABLE = Path("tests", "defences.toml")
DEFECTS = Path("tests", "mutants.toml")
PROMISES = "defences"
"""Names all rows of ``TABLE`` on the command line."""
RINGS = {"unit": "tests/unit", "system": "tests/system", "smoke": "tests/smoke", "rings": "tests/rings"}
"""Folders of the tests that may kill a mutant without tests of its own, in the order in which they are run."""
_GATE = ("unit", "system", "smoke")
NO_SERVERS = {"MUSTER_TEST_DATABASE_URL": "postgresql://127.0.0.1:9/none", "MUSTER_TEST_REDIS_URL": "redis://127.0.0.1:9"}
"""For unit tests, which use neither: to start both takes seconds."""
_RING_S = 120.0
"""Tests of one ring that take longer than this together are not run against one mutant: the most specific of them are."""
_KINDS = {"threat": "T", "failure": "F", "mutant": "M"}
"""Lists of the table, and the letter of a row that has no name of its own: threat 3 is T3."""
_LEFT_BEHIND = shutil.ignore_patterns(
    ".venv*", ".git", ".muster", ".*_cache", ".hypothesis", "__pycache__", "node_modules", "results", "*.log"
)
_AT_ONCE = 2
_TEST_S = 600.0
_ALL_S = 7200.0


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
class Defect:
    """A mutant of ``DEFECTS``. ``says``: what would happen to whom."""

    name: str
    area: str
    says: str
    change: Change


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


def read_defects(root: Path) -> dict[str, Defect]:
    """Return the mutants of ``DEFECTS`` by name."""
    with (root / DEFECTS).open("rb") as file:
        rows = tomllib.load(file)["mutant"]
    return {row["id"]: Defect(row["id"], row["area"], row["says"], Change(row["file"], row["old"], row["new"])) for row in rows}


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


def run_mutants(root: Path, arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the mutants that ``arguments`` name. Returns 1 unless every one of them is killed.

    A name is a row of ``TABLE`` (T11), ``PROMISES`` (all rows), an id or an area of ``DEFECTS``; none = all of ``DEFECTS``.
    """
    parser = argparse.ArgumentParser(prog="muster test --mutants")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a row of tests/defences.toml, defences, an id, an area")
    parser.add_argument("--gate", action="store_true", help="run the tests of the gate alone, not the rings")
    parser.add_argument("--reach", type=Path, help="a file that keeps which tests reach what, for the next time")
    parser.add_argument("--kills", type=Path, help="a file for what killed each mutant, written as they are killed")
    parser.add_argument("--at-once", type=int, default=_AT_ONCE, help="how many workers and mutants run beside each other")
    options = parser.parse_args(arguments)
    promises = read_mutants(read_table(root)) if (root / TABLE).exists() else {}
    defects = read_defects(root) if (root / DEFECTS).exists() else {}
    areas = {defect.area for defect in defects.values()}
    if unknown := [name for name in options.names if name not in {PROMISES, *promises, *defects, *areas}]:
        raise LauncherError(f"no mutant for {', '.join(unknown)}; there are {', '.join([*promises, *sorted(areas), *defects])}")
    rows = [name for name in promises if {name, PROMISES} & set(options.names)]
    chosen = [one for one in defects.values() if not options.names or {one.name, one.area} & set(options.names)]
    status = _run_promises([promises[row] for row in rows], root, environment) if rows else 0
    return (_run_defects(chosen, root, environment, options) if chosen else 0) or status


def _run_promises(chosen: Sequence[Mutant], root: Path, environment: Mapping[str, str]) -> int:
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
    with _copy_tree(root) as copy:
        for change in mutant.changes if mutant is not None else ():
            change.apply(copy)
        return _run_tests(copy, tests, environment, [*(["-x"] if mutant else [])], within_s=_TEST_S * len(tests))


@contextmanager
def _copy_tree(root: Path) -> Iterator[Path]:
    """Yield a copy of the tree, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="muster-mutant-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder, "tree")
        shutil.copytree(root, copy, ignore=_LEFT_BEHIND, symlinks=True)
        if (root / ".venv").exists():
            (copy / ".venv").symlink_to(root / ".venv")
        yield copy


def _run_tests(
    copy: Path, tests: Sequence[str], environment: Mapping[str, str], options: Sequence[str], *, within_s: float
) -> dict[str, str]:
    """Run tests in a copy, in their order, and return what each said. Raises LauncherError."""
    report, output, names = (copy.parent / name for name in ("report.xml", "output", "tests"))
    report.unlink(missing_ok=True)
    names.write_text("\n".join(tests), encoding="utf-8")
    usual = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *usual, *options, f"@{names}"]
    # What is compiled lies in the copy, where ``Change`` drops it: kept elsewhere, that of the file before would be run.
    elsewhere = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}
    kept = {name: value for name, value in environment.items() if name not in elsewhere}
    with output.open("wb") as stream:
        process = subprocess.Popen(command, cwd=copy, env=kept, stdout=stream, stderr=subprocess.STDOUT)
    try:
        process.wait(within_s)
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


# Mutants without tests of their own


def _run_defects(chosen: Sequence[Defect], root: Path, environment: Mapping[str, str], options: argparse.Namespace) -> int:
    began = clock.monotonic()
    if options.reach is not None and options.reach.exists():
        reach: Reach = json.loads(options.reach.read_text(encoding="utf-8"))
    else:
        reach = measure_reach(root, read_defects(root), environment, workers=options.at_once)
        if options.reach is not None:
            options.reach.write_text(json.dumps(reach), encoding="utf-8")
        say(f"the tests that reach {len(reach)} mutants are known after {clock.monotonic() - began:.0f} s")
    rings = [ring for ring in RINGS if ring in _GATE or not options.gate]
    began, ends = clock.monotonic(), dict[str, tuple[str, str]]()
    with ThreadPoolExecutor(options.at_once) as pool, _copies(root, options.at_once) as copies:
        running = {pool.submit(_hunt, one, rings, reach, copies, environment): one for one in chosen}
        for done in as_completed(running):
            name = running[done].name
            ring, told, seconds = done.result()
            ends[name] = ring, told
            left_s = (clock.monotonic() - began) / len(ends) * (len(chosen) - len(ends))
            say(
                f"{name:<40} {seconds:6.1f} s  {len(ends)}/{len(chosen)}, {left_s / 60:.0f} min left  {ring or 'ALIVE'}: {told}"
            )
            if options.kills is not None:
                kills = {name: {"ring": ring, "test": told} if ring else told for name, (ring, told) in sorted(ends.items())}
                options.kills.write_text(json.dumps(kills, indent=1), encoding="utf-8")
    for area in dict.fromkeys(one.area for one in chosen):
        counts = Counter(ends[one.name][0] or "alive" for one in chosen if one.area == area)
        say(f"{area:<12} {counts.total():3}  " + "  ".join(f"{ring} {counts[ring]:3}" for ring in (*rings, "alive")))
    alive = [name for name, (ring, _) in ends.items() if not ring]
    say(f"{len(ends) - len(alive)} of {len(ends)} mutants killed" + (f"; alive: {' '.join(sorted(alive))}" if alive else ""))
    return 1 if alive else 0


@contextmanager
def _copies(root: Path, number: int) -> Iterator[queue.SimpleQueue[Path]]:
    """Yield copies of the tree for that many workers."""
    copies = queue.SimpleQueue[Path]()
    with ExitStack() as stack:
        for _ in range(number):
            copies.put(stack.enter_context(_copy_tree(root)))
        yield copies


def _hunt(
    defect: Defect, rings: Sequence[str], reach: Reach, copies: queue.SimpleQueue[Path], environment: Mapping[str, str]
) -> tuple[str, str, float]:
    """Return the ring and the test that killed a mutant, or "" and why none did, and the seconds it took."""
    began, notes = clock.monotonic(), []
    reached = Counter(test for tests in reach.values() for test in tests)
    tests = reach.get(defect.name, {})
    copy = copies.get()
    path = copy / defect.change.file
    source = path.read_text(encoding="utf-8")
    try:
        _write_source(path, source)
        defect.change.apply(copy)
        for ring in rings:
            its = [test for test in tests if test.startswith(f"{RINGS[ring]}/")]
            its.sort(key=lambda test: (reached[test], tests[test], test))
            taken = list(_take_within(its, tests, _RING_S))
            given = {**environment, **NO_SERVERS} if ring == "unit" else environment
            killer, note = _try_tests(copy, taken, given) if taken else ("", "")
            if killer:
                return ring, killer, clock.monotonic() - began
            if its:
                notes.append(f"{ring}{note} {len(taken)} of {len(its)}")
    except LauncherError as error:
        notes.append(f"broken: {error}")
    finally:
        _write_source(path, source)
        copies.put(copy)
    return "", f"survived {', '.join(notes) or 'no test reaches it'}", clock.monotonic() - began


def _try_tests(copy: Path, tests: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the test that failed, "" = none did, and why they said nothing if so. A set-up may fail where others pass."""
    said: set[str] = set()
    try:
        for most in (1, 10):
            outcomes = _run_tests(copy, tests, environment, [f"--maxfail={most}"], within_s=2 * _RING_S)
            said = set(outcomes.values())
            words = {"failed", "could not be set up"} if "passed" in said else {"failed"}
            if killer := next((test for test in tests if outcomes[test] in words), ""):
                return killer, ""
            if "passed" in said:
                return "", ""
    except LauncherError as error:
        said = {str(error)}
    return "", f" broken ({', '.join(sorted(said))})"


def _take_within(tests: Sequence[str], seconds: Mapping[str, float], most_s: float) -> Iterator[str]:
    for test in tests:
        if seconds[test] <= most_s:
            most_s -= seconds[test]
            yield test


def _write_source(path: Path, source: str) -> None:
    """Write a module, and see to it that nothing compiled of another version of it stays."""
    path.write_text(source, encoding="utf-8")
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def measure_reach(root: Path, defects: Mapping[str, Defect], environment: Mapping[str, str], *, workers: int) -> Reach:
    """Return which tests that pass reach the place of each mutant: all run once, on a tree in which the places take notes."""
    with _copy_tree(root) as copy:
        trees: dict[str, ast.Module] = {}
        for name, defect in defects.items():
            file, old, new = defect.change.file, defect.change.old, defect.change.new
            source = (root / file).read_text(encoding="utf-8")
            same = os.path.commonprefix([old, new])  # noqa: RUF071 - of characters, as is meant
            line = source.count("\n", 0, source.index(old) + len(same)) + 1
            insert_note(trees.setdefault(file, ast.parse(source)), name, line)
        for file, tree in trees.items():
            (copy / file).write_text(ast.unparse(tree), encoding="utf-8")
        place_plugin(copy)
        folders = [folder for folder in RINGS.values() if (copy / folder).exists()]
        several = ["-n", str(workers), "--dist", "loadscope", "--no-loadscope-reorder"] if workers > 1 else []
        with suppress(LauncherError):  # what did not end has left its notes
            _run_tests(copy, folders, environment, ["-p", PLUGIN, *several], within_s=_ALL_S)
        return read_reach(copy, {name: defect.change.file for name, defect in defects.items()})
