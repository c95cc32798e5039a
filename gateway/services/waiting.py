"""Why requests wait, model by model: what stands in the way, and what an operator can do. Reads only."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from django.db.models import Count, Min

from core.limits import limits
from gateway.models import RequestRecord
from nodes.services.availability import Has, ServingBox, read_boxes_of
from nodes.states import Obstacle
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState

_BRIEF = {
    Obstacle.DRAINING: "draining",
    Obstacle.DRAINED: "drained",
    Obstacle.CORDONED: "cordoned",
    Obstacle.PROVIDER_OFF: "provider off",
    Obstacle.TAKEN_BACK: "taken back",
    Obstacle.HOLDS_BACK: "node holds back",
    Obstacle.LATE: "node late",
    Obstacle.ERROR: "node in error",
    Obstacle.UNREACHABLE: "node unreachable",
    Obstacle.SILENT: "node offline",
}
_LIFTED_FIRST = tuple(_BRIEF)
"""A click first, then a question to somebody, then a walk to the box."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a request for a model waits. ``brief`` fits a badge; ``reason`` and ``advice`` are sentences.

    ``is_starting``: nothing stands in the way.
    """

    brief: str
    reason: str
    advice: str
    is_starting: bool = False


@dataclass(frozen=True, slots=True)
class WaitingModel:
    """A model that requests wait for: how many, for how long the first of them, and why."""

    model: str
    requests: int
    oldest_wait_s: float
    wait: Wait


def read_waits() -> tuple[WaitingModel, ...]:
    """Return what is waited for, the longest wait first; one query when nothing waits, three when something does."""
    queued = RequestRecord.objects.filter(state=RequestState.QUEUED.value).values("model")
    waits = queued.annotate(requests=Count("pk"), since=Min("created_at")).order_by("since")
    rows = waits[: limits().gateway.page_waiting_models]
    found = {row["model"]: row for row in rows}
    now = clock.now()
    return tuple(
        WaitingModel(model, found[model]["requests"], max(0.0, (now - found[model]["since"]).total_seconds()), wait)
        for model, wait in explain_waits(found).items()
    )


def explain_waits(models: Collection[str]) -> dict[str, Wait]:
    """Return for each model why a request for it would wait now; two queries, none for no model."""
    if not models:
        return {}
    boxes, running = read_boxes_of(models), _count_running()
    return {model: explain_wait(model, _add_running(boxes[model], running)) for model in models}


def explain_wait(model: str, boxes: Sequence[ServingBox]) -> Wait:
    """Return why a request for a model waits, given the boxes that have it, load it or could. Pure."""
    loaded = [box for box in boxes if box.has is Has.LOADED]
    able = [box for box in loaded if box.obstacle is None]
    free = [box for box in able if box.active < box.slots]
    if free:
        return Wait(
            "starting",
            f"{model} is served by {free[0].name} ({free[0].slots - free[0].active} of {free[0].slots} slots free).",
            "It starts at once. If it does not, the node may not answer the request's path: see its page.",
            is_starting=True,
        )
    if able:
        full = _join(f"{box.name} {box.active} of {box.slots}" for box in able)
        return Wait(
            "nodes full",
            f"Every node that has {model} is full: {full}.",
            f"It starts when one is done. To shorten the queue, load {model} on another node or lower the rates of keys.",
        )
    loading = [box for box in boxes if box.has is Has.LOADING and box.obstacle is None]
    if loading:
        far = f", {loading[0].percent} % so far" if loading[0].percent is not None else ""
        return Wait("loading", f"{loading[0].name} is loading {model}{far}.", "It starts when the model is loaded.")
    if loaded:
        return _explain_held(model, loaded)
    return _explain_missing(model, boxes)


def _explain_held(model: str, boxes: Sequence[ServingBox]) -> Wait:
    """Say why no box that has the model takes work; the advice is for the obstacle that an operator lifts most easily."""
    first = min(boxes, key=lambda box: _LIFTED_FIRST.index(box.obstacle or Obstacle.SILENT))
    if len(boxes) == 1:
        reason = f"Only {first.name} has {model}, and it {first.obstacle}."
    else:
        reason = f"No node that has {model} takes work: {_join(f'{box.name} {box.obstacle}' for box in boxes)}."
    return Wait(_BRIEF[first.obstacle or Obstacle.SILENT], reason, _advise(model, first))


def _advise(model: str, box: ServingBox) -> str:
    match box.obstacle:
        case Obstacle.PROVIDER_OFF:
            return f"Enable the provider {box.provider}, or load {model} on a node of another one."
        case Obstacle.DRAINING | Obstacle.DRAINED:
            return f"Undrain {box.name}, or load {model} on another node."
        case Obstacle.CORDONED:
            return f"Uncordon {box.name}, or load {model} on another node."
        case Obstacle.TAKEN_BACK:
            return f"Ask {box.owner or 'its owner'}, or load {model} on another node."
        case Obstacle.ERROR:
            return f"{box.name} says: {box.last_error}" if box.last_error else f"Look at the page of {box.name} and at its log."
        case Obstacle.LATE:
            return f"{box.name} gets no new work until it is heard again. Check its network."
        case Obstacle.UNREACHABLE:
            return f"{box.name} is heard, but its public_base_url does not answer: its page under Nodes says why."
        case _:
            return f"Check the power of {box.name}, its network and the runner's log."


def _explain_missing(model: str, boxes: Sequence[ServingBox]) -> Wait:
    able = [box.name for box in boxes if box.has is Has.COULD and box.obstacle is None]
    if able:
        where = _join(able)
        return Wait(
            "not loaded", f"No node has {model} loaded; {where} could load it.", f"Propose on the page of {able[0]} to load it."
        )
    return Wait(
        "no node",
        f"No node has {model}.",
        "Start a node that has it. If the name is wrong, correct the alias or the client.",
    )


def _count_running() -> Counter[uuid.UUID]:
    """Return how many requests each box works on by our own records: newer than its last heartbeat."""
    states = [state.value for state in OPEN_REQUEST_STATES if state is not RequestState.QUEUED]
    rows = RequestRecord.objects.filter(state__in=states, node_id__isnull=False).values_list("node_id")
    return Counter(dict(rows.annotate(count=Count("pk")).order_by()))


def _add_running(boxes: Sequence[ServingBox], running: Mapping[uuid.UUID, int]) -> list[ServingBox]:
    return [replace(box, active=max(box.active, running.get(box.node_id, 0))) for box in boxes]


def _join(parts: Iterable[str]) -> str:
    named = list(parts)
    most = limits().gateway.page_named
    beyond = f" and {len(named) - most} more" if len(named) > most else ""
    return ", ".join(named[:most]) + beyond
