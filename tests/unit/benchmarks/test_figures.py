"""Figures of the measured checks: medians, ratios, slopes, shares, floors, and what is read of a node's answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.__main__ import choose, main
from benchmarks.boxcheck import findings
from benchmarks.boxcheck.__main__ import choose as choose_checks
from benchmarks.boxcheck.arithmetic import (
    Stay,
    fit_line,
    leave_out_first,
    percentile,
    relative_error,
    shares,
    time_by_tenant,
)
from benchmarks.boxcheck.findings import Section
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
from benchmarks.figures import Sample, SampleSet, Verdict, compute_figures, judge_floors
from benchmarks.loadclient import LoadResult, Percentiles
from benchmarks.plan import MUSTER_SYSTEMS, Measure, System, is_measured
from benchmarks.processes import CorePlan
from benchmarks.report import render_problems, render_table, render_verdicts, write_json

NONE = Percentiles(count=0, p50=0, p95=0, p99=0, max=0)


def make_load(*, answered: int = 1000, chunks: int = 1000, lost: int = 0, ttfb_us: float = 100.0) -> LoadResult:
    ttfb = Percentiles(count=answered, p50=ttfb_us, p95=ttfb_us, p99=ttfb_us * 10, max=ttfb_us * 20)
    return LoadResult(
        answered=answered,
        bad_status=0,
        last_bad_status=0,
        errors=0,
        stuck=0,
        chunks=chunks,
        reads=chunks,
        connects=1,
        without_done=0,
        lost=lost,
        duplicated=0,
        reordered=0,
        foreign=0,
        ttfb_us=ttfb,
        latency_us=NONE,
        transit_us=NONE,
        gap_us=NONE,
        elapsed_s=1.0,
        bad_body="",
    )


def make_sample(
    system: System, measure: Measure, *, cpu_s: float = 0.02, round_number: int = 1, load: LoadResult | None = None
) -> Sample:
    return Sample(system, measure, round_number, cpu_s, 50_000_000, load or make_load())


def judge(samples: list[Sample]) -> dict[tuple[str, System], Verdict]:
    return {(v.floor.figure, v.system): v for v in judge_floors(compute_figures(SampleSet(samples)))}


def test_a_ratio_is_the_quotient_of_the_medians() -> None:
    samples = [
        make_sample(System.NGINX, Measure.REQUESTS, cpu_s=cpu_s, round_number=n)
        for n, cpu_s in enumerate((0.010, 0.020, 0.900), start=1)
    ]
    samples += [
        make_sample(System.RELAY, Measure.REQUESTS, cpu_s=cpu_s, round_number=n)
        for n, cpu_s in enumerate((0.001, 0.100, 0.200), start=1)
    ]
    own = compute_figures(SampleSet(samples))[System.RELAY]
    assert own.request_us == pytest.approx(100.0)
    assert own.request_ratio == pytest.approx(5.0)
    assert judge(samples)["request_ratio", System.RELAY].passed is True


def test_one_spoilt_round_takes_the_figure_and_its_ratio_away_and_fails_the_floor() -> None:
    samples = [make_sample(s, Measure.CHUNKS, round_number=n) for s in (System.NGINX, System.RELAY) for n in (1, 2)]
    samples.append(make_sample(System.RELAY, Measure.CHUNKS, round_number=3, load=make_load(lost=1)))
    figures = compute_figures(SampleSet(samples))
    assert figures[System.RELAY].chunk_us is None
    assert figures[System.RELAY].chunk_ratio is None
    assert "round 3: 1 chunks lost" in render_problems(figures)
    verdicts = judge(samples)
    assert verdicts["chunk_ratio", System.RELAY].passed is False
    assert verdicts["misplaced", System.RELAY].passed is False


def test_a_spoilt_peer_leaves_no_ratio_and_no_verdict() -> None:
    samples = [
        make_sample(System.NGINX, Measure.CHUNKS, load=make_load(lost=1)),
        make_sample(System.RELAY, Measure.CHUNKS),
    ]
    assert compute_figures(SampleSet(samples))[System.RELAY].chunk_ratio is None
    assert judge(samples)["chunk_ratio", System.RELAY].passed is None


def test_added_time_is_taken_against_the_baseline_of_the_same_round() -> None:
    samples = []
    for number, (base_us, own_us) in enumerate(((100.0, 300.0), (500.0, 710.0)), start=1):
        for system, value in ((System.MOCK, base_us), (System.DIRECT, own_us)):
            sample = make_sample(system, Measure.FIRST_BYTE, round_number=number, load=make_load(ttfb_us=value))
            samples.append(sample)
    assert compute_figures(SampleSet(samples))[System.DIRECT].added_first_byte_us == pytest.approx(205.0)


def test_a_floor_that_is_missed_fails() -> None:
    samples = [
        make_sample(System.NGINX, Measure.CHUNKS, cpu_s=0.020),
        make_sample(System.DIRECT, Measure.CHUNKS, cpu_s=0.045),
    ]
    verdict = judge(samples)["chunk_ratio", System.DIRECT]
    assert verdict.value == pytest.approx(2.25)
    assert verdict.passed is False
    assert "FAIL" in render_verdicts([verdict])


def test_table_and_json_hold_every_system(tmp_path: Path) -> None:
    samples = [make_sample(s, m) for s in System for m in Measure]
    figures = compute_figures(SampleSet(samples))
    table = render_table(figures)
    assert len(table.splitlines()) == 3 + len(System)
    path = tmp_path / "deep" / "bench.json"
    write_json(
        path,
        figures=figures,
        verdicts=judge_floors(figures),
        samples=samples,
        cores=CorePlan(system=(0,), around=(1,)),
        arguments={"quick": False},
    )
    document = msgspec.json.decode(path.read_bytes())
    assert set(document["figures"]) == set(System)
    assert len(document["samples"]) == len(samples)
    assert document["pinned"] == {"system": [0], "around": [1]}


def test_only_picks_systems_and_measures_and_keeps_the_baseline() -> None:
    assert choose("relay,chunks", profile=False) == ([System.MOCK, System.RELAY], [Measure.CHUNKS])
    assert choose("", profile=True)[0] == list(MUSTER_SYSTEMS)
    with pytest.raises(BenchmarkError, match="does not know nonsense"):
        choose("relay,nonsense", profile=False)


def test_a_translated_system_brings_along_what_it_is_compared_with_and_a_profile_does_not() -> None:
    systems, _measures = choose("responses-translated,chunks", profile=False)
    assert systems == [System.MOCK, System.RESPONSES, System.RESPONSES_TRANSLATED]
    assert choose("responses-translated,chunks", profile=True)[0] == [System.RESPONSES_TRANSLATED]


def test_surfaces_are_measured_by_requests_and_chunks_and_chat_by_everything() -> None:
    assert [m for m in Measure if is_measured(System.MESSAGES_TRANSLATED, m)] == [Measure.REQUESTS, Measure.CHUNKS]
    assert all(is_measured(System.DIRECT, measure) for measure in Measure)


@pytest.mark.parametrize(("cpu_s", "passed"), [(0.038, True), (0.042, False)])
def test_a_translated_chunk_may_cost_twice_what_passing_it_through_does(cpu_s: float, passed: bool) -> None:
    samples = [
        make_sample(System.MESSAGES, Measure.CHUNKS, cpu_s=0.020),
        make_sample(System.MESSAGES_TRANSLATED, Measure.CHUNKS, cpu_s=cpu_s),
        make_sample(System.RESPONSES, Measure.CHUNKS, cpu_s=0.100),
    ]
    verdict = judge(samples)["chunk_passed_ratio", System.MESSAGES_TRANSLATED]
    assert verdict.value == pytest.approx(cpu_s / 0.020)
    assert verdict.passed is passed


def test_translation_is_not_judged_without_its_counterpart_or_when_chunks_came_together() -> None:
    alone = [make_sample(System.MESSAGES_TRANSLATED, Measure.CHUNKS)]
    assert judge(alone)["chunk_passed_ratio", System.MESSAGES_TRANSLATED].passed is None
    merged = msgspec.structs.replace(make_load(), reads=500)
    both = [
        make_sample(System.MESSAGES, Measure.CHUNKS),
        make_sample(System.MESSAGES_TRANSLATED, Measure.CHUNKS, load=merged),
    ]
    assert judge(both)["chunk_passed_ratio", System.MESSAGES_TRANSLATED].passed is None


def test_a_run_that_cannot_start_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "nonsense"]) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("muster bench: --only does not know")


@pytest.mark.parametrize(("starts_s", "passed"), [((1.0, 1.5, 9.0), True), ((1.0, 2.5, 2.5), False)])
def test_a_gateway_that_was_killed_serves_again_in_two_seconds_more_often_than_not(
    starts_s: tuple[float, ...], *, passed: bool
) -> None:
    (verdict,) = [v for v in judge_floors(compute_figures(SampleSet([]), starts_s)) if v.floor.figure == "start_s"]
    assert (verdict.system, verdict.passed) == (System.DIRECT, passed)


def test_the_start_alone_needs_no_other_system_and_is_no_load_to_profile() -> None:
    assert choose("start", profile=False) == ([System.DIRECT], [Measure.START])
    assert choose("start", profile=True)[1] == [Measure.REQUESTS, Measure.CHUNKS]


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
    assert findings.render_table([["", "ms"], ["load", 1234.5], ["unload", None]]).splitlines() == [
        "            ms",
        "  ────────────",
        "  load    1234",
        "  unload     –",
    ]


def test_checks_are_made_in_their_own_order_and_unknown_ones_are_refused() -> None:
    assert choose_checks("cycles, limits") == ["limits", "cycles"]
    assert len(choose_checks("")) == 8
    with pytest.raises(BenchmarkError, match="nonsense"):
        choose_checks("limits,nonsense")
