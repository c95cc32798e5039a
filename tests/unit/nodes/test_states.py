"""Health as a pure function: every combination has exactly one status."""

from __future__ import annotations

import itertools

import pytest

from nodes.states import Freshness, HealthPolicy, effective_status, freshness_windows, judge_freshness
from wire.bridge import BRIDGE_V1, MUSTER_V1
from wire.contract import NodeMode, NodeStatus


@pytest.mark.parametrize(
    ("age_s", "freshness"),
    [
        (None, Freshness.OFFLINE),
        (0.0, Freshness.FRESH),
        (9.99, Freshness.FRESH),
        (10.0, Freshness.STALE),
        (14.99, Freshness.STALE),
        (15.0, Freshness.OFFLINE),
        (1e9, Freshness.OFFLINE),
    ],
)
def test_freshness_follows_the_contracts_ten_and_fifteen_seconds(age_s: float | None, freshness: Freshness) -> None:
    assert judge_freshness(age_s, stale_after_s=10, offline_after_s=15) is freshness


def test_every_combination_has_the_status_that_overrides_most() -> None:
    for freshness, reported, mode, draining, cordoned, accepting in itertools.product(
        Freshness, NodeStatus, NodeMode, (False, True), (False, True), (False, True)
    ):
        status = effective_status(
            freshness=freshness,
            reported=reported,
            mode=mode,
            draining=draining,
            cordoned=cordoned,
            is_accepting_jobs=accepting,
        )
        if freshness is Freshness.OFFLINE or reported is NodeStatus.OFFLINE:
            assert status is NodeStatus.OFFLINE
        elif reported is NodeStatus.ERROR:
            assert status is NodeStatus.ERROR
        elif draining or cordoned or not accepting or mode is NodeMode.SPARE_OFF or reported is NodeStatus.DRAINING:
            assert status is NodeStatus.DRAINING
        else:
            assert status is reported
            assert status in {NodeStatus.AVAILABLE, NodeStatus.BUSY}


def test_a_bridge_v1_worker_is_judged_by_its_pong_window() -> None:
    policy = HealthPolicy()
    assert freshness_windows(policy, protocol=BRIDGE_V1) == (45.0, 45.0)
    assert freshness_windows(policy, protocol=MUSTER_V1) == freshness_windows(policy, protocol="") == (10.0, 15.0)
