"""A PostgreSQL of a test's own, which it may freeze: every socket stays open and says nothing, as in a stopped machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import psutil
import psycopg
from django.core.management import call_command
from django.db import connection, connections
from pytest_django import DjangoDbBlocker

from controlplane.env import read_database
from controlplane.launcher.embedded import EmbeddedServers
from tests.fakes.control_process import standing_still
from tests.fakes.waiting import wait_until

WITHIN_S = 30.0


@contextmanager
def use_database(url: str) -> Iterator[None]:
    """Point Django's default connection of this process at ``url``, in every thread that connects from now on."""
    connections.close_all()
    saved = connections.settings["default"].copy()
    wanted = read_database(url)
    connections.settings["default"].update(wanted)
    connection.settings_dict.update(wanted)
    try:
        yield
    finally:
        connections.close_all()
        connections.settings["default"].update(saved)
        connection.settings_dict.update(saved)


@contextmanager
def private_database(blocker: DjangoDbBlocker) -> Iterator[EmbeddedServers]:
    """Run a PostgreSQL and a Valkey, migrated, that are Django's until the block ends. Not durable: it may freeze, not die."""
    with EmbeddedServers(durable=False) as private, blocker.unblock(), use_database(private.database_url):
        call_command("migrate", verbosity=0)
        yield private


@contextmanager
def frozen(servers: EmbeddedServers) -> Iterator[None]:
    """Stop the server with all its processes, as a hypervisor does, and let them go on after the block."""
    with standing_still(psutil.Process(servers.postgres.pid)):
        yield


@contextmanager
def held(servers: EmbeddedServers, statement: str) -> Iterator[None]:
    """Hold what ``statement`` locks until the block ends."""
    with psycopg.connect(servers.database_url) as holder:
        holder.execute(statement)
        yield


def count_blocked(servers: EmbeddedServers) -> int:
    """Return how many connections wait for a lock that another one holds."""
    with psycopg.connect(servers.database_url, autocommit=True) as looker:
        row = looker.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'").fetchone()
        assert row is not None
        return int(row[0])


def wait_for_the_abandoned(servers: EmbeddedServers) -> None:
    """Return once only this thread's own connection is left: what a frozen server was sent, it does when thawed all the same.

    For tests whose other clients have all gone: it cannot tell an abandoned connection from one in use. One over which nothing
    was ever asked does not count: an exception that somebody keeps may keep it open.
    """
    own = connection.connection.info.backend_pid if connection.connection is not None else 0
    others = (
        "SELECT pid, state, query FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND query <> '' AND pid NOT IN (pg_backend_pid(), %s)"
    )
    with psycopg.connect(servers.database_url, autocommit=True) as looker:
        wait_until(lambda: not looker.execute(others, [own]).fetchall(), "nobody else is left", within_s=WITHIN_S)


def in_thread(work: Callable[[], object]) -> Future[object]:
    """Run ``work`` beside the test, with a database connection of its own."""

    def run() -> object:
        try:
            return work()
        finally:
            connections.close_all()

    pool = ThreadPoolExecutor(1)
    future = pool.submit(run)
    pool.shutdown(wait=False)
    return future


def wait_for(condition: Callable[[], object], *, what: str, within_s: float = WITHIN_S) -> None:
    """Return once the condition holds. Raises AssertionError after ``within_s``."""
    wait_until(condition, what, within_s=within_s)
