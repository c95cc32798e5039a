"""Which boxes have a model, load it or could, and why one of them takes no work. Reads only; for pages that explain."""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from nodes.models import Node, NodePresence, ProviderState
from nodes.services.boxes import BoxView, describe_box
from nodes.services.clock import clock_of, with_clock
from nodes.services.health import read_availability
from nodes.states import Obstacle


class Has(StrEnum):
    """How near a box is to answering for a model."""

    LOADED = "loaded"
    LOADING = "loading"
    COULD = "could"
    """The model lies on it, or it may fetch it; nobody has loaded it."""


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
        is_enabled = node.provider.state == ProviderState.ENABLED
        obstacle = read_availability(node, presence, now=now, is_enabled=is_enabled).obstacle
        for model, boxes in found.items():
            has, percent = _find_share(node, presence, view, model)
            if has is not None:
                boxes.append(_describe(node, presence, has, percent, obstacle))
    return {model: tuple(boxes) for model, boxes in found.items()}


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
