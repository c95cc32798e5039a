"""Which boxes have a model, load it or could, and why one of them takes no work. Reads only; for pages that explain."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from django.conf import settings

from nodes.models import Node, NodePresence, ProviderState
from nodes.services.boxes import BoxView, describe_box
from nodes.services.clock import clock_of, with_clock
from nodes.services.drains import is_drained
from nodes.services.health import explain_unreachable, heartbeat_age_s, judge_status
from nodes.states import Freshness, freshness_windows, judge_freshness
from wire.contract import NodeMode, NodeStatus


class Has(StrEnum):
    """How near a box is to answering for a model."""

    LOADED = "loaded"
    LOADING = "loading"
    COULD = "could"
    """The model lies on it, or it may fetch it; nobody has loaded it."""


class Obstacle(StrEnum):
    """Why a box takes no new work, said of the box; the first that holds counts."""

    SILENT = "is offline"
    UNREACHABLE = "cannot be reached"
    PROVIDER_OFF = "belongs to a provider that is switched off"
    ERROR = "reports an error"
    DRAINING = "is being drained"
    DRAINED = "was drained"
    CORDONED = "is cordoned"
    TAKEN_BACK = "was taken back by its owner"
    HOLDS_BACK = "says itself that it takes no work"
    LATE = "is late with its heartbeats"


@dataclass(frozen=True, slots=True)
class ServingBox:
    """One box as somebody sees it who waits for a model. ``obstacle`` None = it takes work.

    ``active`` of ``slots`` are requests; ``percent``: how far it has loaded the model, None = it does not say;
    ``provider`` and ``owner``: whom to ask.
    """

    node_id: uuid.UUID
    name: str
    has: Has
    obstacle: Obstacle | None
    active: int
    slots: int
    percent: int | None = None
    provider: str = ""
    owner: str = ""
    last_error: str = ""


def read_boxes_of(models: Collection[str]) -> dict[str, tuple[ServingBox, ...]]:
    """Return for each model the boxes that have it, load it or could, by name; one query."""
    boxes_there_are = Node.objects.exclude(provider__state=ProviderState.DELETED)
    rows = with_clock(boxes_there_are).select_related("presence", "provider").order_by("name")
    found: dict[str, list[ServingBox]] = {model: [] for model in models}
    for node in rows if models else ():
        now = clock_of(node)
        presence: NodePresence | None = getattr(node, "presence", None)
        view = describe_box(node, now=now)
        obstacle = find_obstacle(node, presence, now=now)
        for model, boxes in found.items():
            has, percent = _find_share(node, presence, view, model)
            if has is not None:
                boxes.append(_describe(node, presence, has, percent, obstacle))
    return {model: tuple(boxes) for model, boxes in found.items()}


def find_obstacle(node: Node, presence: NodePresence | None, *, now: datetime) -> Obstacle | None:
    """Return why a box gets no new work at ``now``; None when it does. ``node.provider`` must be loaded."""
    status = judge_status(node, presence, now=now)
    if status is NodeStatus.OFFLINE or presence is None:
        is_heard = presence is not None and not _is_silent(presence, now=now)
        return Obstacle.UNREACHABLE if is_heard and explain_unreachable(node, presence) else Obstacle.SILENT
    if node.provider.state != ProviderState.ENABLED:
        return Obstacle.PROVIDER_OFF
    if status is NodeStatus.ERROR:
        return Obstacle.ERROR
    if node.draining:
        return Obstacle.DRAINED if is_drained(node, presence) else Obstacle.DRAINING
    if node.cordoned:
        return Obstacle.CORDONED
    if node.mode == NodeMode.SPARE_OFF.value:
        return Obstacle.TAKEN_BACK
    if status is NodeStatus.DRAINING:
        return Obstacle.HOLDS_BACK
    return Obstacle.LATE if _judge(presence, now=now) is not Freshness.FRESH else None


def _judge(presence: NodePresence, *, now: datetime) -> Freshness:
    stale_after_s, offline_after_s = freshness_windows(settings.NODE_HEALTH, protocol=presence.protocol)
    age_s = heartbeat_age_s(presence, now=now)
    return judge_freshness(age_s, stale_after_s=stale_after_s, offline_after_s=offline_after_s)


def _is_silent(presence: NodePresence, *, now: datetime) -> bool:
    is_gone = presence.reported_status == NodeStatus.OFFLINE.value
    return is_gone or _judge(presence, now=now) is Freshness.OFFLINE


def _find_share(node: Node, presence: NodePresence | None, view: BoxView, model: str) -> tuple[Has | None, int | None]:
    if model in node.model_names:
        return Has.LOADED, None
    loading = next((replica for replica in view.changing if (replica.model, replica.state) == (model, Has.LOADING)), None)
    if loading is not None:
        return Has.LOADING, loading.percent
    available = presence.available_models if presence is not None else None
    return (Has.COULD if model in (available or ()) else None), None


def _describe(
    node: Node, presence: NodePresence | None, has: Has, percent: int | None, obstacle: Obstacle | None
) -> ServingBox:
    return ServingBox(
        node_id=node.pk,
        name=node.name,
        has=has,
        obstacle=obstacle,
        active=presence.active_requests if presence is not None else 0,
        slots=node.max_concurrent,
        percent=percent,
        provider=node.provider.name,
        owner=node.owner_name,
        last_error=presence.last_error if presence is not None else "",
    )
