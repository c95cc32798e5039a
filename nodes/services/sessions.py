"""What a worker session does to the database: enrolment, fencing, presence; and the rows that routing reads."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import msgspec
from django.db import DataError, connection, transaction
from django.db.models import BigIntegerField, Case, CharField, F, Q, QuerySet, Value, When
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

from core import hints
from core.db.base import LAZILY
from core.limits import limits
from governance import audit
from nodes.errors import ApiKeyUnreadable, EnrolmentRefused, NameTaken
from nodes.models import Node, NodeCredential, NodePresence, Reach, clock_of, presence_of, silence_before_s, with_clock
from nodes.reports import (
    find_contexts,
    find_endpoints,
    find_engines,
    read_endpoints,
    read_replicas,
    read_stored,
    store_endpoints,
    sum_gpus,
)
from nodes.services.availability import explain_unreachable
from nodes.services.governance import take_registered
from nodes.services.tickets import UNCHECKED
from nodes.session import Registered
from nodes.states import Figures, NodeRow, ProviderTerms
from wire import bridge, clock
from wire.contract import NodeStatus
from wire.ids import new_uuid7

logger = logging.getLogger("muster.nodes")


@dataclass(frozen=True, slots=True)
class SessionRequest:
    credential_id: int
    peer_address: str
    said: Registered
    heard_ms: int = field(default_factory=clock.unix_ms)
    """Unix milliseconds at which the registration came, which the clock of the node is compared with."""


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """The node behind a session. ``epoch`` rises with every session and fences older ones."""

    node_id: uuid.UUID
    node_name: str
    epoch: int
    mode: str
    cordoned: bool
    draining: bool
    link_id: uuid.UUID
    """Names this link of this gateway in the database: what another one reports is old."""


@dataclass(frozen=True, slots=True)
class PresenceReport:
    """What a gateway knows of a node on its socket. ``epoch`` guards its models and ``link_id`` the rest against old news."""

    node_id: uuid.UUID
    epoch: int
    age_s: float
    active: int
    models: tuple[str, ...]
    status: str
    last_error: str
    endpoints: dict[str, list[str]]
    said: bridge.Telemetry | None
    """What a muster v1 node says of itself, cut to size."""
    link_id: uuid.UUID
    """As ``open_sessions`` gave it."""


class _Opening:
    """Rows that sessions which are opened together read and write, each kind in one statement. Within a transaction."""

    def __init__(
        self,
        requests: Sequence[SessionRequest],
        *,
        gateway_id: uuid.UUID,
        live_nodes: Collection[uuid.UUID],
        other_gateways: Collection[uuid.UUID],
    ) -> None:
        self._gateway_id = gateway_id
        self._live = set(live_nodes)
        self._other_gateways = other_gateways
        self._alive = {gateway.hex for gateway in other_gateways}
        ids = {request.credential_id for request in requests}
        credentials = NodeCredential.objects.select_for_update(of=("self",)).select_related("provider").filter(pk__in=ids)
        self._credentials = {credential.pk: credential for credential in credentials.order_by("pk")}
        bound = {credential.node_id for credential in self._credentials.values() if credential.node_id is not None}
        names = {name for request in requests for name in self._list_names(request)}
        wanted = Q(pk__in=bound) | Q(credential__in=ids, name__in=names)
        nodes = list(Node.objects.select_for_update().filter(wanted).order_by("pk"))
        self._nodes = {node.pk: node for node in nodes}
        self._by_name = {(node.credential_id, node.name): node for node in nodes}
        self._enrolled: dict[int, int] = {}
        """Nodes by credential, of those that were asked for."""
        self._before = {node.pk: _list_said(node) for node in nodes}
        rows = NodePresence.objects.select_for_update().filter(pk__in=self._nodes).order_by("pk")
        self._links = {row.pk: row.gateway_links for row in rows.only("gateway_links")}
        self._presences: dict[uuid.UUID, NodePresence] = {}
        self._governance: list[tuple[Node, bridge.NodeGovernance | None, int]] = []
        self._events: list[audit.Event] = []

    def open(self, request: SessionRequest) -> OpenedSession:
        """Find or make the node of a session. Raises EnrolmentRefused, and NameTaken of them."""
        credential = self._credentials[request.credential_id]
        if credential.revoked_at is not None:
            raise EnrolmentRefused("the credential was revoked")
        node = self._nodes[credential.node_id] if credential.node_id is not None else self._find_node(credential, request)
        said, message = request.said, request.said.message
        if _is_rival(node, message) and self._is_live(node):
            _note_rival(node, peer_address=request.peer_address)
            raise NameTaken(bridge.NAME_TAKEN, param="node_name")
        self._nodes[node.pk] = self._by_name[node.credential_id, node.name] = node
        epoch_before = node.epoch
        _take_message(node, said)
        links = self._links.get(node.pk, {}) if node.epoch == epoch_before else {}
        link_id = new_uuid7()
        self._links[node.pk] = {
            **{gateway: link for gateway, link in links.items() if gateway in self._alive},
            self._gateway_id.hex: link_id.hex,
        }
        self._presences[node.pk] = NodePresence(
            node=node,
            connected=True,
            gateway_links=self._links[node.pk],
            gateway_id=self._gateway_id,
            last_heartbeat_at=Now(),  # not this machine's clock, which may be wrong
            reported_status=NodeStatus.AVAILABLE.value,
            is_accepting_jobs=True,
            active_requests=min(max(0, message.current_load), limits().nodes.report_load),
            protocol=said.protocol,
            peer_address=request.peer_address[:64],
            last_error="",
            gpus=msgspec.to_builtins(message.gpus),
            replicas=msgspec.to_builtins(message.replicas),
            available_models=list(message.available),
            memory=msgspec.to_builtins(message.memory),
            queue_depth=None,
            avg_wait_ms=None,
            updated_at=clock.now(),
        )
        self._events.append(
            audit.Event(
                actor=f"node:{node.name}",
                action="node.connect",
                target=node.printed_id,
                detail={"protocol": said.protocol, "epoch": node.epoch, "credential": credential.name},
            )
        )
        if node.agent_session is None:  # an agent said it when it registered
            self._governance.append((node, message.governance, request.heard_ms))
        self._live.add(node.pk)
        return OpenedSession(node.id, node.name, node.epoch, node.mode, node.cordoned, node.draining, link_id)

    def write(self) -> None:
        nodes = [self._nodes[node_id] for node_id in self._presences]
        # A row that is there keeps what operators decided: it is locked, and only what its node says is set.
        changed = [node for node in nodes if self._before.get(node.pk) != _list_said(node)]
        columns = [*_SAID_COLUMNS, "updated_at"]
        Node.objects.bulk_create(changed, update_conflicts=True, unique_fields=["id"], update_fields=columns)
        presences = self._presences.values()
        NodePresence.objects.bulk_create(
            presences, update_conflicts=True, unique_fields=["node"], update_fields=_PRESENCE_COLUMNS
        )
        take_registered(self._governance)
        audit.record_events(self._events)
        if nodes:
            hints.publish_hint("nodes", str(nodes[0].pk) if len(nodes) == 1 else "")

    def _find_node(self, credential: NodeCredential, request: SessionRequest) -> Node:
        names = self._list_names(request)
        for name in names:
            node = self._by_name.get((credential.pk, name))
            if node is None:
                if credential.pk not in self._enrolled:
                    self._enrolled[credential.pk] = credential.nodes.count()
                if self._enrolled[credential.pk] >= credential.max_nodes:
                    raise EnrolmentRefused(f"the enrolment credential already has {credential.max_nodes} nodes")
                self._enrolled[credential.pk] += 1
                return Node(name=name, credential=credential, provider=credential.provider)
            if len(names) == 1 or not self._is_live(node):
                return node
        raise EnrolmentRefused(f"more than {limits().nodes.name_tries} live workers are called {request.said.name!r}")

    def _list_names(self, request: SessionRequest) -> list[str]:
        """Return the names that a node may get, the first one that is free first."""
        credential, name = self._credentials[request.credential_id], request.said.name
        if request.said.message.instance_id is not None or credential.max_nodes == 1:
            return [name]  # with a credential for one node there is no second one that could share the name
        # Bridge v1 workers often share a name and a credential: one whose name is live already gets a number.
        numbers = range(2, limits().nodes.name_tries + 1)
        return [name, *(f"{name[:110]}-{number}" for number in numbers)]

    def _is_live(self, node: Node) -> bool:
        """Whether a gateway holds the node's socket: this one, or another one that heard it lately."""
        if node.pk in self._live or not self._other_gateways:
            return node.pk in self._live
        since = Now() - timedelta(seconds=limits().nodes.rival_heard_s)
        held = NodePresence.objects.filter(connected=True, gateway_id__in=self._other_gateways, last_heartbeat_at__gte=since)
        return held.filter(pk=node.pk).exists()


def open_sessions(
    requests: Sequence[SessionRequest],
    *,
    gateway_id: uuid.UUID,
    live_nodes: Collection[uuid.UUID] = (),
    other_gateways: Collection[uuid.UUID] = (),
) -> list[OpenedSession | EnrolmentRefused]:
    """Find or enrol the nodes of sessions and fence older ones, all in one transaction; the answers are in order.

    ``live_nodes`` are linked here at the moment; ``other_gateways`` are alive and may hold others. A muster v1 node that comes
    back under its name replaces its older session, and a second one beside it is refused (NameTaken).
    Raises DataError when something that one of the nodes said cannot be stored: nothing is then.
    """
    answers: list[OpenedSession | EnrolmentRefused] = []
    with transaction.atomic():
        opening = _Opening(requests, gateway_id=gateway_id, live_nodes=live_nodes, other_gateways=other_gateways)
        for request in requests:
            try:
                answers.append(opening.open(request))
            except EnrolmentRefused as error:
                answers.append(error)
        opening.write()
    return answers


_SAID_COLUMNS = (
    *("reach", "max_concurrent", "model_names", "model_endpoints", "epoch", "instance_id", "former_instances", "installation"),
    *("agent_version", "owner_name", "gpu_name", "vram_total_mb", "ticket_url", "ticket_error"),
)
"""What a node says of itself when it registers."""
_PRESENCE_COLUMNS = (
    *("connected", "gateway_links", "gateway_id", "last_heartbeat_at", "reported_status", "is_accepting_jobs"),
    *("active_requests", "protocol", "peer_address", "last_error", "gpus", "replicas", "available_models", "memory"),
    *("queue_depth", "avg_wait_ms", "updated_at"),
)


def _list_said(node: Node) -> list[object]:
    return [getattr(node, name) for name in _SAID_COLUMNS]


def _take_message(node: Node, said: Registered) -> None:
    message = said.message
    gpu = message.gpus[0] if message.gpus else None
    node.reach = Reach.RELAY
    node.max_concurrent = said.max_concurrent
    node.model_names = list(said.models)
    endpoints = find_endpoints(said.models, replicas=message.replicas, registered=message.endpoints)
    node.model_endpoints = store_endpoints(endpoints)
    _take_instance(node, message)
    if node.agent_session is None and node.ticket_url != message.ticket_url:
        node.ticket_url, node.ticket_error = message.ticket_url, UNCHECKED if message.ticket_url else ""
    node.agent_version = (message.agent_version or "")[:60]
    if message.owner_name:
        node.owner_name = message.owner_name[:120]
    if gpu is not None:
        node.gpu_name = gpu.name[:200]
        node.vram_total_mb = gpu.memory_total_mb


def _name_installation(message: bridge.Register) -> str:
    # Older nodes and bridge v1 workers name no key.
    key = message.governance.public_key if message.governance is not None else ""
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


def _is_rival(node: Node, message: bridge.Register) -> bool:
    instance = (message.instance_id or "")[:64]
    if not instance or not node.instance_id or instance == node.instance_id:
        return False
    # Of two nodes with one name and one credential the one that is at work goes on; the other is told and shown to the
    # operator. The name does not tell them apart. The node's key does, which lies in its data folder, and so does the instance
    # id, which is new with every start of the program: a node that was started again has its old key and an instance id that
    # nobody has seen, and replaces its own dead session at once. A program whose session was replaced never had its instance id
    # new again.
    installation = _name_installation(message)
    is_another = bool(installation and node.installation and installation != node.installation)
    return is_another or instance in node.former_instances


def _take_instance(node: Node, message: bridge.Register) -> None:
    """Note on the row, without saving it, which program holds the session from now on. The epoch rises with another one."""
    instance = (message.instance_id or "")[:64]
    if not (instance and node.instance_id == instance):
        node.epoch += 1  # one node on the sockets of several gateways is one session; another program fences it
        former = [*node.former_instances, node.instance_id] if node.instance_id else node.former_instances
        node.former_instances = [each for each in former if each != instance][-limits().nodes.former_instances :]
    node.instance_id = instance
    node.installation = _name_installation(message)


def _note_rival(node: Node, *, peer_address: str) -> None:
    now = clock.now()
    logger.warning("node.rival_refused node=%s address=%s", node.name, peer_address)
    # Once an hour: a second node that keeps trying must not fill the audit log.
    if node.rival_seen_at is None or now - node.rival_seen_at >= timedelta(seconds=limits().nodes.rival_audit_s):
        detail = {"name": node.name, "address": peer_address[:64]}
        audit.record_event(actor=f"node:{node.name}", action="node.rival_refused", target=node.printed_id, detail=detail)
    Node.objects.filter(pk=node.pk).update(rival_seen_at=now, rival_address=peer_address[:64])
    hints.publish_hint("nodes", str(node.pk))


_REPORT_COLUMNS = """
    node_id uuid, link text, age_s float8, status text, active integer, last_error text, is_said boolean,
    gpus jsonb, replicas jsonb, available jsonb, memory jsonb, queue_depth integer, avg_wait_ms integer,
    vram_used_mb integer, vram_free_mb integer, gpu_util_percent float8, epoch bigint, models varchar(200)[], endpoints jsonb
"""
# Rows are locked in one order, because several gateways write at once. A node says all of it again with its next report.
_WRITE_PRESENCES = f"""
WITH reported AS (
SELECT * FROM jsonb_to_recordset(%(reports)s::jsonb) AS r({_REPORT_COLUMNS})
), locked AS MATERIALIZED (
SELECT reported.* FROM reported JOIN nodes_nodepresence AS p USING (node_id), {LAZILY} ORDER BY node_id FOR UPDATE OF p
), written AS (
UPDATE nodes_nodepresence AS p
   SET connected = true,
       gateway_id = %(gateway)s,
       last_heartbeat_at = statement_timestamp() - make_interval(secs => r.age_s),
       reported_status = r.status,
       active_requests = r.active,
       last_error = r.last_error,
       updated_at = statement_timestamp(),
       gpus = CASE WHEN r.is_said THEN r.gpus ELSE p.gpus END,
       replicas = CASE WHEN r.is_said THEN r.replicas ELSE p.replicas END,
       available_models = CASE WHEN r.is_said THEN r.available ELSE p.available_models END,
       memory = CASE WHEN r.is_said THEN r.memory ELSE p.memory END,
       queue_depth = CASE WHEN r.is_said THEN r.queue_depth ELSE p.queue_depth END,
       avg_wait_ms = CASE WHEN r.is_said THEN r.avg_wait_ms ELSE p.avg_wait_ms END,
       vram_used_mb = CASE WHEN r.is_said THEN r.vram_used_mb ELSE p.vram_used_mb END,
       vram_free_mb = CASE WHEN r.is_said THEN r.vram_free_mb ELSE p.vram_free_mb END,
       gpu_util_percent = CASE WHEN r.is_said THEN r.gpu_util_percent ELSE p.gpu_util_percent END
  FROM locked AS r
 WHERE p.node_id = r.node_id AND p.gateway_links ->> %(key)s::text = r.link
RETURNING p.node_id, r.epoch, r.models, r.endpoints
)
UPDATE nodes_node AS n
   SET model_names = w.models, model_endpoints = w.endpoints, updated_at = statement_timestamp()
  FROM written AS w
 WHERE n.id = w.node_id AND n.epoch = w.epoch
   AND (n.model_names, n.model_endpoints) IS DISTINCT FROM (w.models, w.endpoints)
RETURNING n.id
"""  # noqa: S608  # constants
_CLOSE_SESSIONS = """
UPDATE nodes_nodepresence AS p
   SET gateway_links = p.gateway_links - %(key)s::text,
       connected = p.connected AND p.gateway_id <> %(gateway)s,
       reported_status = CASE WHEN p.gateway_id = %(gateway)s THEN %(offline)s ELSE p.reported_status END,
       active_requests = CASE WHEN p.gateway_id = %(gateway)s THEN 0 ELSE p.active_requests END,
       updated_at = statement_timestamp()
  FROM jsonb_to_recordset(%(ends)s::jsonb) AS r(node_id uuid, link text)
 WHERE p.node_id = r.node_id AND p.gateway_links ->> %(key)s::text = r.link
RETURNING p.node_id, p.gateway_id = %(gateway)s
"""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    node_id: uuid.UUID
    link_id: uuid.UUID
    reason: str


@transaction.atomic
def close_sessions(ends: Sequence[SessionEnd], *, gateway_id: uuid.UUID) -> None:
    """Mark nodes as gone from this gateway, all in one statement. A link that was replaced changes nothing.

    A node that another gateway reported last keeps what that one said.
    """
    reasons = {end.node_id: end.reason for end in ends}
    values: dict[str, str | uuid.UUID] = {
        "key": gateway_id.hex,
        "gateway": gateway_id,
        "offline": NodeStatus.OFFLINE.value,
        "ends": json.dumps([{"node_id": end.node_id.hex, "link": end.link_id.hex} for end in ends]),
    }
    # In the order in which everybody locks several of them: two gateways may report the same nodes.
    list(NodePresence.objects.select_for_update().filter(pk__in=list(reasons)).order_by("pk").values_list("pk"))
    with connection.cursor() as cursor:
        cursor.execute(_CLOSE_SESSIONS, values)
        gone = [node_id for node_id, was_here in cursor.fetchall() if was_here]
    for node in Node.objects.filter(pk__in=gone).order_by("pk"):
        audit.record_event(
            actor=f"node:{node.name}",
            action="node.disconnect",
            target=node.printed_id,
            detail={"epoch": node.epoch, "reason": reasons[node.pk][:200]},
        )
        hints.publish_hint("nodes", str(node.pk))


def write_presences(reports: Sequence[PresenceReport], *, gateway_id: uuid.UUID) -> None:
    """Write what this gateway knows of the nodes on its sockets, in one statement.

    A report changes nothing once its link was closed or replaced in the database, however late it is written.
    """
    if not reports:
        return
    try:
        changed = _write_reports(reports, gateway_id=gateway_id)
    except DataError:  # what one node says of itself must not keep the others from being written
        if len(reports) == 1:
            logger.warning("node.presence_refused node_id=%s", reports[0].node_id)
            return
        for report in reports:
            write_presences([report], gateway_id=gateway_id)
        return
    for node_id in changed:  # the other gateways look at once
        hints.publish_hint("nodes", str(node_id))


def _write_reports(reports: Sequence[PresenceReport], *, gateway_id: uuid.UUID) -> list[uuid.UUID]:
    """Return the nodes that serve other models than before."""
    rows = [_render_report(report) for report in reports]
    values: dict[str, str | uuid.UUID] = {
        "gateway": gateway_id,
        "key": gateway_id.hex,
        "reports": msgspec.json.encode(rows).decode(),
    }
    with connection.cursor() as cursor:
        cursor.execute(_WRITE_PRESENCES, values)
        return [row[0] for row in cursor.fetchall()]


def _render_report(report: PresenceReport) -> dict[str, object]:
    row: dict[str, object] = {
        "node_id": report.node_id.hex,
        "link": report.link_id.hex,
        "age_s": report.age_s,
        "status": report.status,
        "active": report.active,
        "last_error": report.last_error[:500],
        "is_said": report.said is not None,
        "epoch": report.epoch,
        "models": report.models,
        "endpoints": report.endpoints,
    }
    if (said := report.said) is not None:
        row |= {
            "gpus": said.gpus,
            "replicas": said.replicas,
            "available": said.available,
            "memory": said.memory,
            "queue_depth": said.queue_depth,
            "avg_wait_ms": said.avg_wait_ms,
            **sum_gpus(said.gpus),
        }
    return row


# Place and writer of a row name its version (PostgreSQL's manual, "System Columns"): whoever changes it writes another one.
_NODE_VERSION = """
hashtextextended(concat_ws(' ', nodes_node.ctid, nodes_node.xmin, nodes_provider.ctid, nodes_provider.xmin,
    CASE WHEN nodes_nodepresence.gateway_links ? %(key)s::text THEN 'ours'
         ELSE concat(nodes_nodepresence.ctid, nodes_nodepresence.xmin) END), 0)
"""
NODE_VERSIONS = f"""
SELECT nodes_node.id, {_NODE_VERSION} AS version
  FROM nodes_node JOIN nodes_provider ON nodes_provider.id = nodes_node.provider_id
  LEFT JOIN nodes_nodepresence ON nodes_nodepresence.node_id = nodes_node.id
"""  # noqa: S608  # constants
"""Every node with a number that changes when its rows do, but for the presence of nodes on the gateway's own sockets.

``key``: the gateway's id in hex. It knows those nodes at first hand, and other gateways on whose sockets they are too write it.
"""


class KnownNodes:
    """The rows of one gateway process as they were last read; only those that changed are read again."""

    def __init__(self, gateway_id: uuid.UUID) -> None:
        self._gateway_id = gateway_id
        self._versions: dict[uuid.UUID, int] = {}
        self.rows: dict[uuid.UUID, NodeRow] = {}
        """By node; a row that did not change stays the same object."""

    @property
    def mark(self) -> int:
        """The sum of ``NODE_VERSIONS`` as long as nothing changed that was not read."""
        return sum(self._versions.values())

    def forget(self) -> None:
        self._versions, self.rows = {}, {}

    def refresh(self) -> None:
        """Read what changed since the last time: one query, and another one for those."""
        with connection.cursor() as cursor:
            cursor.execute(NODE_VERSIONS, {"key": self._gateway_id.hex})
            versions: dict[uuid.UUID, int] = dict(cursor.fetchall())
        changed = [node_id for node_id, version in versions.items() if self._versions.get(node_id) != version]
        gone = self._versions.keys() - versions.keys()
        if changed or gone:
            self.read([*changed, *gone])

    def read(self, node_ids: Collection[uuid.UUID]) -> None:
        """Read these nodes, changed or not, in one query; one that has no row is gone."""
        version = RawSQL(_NODE_VERSION.replace("%(key)s", "%s"), [self._gateway_id.hex], BigIntegerField())  # noqa: S611
        found = {node.pk: node for node in _select_nodes().annotate(version=version).filter(pk__in=node_ids)}
        gone = set(node_ids) - found.keys()
        rows = {node_id: row for node_id, row in self.rows.items() if node_id not in gone}
        self.rows = rows | {node_id: _read_row(node) for node_id, node in found.items()}
        versions = {node_id: number for node_id, number in self._versions.items() if node_id not in gone}
        self._versions = versions | {node_id: node.version for node_id, node in found.items()}


def load_node_rows() -> list[NodeRow]:
    """Return every node as routing needs it; one query."""
    return [_read_row(node) for node in _select_nodes().order_by("name", "pk")]


def _select_nodes() -> QuerySet[Node]:
    trusted = When(credential__allows_models=True, credential__revoked_at=None, then=F("credential__name"))
    allowed_by = Case(trusted, default=Value(""), output_field=CharField())
    return with_clock(Node.objects.select_related("provider", "presence").annotate(allowed_by=allowed_by))


_SAME_COLUMNS = (
    *("name", "public_base_url", "max_concurrent", "mode", "cordoned", "draining", "drain_reason", "draining_since"),
    *("epoch", "instance_id", "agent_session"),
)
_SAME_PRESENCE_COLUMNS = ("protocol", "reported_status", "is_accepting_jobs", "active_requests", "connected", "gateway_id")


def _read_row(node: Any) -> NodeRow:  # Any: a node with annotations
    now = clock_of(node)
    since, presence, provider = clock.monotonic() - now.timestamp(), presence_of(node), node.provider
    seen, deadline = presence.last_heartbeat_at, node.drain_deadline_at
    is_direct = node.reach == Reach.DIRECT.value and bool(node.public_base_url)
    replicas = read_replicas(presence.replicas)
    return NodeRow(
        **{name: getattr(node, name) for name in _SAME_COLUMNS},
        **{name: getattr(presence, name) for name in _SAME_PRESENCE_COLUMNS},
        node_id=node.pk,
        provider=provider.name,
        provider_state=provider.state,
        is_direct=is_direct,
        model_names=tuple(node.model_names),
        drain_deadline_at=since + deadline.timestamp() if deadline is not None else None,
        heard_at=since + min(seen, now).timestamp() if seen is not None else None,
        unreachable=explain_unreachable(node),
        endpoints=read_endpoints(node.model_endpoints),
        contexts=find_contexts(replicas),
        engines=find_engines(replicas),
        figures=read_stored(node.figures, dict[str, Figures]) or {},
        api_key=_read_api_key(node) if is_direct else "",
        ticket_url="" if node.ticket_error else node.ticket_url,
        gpus=tuple(read_stored(presence.gpus, list[bridge.GpuInfo]) or ()) if is_direct else (),
        silence_before_s=silence_before_s(presence),
        excluded=frozenset(node.excluded_models),
        terms=ProviderTerms(provider.name, provider.max_queue, provider.queue_s, provider.no_node_s),
        allowed_by=node.allowed_by,
    )


def _read_api_key(node: Node) -> str:
    with suppress(ApiKeyUnreadable):  # the probe finds that too, and says so
        return node.read_api_key()
    return ""
