"""Conditions of nodes: how each stands, in words that an operator acts on, and whether it may be powered off. Reads only."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

from django.conf import settings
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet, Value
from django.db.models.functions import Coalesce, Now
from django.utils.formats import date_format
from django.utils.functional import Promise
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from core.charts import Chart
from core.limits import limits
from governance.operations.queries import RunOnNode, list_open_runs
from nodes.models import Node, ProviderState, Reach, presence_of
from nodes.reports import read_replicas
from nodes.services.availability import explain_unreachable, find_unreachable_reason, read_facts
from nodes.states import Freshness, NodeFacts, judge_availability
from wire.bridge import BRIDGE_V1, ReplicaInfo
from wire.contract import NodeMode, NodeStatus


class Condition(StrEnum):
    """How a node stands; the first that holds."""

    OFFLINE = "offline"
    FAILING = "failing"
    DRAINED = "drained"
    DRAINING = "draining"
    RECLAIMED = "reclaimed"
    CORDONED = "cordoned"
    HELD_BACK = "held-back"
    LATE = "late"
    LOADING = "loading"
    BUSY = "busy"
    READY = "ready"


WORDS: dict[Condition, str | Promise] = {
    Condition.READY: gettext_lazy("ready"),
    Condition.BUSY: gettext_lazy("busy"),
    Condition.LOADING: gettext_lazy("loading"),
    Condition.LATE: gettext_lazy("late"),
    Condition.CORDONED: gettext_lazy("cordoned"),
    Condition.DRAINING: gettext_lazy("draining"),
    Condition.DRAINED: gettext_lazy("drained"),
    Condition.RECLAIMED: gettext_lazy("reclaimed"),
    Condition.HELD_BACK: gettext_lazy("held back"),
    Condition.FAILING: gettext_lazy("failing"),
    Condition.OFFLINE: gettext_lazy("offline"),
}
"""In the order in which a list offers them."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How a node stands at the moment it was read. ``label``: a word or two; ``text``: the rest of the sentence."""

    condition: Condition
    label: str
    text: str
    since: datetime | None = None


def read_standing(node: Node, *, now: datetime) -> Standing:
    """Return how a node stands; nothing is asked of the database. ``node`` with its presence and provider."""
    condition, presence = judge_condition(node, now=now), presence_of(node)
    label = str(WORDS[condition])
    if condition is Condition.DRAINING:
        left = presence.active_requests
        label = ngettext("draining, %(count)d left", "draining, %(count)d left", left) % {"count": left}
    since = {
        Condition.OFFLINE: presence.last_heartbeat_at,
        Condition.DRAINED: node.drained_at,
        Condition.DRAINING: node.draining_since,
        Condition.RECLAIMED: node.draining_since,
    }.get(condition)
    return Standing(condition, label, _explain(node, condition), since)


_PLAIN: dict[Condition, str | Promise] = {
    Condition.RECLAIMED: gettext_lazy("Its owner took it back: it gets no new work."),
    Condition.CORDONED: gettext_lazy("It gets no new work; what runs goes on."),
    Condition.HELD_BACK: gettext_lazy("It says itself that it takes no work, or its provider is switched off."),
    Condition.LATE: gettext_lazy("Its heartbeat is overdue: it gets no new work until the next one."),
}


def _explain(node: Node, condition: Condition) -> str:
    presence, slots = presence_of(node), node.max_concurrent
    match condition:
        case Condition.OFFLINE:
            return _explain_absence(node)
        case Condition.FAILING:
            return presence.last_error or _("It reports an error.")
        case Condition.DRAINED:
            return explain_drained(node)
        case Condition.DRAINING if node.drain_deadline_at is not None:
            return _("What still runs at %(moment)s is interrupted.") % {"moment": print_moment(node.drain_deadline_at)}
        case Condition.LOADING:
            return describe_loading(read_replicas(presence.replicas))
        case Condition.BUSY:
            return ngettext("Its %(slots)d slot is in use.", "All %(slots)d slots are in use.", slots) % {"slots": slots}
        case Condition.READY:
            free = max(0, slots - presence.active_requests)
            return _("%(free)d of %(slots)d slots are free.") % {"free": free, "slots": slots}
    return str(_PLAIN.get(condition, ""))


def _explain_absence(node: Node) -> str:
    presence = presence_of(node)
    if presence.last_heartbeat_at is None:
        return _("It was never heard.")
    why = explain_unreachable(node) if node.reach == Reach.DIRECT.value else ""
    if why and presence.reported_status != NodeStatus.OFFLINE.value:
        return _("No gateway reaches it: %(why)s.") % {"why": why}
    return _("since %(moment)s") % {"moment": print_moment(presence.last_heartbeat_at)}


def judge_condition(node: Node, *, now: datetime) -> Condition:
    """Return the word alone; ``node`` with its presence and provider."""
    presence = presence_of(node)
    is_enabled = node.provider.state == ProviderState.ENABLED
    return _judge(
        read_facts(node, now=now, is_enabled=is_enabled),
        is_loading=not node.model_names and any(one.state == "loading" for one in read_replicas(presence.replicas)),
        is_full=presence.active_requests >= node.max_concurrent,
    )


def _judge(facts: NodeFacts, *, is_loading: bool, is_full: bool) -> Condition:
    availability = judge_availability(facts, limits().nodes)
    is_reclaimed = facts.mode is NodeMode.SPARE_OFF
    held = {
        Condition.OFFLINE: availability.status is NodeStatus.OFFLINE,
        Condition.FAILING: availability.status is NodeStatus.ERROR,
        Condition.DRAINED: (facts.draining or is_reclaimed) and facts.is_drained,
        Condition.DRAINING: facts.draining,
        Condition.RECLAIMED: is_reclaimed,
        Condition.CORDONED: facts.cordoned,
        Condition.HELD_BACK: availability.status is NodeStatus.DRAINING or not facts.is_enabled,
        Condition.LATE: availability.freshness is not Freshness.FRESH,
        Condition.LOADING: is_loading,
        Condition.BUSY: is_full or availability.status is NodeStatus.BUSY,
    }
    return next((condition for condition, holds in held.items() if holds), Condition.READY)


def explain_drained(node: Node) -> str:
    """Return what is known of a drained node, with what it cannot tell."""
    moment = {"moment": print_moment(node.drained_at)}
    if presence_of(node).protocol == BRIDGE_V1:
        return _("No gateway runs a request there since %(moment)s; this program does not say what else it does.") % moment
    if node.drain_interrupted:
        return ngettext(
            "safe to power off since %(moment)s; %(count)d request was interrupted",
            "safe to power off since %(moment)s; %(count)d requests were interrupted",
            node.drain_interrupted,
        ) % {**moment, "count": node.drain_interrupted}
    return _("safe to power off since %(moment)s") % moment


def describe_loading(replicas: Sequence[ReplicaInfo]) -> str:
    """Return which models a node loads, and how far it is."""
    found = []
    for replica in replicas:
        if replica.state == "loading":
            percent = "" if replica.percent is None else f" {replica.percent} %"
            found.append(f"{replica.model}{percent}")
    return ", ".join(found)


def print_moment(moment: datetime | None) -> str:
    """Return a moment as sentences have it, in UTC."""
    return _("%(moment)s UTC") % {"moment": date_format(moment, "DATETIME_FORMAT")} if moment is not None else "–"


# What all nodes are

_COLUMNS = (
    *("mode", "cordoned", "draining", "drained_at", "reach", "public_base_url", "max_concurrent", "presence__connected"),
    *("presence__last_heartbeat_at", "presence__protocol", "presence__reported_status", "presence__is_accepting_jobs"),
    *("presence__active_requests", "presence__probed_at", "presence__probe_error", "presence__updated_at"),
)
_LOADING = Q(model_names=[], presence__replicas__contains=[{"state": "loading"}])


def judge_nodes(nodes: QuerySet[Node]) -> dict[uuid.UUID, Condition]:
    """Return the condition of each node; one query.

    Rows are read as values: a thousand nodes as objects of Django would take a page half its time.
    """
    is_loading = Coalesce(ExpressionWrapper(_LOADING, output_field=BooleanField()), Value(value=False))
    rows = nodes.order_by().values_list("pk", "provider__state", is_loading, Now(), *_COLUMNS)
    return {pk: _judge_row(state, said, is_loading=is_loading, now=now) for pk, state, is_loading, now, *said in rows}


def _judge_row(state: str, said: Sequence[Any], *, is_loading: bool, now: datetime) -> Condition:  # Any: columns
    mode, cordoned, draining, drained_at, reach, url, slots, connected = said[:8]
    heard_at, protocol, reported, accepts, active, probed_at, probe_error, written_at = said[8:]
    running = active or 0  # of a node whose presence nobody has written yet all of this is None
    facts = NodeFacts(
        age_s=None if heard_at is None else max(0.0, (now - heard_at).total_seconds()),
        protocol=protocol or "",
        reported=NodeStatus(reported or NodeStatus.OFFLINE),
        mode=NodeMode(mode),
        draining=draining,
        cordoned=cordoned,
        is_accepting_jobs=accepts is not False,
        unreachable=find_unreachable_reason(connected, url if reach == Reach.DIRECT.value else "", probed_at, probe_error),
        is_enabled=state == ProviderState.ENABLED,
        is_drained=drained_at is not None and running == 0,
        silence_before_s=0.0 if heard_at is None else (written_at - heard_at).total_seconds(),
    )
    return _judge(facts, is_loading=is_loading, is_full=running >= slots)


# May it be powered off?


@dataclass(frozen=True, slots=True)
class RunningRequests:
    """Requests that run on a node now, for one model. ``oldest_s``: for how long the first of them has run."""

    model: str
    count: int
    tenants: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A request that a node served, for a list. ``state``: as its record says."""

    printed_id: str
    url: str
    at: datetime
    model: str
    tenant: str
    state: str
    error_code: str
    latency_ms: int | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class NodeRequests:
    """Requests of a node: those that run, and, where they were asked for, the newest and their sums over time."""

    running: tuple[RunningRequests, ...]
    list_url: str
    recent: tuple[RecentRequest, ...] = ()
    charts: tuple[Chart, ...] = ()

    @property
    def count(self) -> int:
        return sum(one.count for one in self.running)


def read_requests(node_id: uuid.UUID, *, span: str = "") -> NodeRequests:
    """Return the requests of a node; ``span``: a name of ``core.charts.RANGES``, "" = only those that run."""
    found: NodeRequests = import_string(settings.NODE_REQUESTS)(node_id, span)  # it lives above this app
    return found


@dataclass(frozen=True, slots=True)
class PowerAnswer:
    """Whether a node may be powered off now. ``losses``: what would be lost, each a sentence; ``needs_drain``: what helps."""

    may: bool
    text: str
    losses: tuple[str, ...] = ()
    needs_drain: bool = False
    runs: tuple[RunOnNode, ...] = field(default=())


def ask_power(node: Node, standing: Standing, requests: NodeRequests) -> PowerAnswer:
    """Return whether a node may be powered off, and if not why; two queries. ``standing``: as it was read with the node."""
    runs = tuple(list_open_runs(node.pk))
    # The node counts what runs on its own port, too; the records know more of what came through a gateway.
    running = max(presence_of(node).active_requests, requests.count)
    losses = tuple(_list_losses(node, requests, running, runs))
    match standing.condition:
        case Condition.OFFLINE:
            return PowerAnswer(True, _("Yes. Nothing runs on it for Muster: it is offline."), losses, runs=runs)
        case Condition.DRAINED if not runs:
            return PowerAnswer(True, _("Yes. It gets no new work, and nothing runs on it."), losses)
        case _ if runs:
            return PowerAnswer(False, _("No. An approved operation is under way on it."), losses, runs=runs)
        case _ if running:
            text = ngettext("No. %(count)d request runs on it.", "No. %(count)d requests run on it.", running)
            return PowerAnswer(False, text % {"count": running}, losses, not node.draining)
    if node.draining:
        return PowerAnswer(False, _("Not yet. Nothing runs on it; its gateways are about to confirm that."), losses)
    return PowerAnswer(False, _("Not yet. Nothing runs on it now, and a request may come at any moment."), losses, True)


def _list_losses(node: Node, requests: NodeRequests, running: int, runs: Collection[RunOnNode]) -> list[str]:
    found = []
    for one in requests.running:
        text = ngettext(
            "%(count)d request for %(model)s would end with an error; it runs for %(seconds)d s.",
            "%(count)d requests for %(model)s would end with an error; the oldest runs for %(seconds)d s.",
            one.count,
        )
        found.append(text % {"count": one.count, "model": one.model, "seconds": one.oldest_s})
    if (own := running - requests.count) > 0:
        text = ngettext(
            "%(count)d request on the node's own port would end.", "%(count)d requests on the node's own port would end.", own
        )
        found.append(text % {"count": own})
    found += [_("The operation %(name)s would be cut off.") % {"name": f"{run.operation} {run.model}".strip()} for run in runs]
    loaded = [one for one in read_replicas(presence_of(node).replicas) if one.state == "loaded"]
    if alone := _list_alone(node, {one.model for one in loaded}):
        found.append(_("No other node serves %(models)s: clients get 503 meanwhile.") % {"models": ", ".join(alone)})
    if gone := sorted({one.model for one in loaded if not one.kept and node.op_level}):
        text = _("Not loaded again by itself after a restart, unless the node's settings load it: %(models)s.")
        found.append(text % {"models": ", ".join(gone)})
    if spanning := sorted({one.model for one in loaded if one.members}):
        found.append(_("Served together with other nodes, and ends there too: %(models)s.") % {"models": ", ".join(spanning)})
    return found


def _list_alone(node: Node, models: Collection[str]) -> list[str]:
    """Return which of the models no other node answers for now; two queries where there are any."""
    if not models:
        return []
    others = Node.objects.exclude(pk=node.pk).filter(model_names__overlap=sorted(models))
    conditions, names = judge_nodes(others), dict(others.values_list("pk", "model_names"))
    serving = {pk for pk, condition in conditions.items() if condition in (Condition.READY, Condition.BUSY, Condition.LOADING)}
    served = {name for pk, own in names.items() if pk in serving for name in own}
    return sorted(set(models) - served)
