"""One stack for the whole directory; extra gateways with other settings start on first use, on the same database.

The stack ends with the last test of the directory and an extra gateway with the last of its file: services cost time while
nobody uses them, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fakes.control_process import free_port
from tests.fakes.lab import ACTOR, Lab, unique
from tests.fakes.stack import Gateway, Stack, run_stack

PAGE = "https://chat.example.com"
"""The origin of a page that the gateway lets in."""
STACK_SETTINGS = {
    "MUSTER_DIRECT_ALLOW_LOOPBACK": "1", "MUSTER_DIRECT_HOSTS": "127.0.0.1",
    "MUSTER_ACCEPT_TIMEOUT_S": "20", "MUSTER_CORS_ORIGINS": f"http://localhost:3000, {PAGE}",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test of the directory five minutes, unless it says how long it takes: the first one starts the stack, too."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """The running system, without a node: tests bring their own."""
    with run_stack("main", STACK_SETTINGS) as running:
        yield running


@pytest.fixture(scope="package")
def worker_secret(stack: Stack) -> str:
    _, text = stack.backstage.call(
        "nodes.services.credentials.create_credential", name=unique("lab"), provider_name="local", max_nodes=5000, actor=ACTOR
    )
    return str(text)


@pytest.fixture(scope="module")
def pair(stack: Stack) -> Iterator[tuple[Gateway, Gateway]]:
    with ExitStack() as running:
        gateways = [
            running.enter_context(stack.lend_gateway(f"peer-{number}", {"MUSTER_INTERNAL_URL": f"http://127.0.0.1:{port}",
                    "MUSTER_CLUSTER_SECRET": "cluster-secret-of-the-tests"}, port=port)) for number,
            port in enumerate((free_port(), free_port()), start=1)
        ]  # fmt: skip
        yield gateways[0], gateways[1]


@pytest_asyncio.fixture
async def lab(stack: Stack, worker_secret: str) -> AsyncIterator[Lab]:
    corner = Lab(stack, worker_secret, stack.main)
    try:
        yield corner
    finally:
        await corner.close()
