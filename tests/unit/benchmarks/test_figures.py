"""Figures are medians, ratios need clean runs on both sides, and floors judge what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.__main__ import choose, main
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
