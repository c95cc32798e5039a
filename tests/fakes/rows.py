"""Rows of the database: shared by the tests of a module, and found by what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from django.db import connection, transaction
from pytest_django import DjangoDbBlocker

T = TypeVar("T")


@contextmanager
def shared_rows(blocker: DjangoDbBlocker, make: Callable[[], T]) -> Iterator[T]:
    """Yield what ``make`` returns and keep the rows that it wrote until the block ends; each test takes back its own changes.

    For a fixture of a module without transactional tests, which also asks for ``django_db_setup``. Tests may change the rows,
    not the objects. A node that must stay fresh however long the module takes is heard in the future (``age_s`` below zero).
    """
    shared: Any = transaction.atomic()  # Any: Django's own test cases mark theirs so, and let durable blocks be in it
    shared._from_testcase = True
    with blocker.unblock():
        shared.__enter__()
    try:
        with blocker.unblock():
            made = make()
        yield made
    finally:
        with blocker.unblock():
            transaction.set_rollback(True)
            shared.__exit__(None, None, None)


def find_tables(*needles: str) -> set[str]:
    """Return the tables with a row that holds one of the texts, plainly or as bytes."""
    found = set()
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f'SELECT t::text FROM "{table}" t')  # names of the database itself
            if any(needle in row[0] for row in cursor.fetchall() for needle in needles):
                found.add(table)
    return found
