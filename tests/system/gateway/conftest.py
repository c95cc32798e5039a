"""A private database server that a test may kill, and the virtual loop of the tests that ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import psycopg
import pytest
from django.core.management import call_command
from django.db import connections
from pytest_django import DjangoDbBlocker

from controlplane.launcher.embedded import EmbeddedServers
from tests.fakes.fleet import Rows
from tests.fakes.frozen_database import use_database
from tests.fakes.virtual_loop import VirtualLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what is marked ``asyncio(loop_factories=["virtual"])`` on a virtual clock, and all else as everywhere."""
    marker = item.get_closest_marker("asyncio")
    if marker is not None and marker.kwargs.get("loop_factories") == ["virtual"]:
        return {"virtual": VirtualLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def fleet_rows(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Rows]:
    """What fleets of this module find in the database, which is emptied after the last: that takes longer than most of them."""
    with django_db_blocker.unblock():
        yield Rows.create(models={"m": None, "tight": 2}, keys={"k": None, "few": 3})
        call_command("flush", verbosity=0, interactive=False)
        connections.close_all()


@pytest.fixture(scope="module")
def private_servers(django_db_blocker: DjangoDbBlocker) -> Iterator[EmbeddedServers]:
    """A PostgreSQL of this module alone, migrated, with durable commits."""
    with EmbeddedServers(durable=True) as servers, django_db_blocker.unblock(), use_database(servers.database_url):
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
