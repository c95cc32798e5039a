"""Problems: what an operator should look at. Each case is one pure function of ``Facts``, listed in ``CASES``.

``look_for_problems`` turns what they find into alerts; ``problem_words`` says them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from django.conf import settings
from django.utils import translation

from core.hints import read_unreadable
from core.limits import limits
from gateway.services.explanations import Wait, WaitingModel, explain_waits_in, read_waits
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
from gateway.services.usage import UsedBudget, find_used_budgets
from governance.alerts import AlertObject, Param, Problem, look
from governance.audit import BACKUP_CREATED, find_last_action_at
from governance.notices import FailingWebhook, deliver_due, find_failing_webhooks, is_delivery_due
from governance.operations.approvals import active_policy
from governance.states import Severity
from nodes.operations.load import LostModel, find_lost_models
from nodes.services.availability import FleetOverview, NodeHealth, read_fleet
from nodes.services.certificates import find_authority_end
from nodes.states import Freshness, Health
from wire import clock
from wire.contract import NodeStatus


@dataclass(frozen=True, slots=True)
class PolicyFact:
    version: int
    expires_at: datetime


@dataclass(frozen=True, slots=True)
class SlowFacts:
    """What changes slowly or costs more to read.

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
    authority_ends_at: datetime | None = None
    """When the CA that gives nodes certificates ends; None = there is none."""
    budgets: tuple[UsedBudget, ...] = ()
    webhooks: tuple[FailingWebhook, ...] = ()
    backup_at: datetime | None = None
    """When the last backup was written; None = there never was one."""


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
    explained: Mapping[str, Mapping[str, Wait]] = field(default_factory=dict)
    """Language → model → why it waits, said in that language."""


def read_slow_facts() -> SlowFacts:
    """Collect the rest; a fixed number of queries and a look at Valkey."""
    found = active_policy()
    return SlowFacts(
        hour=read_series(timedelta(hours=1)).total,
        allowed=count_asked_models(),
        policy=None if found is None else PolicyFact(found[0].version, datetime.fromtimestamp(found[1].expires_at, UTC)),
        keys=read_expiring_keys(),
        unreadable=read_unreadable(),
        counted_until=read_counted_until(),
        authority_ends_at=find_authority_end(),
        budgets=find_used_budgets(),
        webhooks=find_failing_webhooks(),
        backup_at=find_last_action_at(BACKUP_CREATED),
    )


def read_facts(slow: SlowFacts) -> Facts:
    """Collect what changes from one second to the next; a fixed number of queries, and one for each lost model."""
    fleet, open_requests = read_fleet(), read_open_requests()
    waits = read_waits() if open_requests.queued else ()
    missing = slow.allowed.keys() - fleet.served_models - {waiting.model for waiting in waits}
    asked_most = sorted(missing, key=lambda model: (-slow.allowed[model], model))[: limits().gateway.page_waiting_models]
    languages = [language for language, _name in settings.LANGUAGES]
    explained = explain_waits_in(languages, [*(waiting.model for waiting in waits), *asked_most])
    return Facts(
        fleet=fleet,
        open_requests=open_requests,
        slow=slow,
        now=clock.now(),
        waits=waits,
        unserved={model: explained[settings.LANGUAGE_CODE][model] for model in asked_most},
        explained=explained,
        gateways=read_gateways(),
        lost_models=find_lost_models(),
    )


def look_for_problems() -> bool:
    """Bring the alerts in line with what is wrong now; False while another process does."""
    with translation.override(settings.LANGUAGE_CODE):
        return look(lambda: find_problems(read_facts(read_slow_facts())))


def watch() -> int:
    """Look for problems, and send what no worker has sent in time; return how many messages got through.

    Without Valkey no worker is woken, and just that has to be told.
    """
    look_for_problems()
    overdue = timedelta(seconds=limits().governance.notice_overdue_s)
    return deliver_due(limits().console.problem_messages) if is_delivery_due(since=clock.now() - overdue) else 0


def find_problems(facts: Facts) -> list[Problem]:
    """Return what an operator should look at, in the order of the cases. Pure."""
    return [problem for case in CASES for problem in case(facts)]


def _find_no_gateway(facts: Facts) -> Iterable[Problem]:
    alive = [gateway for gateway in facts.gateways if gateway.is_alive]
    if not alive:
        yield Problem("gateway.none", Severity.DOWN)
    for gateway in facts.gateways:
        if gateway not in alive:
            yield Problem("gateway.silent", object=AlertObject("gateway", gateway.name, gateway.name), since=gateway.heard_at)


def _find_silent_valkey(facts: Facts) -> Iterable[Problem]:
    unreadable = facts.slow.unreadable
    if unreadable:
        yield Problem("valkey.unreadable", params={"messages": unreadable})
    elif unreadable is None:
        yield Problem("valkey.silent")


def _find_failing_webhooks(facts: Facts) -> Iterable[Problem]:
    for one in facts.slow.webhooks:
        of = AlertObject("webhook", str(one.webhook_id), one.name)
        yield Problem("webhook.failing", object=of, params={"messages": one.waiting, "detail": one.error}, since=one.since)


def _find_no_node(facts: Facts) -> Iterable[Problem]:
    if not facts.fleet.nodes:
        yield Problem("node.none", Severity.DOWN)
    elif not any(node.takes_work for node in facts.fleet.nodes):
        yield Problem("node.unavailable", Severity.DOWN)


def _find_waits(facts: Facts) -> Iterable[Problem]:
    for waiting in facts.waits:
        if waiting.oldest_wait_s >= limits().console.problem_queue_s:
            since = facts.now - timedelta(seconds=waiting.oldest_wait_s)
            params = {"requests": waiting.requests, **_explain(facts, waiting.model, waiting.wait)}
            yield Problem("requests.waiting", Severity.DOWN, _of_model(waiting.model), params=params, since=since)


def _find_unserved(facts: Facts) -> Iterable[Problem]:
    # While no node takes work, that is the one problem to be told of.
    for model, wait in facts.unserved.items() if any(node.takes_work for node in facts.fleet.nodes) else ():
        if wait.is_starting or wait.brief in {"loading", "nodes full"}:
            continue
        asked = facts.slow.allowed.get(model, 0)
        yield Problem(
            "model.unserved",
            Severity.DOWN if asked else Severity.NOTICE,
            _of_model(model),
            code="model.unserved.asked" if asked else "",
            params={"requests": asked, **_explain(facts, model, wait)},
        )


def _find_failures(facts: Facts) -> Iterable[Problem]:
    hour = facts.slow.hour
    if hour.failed >= limits().console.problem_failed and hour.failed_percent >= limits().console.problem_failed_percent:
        yield Problem("requests.failed", params={"percent": round(hour.failed_percent), "failed": hour.failed})


def _find_stale_sums(facts: Facts) -> Iterable[Problem]:
    until = facts.slow.counted_until
    if until is not None and facts.now - until > timedelta(seconds=limits().console.problem_sums_s):
        yield Problem("charts.behind", since=until)


def _find_lost_nodes(facts: Facts) -> Iterable[Problem]:
    for node in facts.fleet.nodes:
        if node.status is NodeStatus.ERROR:
            yield _blame("node.error", node, detail=node.last_error)
        elif node.freshness is Freshness.STALE:
            code = "node.late.failing" if node.health is Health.FAILING else ""
            yield _blame("node.late", node, code=code, since=node.heard_at)
        elif node.status is NodeStatus.OFFLINE:
            yield _blame("node.offline", node, code="node.offline.never" if node.age_s is None else "", since=node.heard_at)


def _find_dead_backends(facts: Facts) -> Iterable[Problem]:
    for node in _online(facts):
        if node.probe_error:
            yield _blame("node.unreachable", node, detail=node.probe_error)
        for model, detail in node.failed:
            replica = AlertObject("replica", f"{node.id}/{model}", f"{model} on {node.name}")
            yield Problem("model.failed", object=replica, params={"model": model, "node": node.name, "detail": detail})


def _find_lost_models(facts: Facts) -> Iterable[Problem]:
    for lost in facts.lost_models:
        replica = AlertObject("replica", f"{lost.node_id}/{lost.model}", f"{lost.model} on {lost.node_name}")
        params: dict[str, Param] = {"model": lost.model, "node": lost.node_name, "detail": lost.reason, "again": lost.again}
        code = "model.lost.kept" if lost.is_kept else ""
        yield Problem("model.lost", Severity.DOWN, replica, code=code, params=params, since=lost.back_at)


def _find_idle_nodes(facts: Facts) -> Iterable[Problem]:
    for node in _online(facts):
        if not node.model_names and not node.failed and not node.is_loading:
            yield _blame("node.empty", node, Severity.NOTICE)


def _find_forgotten_drains(facts: Facts) -> Iterable[Problem]:
    for node in facts.fleet.nodes:
        drained_s = (facts.now - node.drained_at).total_seconds() if node.drained_at is not None else 0.0
        if drained_s >= limits().console.problem_drained_s and not node.active_requests:
            yield _blame("node.drained", node, Severity.NOTICE, since=node.drained_at)


def _find_rivals(facts: Facts) -> Iterable[Problem]:
    for node in facts.fleet.nodes:
        if node.rival_seen_at is not None and facts.now - node.rival_seen_at < timedelta(seconds=limits().nodes.rival_shown_s):
            code = "node.duplicate.address" if node.rival_address else ""
            yield _blame("node.duplicate", node, code=code, since=node.rival_seen_at, address=node.rival_address)


def _find_ejections(facts: Facts) -> Iterable[Problem]:
    for node in _online(facts):
        if node.ejections:
            models = sorted({ejection.model for ejection in node.ejections if ejection.model})
            since = min(ejection.since for ejection in node.ejections)
            code = "node.ejected.models" if models else ""
            yield _blame(
                "node.ejected", node, code=code, since=since, models=models, detail=_start_sentence(node.ejections[0].text)
            )


def _find_alarms(facts: Facts) -> Iterable[Problem]:
    for node in facts.fleet.nodes:
        if node.witness_alarm:
            yield _blame("node.alarm", node, Severity.DOWN, detail=node.witness_alarm)
        if node.policy_error:
            yield _blame("node.policy_refused", node, detail=node.policy_error)


def _find_wrong_clocks(facts: Facts) -> Iterable[Problem]:
    for node in _online(facts):
        skew_ms = node.clock_skew_ms or 0
        if abs(skew_ms) > limits().nodes.clock_skew_warning_ms:
            is_beyond = abs(skew_ms) > limits().nodes.clock_skew_ms
            code = f"node.clock.{'behind' if skew_ms > 0 else 'ahead'}{'.refused' if is_beyond else ''}"
            severity = Severity.IMPAIRED if is_beyond else Severity.NOTICE
            yield _blame("node.clock", node, severity, code=code, off_s=round(abs(skew_ms) / 1000))


def _find_unable_nodes(facts: Facts) -> Iterable[Problem]:
    # Without a policy there is nothing to sign, so nothing that a node could not carry out.
    for node in _online(facts) if facts.slow.policy is not None else ():
        if node.op_level == "L2" and not node.policy_version:
            yield _blame("node.untrusting", node, Severity.NOTICE)
        elif not node.op_level and node.could_take_operations and not node.policy_error:
            yield _blame("node.no_operations", node, Severity.NOTICE)


def _find_expiring_policy(facts: Facts) -> Iterable[Problem]:
    policy = facts.slow.policy
    if policy is None or policy.expires_at - facts.now > timedelta(seconds=limits().console.problem_policy_s):
        return
    is_over = policy.expires_at <= facts.now
    severity, code = (Severity.DOWN, "policy.expiring.over") if is_over else (Severity.NOTICE, "")
    params: dict[str, Param] = {"version": policy.version, "ends_at": policy.expires_at.isoformat()}
    yield Problem("policy.expiring", severity, AlertObject("policy"), code=code, params=params)


def _find_expiring_keys(facts: Facts) -> Iterable[Problem]:
    for key in facts.slow.keys:
        of = AlertObject("key", str(key.key_id), key.name)
        yield Problem("key.expiring", Severity.NOTICE, of, params={"ends_at": key.expires_at.isoformat()})


def _find_expiring_authority(facts: Facts) -> Iterable[Problem]:
    ends_at = facts.slow.authority_ends_at
    if ends_at is not None and ends_at - facts.now <= timedelta(seconds=limits().console.problem_authority_s):
        is_over = ends_at <= facts.now
        severity, code = (Severity.DOWN, "certificate.expiring.over") if is_over else (Severity.IMPAIRED, "")
        params: dict[str, Param] = {"ends_at": ends_at.isoformat()}
        yield Problem("certificate.expiring", severity, AlertObject("certificate"), code=code, params=params)


def _find_used_budgets(facts: Facts) -> Iterable[Problem]:
    for one in facts.slow.budgets:
        of = AlertObject(one.owner_type, one.owner_id, one.owner_name)
        refuses = one.is_hard and one.percent >= 100
        code = "budget.used.refusing" if refuses else "budget.used.over" if one.percent >= 100 else ""
        severity = Severity.IMPAIRED if refuses else Severity.NOTICE
        params: dict[str, Param] = {"percent": one.percent, "budget": one.kind, "window": one.window}
        yield Problem(f"budget.{one.kind}", severity, of, code=code or "budget.used", params=params)


def _find_old_backup(facts: Facts) -> Iterable[Problem]:
    made_at = facts.slow.backup_at
    if made_at is not None and facts.now - made_at > timedelta(seconds=limits().console.backup_age_s):
        yield Problem("backup.old", params={"made_at": made_at.isoformat()}, since=made_at)


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
    _find_silent_valkey,
    _find_failing_webhooks,
    _find_wrong_clocks,
    _find_expiring_policy,
    _find_expiring_authority,
    _find_unable_nodes,
    _find_used_budgets,
    _find_idle_nodes,
    _find_forgotten_drains,
    _find_expiring_keys,
    _find_old_backup,
)


def _online(facts: Facts) -> Iterable[NodeHealth]:
    # Of a silent node nothing more can be said than that.
    return (node for node in facts.fleet.nodes if node.status is not NodeStatus.OFFLINE)


def _blame(
    kind: str,
    node: NodeHealth,
    severity: Severity = Severity.IMPAIRED,
    *,
    code: str = "",
    since: datetime | None = None,
    **params: Param,
) -> Problem:
    return Problem(kind, severity, AlertObject("node", str(node.id or node.name), node.name), code, params, since)


def _start_sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _of_model(model: str) -> AlertObject:
    return AlertObject("model", model, model)


def _explain(facts: Facts, model: str, wait: Wait) -> dict[str, Param]:
    said = {language: waits.get(model, wait) for language, waits in facts.explained.items()} or {settings.LANGUAGE_CODE: wait}
    return {
        "reason": {language: one.reason for language, one in said.items()},
        "advice": {language: one.advice for language, one in said.items()},
    }
