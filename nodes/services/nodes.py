"""Nodes that register over REST: enrolment, heartbeats, and calls of the URL that one registered. Contract v1."""

from __future__ import annotations

import hmac
import logging
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from django.conf import settings
from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.operations.queries import list_open_runs
from nodes.addresses import DirectTarget, build_request, make_trust, resolve_direct_target
from nodes.errors import (
    ApiKeyUnreadable,
    BadRequest,
    EnrolmentRefused,
    InvalidNodeToken,
    ModelNotAllowed,
    NodeError,
    NodeNotFound,
    ProviderUnavailable,
)
from nodes.models import (
    GpuMinute,
    GpuSample,
    GpuTenMinutes,
    Node,
    NodeCredential,
    NodePresence,
    ProviderState,
    Reach,
    clock_of,
    presence_of,
    read_clock,
    save_changes,
    seal_api_key,
    with_clock,
)
from nodes.reports import Capabilities, find_endpoints, read_capabilities, store_endpoints
from nodes.services.availability import explain_unreachable, judge_status, should_drain
from nodes.services.certificates import find_authorities
from nodes.services.drains import set_mode
from wire import clock
from wire.contract import NodeMode, NodeStatus

if TYPE_CHECKING:
    import httpx

NO_ANSWER = "it took the connection and did not answer in time"
_CAPABILITIES, _MODELS = "/v1/capabilities", "/v1/models"

logger = logging.getLogger("muster.nodes")


@dataclass(frozen=True, slots=True)
class Registration:
    """What a node says of itself when it registers. ``max_concurrent`` None keeps what is known.

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
    """One heartbeat over REST. ``observed_at`` is the node's clock and is stored, never believed."""

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
    """What the server answers: its clock, the status it goes by, and whether the node should stop taking work."""

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
    # The function lives above this app, hence its name in the settings.
    if not import_string(settings.NODE_MODEL_CHECK)(registration.current_model):
        text = f"Model {registration.current_model!r} is not on the allow-list; an operator can add it."
        raise ModelNotAllowed(text, param="current_model")
    probed: ProbeResult | None = None
    if registration.public_base_url:
        # Outside the transaction: a slow name server, or a node that does not answer, must not hold row locks.
        resolve_direct_target(registration.public_base_url)
        known = _find_known(credential, registration.node_name)
        about = Node(name=registration.node_name, public_base_url=registration.public_base_url, gpu_name=registration.gpu_name)
        about.sealed_api_key = _choose_sealed_key(known, registration)
        probed = probe_node(about, authorities=find_authorities([about.public_base_url]))
    with transaction.atomic():
        node, is_new = claim_node(credential=credential, name=registration.node_name)
        presence, _made = NodePresence.objects.get_or_create(node=node)
        node.presence = presence
        if probed is not None:
            presence.probed_at, presence.probe_error = clock.now(), probed.error[: limits().nodes.probe_error_chars]
            presence.save(update_fields=["probed_at", "probe_error"])
        changed = _find_changes(node, registration, is_new=is_new, is_connected=presence.connected)
        if changed:
            save_changes(node, changed)
        if is_new or changed:
            action = "node.register" if is_new else "node.refresh"
            detail = {"name": node.name, "credential": credential.keyid, "changed": sorted(changed)}
            record_event(actor=f"node:{node.name}", action=action, target=node.printed_id, detail=detail)
            publish_hint("nodes", str(node.pk))
        if probed is not None and probed.said is not None:
            store_capabilities(node, presence, probed.said)
            presence.refresh_from_db()
    return Registered(node, judge_status(node, now=read_clock()), explain_unreachable(node))


@transaction.atomic
def claim_node(*, credential: NodeCredential, name: str) -> tuple[Node, bool]:
    """Return the node that ``credential`` speaks for under ``name``, and whether it was just made.

    A bound credential always means its own node. An enrolment credential makes new nodes up to its ``max_nodes``.
    Raises InvalidNodeToken, ProviderUnavailable, EnrolmentRefused.
    """
    # Locked: two nodes that start together cannot both take the last place.
    usable = NodeCredential.objects.select_for_update(of=("self",)).select_related("provider", "node")
    held = usable.filter(pk=credential.pk, revoked_at__isnull=True).first()
    if held is None:
        raise InvalidNodeToken(_("The node credential was revoked; ask an operator for a new one."))
    if held.provider.state != ProviderState.ENABLED:
        raise ProviderUnavailable(
            _("Provider %(name)r is %(state)s.") % {"name": held.provider.name, "state": held.provider.state}
        )
    if held.node is not None:
        return held.node, False
    known = Node.objects.filter(credential=held, name=name).first()
    if known is not None:
        return known, False
    if Node.objects.filter(credential=held).count() >= held.max_nodes:
        raise EnrolmentRefused(
            _(
                "This credential has already enrolled its %(max_nodes)s node(s). Register under the same node_name as "
                "before, or ask an operator for another credential."
            )
            % {"max_nodes": held.max_nodes},
            param="node_name",
        )
    return Node.objects.create(name=name, credential=held, provider=held.provider), True


def require_own_node(*, credential: NodeCredential, node_id: uuid.UUID) -> Node:
    """Return the node (provider loaded) if ``credential`` speaks for it. Raises NodeNotFound, InvalidNodeToken."""
    node = Node.objects.select_related("provider").filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(_("There is no node with that node_id; register first."), param="node_id")
    if node.pk != credential.node_id and (credential.node_id is not None or node.credential_id != credential.pk):
        raise InvalidNodeToken(_("This credential belongs to another node."))
    return node


@transaction.atomic
def record_heartbeat(*, credential: NodeCredential, heartbeat: Heartbeat) -> HeartbeatResult:
    """Store a sign of life and return what the server makes of it.

    ``mode=spare_off`` reclaims the node at once; ``spare_on`` lifts no reclaim.
    Raises NodeNotFound, InvalidNodeToken, BadRequest.
    """
    if heartbeat.status is NodeStatus.DRAINING and heartbeat.is_accepting_jobs:
        raise BadRequest(_("is_accepting_jobs must be false while status is draining."), param="is_accepting_jobs")
    node = require_own_node(credential=credential, node_id=heartbeat.node_id)
    # Nothing on spare_on: a heartbeat composed before the owner took the node back may arrive after it.
    if heartbeat.mode is NodeMode.SPARE_OFF and node.mode != NodeMode.SPARE_OFF.value:
        provider = node.provider
        node = set_mode(node_id=node.pk, mode=NodeMode.SPARE_OFF, reason="owner_reclaim", actor=f"node:{node.name}")
        node.provider = provider
    now = read_clock()
    NodePresence.objects.get_or_create(node=node)
    node.presence = NodePresence.objects.select_for_update().get(node=node)
    before = judge_status(node, now=now)
    _store_heartbeat(node.presence, heartbeat, now)
    after = judge_status(node, now=now)
    if before is not after:
        announce_status(node, before, after)
    return HeartbeatResult(
        server_time=now,
        effective_status=after,
        should_drain=should_drain(node),
        unreachable=explain_unreachable(node),
    )


def _find_changes(node: Node, registration: Registration, *, is_new: bool, is_connected: bool) -> dict[str, object]:
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
    # A node that is dialled in tells its models over the socket, and knows better there.
    if is_direct or not is_connected:
        wanted["model_names"] = [registration.current_model]
    if registration.max_concurrent is not None or is_new:
        wanted["max_concurrent"] = registration.max_concurrent or limits().nodes.direct_concurrency
    return {name: value for name, value in wanted.items() if getattr(node, name) != value}


def _find_known(credential: NodeCredential, name: str) -> Node | None:
    return credential.node if credential.node is not None else Node.objects.filter(credential=credential, name=name).first()


def _choose_sealed_key(node: Node | None, registration: Registration) -> str:
    # A key never follows a node to another URL unasked.
    is_same = node is not None and node.public_base_url == registration.public_base_url
    kept = node.sealed_api_key if node is not None and is_same else ""
    if registration.api_key is None or (kept and _opens_to(kept, registration.api_key)):
        return kept
    return seal_api_key(registration.api_key)


def _opens_to(sealed: str, text: str) -> bool:
    # Encrypted again, the same key would look like another one.
    try:
        return hmac.compare_digest(Node(sealed_api_key=sealed).read_api_key().encode(), text.encode())
    except ApiKeyUnreadable:
        return False


def _check_api_key(text: str) -> None:
    if len(text) > limits().nodes.api_key_chars or not all("!" <= letter <= "~" for letter in text):
        raise BadRequest(
            _("api_key must be at most %(most)s printable ASCII characters without spaces.")
            % {"most": limits().nodes.api_key_chars},
            param="api_key",
        )


def is_removable(node: Node) -> bool:
    """Whether a node may be removed: it is offline, for whatever it was asked to do. It is asked of the row as it was read."""
    return judge_status(node, now=clock_of(node)) is NodeStatus.OFFLINE


@transaction.atomic
def remove_node(*, node_id: uuid.UUID, actor: str) -> None:
    """Forget a node that is offline and has nothing to carry out, with the history of its GPUs; records keep its name.

    A credential that was bound to it enrols one node from now on. Raises NodeNotFound, BadRequest.
    """
    node = with_clock(Node.objects.select_for_update(of=("self",))).select_related("presence").filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(_("There is no node %(node_id)s.") % {"node_id": node_id}, param="node_id")
    if not is_removable(node):
        raise BadRequest(_("%(name)s is not offline: stop its program first.") % {"name": node.name}, param="node_id")
    if list_open_runs(node.pk):
        raise BadRequest(
            _("%(name)s has an operation under way: wait until it has ended.") % {"name": node.name}, param="node_id"
        )
    node.bound_credentials.update(node=None, updated_at=clock.now())
    gpus = list(node.gpus.values_list("pk", flat=True))
    heard_at = presence_of(node).last_heartbeat_at
    detail = {"name": node.name, "heard_at": heard_at.isoformat() if heard_at is not None else ""}
    record_event(actor=actor, action="node.remove", target=node.printed_id, detail=detail)
    for moments in (GpuSample, GpuMinute, GpuTenMinutes):
        moments.objects.filter(gpu_id__in=gpus).delete()
    node.delete()
    publish_hint("nodes", str(node_id))


def remove_dead_nodes() -> int:
    """Remove the nodes that were not heard for ``dead_node_s``; return how many. Idempotent."""
    since = read_clock() - timedelta(seconds=limits().nodes.dead_node_s)
    heard = Q(presence__last_heartbeat_at__lt=since) | Q(presence__last_heartbeat_at=None, created_at__lt=since)
    removed = 0
    for node_id, name in Node.objects.filter(heard, updated_at__lt=since).values_list("pk", "name")[
        : limits().nodes.bulk_nodes
    ]:
        try:
            remove_node(node_id=node_id, actor="system:sweep")
        except NodeError as error:  # it has just come back, or has something to carry out
            logger.info("node.not_removed node=%s reason=%s", name, error.message)
        else:
            removed += 1
    return removed


@transaction.atomic
def set_api_key(*, node_id: uuid.UUID, api_key: str, actor: str) -> Node:
    """Set what calls of a node's URL authenticate with, empty = nothing. Raises NodeNotFound, BadRequest."""
    _check_api_key(api_key)
    node = Node.objects.select_for_update().filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(_("There is no node %(node_id)s.") % {"node_id": node_id}, param="node_id")
    if node.reach != Reach.DIRECT.value:
        raise BadRequest(
            _("This node dials in, so nothing calls its URL; only nodes called over HTTP take a key."), param="node_id"
        )
    save_changes(node, {"sealed_api_key": seal_api_key(api_key)})
    NodePresence.objects.filter(node=node).update(probed_at=None)  # the next round of calls tries it
    detail = {"name": node.name, "is_set": bool(api_key)}
    record_event(actor=actor, action="node.set_api_key", target=node.printed_id, detail=detail)
    publish_hint("nodes", str(node.pk))
    return node


def is_overtaken(said_at: datetime | None, *, last_said_at: datetime | None) -> bool:
    """Whether a heartbeat came after one that its node said later, both by the node's own clock: it is a sign of life alone."""
    if said_at is None or last_said_at is None:
        return False
    return 0 < (last_said_at - said_at).total_seconds() <= limits().nodes.heartbeat_order_s


def _store_heartbeat(presence: NodePresence, heartbeat: Heartbeat, now: datetime) -> None:
    if is_overtaken(heartbeat.observed_at, last_said_at=presence.observed_at):
        save_changes(presence, {"last_heartbeat_at": now, "updated_at": now})
        return
    changes: dict[str, object] = {
        "last_heartbeat_at": now,
        "reported_status": heartbeat.status.value,
        "is_accepting_jobs": heartbeat.is_accepting_jobs,
        "active_requests": heartbeat.active_request_count,
        "gpu_util_percent": heartbeat.gpu_util_percent,
        "vram_used_mb": heartbeat.vram_used_mb,
        "vram_free_mb": heartbeat.vram_free_mb,
        "spare_score": heartbeat.spare_score,
        "last_error": heartbeat.last_local_error[: limits().nodes.report_error_chars],
        "observed_at": heartbeat.observed_at,
        "updated_at": now,
    }
    if not presence.connected:
        changes["protocol"] = ""  # its last session may have been bridge v1, which is judged by another window
    save_changes(presence, changes)


def announce_status(node: Node, before: NodeStatus, after: NodeStatus) -> None:
    publish_hint("nodes", str(node.pk))
    # Only coming and going is worth a line in the audit log.
    if NodeStatus.OFFLINE not in (before, after):
        return
    action = "node.offline" if after is NodeStatus.OFFLINE else "node.online"
    record_event(actor=f"node:{node.name}", action=action, target=node.printed_id, detail={"name": node.name})


# Calls of the URL that a node registered: until it answers, the node is not available and gets no request. A node of the
# model-runner API is asked for its capabilities, which fill the columns that the telemetry of a node that dials in fills. One
# without that endpoint is asked for its models, and lives by its register and heartbeats.


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a call came to. ``error``: why no gateway can reach the node, empty = one can; ``said``: its capabilities."""

    error: str = ""
    said: Capabilities | None = None


def probe_direct_nodes() -> int:
    """Call the nodes that are due, those longest not called first; return how many did not answer.

    One that tells its capabilities, and one that did not answer, is due after ``probe_silent_s``, any other after
    ``probe_answered_s``. At most ``probe_batch`` are called, ``probe_threads`` at a time.
    """
    nodes = _find_due().select_related("presence").order_by(F("presence__probed_at").asc(nulls_first=True))
    due = list(nodes[: limits().nodes.probe_batch])
    authorities = find_authorities(node.public_base_url for node in due)
    with ThreadPoolExecutor(max_workers=limits().nodes.probe_threads, thread_name_prefix="probe") as pool:
        results = list(pool.map(partial(probe_node, authorities=authorities), due))
    for node, result in zip(due, results, strict=True):
        _store_probe(node, result)
    return sum(bool(result.error) for result in results)


def is_probe_due() -> bool:
    return _find_due().exists()


def _find_due() -> QuerySet[Node]:
    now = clock.now()
    is_due = Q(presence__probed_at=None) | Q(presence__probed_at__lte=now - timedelta(seconds=limits().nodes.probe_answered_s))
    is_soon = ~Q(presence__probe_error="") | Q(presence__capabilities_at__isnull=False)
    is_due |= is_soon & Q(presence__probed_at__lte=now - timedelta(seconds=limits().nodes.probe_silent_s))
    return Node.objects.filter(is_due, reach=Reach.DIRECT, presence__isnull=False).exclude(public_base_url="")


@transaction.atomic
def _store_probe(node: Node, result: ProbeResult) -> None:
    presence, error = node.presence, result.error
    if error == NO_ANSWER and presence.probed_at is not None and not presence.probe_error and presence.active_requests:
        error = ""  # it took the connection and has work: a server of one thread answers when that is done
    same = NodePresence.objects.filter(pk=node.pk, probed_at=presence.probed_at)  # registering again may have called it since
    if not same.update(probed_at=clock.now(), probe_error=error[: limits().nodes.probe_error_chars]):
        return
    is_news = bool(error) != bool(presence.probe_error)
    if result.said is not None and node.agent_session is None:  # an agent says all of it in its heartbeats
        is_news |= store_capabilities(node, presence, result.said)
    if is_news:
        publish_hint("nodes", str(node.pk))


def store_capabilities(node: Node, presence: NodePresence, said: Capabilities) -> bool:
    """Write what a node said of itself; return whether its models or its status changed. ``presence`` as it was read.

    A node that ever sent a heartbeat lives by its heartbeats, also for its status. Of one that never did the call is the sign
    of life, and its health the status.
    """
    rows = NodePresence.objects.filter(pk=node.pk, connected=False)
    told = said.telemetry
    values: dict[str, object] = {
        "gpus": msgspec.to_builtins(told.gpus),
        "replicas": msgspec.to_builtins(told.replicas),
        "available_models": told.available,
        "memory": msgspec.to_builtins(told.memory),
        "queue_depth": told.queue_depth,
        "avg_wait_ms": told.avg_wait_ms,
    }
    sums = {"vram_used_mb": said.vram_used_mb, "vram_free_mb": said.vram_free_mb, "gpu_util_percent": said.gpu_util_percent}
    known = {name: value for name, value in sums.items() if value is not None}
    if not rows.update(**values, **known, updated_at=Now()):
        return False  # it holds a socket by now, and says more there
    status = NodeStatus.ERROR if said.ailment else NodeStatus.AVAILABLE
    is_alive = rows.filter(Q(last_heartbeat_at=None) | Q(last_heartbeat_at=F("capabilities_at"))).update(
        capabilities_at=Now(),
        last_heartbeat_at=Now(),
        reported_status=status.value,
        is_accepting_jobs=True,
        last_error=f"the node says that its health is {said.ailment}" if said.ailment else "",
    )
    if not is_alive:
        rows.update(capabilities_at=Now())
    elif presence.reported_status == NodeStatus.OFFLINE.value:
        record_event(actor=f"node:{node.name}", action="node.online", target=node.printed_id, detail={"name": node.name})
    endpoints = find_endpoints(said.models, replicas=told.replicas, registered=())
    declared: dict[str, object] = {"model_names": list(said.models), "model_endpoints": store_endpoints(endpoints)}
    is_declared = Node.objects.filter(pk=node.pk, reach=Reach.DIRECT).exclude(**declared).update(**declared, updated_at=Now())
    is_loading = (presence.replicas, presence.available_models) != (values["replicas"], values["available_models"])
    return bool(is_declared) or is_loading or bool(is_alive and presence.reported_status != status.value)


def probe_node(node: Node, *, authorities: str) -> ProbeResult:
    """Ask ``GET /v1/capabilities`` of a node, and where it has no such endpoint ``GET /v1/models``.

    ``authorities``: the internal CAs that it is verified with, as ``find_authorities`` says.

    Any HTTP answer but 5xx counts as an answer; 503 to the first says that the node starts or stops.
    """
    import httpx  # a gateway loads this module and calls no node with it

    try:
        target, api_key = resolve_direct_target(node.public_base_url), node.read_api_key()
    except NodeError as error:
        return ProbeResult(error=error.message)
    try:
        verify = make_trust(authorities)
        with httpx.Client(timeout=limits().nodes.probe_s, follow_redirects=False, trust_env=False, verify=verify) as client:
            status, body = _get(client, target, _CAPABILITIES, api_key=api_key, max_bytes=limits().nodes.probe_answer_bytes)
            if status == httpx.codes.OK:
                return ProbeResult(said=_read(node, body))
            if status not in (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.UNAUTHORIZED):
                status, _body = _get(client, target, _MODELS, api_key=api_key, max_bytes=0)
    except httpx.ReadTimeout:
        return ProbeResult(error=NO_ANSWER)
    except httpx.TimeoutException:
        return ProbeResult(error=f"no connection within {limits().nodes.probe_s:g} s")
    except httpx.HTTPError as error:
        return ProbeResult(error=f"{type(error).__name__}: {error}")
    if api_key and status == httpx.codes.UNAUTHORIZED:
        return ProbeResult(error="answers with 401: it does not accept the API key that was given for it")
    return ProbeResult(error="" if status < 500 else f"answers with {status}")


def _read(node: Node, body: bytes) -> Capabilities | None:
    try:
        return read_capabilities(body, policy=limits().nodes, gpu_name=node.gpu_name)
    except ValueError as error:
        logger.warning("node.capabilities_unreadable node=%s error=%s", node.name, error)
        return None


def _get(client: httpx.Client, target: DirectTarget, path: str, *, api_key: str, max_bytes: int) -> tuple[int, bytes]:
    """Return the status and, of an answer with 200, the body. Raises httpx.HTTPError, also for one too long or too slow."""
    import httpx

    with closing(client.send(build_request(client, target, "GET", path, api_key=api_key), stream=True)) as response:
        if not max_bytes or response.status_code != httpx.codes.OK:
            return response.status_code, b""
        raw, until = bytearray(), clock.monotonic() + limits().nodes.probe_s
        for piece in response.iter_raw():
            raw += piece
            if len(raw) > max_bytes:
                raise httpx.ReadError(f"GET {path} answers with more than {max_bytes} bytes")
            if clock.monotonic() > until:
                raise httpx.ReadTimeout(f"GET {path} was not answered in full within {limits().nodes.probe_s:g} s")
        return response.status_code, bytes(raw)
