"""The page of a node: its head, and what each of its tabs shows. Reads only; whoever shows a tab asks for that tab alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.db.models import Count
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from core.charts import RANGES
from core.limits import limits
from governance.audit import list_events
from governance.operations.approvals import active_policy
from governance.operations.queries import RunOnNode, list_runs_of_node
from governance.states import RunState
from nodes.models import Node, ProviderState, Reach, clock_of, presence_of, with_clock
from nodes.operations.targets import print_memory
from nodes.services.availability import explain_unreachable, list_ejections
from nodes.services.charts import chart_gpus
from nodes.services.conditions import (
    NodeRequests,
    PowerAnswer,
    Standing,
    ask_power,
    print_moment,
    read_requests,
    read_standing,
)
from nodes.services.gpus import list_gpus
from nodes.services.logs import LogState, read_log
from nodes.services.telemetry import NodeTelemetry, describe_telemetry
from wire import COMMAND, RELEASE, clock
from wire.optoken.approval import policy_words

Context = dict[str, Any]
"""Of a template."""

TABS: dict[str, str | Promise] = {
    "overview": gettext_lazy("Overview"),
    "models": gettext_lazy("Models"),
    "requests": gettext_lazy("Requests"),
    "events": gettext_lazy("Events"),
    "logs": gettext_lazy("Log"),
    "trust": gettext_lazy("Trust"),
    "details": gettext_lazy("Details"),
}


@dataclass(frozen=True, slots=True)
class TabLink:
    name: str
    label: str
    url: str
    is_current: bool


def list_tabs(node: Node, current: str) -> list[TabLink]:
    """Return the tabs of a node's page; the first is the page itself."""
    page = reverse("admin:nodes_node_change", args=[node.pk])
    urls = {name: page if name == "overview" else reverse("admin:nodes_node_tab", args=[node.pk, name]) for name in TABS}
    return [TabLink(name, str(label), urls[name], name == current) for name, label in TABS.items()]


def propose(operation: str, target: str, **params: object) -> str:
    """Return the address of the page that proposes an operation, filled in."""
    return f"{reverse('approvals:propose')}?{urlencode({'operation': operation, 'target': target, **params})}"


# The head


@dataclass(frozen=True, slots=True)
class NodeHead:
    """What stands above every tab. ``runner_hint``: why its program should be renewed, empty = it should not."""

    standing: Standing
    telemetry: NodeTelemetry
    requests: NodeRequests
    power: PowerAnswer
    runner_hint: str


def read_head(node: Node, *, now: datetime) -> NodeHead:
    """Return the head of a node that was read with its presence and provider; at most four queries."""
    standing, requests = read_standing(node, now=now), read_requests(node.pk)
    return NodeHead(
        standing, describe_telemetry(node, now=now), requests, ask_power(node, standing, requests), hint_at_runner(node)
    )


def find_head(node_id: uuid.UUID) -> tuple[Node, NodeHead] | None:
    """Return a node and its head, for whoever has only its id; None when there is no such node."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).select_related("presence", "provider")
    node = with_clock(rows).filter(pk=node_id).first()
    return None if node is None else (node, read_head(node, now=clock_of(node)))


def hint_at_runner(node: Node) -> str:
    """Return why the program of a node should be renewed; empty where it is as new as this server, or is not ours."""
    if compare_release(node.agent_version) >= 0:
        return ""
    return _("Runner %(theirs)s is older than this server (%(own)s).") % {"theirs": node.agent_version, "own": RELEASE}


def count_runner_versions() -> list[tuple[str, int, int]]:
    """Return each version that nodes run with how many do, and how it compares to this server (-1 = older); one query."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).values_list("agent_version")
    counted = rows.annotate(nodes=Count("pk")).order_by("-nodes", "agent_version")
    return [(version, count, compare_release(version)) for version, count in counted]


def compare_release(version: str) -> int:
    """Return -1 for a release before this server's, 1 for a later one; 0 for the same, and for what is no release."""
    own, theirs = _read_version(RELEASE), _read_version(version)
    return 0 if own is None or theirs is None else (theirs > own) - (theirs < own)


def _read_version(text: str) -> tuple[int, ...] | None:
    parts = text.split(".")
    return tuple(map(int, parts)) if len(parts) == 3 and all(part.isdecimal() and len(part) < 9 for part in parts) else None


# What each tab shows


def read_tab(node: Node, name: str, *, span: str, before: str = "") -> Context:
    """Return what a tab shows, as variables of its template. ``span``: a name of ``RANGES``; ``before``: of older events."""
    return _TABS[name](node, span, before)


def _read_overview(node: Node, span: str, _before: str) -> Context:
    gpus = list(list_gpus(node_id=node.pk).order_by("index", "own_id"))
    charts = chart_gpus(gpus, span, now=clock_of(node)) if gpus else []
    return {"charts": charts, "gpu_rows": gpus, **_offer_ranges(span)}


def _offer_ranges(span: str) -> Context:
    return {"ranges": [(name, label) for name, (label, _span) in RANGES.items()], "range": span}


@dataclass(frozen=True, slots=True)
class LoadableModel:
    """A model that a node could load. ``fits``: yes, after or no, "" = nobody knows; ``reason``: with figures."""

    name: str
    engine: str
    estimate_mb: int | None
    estimate: str
    replicas: str
    limits: tuple[str, ...]
    fits: str
    reason: str
    load_url: str


def _read_models(node: Node, _span: str, _before: str) -> Context:
    telemetry = describe_telemetry(node, now=clock_of(node))
    facts = {str(one["name"]): one for one in telemetry.facts}
    loaded = {replica.model for replica in (*telemetry.loaded, *telemetry.changing)}
    names = dict.fromkeys([*(name for name in facts if name not in loaded), *telemetry.available])
    found = [_describe_loadable(node, telemetry, name, facts.get(name, {})) for name in names if name not in loaded]
    ours = [one for name, one in facts.items() if name in loaded]
    return {"loadable": found, "beyond": telemetry.available_beyond, "excluded": node.excluded_models, "loaded_facts": ours}


def _describe_loadable(node: Node, telemetry: NodeTelemetry, name: str, facts: Mapping[str, Any]) -> LoadableModel:
    estimate = facts.get("estimate_mb")
    fits, reason = _judge_fit(telemetry, estimate, is_on_cpu=facts.get("device") == "cpu")
    return LoadableModel(
        name=name,
        engine=str(facts.get("backend") or ""),
        estimate_mb=estimate,
        estimate=str(facts.get("estimate") or ""),
        replicas=str(facts.get("replicas") or ""),
        limits=tuple(facts.get("limits") or ()),
        fits=fits,
        reason=reason,
        load_url=propose("model-load", node.runner_id, modelId=name) if node.runner_id and node.op_level else "",
    )


def _judge_fit(telemetry: NodeTelemetry, estimate_mb: int | None, *, is_on_cpu: bool) -> tuple[str, str]:
    memory = telemetry.memory
    if memory is None or estimate_mb is None or (is_on_cpu and memory.kind == "gpu"):
        return "", _("Nobody has measured it here.")
    free = memory.total_mb - memory.used_mb
    values = {"needs": print_memory(estimate_mb), "free": print_memory(free), "total": print_memory(memory.total_mb)}
    if estimate_mb <= free:
        return "yes", _("It needs %(needs)s; %(free)s are free.") % values
    if estimate_mb <= memory.total_mb:
        return "after", _("It needs %(needs)s; %(free)s of %(total)s are free. Unload another model first.") % values
    return "no", _("It needs %(needs)s; the node has %(total)s in all.") % values


def _read_requests(node: Node, span: str, _before: str) -> Context:
    return {"served": read_requests(node.pk, span=span), **_offer_ranges(span)}


# Events

_SAID: dict[str, str | Promise] = {
    "node.connect": gettext_lazy("Connected over %(protocol)s"),
    "node.disconnect": gettext_lazy("Disconnected: %(reason)s"),
    "node.online": gettext_lazy("Answers again"),
    "node.offline": gettext_lazy("Lost: nothing was heard of it any more"),
    "node.register": gettext_lazy("Registered"),
    "node.cordon": gettext_lazy("Cordoned"),
    "node.uncordon": gettext_lazy("Uncordoned"),
    "node.drain": gettext_lazy("Drain began"),
    "node.undrain": gettext_lazy("Drain ended by an operator"),
    "node.drain_end": gettext_lazy("Drain ended: the node is gone"),
    "node.drained": gettext_lazy("Drained: safe to power off"),
    "node.set_mode": gettext_lazy("Lending: %(mode)s"),
    "node.ejected": gettext_lazy("Gets no requests for %(model)s: %(reason)s"),
    "node.rival_refused": gettext_lazy("Another node wanted its name and was refused"),
    "node.read_log": gettext_lazy("Its log was read"),
    "node.op_key_new": gettext_lazy("It brought a new key for operations"),
    "node.key_changed": gettext_lazy("It has another key, and so another name in statements: %(runner_id)s"),
    "node.went_back": gettext_lazy("It holds an older policy or ledger than before"),
    "node.clock_skew": gettext_lazy("Its clock is off by %(skew_ms)s ms"),
    "node.governance_refused": gettext_lazy("What it said of how it decides was refused: %(reason)s"),
    "node.witness_alarm": gettext_lazy("It raised the alarm: the audit log contradicts what it saw"),
    "node.refresh": gettext_lazy("Registered again"),
    "node.remove": gettext_lazy("Removed"),
    "node.set_op_key": gettext_lazy("Operation key set"),
    "node.set_api_key": gettext_lazy("API key set"),
    "node.reload_failed": gettext_lazy("A kept model could not be loaded again"),
    "operation.receipt_invalid": gettext_lazy("It sent a receipt that does not hold: %(reason)s"),
}
"""What stands in the audit log of a node, as a sentence; the values are of its detail."""
_BAD = frozenset(
    {
        *("node.offline", "node.ejected", "node.rival_refused", "node.reload_failed", "operation.receipt_invalid"),
        *("node.key_changed", "node.went_back", "node.clock_skew", "node.governance_refused", "node.witness_alarm"),
    }
)
_OPERATIONS: dict[str, str | Promise] = {
    "model-load": gettext_lazy("Load %(model)s"),
    "model-unload": gettext_lazy("Unload %(model)s"),
    "cache-flush": gettext_lazy("Flush of the cache of %(model)s"),
    "settings-reload": gettext_lazy("Reload of settings"),
    "node-drain": gettext_lazy("Forced drain"),
    "node-evict": gettext_lazy("Eviction"),
}
_ENDS: dict[RunState, str | Promise] = {
    RunState.SUCCEEDED: gettext_lazy("done"),
    RunState.FAILED: gettext_lazy("failed"),
    RunState.SKIPPED: gettext_lazy("left out"),
    RunState.UNKNOWN: gettext_lazy("nobody knows how it ended"),
    RunState.RESOLVED: gettext_lazy("cut off"),
}


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """One line of what happened to a node. ``url``: where more is said of it, empty = nowhere; ``mark``: good, bad or empty."""

    at: datetime
    text: str
    actor: str
    url: str = ""
    mark: str = ""
    detail: str = ""


def _read_events(node: Node, _span: str, before: str) -> Context:
    most = limits().nodes.page_events
    until = _read_moment(before)
    events = list_events(targets=(node.printed_id, node.runner_id), before=until, most=most)
    runs = list_runs_of_node(node.pk, before=until, most=most)
    merged = sorted([*map(_tell_event, events), *map(_tell_run, runs)], key=lambda one: one.at, reverse=True)[:most]
    is_more = len(events) + len(runs) > len(merged) or len(merged) == most
    older = f"?{urlencode({'before': merged[-1].at.isoformat()})}" if merged and is_more else ""
    return {"events": merged, "older": older, "is_newest": until is None}


def _read_moment(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def _tell_event(event: Any) -> NodeEvent:  # Any: a row of governance, which keeps its tables to itself
    said = _SAID.get(event.action)
    detail = {name: str(value) for name, value in event.detail.items()} if isinstance(event.detail, dict) else {}
    try:
        text = event.action if said is None else str(said) % detail
    except KeyError:  # an earlier release wrote less
        text = event.action
    url = reverse("admin:governance_auditevent_change", args=[event.pk])
    more = [detail[name] for name in ("reason",) if detail.get(name) and detail[name] not in text]
    mark = "bad" if event.action in _BAD else "good" if event.action in ("node.connect", "node.drained") else ""
    return NodeEvent(event.at, text, _name(event.actor), url, mark, " ".join(more))


def _tell_run(run: RunOnNode) -> NodeEvent:
    title = str(_OPERATIONS.get(run.operation, run.operation)) % {"model": run.model}
    if run.ended_at is None:
        text = _("%(title)s: under way") % {"title": title}
    else:
        text = _("%(title)s: %(end)s") % {"title": title, "end": _ENDS.get(run.state, run.state)}
    mark = "good" if run.state is RunState.SUCCEEDED else "bad" if run.ended_at is not None else ""
    url = reverse("approvals:operation", args=[run.op_id])
    return NodeEvent(run.queued_at, text, _name(run.started_by), url, mark, run.message)


def _name(actor: str) -> str:
    kind, _colon, name = actor.partition(":")
    return {"user": name, "token": _("token %(name)s") % {"name": name}, "node": _("the node")}.get(kind, _("Muster"))


# Log, trust and details


def _read_logs(node: Node, _span: str, _before: str) -> Context:
    view = read_log(node)
    lines = [
        {"at": datetime.fromtimestamp(line.at_ms / 1000, UTC), "level": line.level, "text": line.text} for line in view.lines
    ]
    return {"log": view, "log_lines": lines, "is_asked": view.state is LogState.ASKED}


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of a list of facts. ``hint``: what to do about it; ``is_bad``: it needs somebody."""

    label: str
    value: str
    hint: str = ""
    is_bad: bool = False
    url: str = ""


LEVELS: dict[str, str | Promise] = {
    "L2": gettext_lazy("L2: the node itself verifies what people approved"),
    "L1": gettext_lazy("L1: the node checks a key of its own"),
    "L0": gettext_lazy("L0: the node checks a shared key"),
}


def _read_trust(node: Node, _span: str, _before: str) -> Context:
    return {"facts": [fact for fact in _list_trust(node) if fact.value or fact.hint]}


def _list_trust(node: Node) -> Iterable[Fact]:
    yield Fact(_("Approval"), str(LEVELS.get(node.op_level, "")) or _("It takes no operations from here."))
    found = active_policy()
    newest = found[0].version if found is not None else 0
    if node.op_level == "L2":
        yield _describe_policy(node, newest)
        if node.policy_version and node.policy_sha256:
            yield Fact(_("Twelve words of that policy"), policy_words(node.policy_sha256), url=reverse("approvals:policy"))
    if node.policy_error:
        yield Fact(_("Refused policy"), node.policy_error, is_bad=True)
    if node.clock_skew_ms is not None:
        yield _describe_clock(node.clock_skew_ms)
    if node.op_level == "L2":
        size = node.witness_size
        text = ngettext("%(count)d audit entry seen", "%(count)d audit entries seen", size) % {"count": size}
        yield Fact(_("Witness of the audit log"), text if size else _("It has seen no checkpoint yet."))
    if node.witness_alarm:
        hint = _("The log that it was shown contradicts what it saw before. Find out who changed it.")
        yield Fact(_("Alarm"), node.witness_alarm, hint, is_bad=True)
    yield Fact(_("Name in signed statements"), node.runner_id)


def _describe_policy(node: Node, newest: int) -> Fact:
    label = _("Policy")
    if not node.policy_version:
        hint = _("Run %(muster)s trust with the twelve words of the page Policy on the node.") % {"muster": COMMAND}
        return Fact(label, _("This node trusts no policy yet."), hint, is_bad=newest > 0, url=reverse("approvals:policy"))
    values = {"version": node.policy_version, "newest": newest}
    if not newest:
        return Fact(label, _("Version %(version)d is pinned; none is in force here.") % values)
    if node.policy_version < newest:
        text = _("Version %(version)d is pinned; version %(newest)d is in force and offered to it.") % values
        return Fact(label, text, is_bad=True)
    if node.policy_version > newest:
        return Fact(
            label, _("Version %(version)d is pinned; here an older one is in force (%(newest)d).") % values, is_bad=True
        )
    return Fact(label, _("Version %(version)d is pinned, which is in force.") % values)


def _describe_clock(skew_ms: int) -> Fact:
    seconds = {"seconds": f"{abs(skew_ms) / 1000:.1f}"}
    text = (_("%(seconds)s s behind") if skew_ms > 0 else _("%(seconds)s s ahead")) % seconds
    bounds = limits().nodes
    if abs(skew_ms) > bounds.clock_skew_ms:
        return Fact(_("Clock"), text, _("No operation is sent to it: set its clock."), is_bad=True)
    is_off = abs(skew_ms) > bounds.clock_skew_warning_ms
    return Fact(_("Clock"), text, _("Set its clock.") if is_off else "", is_bad=is_off)


def _read_details(node: Node, _span: str, _before: str) -> Context:
    return {"facts": [fact for fact in _list_details(node) if fact.value]}


def _list_details(node: Node) -> Iterable[Fact]:
    presence = presence_of(node)
    yield Fact(_("Node ID"), node.printed_id)
    yield Fact(_("Owner"), node.owner_name)
    yield Fact(_("Provider"), node.provider.name, url=reverse("admin:nodes_provider_change", args=[node.provider_id]))
    if node.credential is not None:
        url = reverse("admin:nodes_nodecredential_change", args=[node.credential_id])
        hint = _("It was revoked: the node cannot come back with it.") if node.credential.revoked_at else ""
        yield Fact(_("Credential"), node.credential.name, hint, is_bad=bool(hint), url=url)
    is_dialling = node.reach == Reach.RELAY.value
    yield Fact(_("Connection"), _("outbound: the node dials in") if is_dialling else _("inbound: called over HTTP"))
    if presence.connected:
        values = {"protocol": presence.protocol or "?", "address": presence.peer_address or "?"}
        yield Fact(_("Connected"), _("%(protocol)s from %(address)s") % values)
    if not is_dialling:
        why = explain_unreachable(node)
        yield Fact(_("Address"), node.public_base_url, why, is_bad=bool(why))
    yield Fact(_("Runner"), node.agent_version, hint_at_runner(node))
    yield Fact(_("Slots"), str(node.max_concurrent))
    if node.ticket_url:
        why = node.ticket_error and _("No client is sent there: the URL %(why)s.") % {"why": node.ticket_error}
        yield Fact(_("Clients with a ticket"), node.ticket_url, why, is_bad=bool(why))
    yield Fact(_("Address for replicas over several nodes"), node.cluster_address)
    yield Fact(_("Lending"), _("on") if node.mode == "spare_on" else _("reclaimed by its owner"))
    if node.draining:
        by = _name(node.drain_actor) if node.drain_actor else ""
        yield Fact(
            _("Drain"), _("since %(moment)s") % {"moment": print_moment(node.draining_since)}, f"{node.drain_reason} {by}"
        )
    yield Fact(_("Last error"), presence.last_error, is_bad=True)
    for one in list_ejections(presence, now=clock_of(node)):
        yield Fact(_("Ejected by gateways"), f"{one.model}: {one.text}" if one.model else one.text, is_bad=True)
    if (rival := _describe_rival(node)) is not None:
        yield rival
    yield Fact(_("First connected"), print_moment(node.created_at))


def _describe_rival(node: Node) -> Fact | None:
    shown_s = limits().nodes.rival_shown_s
    if node.rival_seen_at is None or (clock.now() - node.rival_seen_at).total_seconds() >= shown_s:
        return None
    values = {"moment": print_moment(node.rival_seen_at), "address": node.rival_address or "?"}
    text = _("Another node from %(address)s was refused on %(moment)s.") % values
    return Fact(_("Duplicate node"), text, _("Give it another name or a credential of its own."), is_bad=True)


_TABS: dict[str, Callable[[Node, str, str], Context]] = {
    "overview": _read_overview,
    "models": _read_models,
    "requests": _read_requests,
    "events": _read_events,
    "logs": _read_logs,
    "trust": _read_trust,
    "details": _read_details,
}
