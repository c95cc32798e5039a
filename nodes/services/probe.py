"""Calling the URL of each box that registered one, so that a wrong address or a closed port is seen before a request meets it.

Only for people: routing goes by heartbeats and by what requests find, never by a probe.
"""

from __future__ import annotations

import httpx
from django.utils import timezone

from nodes.addresses import DirectTarget, resolve_direct_target
from nodes.errors import NodeError
from nodes.models import Node, NodePresence, Reach

_PROBE_TIMEOUT_S = 3.0
_MAX_ERROR_CHARS = 300
_BATCH = 100


def probe_direct_nodes() -> int:
    """Probe the boxes reached over HTTP, those longest unprobed first; return how many did not answer."""
    nodes = Node.objects.filter(reach=Reach.DIRECT, presence__isnull=False).exclude(public_base_url="")
    failed = 0
    for node in nodes.order_by("presence__probed_at")[:_BATCH]:
        error = probe_url(node.public_base_url)
        failed += bool(error)
        NodePresence.objects.filter(node_id=node.pk).update(probed_at=timezone.now(), probe_error=error[:_MAX_ERROR_CHARS])
    return failed


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
    except httpx.TimeoutException:
        return f"no answer within {_PROBE_TIMEOUT_S:g} s"
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    return "" if response.status_code < 500 else f"answers with {response.status_code}"


def _build_request(client: httpx.Client, target: DirectTarget) -> httpx.Request:
    """Return a request that dials the checked address and is for the host of the URL, in HTTP and in TLS alike."""
    url = httpx.URL(scheme=target.scheme, host=target.address, port=target.port, path=f"{target.base_path}/v1/models")
    return client.build_request(
        "GET", url, headers={"host": f"{target.host}:{target.port}"}, extensions={"sni_hostname": target.host}
    )
