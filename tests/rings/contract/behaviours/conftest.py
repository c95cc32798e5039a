"""The hasty gateway stays for all files of this folder: they are short, and several of them want it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.stack import Gateway, Stack
from tests.rings.contract.conftest import HASTY_SETTINGS


@pytest.fixture(scope="package")
def hasty(stack: Stack) -> Iterator[Gateway]:
    """A gateway with small limits and short time-outs."""
    with stack.lend_gateway("hasty", HASTY_SETTINGS) as gateway:
        yield gateway
