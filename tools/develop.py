"""Commands for whoever changes Muster: ``test``, ``check`` and ``lock``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from controlplane.launcher.console import LauncherError, say
from controlplane.launcher.environment import ROOT
from tools import mutants
from tools.advisories import SOURCE, renew
from tools.browsers import VARIABLE, ensure_chromium
from tools.client_tests import TESTS as CLIENT_TESTS
from tools.client_tests import client_environment
from tools.licences import FILE, list_locked, print_table
from tools.vllm_tests import TESTS as VLLM_TESTS
from tools.vllm_tests import vllm_environment
from wire import clock

_FAST = ("tests/unit",)
_GATE = (*_FAST, "tests/system", "tests/smoke")
_FAILED = Path(".pytest_cache", "v", "cache", "lastfailed")
_FAST_WORKERS = 2
_WORKERS = 4
"""Two more than cores, counted for two: a good part of the tests waits for a database."""


def run_tests(arguments: Sequence[str], *, ring: str = "") -> int:
    """Run pytest: the gate (unit, system, smoke), the ring that is named, or what ``arguments`` name. Returns the exit status.

    ``ring``: ``fast`` = the unit tests, ``all`` = every test that needs no further installation, ``vllm`` = on a real vLLM,
    ``clients`` = with the Node SDKs.
    """
    environment = _environment()
    paths = {"fast": _FAST, "all": ("tests",), "vllm": (VLLM_TESTS,), "clients": (CLIENT_TESTS,)}.get(ring, _GATE)
    if ring == "vllm":
        environment |= vllm_environment()
    elif ring == "clients":
        environment |= client_environment()
    elif ring == "fast":
        environment |= mutants.NO_SERVERS
    command = [sys.executable, "-m", "pytest", *arguments]
    if not _names_tests(arguments):
        command += paths
        if ring != "fast":
            environment[VARIABLE] = ensure_chromium()
        if not _names_workers(arguments) and ring in {"", "fast", "all"}:
            # tests/services_plugin.py keeps together what shares a server, and puts what takes long first and many short ones
            # last, so that the workers end together.
            workers = _FAST_WORKERS if ring == "fast" else _WORKERS
            command += ["-n", str(workers), "--dist", "loadscope", "--no-loadscope-reorder"]
    if ring == "all":
        command.append("--cache-clear")
    began = clock.monotonic()
    status = _run(command, environment)
    say(f"Tests took {clock.monotonic() - began:.1f} s")
    if ring == "all":
        _report_flakes(environment)
    return status


def _report_flakes(environment: dict[str, str]) -> None:
    """Run each test that failed once more, alone, and say which of them passes then: its race is a defect as well."""
    failed = _read_failed()
    if not failed:
        say("Flake report: no test failed")
        return
    say(f"── once more, one after the other: the {len(failed)} that failed")
    _run([sys.executable, "-m", "pytest", "-q", "--last-failed", "tests"], environment)
    again = _read_failed()
    say(f"Flake report: of {len(failed)} that failed, {len(failed - again)} passed when they ran again; the run has failed")
    for name in sorted(failed):
        say(f"  {'fails ' if name in again else 'passed'} {name}")


def _read_failed() -> set[str]:
    path = ROOT / _FAILED
    return set(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else set()


def run_mutants(rows: Sequence[str]) -> int:
    """Run the mutants of ``rows``, all when there are none, each in a copy of the tree. Returns the exit status."""
    return mutants.run_mutants(ROOT, rows, _environment())


def run_check() -> int:
    """Run every check that is no test, all of them even when one fails. Returns 1 when any failed."""
    python = sys.executable
    binaries = os.path.dirname(python)
    steps = {
        "format": [f"{binaries}/ruff", "format", "--check", "."],
        "lint": [f"{binaries}/ruff", "check", "."],
        "types": [python, "-m", "mypy"],
        "layers": [f"{binaries}/lint-imports"],
        "migrations": [python, "-W", "ignore::RuntimeWarning", "manage.py", "makemigrations", "--check", "--dry-run"],
    }
    results: dict[str, tuple[int, float]] = {}
    for name, command in steps.items():
        say(f"── {name}: {' '.join(os.path.basename(word) if word == command[0] else word for word in command)}")
        began = clock.monotonic()
        results[name] = _run(command, {**_environment(), "MUSTER_SECRET_KEY": "check"}), clock.monotonic() - began
    for name, (status, seconds) in results.items():
        say(f"{'ok    ' if status == 0 else 'FAILED'} {name:<12} {seconds:6.1f} s")
    return 1 if any(status for status, _ in results.values()) else 0


def run_lock(*, advisories: str | None, licences: Sequence[str] | None) -> int:
    """Recompile the lock files from pyproject.toml, or renew what is kept about them. Returns the exit status.

    ``advisories``: where the snapshot is taken from, empty = OSV. ``licences``: reports of pip about what is not installed.
    Raises LauncherError.
    """
    if advisories is not None:
        say(renew(ROOT, advisories or SOURCE))
    if licences is not None:
        (ROOT / FILE).write_text(print_table(ROOT, [Path(name) for name in licences]), encoding="utf-8")
        say(f"{FILE}: {len(list_locked(ROOT))} packages")
    if advisories is not None or licences is not None:
        return 0
    environment = _environment()
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
    return _run(["sh", "requirements/lock.sh"], environment)


def _names_tests(arguments: Sequence[str]) -> bool:
    """Return whether the person named files or directories to run."""
    return any(os.path.exists(ROOT / word.partition("::")[0]) for word in arguments if not word.startswith("-"))


def _names_workers(arguments: Sequence[str]) -> bool:
    return any(word.startswith(("-n", "--numprocesses", "--dist", "--pdb")) for word in arguments)


def _environment() -> dict[str, str]:
    """Return our environment without what would point the tests at somebody's real database."""
    dropped = {"DATABASE_URL", "REDIS_URL", "MUSTER_SECRET_KEY", "DJANGO_SETTINGS_MODULE"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def _run(command: Sequence[str], environment: dict[str, str]) -> int:
    try:
        return subprocess.run(list(command), env=environment, cwd=ROOT, check=False).returncode
    except FileNotFoundError as error:
        raise LauncherError(f"{error.filename} is missing from the environment: delete .venv and try again") from None
