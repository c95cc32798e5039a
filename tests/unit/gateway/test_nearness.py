"""What counts as a caller on the same machine."""

from __future__ import annotations

import pytest

from gateway.views.nearness import came_directly


def is_direct(address: str | None = "127.0.0.1", version: str = "1.1", **headers: str) -> bool:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return came_directly({"client": (address, 5) if address else None, "http_version": version}, named)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1", None])
@pytest.mark.parametrize("host", ["", "127.0.0.1:8080", "localhost:8080", "LOCALHOST", "[::1]:8080"])
def test_a_program_on_this_machine_is_direct(address: str | None, host: str) -> None:
    assert is_direct(address, host=host)


@pytest.mark.parametrize("address", ["10.0.0.7", "::ffff:10.0.0.7", "2001:db8::1", "nonsense"])
def test_another_machine_is_not(address: str) -> None:
    assert not is_direct(address, host="127.0.0.1:8080")


@pytest.mark.parametrize(
    "name", ["x_forwarded_for", "forwarded", "via", "x_real_ip", "x_forwarded_proto", "x_forwarded_host", "cf_connecting_ip"]
)
def test_what_a_proxy_passed_on_is_not_even_when_it_says_nothing_of_whom(name: str) -> None:
    assert not is_direct(host="127.0.0.1:8080", **{name: ""})


@pytest.mark.parametrize(
    "host", ["muster.example", "muster.example:443", "10.0.0.7", "localhost.evil.example", "[::1", "a@b:x"]
)
def test_what_asks_for_another_name_is_not(host: str) -> None:
    assert not is_direct(host=host)


def test_what_speaks_as_a_proxy_does_to_its_upstream_is_not() -> None:
    assert not is_direct(version="1.0", host="127.0.0.1:8080")
