"""Figures of the measured checks: medians, ratios, slopes, shares, floors, and what is read of a node's answers."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.__main__ import choose
from benchmarks.boxcheck.arithmetic import Stay, fit_line, leave_out_first, percentile, relative_error, shares, time_by_tenant
from benchmarks.figures import Sample, SampleSet, compute_figures, judge_floors
from benchmarks.loadclient import LoadResult, Percentiles
from benchmarks.plan import Measure, System
from benchmarks.report import render_problems, render_verdicts

NONE = Percentiles(count=0, p50=0, p95=0, p99=0, max=0)
NGINX, RELAY, DIRECT = System.NGINX, System.RELAY, System.DIRECT
SPOKEN, TRANSLATED = System.MESSAGES, System.MESSAGES_TRANSLATED


def sample(
    system: System,
    measure: Measure = Measure.CHUNKS,
    *,
    cpu_s: float = 0.02,
    number: int = 1,
    ttfb_us: float = 100.0,
    **load: int,
) -> Sample:
    """Return what one round of a system came to; ``load`` is what its load client saw and is not as it should be."""
    ttfb = Percentiles(count=1000, p50=ttfb_us, p95=ttfb_us, p99=ttfb_us * 10, max=ttfb_us * 20)
    good = LoadResult(
        answered=1000, bad_status=0, last_bad_status=0, errors=0, stuck=0, chunks=1000, reads=1000, connects=1, without_done=0,
        lost=0, duplicated=0, reordered=0, foreign=0, ttfb_us=ttfb, latency_us=NONE, transit_us=NONE, gap_us=NONE,
        elapsed_s=1.0, bad_body="",
    )  # fmt: skip
    return Sample(system, measure, number, cpu_s, 50_000_000, msgspec.structs.replace(good, **load))


def passed(samples: list[Sample], figure: str, system: System) -> bool | None:
    (verdict,) = (
        v for v in judge_floors(compute_figures(SampleSet(samples))) if (v.floor.figure, v.system) == (figure, system)
    )
    return verdict.passed


def test_a_ratio_is_the_quotient_of_the_medians_and_added_time_that_of_the_same_round() -> None:
    samples = [sample(NGINX, Measure.REQUESTS, cpu_s=cpu_s, number=n) for n, cpu_s in enumerate((0.010, 0.020, 0.900))]
    samples += [sample(RELAY, Measure.REQUESTS, cpu_s=cpu_s, number=n) for n, cpu_s in enumerate((0.001, 0.100, 0.200))]
    for n, (base_us, own_us) in enumerate(((100.0, 300.0), (500.0, 710.0))):
        samples.append(sample(System.MOCK, Measure.FIRST_BYTE, number=n, ttfb_us=base_us))
        samples.append(sample(DIRECT, Measure.FIRST_BYTE, number=n, ttfb_us=own_us))
    figures = compute_figures(SampleSet(samples))
    assert figures[RELAY].request_us == pytest.approx(100.0)
    assert figures[RELAY].request_ratio == pytest.approx(5.0)
    assert figures[DIRECT].added_first_byte_us == pytest.approx(205.0)
    assert passed(samples, "request_ratio", RELAY) is True


def test_one_spoilt_round_takes_the_figure_and_its_ratio_away_and_fails_the_floor() -> None:
    samples = [*(sample(system, number=n) for system in (NGINX, RELAY) for n in (1, 2)), sample(RELAY, number=3, lost=1)]
    figures = compute_figures(SampleSet(samples))
    assert (figures[RELAY].chunk_us, figures[RELAY].chunk_ratio) == (None, None)
    assert "round 3: 1 chunks lost" in render_problems(figures)
    assert passed(samples, "chunk_ratio", RELAY) is passed(samples, "misplaced", RELAY) is False
    assert passed([sample(NGINX, lost=1), sample(RELAY)], "chunk_ratio", RELAY) is None, "a spoilt peer leaves no verdict"


def test_floors_that_are_missed_fail_and_what_cannot_be_compared_is_not_judged() -> None:
    missed = [sample(NGINX, cpu_s=0.020), sample(DIRECT, cpu_s=0.045)]
    assert passed(missed, "chunk_ratio", DIRECT) is False
    assert "FAIL" in render_verdicts(judge_floors(compute_figures(SampleSet(missed))))
    for samples, wanted in (
        ([sample(SPOKEN, cpu_s=0.020), sample(TRANSLATED, cpu_s=0.030)], True),
        ([sample(SPOKEN, cpu_s=0.020), sample(TRANSLATED, cpu_s=0.034)], False),
        ([sample(TRANSLATED)], None),
        ([sample(SPOKEN), sample(TRANSLATED, reads=500)], None),
    ):
        assert passed(samples, "chunk_passed_ratio", TRANSLATED) is wanted
    for starts_s, is_quick in (((1.0, 1.5, 9.0), True), ((1.0, 2.5, 2.5), False)):
        (verdict,) = [v for v in judge_floors(compute_figures(SampleSet([]), starts_s)) if v.floor.figure == "start_s"]
        assert (verdict.system, verdict.passed) == (DIRECT, is_quick)


@pytest.mark.parametrize(("cpu_s", "told"), [(0.028, "met"), (0.033, "1.10 × goal"), (0.040, "1.33 × goal")])
def test_a_missed_goal_is_told_as_a_distance_and_passes(cpu_s: float, told: str) -> None:
    verdicts = judge_floors(compute_figures(SampleSet([sample(NGINX, cpu_s=0.020), sample(DIRECT, cpu_s=cpu_s)])))
    chunk, request = (next(v for v in verdicts if v.floor.figure == figure) for figure in ("chunk_ratio", "request_ratio"))
    assert chunk.goal_ratio == pytest.approx(cpu_s / 0.030)
    assert chunk.passed is (cpu_s <= 0.036)
    assert (request.goal_ratio, request.passed) == (None, None)
    (line,) = (line for line in render_verdicts(verdicts).splitlines() if "CPU per chunk" in line)
    assert line.split()[:4] == ["PASS" if chunk.passed else "FAIL", f"{cpu_s / 0.020:.2f}", "1.8", "1.5"]
    assert told in line


def test_the_first_byte_behind_a_slow_engine_is_added_to_the_engines_own_time() -> None:
    for own_us, is_met in ((5_310.0, True), (5_490.0, False)):
        pair = [sample(System.MOCK, Measure.ENGINE, ttfb_us=5_060.0), sample(DIRECT, Measure.ENGINE, ttfb_us=own_us)]
        assert compute_figures(SampleSet(pair))[DIRECT].engine_added_ms == pytest.approx((own_us - 5_060.0) / 1e3)
        assert passed(pair, "engine_added_ms", DIRECT) is is_met


def test_streams_opened_at_once_have_three_percentiles_beyond_the_mocks_own() -> None:
    pair = [sample(System.MOCK, Measure.OPENED, ttfb_us=2_000.0), sample(DIRECT, Measure.OPENED, ttfb_us=9_000.0)]
    own = compute_figures(SampleSet(pair))[DIRECT]
    assert (own.opened_p50_ms, own.opened_p95_ms, own.opened_p99_ms) == pytest.approx((7.0, 7.0, 70.0))


def test_vllm_router_is_measured_when_asked_for_and_compared_with_in_the_same_run() -> None:
    assert System.VLLM_ROUTER not in choose("", profile=False)[0]
    assert choose("relay", profile=False, peers=True)[0] == [System.MOCK, System.VLLM_ROUTER, RELAY]
    assert choose("vllm-router", profile=False)[0] == [System.MOCK, System.VLLM_ROUTER]
    peer, own = (
        sample(system, Measure.REQUESTS, cpu_s=cpu_s) for system, cpu_s in ((System.VLLM_ROUTER, 0.07), (DIRECT, 0.063))
    )
    assert compute_figures(SampleSet([peer, own]))[DIRECT].request_peer_ratio == pytest.approx(0.9)
    times_us = ((System.MOCK, 100.0), (System.VLLM_ROUTER, 300.0), (DIRECT, 350.0), (RELAY, 250.0))
    opened = [sample(system, Measure.OPENED, ttfb_us=ttfb_us) for system, ttfb_us in times_us]
    assert [passed(opened, "opened_peer_ratio", system) for system in (DIRECT, RELAY)] == [False, True]
    assert [passed(opened[:1] + opened[2:], "opened_peer_ratio", system) for system in (DIRECT, RELAY)] == [None, None]


def test_slopes_shares_errors_and_percentiles() -> None:
    growing, noise = fit_line([10.0, 12.0, 14.0, 16.0]), fit_line([5.0, 6.0, 5.0, 6.0, 5.0, 6.0, 5.0])
    assert growing.slope == pytest.approx(2.0)
    assert growing.standard_error == pytest.approx(0.0)
    assert abs(noise.slope) <= 2 * noise.standard_error > 0
    assert [leave_out_first(count, wanted=20) for count in (200, 60, 30, 3, 2)] == [20, 20, 10, 1, 0]
    stays = [Stay("a", 0.0, 2.0), Stay("a", 9.5, 12.0), Stay("b", 3.0, 4.0), Stay("c", 11.0, 12.0), Stay("c", 0.0, 1.0)]
    assert time_by_tenant(stays, since=1.0, until=10.0) == {"a": 1.5, "b": 1.0}
    assert (shares({"a": 1.0, "b": 3.0}), shares({"a": 0.0})) == ({"a": 0.25, "b": 0.75}, {"a": 0.0})
    assert relative_error(90.0, 100.0) == pytest.approx(-0.1)
    values = [float(value) for value in range(1, 21)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.95, 1.0)] == [1.0, 10.0, 19.0, 20.0]
    for unknown in (lambda: fit_line([1.0]), lambda: relative_error(1.0, 0.0), lambda: percentile([], 0.5)):
        with pytest.raises(ValueError, match=r"two values|with 0|no values"):
            unknown()
