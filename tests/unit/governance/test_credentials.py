"""Guessed credentials: which codes of an app are right (RFC 6238), and what wrong ones of an address cost."""

from __future__ import annotations

from datetime import UTC, datetime

import pyotp
import pytest

from core.throttle import AuthThrottle
from governance.services.one_time_password import find_step
from wire.credentials import CredentialKind, digest_credential, mint_credential

SECRET = "JBSWY3DPEHPK3PXPJBSWY3DPEHPK3PXP"
STEP = 50_000_000
NOW = datetime.fromtimestamp(STEP * 30 + 15, UTC)


def code(step: int) -> str:
    """The code of one step of 30 s."""
    return pyotp.TOTP(SECRET).generate_otp(step)


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_code_is_right_in_its_step_and_one_beside_it(off: int) -> None:
    assert find_step(SECRET, code(STEP + off), now=NOW, after=0) == STEP + off


@pytest.mark.parametrize("off", [-2, 2])
def test_a_code_two_steps_away_is_wrong(off: int) -> None:
    assert find_step(SECRET, code(STEP + off), now=NOW, after=0) is None


def test_a_step_that_was_used_and_those_before_it_are_used_up() -> None:
    assert find_step(SECRET, code(STEP), now=NOW, after=STEP) is None
    assert find_step(SECRET, code(STEP - 1), now=NOW, after=STEP) is None
    assert find_step(SECRET, code(STEP + 1), now=NOW, after=STEP) == STEP + 1


@pytest.mark.parametrize("typed", ["", "12345", "1234567", "abcdef", "１２３４５６", "-12345"])
def test_what_is_no_code_is_wrong(typed: str) -> None:
    assert find_step(SECRET, typed, now=NOW, after=0) is None


def test_the_vector_of_the_standard() -> None:
    secret = "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ"
    assert find_step(secret, "287082", now=datetime.fromtimestamp(59, UTC), after=-1) == 1


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
