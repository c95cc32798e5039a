"""Calling the URL of each node that registered one: until it answers, the node is not available and gets no request.

A node of the model-runner API is asked for its capabilities every 5 s. They fill the columns that the telemetry of a node
that dials in fills. A node without that endpoint is asked for its models, and lives by its register and heartbeats.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec
from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Now

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.addresses import DirectTarget, build_request, resolve_direct_target
from nodes.errors import NodeError
from nodes.models import Node, NodePresence, Reach
from nodes.reports import Capabilities, find_endpoints, read_capabilities, store_endpoints
from wire import clock
from wire.contract import NodeStatus

if TYPE_CHECKING:
    import httpx

NO_ANSWER = "it took the connection and did not answer in time"
_CAPABILITIES, _MODELS = "/v1/capabilities", "/v1/models"

logger = logging.getLogger("muster.nodes")


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
    with ThreadPoolExecutor(max_workers=limits().nodes.probe_threads, thread_name_prefix="probe") as pool:
        results = list(pool.map(probe_node, due))
    for node, result in zip(due, results, strict=True):
        _store(node, result)
    return sum(bool(result.error) for result in results)


def is_probe_due() -> bool:
    """Whether a node is to be called now."""
    return _find_due().exists()


def _find_due() -> QuerySet[Node]:
    now = clock.now()
    is_due = Q(presence__probed_at=None) | Q(presence__probed_at__lte=now - timedelta(seconds=limits().nodes.probe_answered_s))
    is_soon = ~Q(presence__probe_error="") | Q(presence__capabilities_at__isnull=False)
    is_due |= is_soon & Q(presence__probed_at__lte=now - timedelta(seconds=limits().nodes.probe_silent_s))
    return Node.objects.filter(is_due, reach=Reach.DIRECT, presence__isnull=False).exclude(public_base_url="")


@transaction.atomic
def _store(node: Node, result: ProbeResult) -> None:
    presence, error = node.presence, result.error
    if error == NO_ANSWER and presence.probed_at is not None and not presence.probe_error and presence.active_requests:
        error = ""  # it took the connection and has work: a server of one thread answers when that is done
    same = NodePresence.objects.filter(
        node_id=node.pk, probed_at=presence.probed_at
    )  # registering again may have called it since
    if not same.update(probed_at=clock.now(), probe_error=error[: limits().nodes.probe_error_chars]):
        return
    is_news = bool(error) != bool(presence.probe_error)
    if result.said is not None:
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


def probe_node(node: Node) -> ProbeResult:
    """Ask ``GET /v1/capabilities`` of a node, and where it has no such endpoint ``GET /v1/models``.

    Any HTTP answer but 5xx counts as an answer; 503 to the first says that the node starts or stops.
    """
    import httpx  # a gateway loads this module and calls no node with it

    try:
        target, api_key = resolve_direct_target(node.public_base_url), node.read_api_key()
    except NodeError as error:
        return ProbeResult(error=error.message)
    try:
        with httpx.Client(timeout=limits().nodes.probe_s, follow_redirects=False, trust_env=False) as client:
            status, body = _get(client, target, _CAPABILITIES, api_key=api_key, max_bytes=limits().nodes.probe_answer_bytes)
            if status == httpx.codes.OK:
                return ProbeResult(said=_read(node, body))
            if status not in (httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.UNAUTHORIZED):
                status, _ = _get(client, target, _MODELS, api_key=api_key, max_bytes=0)
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

    response = client.send(build_request(client, target, "GET", path, api_key=api_key), stream=True)
    try:
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
    finally:
        response.close()
