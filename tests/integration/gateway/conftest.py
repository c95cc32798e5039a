"""A private database server that a test may kill, for what happens while PostgreSQL is away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, connections
from pytest_django import DjangoDbBlocker

from controlplane.env import read_database
from controlplane.launcher.embedded import EmbeddedServers


@contextmanager
def _use_database(url: str) -> Iterator[None]:
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


@pytest.fixture(scope="module")
def private_servers(django_db_blocker: DjangoDbBlocker) -> Iterator[EmbeddedServers]:
    """A PostgreSQL of this module alone, migrated, with durable commits."""
    with EmbeddedServers(durable=True) as servers, django_db_blocker.unblock(), _use_database(servers.database_url):
        call_command("migrate", verbosity=0)
        yield servers


@pytest.fixture
def rows(private_servers: EmbeddedServers) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A connection of the test's own to the private database, with an empty request table."""
    if private_servers.postgres.process is None:
        private_servers.postgres.start()
    with psycopg.connect(private_servers.database_url, autocommit=True) as database:
        database.execute("TRUNCATE gateway_requestrecord")
        yield database
