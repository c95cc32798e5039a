"""Fixtures of every test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cache

import pytest
from django.contrib.auth.hashers import Argon2PasswordHasher
from django.db import OperationalError, connection, transaction
from django.test import TransactionTestCase
from psycopg.errors import DeadlockDetected
from pytest_django import DjangoDbBlocker

from core.limits import Limits, install, limits
from runner import limits as runner_limits
from tests.services_plugin import THROWN_AWAY_VARIABLE
from wire import clock

# A module of checks that several test modules import: its asserts should say what they compared.
pytest.register_assert_rewrite("tests.fakes.engines.suite")


@pytest.fixture(scope="session")
def django_db_keepdb() -> bool:
    """Leave the database where it is when its server ends with the run: dropping it fails while a connection to it lingers."""
    return os.environ.get(THROWN_AWAY_VARIABLE) == "1"


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> None:
    """Let tests that commit be cleaned up: that is a TRUNCATE, which the audit trail refuses as it should."""
    with django_db_blocker.unblock(), connection.cursor() as cursor:
        for table in ("auditevent", "auditentry", "auditcheckpoint", "witnessstatement"):
            cursor.execute(f"ALTER TABLE governance_{table} DISABLE TRIGGER governance_{table}_no_truncate")


@pytest.fixture(scope="session", autouse=True)
def quick_emptying() -> Iterator[None]:
    """Empty after a test that committed only the tables that have rows, and leave content types and permissions where they are.

    Django truncates every table and makes content types and permissions anew, which takes longer than most tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", lambda _case: empty_tables())
        yield


def empty_tables() -> None:
    """Take the rows out of all tables, again when PostgreSQL ended that: a server under test may be writing its last ones."""
    for is_last in (False, False, True):
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute(_find_filled())
                filled = [name for (name,) in cursor.fetchall()]
                if filled:
                    cursor.execute(f"LOCK TABLE {', '.join(filled)} IN EXCLUSIVE MODE")
                for name in filled:
                    cursor.execute(f"TRUNCATE {name}" if name in _guarded_tables() else f"DELETE FROM {name}")
            return
        except OperationalError as error:
            if is_last or not isinstance(error.__cause__, DeadlockDetected):
                raise


@cache
def _find_filled() -> str:
    """Return the statement that names the tables with rows."""
    kept = {"django_migrations", "django_content_type", "auth_permission"}
    names = sorted(set(connection.introspection.django_table_names(only_existing=True, include_views=False)) - kept)
    return " UNION ALL ".join(f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM {name})" for name in names)


@cache
def _guarded_tables() -> frozenset[str]:
    """Return the tables whose triggers refuse that a row is deleted: 8 is the bit of a trigger that DELETE fires."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT DISTINCT tgrelid::regclass::text FROM pg_trigger WHERE NOT tgisinternal AND tgtype & 8 <> 0")
        return frozenset(name for (name,) in cursor.fetchall())


@pytest.fixture(scope="session")
def settings_limits(django_test_environment: None) -> Limits:
    """What the settings made of the limits."""
    return limits()


@pytest.fixture(autouse=True)
def real_clock(settings_limits: Limits) -> Iterator[None]:
    """Have each test begin on the machine's clock, with the settings' limits, in a process that never stood still.

    So have the fixtures of the next module, which are made before this one: a test takes its own clock away when it ends.
    """
    _reset(settings_limits)
    yield
    _reset(settings_limits)


def _reset(settings_limits: Limits) -> None:
    clock.install(time)
    install(settings_limits)
    runner_limits.install(runner_limits.Limits())


@pytest.fixture(scope="session", autouse=True)
def quick_passwords() -> Iterator[None]:
    """Let a password cost the least Argon2 can instead of a third of a second; processes under test keep their own cost."""
    with pytest.MonkeyPatch.context() as patch:
        for name, least in (("time_cost", 1), ("memory_cost", 8), ("parallelism", 1)):
            patch.setattr(Argon2PasswordHasher, name, least)
        yield
