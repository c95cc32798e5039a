"""The people who approve, whose rows a module without transactional tests shares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pytest_django import DjangoDbBlocker

from tests.fakes.rows import shared_rows
from tests.system.governance.team import Team, make_governed


@pytest.fixture(scope="module")
def team(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Team]:
    with shared_rows(django_db_blocker, make_governed) as made:
        yield made
