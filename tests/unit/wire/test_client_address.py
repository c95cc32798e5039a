"""Whose address a request has, whatever its client writes."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.client_address import TrustedProxies

CLIENT = "203.0.113.9"
PROXY, OUTER_PROXY = "10.0.0.1", "10.0.0.2"
NETWORKS = [ip_network(text) for text in ("10.0.0.0/29", "::1", "fd00::/8")]
PROXIES = TrustedProxies(NETWORKS)


def read(peer: str, *lines: bytes, proxies: TrustedProxies = PROXIES, kind: str = "http", **others: bytes) -> dict[str, Any]:
    headers = [(b"host", b"muster.example"), *((b"x-forwarded-for", line) for line in lines)]
    headers += [(name.replace("_", "-").encode(), value) for name, value in others.items()]
    scope: dict[str, Any] = {"type": kind, "client": (peer, 5), "headers": headers, "scheme": "http"}
    if proxies:
        proxies.correct_scope(scope)
    return scope


def address_of(peer: str, *lines: bytes, **others: Any) -> str:
    return str(read(peer, *lines, **others)["client"][0])


FORGERIES = st.lists(
    st.one_of(
        st.binary(max_size=40),
        st.lists(
            st.sampled_from([b"10.0.0.1", b"127.0.0.1", b"::1", b"1.2.3.4", b"unknown", b"", b"[", b"a:b", b"fd00::1%x"])
        ).map(b", ".join),
    ),
    max_size=5,
)


@given(FORGERIES, st.booleans())
def test_a_client_never_chooses_its_address(lines: list[bytes], is_same_line: bool) -> None:
    """The proxy appends to the client's line, or adds a line of its own."""
    wrote = [*lines[:-1], lines[-1] + b", " + CLIENT.encode()] if lines and is_same_line else [*lines, CLIENT.encode()]
    assert address_of(PROXY, *wrote) == CLIENT


@given(FORGERIES)
def test_nor_through_two_proxies(lines: list[bytes]) -> None:
    assert address_of(PROXY, *lines, f"{CLIENT}, {OUTER_PROXY}".encode()) == CLIENT


@given(FORGERIES, st.sampled_from(["203.0.113.9", "10.0.0.9", "127.0.0.1", "2001:db8::1", "testclient"]))
def test_who_is_no_trusted_proxy_keeps_its_address_whatever_it_says(lines: list[bytes], peer: str) -> None:
    tls = TrustedProxies(NETWORKS, is_tls=True)
    scope = read(peer, *lines, proxies=tls, x_real_ip=b"1.2.3.4", forwarded=b"for=1.2.3.4", x_forwarded_proto=b"https")
    assert (scope["client"], scope["scheme"]) == ((peer, 5), "http")


@given(FORGERIES)
def test_without_trusted_proxies_nobody_is_believed(lines: list[bytes]) -> None:
    assert address_of("127.0.0.1", *lines, proxies=TrustedProxies(())) == "127.0.0.1"


@given(FORGERIES)
def test_a_trusted_proxy_that_appends_nothing_leaves_an_address_that_is_one(lines: list[bytes]) -> None:
    ip_address(address_of(PROXY, *lines))


@pytest.mark.parametrize(
    ("hop", "address"),
    [
        (b"203.0.113.9:4711", CLIENT),
        (b"2001:DB8::1", "2001:db8::1"),
        (b"[2001:db8::1]", "2001:db8::1"),
        (b"[2001:db8::1]:4711", "2001:db8::1"),
        (b"::ffff:203.0.113.9", CLIENT),
        (b"\t203.0.113.9 ", CLIENT),
    ],
)
def test_an_address_is_read_however_proxies_write_it(hop: bytes, address: str) -> None:
    assert address_of("::ffff:10.0.0.1", b"1.2.3.4, " + hop) == address


@pytest.mark.parametrize(
    "garbage", [b"unknown", b"_hidden", b"", b"203.0.113.9:x", b"203.0.113", b"[::1", b"fe80::1%<b>", b"\xff", b"1.2.3.4;"]
)
def test_the_walk_ends_at_the_last_good_hop_before_garbage(garbage: bytes) -> None:
    assert address_of(PROXY, b"1.2.3.4, " + garbage) == PROXY
    assert address_of(PROXY, b"1.2.3.4", garbage, OUTER_PROXY.encode()) == OUTER_PROXY


def test_a_list_of_proxies_alone_ends_at_the_first_and_a_long_one_is_not_read_to_its_end() -> None:
    assert address_of(PROXY, b"10.0.0.3, 10.0.0.2") == "10.0.0.3"
    assert address_of(PROXY, b"1.2.3.4, " + b", ".join([b"10.0.0.2"] * 5000)) == "10.0.0.2"
    assert address_of(PROXY) == PROXY


@pytest.mark.parametrize(
    ("said", "scheme"),
    [(b"https", "https"), (b"HTTPS ", "https"), (b"http, https", "https"), (b"https, http", "http"), (b"", "http")],
)
def test_the_scheme_is_believed_of_the_nearest_proxy_where_one_speaks_tls(said: bytes, scheme: str) -> None:
    tls = TrustedProxies(NETWORKS, is_tls=True)
    assert read(PROXY, CLIENT.encode(), proxies=tls, x_forwarded_proto=said)["scheme"] == scheme
    assert read(PROXY, CLIENT.encode(), proxies=PROXIES, x_forwarded_proto=said)["scheme"] == "http"
    assert read(PROXY, proxies=tls, kind="websocket", x_forwarded_proto=b"https")["scheme"] == "wss"
