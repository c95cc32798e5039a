"""Models that an operation has loaded and that are not loaded any more, although nobody had them unloaded. Reads only."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import urlencode

from django.utils import timezone

from governance.audit.reading import find_last_event_at
from governance.services import LastRun, list_last_successes
from nodes.operations.choices import list_boxes
from nodes.operations.params import KEEP
from nodes.operations.targets import Target
from wire.contract import NodeStatus

LOAD, UNLOAD = "model-load", "model-unload"


@dataclass(frozen=True, slots=True)
class LostModel:
    """A model that a node does not have although its last load succeeded. ``reason``: as the node says it, "" = it does not.

    ``is_kept``: people approved that it stays loaded. ``back_at``: when the node last connected, None = not known. ``again``:
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
    reason = next((replica.detail for replica in view.failed if replica.model == model), "")
    return LostModel(
        model=model, node_id=node.pk, node_name=node.name, op_id=run.op_id, loaded_at=run.ended_at,
        back_at=find_last_event_at(action="node.connect", target=node.printed_id), reason=reason.rstrip("."),
        is_kept=run.params.get(KEEP) is True, again=_make_query(run),
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
