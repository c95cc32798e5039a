"""The first page of the admin: what runs, what the last hour looked like, and what is wrong now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.templatetags.muster import print_duration
from gateway.services.traffic import OpenRequests, Traffic, read_open_requests, read_traffic
from gateway.services.waiting import WaitingModel, read_waits
from nodes.services.overview import FleetOverview, read_fleet
from nodes.states import Freshness
from wire.contract import NodeStatus

SLOW_QUEUE_S = 2.0
"""A request that waits longer than this for a box is worth an operator's look."""
FAULT_PERCENT_ALERT = 5.0
FAULTS_ALERT = 5
MAX_PROBLEMS = 8


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of "what is wrong now": what was seen, and what to do about it."""

    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything the first page shows."""

    fleet: FleetOverview
    open_requests: OpenRequests
    traffic: Traffic
    problems: tuple[Problem, ...]


def read_overview() -> Overview:
    """Collect the first page in five queries, in seven while requests wait."""
    return read_live_overview(read_traffic())


def read_live_overview(traffic: Traffic) -> Overview:
    """Collect what the open page refreshes by itself, beside the ``traffic`` of the last hour, which costs more to read."""
    fleet, open_requests = read_fleet(), read_open_requests()
    problems = find_problems(fleet, open_requests, traffic, read_waits() if open_requests.queued else ())
    return Overview(fleet=fleet, open_requests=open_requests, traffic=traffic, problems=problems[:MAX_PROBLEMS])


def count_live(overview: Overview) -> dict[str, int]:
    """Return the numbers that the open page refreshes by itself."""
    return {
        "nodes_online": overview.fleet.online,
        "nodes_total": len(overview.fleet.nodes),
        "queued": overview.open_requests.queued,
        "running": overview.open_requests.running,
    }


def find_problems(
    fleet: FleetOverview, open_requests: OpenRequests, traffic: Traffic, waits: Sequence[WaitingModel] = ()
) -> tuple[Problem, ...]:
    """Return what an operator should look at, the most urgent first. ``waits``: what requests wait for, the longest first."""
    problems = []
    if not fleet.nodes:
        problems.append(Problem("No box has connected yet.", "Create a worker credential and start a node with it."))
    elif not any(node.status in {NodeStatus.AVAILABLE, NodeStatus.BUSY} for node in fleet.nodes):
        problems.append(Problem("No box takes work.", "Clients get NO_AVAILABLE_NODE. Start, uncordon or undrain one."))
    for waiting in waits:
        if waiting.oldest_wait_s >= SLOW_QUEUE_S:
            is_one, since = waiting.requests == 1, print_duration(waiting.oldest_wait_s).replace(" ", "\u00a0")
            how_many, whose = ("1 waits", "") if is_one else (f"{waiting.requests} wait", "the first ")
            what = f"{how_many} for {waiting.model}, {whose}for {since}."
            problems.append(Problem(what, f"{waiting.wait.reason} {waiting.wait.advice}"))
    if traffic.faults >= FAULTS_ALERT and traffic.fault_percent >= FAULT_PERCENT_ALERT:
        share = f"{traffic.fault_percent:.0f} % of the last hour's requests went wrong."
        problems.append(Problem(share, "Filter Requests by error code to see what they have in common."))
    for node in fleet.nodes:
        if node.status is NodeStatus.ERROR:
            problems.append(Problem(f"{node.name} reports an error.", node.last_error or "See its own log."))
        elif node.freshness is Freshness.STALE:
            problems.append(Problem(f"{node.name} was last heard {node.age_s:.0f} s ago.", "It gets no new work until heard."))
        elif node.status is NodeStatus.OFFLINE:
            heard = "was never heard" if node.age_s is None else f"has been silent for {print_duration(node.age_s)}"
            problems.append(Problem(f"{node.name} {heard}.", "Check its power, its network and the runner's log."))
    return tuple(problems)
