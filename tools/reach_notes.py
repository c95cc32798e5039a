"""Notes of which test reaches which place. ``tools.reach`` puts this module into a copy of the tree.

There it is a plugin of pytest, which tells the processes of a worker what test runs, and it has what the places call.
"""

from __future__ import annotations

import os
from typing import Any

FOLDER = "reached"
_NOTES = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), FOLDER)
_WORKER = os.environ.get("PYTEST_XDIST_WORKER", "main")
_CURRENT = os.path.join(_NOTES, f"{_WORKER}.current")
"""Holds the test that runs now: a process of a fixture sees many."""
_seen: dict[str, object] = {}
_test = ""


def note(mutant: str) -> None:
    """Write down that the test of this moment reaches the place of a mutant; a few times suffice."""
    try:
        moment = _test or os.stat(_CURRENT).st_mtime_ns
        if _seen.get(mutant) == moment:
            return
        _seen[mutant] = moment
        if not (test := _test):
            with open(_CURRENT, encoding="utf-8") as file:
                test = file.read()
        _append("notes", f"{mutant}\t{test}")
    except OSError:
        return  # no test runs, or this process may not write


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _tell(nodeid)


def pytest_fixture_setup(fixturedef: Any, request: Any) -> None:
    """A fixture is made; one that a whole file shares counts for the file."""
    nodeid: str = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0]
    _tell(nodeid if fixturedef.scope == "function" else nodeid.partition("::")[0])


def pytest_runtest_call(item: Any) -> None:
    """All fixtures are made."""
    _tell(item.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """A phase of a test has ended."""
    if not hasattr(report, "node"):  # else a worker of pytest-xdist has written it
        _append("ends", f"{report.nodeid}\t{report.when} {report.outcome}\t{report.duration:.3f}")


def _tell(test: str) -> None:
    global _test  # noqa: PLW0603 - a plugin has no other place, and a process runs one test at a time
    if test != _test:
        _test = test
        with open(_CURRENT, "w", encoding="utf-8") as file:
            file.write(test)


def _append(kind: str, line: str) -> None:
    with open(os.path.join(_NOTES, f"{_WORKER}.{kind}"), "a", encoding="utf-8") as file:
        file.write(line + "\n")
