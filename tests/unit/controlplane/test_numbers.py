"""How the operators' pages print numbers."""

from __future__ import annotations

import re

import pytest

from controlplane.templatetags.muster import age, beside, compact, seconds
from gateway.admin.requests import print_ms


@pytest.mark.parametrize(
    ("value", "text"), [(None, "never"), (3.2, "3 s ago"), (119, "119 s ago"), (180, "3 min ago"), (10_800, "3 h ago")]
)
def test_an_age_is_printed_in_its_largest_fitting_unit(value: float | None, text: str) -> None:
    assert age(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (950, "950"), (1234, "1.23k"), (2_751_801, "2.75M")])
def test_a_large_count_keeps_three_digits(value: int, text: str) -> None:
    assert compact(value) == text


@pytest.mark.parametrize(("value", "text"), [(7, "0.007"), (1623, "1.62"), (345_600, "346")])
def test_milliseconds_become_seconds(value: int, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(None, "–"), (12, "12\u00a0ms"), (12_345, "12.3\u00a0s")])
def test_a_latency_is_printed_with_a_unit_that_stays_beside_it(value: int | None, text: str) -> None:
    assert print_ms(value) == text


@pytest.mark.parametrize(
    ("value", "other", "text"),
    [(36, 201, "36 · 201 ms"), (900, 1234, "900 ms · 1.23 s"), (1500, 120_000, "1.5 · 120 s")],
)
def test_two_latencies_share_a_unit_where_they_can(value: int, other: int, text: str) -> None:
    assert re.sub("<[^>]*>", "", beside(value, other)).replace("\u00a0", " ") == text
