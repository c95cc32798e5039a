"""Tests with the official Node SDKs: collected only by ``./muster test --clients``, which installs them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.fakes.lab import ACTOR, Lab, unique
from tests.fakes.stack import Stack, run_stack

collect_ignore_glob = [] if os.environ.get("MUSTER_TEST_CLIENTS") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the directory on one xdist worker: the stack is started once."""
    for item in items:
        if item.path.parent.name == "clients":
            item.add_marker(pytest.mark.xdist_group("clients"))
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The running system, without a node."""
    with run_stack("clients", {}) as running:
        yield running


@pytest_asyncio.fixture
async def lab(stack: Stack) -> AsyncIterator[Lab]:
    """The test's own corner of the stack."""
    _, secret = stack.backstage.call(
        "nodes.services.credentials.create_credential", name=unique("lab"), provider_name="local", max_nodes=50, actor=ACTOR
    )
    corner = Lab(stack, str(secret), stack.main)
    try:
        yield corner
    finally:
        await corner.close()
