"""Calling the URL of each node that registered one: until it answers, the node is not available and gets no request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import httpx
from django.db.models import F, Q
from django.utils import timezone

from governance.hints import publish_hint
from nodes.addresses import DirectTarget, resolve_direct_target
from nodes.errors import NodeError
from nodes.models import Node, NodePresence, Reach

_PROBE_TIMEOUT_S = 3.0
_MAX_ERROR_CHARS = 300
_BATCH = 100
_AT_ONCE = 16
ANSWERED_S, SILENT_S = 29.0, 4.0
"""After so many seconds a node that answered, and one that did not, is called again."""
NO_ANSWER = "it took the connection and did not answer in time"


def probe_direct_nodes() -> int:
    """Call the nodes that are due, those longest not called first; return how many did not answer.

    One that answered is due after ANSWERED_S, one that did not after SILENT_S. At most _BATCH are called, _AT_ONCE at a time.
    """
    now = timezone.now()
    is_due = Q(presence__probed_at=None) | Q(presence__probed_at__lte=now - timedelta(seconds=ANSWERED_S))
    is_due |= ~Q(presence__probe_error="") & Q(presence__probed_at__lte=now - timedelta(seconds=SILENT_S))
    nodes = Node.objects.filter(is_due, reach=Reach.DIRECT, presence__isnull=False).exclude(public_base_url="")
    due = list(nodes.select_related("presence").order_by(F("presence__probed_at").asc(nulls_first=True))[:_BATCH])
    with ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="probe") as pool:
        errors = list(pool.map(lambda node: probe_url(node.public_base_url), due))
    for node, error in zip(due, errors, strict=True):
        _store(node, error)
    return sum(bool(error) for error in errors)


def _store(node: Node, error: str) -> None:
    presence = node.presence
    if error == NO_ANSWER and presence.probed_at is not None and not presence.probe_error and presence.active_requests:
        error = ""  # it took the connection and has work: a server of one thread answers when that is done
    same = NodePresence.objects.filter(
        node_id=node.pk, probed_at=presence.probed_at
    )  # registering again may have called it since
    if same.update(probed_at=timezone.now(), probe_error=error[:_MAX_ERROR_CHARS]) and bool(error) != bool(
        presence.probe_error
    ):
        publish_hint("nodes", str(node.pk))


def probe_url(url: str) -> str:
    """Ask ``GET /v1/models`` of a box; return why that failed, or an empty text. Any HTTP answer counts as an answer."""
    try:
        target = resolve_direct_target(url)
    except NodeError as error:
        return error.message
    try:
        with httpx.Client(timeout=_PROBE_TIMEOUT_S, follow_redirects=False, trust_env=False) as client:
            response = client.send(_build_request(client, target), stream=True)
            response.close()
    except httpx.ReadTimeout:
        return NO_ANSWER
    except httpx.TimeoutException:
        return f"no connection within {_PROBE_TIMEOUT_S:g} s"
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if response.status_code < 500 else f"answers with {response.status_code}"


def _build_request(client: httpx.Client, target: DirectTarget) -> httpx.Request:
    """Return a request that dials the checked address and is for the host of the URL, in HTTP and in TLS alike."""
    url = httpx.URL(scheme=target.scheme, host=target.address, port=target.port, path=f"{target.base_path}/v1/models")
    return client.build_request(
        "GET", url, headers={"host": f"{target.host}:{target.port}"}, extensions={"sni_hostname": target.host}
    )
