"""Tables are emptied after a test although a server of that test still writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from django.core.management.color import no_style
from django.core.management.sql import sql_flush
from django.db import connection
from psycopg.errors import DeadlockDetected

from core.models import User
from tests.fakes.control_process import database_url_of_tests
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]


def has_waiting_lock(watcher: psycopg.Connection) -> bool:
    here = "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database WHERE datname = current_database()"
    found = watcher.execute(f"{here} AND NOT granted").fetchone()
    return found is not None and found[0] > 0


def cross(writer: psycopg.Connection, held: str, wanted: str) -> Callable[[], None]:
    """Hold one table; return what then asks for another one, and lets go of both."""
    writer.execute(f"LOCK TABLE {held} IN ROW EXCLUSIVE MODE".encode())

    def go_on() -> None:
        try:
            writer.execute(f"LOCK TABLE {wanted} IN ROW EXCLUSIVE MODE".encode())
        except DeadlockDetected:
            writer.rollback()
        else:
            writer.commit()

    return go_on


@contextmanager
def looking_first() -> Iterator[None]:
    """Let Django's connection look for a deadlock before the other one does, and so be the one that PostgreSQL ends."""
    with connection.cursor() as cursor:
        cursor.execute("SET deadlock_timeout = '3s'")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("RESET deadlock_timeout")


def test_emptying_survives_a_deadlock_with_a_server() -> None:
    User.objects.create_user("ada")
    url = database_url_of_tests()
    statements = sql_flush(no_style(), connection, reset_sequences=False)
    first, *_, last = re.findall(r'"(\w+)"', statements[0])
    with (
        looking_first(),
        psycopg.connect(url) as writer,
        psycopg.connect(url, autocommit=True) as watcher,
        ThreadPoolExecutor(1) as thread,
    ):
        writer.execute("SET deadlock_timeout = '20s'")
        go_on = cross(writer, held=last, wanted=first)

        def write_when_awaited() -> None:
            wait_until(lambda: has_waiting_lock(watcher), within_s=30, what="emptying waits for the server")
            go_on()

        writing = thread.submit(write_when_awaited)
        connection.ops.execute_sql_flush(statements)
        writing.result(30)
    assert not User.objects.exists()
