"""A PostgreSQL of a module alone, which its tests freeze, fill or kill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import psycopg
import pytest
from django.core.management import call_command
from pytest_django import DjangoDbBlocker

from tests.fakes.control_process import use_database
from tests.fakes.pipeline import Make, Rows, gateways
from tests.fakes.servers import EmbeddedServers


@pytest.fixture(scope="module")
def private_servers(django_db_blocker: DjangoDbBlocker) -> Iterator[EmbeddedServers]:
    """A PostgreSQL of this module alone, migrated, with durable commits."""
    with EmbeddedServers(durable=True) as servers, django_db_blocker.unblock(), use_database(servers.database_url):
        call_command("migrate", verbosity=0)
        yield servers


@pytest.fixture
def rows(private_servers: EmbeddedServers) -> Iterator[Rows]:
    """A connection of the test's own to the private database, with an empty request table."""
    if private_servers.postgres.process is None:
        private_servers.postgres.start()
    with psycopg.connect(private_servers.database_url, autocommit=True) as database:
        database.execute("TRUNCATE gateway_requestrecord")
        yield database


@pytest.fixture
async def make_gateway(rows: Rows) -> AsyncIterator[Make]:
    """Makes gateways on that database."""
    async with gateways(rows) as make:
        yield make
