"""Fleets under faults, each from one seed: what production promises of requests and slots holds whatever goes wrong."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from tests.fakes.simulator import Scale, simulate

SEEDS = [int(seed) for seed in os.environ.get("MUSTER_TEST_SEEDS", "1,2,3").split(",")]
SCALE = Scale(**{
    name: type(value)(os.environ[f"MUSTER_TEST_{name.upper()}"])
    for name, value in vars(Scale()).items()
    if f"MUSTER_TEST_{name.upper()}" in os.environ
})  # fmt: skip
"""``MUSTER_TEST_NODES=1000 MUSTER_TEST_SECONDS=3600 MUSTER_TEST_TENANTS=100`` plays a large one."""

OVERLOADED = replace(SCALE, nodes=5, seconds=min(SCALE.seconds, 240.0), requests_per_s=15.0)
"""Fewer slots than are asked for."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("scale", [SCALE, OVERLOADED], ids=["usual", "overloaded"])
def test_every_request_has_one_end_and_every_slot_one_holder_whatever_goes_wrong(seed: int, scale: Scale) -> None:
    report = simulate(seed, scale)
    print(report)
    assert not report.broken, str(report)
    assert report.states["completed"] > 100, "a fleet that serves nobody proves nothing"
    assert bool(report.states["failed"]) == (scale is OVERLOADED), "and one where nobody waits too long nothing of queues"
