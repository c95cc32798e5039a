"""Slopes, shares and what is read of the box's answers."""

from __future__ import annotations

import pytest

from benchmarks.boxcheck.__main__ import choose
from benchmarks.boxcheck.arithmetic import (
    Stay,
    fit_line,
    leave_out_first,
    percentile,
    relative_error,
    shares,
    time_by_tenant,
)
from benchmarks.boxcheck.findings import Section, render_table
from benchmarks.boxcheck.parsing import (
    missing_fields,
    read_comments,
    read_events,
    read_metrics,
    read_url,
    shorten,
    sum_samples,
)
from benchmarks.errors import BenchmarkError

EXPOSITION = """\
# HELP vllm_requests_total Total requests processed
# TYPE vllm_requests_total counter
vllm_requests_total{model="a",status="success",tenant="x"} 3.0
vllm_requests_total{model="a",status="refused",tenant="x"} 2
vllm_requests_total{model="b",status="success",tenant="y"} 5 1745880000
vllm_queue_depth 1
odd{name="a \\"quoted\\", \\\\ word\\n",empty=""} +Inf
"""
STREAM = b"""\
data: {"choices":[{"delta":{"content":"a"}}]}

: x-cache-hit=true; x-gpu-time-ms=12

data: {"broken
data: [1, 2]

event: error
data: {"error":{"code":"engine_failed"}}

data: [DONE]
"""


def test_a_line_through_growing_values_has_their_step_as_its_slope() -> None:
    line = fit_line([10.0, 12.0, 14.0, 16.0])
    assert line.slope == pytest.approx(2.0)
    assert line.standard_error == pytest.approx(0.0)


def test_noise_without_a_trend_has_a_slope_within_its_own_error() -> None:
    line = fit_line([5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0])
    assert abs(line.slope) <= 2 * line.standard_error
    assert line.standard_error > 0


def test_one_value_makes_no_line() -> None:
    with pytest.raises(ValueError, match="two values"):
        fit_line([1.0])


@pytest.mark.parametrize(("count", "left_out"), [(200, 20), (60, 20), (30, 10), (3, 1), (2, 0)])
def test_never_more_than_a_third_is_left_out(count: int, left_out: int) -> None:
    assert leave_out_first(count, wanted=20) == left_out


def test_slot_time_is_cut_at_both_ends_of_the_window() -> None:
    stays = [Stay("a", 0.0, 2.0), Stay("a", 9.5, 12.0), Stay("b", 3.0, 4.0), Stay("c", 11.0, 12.0), Stay("c", 0.0, 1.0)]
    assert time_by_tenant(stays, since=1.0, until=10.0) == {"a": 1.5, "b": 1.0}


def test_shares_add_up_and_nothing_has_no_shares() -> None:
    assert shares({"a": 1.0, "b": 3.0}) == {"a": 0.25, "b": 0.75}
    assert shares({"a": 0.0}) == {"a": 0.0}


def test_an_error_is_relative_to_what_was_wanted() -> None:
    assert relative_error(90.0, 100.0) == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="with 0"):
        relative_error(1.0, 0.0)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 21)]
    assert (percentile(values, 0.5), percentile(values, 0.95), percentile(values, 1.0)) == (10.0, 19.0, 20.0)
    assert percentile([7.0], 0.0) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_metrics_are_read_with_their_labels() -> None:
    samples = read_metrics(EXPOSITION)
    assert sum_samples(samples, "vllm_requests_total") == 10
    assert sum_samples(samples, "vllm_requests_total", tenant="x", status="success") == 3
    assert sum_samples(samples, "vllm_queue_depth") == 1
    assert sum_samples(samples, "vllm_queue") == 0
    assert samples[-1].labels == {"name": 'a "quoted", \\ word\n', "empty": ""}


def test_a_line_that_is_no_metric_is_an_error() -> None:
    with pytest.raises(ValueError, match="no line of Prometheus"):
        read_metrics("<html>")


def test_events_and_comments_of_a_stream_are_told_apart() -> None:
    assert [sorted(event) for event in read_events(STREAM)] == [["choices"], ["error"]]
    assert read_comments(STREAM) == {"x-cache-hit": "true", "x-gpu-time-ms": "12"}


def test_missing_fields_are_named_by_their_path() -> None:
    example = {"models": {"loaded": [{"id": "", "memory": 0}], "available": ["x"]}, "health": ""}
    assert missing_fields(example, {"models": {"loaded": [{"id": "a", "memory": None}], "available": []}, "health": "ok"}) == []
    assert missing_fields(example, {"models": {"loaded": [{"id": "a"}]}}) == [
        "models.loaded[0].memory",
        "models.available",
        "health",
    ]
    assert missing_fields(example, {"models": {"loaded": [], "available": []}, "health": ""}) == ["models.loaded[0]"]
    assert missing_fields(example, {"models": [], "health": ""}) == ["models"]
    assert missing_fields(example, None) == ["(the document)"]


def test_the_address_is_read_of_the_log_once_it_is_there() -> None:
    assert read_url("INFO starting\n") is None
    assert read_url("INFO starting\napi listening url=http://127.0.0.1:4711\nmore") == "http://127.0.0.1:4711"


def test_long_texts_are_shown_in_one_line() -> None:
    assert shorten("a\n  b", 10) == "a b"
    assert shorten("abcdef", 4) == "abc…"


def test_a_check_without_a_demand_or_with_one_that_was_missed_has_not_passed() -> None:
    written: list[str] = []
    section = Section("limits", written.append)
    verdicts = [section.passed]
    for passed in (True, False, True):
        section.judge("it answers", passed=passed, shown=3)
        verdicts.append(section.passed)
    assert verdicts == [False, True, False, False]
    assert written == ["  PASS  it answers: 3", "  FAIL  it answers: 3", "  PASS  it answers: 3"]


def test_a_table_aligns_its_columns() -> None:
    assert render_table([["", "ms"], ["load", 1234.5], ["unload", None]]).splitlines() == [
        "            ms",
        "  ────────────",
        "  load    1234",
        "  unload     –",
    ]


def test_checks_are_made_in_their_own_order_and_unknown_ones_are_refused() -> None:
    assert choose("cycles, limits") == ["limits", "cycles"]
    assert len(choose("")) == 8
    with pytest.raises(BenchmarkError, match="nonsense"):
        choose("limits,nonsense")
