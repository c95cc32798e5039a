"""Charts as data: what the browser gets, what those are told who do not see it, and when there is nothing to draw."""

from __future__ import annotations

import json

import pytest

from core.charts import Chart, Line, Unit, draw_sparkline, print_value

NOON = 1_764_331_200  # 2025-11-28 12:00:00 UTC


def make_chart(*lines: Line, unit: Unit = "requests") -> Chart:
    return Chart("requests", "Requests", unit, (NOON, NOON + 60), 60, lines)


def test_the_data_of_a_chart_is_json_that_holds_every_value_and_gap() -> None:
    data = json.loads(json.dumps(make_chart(Line("Served", (3.0, None), "good"), Line("p95", (1234.5678, 0), "second")).data))
    assert data["starts"] == [NOON, NOON + 60]
    assert [(line["label"], line["colour"], line["values"]) for line in data["lines"]] == [
        ("Served", "good", [3, None]),
        ("p95", "second", [1234.6, 0]),
    ]


def test_the_summary_says_the_time_the_sum_and_the_most_of_what_is_counted() -> None:
    summary = make_chart(Line("Served", (3, 1_500)), Line("Failed", (None, None))).summary
    assert summary.startswith("Requests, from ")
    assert "12:00" in summary
    assert "12:02" in summary
    assert "Served: 1,503 in all, at most 1,500 in one step." in summary
    assert summary.endswith("Failed: not known.")


def test_the_summary_of_a_measured_value_says_between_what_it_was() -> None:
    assert make_chart(Line("p50", (80, 2_500.0)), unit="ms").summary.endswith("p50: between 80\u00a0ms and 2.50\u00a0s.")


@pytest.mark.parametrize(
    ("unit", "values", "is_empty"),
    [
        ("requests", (0, None), True),
        ("requests", (0, 1), False),
        ("ms", (None, None), True),
        ("%", (0, None), False),
    ],
)
def test_a_chart_is_empty_when_nothing_is_known_or_nothing_was_counted(
    unit: Unit, values: tuple[float | None, ...], *, is_empty: bool
) -> None:
    chart = make_chart(Line("one", values), unit=unit)
    assert chart.is_empty is is_empty
    assert (chart.summary == "Requests: nothing in this time.") is is_empty


@pytest.mark.parametrize(
    ("value", "unit", "printed"),
    [
        (12_345, "requests", "12,345"),
        (0.5, "tokens", "0.50"),
        (999, "ms", "999\u00a0ms"),
        (1_500, "ms", "1.50\u00a0s"),
        (2_048, "MiB", "2\u00a0GiB"),
        (61.25, "%", "61.2\u00a0%"),
        (7, "", "7"),
    ],
)
def test_a_value_is_printed_with_its_unit(value: float, unit: Unit, printed: str) -> None:
    assert print_value(value, unit) == printed


def test_a_sparkline_begins_anew_behind_a_gap_and_stands_on_zero() -> None:
    assert draw_sparkline((0, 10, None, 5), width=90, height=12) == "M0.0 11.0h0L30.0 1.0M90.0 6.0h0"
    assert draw_sparkline((None, 0), width=90, height=12) == "M90.0 11.0h0"
