"""The status of a box at this moment, from its rows. Reads nothing itself: the caller loads node and presence."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from django.db.models import Case, CharField, F, Q, Value, When
from django.db.models.functions import Now

from core.limits import limits
from nodes.models import Node, NodePresence, ProviderState, Reach
from nodes.states import Availability, NodeFacts, freshness_windows, judge_availability
from wire.bridge import BRIDGE_V1
from wire.contract import NodeMode, NodeStatus


def read_availability(node: Node, presence: NodePresence | None, *, now: datetime, is_enabled: bool = True) -> Availability:
    """Return whether a node may get new work at ``now``, whenever it last spoke. ``is_enabled``: whether its provider is."""
    facts = NodeFacts(
        age_s=heartbeat_age_s(presence, now=now) if presence is not None else None,
        protocol=presence.protocol if presence is not None else "",
        reported=NodeStatus(presence.reported_status) if presence is not None else NodeStatus.OFFLINE,
        mode=NodeMode(node.mode),
        draining=node.draining,
        cordoned=node.cordoned,
        is_accepting_jobs=presence is not None and presence.is_accepting_jobs,
        unreachable=explain_unreachable(node, presence),
        is_enabled=is_enabled,
        is_drained=is_drained(node, presence),
    )
    return judge_availability(facts, limits().nodes)


def judge_status(node: Node, presence: NodePresence | None, *, now: datetime) -> NodeStatus:
    """Return the contract status every list shows."""
    return read_availability(node, presence, now=now).status


def is_drained(node: Node, presence: NodePresence | None) -> bool:
    """Whether nothing runs on a node that is draining or was reclaimed."""
    return node.drained_at is not None and (presence is None or presence.active_requests == 0)


def explain_unreachable(node: Node, presence: NodePresence | None) -> str:
    """Return why no gateway can send the node a request, however often it is heard; empty when one can."""
    if presence is None:
        return "it has never been heard"
    if presence.connected:
        return ""
    if node.reach != Reach.DIRECT.value or not node.public_base_url:
        return "it holds no socket to a gateway and registered no public_base_url"
    return presence.probe_error if presence.probed_at is not None else "its public_base_url has not been called yet"


def status_expression(*, now: datetime | Now) -> Case:
    """Return ``judge_status`` as SQL over Node, for filters. A test holds the two together."""
    _, rest_s = freshness_windows(limits().nodes, protocol="")
    _, bridge_s = freshness_windows(limits().nodes, protocol=BRIDGE_V1)
    answers = Q(reach=Reach.DIRECT.value, presence__probed_at__isnull=False, presence__probe_error="") & ~Q(public_base_url="")
    is_bridge = Q(presence__protocol=BRIDGE_V1)
    offline = (
        Q(presence__isnull=True)
        | Q(presence__last_heartbeat_at__isnull=True)
        | (is_bridge & Q(presence__last_heartbeat_at__lte=now - timedelta(seconds=bridge_s)))
        | (~is_bridge & Q(presence__last_heartbeat_at__lte=now - timedelta(seconds=rest_s)))
        | Q(presence__reported_status=NodeStatus.OFFLINE.value)
        | ~(Q(presence__connected=True) | answers)
    )
    held_back = (
        Q(draining=True)
        | Q(cordoned=True)
        | Q(mode=NodeMode.SPARE_OFF.value)
        | Q(presence__reported_status=NodeStatus.DRAINING.value)
        | Q(presence__is_accepting_jobs=False)
    )
    return Case(
        When(offline, then=Value(NodeStatus.OFFLINE.value)),
        When(presence__reported_status=NodeStatus.ERROR.value, then=Value(NodeStatus.ERROR.value)),
        When(held_back, then=Value(NodeStatus.DRAINING.value)),
        default=F("presence__reported_status"),
        output_field=CharField(),
    )


def describe_gpus(node: Node, presence: NodePresence | None) -> str:
    """Return one line: ``NVIDIA L4 63 % 18.0/22.5 GiB; …``, from telemetry if there is any, else from registration."""
    gpus = presence.gpus if presence is not None else []
    if not gpus:
        gpus = [
            {
                "name": node.gpu_name,
                "utilization_percent": presence.gpu_util_percent if presence is not None else None,
                "memory_used_mb": presence.vram_used_mb if presence is not None else None,
                "memory_total_mb": node.vram_total_mb,
            }
        ]
    return "; ".join(filter(None, (_describe_gpu(gpu) for gpu in gpus)))


def _describe_gpu(gpu: Mapping[str, object]) -> str:
    busy, used, total = gpu.get("utilization_percent"), gpu.get("memory_used_mb"), gpu.get("memory_total_mb")
    parts = [str(gpu.get("name") or "")]
    if isinstance(busy, int | float):
        parts.append(f"{busy:.0f} %")
    if isinstance(total, int | float):
        parts.append(
            f"{used / 1024:.1f}/{total / 1024:.1f} GiB" if isinstance(used, int | float) else f"{total / 1024:.1f} GiB"
        )
    return " ".join(filter(None, parts))


def heartbeat_age_s(presence: NodePresence, *, now: datetime) -> float | None:
    """Return the seconds since the last sign of life by the server's clock, or None when there was none."""
    if presence.last_heartbeat_at is None:
        return None
    return max(0.0, (now - presence.last_heartbeat_at).total_seconds())


def should_drain(node: Node) -> bool:
    """Return whether the server wants no new work on the box. ``node.provider`` must be loaded."""
    is_held_back = node.cordoned or node.draining or node.mode == NodeMode.SPARE_OFF.value
    return is_held_back or node.provider.state != ProviderState.ENABLED
