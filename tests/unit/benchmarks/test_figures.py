"""Figures of the measured checks: medians, ratios, slopes, shares, floors, and what is read of a node's answers."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.__main__ import choose
from benchmarks.boxcheck.arithmetic import Stay, fit_line, leave_out_first, percentile, relative_error, shares, time_by_tenant
from benchmarks.figures import Figures, Reading, Sample, SampleSet, Verdict, compute_figures, judge_floors
from benchmarks.loadclient import LoadResult, Percentiles
from benchmarks.plan import Measure, System, is_measured, plan_work
from benchmarks.report import render_completeness, render_problems, render_table, render_verdicts

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


def find_verdict(figures: dict[System, Figures], figure: str, system: System) -> Verdict:
    (verdict,) = (v for v in judge_floors(figures) if (v.floor.figure, v.system) == (figure, system))
    return verdict


def passed(samples: list[Sample], figure: str, system: System) -> bool | None:
    return find_verdict(compute_figures(SampleSet(samples)), figure, system).passed


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
    assert "\nMISSED" in render_verdicts(judge_floors(compute_figures(SampleSet(missed))))
    for samples, wanted in (
        ([sample(SPOKEN, cpu_s=0.020), sample(TRANSLATED, cpu_s=0.030)], True),
        ([sample(SPOKEN, cpu_s=0.020), sample(TRANSLATED, cpu_s=0.034)], False),
        ([sample(TRANSLATED)], None),
        ([sample(SPOKEN), sample(TRANSLATED, reads=500)], None),
    ):
        assert passed(samples, "chunk_passed_ratio", TRANSLATED) is wanted
    for start_s, is_quick in ((1.5, True), (2.5, False)):
        figures = compute_figures(SampleSet([]), [Reading(DIRECT, Measure.START, {"start_s": start_s})])
        assert find_verdict(figures, "start_s", DIRECT).passed is is_quick


@pytest.mark.parametrize(("cpu_s", "told"), [(0.028, "goal met  "), (0.033, "met  "), (0.040, "MISSED  ")])
def test_a_missed_goal_is_told_as_a_distance_and_passes(cpu_s: float, told: str) -> None:
    verdicts = judge_floors(compute_figures(SampleSet([sample(NGINX, cpu_s=0.020), sample(DIRECT, cpu_s=cpu_s)])))
    chunk, request = (next(v for v in verdicts if v.floor.figure == figure) for figure in ("chunk_ratio", "request_ratio"))
    assert chunk.goal_ratio == pytest.approx(cpu_s / 0.030)
    assert chunk.passed is (cpu_s <= 0.036)
    assert (request.goal_ratio, request.passed) == (None, None)
    text = render_verdicts(verdicts)
    (line,) = (line for line in text.splitlines() if line.endswith("CPU per chunk, × nginx: direct"))
    distance = f"{cpu_s / 0.030:.2f} × goal"
    assert f" {cpu_s / 0.020:.2f}  ≤ 1.8  ≤ 1.5 " in line
    assert (line.startswith(told), distance in line) == (True, cpu_s > 0.030)
    missed, near, left = cpu_s > 0.036, cpu_s < 0.030, sum(v.passed is None and v.floor.is_binding for v in verdicts)
    furthest = "" if near else f", the furthest figure is {distance}"
    assert text.startswith(
        f"Floors: {missed:d} missed, {2 - missed} met, {left} not judged. Goals: {near:d} of 1 met{furthest}.\n"
    )


def test_the_first_byte_behind_a_slow_engine_is_added_to_the_engines_own_time() -> None:
    for own_us, is_met in ((5_310.0, True), (5_490.0, False)):
        pair = [sample(System.MOCK, Measure.ENGINE, ttfb_us=5_060.0), sample(DIRECT, Measure.ENGINE, ttfb_us=own_us)]
        assert compute_figures(SampleSet(pair))[DIRECT].engine_added_ms == pytest.approx((own_us - 5_060.0) / 1e3)
        assert passed(pair, "engine_added_ms", DIRECT) is is_met


def test_streams_opened_at_once_have_three_percentiles_beyond_the_mocks_own() -> None:
    pair = [sample(System.MOCK, Measure.OPENED, ttfb_us=2_000.0), sample(DIRECT, Measure.OPENED, ttfb_us=9_000.0)]
    own = compute_figures(SampleSet(pair))[DIRECT]
    assert (own.opened_p50_ms, own.opened_p95_ms, own.opened_p99_ms) == pytest.approx((7.0, 7.0, 70.0))


def test_floors_in_time_are_as_wide_as_nginx_is_slow_in_the_same_run() -> None:
    samples = [sample(System.MOCK, Measure.ENGINE, ttfb_us=5000.0), sample(DIRECT, Measure.ENGINE, ttfb_us=5700.0)]
    assert passed(samples, "engine_added_ms", DIRECT) is False
    samples.append(sample(NGINX, Measure.REQUESTS, cpu_s=0.0248))  # twice what the floors' machine takes
    readings = [Reading(System.NODES_1000, Measure.REGISTRATIONS, {"registrations_per_s": 101.0})]
    figures = compute_figures(SampleSet(samples), readings)
    assert find_verdict(figures, "engine_added_ms", DIRECT).passed is True
    assert find_verdict(figures, "registrations_per_s", System.NODES_1000).passed is True
    assert "added TTFB p50, engine needs 5 ms, ms: direct (floor and goal × 2.00)" in render_verdicts(judge_floors(figures))


def test_time_added_below_that_of_the_mock_meets_no_floor() -> None:
    pair = [sample(System.MOCK, Measure.ENGINE, ttfb_us=5_300.0), sample(DIRECT, Measure.ENGINE, ttfb_us=5_100.0)]
    verdict = find_verdict(compute_figures(SampleSet(pair)), "engine_added_ms", DIRECT)
    assert verdict.value == pytest.approx(-0.2)
    assert (verdict.passed, verdict.goal_ratio) == (None, None)
    assert "noise" in verdict.reason
    times_us = ((System.MOCK, 400.0), (System.VLLM_ROUTER, 500.0), (DIRECT, 300.0))
    opened = [sample(system, Measure.OPENED, ttfb_us=ttfb_us) for system, ttfb_us in times_us]
    assert passed(opened, "opened_peer_ratio", DIRECT) is None


def test_errors_fail_the_floors_of_their_measure_and_elsewhere_only_the_run_is_not_complete() -> None:
    samples = [sample(NGINX), sample(NGINX, Measure.REQUESTS), sample(DIRECT, errors=2), sample(DIRECT, Measure.REQUESTS)]
    figures = compute_figures(SampleSet(samples))
    wanted = {
        "chunk_ratio": "errors",
        "request_ratio": "",
        "misplaced": "not known where runs had errors",
        "start_s": "not measured",
    }
    verdicts = {figure: find_verdict(figures, figure, DIRECT) for figure in wanted}
    assert {figure: verdict.reason for figure, verdict in verdicts.items()} == wanted
    assert [verdict.passed for verdict in verdicts.values()] == [False, True, None, None]
    told = render_verdicts(judge_floors(figures))
    assert "errors  ≤ 1.8  ≤ 1.5" in told
    assert "\nNot measured: " in told
    assert "\nNot judged, not known where runs had errors: chunks lost" in told
    assert "direct (chunks)" in render_completeness(figures, {})
    assert render_completeness(compute_figures(SampleSet(samples[:2])), {}) == ""
    assert render_completeness({}, {System.LITELLM: "no wheel"}) == "LiteLLM is not in this run: no wheel"


def test_what_is_measured_once_has_floors_of_its_own_and_tells_why_it_went_wrong() -> None:
    idle = {"idle_ms_per_s": 4.0, "idle_all_ms_per_s": 16.0, "pss_mb": 60.0}
    figures = compute_figures(SampleSet([]), [Reading(System.UP, Measure.IDLE, idle)])
    verdicts = {figure: find_verdict(figures, figure, System.UP) for figure in (*idle, "pss_all_mb")}
    assert [verdict.passed for verdict in verdicts.values()] == [True, False, True, None]
    failed = compute_figures(SampleSet([]), [Reading(System.UP, Measure.IDLE, problem="it did not come up")])
    assert find_verdict(failed, "pss_mb", System.UP).passed is False
    assert "it did not come up" in render_problems(failed)
    for per_s, is_met, off in ((100.0, False, 5.0), (250.0, True, 2.0), (600.0, True, 500 / 600)):
        reading = Reading(System.NODES_1000, Measure.REGISTRATIONS, {"registrations_per_s": per_s})
        verdict = find_verdict(compute_figures(SampleSet([]), [reading]), "registrations_per_s", System.NODES_1000)
        assert verdict.passed is is_met, "at least so many"
        assert verdict.goal_ratio == pytest.approx(off)


def test_many_nodes_and_many_keys_are_compared_with_few_and_measured_when_asked_for() -> None:
    few, nodes, keys = System.FEW, System.NODES_1000, System.KEYS_10000
    assert not {few, nodes, keys} & set(choose("", profile=False)[0])
    assert choose("relay", profile=False, scale=True)[0] == [System.MOCK, RELAY, few, nodes, keys]
    assert choose("keys-10000", profile=False)[0] == [few, keys]
    samples = [sample(system, Measure.REQUESTS, cpu_s=s) for system, s in ((few, 0.1), (nodes, 0.2), (keys, 0.12))]
    assert [passed(samples, "request_grown_ratio", system) for system in (nodes, keys)] == [False, True]
    assert [measure for measure in Measure if is_measured(nodes, measure)] == [
        Measure.REQUESTS, Measure.IDLE, Measure.REGISTRATIONS,
    ]  # fmt: skip
    assert choose("idle", profile=False) == ([System.UP], [Measure.IDLE])


def test_litellm_is_to_be_so_many_times_dearer_and_has_few_streams() -> None:
    samples = [sample(System.LITELLM, Measure.REQUESTS, cpu_s=9.0), sample(DIRECT, Measure.REQUESTS, cpu_s=0.05)]
    assert compute_figures(SampleSet(samples))[DIRECT].request_litellm_ratio == pytest.approx(180)
    assert passed(samples, "request_litellm_ratio", DIRECT) is True
    streams = [plan_work(Measure.CHUNKS, quick=False, system=system).spec.connections for system in (DIRECT, System.LITELLM)]
    assert streams[1] < streams[0]


def test_the_table_has_a_column_for_each_system_and_no_empty_rows() -> None:
    table = render_table(compute_figures(SampleSet([sample(SPOKEN, cpu_s=0.02), sample(TRANSLATED, cpu_s=0.03)])))
    heads, rest, _line, *rows = table.splitlines()
    assert (heads.split(), rest.split()) == (["messages", "messages"], ["translated"])
    assert "─" in render_table(compute_figures(SampleSet([sample(NGINX)]))).splitlines()[1], "no second line of names"
    assert [row.split()[-2:] for row in rows if row.startswith("CPU per chunk, × passed")] == [["–", "1.50"]]
    assert not [row for row in rows if "nginx" in row]


def test_peers_are_measured_when_asked_for_and_compared_with_in_the_same_run() -> None:
    assert System.VLLM_ROUTER not in choose("", profile=False)[0]
    assert choose("relay", profile=False, peers=True)[0] == [System.MOCK, System.VLLM_ROUTER, System.LITELLM, RELAY]
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
