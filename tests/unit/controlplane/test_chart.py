"""The chart of requests per minute is geometry that can be checked without a browser."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from controlplane.chart import HEIGHT, WIDTH, draw_minutes, round_up
from gateway.services.traffic import Minute

START = datetime(2026, 11, 21, 8, 0, tzinfo=UTC)


def minutes(*counts: tuple[int, int, int]) -> list[Minute]:
    """Return minutes with so many requests, and of them refused and failed ones."""
    return [Minute(START + timedelta(minutes=step), *count) for step, count in enumerate(counts)]


@pytest.mark.parametrize(("value", "top"), [(0, 5), (5, 5), (7, 8), (9, 10), (11, 20), (21, 30), (51, 60), (1001, 2000)])
def test_the_scale_ends_at_a_round_number(value: int, top: int) -> None:
    assert round_up(value) == top


def test_an_hour_without_requests_has_bars_of_no_height() -> None:
    chart = draw_minutes(minutes((0, 0, 0), (0, 0, 0)))

    assert [bar.good_height + bar.refused_height + bar.fault_height for bar in chart.bars] == [0, 0]


def test_what_failed_stands_on_what_was_refused_and_that_on_what_was_served() -> None:
    bar = draw_minutes(minutes((10, 3, 1))).bars[0]

    assert bar.good_height == pytest.approx(HEIGHT * 0.6)
    assert bar.refused_height == pytest.approx(HEIGHT * 0.3)
    assert bar.fault_height == pytest.approx(HEIGHT * 0.1)
    assert bar.fault_y + bar.fault_height == pytest.approx(bar.refused_y)
    assert bar.refused_y + bar.refused_height == pytest.approx(bar.good_y)
    assert bar.good_y + bar.good_height == pytest.approx(HEIGHT)
    assert bar.label.endswith("10 requests, 3 refused, 1 failed")


def test_bars_fill_the_width_without_overlapping() -> None:
    bars = draw_minutes(minutes(*[(1, 0, 0)] * 60)).bars

    assert all(left.x + left.width <= right.x for left, right in pairwise(bars))
    assert bars[-1].x + bars[-1].width <= WIDTH
