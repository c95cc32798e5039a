"""What a worker session does to the database: enrolment, fencing, presence; and the rows that routing reads."""

from __future__ import annotations

import hashlib
import json
import logging
import uuid
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import msgspec
from django.db import DataError, connection, transaction
from django.db.models.functions import Now

from core import hints
from core.limits import limits
from governance import audit
from nodes.errors import ApiKeyUnreadable, EnrolmentRefused, NameTaken
from nodes.models import Node, NodeCredential, NodePresence, Provider, ProviderState, Reach
from nodes.reports import find_endpoints, read_contexts, read_endpoints, read_engines, store_endpoints
from nodes.services.governance import take_governance
from nodes.services.health import explain_unreachable
from nodes.states import NodeRow
from wire import bridge, clock
from wire.bridge import BRIDGE_V1
from wire.contract import NodeStatus
from wire.ids import new_uuid7

logger = logging.getLogger("muster.nodes")


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """What a box said when it registered; names are sanitized already.

    ``live_nodes`` are linked here at the moment; ``other_gateways`` are alive and may hold others.
    """

    credential_id: int
    worker_name: str
    models: tuple[str, ...]
    max_concurrent: int
    protocol: str
    gateway_id: uuid.UUID
    live_nodes: frozenset[uuid.UUID]
    other_gateways: frozenset[uuid.UUID]
    peer_address: str
    message: bridge.Register
    heard_ms: int = field(default_factory=clock.unix_ms)
    """Unix milliseconds at which the registration came, which the clock of the box is compared with."""


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
class ReportedState:
    """What a muster v1 box says of itself, as JSON values that were cut to size before."""

    gpus: list[dict[str, object]]
    replicas: list[dict[str, object]]
    available: list[str]
    memory: dict[str, object] | None
    queue_depth: int
    avg_wait_ms: int | None


@dataclass(frozen=True, slots=True)
class PresenceReport:
    """What a gateway knows of a node on its socket. ``epoch`` guards its models and ``link_id`` the rest against old news."""

    node_id: uuid.UUID
    epoch: int
    age_s: float
    active: int
    max_concurrent: int
    models: tuple[str, ...]
    status: str
    last_error: str
    endpoints: dict[str, list[str]]
    said: ReportedState | None
    link_id: uuid.UUID
    """As ``open_session`` gave it."""


def is_provider_open(name: str) -> bool:
    """Return whether boxes of the provider may connect."""
    return Provider.objects.filter(name=name, state=ProviderState.ENABLED).exists()


def open_session(request: SessionRequest) -> OpenedSession:
    """Find or enrol the node of a session and fence older sessions. Raises EnrolmentRefused, and NameTaken of them.

    An enrolment credential is shared by many boxes and bridge v1 workers often share a name too, so a name that is
    live already gets a number; a muster v1 box that comes back under its name replaces its older session.
    """
    opened = _open_session(request)
    if opened is None:
        raise NameTaken(bridge.NAME_TAKEN, param="node_name")
    return opened


@transaction.atomic
def _open_session(request: SessionRequest) -> OpenedSession | None:
    """Return the session, None for a second box beside one that is alive, which is written down."""
    credential = (
        NodeCredential.objects.select_for_update(of=("self",)).select_related("provider", "node").get(pk=request.credential_id)
    )
    if credential.revoked_at is not None:
        raise EnrolmentRefused("the credential was revoked")
    node = credential.node if credential.node is not None else _find_node(credential, request)
    message = request.message
    if _is_rival(node, message) and (node.pk in request.live_nodes or _is_held_elsewhere(node, request.other_gateways)):
        _note_rival(node, peer_address=request.peer_address)
        return None
    gpu = message.gpus[0] if message.gpus else None
    node.reach = Reach.RELAY
    node.max_concurrent = request.max_concurrent
    node.model_names = list(request.models)
    endpoints = find_endpoints(request.models, replicas=message.replicas, registered=message.endpoints)
    node.model_endpoints = store_endpoints(endpoints)
    epoch_before = node.epoch
    _take_instance(node, message)
    node.agent_version = (message.agent_version or "")[:60]
    if message.owner_name:
        node.owner_name = message.owner_name[:120]
    if gpu is not None:
        node.gpu_name = gpu.name[:200]
        node.vram_total_mb = gpu.memory_total_mb
    node.save()
    take_governance(node_id=node.pk, said=message.governance, heard_ms=request.heard_ms)
    link_id = new_uuid7()
    presence = NodePresence.objects.select_for_update().filter(node=node).first()
    links = {} if presence is None or node.epoch != epoch_before else presence.gateway_links
    alive = {gateway.hex for gateway in request.other_gateways}
    NodePresence.objects.update_or_create(
        node=node,
        defaults={
            "connected": True,
            "gateway_links": {
                **{gateway: link for gateway, link in links.items() if gateway in alive},
                request.gateway_id.hex: link_id.hex,
            },
            "gateway_id": request.gateway_id,
            "last_heartbeat_at": Now(),  # not this machine's clock, which may be wrong
            "reported_status": NodeStatus.AVAILABLE.value,
            "is_accepting_jobs": True,
            "active_requests": min(max(0, message.current_load), limits().nodes.report_load),
            "protocol": request.protocol,
            "peer_address": request.peer_address[:64],
            "last_error": "",
            "gpus": msgspec.to_builtins(message.gpus),
            "replicas": msgspec.to_builtins(message.replicas),
            "available_models": list(message.available),
            "memory": msgspec.to_builtins(message.memory),
            "queue_depth": None,
            "avg_wait_ms": None,
            "updated_at": clock.now(),
        },
    )
    audit.record_event(
        actor=f"node:{node.name}",
        action="node.connect",
        target=node.printed_id,
        detail={"protocol": request.protocol, "epoch": node.epoch, "credential": credential.name},
    )
    hints.publish_hint("nodes", str(node.id))
    return OpenedSession(node.id, node.name, node.epoch, node.mode, node.cordoned, node.draining, link_id)


def _find_node(credential: NodeCredential, request: SessionRequest) -> Node:
    # With a credential for one box there is no second one that could share the name.
    shared_name = request.message.instance_id is None and credential.max_nodes > 1
    for number in range(1, limits().nodes.name_tries + 1):
        name = request.worker_name if number == 1 else f"{request.worker_name[:110]}-{number}"
        node = Node.objects.select_for_update().filter(credential=credential, name=name).first()
        if node is None:
            if credential.nodes.count() >= credential.max_nodes:
                raise EnrolmentRefused(f"the enrolment credential already has {credential.max_nodes} nodes")
            return Node(name=name, credential=credential, provider=credential.provider)
        if not shared_name:
            return node
        if node.pk not in request.live_nodes and not _is_held_elsewhere(node, request.other_gateways):
            return node
    raise EnrolmentRefused(f"more than {limits().nodes.name_tries} live workers are called {request.worker_name!r}")


def _name_installation(message: bridge.Register) -> str:
    """Return what the box's key is called here; empty when it says none, as older boxes and bridge v1 workers do."""
    key = message.governance.public_key if message.governance is not None else ""
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


def _is_held_elsewhere(node: Node, other_gateways: Collection[uuid.UUID]) -> bool:
    """Whether one of these gateways holds the box's socket and heard it lately."""
    since = Now() - timedelta(seconds=limits().nodes.rival_heard_s)
    held = NodePresence.objects.filter(connected=True, gateway_id__in=other_gateways, last_heartbeat_at__gte=since)
    return held.filter(pk=node.pk).exists()


def _is_rival(node: Node, message: bridge.Register) -> bool:
    """Whether this cannot be the box that holds the node's session, nor that box started again.

    Of two boxes with one name and one credential the one that is at work goes on; the other is told and shown to the operator.
    The name does not tell them apart. The box's key does, which lies in its data folder, and so does the instance id, which is
    new with every start of the program: a box that was started again has its old key and an instance id that nobody has seen,
    and replaces its own dead session at once. A program whose session was replaced never had its instance id new again.
    """
    instance = (message.instance_id or "")[:64]
    if not instance or not node.instance_id or instance == node.instance_id:
        return False
    installation = _name_installation(message)
    is_another = bool(installation and node.installation and installation != node.installation)
    return is_another or instance in node.former_instances


def _take_instance(node: Node, message: bridge.Register) -> None:
    """Note on the row, without saving it, which program holds the session from now on. The epoch rises with another one."""
    instance = (message.instance_id or "")[:64]
    if not (instance and node.instance_id == instance):
        node.epoch += 1  # one box on the sockets of several gateways is one session; another program fences it
        former = [*node.former_instances, node.instance_id] if node.instance_id else node.former_instances
        node.former_instances = [each for each in former if each != instance][-limits().nodes.former_instances :]
    node.instance_id = instance
    node.installation = _name_installation(message)


def _note_rival(node: Node, *, peer_address: str) -> None:
    """Write down that a second box asked for the session of a live one; in the audit trail once an hour."""
    now = clock.now()
    logger.warning("node.rival_refused node=%s address=%s", node.name, peer_address)
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
_WRITE_PRESENCES = f"""
WITH reported AS (
SELECT * FROM jsonb_to_recordset(%(reports)s::jsonb) AS r({_REPORT_COLUMNS})
), locked AS MATERIALIZED (
SELECT node_id FROM nodes_nodepresence WHERE node_id IN (SELECT node_id FROM reported) ORDER BY node_id FOR UPDATE
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
  FROM reported AS r JOIN locked USING (node_id)
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
    """A session that is over: ``link_id`` as ``open_session`` gave it."""

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
    _lock_presences(reasons)
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
        "reports": json.dumps(rows),
    }
    with connection.cursor() as cursor:
        cursor.execute(_WRITE_PRESENCES, values)
        return [row[0] for row in cursor.fetchall()]


def _lock_presences(node_ids: Iterable[uuid.UUID]) -> None:
    """Lock rows in the order in which everybody locks several of them: two gateways may report the same nodes."""
    rows = NodePresence.objects.select_for_update().filter(pk__in=list(node_ids)).order_by("pk")
    rows.values_list("pk", flat=True).__len__()


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
            **_sum_gpus(said.gpus),
        }
    return row


def _sum_gpus(gpus: list[dict[str, object]]) -> dict[str, object]:
    used = [int(str(g["memory_used_mb"])) for g in gpus if g.get("memory_used_mb") is not None]
    total = [int(str(g["memory_total_mb"])) for g in gpus if g.get("memory_total_mb") is not None]
    busy = [float(str(g["utilization_percent"])) for g in gpus if g.get("utilization_percent") is not None]
    return {
        "vram_used_mb": sum(used) if used else None,
        "vram_free_mb": max(0, sum(total) - sum(used)) if used and total else None,
        "gpu_util_percent": max(busy) if busy else None,
    }


def find_revoked(credential_ids: list[int]) -> set[int]:
    """Return which of the credentials were revoked."""
    revoked = NodeCredential.objects.filter(pk__in=credential_ids, revoked_at__isnull=False)
    return set(revoked.values_list("pk", flat=True))


# Place and writer of a row name its version (PostgreSQL's manual, "System Columns"): whoever changes it writes another one.
NODE_VERSIONS = """
SELECT n.id, hashtextextended(concat_ws(' ', n.ctid, n.xmin, v.ctid, v.xmin,
             CASE WHEN p.connected AND p.gateway_id = %(gateway)s THEN 'ours' ELSE concat(p.ctid, p.xmin) END), 0) AS version
  FROM nodes_node AS n JOIN nodes_provider AS v ON v.id = n.provider_id LEFT JOIN nodes_nodepresence AS p ON p.node_id = n.id
"""
"""Every node with a number that changes when its rows do, but for the presence that the gateway itself writes."""


class KnownNodes:
    """The rows of one gateway process as they were last read; only those that changed are read again."""

    def __init__(self, gateway_id: uuid.UUID) -> None:
        self._gateway_id = gateway_id
        self._known: dict[uuid.UUID, tuple[int, float, NodeRow]] = {}
        """By node: version, when it was read (clock.monotonic()), row."""

    def forget(self) -> None:
        """Have every row read again."""
        self._known = {}

    def refresh(self) -> None:
        """Read what changed since the last time: one query, and another one for those."""
        with connection.cursor() as cursor:
            cursor.execute(NODE_VERSIONS, {"gateway": self._gateway_id})
            versions: dict[uuid.UUID, int] = dict(cursor.fetchall())
        known = self._known
        changed = [node_id for node_id, version in versions.items() if node_id not in known or known[node_id][0] != version]
        now = clock.monotonic()
        fresh = {row.node_id: (versions[row.node_id], now, row) for row in load_node_rows(changed)} if changed else {}
        kept = {node_id: known[node_id] for node_id in versions if node_id in known and node_id not in fresh}
        self._known = {**kept, **fresh}

    def list_rows(self) -> list[NodeRow]:
        """Return the rows, with ages and remaining times as of now. Asks nothing."""
        now = clock.monotonic()
        return [_age(row, now - read_at) for _, read_at, row in self._known.values()]


def _age(row: NodeRow, seconds: float) -> NodeRow:
    age_s, remaining_s = row.heartbeat_age_s, row.drain_remaining_s
    if age_s is None and remaining_s is None:
        return row
    return replace(
        row,
        heartbeat_age_s=None if age_s is None else age_s + seconds,
        drain_remaining_s=None if remaining_s is None else remaining_s - seconds,
    )


def load_node_rows(node_ids: Collection[uuid.UUID] | None = None) -> list[NodeRow]:
    """Return every node, or those of ``node_ids``, as routing needs it; one query."""
    query = Node.objects.select_related("provider", "presence").annotate(database_now=Now()).order_by("name", "pk")
    if node_ids is not None:
        query = query.filter(pk__in=node_ids)
    rows: list[NodeRow] = []
    for node in query:
        now: datetime = node.database_now
        presence = getattr(node, "presence", None)
        seen = presence.last_heartbeat_at if presence is not None else None
        deadline = node.drain_deadline_at
        is_direct = node.reach == Reach.DIRECT.value and bool(node.public_base_url)
        rows.append(
            NodeRow(
                node_id=node.pk,
                name=node.name,
                provider=node.provider.name,
                provider_state=node.provider.state,
                is_direct=is_direct,
                public_base_url=node.public_base_url,
                model_names=tuple(node.model_names),
                max_concurrent=node.max_concurrent,
                mode=node.mode,
                cordoned=node.cordoned,
                draining=node.draining,
                drain_reason=node.drain_reason,
                drain_remaining_s=(deadline - now).total_seconds() if deadline is not None else None,
                draining_since=node.draining_since,
                epoch=node.epoch,
                instance_id=node.instance_id,
                heartbeat_age_s=max(0.0, (now - seen).total_seconds()) if seen is not None else None,
                reported_status=presence.reported_status if presence is not None else NodeStatus.OFFLINE.value,
                is_accepting_jobs=presence.is_accepting_jobs if presence is not None else False,
                active_requests=presence.active_requests if presence is not None else 0,
                connected=presence.connected if presence is not None else False,
                gateway_id=presence.gateway_id if presence is not None else None,
                unreachable=explain_unreachable(node, presence),
                endpoints=read_endpoints(node.model_endpoints),
                carries_bytes=presence is None or presence.protocol != BRIDGE_V1,
                contexts=read_contexts(presence.replicas) if presence is not None else {},
                engines=read_engines(presence.replicas) if presence is not None else {},
                api_key=_read_api_key(node) if is_direct else "",
            )
        )
    return rows


def _read_api_key(node: Node) -> str:
    with suppress(ApiKeyUnreadable):  # the probe finds that too, and says so
        return node.read_api_key()
    return ""
