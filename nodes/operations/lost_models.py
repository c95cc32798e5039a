"""Models that an operation has loaded and that are gone although nobody had them unloaded, and who is told of it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlencode

from django.db import transaction
from django.utils import timezone

from core.limits import limits
from governance.audit import record_event
from governance.audit.reading import find_last_event, find_last_event_at
from governance.notices import list_requester_and_signers, notify_of_event
from governance.operations.runs import LastRun, list_last_successes
from nodes.models import Node
from nodes.operations.choices import list_boxes
from nodes.operations.params import KEEP
from nodes.operations.targets import Target
from wire import clock
from wire.contract import NodeStatus
from wire.ids import format_id

LOAD, UNLOAD = "model-load", "model-unload"
RELOAD_FAILED = "node.reload-failed"


@dataclass(frozen=True, slots=True)
class LostModel:
    """A model that a node does not have although its last load succeeded. ``reason``: as the node says it, "" = it does not.

    ``is_kept``: people approved that it stays loaded. ``gave_up_ms``: when the node stopped trying to load it again, as it says
    (Unix time in milliseconds); None = it has not. ``back_at``: when the node last connected, None = not known. ``again``:
    the query of the page that proposes, which asks for the same once more.
    """

    model: str
    node_id: uuid.UUID
    node_name: str
    op_id: uuid.UUID
    loaded_at: datetime
    back_at: datetime | None
    reason: str
    is_kept: bool
    again: str
    gave_up_ms: int | None = None

    @property
    def what(self) -> str:
        """One sentence that names model and node."""
        return f"{self.model} was loaded on {self.node_name} and is not any more."

    @property
    def advice(self) -> str:
        """Since when, and why."""
        since = f"It was loaded at {_print(self.loaded_at)}."
        if self.back_at is not None:
            since = f"{since} {self.node_name} connected at {_print(self.back_at)} without it."
        if self.is_kept:
            why = f"It is approved to stay loaded, and {self.node_name} says: {self.reason or 'nothing about it'}."
        else:
            why = f"{self.node_name} says: {self.reason}." if self.reason else "Its approval did not ask to keep it loaded."
        return f"{since} {why}"


def find_lost_models(op_id: uuid.UUID | None = None) -> tuple[LostModel, ...]:
    """Return what nodes that are connected have lost, by node and model; ``op_id``: only what this operation had loaded.

    Three queries when nothing is lost, one while no node that takes operations is connected.
    """
    targets = {box.node.runner_id: box for box in list_boxes() if _is_heard(box)}
    if not targets:
        return ()
    loads = [run for run in _read_loads(targets) if op_id is None or run.op_id == op_id]
    lost = [found for run in loads if (found := _compare(targets[run.target], run)) is not None]
    return tuple(sorted(lost, key=lambda each: (each.node_name, each.model)))


def tell_failed_reloads() -> int:
    """Tell of each kept model that a node has given up loading again, once for each time it gave up; return how many are new.

    Who asked for the load and who signed it are told, since they said that the model stays loaded and can ask for it again.
    """
    gave_up = [lost for lost in find_lost_models() if lost.is_kept and lost.gave_up_ms is not None]
    return sum(_tell(lost) for lost in gave_up)


@transaction.atomic
def _tell(lost: LostModel) -> bool:
    # The row lock makes "not told yet" and "told" one step: two sweeps at once tell of a failure once.
    node = Node.objects.select_for_update(of=("self",)).get(pk=lost.node_id)
    told = find_last_event(action=RELOAD_FAILED, target=node.printed_id, detail={"model": lost.model})
    if told is not None and (
        told.detail.get("gave_up_ms") == lost.gave_up_ms
        or clock.now() - told.at < timedelta(seconds=limits().nodes.reload_failed_again_s)
    ):
        return False
    detail = {"name": node.name, "model": lost.model, "reason": lost.reason, "gave_up_ms": lost.gave_up_ms}
    event = record_event(
        actor="system:sweep", action=RELOAD_FAILED, target=node.printed_id, detail=detail, op_id=format_id("op", lost.op_id)
    )
    notify_of_event(event, "reload_failed", usernames=list_requester_and_signers(lost.op_id))
    return True


def _is_heard(box: Target) -> bool:
    """Whether what the node says of its models is of now; one that is away has another problem."""
    said = box.box.says_something and box.box.is_current
    return bool(box.node.runner_id and box.node.op_level and said and box.status is not NodeStatus.OFFLINE)


def _read_loads(targets: Collection[str]) -> Iterator[LastRun]:
    """Yield, for each node and model, the last load, unless an unload or an eviction came after it."""
    evictions = list_last_successes(targets=targets, operations=[LOAD], member="evicted")
    evicted_at = {(run.target, run.subject): run.ended_at for run in evictions}
    for run in list_last_successes(targets=targets, operations=[LOAD, UNLOAD], member="modelId"):
        if run.operation == LOAD and evicted_at.get((run.target, run.subject), run.ended_at) <= run.ended_at:
            yield run


def _compare(target: Target, run: LastRun) -> LostModel | None:
    model, view, node = str(run.params.get("modelId")), target.box, target.node
    if model in target.loaded or any(replica.model == model for replica in view.changing) or model in node.model_names:
        return None
    failed = next((replica for replica in view.failed if replica.model == model), None)
    reason, gave_up_ms = (failed.detail, failed.gave_up_ms) if failed is not None else ("", None)
    return LostModel(
        model=model, node_id=node.pk, node_name=node.name, op_id=run.op_id, loaded_at=run.ended_at,
        back_at=find_last_event_at(action="node.connect", target=node.printed_id), reason=reason.rstrip("."),
        is_kept=run.params.get(KEEP) is True, again=_make_query(run), gave_up_ms=gave_up_ms,
    )  # fmt: skip


def _make_query(run: LastRun) -> str:
    fields = [("operation", run.operation), ("target", run.target)]
    if run.op_class != run.operation:
        fields.append(("op_class", run.op_class))
    return urlencode([*fields, *((name, _as_text(value)) for name, value in {KEEP: False, **run.params}.items())])


def _as_text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else ""
    return value if isinstance(value, str) else json.dumps(value)


def _print(at: datetime) -> str:
    return f"{timezone.localtime(at):%Y-%m-%d %H:%M %Z}"
