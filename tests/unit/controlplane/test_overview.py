"""What the first page calls wrong."""

from __future__ import annotations

from datetime import UTC, datetime

from controlplane.overview import Problem, find_problems
from gateway.services.traffic import Minute, OpenRequests, Traffic
from gateway.services.waiting import Wait, WaitingModel
from nodes.services.overview import FleetOverview, NodeHealth
from nodes.states import Freshness
from wire.contract import NodeStatus

IDLE = OpenRequests(queued=0, running=0, oldest_wait_s=0.0)


def node(
    name: str = "box",
    status: NodeStatus = NodeStatus.AVAILABLE,
    freshness: Freshness = Freshness.FRESH,
    age_s: float | None = 1.0,
    last_error: str = "",
) -> NodeHealth:
    return NodeHealth(name, status, freshness, age_s, active_requests=0, max_concurrent=1, models="", last_error=last_error)


def traffic(requests: int = 100, faults: int = 0) -> Traffic:
    minute = Minute(datetime(2026, 11, 21, tzinfo=UTC), requests, faults)
    return Traffic(requests, faults, p50_ms=1, p95_ms=2, prompt_tokens=0, completion_tokens=0, minutes=(minute,))


def texts(fleet: FleetOverview, open_requests: OpenRequests = IDLE, hour: Traffic | None = None) -> list[str]:
    return [problem.what for problem in find_problems(fleet, open_requests, hour or traffic())]


def test_nothing_is_wrong_while_a_box_takes_work() -> None:
    assert texts(FleetOverview((node(),))) == []


def test_an_empty_installation_says_what_to_do_first() -> None:
    assert texts(FleetOverview(())) == ["No box has connected yet."]


def test_a_box_that_went_silent_is_named_with_its_silence() -> None:
    silent = node("attic", NodeStatus.OFFLINE, Freshness.OFFLINE, age_s=7200.0)

    assert "attic has been silent for 2 h." in texts(FleetOverview((node(), silent)))


def test_a_stale_box_is_named_before_it_counts_as_lost() -> None:
    stale = node("late", NodeStatus.AVAILABLE, Freshness.STALE, age_s=12.0)

    assert texts(FleetOverview((node(), stale))) == ["late was last heard 12 s ago."]


def test_a_box_that_reports_an_error_shows_its_own_words() -> None:
    broken = node("gpu1", NodeStatus.ERROR, last_error="CUDA out of memory")
    problems = find_problems(FleetOverview((node(), broken)), IDLE, traffic())

    assert [(problem.what, problem.advice) for problem in problems] == [("gpu1 reports an error.", "CUDA out of memory")]


def test_a_fleet_that_only_drains_takes_no_work() -> None:
    assert texts(FleetOverview((node(status=NodeStatus.DRAINING),))) == ["No box takes work."]


def test_a_queue_is_wrong_only_when_its_head_has_waited() -> None:
    fleet, open_requests = FleetOverview((node(),)), OpenRequests(queued=3, running=8, oldest_wait_s=9.0)
    wait = Wait("boxes full", "Every box is full.", "Add one.")

    assert find_problems(fleet, open_requests, traffic(), [WaitingModel("tiny", 40, 1.0, wait)]) == ()
    problems = find_problems(
        fleet, open_requests, traffic(), [WaitingModel("tiny", 3, 9.0, wait), WaitingModel("big", 1, 4.0, wait)]
    )
    assert problems[0] == Problem("3 wait for tiny, the first for 9\u00a0s.", "Every box is full. Add one.")
    assert problems[1].what == "1 waits for big, for 4\u00a0s."


def test_a_few_faults_are_no_alarm_and_a_share_of_them_is() -> None:
    fleet = FleetOverview((node(),))

    assert texts(fleet, hour=traffic(requests=10, faults=4)) == []
    assert texts(fleet, hour=traffic(requests=100, faults=4)) == []
    assert texts(fleet, hour=traffic(requests=100, faults=20)) == ["20 % of the last hour's requests went wrong."]
