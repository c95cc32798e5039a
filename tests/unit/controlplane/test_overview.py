"""The first page: what needs attention, the chart of requests, and how numbers are printed."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from controlplane.overview import CASES, Facts, PolicyFact, Severity, SlowFacts, find_problems
from controlplane.templatetags.muster import age, beside, compact, seconds
from core.limits import limits
from gateway.admin.requests import print_ms
from gateway.services.overview import ExpiringKey, GatewayHealth
from gateway.services.traffic import Minute, OpenRequests, Traffic
from gateway.services.waiting import Wait, WaitingModel
from nodes.services.overview import FleetOverview, NodeHealth
from nodes.states import Freshness
from wire.contract import NodeStatus

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
IDLE = OpenRequests(queued=0, running=0, oldest_wait_s=0.0)
NODE_ID = uuid.UUID("01890000-0000-7000-8000-000000000001")
MISSING = Wait("no box", "No node has big.", "Start one that has it.")


def node(name: str = "rig", status: NodeStatus = NodeStatus.AVAILABLE, **changes: Any) -> NodeHealth:
    """A node that does well, but for ``changes``."""
    values: dict[str, Any] = {
        "freshness": Freshness.FRESH, "age_s": 1.0, "active_requests": 0, "max_concurrent": 1, "models": "", "last_error": "",
        "id": NODE_ID, "model_names": ("tiny",), "op_level": "L2", "policy_version": 1, "could_take_operations": True,
    }  # fmt: skip
    return NodeHealth(name, status, **(values | changes))


def traffic(requests: int = 100, failed: int = 0, refused: int = 0) -> Traffic:
    minute = Minute(NOW, requests, refused, failed)
    return Traffic(
        requests,
        requests - failed - refused,
        refused,
        failed,
        p50_ms=1,
        p95_ms=2,
        prompt_tokens=0,
        completion_tokens=0,
        minutes=(minute,),
    )


def facts(*nodes: NodeHealth, slow: SlowFacts | None = None, **changes: Any) -> Facts:
    """An installation in which all is well, but for what is given."""
    healthy = SlowFacts(traffic(), {"tiny": 5}, PolicyFact(1, NOW + timedelta(days=400)))
    values: dict[str, Any] = {
        "fleet": FleetOverview(nodes or (node(),)), "open_requests": IDLE, "slow": slow or healthy, "now": NOW,
        "gateways": (GatewayHealth("gate:7", NOW, 1.0),),
    }  # fmt: skip
    return Facts(**(values | changes))


def slow(**changes: Any) -> SlowFacts:
    return replace(facts().slow, **changes)


def silent(name: str = "attic") -> NodeHealth:
    heard_at = NOW - timedelta(hours=2)
    return node(name, NodeStatus.OFFLINE, freshness=Freshness.OFFLINE, age_s=7200.0, heard_at=heard_at)


def test_nothing_needs_attention_while_all_is_well() -> None:
    assert find_problems(facts()) == ()


TABLE: dict[str, tuple[Facts, str, Severity]] = {
    "no gateway": (facts(gateways=()), "No gateway runs.", Severity.DOWN),
    "a gateway that fell silent": (facts(gateways=(GatewayHealth("gate:7", NOW, 1.0), GatewayHealth("gate:8",
        NOW - timedelta(minutes=3), 180.0))), "The gateway gate:8 writes no heartbeat.", Severity.IMPAIRED),
    "no node": (facts(fleet=FleetOverview(())), "No node has connected yet.", Severity.DOWN),
    "nodes that only drain": (facts(node(status=NodeStatus.DRAINING)), "No node takes work.", Severity.DOWN),
    "nodes of a provider that is off": (facts(node(is_enabled=False)), "No node takes work.", Severity.DOWN),
    "a model without a node that clients ask for": (facts(slow=slow(allowed={"big": 3}), unserved={"big": MISSING}),
        "No node answers for big, and clients sent 3 requests for it in the last hour.", Severity.DOWN),
    "a model without a node that nobody asks for": (facts(slow=slow(allowed={"big": 0}), unserved={"big": MISSING}),
        "Clients may use big, and no node answers for it.", Severity.NOTICE),
    "failures": (facts(slow=slow(traffic=traffic(failed=20))), "20 % of the last hour's requests failed.", Severity.IMPAIRED),
    "a node in error": (facts(node(), node("gpu1", NodeStatus.ERROR, last_error="CUDA out of memory")),
        "gpu1 reports an error.", Severity.IMPAIRED),
    "a late node": (facts(node("late", freshness=Freshness.STALE, age_s=12.0)), "late was last seen 12 s ago.",
        Severity.IMPAIRED),
    "a silent node": (facts(node(), silent()), "attic has been silent for 2 h.", Severity.IMPAIRED),
    "a node that was never seen": (facts(node(), node("new", NodeStatus.OFFLINE, freshness=Freshness.OFFLINE, age_s=None)),
        "new was never seen.", Severity.IMPAIRED),
    "a URL that does not answer": (facts(node(probe_error="no answer within 3 s")),
        "rig sends heartbeats, but its URL does not answer.", Severity.IMPAIRED),
    "a dead backend": (facts(node(failed=(("tiny", "connection refused"),))), "tiny failed on rig.", Severity.IMPAIRED),
    "a node without a model": (facts(node(), node("bare", model_names=())), "bare has no model.", Severity.NOTICE),
    "an audit log that does not fit": (facts(node(witness_alarm="two logs")), "rig does not trust the audit log.",
        Severity.DOWN),
    "a refused policy": (facts(node(policy_error="not signed")), "rig refuses what governs it.", Severity.IMPAIRED),
    "two nodes with one name": (facts(node(rival_seen_at=NOW - timedelta(hours=3), rival_address="10.0.0.9")),
        "Two nodes call themselves rig.", Severity.IMPAIRED),
    "Valkey": (facts(slow=slow(unreadable=None)), "Valkey does not answer the control plane.", Severity.IMPAIRED),
    "noise": (facts(slow=slow(unreadable=999)), "Valkey brought 999 messages that Muster could not read.", Severity.IMPAIRED),
    "a clock that is off": (facts(node(clock_skew_ms=90_000)), "The clock of rig is 90 s behind.", Severity.NOTICE),
    "a clock too far off": (facts(node(clock_skew_ms=-300_000)), "The clock of rig is 5 min ahead.", Severity.IMPAIRED),
    "a policy that ends soon": (facts(slow=slow(policy=PolicyFact(4, NOW + timedelta(days=3)))),
        "The approval policy, version 4, expires on 2026-11-24.", Severity.NOTICE),
    "a policy that ended": (facts(slow=slow(policy=PolicyFact(4, NOW))),
        "The approval policy, version 4, expired on 2026-11-21.", Severity.DOWN),
    "a node that trusts no policy": (facts(node(policy_version=0)), "rig trusts no policy.", Severity.NOTICE),
    "a node started without --data": (facts(node(op_level="", policy_version=0)), "rig takes no operations.", Severity.NOTICE),
    "a key that ends soon": (facts(slow=slow(keys=(ExpiringKey(NODE_ID, "ci", NOW + timedelta(days=2)), ))),
        "The API key ci expires on 2026-11-23 12:00 UTC.", Severity.NOTICE),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_one_thing_that_is_wrong_is_one_line_with_a_way_to_mend_it(case: str) -> None:
    given, what, severity = TABLE[case]
    (problem,) = find_problems(given)
    assert (problem.what, problem.severity) == (what, severity)
    assert problem.url or problem.what.startswith("Valkey")
    assert bool(problem.link) == bool(problem.url)


QUIET = {
    "a few failures of few requests": facts(slow=slow(traffic=traffic(requests=10, failed=4))),
    "callers' mistakes alone": facts(slow=slow(traffic=traffic(requests=100, refused=100))),
    "a small share of failures": facts(slow=slow(traffic=traffic(requests=100, failed=4))),
    "a rival of last week": facts(node(rival_seen_at=NOW - timedelta(days=7))),
    "a clock that is a little off": facts(node(clock_skew_ms=900)),
    "no policy, hence none to trust": facts(node(policy_version=0), slow=slow(policy=None)),
    "a worker of another make, which takes no operations": facts(node(op_level="", could_take_operations=False)),
    "a node that loads its first model": facts(node(), node("bare", model_names=(), is_loading=True)),
    "a model that is being loaded": facts(unserved={"big": Wait("loading", "rig is loading big.", "It starts then.")}),
    "a model that is served meanwhile": facts(unserved={"big": Wait("starting", "rig has big.", "", is_starting=True)}),
    "what a silent node said before": facts(node(), replace(silent(), clock_skew_ms=900_000)),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_is_no_problem_is_not_listed(case: str) -> None:
    assert [problem.what for problem in find_problems(QUIET[case]) if problem.what != "attic has been silent for 2 h."] == []


def test_a_queue_needs_attention_only_when_its_head_has_waited() -> None:
    wait = Wait("nodes full", "Every node is full.", "Add one.")
    assert find_problems(facts(waits=[WaitingModel("tiny", 40, 1.0, wait)])) == ()
    problems = find_problems(facts(waits=[WaitingModel("tiny", 3, 9.0, wait), WaitingModel("big", 1, 4.0, wait)]))
    assert (problems[0].what, problems[0].advice) == (
        "3 wait for tiny, the first for 9\u00a0s.",
        "Every node is full. Add one.",
    )
    assert problems[1].what == "1 waits for big, for 4\u00a0s."


def test_everything_at_once_is_counted_in_full_on_a_list_that_stays_short() -> None:
    ill: dict[str, Any] = {
        "model_names": (), "failed": (("a", ""), ("b", ""), ("c", "")), "witness_alarm": "w", "policy_error": "p",
        "clock_skew_ms": 90_000, "rival_seen_at": NOW, "probe_error": "e", "policy_version": 0,
    }  # fmt: skip
    given = facts(*(node(f"rig{number}", **ill) for number in range(7)), gateways=())
    problems = find_problems(given)
    said = [problem for case in CASES for problem in case(given)]
    assert len(problems) == limits().console.problem_lines
    assert sum(1 + problem.beyond for problem in problems) == len(said)


def test_numbers_are_printed_short_and_with_their_units() -> None:
    assert [age(value) for value in (None, 3.2, 119, 180, 10_800)] == ["never", "3 s ago", "119 s ago", "3 min ago", "3 h ago"]
    assert [compact(value) for value in (0, 950, 1234, 2_751_801)] == ["0", "950", "1.23k", "2.75M"]
    assert [seconds(value) for value in (7, 1623, 345_600)] == ["0.007", "1.62", "346"]
    assert [print_ms(value) for value in (None, 12, 12_345)] == ["–", "12\u00a0ms", "12.3\u00a0s"]
    shared = [re.sub("<[^>]*>", "", beside(*pair)).replace("\u00a0", " ") for pair in ((36, 201), (900, 1234), (1500, 120_000))]
    assert shared == ["36 · 201 ms", "900 ms · 1.23 s", "1.5 · 120 s"]
