"""Starts one PostgreSQL and one Valkey for the whole test run, before Django reads its settings; decides who runs what.

Loaded with ``-p`` (see pyproject.toml). Under xdist the first process starts them and the workers inherit the URLs; each worker
gets a database of its own from pytest-django and a Valkey database of its own from here. MUSTER_TEST_DATABASE_URL and
MUSTER_TEST_REDIS_URL name servers that run already.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import pytest
from xdist.scheduler import LoadScopeScheduling

from controlplane.launcher.environment import VENV
from tests.fakes.servers import EmbeddedServers

DATABASE_VARIABLE = "MUSTER_TEST_DATABASE_URL"
REDIS_VARIABLE = "MUSTER_TEST_REDIS_URL"
THROWN_AWAY_VARIABLE = "MUSTER_TEST_SERVERS_END_WITH_RUN"
"""Set where the servers are the run's own: what is left in them goes with them."""
_HIGHEST_REDIS_DATABASE = 15
_SHARED = ("tests/rings/browser/", "tests/rings/contract/")
_OWN_SYSTEM = ("tests/rings/contract/test_governed_fleet.py", "tests/rings/contract/test_kill_matrix.py")
"""Long files in such a folder that share nothing with it: they break systems of their own."""
LONGEST = (
    "tests/rings/contract/",
    "tests/rings/engines/test_engine_port.py",
    "tests/rings/browser/",
    *_OWN_SYSTEM,
    "tests/rings/runner/test_runner_box.py",
)
"""Scopes that take a worker more than half a minute, the longest first."""

_servers: EmbeddedServers | None = None


def _start() -> None:
    global _servers
    if not (os.environ.get(DATABASE_VARIABLE) and os.environ.get(REDIS_VARIABLE)):
        _servers = EmbeddedServers(durable=False)
        atexit.register(_stop)
        _servers.start()
        os.environ[DATABASE_VARIABLE] = _servers.database_url
        os.environ[THROWN_AWAY_VARIABLE] = "1"
        os.environ[REDIS_VARIABLE] = _servers.redis_url
    os.environ["DATABASE_URL"] = patient_url(os.environ[DATABASE_VARIABLE])
    os.environ["REDIS_URL"] = redis_url_of_worker(os.environ[REDIS_VARIABLE], os.environ.get("PYTEST_XDIST_WORKER", ""))
    os.environ["MUSTER_SECRET_KEY"] = "the secret of the tests, which protects nothing"


def _stop() -> None:
    global _servers
    if _servers is not None:
        _servers.stop()
        _servers = None


def patient_url(url: str) -> str:
    """Return the URL of a database with half a minute to connect in, unless it says how long: machines of tests stand still."""
    parts = urlsplit(url)
    query = {"connect_timeout": "30", **dict(parse_qsl(parts.query))}
    return urlunsplit(parts._replace(query=urlencode(query)))


def redis_url_of_worker(url: str, worker: str) -> str:
    """Return ``url`` with the database number of an xdist worker (``gw0`` has 1, ``gw1`` has 2…); without one, unchanged."""
    if not worker.startswith("gw"):
        return url
    number = 1 + int(worker[2:]) % _HIGHEST_REDIS_DATABASE
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}?db={number}"
    return urlunsplit(parts._replace(path=f"/{number}"))


def keep_bytecode(folder: Path) -> None:
    """Let this process and those it starts keep what they compiled, below ``folder``, where the environment forbids it.

    Images set PYTHONDONTWRITEBYTECODE to stay small. The tests start some hundred processes of Python, and each of them would
    compile Django and all else that it imports for two to three seconds.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder))
        sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
        sys.dont_write_bytecode = False


keep_bytecode(VENV / "bytecode")
_start()


class SharedServerScheduling(LoadScopeScheduling):
    """Gives each worker of xdist whole scopes, as ``find_scope`` tells them apart, in the order of the collection.

    ``--dist loadgroup`` would do it by marks, but xdist 3.8 writes them where pytest 9.2 no longer looks.
    """

    def _split_scope(self, nodeid: str) -> str:
        return find_scope(nodeid)


def find_scope(nodeid: str) -> str:
    """Return what one worker runs together: a file, or a whole folder whose tests share a running system.

    What of such a folder has a system of its own goes where there is room: the worker with the folder has enough to do.
    """
    path = nodeid.partition("::")[0]
    if path in _OWN_SYSTEM:
        return path
    return next((folder for folder in _SHARED if path.startswith(folder)), path)


def rank_test(nodeid: str) -> int:
    """Return where in the order of a run with several workers a test stands: what takes long first, what is short last.

    pytest-django puts tests with a database before all others, and so the longest scope of all behind most of them: one worker
    would go on with it when the others have ended.
    """
    scope = find_scope(nodeid)
    return LONGEST.index(scope) if scope in LONGEST else len(LONGEST)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have workers end together, in the order of ``rank_test``. One process alone keeps the order of pytest-django."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank_test(item.nodeid))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage neither while tests are collected nor among them later: they are thousands and stay to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SharedServerScheduling:
    """Schedule by what tests share."""
    return SharedServerScheduling(config, log)


def pytest_unconfigure() -> None:
    """Stop the servers after pytest-django has dropped its databases; also runs after Ctrl-C."""
    _stop()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail an async test that would leak rows: plain django_db rolls back in another thread than the one that wrote."""
    if trouble := find_leak(item):
        pytest.fail(trouble, pytrace=False)


def find_leak(item: pytest.Item) -> str:
    """Return why ``item`` would leave rows behind for other tests, or an empty text."""
    if not isinstance(item, pytest.Function) or not inspect.iscoroutinefunction(item.function):
        return ""
    marker = item.get_closest_marker("django_db")
    if "fleet_rows" in item.fixturenames:
        return ""  # which empties the tables itself, behind the last test of its module
    is_transactional = "transactional_db" in item.fixturenames or (marker is not None and marker.kwargs.get("transaction"))
    if is_transactional or (marker is None and "db" not in item.fixturenames):
        return ""
    return "an async test commits for real: mark it django_db(transaction=True), or use async_to_sync in a sync test"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped and why."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else "no reason" for report in skipped)
    terminalreporter.write_line(f"Skipped tests: {len(skipped)}")
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"  {number} × {reason.removeprefix('Skipped: ')}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a browser test that was skipped is a failure: there it is on us to have a browser."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI", "").lower() not in {"1", "true"} or reporter is None:
        return
    if any("browser" in report.keywords for report in reporter.stats.get("skipped", [])):
        reporter.write_line("CI: browser tests were skipped; a Chromium is missing")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
