"""What an agent's registration and heartbeats do to the database: its node, its session, what is loaded there.

Source: central-server document, sections 1.1 and 1.3. A node has one session; a new registration of its agent fences the older.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import msgspec
from django.conf import settings
from django.db import connection, transaction
from django.utils.dateparse import parse_datetime
from django.utils.module_loading import import_string

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.addresses import resolve_direct_target
from nodes.errors import AgentTaken, BadRequest, NodeError, SessionUnknown
from nodes.models import Node, NodeCredential, NodePresence, Reach, read_clock, save_changes, seal_api_key
from nodes.reports import (
    clean_models,
    clean_register,
    clean_telemetry,
    find_endpoints,
    read_replicas,
    read_stored,
    store_endpoints,
    sum_gpus,
)
from nodes.services.availability import judge_status, should_drain
from nodes.services.governance import take_governance
from nodes.services.nodes import announce_status, claim_node, is_overtaken
from wire import agent, bridge, clock
from wire.contract import NodeStatus

_AUTO = "auto-detect"


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One registration of an agent. ``warnings``: what of it does not count, in sentences for whoever runs the agent."""

    session_id: uuid.UUID
    node: Node
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AgentStanding:
    """What the server makes of a heartbeat. ``should_drain``: it wants no new work on the node."""

    node_id: uuid.UUID
    status: NodeStatus
    should_drain: bool


@dataclass(frozen=True, slots=True)
class AgentReport:
    session_id: uuid.UUID
    heartbeat: agent.AgentHeartbeat


def find_endpoint(said: agent.AgentRegister) -> tuple[str, str]:
    """Return the URL at which an agent says that its node answers, and why a gateway may not call it; both may be empty.

    Blocks while a name is looked up, so it is asked for outside of transactions.
    """
    text = said.network.endpoint or said.endpoint
    if not text:
        return "", ""
    url = text if "://" in text else f"http://{text}"
    try:
        resolve_direct_target(url)
    except NodeError as error:
        return url, error.message
    return url, ""


@transaction.atomic
def register_agent(
    *, credential: NodeCredential, said: agent.AgentRegister, peer_address: str, endpoint: tuple[str, str]
) -> AgentSession:
    """Enrol an agent's node, or begin a new session of the one that it has. ``endpoint`` as ``find_endpoint`` returned it.

    Raises BadRequest, AgentTaken, InvalidNodeToken, ProviderUnavailable, EnrolmentRefused.
    """
    agent_id = _read_agent_id(said.agent_id)
    message, warnings = _to_register(said)
    node, is_new = _claim(credential, agent_id, said)
    url, refusal = endpoint
    if refusal:
        warnings.append(f"network.endpoint is not called: {refusal}")
    is_relayed = said.config.relay
    if not url and not is_relayed:
        warnings.append("network.endpoint is missing, so no gateway can send this node requests.")
    has_tickets = said.config.tickets and bool(url)
    if said.config.tickets and not url:
        warnings.append("config.tickets needs network.endpoint: clients with tickets are sent there.")
    models, remarks = clean_models(message.models, limits().nodes)
    warnings += remarks
    changes: dict[str, object] = {
        "agent_id": agent_id,
        "agent_session": uuid.uuid4(),  # random: whoever knows it speaks for the session
        "agent_session_at": read_clock(),
        "epoch": node.epoch + 1,
        "reach": Reach.DIRECT.value if url and not is_relayed else Reach.RELAY.value,
        "public_base_url": url[: limits().nodes.url_chars],
        "ticket_url": url[: limits().nodes.url_chars] if has_tickets else "",
        "ticket_error": refusal[: limits().nodes.probe_error_chars] if has_tickets else "",
        "agent_version": (message.agent_version or "")[:60],
        "max_concurrent": min(max(1, said.capacity.max_concurrent_requests), limits().nodes.max_concurrent_cap),
        "model_names": list(models),
        "model_endpoints": store_endpoints(find_endpoints(models, replicas=message.replicas, registered=())),
    }
    if message.gpus:
        changes |= {"gpu_name": message.gpus[0].name[:200], "vram_total_mb": message.gpus[0].memory_total_mb}
    if said.api_key is not None:
        changes["sealed_api_key"] = seal_api_key(said.api_key)
    elif node.public_base_url != url:
        changes["sealed_api_key"] = ""  # a key never follows a node to another URL unasked
    save_changes(node, changes)
    public_ip = said.network.public_ip
    NodePresence.objects.update_or_create(
        node=node,
        defaults={
            "last_heartbeat_at": read_clock(),
            "reported_status": NodeStatus.AVAILABLE.value,
            "is_accepting_jobs": True,
            "active_requests": 0,
            "protocol": agent.METALYARD_RELAY if is_relayed else agent.METALYARD,
            "peer_address": (peer_address if public_ip in ("", _AUTO) else public_ip)[:64],
            "last_error": "",
            "probed_at": clock.now() if refusal else None,
            "probe_error": refusal[: limits().nodes.probe_error_chars],
            "gpus": msgspec.to_builtins(message.gpus),
            "replicas": msgspec.to_builtins(message.replicas),
            "available_models": list(message.available),
            "queue_depth": None,
        },
    )
    detail = {"name": node.name, "credential": credential.keyid, "agent": agent_id, "epoch": node.epoch}
    action = "node.register" if is_new else "node.refresh"
    record_event(actor=f"node:{node.name}", action=action, target=node.printed_id, detail=detail)
    if message.governance is not None:
        take_governance(node_id=node.pk, said=message.governance, heard_ms=clock.unix_ms())
    publish_hint("nodes", str(node.pk))
    session_id = changes["agent_session"]
    assert isinstance(session_id, uuid.UUID)
    return AgentSession(session_id, node, tuple(warnings))


def _read_agent_id(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise BadRequest("agent_id must be a UUID that the agent keeps for life.", param="agent_id") from None


def _claim(credential: NodeCredential, agent_id: str, said: agent.AgentRegister) -> tuple[Node, bool]:
    """Return the node of an agent, and whether it was just made. Raises AgentTaken, and what ``claim_node`` does."""
    known = Node.objects.select_for_update().filter(agent_id=agent_id).first()
    if known is not None and known.credential_id != credential.pk and known.pk != credential.node_id:
        raise AgentTaken(
            "Another credential enrolled this agent_id. Use that one, or give this agent an id of its own.", param="agent_id"
        )
    name = known.name if known is not None else _choose_name(credential, agent_id, said.node_name)
    node, is_new = claim_node(credential=credential, name=name)
    if node.agent_id not in (None, agent_id):
        raise AgentTaken(
            f"This credential speaks for node {node.name!r}, which another agent_id registered. Use its agent_id, or ask an "
            "operator for another credential.",
            param="agent_id",
        )
    return Node.objects.select_for_update().get(pk=node.pk), is_new


def _choose_name(credential: NodeCredential, agent_id: str, wanted: str) -> str:
    name = "".join(letter if letter.isprintable() else " " for letter in wanted).strip()[:120] or f"agent-{agent_id[:8]}"
    is_taken = Node.objects.filter(credential=credential, name=name).exclude(agent_id=None).exclude(agent_id=agent_id).exists()
    return f"{name[:80]}-{agent_id}" if is_taken else name


def _to_register(said: agent.AgentRegister) -> tuple[bridge.Register, list[str]]:
    """Return a registration in the words of muster v1, cut to sizes that can be kept, and what of it does not count."""
    is_allowed = import_string(settings.NODE_MODEL_CHECK)
    loaded = [model for model in said.models_available if model.loaded]
    refused = sorted({model.model_id for model in loaded if not is_allowed(model.model_id)})
    message = bridge.Register(
        protocol_version=bridge.MUSTER_V1,  # else what bridge v1 does not know would be dropped
        models=[model.model_id for model in loaded],
        agent_version=said.agent_version,
        gpus=[
            bridge.GpuInfo(
                index=index,
                name=f"{gpu.vendor} {gpu.model}".strip(),
                memory_total_mb=gpu.vram_mb,
                gpu_id=gpu.gpu_id,
                vendor=gpu.vendor,
                compute_capability=gpu.compute_capability,
                driver_version=gpu.driver_version,
                runtime_version=gpu.cuda_version,
                max_batch=said.capacity.max_concurrent_requests,
                max_context_tokens=said.capacity.max_context_tokens,
            )
            for index, gpu in enumerate(said.gpus)
        ],
        replicas=[
            bridge.ReplicaInfo(
                model=model.model_id,
                state="loaded",
                memory_mb=model.vram_required_mb,
                slots=said.capacity.max_concurrent_requests,
                context_tokens=said.capacity.max_context_tokens,
            )
            for model in loaded
        ],
        available=[model.model_id for model in said.models_available if not model.loaded],
        governance=said.governance,
    )
    clean_register(message)
    text = "are not on the allow-list and get no requests until an operator adds them"
    return message, [f"models_available: {', '.join(refused)[:300]} {text}."] if refused else []


def find_agent_session(session_id: uuid.UUID) -> Node:
    """Return the node whose session this is, with presence, credential and provider. Raises SessionUnknown."""
    node = Node.objects.select_related("provider", "credential__provider", "presence").filter(agent_session=session_id).first()
    if node is None:
        raise SessionUnknown
    return node


@transaction.atomic
def record_agent_heartbeats(reports: Sequence[AgentReport]) -> list[AgentStanding | SessionUnknown]:
    """Store signs of life, the newest of each session counts; the answers are in order."""
    newest: dict[uuid.UUID, agent.AgentHeartbeat] = {}
    for report in reports:
        known = newest.get(report.session_id)
        said_at = _read_time(report.heartbeat.timestamp)
        if known is None or not is_overtaken(said_at, last_said_at=_read_time(known.timestamp)):
            newest[report.session_id] = report.heartbeat
    nodes = {node.agent_session: node for node in Node.objects.select_related("provider").filter(agent_session__in=newest)}
    rows = NodePresence.objects.select_for_update().filter(pk__in=[node.pk for node in nodes.values()]).order_by("pk")
    presences = {row.pk: row for row in rows}
    now = read_clock()
    standings: dict[uuid.UUID, AgentStanding] = {}
    for session_id, heartbeat in newest.items():
        node = nodes.get(session_id)
        if node is None:
            continue
        node.presence = presences[node.pk]
        before = judge_status(node, now=now)
        if not is_overtaken(_read_time(heartbeat.timestamp), last_said_at=node.presence.observed_at):
            _take_heartbeat(node, node.presence, heartbeat)
        node.presence.last_heartbeat_at = now
        after = judge_status(node, now=now)
        if before is not after:
            announce_status(node, before, after)
        standings[session_id] = AgentStanding(node.pk, after, should_drain(node))
    _write_presences(presences.values(), now=now)
    unknown = SessionUnknown()
    return [standings.get(report.session_id, unknown) for report in reports]


# ``bulk_update`` spells out each column of each row, which costs many times as much.
_WRITE_PRESENCES = """
UPDATE nodes_nodepresence AS p
   SET last_heartbeat_at = %(now)s, updated_at = %(now)s, observed_at = r.observed_at, reported_status = r.reported_status,
       is_accepting_jobs = r.is_accepting_jobs, active_requests = r.active_requests, gpus = r.gpus, replicas = r.replicas,
       available_models = r.available_models, queue_depth = r.queue_depth, last_error = r.last_error,
       vram_used_mb = r.vram_used_mb, vram_free_mb = r.vram_free_mb, gpu_util_percent = r.gpu_util_percent
  FROM jsonb_to_recordset(%(rows)s::jsonb) AS r(
       node_id uuid, observed_at timestamptz, reported_status text, is_accepting_jobs boolean, active_requests integer,
       gpus jsonb, replicas jsonb, available_models jsonb, queue_depth integer, last_error text, vram_used_mb integer,
       vram_free_mb integer, gpu_util_percent float8)
 WHERE p.node_id = r.node_id
"""
_SAID_COLUMNS = (
    *("node_id", "observed_at", "reported_status", "is_accepting_jobs", "active_requests", "gpus", "replicas"),
    *("available_models", "queue_depth", "last_error", "vram_used_mb", "vram_free_mb", "gpu_util_percent"),
)


def _write_presences(presences: Iterable[NodePresence], *, now: datetime) -> None:
    """Write what heartbeats said, in one statement."""
    rows = [{name: getattr(presence, name) for name in _SAID_COLUMNS} for presence in presences]
    if rows:
        with connection.cursor() as cursor:
            cursor.execute(_WRITE_PRESENCES, {"now": now, "rows": msgspec.json.encode(rows).decode()})


def _take_heartbeat(node: Node, presence: NodePresence, said: agent.AgentHeartbeat) -> None:
    """Bring the row of a node in line with a heartbeat; of its models its own row too."""
    told = to_telemetry(said, before=read_telemetry(presence))
    status = NodeStatus(said.status)
    if status is NodeStatus.AVAILABLE and told.current_load >= node.max_concurrent:
        status = NodeStatus.BUSY
    presence.observed_at = _read_time(said.timestamp)
    presence.reported_status, presence.is_accepting_jobs = status.value, status is not NodeStatus.DRAINING
    presence.active_requests, presence.queue_depth = told.current_load, told.queue_depth
    presence.gpus, presence.replicas = msgspec.to_builtins(told.gpus), msgspec.to_builtins(told.replicas)
    presence.available_models, presence.last_error = told.available, told.last_error or ""
    for column, value in sum_gpus(told.gpus).items():
        setattr(presence, column, value)
    models = list_loaded(told)
    endpoints = store_endpoints(find_endpoints(models, replicas=told.replicas, registered=()))
    if (node.model_names, node.model_endpoints) != (list(models), endpoints):
        save_changes(node, {"model_names": list(models), "model_endpoints": endpoints})
        publish_hint("nodes", str(node.pk))


def read_telemetry(presence: NodePresence) -> bridge.Telemetry:
    """Return what is known of the GPUs and models of a node."""
    return bridge.Telemetry(
        gpus=read_stored(presence.gpus, list[bridge.GpuInfo]) or [],
        replicas=read_replicas(presence.replicas),
        available=[str(name) for name in presence.available_models or ()],
    )


def list_loaded(told: bridge.Telemetry) -> tuple[str, ...]:
    models, _ = clean_models((replica.model for replica in told.replicas if replica.state == "loaded"), limits().nodes)
    return models


def to_telemetry(said: agent.AgentHeartbeat, *, before: bridge.Telemetry) -> bridge.Telemetry:
    """Return a heartbeat in the words of muster v1, cut to sizes that can be kept. ``before``: what was known until then."""
    states = {state.gpu_id: state for state in said.gpu_states}
    for gpu in before.gpus:
        if (state := states.get(gpu.gpu_id)) is not None:
            gpu.utilization_percent, gpu.memory_used_mb = state.load_percent, state.vram_used_mb
            gpu.temperature_c, gpu.power_w = state.temperature_c, state.power_w
            gpu.active_requests = state.active_requests
    replicas, available = before.replicas, before.available
    if said.models_loaded is not None:
        replicas, available = _follow_models(replicas, available, said.models_loaded)
    told = bridge.Telemetry(
        current_load=sum(max(0, state.active_requests) for state in said.gpu_states),
        gpus=before.gpus,
        replicas=replicas,
        available=available,
        queue_depth=said.queue_depth,
        last_error=said.last_error,
    )
    clean_telemetry(told)
    return told


def _follow_models(
    replicas: Sequence[bridge.ReplicaInfo], available: Sequence[str], loaded: Sequence[str]
) -> tuple[list[bridge.ReplicaInfo], list[str]]:
    """Return the replicas and the models that are not loaded, after the agent named those that are."""
    known = {replica.model: replica for replica in replicas}
    like = next(iter(replicas), bridge.ReplicaInfo(model="", state="loaded"))
    now = [
        known.get(name) or bridge.ReplicaInfo(model=name, state="loaded", slots=like.slots, context_tokens=like.context_tokens)
        for name in dict.fromkeys(loaded)
    ]
    rest = [*available, *(replica.model for replica in replicas)]
    return now, [name for name in dict.fromkeys(rest) if name not in set(loaded)]


def _read_time(text: str) -> datetime | None:
    try:
        moment = parse_datetime(text)
    except ValueError:
        return None
    return moment if moment is not None and moment.tzinfo is not None else None


@transaction.atomic
def end_agent_session(*, session_id: uuid.UUID, reason: str) -> None:
    """Mark the node of a session as gone because its agent said good-bye. A session that was replaced changes nothing."""
    node = Node.objects.select_for_update().filter(agent_session=session_id).first()
    if node is None:
        return
    NodePresence.objects.filter(node=node).update(
        reported_status=NodeStatus.OFFLINE.value, is_accepting_jobs=False, active_requests=0, updated_at=clock.now()
    )
    detail = {"epoch": node.epoch, "reason": reason[:200]}
    record_event(actor=f"node:{node.name}", action="node.disconnect", target=node.printed_id, detail=detail)
    publish_hint("nodes", str(node.pk))
