"""A busy port is one clear line that names who has it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from controlplane.launcher.errors import LauncherError
from controlplane.launcher.ports import claim_port, describe_holder
from tests.unit.closed_port import closed_port


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_port_is_named_with_the_option_to_change(busy_port: int) -> None:
    with pytest.raises(LauncherError, match=rf"port {busy_port} on 127.0.0.1 is in use.*--gateway-port"):
        claim_port("127.0.0.1", busy_port, option="--gateway-port")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a port")
def test_the_holder_of_a_port_is_named(busy_port: int) -> None:
    assert describe_holder(busy_port).startswith(f"process {os.getpid()} (")


def test_zero_means_any_free_port() -> None:
    assert claim_port("127.0.0.1", 0, option="--port") > 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port that is held for the test cannot be claimed")
def test_a_free_port_is_given_back() -> None:
    with closed_port() as port:
        assert [claim_port("127.0.0.1", port, option="--port") for _ in range(2)] == [port, port]


def test_an_address_that_is_not_ours_is_said_so() -> None:
    with pytest.raises(LauncherError, match=r"--host 192\.0\.2\.1 is not an address of this machine"):
        claim_port("192.0.2.1", 0, option="--port")


def test_nobody_holds_a_free_port() -> None:
    with closed_port() as port:
        assert describe_holder(port) == ""
