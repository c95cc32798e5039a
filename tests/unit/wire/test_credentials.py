"""Credentials, ids and the addresses of clients."""

from __future__ import annotations

import re
import string
import time
import uuid
from datetime import UTC, datetime
from ipaddress import ip_address, ip_network
from typing import Any

import pyotp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.throttle import AuthThrottle
from governance.passwords import find_step
from tests.fakes.clock import install_virtual_clock, virtual_clock
from tests.fakes.examples import examples
from wire import clock
from wire.client_address import TrustedProxies
from wire.credentials import (
    CREDENTIAL_PATTERN,
    CredentialKind,
    derive_credential,
    digest_credential,
    has_good_checksum,
    mint_credential,
    parse_keyid,
    read_keyid,
    stand_in,
    verify_credential,
)
from wire.ids import format_id, new_uuid7, parse_id

KINDS = st.sampled_from(list(CredentialKind))
ALPHABET = string.digits + string.ascii_letters


@examples(25)
@given(KINDS)
def test_a_minted_credential_reads_back_as_its_own_kind_only(kind: CredentialKind) -> None:
    minted = mint_credential(kind)
    assert re.fullmatch(CREDENTIAL_PATTERN, minted.text)
    assert digest_credential(minted.text) == minted.digest
    assert len(minted.digest) == 32
    assert verify_credential(minted.text, minted.digest)
    for other in CredentialKind:
        expected = minted.keyid if other is kind else None
        assert parse_keyid(minted.text, other) == expected
        assert read_keyid(minted.text, other) == expected
    text = minted.text
    for around in (text + "\n", text + "a", " " + text, text[:-1], text * 2):
        assert parse_keyid(around, kind) is read_keyid(around, kind) is None
    assert has_good_checksum(text)
    assert not any(has_good_checksum(f"{other}{text[3:]}") for other in ("msw", "msa", "mst") if other != text[:3])
    assert not has_good_checksum(text[:4] + text[15:3:-1] + text[16:])


@examples(25)
@given(KINDS, st.data())
def test_a_credential_with_one_character_changed_is_never_taken(kind: CredentialKind, data: st.DataObject) -> None:
    minted = mint_credential(kind)
    place = data.draw(st.integers(0, len(minted.text) - 1))
    changed = data.draw(st.sampled_from(ALPHABET + "_- é\n").filter(lambda c: c != minted.text[place]))
    text = minted.text[:place] + changed + minted.text[place + 1 :]
    assert all(parse_keyid(text, other) is None for other in CredentialKind)
    assert not verify_credential(text, minted.digest)


def test_a_secret_of_ones_own_stands_for_one_credential_of_its_kind_under_the_key_of_the_installation() -> None:
    worker = derive_credential(CredentialKind.WORKER, "a secret", secret_key="k")
    assert re.fullmatch(CREDENTIAL_PATTERN, worker.text)
    assert parse_keyid(worker.text, CredentialKind.WORKER) == worker.keyid
    others = [
        derive_credential(CredentialKind.ADMIN, "a secret", secret_key="k"),
        derive_credential(CredentialKind.WORKER, "a secret", secret_key="l"),
        derive_credential(CredentialKind.WORKER, "b secret", secret_key="k"),
    ]
    assert len({worker.keyid, *(other.keyid for other in others)}) == len(others) + 1
    assert stand_in("a secret", "a secret", CredentialKind.WORKER, secret_key="k") == worker.text
    for text, own in (("b secret", "a secret"), ("", ""), ("a secret", ""), (worker.text, worker.text)):
        assert stand_in(text, own, CredentialKind.WORKER, secret_key="k") == text


def test_an_id_carries_version_variant_and_the_time() -> None:
    before = time.time_ns() // 1_000_000
    values = [new_uuid7() for _ in range(2000)]
    after = time.time_ns() // 1_000_000
    assert {value.version for value in values} == {7}
    assert {value.variant for value in values} == {uuid.RFC_4122}
    stamps = [value.int >> 80 for value in values]
    assert before <= stamps[0]
    assert stamps[-1] <= after
    assert stamps == sorted(stamps)
    assert len(set(values)) == len(values)


@examples(25)
@given(st.uuids(), st.text(max_size=40).filter(lambda text: len(text.replace("-", "")) != 32))
def test_a_printed_id_reads_back_and_other_texts_are_none(value: uuid.UUID, text: str) -> None:
    assert parse_id("req", format_id("req", value)) == parse_id("req", str(value)) == value
    assert parse_id("node", text) is parse_id("node", "req_" + text) is None


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
    st.one_of(st.binary(max_size=40), st.lists(st.sampled_from([b"10.0.0.1", b"127.0.0.1", b"::1", b"1.2.3.4", b"unknown", b"",
            b"[", b"a:b", b"fd00::1%x"])).map(b", ".join)), max_size=5,
)  # fmt: skip


@examples(25)
@given(FORGERIES, st.booleans(), st.sampled_from(["203.0.113.9", "10.0.0.9", "127.0.0.1", "2001:db8::1", "testclient"]))
def test_a_client_never_chooses_its_address(lines: list[bytes], is_same_line: bool, peer: str) -> None:
    """The proxy appends to the client's line, or adds a line of its own."""
    wrote = [*lines[:-1], lines[-1] + b", " + CLIENT.encode()] if lines and is_same_line else [*lines, CLIENT.encode()]
    assert address_of(PROXY, *wrote) == CLIENT
    ip_address(address_of(PROXY, *lines))  # where the proxy appends nothing
    tls = TrustedProxies(NETWORKS, is_tls=True)
    scope = read(peer, *lines, proxies=tls, x_real_ip=b"1.2.3.4", forwarded=b"for=1.2.3.4", x_forwarded_proto=b"https")
    assert (scope["client"], scope["scheme"]) == ((peer, 5), "http"), "who is no trusted proxy"
    assert address_of("127.0.0.1", *lines, proxies=TrustedProxies(())) == "127.0.0.1"


@pytest.mark.parametrize(
    ("hop", "address"),
    [(b"203.0.113.9:4711", CLIENT), (b"2001:DB8::1", "2001:db8::1"), (b"[2001:db8::1]", "2001:db8::1"), (b"[2001:db8::1]:4711",
            "2001:db8::1"), (b"::ffff:203.0.113.9", CLIENT), (b"\t203.0.113.9 ", CLIENT)],
)  # fmt: skip
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


SECRET = "JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP"
STEP = 50_000_000
NOW = datetime.fromtimestamp(STEP * 30 + 15, UTC)


def code(step: int) -> str:
    """The code of one step of 30 s."""
    return pyotp.TOTP(SECRET).generate_otp(step)


def test_a_code_is_right_in_its_step_and_one_beside_it_and_once() -> None:
    for off, found in ((-1, None), (0, None), (1, STEP + 1)):
        assert find_step(SECRET, code(STEP + off), now=NOW, after=STEP) == found
    for off, step in ((-2, None), (-1, STEP - 1), (0, STEP), (1, STEP + 1), (2, None)):
        assert find_step(SECRET, code(STEP + off), now=NOW, after=0) == step
    vector = "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ"  # of the standard
    assert find_step(vector, "287082", now=datetime.fromtimestamp(59, UTC), after=-1) == 1
    for typed in ("", "12345", "1234567", "abcdef", "１２３４５６", "-12345"):
        assert find_step(SECRET, typed, now=NOW, after=0) is None


ADDRESS = "192.0.2.1"


class Rows:
    """The digests that are good, and how often they were read."""

    def __init__(self) -> None:
        self.digests: list[bytes] = []
        self.reads = 0

    def read(self) -> list[bytes]:
        self.reads += 1
        return self.digests


def make_digest() -> bytes:
    return digest_credential(mint_credential(CredentialKind.WORKER).text)


def test_ten_thousand_wrong_credentials_cost_few_looks_and_a_good_one_never_waits() -> None:
    clock, rows, good = install_virtual_clock(), Rows(), make_digest()
    rows.digests.append(good)
    throttle = AuthThrottle(failures=3, block_s=0.25, read_digests=rows.read)
    looks = 0
    for number in range(10_000):  # 250 s of 40 a second
        clock.advance(0.025)
        if not throttle.must_wait(ADDRESS, number.to_bytes(32)):
            looks += 1
            throttle.record_failure(ADDRESS)
        assert not throttle.must_wait(ADDRESS, good)
    assert 2000 < looks < 250 / 0.25 * 3
    assert rows.reads <= 251


def test_a_new_credential_is_let_in_within_a_second_whatever_its_address_does() -> None:
    clock, rows, new = install_virtual_clock(), Rows(), make_digest()
    throttle = AuthThrottle(failures=1, block_s=600.0, read_digests=rows.read)
    throttle.record_failure(ADDRESS)
    assert throttle.must_wait(ADDRESS, new)
    rows.digests.append(new)
    clock.advance(1.0)
    assert not throttle.must_wait(ADDRESS, new)
    rows.digests.remove(new)
    clock.advance(1.0)
    assert throttle.must_wait(ADDRESS, new), "a revoked one is good no more"


def test_of_a_pause_two_seconds_count_as_silence_of_others() -> None:
    with virtual_clock() as virtual:
        assert clock.beat() == 0.0
        began = clock.awake()
        virtual.advance(0.5)
        assert clock.beat() == 0.0
        virtual.advance(30.0)
        assert clock.awake() - began == 2.5, "also before anybody noted the pause"
        assert clock.beat() == 28.0
        assert clock.awake() - began == 2.5
        virtual.advance(1.0)
        assert clock.beat() == 0.0
        assert clock.awake() - began == 3.5


@examples(25)
@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=50))
def test_time_awake_never_goes_back_and_never_runs_faster(steps: list[tuple[float, bool]]) -> None:
    with virtual_clock() as virtual:
        awake = clock.awake()
        for seconds, beats in steps:
            virtual.advance(seconds)
            if beats:
                clock.beat()
            assert -1e-6 <= clock.awake() - awake <= seconds + 1e-6
            awake = clock.awake()
        assert awake <= clock.monotonic() + 1e-6
