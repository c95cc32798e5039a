"""The people who approve, whose rows a module without transactional tests shares, and the browser of one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import Client
from pytest_django import DjangoDbBlocker

from tests.fakes.governed_team import Team, make_governed, open_session
from tests.fakes.nodes import shared_rows


@pytest.fixture(scope="module")
def team(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Team]:
    with shared_rows(django_db_blocker, make_governed) as made:
        yield made


@pytest.fixture
def browser(team: Team) -> Client:
    """The browser of the first of them, who has signed in with a passkey."""
    return open_session(team[0].user)
