"""Problems: what an operator should look at. Each case is one pure function of ``Facts``, listed in ``CASES``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from urllib.parse import urlencode

from django.urls import reverse

from controlplane.templatetags.muster import print_duration
from core.hints import read_unreadable
from core.limits import limits
from gateway.services.explanations import Wait, WaitingModel, explain_waits, read_waits
from gateway.services.requests import (
    ExpiringKey,
    GatewayHealth,
    OpenRequests,
    count_asked_models,
    read_expiring_keys,
    read_gateways,
    read_open_requests,
)
from gateway.services.rollups import Sums, read_counted_until, read_series
from governance.operations.approvals import active_policy
from nodes.operations.load import LostModel, find_lost_models
from nodes.services.availability import FleetOverview, NodeHealth, read_fleet
from nodes.states import Freshness, Health
from wire import clock
from wire.contract import NodeStatus


class Severity(IntEnum):
    """How urgent a problem is; the lower the sooner."""

    DOWN = 0
    """Requests or operations fail because of it."""
    IMPAIRED = 1
    """Something works less well, or is at risk."""
    NOTICE = 2
    """It will fail, or cannot be used, unless somebody acts."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One line of "needs attention": what was seen, what to do, and where. ``beyond``: how many more are not shown."""

    what: str
    advice: str
    severity: Severity = Severity.IMPAIRED
    since: datetime | None = None
    link: str = ""
    url: str = ""
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class PolicyFact:
    version: int
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class SlowFacts:
    """What changes slowly or costs more to read; an open page reads it every half minute.

    ``hour``: requests that ended in it. ``allowed``: each allowed model with the requests for it in the last hour.
    """

    hour: Sums
    allowed: Mapping[str, int] = field(default_factory=dict)
    policy: PolicyFact | None = None
    keys: tuple[ExpiringKey, ...] = ()
    unreadable: int | None = 0
    """Messages in Valkey that workers could not read; None = Valkey does not answer."""
    counted_until: datetime | None = None
    """What ended until then is in the charts; None = nothing ever was."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the cases look at. ``unserved``: why no node answers, for allowed models of which that is so."""

    fleet: FleetOverview
    open_requests: OpenRequests
    slow: SlowFacts
    now: datetime
    waits: Sequence[WaitingModel] = ()
    unserved: Mapping[str, Wait] = field(default_factory=dict)
    gateways: tuple[GatewayHealth, ...] = ()
    lost_models: tuple[LostModel, ...] = ()


def read_slow_facts() -> SlowFacts:
    """Collect what an open page need not read every two seconds; six queries and a look at Valkey."""
    found = active_policy()
    return SlowFacts(
        hour=read_series(timedelta(hours=1)).total,
        allowed=count_asked_models(),
        policy=None if found is None else PolicyFact(found[0].version, datetime.fromtimestamp(found[1].expires_at, UTC)),
        keys=read_expiring_keys(),
        unreadable=read_unreadable(),
        counted_until=read_counted_until(),
    )


def read_facts(slow: SlowFacts) -> Facts:
    """Collect what changes from one second to the next; eleven queries at most, and one for each lost model."""
    fleet, open_requests = read_fleet(), read_open_requests()
    waits = read_waits() if open_requests.queued else ()
    missing = slow.allowed.keys() - fleet.served_models - {waiting.model for waiting in waits}
    asked_most = sorted(missing, key=lambda model: (-slow.allowed[model], model))[: limits().gateway.page_waiting_models]
    return Facts(
        fleet=fleet,
        open_requests=open_requests,
        slow=slow,
        now=clock.now(),
        waits=waits,
        unserved=explain_waits(asked_most),
        gateways=read_gateways(),
        lost_models=find_lost_models(),
    )


def find_problems(facts: Facts) -> tuple[Problem, ...]:
    """Return what an operator should look at, the most urgent first, at most ``problem_lines`` lines. Pure."""
    found: list[Problem] = []
    for case in CASES:
        lines = sorted(case(facts), key=lambda problem: problem.severity)
        most = limits().console.problem_lines_per_case
        shown, beyond = lines[:most], max(0, len(lines) - most)
        found += [*shown[:-1], replace(shown[-1], beyond=beyond)] if beyond else shown
    found.sort(key=lambda problem: problem.severity)
    shown, hidden = found[: limits().console.problem_lines], found[limits().console.problem_lines :]
    if hidden:
        shown[-1] = replace(shown[-1], beyond=shown[-1].beyond + sum(1 + problem.beyond for problem in hidden))
    return tuple(shown)


def _find_no_gateway(facts: Facts) -> Iterable[Problem]:
    processes = reverse("admin:gateway_gatewayprocess_changelist")
    alive = [gateway for gateway in facts.gateways if gateway.is_alive]
    if not alive:
        what, advice = "No gateway runs.", "Clients cannot connect. Start one, or look at its log."
        yield Problem(what, advice, Severity.DOWN, link="Gateway processes", url=processes)
    for gateway in facts.gateways:
        if gateway not in alive:
            yield Problem(
                f"The gateway {gateway.name} writes no heartbeat.",
                "It died, or it cannot reach the database. Look at its process and its log.",
                since=gateway.heard_at,
                link="Gateway processes",
                url=processes,
            )


def _find_silent_redis(facts: Facts) -> Iterable[Problem]:
    unreadable = facts.slow.unreadable
    if unreadable:
        what = "1 message" if unreadable == 1 else f"{unreadable:,} messages"
        advice = "Something else writes there: see its list muster.unreadable. Deleting muster.unreadable.total ends this line."
        yield Problem(f"Valkey brought {what} that Muster could not read.", advice)
    elif unreadable is None:
        advice = "Changes reach gateways seconds later than usual. See whether Valkey runs and MUSTER_REDIS_URL is right."
        yield Problem("Valkey does not answer the control plane.", advice)


def _find_no_node(facts: Facts) -> Iterable[Problem]:
    nodes = reverse("admin:nodes_node_changelist")
    if not facts.fleet.nodes:
        credentials = reverse("admin:nodes_nodecredential_add")
        advice = "Create a node credential and start a node with it."
        yield Problem("No node has connected yet.", advice, Severity.DOWN, link="New node credential", url=credentials)
    elif not any(node.takes_work for node in facts.fleet.nodes):
        advice = "Clients get NO_AVAILABLE_NODE. Start, uncordon or undrain one."
        yield Problem("No node takes work.", advice, Severity.DOWN, link="Nodes", url=nodes)


def _find_waits(facts: Facts) -> Iterable[Problem]:
    for waiting in facts.waits:
        if waiting.oldest_wait_s >= limits().console.problem_queue_s:
            is_one, since = waiting.requests == 1, print_duration(waiting.oldest_wait_s).replace(" ", "\u00a0")
            how_many, whose = ("1 waits", "") if is_one else (f"{waiting.requests} wait", "the first ")
            yield Problem(
                f"{how_many} for {waiting.model}, {whose}for {since}.",
                f"{waiting.wait.reason} {waiting.wait.advice}",
                Severity.DOWN,
                link="Requests in progress",
                url=_list_requests(state="open"),
            )


def _find_unserved(facts: Facts) -> Iterable[Problem]:
    # While there is no node at all, that is the one problem to be told of.
    for model, wait in facts.unserved.items() if facts.fleet.nodes else ():
        if wait.is_starting or wait.brief in {"loading", "nodes full"}:
            continue
        asked = facts.slow.allowed.get(model, 0)
        requests = "1 request" if asked == 1 else f"{asked} requests"
        yield Problem(
            f"No node answers for {model}, and clients sent {requests} for it in the last hour."
            if asked
            else f"Clients may use {model}, and no node answers for it.",
            f"{wait.reason} {wait.advice}",
            Severity.DOWN if asked else Severity.NOTICE,
            link="Models",
            url=f"{reverse('admin:gateway_model_changelist')}?{urlencode({'q': model})}",
        )


def _find_failures(facts: Facts) -> Iterable[Problem]:
    hour = facts.slow.hour
    if hour.failed >= limits().console.problem_failed and hour.failed_percent >= limits().console.problem_failed_percent:
        yield Problem(
            f"{hour.failed_percent:.0f} % of the last hour's requests failed.",
            "Filter Requests by error code to see what they have in common.",
            link="Failed requests",
            url=_list_requests(state="wrong", period="1h"),
        )


def _find_stale_sums(facts: Facts) -> Iterable[Problem]:
    until = facts.slow.counted_until
    if until is not None and facts.now - until > timedelta(seconds=limits().console.problem_sums_s):
        advice = "What ended since then is in no chart yet, and not lost. The worker catches up; see whether it runs."
        yield Problem("Charts are behind.", advice, since=until)


def _find_lost_nodes(facts: Facts) -> Iterable[Problem]:
    for node in facts.fleet.nodes:
        if node.status is NodeStatus.ERROR:
            yield _blame(node, f"{node.name} reports an error.", node.last_error or "See its own log.")
        elif node.freshness is Freshness.STALE:
            advice = "It gets no new work until it is seen."
            if node.health is Health.FAILING:
                advice += " Slots of other nodes are held for requests that run there and can be tried again."
            yield _blame(node, f"{node.name} was last seen {node.age_s:.0f} s ago.", advice)
        elif node.status is NodeStatus.OFFLINE:
            silent = "was never seen" if node.age_s is None else f"has been silent for {print_duration(node.age_s)}"
            advice = "Check its power, its network and the runner's log."
            yield _blame(node, f"{node.name} {silent}.", advice, since=node.heard_at)


def _find_dead_backends(facts: Facts) -> Iterable[Problem]:
    for node in _online(facts):
        if node.probe_error:
            yield _blame(node, f"{node.name} sends heartbeats, but its URL does not answer.", node.probe_error)
        for model, detail in node.failed:
            advice = detail or "The node gives no reason. See its own log."
            yield _blame(node, f"{model} failed on {node.name}.", advice)


def _find_lost_models(facts: Facts) -> Iterable[Problem]:
    for lost in facts.lost_models:
        url = f"{reverse('approvals:propose')}?{lost.again}"
        yield Problem(lost.what, lost.advice, Severity.DOWN, since=lost.back_at, link="Propose it again", url=url)


def _find_idle_nodes(facts: Facts) -> Iterable[Problem]:
    for node in _online(facts):
        if not node.model_names and not node.failed and not node.is_loading:
            advice = "It gets no requests. Load a model on it, or see whether its backend answers."
            yield _blame(node, f"{node.name} has no model.", advice, Severity.NOTICE)


def _find_rivals(facts: Facts) -> Iterable[Problem]:
    for node in facts.fleet.nodes:
        if node.rival_seen_at is not None and facts.now - node.rival_seen_at < timedelta(seconds=limits().nodes.rival_shown_s):
            second = f"The second one, at {node.rival_address}," if node.rival_address else "The second one"
            advice = f"{second} is refused. Give it another name or a credential of its own."
            yield _blame(node, f"Two nodes call themselves {node.name}.", advice, since=node.rival_seen_at)


def _find_ejections(facts: Facts) -> Iterable[Problem]:
    for node in _online(facts):
        for ejection in node.ejections:
            what = f"Gateways hold {node.name} back" + (f" for {ejection.model}." if ejection.model else ".")
            yield _blame(node, what, f"{ejection.text[:1].upper()}{ejection.text[1:]}.", since=ejection.since)


def _find_alarms(facts: Facts) -> Iterable[Problem]:
    for node in facts.fleet.nodes:
        if node.witness_alarm:
            yield _blame(node, f"{node.name} does not trust the audit log.", node.witness_alarm, Severity.DOWN)
        if node.policy_error:
            yield _blame(node, f"{node.name} refuses what governs it.", node.policy_error)


def _find_wrong_clocks(facts: Facts) -> Iterable[Problem]:
    for node in _online(facts):
        skew_ms = node.clock_skew_ms or 0
        if abs(skew_ms) > limits().nodes.clock_skew_warning_ms:
            is_beyond = abs(skew_ms) > limits().nodes.clock_skew_ms
            side = "behind" if skew_ms > 0 else "ahead"
            advice = "No operation is sent to it until its clock is set." if is_beyond else "Set its clock, for example by NTP."
            what = f"The clock of {node.name} is {print_duration(abs(skew_ms) / 1000)} {side}."
            yield _blame(node, what, advice, Severity.IMPAIRED if is_beyond else Severity.NOTICE)


def _find_unable_nodes(facts: Facts) -> Iterable[Problem]:
    # Without a policy there is nothing to sign, so nothing that a node could not carry out.
    for node in _online(facts) if facts.slow.policy is not None else ():
        if node.op_level == "L2" and not node.policy_version:
            advice = "It carries out no operation. Run ./muster trust on it with the words of the policy."
            yield _blame(node, f"{node.name} trusts no policy.", advice, Severity.NOTICE)
        elif not node.op_level and node.could_take_operations and not node.policy_error:
            advice = "Models cannot be loaded or unloaded on it from here. Start it with --data DIR."
            yield _blame(node, f"{node.name} takes no operations.", advice, Severity.NOTICE)


def _find_expiring_policy(facts: Facts) -> Iterable[Problem]:
    policy = facts.slow.policy
    if policy is None or policy.expires_at - facts.now > timedelta(seconds=limits().console.problem_policy_s):
        return
    is_over, day = policy.expires_at <= facts.now, f"{policy.expires_at:%Y-%m-%d}"
    advice = (
        "Nothing can be approved but its next version."
        if is_over
        else "After that nothing can be approved but its next version."
    )
    yield Problem(
        f"The approval policy, version {policy.version}, {'expired' if is_over else 'expires'} on {day}.",
        f"{advice} Draft that version now.",
        Severity.DOWN if is_over else Severity.NOTICE,
        link="Policy",
        url=reverse("approvals:policy"),
    )


def _find_expiring_keys(facts: Facts) -> Iterable[Problem]:
    for key in facts.slow.keys:
        url = reverse("admin:gateway_apikey_change", args=[key.key_id])
        what = f"The API key {key.name} expires on {key.expires_at:%Y-%m-%d %H:%M} UTC."
        yield Problem(what, "It is in use. Create a new one for its client.", Severity.NOTICE, link=key.name, url=url)


CASES: tuple[Callable[[Facts], Iterable[Problem]], ...] = (
    _find_no_gateway,
    _find_no_node,
    _find_waits,
    _find_unserved,
    _find_failures,
    _find_stale_sums,
    _find_lost_nodes,
    _find_dead_backends,
    _find_lost_models,
    _find_alarms,
    _find_ejections,
    _find_rivals,
    _find_silent_redis,
    _find_wrong_clocks,
    _find_expiring_policy,
    _find_unable_nodes,
    _find_idle_nodes,
    _find_expiring_keys,
)
"""Among problems of one severity the order of the cases decides."""


def _online(facts: Facts) -> Iterable[NodeHealth]:
    # Of a silent node nothing more can be said than that.
    return (node for node in facts.fleet.nodes if node.status is not NodeStatus.OFFLINE)


def _blame(
    node: NodeHealth, what: str, advice: str, severity: Severity = Severity.IMPAIRED, *, since: datetime | None = None
) -> Problem:
    url = reverse("admin:nodes_node_change", args=[node.id]) if node.id is not None else ""
    return Problem(what, advice, severity, since=since, link=node.name if url else "", url=url)


def _list_requests(**query: str) -> str:
    return f"{reverse('admin:gateway_requestrecord_changelist')}?{urlencode(query)}"
