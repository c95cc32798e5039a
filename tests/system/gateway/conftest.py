"""The database and the gateways of these tests, and the virtual loop of those that ask for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator

import psycopg
import pytest
from django.core.management import call_command
from django.db import connection, connections
from pytest_django import DjangoDbBlocker

from tests.fakes.fleet import Fleet
from tests.fakes.fleet import Rows as FleetRows
from tests.fakes.pipeline import Make, Rows, gateways
from tests.fakes.virtual_loop import VirtualLoop


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what is marked ``asyncio(loop_factories=["virtual"])`` on a virtual clock, and all else as everywhere."""
    marker = item.get_closest_marker("asyncio")
    if marker is not None and marker.kwargs.get("loop_factories") == ["virtual"]:
        return {"virtual": VirtualLoop}
    return {"real": asyncio.new_event_loop}


@pytest.fixture(scope="module")
def fleet_rows(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[FleetRows]:
    """What fleets of this module find in the database, which is emptied after the last: that takes longer than most of them."""
    with django_db_blocker.unblock():
        yield FleetRows.create(models={"m": None, "tight": 2}, keys={"k": None, "few": 3})
        call_command("flush", verbosity=0, interactive=False)
        connections.close_all()


@pytest.fixture
async def fleet(fleet_rows: FleetRows) -> AsyncIterator[Fleet]:
    """A gateway on a virtual clock, without nodes."""
    async with Fleet(rows=fleet_rows) as made:
        yield made


@pytest.fixture
def rows(transactional_db: None) -> Iterator[Rows]:
    """A connection of the test's own to the database, beside those of Django."""
    parameters = connection.get_connection_params()
    wanted = {name: parameters[name] for name in ("dbname", "user", "password", "host", "port") if name in parameters}
    with psycopg.connect(**wanted, autocommit=True) as database:
        yield database


@pytest.fixture
async def make_gateway(rows: Rows) -> AsyncIterator[Make]:
    """Makes gateways on that database."""
    async with gateways(rows) as make:
        yield make
