"""Commands for whoever changes Muster: ``test``, ``check`` and ``lock``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from controlplane.launcher.console import say
from controlplane.launcher.environment import ROOT
from controlplane.launcher.errors import LauncherError
from tools import mutants
from tools.browsers import VARIABLE, ensure_chromium
from tools.client_tests import TESTS as CLIENT_TESTS
from tools.client_tests import client_environment
from tools.vllm_tests import TESTS as VLLM_TESTS
from tools.vllm_tests import vllm_environment
from wire import clock

_FAST_PATHS = ("tests/unit", "tests/test_architecture.py", "tests/test_docker.py", "tests/test_docs.py")
_FAST_WORKERS = 2
_WORKERS = 3
"""One more than cores, counted for two: a good part of the tests waits for processes of its own."""


def run_tests(arguments: Sequence[str], *, fast: bool, vllm: bool = False, clients: bool = False) -> int:
    """Run pytest: all of the tests, only the fast ones, those on a real vLLM or with Node SDKs, or what ``arguments`` name.

    Returns the exit status.
    """
    environment = _environment()
    added = []
    if vllm:
        environment |= vllm_environment()
        added.append(VLLM_TESTS)
    if clients:
        environment |= client_environment()
        added.append(CLIENT_TESTS)
    arguments = arguments if _names_tests(arguments) else [*arguments, *added]
    command = [sys.executable, "-m", "pytest", *_choose_tests(arguments, fast=fast)]
    if not fast and not _names_tests(arguments):
        environment[VARIABLE] = ensure_chromium()
    began = clock.monotonic()
    status = _run(command, environment)
    say(f"Tests took {clock.monotonic() - began:.1f} s")
    return status


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


def run_lock() -> int:
    """Recompile the lock files from pyproject.toml. Returns the exit status."""
    environment = _environment()
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
    return _run(["sh", "requirements/lock.sh"], environment)


def _choose_tests(arguments: Sequence[str], *, fast: bool) -> list[str]:
    chosen = list(arguments)
    if fast:
        chosen += _FAST_PATHS
    if not _names_tests(arguments) and not _names_workers(arguments):
        # tests/services_plugin.py keeps together what shares a server, and puts what takes long first and many short ones last,
        # so that the workers end together.
        workers = _FAST_WORKERS if fast else _WORKERS
        chosen += ["-n", str(workers), "--dist", "loadscope", "--no-loadscope-reorder"]
    return chosen


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
