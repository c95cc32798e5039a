"""Enrolment of boxes and the heartbeats of those that use REST. Contract v1: register and heartbeat."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache

from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.addresses import resolve_direct_target
from nodes.errors import (
    ApiKeyUnreadable,
    BadRequest,
    EnrolmentRefused,
    InvalidNodeToken,
    ModelNotAllowed,
    NodeNotFound,
    ProviderUnavailable,
)
from nodes.models import Node, NodeCredential, NodePresence, ProviderState, Reach, seal_api_key
from nodes.services.clock import read_clock
from nodes.services.health import explain_unreachable, judge_status, should_drain
from nodes.services.lifecycle import set_mode
from nodes.services.probe import ProbeResult, probe_node, store_capabilities
from wire import clock
from wire.contract import NodeMode, NodeStatus


@dataclass(frozen=True, slots=True)
class Registration:
    """What a box says of itself when it registers. ``max_concurrent`` None keeps what is known.

    ``api_key``: what calls of its URL authenticate with, empty = nothing; None keeps what is known while the URL is the same.
    """

    node_name: str
    current_model: str
    owner_name: str = ""
    public_base_url: str = ""
    gpu_name: str = ""
    vram_total_mb: int | None = None
    agent_version: str = ""
    max_concurrent: int | None = None
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Registered:
    """What a registration came to. ``unreachable``: why no gateway can reach the node; empty = one can."""

    node: Node
    status: NodeStatus
    unreachable: str


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One heartbeat over REST. ``observed_at`` is the box's clock and is stored, never believed."""

    node_id: uuid.UUID
    status: NodeStatus
    is_accepting_jobs: bool
    mode: NodeMode | None = None
    active_request_count: int = 0
    gpu_util_percent: float | None = None
    vram_used_mb: int | None = None
    vram_free_mb: int | None = None
    spare_score: float | None = None
    last_local_error: str = ""
    observed_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class HeartbeatResult:
    """What the server answers: its clock, the status it goes by, and whether the box should stop taking work."""

    server_time: datetime
    effective_status: NodeStatus
    should_drain: bool
    unreachable: str
    """Why no gateway can reach the node; empty = one can."""


def register_direct_node(*, credential: NodeCredential, registration: Registration) -> Registered:
    """Enrol a node, or refresh the one this credential already enrolled under that name; its URL is called once.

    Raises ModelNotAllowed, AddressRefused, AddressUnresolvable, BadRequest, ProviderUnavailable, EnrolmentRefused and
    InvalidNodeToken.
    """
    _check_api_key(registration.api_key or "")
    if not _load_model_check(settings.NODE_MODEL_CHECK)(registration.current_model):
        raise ModelNotAllowed(
            f"Model {registration.current_model!r} is not on the allow-list; an operator can add it.",
            param="current_model",
        )
    probed: ProbeResult | None = None
    if registration.public_base_url:
        # Outside the transaction: a slow name server, or a node that does not answer, must not hold row locks.
        resolve_direct_target(registration.public_base_url)
        known = _find_known(credential, registration.node_name)
        about = Node(name=registration.node_name, public_base_url=registration.public_base_url, gpu_name=registration.gpu_name)
        about.sealed_api_key = _choose_sealed_key(known, registration)
        probed = probe_node(about)
    with transaction.atomic():
        node, is_new = claim_node(credential=credential, name=registration.node_name)
        presence, _ = NodePresence.objects.get_or_create(node=node)
        if probed is not None:
            presence.probed_at, presence.probe_error = clock.now(), probed.error[: limits().nodes.probe_error_chars]
            presence.save(update_fields=["probed_at", "probe_error"])
        changed = _apply(node, registration, is_new=is_new, is_connected=presence.connected)
        if changed:
            node.save(update_fields=[*changed, "updated_at"])
        if is_new or changed:
            action = "node.register" if is_new else "node.refresh"
            detail = {"name": node.name, "credential": credential.keyid, "changed": sorted(changed)}
            record_event(actor=f"node:{node.name}", action=action, target=node.printed_id, detail=detail)
            publish_hint("nodes", str(node.pk))
        if probed is not None and probed.said is not None:
            store_capabilities(node, presence, probed.said)
            presence.refresh_from_db()
    status = judge_status(node, presence, now=read_clock())
    return Registered(node=node, status=status, unreachable=explain_unreachable(node, presence))


@transaction.atomic
def claim_node(*, credential: NodeCredential, name: str) -> tuple[Node, bool]:
    """Return the box that ``credential`` speaks for under ``name``, and whether it was just made.

    A bound credential always means its own box. An enrolment credential makes new boxes up to its ``max_nodes``;
    its row is locked, so two boxes that start together cannot both take the last place.
    Raises InvalidNodeToken, ProviderUnavailable, EnrolmentRefused.
    """
    usable = NodeCredential.objects.select_for_update(of=("self",)).select_related("provider", "node")
    held = usable.filter(pk=credential.pk, revoked_at__isnull=True).first()
    if held is None:
        raise InvalidNodeToken("The node credential was revoked; ask an operator for a new one.")
    if held.provider.state != ProviderState.ENABLED:
        raise ProviderUnavailable(f"Provider {held.provider.name!r} is {held.provider.state}.")
    if held.node is not None:
        return held.node, False
    known = Node.objects.filter(credential=held, name=name).first()
    if known is not None:
        return known, False
    if Node.objects.filter(credential=held).count() >= held.max_nodes:
        raise EnrolmentRefused(
            f"This credential has already enrolled its {held.max_nodes} node(s). Register under the same node_name "
            "as before, or ask an operator for another credential.",
            param="node_name",
        )
    return Node.objects.create(name=name, credential=held, provider=held.provider), True


def require_own_node(*, credential: NodeCredential, node_id: uuid.UUID) -> Node:
    """Return the box (provider loaded) if ``credential`` speaks for it. Raises NodeNotFound, InvalidNodeToken."""
    node = Node.objects.select_related("provider").filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound("There is no node with that node_id; register first.", param="node_id")
    if node.pk != credential.node_id and (credential.node_id is not None or node.credential_id != credential.pk):
        raise InvalidNodeToken("This credential belongs to another node.")
    return node


@transaction.atomic
def record_heartbeat(*, credential: NodeCredential, heartbeat: Heartbeat) -> HeartbeatResult:
    """Store a sign of life and return what the server makes of it.

    ``mode=spare_off`` reclaims the box at once. ``spare_on`` lifts no reclaim: a heartbeat composed before the owner
    took the box back may arrive after it. Raises NodeNotFound, InvalidNodeToken, BadRequest.
    """
    if heartbeat.status is NodeStatus.DRAINING and heartbeat.is_accepting_jobs:
        raise BadRequest("is_accepting_jobs must be false while status is draining.", param="is_accepting_jobs")
    node = require_own_node(credential=credential, node_id=heartbeat.node_id)
    if heartbeat.mode is NodeMode.SPARE_OFF and node.mode != NodeMode.SPARE_OFF.value:
        provider = node.provider
        node = set_mode(node_id=node.pk, mode=NodeMode.SPARE_OFF, reason="owner_reclaim", actor=f"node:{node.name}")
        node.provider = provider
    now = read_clock()
    NodePresence.objects.get_or_create(node=node)
    presence = NodePresence.objects.select_for_update().get(node=node)
    before = judge_status(node, presence, now=now)
    _store(presence, heartbeat, now)
    after = judge_status(node, presence, now=now)
    if before is not after:
        _announce(node, before, after)
    return HeartbeatResult(
        server_time=now,
        effective_status=after,
        should_drain=should_drain(node),
        unreachable=explain_unreachable(node, presence),
    )


def _apply(node: Node, registration: Registration, *, is_new: bool, is_connected: bool) -> list[str]:
    """Set what the box says of itself on the row and return the names of the fields that changed."""
    is_direct = bool(registration.public_base_url)
    wanted: dict[str, object] = {
        "owner_name": registration.owner_name,
        "public_base_url": registration.public_base_url,
        "reach": Reach.DIRECT.value if is_direct else Reach.RELAY.value,
        "gpu_name": registration.gpu_name,
        "vram_total_mb": registration.vram_total_mb,
        "agent_version": registration.agent_version,
        "sealed_api_key": _choose_sealed_key(node, registration),
    }
    # A box that is dialled in tells its models over the socket, and knows better there.
    if is_direct or not is_connected:
        wanted["model_names"] = [registration.current_model]
    if registration.max_concurrent is not None or is_new:
        wanted["max_concurrent"] = registration.max_concurrent or limits().nodes.direct_concurrency
    changed = [name for name, value in wanted.items() if getattr(node, name) != value]
    for name in changed:
        setattr(node, name, wanted[name])
    return changed


def _find_known(credential: NodeCredential, name: str) -> Node | None:
    """Return the node that ``claim_node`` would, None when it would make one."""
    return credential.node if credential.node is not None else Node.objects.filter(credential=credential, name=name).first()


def _choose_sealed_key(node: Node | None, registration: Registration) -> str:
    """Return the API key that holds after a registration, encrypted. A key never follows a node to another URL unasked."""
    is_same = node is not None and node.public_base_url == registration.public_base_url
    kept = node.sealed_api_key if node is not None and is_same else ""
    if registration.api_key is None or (kept and _opens_to(kept, registration.api_key)):
        return kept
    return seal_api_key(registration.api_key)


def _opens_to(sealed: str, text: str) -> bool:
    """Whether that is the key already: encrypted again it would look like another one."""
    try:
        return hmac.compare_digest(Node(sealed_api_key=sealed).read_api_key().encode(), text.encode())
    except ApiKeyUnreadable:
        return False


def _check_api_key(text: str) -> None:
    if len(text) > limits().nodes.api_key_chars or not all("!" <= letter <= "~" for letter in text):
        raise BadRequest(
            f"api_key must be at most {limits().nodes.api_key_chars} printable ASCII characters without spaces.",
            param="api_key",
        )


@transaction.atomic
def set_api_key(*, node_id: uuid.UUID, api_key: str, actor: str) -> Node:
    """Set what calls of a node's URL authenticate with, empty = nothing. Raises NodeNotFound, BadRequest."""
    _check_api_key(api_key)
    node = Node.objects.select_for_update().filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(f"There is no node {node_id}.", param="node_id")
    if node.reach != Reach.DIRECT.value:
        raise BadRequest(
            "This node dials in, so nothing calls its URL; only nodes called over HTTP take a key.", param="node_id"
        )
    node.sealed_api_key = seal_api_key(api_key)
    node.save(update_fields=["sealed_api_key", "updated_at"])
    NodePresence.objects.filter(node=node).update(probed_at=None)  # the next round of calls tries it
    detail = {"name": node.name, "is_set": bool(api_key)}
    record_event(actor=actor, action="node.set_api_key", target=node.printed_id, detail=detail)
    publish_hint("nodes", str(node.pk))
    return node


def _store(presence: NodePresence, heartbeat: Heartbeat, now: datetime) -> None:
    presence.last_heartbeat_at = now
    presence.reported_status = heartbeat.status.value
    presence.is_accepting_jobs = heartbeat.is_accepting_jobs
    presence.active_requests = heartbeat.active_request_count
    presence.gpu_util_percent = heartbeat.gpu_util_percent
    presence.vram_used_mb = heartbeat.vram_used_mb
    presence.vram_free_mb = heartbeat.vram_free_mb
    presence.spare_score = heartbeat.spare_score
    presence.last_error = heartbeat.last_local_error[: limits().nodes.report_error_chars]
    presence.observed_at = heartbeat.observed_at
    if not presence.connected:
        # Its last session may have been bridge v1, which is judged by another window.
        presence.protocol = ""
    presence.updated_at = now
    presence.save(
        update_fields=[
            "last_heartbeat_at",
            "reported_status",
            "is_accepting_jobs",
            "active_requests",
            "gpu_util_percent",
            "vram_used_mb",
            "vram_free_mb",
            "spare_score",
            "last_error",
            "observed_at",
            "protocol",
            "updated_at",
        ]
    )


def _announce(node: Node, before: NodeStatus, after: NodeStatus) -> None:
    """Tell listeners of a new status; only coming and going is worth a line in the audit trail."""
    publish_hint("nodes", str(node.pk))
    if NodeStatus.OFFLINE not in (before, after):
        return
    action = "node.offline" if after is NodeStatus.OFFLINE else "node.online"
    record_event(actor=f"node:{node.name}", action=action, target=node.printed_id, detail={"name": node.name})


@lru_cache(maxsize=4)
def _load_model_check(path: str) -> Callable[[str], bool]:
    """Return the function that says whether a model is allow-listed. It lives above this app, hence the dotted path."""
    check: Callable[[str], bool] = import_string(path)
    return check
