"""Which URLs of boxes the gateway may call: a table of tricky ones, and a resolver that lies."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

import pytest

from nodes.addresses import parse_direct_url, parse_policy, parse_rule, resolve_direct_target
from nodes.errors import AddressRefused, AddressUnresolvable

EVERYTHING = parse_policy(["0.0.0.0/0", "::/0", ".lan", "box.example"], allow_loopback=False)
"""Lists the whole internet, so that what is refused is refused for its own sake."""
TENS = parse_policy(["10.0.0.0/8", "fd00:1::/32", "gpu1.lan", "gpu2.lan:8000"], allow_loopback=False)
LOOPBACK = parse_policy([], allow_loopback=True)
NOTHING = parse_policy([], allow_loopback=False)

TRICKY = [
    # Other schemes, and what is none.
    "ftp://10.0.0.5/", "file:///etc/passwd", "gopher://10.0.0.5:6379/_INFO", "ws://10.0.0.5/", "javascript:alert(1)",
    "//10.0.0.5/", "10.0.0.5:8000", "http:/10.0.0.5/", "http:10.0.0.5", "http://", "http:///path", "", " http://10.0.0.5/",
    # User names and passwords.
    "http://user@10.0.0.5/", "http://user:pass@10.0.0.5/", "http://@10.0.0.5/", "http://10.0.0.5@169.254.169.254/",
    "http://10.0.0.5:80@169.254.169.254/", "http://10.0.0.5%40169.254.169.254/",
    # What two parsers read in two ways.
    "http://10.0.0.5\\@169.254.169.254/", "http://10.0.0.5#@169.254.169.254/", "http://10.0.0.5?@169.254.169.254/",
    "http://10.0.0.5;169.254.169.254/", "http://10.0.0.5,169.254.169.254/", "http://10.0.0.5 169.254.169.254/",
    "http://10.0.0.5\t/", "http://10.0.0.5\r\nHost: evil/", "http://10.0.0.5\n/", "http://10.0.0.5/\r\nX: y",
    "http://10.0.0.5/\x00", "http://10.0.0.5/a b", "http://10.0.0.5/../admin", "http://10.0.0.5/./v1",
    "http://10.0.0.5/%2e%2e/admin", "http://10.0.0.5/?key=1", "http://10.0.0.5/#part", "http://10.0.0.5:/",
    "http://10.0.0.5:0/", "http://10.0.0.5:65536/", "http://10.0.0.5:999999/", "http://10.0.0.5:80:81/",
    "http://10.0.0.5:-1/", "http://10.0.0.5:8o/",
    # Numbers that are addresses to some.
    "http://2130706433/", "http://2852039166/", "http://0x7f000001/", "http://0x7f.0.0.1/", "http://0x7f.1/",
    "http://0177.0.0.1/", "http://017700000001/", "http://127.1/", "http://127.0.1/", "http://10.0.0.05/",
    "http://10.0.0.256/", "http://1.2.3.4.5/", "http://10.0.0.0x5/", "http://evil.0x/", "http://127.0.0.1./",
    "http://169.254.169.254./",
    # Names that are no names.
    "http://box..lan/", "http://.lan/", "http://-box.lan/", "http://box.lan./", "http://b%6fx.lan/", "http://bøx.lan/",
    "http://①②⑦.⓪.⓪.①/", "http://１２７.0.0.1/", "http://169。254。169。254/", "http://" + "a" * 64 + ".lan/",
    "http://box.lan/" + "a" * 300,
    # Addresses that are never called, also when everything is listed.
    "http://0.0.0.0/", "http://0.1.2.3/", "http://127.0.0.1/", "http://127.9.9.9:8000/",
    "http://169.254.169.254/latest/meta-data/", "http://169.254.0.1/", "http://100.100.100.200/", "http://168.63.129.16/",
    "http://192.0.0.192/", "http://224.0.0.1/", "http://239.255.255.250/", "http://240.0.0.1/", "http://255.255.255.255/",
    "http://[::]/", "http://[::1]/", "http://[::1]:8000/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/",
    "http://[::ffff:169.254.169.254]/", "http://[::ffff:10.0.0.5]/", "http://[0:0:0:0:0:ffff:a00:5]/",
    "http://[::127.0.0.1]/", "http://[::ffff:0:127.0.0.1]/", "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b::169.254.169.254]/", "http://[64:ff9b:1::1]/", "http://[2002:7f00:1::]/", "http://[2002:a9fe:a9fe::1]/",
    "http://[2001:0:4136:e378:8000:63bf:3fff:fdd2]/", "http://[fd00:ec2::254]/", "http://[fd20:ce::254]/",
    "http://[fe80::1]/", "http://[fe80::1%25eth0]/", "http://[fe80::1%eth0]/", "http://[febf::1]/", "http://[fec0::1]/",
    "http://[ff02::1]/", "http://[100::1]/", "http://[]/", "http://[10.0.0.5]/", "http://[fd00::5/", "http://fd00::5/",
    "http://[v1.fe80]/", "http://[::1]evil.lan/",
]  # fmt: skip


def never(host: str, port: int) -> Sequence[str]:
    """A resolver for URLs that must not get as far as a look-up."""
    raise AssertionError(f"looked up {host!r}")


def always(*addresses: str) -> Callable[[str, int], Sequence[str]]:
    """Return a resolver that knows one answer."""
    return lambda host, port: addresses


@pytest.mark.parametrize("url", TRICKY)
def test_a_tricky_url_is_refused_before_any_name_is_looked_up(url: str) -> None:
    with pytest.raises(AddressRefused) as caught:
        resolve_direct_target(url, policy=EVERYTHING, resolver=never)
    assert caught.value.param == "public_base_url"
    assert caught.value.message.startswith("public_base_url")


@pytest.mark.parametrize(
    ("url", "scheme", "host", "port", "path"),
    [
        ("http://10.0.0.5", "http", "10.0.0.5", 80, ""),
        ("HTTPS://GPU1.LAN/", "https", "gpu1.lan", 443, ""),
        ("http://gpu1.lan:8000/v1/", "http", "gpu1.lan", 8000, "/v1"),
        ("http://[FD00:1:0::5]:65535/a/b", "http", "fd00:1::5", 65535, "/a/b"),
        ("http://xn--bx_1-lka.lan", "http", "xn--bx_1-lka.lan", 80, ""),
    ],
)
def test_a_plain_url_is_taken_apart(url: str, scheme: str, host: str, port: int, path: str) -> None:
    parts = parse_direct_url(url)
    assert (parts.scheme, parts.host, parts.port, parts.base_path) == (scheme, host, port, path)


@pytest.mark.parametrize(
    ("url", "answer", "address"),
    [
        ("http://10.1.2.3:8000/", [], "10.1.2.3"),
        ("http://[fd00:1::7]/", [], "fd00:1::7"),
        ("http://gpu1.lan/", ["100.64.0.9", "192.168.1.9"], "100.64.0.9"),
        ("http://gpu2.lan:8000/", ["8.8.8.8"], "8.8.8.8"),
        ("http://other.lan/", ["10.9.9.9"], "10.9.9.9"),
        ("http://11.0.0.1/", [], None),
        ("http://other.lan/", ["192.168.1.9"], None),
        ("http://gpu2.lan:8001/", ["8.8.8.8"], None),
        ("http://gpu1.lan.evil.example/", ["8.8.8.8"], None),
        ("http://evilgpu1.lan/", ["8.8.8.8"], None),
        # A listed name or network does not open what is never called.
        ("http://gpu1.lan/", ["127.0.0.1"], None),
        ("http://gpu1.lan/", ["169.254.169.254"], None),
        ("http://gpu1.lan/", ["::ffff:10.0.0.5"], None),
        ("http://gpu1.lan/", ["fe80::1%eth0"], None),
        # One bad address among good ones: the next connection might take it.
        ("http://gpu1.lan/", ["10.0.0.5", "127.0.0.1"], None),
        ("http://gpu1.lan/", ["10.0.0.5", "10.0.0.6", "169.254.169.254"], None),
        ("http://other.lan/", ["10.0.0.5", "192.168.1.9"], None),
    ],
)
def test_what_is_listed_is_allowed_at_the_address_it_had_and_what_leads_astray_is_refused(
    url: str, answer: list[str], address: str | None
) -> None:
    if address is None:
        with pytest.raises(AddressRefused):
            resolve_direct_target(url, policy=TENS, resolver=always(*answer))
        return
    target = resolve_direct_target(url, policy=TENS, resolver=always(*answer) if answer else never)
    assert (target.address, target.host) == (address, parse_direct_url(url).host)


def test_a_name_server_that_changes_its_mind_moves_nothing() -> None:
    answers = iter([["10.0.0.5"], ["169.254.169.254"]])
    target = resolve_direct_target("http://gpu1.lan/", policy=TENS, resolver=lambda host, port: next(answers))
    assert target.address == "10.0.0.5"
    assert next(answers) == ["169.254.169.254"], "it was asked once"


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/", "http://[::1]:8000/", "http://localhost:8000/"])
def test_loopback_needs_its_own_switch_and_no_list(url: str) -> None:
    both = always("127.0.0.1", "::1")
    assert resolve_direct_target(url, policy=LOOPBACK, resolver=both).port == 8000
    with pytest.raises(AddressRefused, match="MUSTER_DIRECT_ALLOW_LOOPBACK"):
        resolve_direct_target(url, policy=parse_policy(["localhost"], allow_loopback=False), resolver=both)


def test_the_loopback_switch_opens_loopback_and_nothing_else_and_an_empty_list_nothing() -> None:
    for url in ("http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/", "http://10.0.0.5/", "http://0.0.0.0/"):
        with pytest.raises(AddressRefused):
            resolve_direct_target(url, policy=LOOPBACK, resolver=never)
    with pytest.raises(AddressRefused, match="MUSTER_DIRECT_HOSTS"):
        resolve_direct_target("http://10.0.0.5/", policy=NOTHING, resolver=never)


def test_a_name_without_an_address_may_be_tried_again() -> None:
    def unknown(host: str, port: int) -> Sequence[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    for resolver in (unknown, always()):
        with pytest.raises(AddressUnresolvable) as caught:
            resolve_direct_target("http://gpu1.lan/", policy=TENS, resolver=resolver)
        assert caught.value.retryable
    assert resolve_direct_target("http://localhost:9/", policy=LOOPBACK).address in {"127.0.0.1", "::1"}


@pytest.mark.parametrize("entry", ["", "10.0.0.1/8", "a b", "http://gpu1.lan", "gpu1..lan", "gpu1.lan:port", "300.1.1.1", "*"])
def test_an_allow_list_entry_that_means_nothing_is_an_error(entry: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_rule(entry)


@pytest.mark.parametrize(
    ("entry", "url", "answer", "allowed"),
    [
        (".lan", "http://a.b.lan/", "203.0.113.7", True),
        (".lan", "http://lan/", "203.0.113.7", False),
        (".lan", "http://evillan/", "203.0.113.7", False),
        ("10.0.0.5", "http://10.0.0.5:9/", "", True),
        ("10.0.0.5:8000", "http://10.0.0.5:8000/", "", True),
        ("10.0.0.5:8000", "http://10.0.0.5:8001/", "", False),
        ("[fd00:1::5]:8000", "http://[fd00:1::5]:8000/", "", True),
        ("[fd00:1::5]:8000", "http://[fd00:1::5]:80/", "", False),
        ("fd00:1::5", "http://[fd00:1::5]:80/", "", True),
        ("GPU1.lan", "http://gpu1.lan/", "203.0.113.7", True),
        ("private", "http://a.lan/", "10.1.2.3", True),
        ("private", "http://172.31.0.9/", "", True),
        ("private", "http://192.168.7.7/", "", True),
        ("private", "http://a.lan/", "fd12::5", True),
        ("private", "http://8.8.8.8/", "", False),
        ("private", "http://a.lan/", "fd00:ec2::254", False),
    ],
)
def test_an_allow_list_entry_means_what_it_says(entry: str, url: str, answer: str, allowed: bool) -> None:
    policy = parse_policy([entry], allow_loopback=False)
    resolver = always(answer) if answer else never
    if allowed:
        assert resolve_direct_target(url, policy=policy, resolver=resolver).port == parse_direct_url(url).port
        return
    with pytest.raises(AddressRefused):
        resolve_direct_target(url, policy=policy, resolver=resolver)
