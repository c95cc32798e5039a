"""Codes of an authenticator app (RFC 6238): which ones are right at which time."""

from __future__ import annotations

from datetime import UTC, datetime

import pyotp
import pytest

from governance.services.one_time_password import find_step

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


def test_codes_are_read_as_people_type_them() -> None:
    typed = code(STEP)
    assert find_step(SECRET, f" {typed[:3]} {typed[3:]} ", now=NOW, after=0) == STEP


@pytest.mark.parametrize("typed", ["", "12345", "1234567", "abcdef", "１２３４５６", "-12345"])
def test_what_is_no_code_is_wrong(typed: str) -> None:
    assert find_step(SECRET, typed, now=NOW, after=0) is None


def test_the_vector_of_the_standard() -> None:
    secret = "GEZDGNBVGY3TQOJQGEZDGNBVGY3TQOJQ"
    assert find_step(secret, "287082", now=datetime.fromtimestamp(59, UTC), after=-1) == 1
