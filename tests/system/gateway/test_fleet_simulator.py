"""Fleets under faults, each from one seed: what production promises of requests and slots holds whatever goes wrong."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from gateway.values import Priority
from tests.fakes.contest import CONTESTS, Policy, Tally
from tests.fakes.simulator import Scale, simulate

SEEDS = [int(seed) for seed in os.environ.get("MUSTER_TEST_SEEDS", "1,2,3").split(",")]
FEW_SEEDS = SEEDS if "MUSTER_TEST_SEEDS" in os.environ else SEEDS[:1]
"""For what takes seconds of CPU each."""
SCALE = Scale(**{
    name: type(value)(os.environ[f"MUSTER_TEST_{name.upper()}"])
    for name, value in vars(Scale()).items()
    if f"MUSTER_TEST_{name.upper()}" in os.environ
})  # fmt: skip
"""``MUSTER_TEST_NODES=1000 MUSTER_TEST_SECONDS=3600 MUSTER_TEST_TENANTS=100`` plays a large one."""

OVERLOADED = replace(SCALE, nodes=5, seconds=min(SCALE.seconds, 240.0), requests_per_s=15.0)
"""Fewer slots than are asked for."""


BACKLOGGED = Scale(
    nodes=6, tenants=6, models=1, seconds=300.0, requests_per_s=20.0, faults_per_min=4.0, has_budgets=False, weights=(1, 2, 3)
)  # fmt: skip
"""Every tenant asks for more than its share."""
TIERED = replace(BACKLOGGED, faults_per_min=0.0, priorities=(Priority.HIGH, Priority.LOW))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", [SCALE, OVERLOADED], ids=["usual", "overloaded"])
def test_every_request_has_one_end_and_every_slot_one_holder_whatever_goes_wrong(seed: int, scale: Scale) -> None:
    report = simulate(seed, scale)
    print(report)
    assert not report.broken, str(report)
    assert report.states["completed"] > 100, "a fleet that serves nobody proves nothing"
    assert bool(report.states["failed"]) == (scale is OVERLOADED), "and one where nobody waits too long nothing of queues"


def play(name: str, *, requests: int) -> dict[Policy, Tally]:
    tallies = {policy: CONTESTS[name](policy, requests) for policy in Policy}
    for policy, tally in tallies.items():
        print(f"{policy}: {tally}")
        assert set(tally.statuses) == {200}, "no client hears of a node that is slow or fails"
    return tallies


def test_a_node_four_times_slower_gets_less_and_callers_wait_less_than_by_load_or_in_turn() -> None:
    found = play("slow node", requests=600)
    by_score, by_load, in_turn = found[Policy.SCORE], found[Policy.LEAST_LOAD], found[Policy.ROUND_ROBIN]
    assert by_score.share_of("slow") < by_load.share_of("slow") < in_turn.share_of("slow")
    assert by_score.percentile(by_score.whole_ms, 95) < by_load.percentile(by_load.whole_ms, 95)
    assert by_score.percentile(by_score.whole_ms, 95) < in_turn.percentile(in_turn.whole_ms, 95)


def test_a_slow_node_that_begins_to_fail_is_left_alone_and_nobody_is_told() -> None:
    found = play("failing node", requests=400)[Policy.SCORE]
    assert found.ejected > 0
    assert found.share_of("slow") < 0.1, "which is half of what it gets while it is slow and nothing else"


def test_a_prompt_that_everybody_begins_with_does_not_pile_onto_one_node() -> None:
    found = play("hot prefix", requests=300)
    by_score, in_turn = found[Policy.SCORE], found[Policy.ROUND_ROBIN]
    assert max(by_score.share_of(name) for name in by_score.nodes) < 1.2 / len(by_score.nodes)
    assert by_score.percentile(by_score.whole_ms, 95) < 1.1 * in_turn.percentile(in_turn.whole_ms, 95)


def test_a_client_alone_with_many_requests_is_served_as_well_as_by_load() -> None:
    found = play("lone client", requests=400)
    by_score, by_load = found[Policy.SCORE], found[Policy.LEAST_LOAD]
    assert by_score.percentile(by_score.whole_ms, 95) < 1.05 * by_load.percentile(by_load.whole_ms, 95)
    assert by_score.percentile(by_score.first_ms, 95) < 1.05 * by_load.percentile(by_load.first_ms, 95)


def test_conversations_find_what_was_computed_of_them_more_often_than_by_load_or_in_turn() -> None:
    found = play("conversations", requests=96)
    others = max(found[policy].reused for policy in (Policy.LEAST_LOAD, Policy.ROUND_ROBIN))
    assert found[Policy.SCORE].reused > 1.2 * others


@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_tenants_that_wait_share_the_slots_by_their_weights(seed: int) -> None:
    report = simulate(seed, BACKLOGGED)
    print(report)
    assert not report.broken, str(report)
    assert len(report.shares) == BACKLOGGED.tenants, "shares were measured"


@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_low_priority_waits_behind_high_and_is_not_starved(seed: int) -> None:
    report = simulate(seed, TIERED)
    print(report)
    assert not report.broken, str(report)
    assert len(report.waited) == TIERED.tenants
    low = [waited for tenant, waited in report.waited.items() if int(tenant.removeprefix("t")) % 2]
    assert max(low) < TIERED.seconds / 3, "each is granted something now and then"
