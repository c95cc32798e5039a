"""Fixtures of every test."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from django.contrib.auth.hashers import Argon2PasswordHasher
from django.db import OperationalError, connection
from psycopg.errors import DeadlockDetected
from pytest_django import DjangoDbBlocker

from core.limits import Limits, install, limits
from tests.services_plugin import THROWN_AWAY_VARIABLE
from wire import clock

# A module of checks that several test modules import: its asserts should say what they compared.
pytest.register_assert_rewrite("tests.system.runner.engine_suite")


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
def patient_emptying() -> Iterator[None]:
    """Empty the tables after a test once more when PostgreSQL ended that: a server under test may be writing its last rows.

    TRUNCATE locks all tables one after the other, and the server's transaction holds one of them and wants another.
    """
    kind = type(connection.ops)
    empty_once = kind.execute_sql_flush

    def empty(operations: Any, statements: Sequence[str]) -> None:
        for is_last in (False, False, True):
            try:
                empty_once(operations, statements)
                return
            except OperationalError as error:
                if is_last or not isinstance(error.__cause__, DeadlockDetected):
                    raise

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "execute_sql_flush", empty)
        yield


@pytest.fixture(scope="session")
def settings_limits(django_test_environment: None) -> Limits:
    """What the settings made of the limits."""
    return limits()


@pytest.fixture(autouse=True)
def real_clock(settings_limits: Limits) -> None:
    """Have each test begin on the machine's clock, with the settings' limits, in a process that never stood still."""
    clock.install(time)
    install(settings_limits)


@pytest.fixture(scope="session", autouse=True)
def quick_passwords() -> Iterator[None]:
    """Let a password cost the least Argon2 can instead of a third of a second; processes under test keep their own cost."""
    with pytest.MonkeyPatch.context() as patch:
        for name, least in (("time_cost", 1), ("memory_cost", 8), ("parallelism", 1)):
            patch.setattr(Argon2PasswordHasher, name, least)
        yield


@pytest.fixture
def empty_redis() -> Iterator[redis.Redis]:
    """The Valkey database of this worker, emptied before and after."""
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        client.flushdb()
        yield client
        client.flushdb()
