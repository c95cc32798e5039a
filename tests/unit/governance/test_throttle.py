"""Wrong credentials of an address wait; good ones do not, and what they cost is bounded."""

from __future__ import annotations

from core.throttle import AuthThrottle
from wire.credentials import CredentialKind, digest_credential, mint_credential

ADDRESS = "192.0.2.1"


class Clock:
    """Stands still until it is moved."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


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
    clock, rows, good = Clock(), Rows(), make_digest()
    rows.digests.append(good)
    throttle = AuthThrottle(failures=3, block_s=0.25, read_digests=rows.read, clock=clock)
    looks = 0
    for number in range(10_000):  # 250 s of 40 a second
        clock.now += 0.025
        if not throttle.must_wait(ADDRESS, number.to_bytes(32)):
            looks += 1
            throttle.record_failure(ADDRESS)
        assert not throttle.must_wait(ADDRESS, good)
    assert 2000 < looks < 250 / 0.25 * 3
    assert rows.reads <= 251


def test_a_new_credential_is_let_in_within_a_second_whatever_its_address_does() -> None:
    clock, rows, new = Clock(), Rows(), make_digest()
    throttle = AuthThrottle(failures=1, block_s=600.0, read_digests=rows.read, clock=clock)
    throttle.record_failure(ADDRESS)
    assert throttle.must_wait(ADDRESS, new)
    rows.digests.append(new)
    clock.now += 1.0
    assert not throttle.must_wait(ADDRESS, new)
    rows.digests.remove(new)
    clock.now += 1.0
    assert throttle.must_wait(ADDRESS, new), "a revoked one is good no more"


def test_an_address_that_did_nothing_costs_no_look_at_all_credentials() -> None:
    rows = Rows()
    throttle = AuthThrottle(failures=1, read_digests=rows.read)
    throttle.record_failure(ADDRESS)
    assert not throttle.must_wait("192.0.2.2", make_digest())
    assert rows.reads == 0
