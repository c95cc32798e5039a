"""A PostgreSQL of a test's own, which it may freeze: every socket stays open and says nothing, as in a stopped machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
from django.core.management import call_command
from django.db import connection, connections
from pytest_django import DjangoDbBlocker

from controlplane.env import read_database
from controlplane.launcher.embedded import EmbeddedServers

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
    stopped = freeze(servers)
    try:
        yield
    finally:
        thaw(stopped)


def freeze(servers: EmbeddedServers) -> list[int]:
    """Stop the server with all its processes; return their ids, for ``thaw``."""
    stopped = [servers.postgres.pid]
    try:
        stop_at_once(stopped[0])  # first: it starts no others then
        stopped += children_of(stopped[0])
        for pid in stopped[1:]:
            stop_at_once(pid)
    except BaseException:
        thaw(stopped)  # nobody else would
        raise
    return stopped


def stop_at_once(pid: int) -> None:
    """Stop a process and return once it stands: until it comes to see the signal it may still answer, or start another."""

    def is_stopped() -> bool:
        os.kill(pid, signal.SIGSTOP)
        return read_state(pid) in "TtZX"

    wait_for(is_stopped, what=f"process {pid} stands still")


def read_state(pid: int) -> str:
    """Return the letter that /proc has for the state of a process, X when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def thaw(stopped: list[int]) -> None:
    """Let the processes go on. One that had ended before is gone as soon as its parent, which goes on last, looks after it."""
    for pid in reversed(stopped):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def children_of(parent: int) -> list[int]:
    """Return the processes that this one has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(after_name[1]) == parent:
            found.append(int(stat.parent.name))
    return found


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
    until = time.monotonic() + WITHIN_S
    with psycopg.connect(servers.database_url, autocommit=True) as looker:
        while left := looker.execute(others, [own]).fetchall():
            assert time.monotonic() < until, left
            time.sleep(0.02)


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
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)
