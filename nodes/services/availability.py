"""Availability: whether a node or a model may get work now, and if not why, from rows. Reads only, but for ejections."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from types import SimpleNamespace
from typing import Any

from django.db import transaction
from django.db.models import BooleanField, Case, F, Q, QuerySet, When
from django.db.models.functions import Greatest, Now
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.notices import notify_of_event
from governance.operations.approvals import active_policy
from nodes.errors import BadRequest, NodeNotFound
from nodes.models import (
    Node,
    NodePresence,
    ProviderState,
    Reach,
    clock_of,
    heartbeat_age_s,
    presence_of,
    read_clock,
    silence_before_s,
    with_clock,
)
from nodes.reports import read_replicas
from nodes.services.telemetry import count_replicas, describe_counts, list_failures
from nodes.states import Availability, Freshness, Health, NodeFacts, Unavailable, freshness_windows, judge_availability
from wire import COMMAND
from wire.agent import METALYARD
from wire.bridge import BRIDGE_V1, MUSTER_V1
from wire.contract import NodeMode, NodeStatus
from wire.ids import parse_id


def read_availability(node: Node, *, now: datetime, is_enabled: bool = True) -> Availability:
    """Return whether a node may get new work at ``now``, whenever it last spoke. ``is_enabled``: whether its provider is."""
    return judge_availability(read_facts(node, now=now, is_enabled=is_enabled), limits().nodes)


def read_facts(node: Node, *, now: datetime, is_enabled: bool) -> NodeFacts:
    presence = presence_of(node)
    return NodeFacts(
        age_s=heartbeat_age_s(presence, now=now),
        protocol=presence.protocol,
        reported=NodeStatus(presence.reported_status),
        mode=NodeMode(node.mode),
        draining=node.draining,
        cordoned=node.cordoned,
        is_accepting_jobs=presence.is_accepting_jobs,
        unreachable=explain_unreachable(node),
        is_enabled=is_enabled,
        is_drained=is_drained(node),
        silence_before_s=silence_before_s(presence),
    )


_JUDGED = (
    *("pk", "name", "mode", "cordoned", "draining", "drained_at", "reach", "public_base_url", "provider__state"),
    *("presence__connected", "presence__last_heartbeat_at", "presence__reported_status", "presence__is_accepting_jobs"),
    *("presence__active_requests", "presence__protocol", "presence__probed_at", "presence__probe_error"),
    "presence__updated_at",
)


def iterate_rows(nodes: QuerySet[Node], *columns: str) -> Iterator[Any]:  # Any: it has what is read of a Node and its presence
    """Yield nodes with these columns and those that ``read_availability`` looks at, and no more; one query.

    A page of a fleet looks at 1,000 nodes: as model instances, which hold all columns, they take most of its time. A column of
    the presence, ``presence__replicas`` say, is an attribute ``replicas``, and the row stands for both.
    """
    for row in with_clock(nodes).values(*_JUDGED, *columns, "database_now"):
        node = SimpleNamespace(**{name.removeprefix("presence__"): value for name, value in row.items()})
        node.presence = node if node.updated_at is not None else None
        yield node


def judge_status(node: Node, *, now: datetime) -> NodeStatus:
    return read_availability(node, now=now).status


def is_drained(node: Node) -> bool:
    """Whether nothing runs on a node that is draining or was reclaimed."""
    return node.drained_at is not None and presence_of(node).active_requests == 0


def explain_unreachable(node: Node) -> str:
    """Return why no gateway can send the node a request, however often it is heard; empty when one can."""
    presence: NodePresence | None = getattr(node, "presence", None)
    url = node.public_base_url if node.reach == Reach.DIRECT.value else ""
    if presence is None:
        return find_unreachable_reason(None, url, None, "")
    return find_unreachable_reason(presence.connected, url, presence.probed_at, presence.probe_error)


def find_unreachable_reason(connected: bool | None, url: str, probed_at: datetime | None, probe_error: str) -> str:
    """Return the same of a row's columns. ``connected``: whether a gateway holds its socket, None = it was never heard;
    ``url``: where it is called, empty = nowhere.
    """
    if connected is None:
        return "it has never been heard"
    if connected:
        return ""
    if not url:
        return "it holds no socket to a gateway and registered no public_base_url"
    return probe_error if probed_at is not None else "its public_base_url has not been called yet"


def should_drain(node: Node) -> bool:
    """Return whether the server wants no new work on the node. ``node.provider`` must be loaded."""
    is_held_back = node.cordoned or node.draining or node.mode == NodeMode.SPARE_OFF.value
    return is_held_back or node.provider.state != ProviderState.ENABLED


_REASONS = {
    "failed": "it failed requests that other nodes answered",
    "slow": "it answers much more slowly than other nodes",
    "wrong": "it answered the canary question wrongly",
    "unsteady": "it reconnected ten times within a minute",
}


@dataclass(frozen=True, slots=True)
class EjectionReport:
    """What a gateway holds against a node; an empty model = every model. ``left_s``: how long yet, negative = it is tried.

    ``is_news``: operators are to be told. ``is_held`` False: it goes on getting requests, for half of the others are ejected.
    """

    node_id: uuid.UUID
    model: str
    reason: str
    age_s: float
    left_s: float
    is_news: bool
    is_held: bool = True


@dataclass(frozen=True, slots=True)
class ShownEjection:
    """An ejection as pages show it; ``text`` leaves the model out. ``model`` empty = every model."""

    model: str
    reason: str
    since: datetime
    until: datetime
    text: str


def write_ejections(reports: Sequence[EjectionReport], *, gateway_id: uuid.UUID) -> None:
    """Write all that a gateway holds against nodes, in place of what it wrote before; what is new goes to the audit log."""
    with transaction.atomic():
        now, key = read_clock(), gateway_id.hex
        held: dict[uuid.UUID, list[dict[str, object]]] = {}
        for one in reports:
            since, until = now - timedelta(seconds=one.age_s), now + timedelta(seconds=one.left_s)
            told: dict[str, object] = {"model": one.model, "reason": one.reason}
            told |= {"since": since.isoformat(), "until": until.isoformat()}
            held.setdefault(one.node_id, []).append(told if one.is_held else {**told, "is_held": False})
        # In one order: other gateways write their parts of the same rows at the same time.
        rows = NodePresence.objects.select_for_update(of=("self",)).select_related("node").order_by("pk")
        for presence in rows.filter(Q(pk__in=list(held)) | Q(ejections__has_key=key)):
            others = {gateway: entries for gateway, entries in presence.ejections.items() if gateway != key}
            entries = held.get(presence.pk)
            presence.ejections = {
                **{gateway: kept for gateway, told in others.items() if (kept := [e for e in told if _is_shown(e, now)])},
                **({key: entries} if entries else {}),
            }
            presence.save(update_fields=["ejections"])
            publish_hint("nodes", str(presence.pk))
            for one in reports:
                if one.node_id == presence.pk and one.is_news:
                    _tell(presence, one)


def list_ejections(presence: NodePresence, *, now: datetime) -> list[ShownEjection]:
    """Return for which models gateways send a node nothing new at the moment, and why; one line a model and reason."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for told in presence.ejections.values():
        for entry in told:
            key = (entry["model"], entry["reason"])
            if _is_shown(entry, now) and (key not in found or found[key]["until"] < entry["until"]):
                found[key] = entry
    return [_show(entry, now) for _key, entry in sorted(found.items())]


def _is_shown(entry: dict[str, str], now: datetime) -> bool:
    return datetime.fromisoformat(entry["until"]) > now - timedelta(seconds=limits().nodes.ejection_shown_s)


def _show(entry: dict[str, str], now: datetime) -> ShownEjection:
    since, until = datetime.fromisoformat(entry["since"]), datetime.fromisoformat(entry["until"])
    if not entry.get("is_held", True):
        when = "it gets requests all the same, because half of the model's nodes are ejected"
    elif until <= now:
        when = "one request at a time tries it"
    else:
        when = f"no new requests until {until:%H:%M:%S} UTC"
    reason = _REASONS.get(entry["reason"], entry["reason"])
    return ShownEjection(entry["model"], entry["reason"], since, until, f"{reason}; {when}")


def _tell(presence: NodePresence, report: EjectionReport) -> None:
    node = presence.node
    detail = {"name": node.name, "model": report.model, "reason": _REASONS.get(report.reason, report.reason)}
    event = record_event(actor="system:gateway", action="node.ejected", target=node.printed_id, detail=detail)
    notify_of_event(event, "ejected", usernames=())


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """One node as the first page sees it. ``age_s`` and ``heard_at`` are None for a node that was never heard.

    ``models`` says how many it has loaded and is loading; empty when it does not say. ``failed``: model and reason of each
    replica that failed. ``could_take_operations``: it is a runner of ours that dials in, so only its start keeps it from them.
    """

    name: str
    status: NodeStatus
    freshness: Freshness
    age_s: float | None
    active_requests: int
    max_concurrent: int
    models: str
    last_error: str
    id: uuid.UUID | None = None
    heard_at: datetime | None = None
    is_enabled: bool = True
    """Whether its provider is switched on."""
    model_names: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = ()
    is_loading: bool = False
    probe_error: str = ""
    op_level: str = ""
    could_take_operations: bool = False
    policy_version: int = 0
    policy_error: str = ""
    witness_alarm: str = ""
    clock_skew_ms: int | None = None
    rival_seen_at: datetime | None = None
    rival_address: str = ""
    drained_at: datetime | None = None
    ejections: tuple[ShownEjection, ...] = ()
    health: Health = Health.HEALTHY
    unavailable: Unavailable | None = None

    @property
    def takes_work(self) -> bool:
        return self.is_enabled and self.status in {NodeStatus.AVAILABLE, NodeStatus.BUSY}


@dataclass(frozen=True, slots=True)
class FleetOverview:
    """Every node of a provider that was not deleted, by name."""

    nodes: tuple[NodeHealth, ...]

    def count_statuses(self) -> Counter[NodeStatus]:
        return Counter(node.status for node in self.nodes)

    @property
    def online(self) -> int:
        return sum(node.status is not NodeStatus.OFFLINE for node in self.nodes)

    @property
    def served_models(self) -> frozenset[str]:
        return frozenset(model for node in self.nodes if node.takes_work for model in node.model_names)

    @property
    def free_models(self) -> frozenset[str]:
        """The models of nodes that take work, were heard just now and have a free slot."""
        free = (node for node in self.nodes if node.takes_work and node.active_requests < node.max_concurrent)
        return frozenset(model for node in free if node.freshness is Freshness.FRESH for model in node.model_names)


def read_fleet() -> FleetOverview:
    """Return the health of every node in one query, which reads what is looked at alone: some columns are long."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).select_related("presence", "provider").order_by("name")
    rows = rows.only(*_SAME_COLUMNS, *_READ_COLUMNS, "provider__state")
    return FleetOverview(tuple(_describe_health(node, clock_of(node)) for node in with_clock(rows)))


@dataclass(frozen=True, slots=True)
class FleetStanding:
    """How many nodes there are and take work. ``notable``: those that do not, or of which something else is to be said."""

    total: int
    ready: int
    notable: tuple[NodeHealth, ...]
    loaded: tuple[NodeHealth, ...]
    """Of the others those that have the most to do, those first."""


def read_standing(*, most: int) -> FleetStanding:
    """Return how the fleet stands; three queries. Of nodes of which nothing is to be said at most ``most`` are read.

    The database tells those: judging each of a thousand takes 60 ms.
    """
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).alias(
        is_plain=Case(When(_is_plain(), then=True), default=False, output_field=BooleanField())
    )
    plain, others = rows.filter(is_plain=True), rows.filter(is_plain=False)
    share = F("presence__active_requests") * 1.0 / Greatest("max_concurrent", 1)
    notable, loaded = (
        tuple(_describe_health(node, clock_of(node)) for node in with_clock(part.select_related("presence", "provider")))
        for part in (
            others.only(*_SAME_COLUMNS, *_READ_COLUMNS, "provider__state"),
            plain.only(*_SAME_COLUMNS, *_READ_COLUMNS, "provider__state").order_by(-share, "name")[:most],
        )
    )
    count = plain.count()
    return FleetStanding(count + len(notable), count + sum(node.takes_work for node in notable), notable, loaded)


def _is_plain() -> Q:
    """Hold for nodes that ``judge_availability`` lets work, and of which no alert or failure would be told."""
    fresh_s = min(freshness_windows(limits().nodes, protocol=name).stale_s for name in ("", BRIDGE_V1, METALYARD))
    return Q(
        provider__state=ProviderState.ENABLED,
        mode=NodeMode.SPARE_ON.value,
        draining=False,
        cordoned=False,
        witness_alarm="",
        policy_error="",
        presence__connected=True,
        presence__is_accepting_jobs=True,
        presence__reported_status__in=(NodeStatus.AVAILABLE.value, NodeStatus.BUSY.value),
        presence__last_heartbeat_at__gt=Now() - timedelta(seconds=fresh_s),
        presence__ejections={},
    ) & ~Q(presence__replicas__contains=[{"state": "failed"}])


def list_models_without(path: str) -> frozenset[str]:
    """Return the models that nodes have and that none of them answers on an API path, such as embeddings on chat; one query."""
    declared = Node.objects.values_list("model_names", "model_endpoints")
    answering: dict[str, bool] = {}
    for names, endpoints in declared:
        for name in names:
            answering[name] = answering.get(name, False) or path in (endpoints or {}).get(name, [path])
    return frozenset(name for name, does in answering.items() if not does)


def read_served_models() -> frozenset[str]:
    """Return the models that nodes can be asked for at this moment; one query."""
    return read_fleet().served_models


_SAME_COLUMNS = (
    *("name", "max_concurrent", "op_level", "policy_version", "policy_error", "witness_alarm", "clock_skew_ms"),
    *("rival_seen_at", "rival_address", "drained_at"),
)
_READ_COLUMNS = (
    *("mode", "draining", "cordoned", "reach", "public_base_url", "model_names", "excluded_models"),
    *(
        f"presence__{name}"
        for name in (
            *("last_heartbeat_at", "reported_status", "protocol", "connected", "is_accepting_jobs", "active_requests"),
            *("replicas", "ejections", "last_error", "probed_at", "probe_error", "updated_at"),
        )
    ),
)


def _describe_health(node: Node, now: datetime) -> NodeHealth:
    presence, availability = presence_of(node), read_availability(node, now=now)
    counts = count_replicas(presence)
    return NodeHealth(
        **{name: getattr(node, name) for name in _SAME_COLUMNS},
        status=availability.status,
        freshness=availability.freshness,
        age_s=heartbeat_age_s(presence, now=now),
        active_requests=presence.active_requests,
        models=describe_counts(counts),
        last_error=presence.last_error,
        id=node.pk,
        heard_at=presence.last_heartbeat_at,
        is_enabled=node.provider.state == ProviderState.ENABLED,
        model_names=tuple(name for name in node.model_names if name not in node.excluded_models),
        failed=list_failures(presence) if counts["failed"] else (),
        is_loading=counts["loading"] > 0,
        probe_error=presence.probe_error if node.reach == Reach.DIRECT else "",
        could_take_operations=node.reach == Reach.RELAY and presence.protocol == MUSTER_V1,
        ejections=tuple(list_ejections(presence, now=now)),
        health=availability.health,
        unavailable=availability.unavailable,
    )


def find_node_ids(text: str) -> list[uuid.UUID]:
    """Return the ids of the nodes that are called so, or the one that this is the printed id of, be there a node or not."""
    node_id = parse_id("node", text)
    return [node_id] if node_id else list(Node.objects.filter(name=text).values_list("pk", flat=True))


def read_node_names(ids: Collection[uuid.UUID]) -> dict[uuid.UUID, str]:
    """Return the names of nodes by id, without those that are gone."""
    return dict(Node.objects.filter(pk__in=ids).values_list("pk", "name"))


def list_node_names(*, most: int) -> list[str]:
    return list(Node.objects.order_by("name").values_list("name", flat=True).distinct()[:most])


def find_node_id(text: str) -> uuid.UUID:
    """Return the id of the node that ``text`` names: its printed id, its UUID, or a name that only one node has.

    Raises NodeNotFound; BadRequest when several nodes have that name.
    """
    node_id = parse_id("node", text)
    found = list(Node.objects.filter(Q(pk=node_id) if node_id else Q(name=text)).values_list("pk", flat=True)[:2])
    if not found:
        raise NodeNotFound(_("There is no node %(text)s.") % {"text": text}, param="node")
    if len(found) > 1:
        raise BadRequest(_("Several nodes are called %(text)s; say which by its id, node_….") % {"text": text}, param="node")
    return found[0]


class Has(StrEnum):
    """How near a node is to answering for a model."""

    LOADED = "loaded"
    LOADING = "loading"
    COULD = "could"
    """The model lies on it, or it may fetch it; nobody has loaded it."""


@dataclass(frozen=True, slots=True)
class ServingNode:
    """One node as somebody sees it who waits for a model. ``unavailable`` None = it takes work.

    ``active`` of ``slots`` are requests; ``percent``: how far it has loaded the model, None = it does not say;
    ``provider`` and ``owner``: whom to ask.
    """

    node_id: uuid.UUID
    name: str
    has: Has
    unavailable: Unavailable | None
    active: int
    slots: int
    percent: int | None = None
    provider: str = ""
    owner: str = ""
    last_error: str = ""


def has_model(name: str) -> Q:
    """Return what is so of a node that has a model, loads it or could."""
    has = Q(model_names__contains=[name]) | Q(presence__available_models__contains=[name])
    return has | Q(presence__replicas__contains=[{"model": name}])


def read_nodes_of(models: Collection[str]) -> dict[str, tuple[ServingNode, ...]]:
    """Return for each model the nodes that have it, load it or could, by name; one query."""
    rows = with_clock(Node.objects.exclude(provider__state=ProviderState.DELETED))
    rows = rows.select_related("presence", "provider").order_by("name")
    rows = rows.defer("presence__memory", "presence__gpus", "figures")  # long, and of no use here
    rows = rows.filter(has_model(next(iter(models)))) if len(models) == 1 else rows
    found: dict[str, list[ServingNode]] = {model: [] for model in models}
    for node in rows if models else ():
        now, presence = clock_of(node), presence_of(node)
        loading = {one.model: one.percent for one in read_replicas(presence.replicas) if one.state == Has.LOADING}
        unavailable = read_availability(node, now=now, is_enabled=node.provider.state == ProviderState.ENABLED).unavailable
        for model, serving in found.items():
            has, percent = _find_share(node, loading, model)
            if has is not None:
                serving.append(
                    ServingNode(
                        node_id=node.pk,
                        name=node.name,
                        has=has,
                        unavailable=unavailable,
                        active=presence.active_requests,
                        slots=node.max_concurrent,
                        percent=percent,
                        provider=node.provider.name,
                        owner=node.owner_name,
                        last_error=presence.last_error,
                    )
                )
    return {model: tuple(serving) for model, serving in found.items()}


def _find_share(node: Node, loading: Mapping[str, int | None], model: str) -> tuple[Has | None, int | None]:
    if model in node.model_names:
        return Has.LOADED, None
    if model in loading:
        return Has.LOADING, loading[model]
    return (Has.COULD if model in (presence_of(node).available_models or ()) else None), None


def read_policy_pins() -> list[dict[str, str]]:
    """Return {"name", "text"} for each node that may come back, by name: its level, what it pinned beside what is in force.

    ``settings.GOVERNANCE_PINS`` names this function, for the page of the policy.
    """
    found = active_policy()
    newest = found[0].version if found is not None else 0
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).exclude(credential__revoked_at__isnull=False)
    return [{"name": node.name, "text": _describe_pin(node, newest=newest)} for node in rows.order_by("name", "pk")]


def _describe_pin(node: Node, *, newest: int) -> str:
    error = f"; it says: {node.policy_error}" if node.policy_error else ""
    if not node.op_level:
        return f"takes no operations from here{error}"
    if node.op_level != "L2":
        return f"level {node.op_level}: it checks a key and no approvals, so it pins no policy"
    pinned, beside = node.policy_version, ""
    if not pinned:
        return f"level L2, none pinned: run {COMMAND} trust on it{error}"
    if not newest:
        beside = "; none is in force here"
    elif pinned < newest:
        beside = f"; version {newest} is in force, which is offered to it while it is connected"
    elif pinned > newest:
        beside = f"; version {newest} is in force here, an older one"
    return f"level L2, version {pinned} pinned{beside}{error}"
