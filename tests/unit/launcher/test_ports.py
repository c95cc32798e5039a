"""A busy port is one clear line that names who has it."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from controlplane.launcher.errors import LauncherError
from controlplane.launcher.ports import claim_port, describe_holder, list_addresses, list_names
from tests.unit.closed_port import closed_port


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_busy_port_is_named_with_the_option_to_change(busy_port: int) -> None:
    with pytest.raises(LauncherError, match=rf"port {busy_port} on 127.0.0.1 is in use.*--gateway-port"), ExitStack() as held:
        claim_port("127.0.0.1", busy_port, option="--gateway-port", held=held)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who holds a port")
def test_the_holder_of_a_port_is_named(busy_port: int) -> None:
    assert describe_holder(busy_port).startswith(f"process {os.getpid()} (")


def test_zero_means_any_free_port() -> None:
    with ExitStack() as held:
        assert claim_port("127.0.0.1", 0, option="--port", held=held) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a child listen on a port that is held for it")
def test_a_claimed_port_is_held_for_a_server_that_asks_for_it_by_its_number() -> None:
    with ExitStack() as held:
        port = claim_port("127.0.0.1", 0, option="--port", held=held)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port
    with ExitStack() as again:
        assert claim_port("127.0.0.1", port, option="--port", held=again) == port


def test_an_address_that_is_not_ours_is_said_so() -> None:
    with pytest.raises(LauncherError, match=r"--host 203\.0\.113\.1 is not an address of this machine"):
        claim_port("203.0.113.1", 0, option="--port", held=ExitStack())


def test_nobody_holds_a_free_port() -> None:
    with closed_port() as port:
        assert describe_holder(port) == ""


def test_the_addresses_of_this_machine_are_those_it_can_listen_on_and_none_of_loopback() -> None:
    addresses = [ipaddress.ip_address(text) for text in list_addresses()]
    assert not any(address.is_loopback or address.is_link_local for address in addresses)
    assert [address.version for address in addresses] == sorted(address.version for address in addresses)
    for address in addresses:
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((str(address), 0))


def test_the_names_of_this_machine_begin_with_its_host_name() -> None:
    names = list_names([])
    assert names[0] == socket.gethostname().lower()
    assert names == list(dict.fromkeys(names))
