"""Runs that are on their way to nodes, for those who reach the nodes: gateways by their sockets, workers by HTTP.

Whoever sends something claims it first. The node carries out each (op_id, use) once, so a second sender does no harm.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime

from django.db.models import Q, QuerySet

from governance.models import OperationRun
from governance.states import FINAL_RUNS, RunState
from wire import clock

_WITH_NODES = (RunState.DISPATCHED.value, RunState.EXECUTING.value)


@dataclass(frozen=True, slots=True)
class NodeRun:
    """A run as it was read. ``statement``: what people signed; ``op_id``: as it stands there.

    ``sent_at``: when the node was given this token, None = not yet. ``contact_at``: when it was last sent something about the
    run, or said something; ``gateway_id``: by which gateway. ``task_id``: how a node that is called over HTTP names it.
    """

    run_id: uuid.UUID
    node_id: uuid.UUID
    op_id: str
    use: int
    operation: str
    statement: bytes = field(repr=False)
    digest: str
    state: RunState
    token: str = field(repr=False)
    token_expires_at: datetime | None
    sent_at: datetime | None
    contact_at: datetime | None
    gateway_id: uuid.UUID | None
    task_id: str

    @property
    def has_ended(self) -> bool:
        """Whether nothing changes it any more."""
        return self.state in FINAL_RUNS

    @property
    def is_waiting(self) -> bool:
        """Whether it is to be given to its node, with the token that it has."""
        return self.state is RunState.DISPATCHED and self.sent_at is None and bool(self.token)


def list_nodes_with_runs() -> set[uuid.UUID]:
    """Return the nodes that have something to do or to be asked about."""
    return {node_id for node_id in _open().values_list("node_id", flat=True).distinct() if node_id is not None}


def list_node_runs(nodes: Collection[uuid.UUID], *, most: int, is_sent: bool) -> list[NodeRun]:
    """Return what is to be sent to these nodes and what they have, oldest first; ``is_sent``: only what they have."""
    rows = _open().filter(node_id__in=nodes).order_by("queued_at", "position")
    rows = rows.exclude(sent_at=None) if is_sent else rows.exclude(sent_at=None, token="")
    return [_read(row) for row in rows[:most]]


def list_unattended(
    nodes: Collection[uuid.UUID], *, unsent_since: datetime, silent_since: datetime, most: int
) -> list[uuid.UUID]:
    """Return the runs on these nodes that nobody has touched since then, the longest first: not sent yet, or sent."""
    waiting = Q(sent_at=None, contact_at__lte=unsent_since) & ~Q(token="")
    rows = _open().filter(waiting | Q(sent_at__isnull=False, contact_at__lte=silent_since), node_id__in=nodes)
    return list(rows.order_by("contact_at").values_list("pk", flat=True)[:most])


def find_node_run(run_id: uuid.UUID) -> NodeRun | None:
    """Return a run that was sent on its way to a node, None when there is no such run."""
    return _first(OperationRun.objects.filter(pk=run_id))


def find_run_of(node_id: uuid.UUID, op_id: uuid.UUID, use: int) -> NodeRun | None:
    """Return the run that a node names, None when it has none such."""
    return _first(OperationRun.objects.filter(node_id=node_id, operation_id=op_id, use=use))


def claim_contact(run: NodeRun, *, gateway_id: uuid.UUID | None = None) -> bool:
    """Note that the node is sent something about a run now; False when anything happened to the run since it was read.

    The node was not heard by that: ``updated_at`` stays.
    """
    now = clock.now()
    same = OperationRun.objects.filter(pk=run.run_id, state=run.state.value, sent_at=run.sent_at, contact_at=run.contact_at)
    return bool(same.update(sent_at=run.sent_at or now, contact_at=now, gateway_id=gateway_id))


def _open() -> QuerySet[OperationRun]:
    runs = OperationRun.objects.filter(ended_at=None, state__in=_WITH_NODES, node_id__isnull=False)
    return runs.select_related("operation")


def _first(rows: QuerySet[OperationRun]) -> NodeRun | None:
    row = rows.exclude(node_id=None).select_related("operation").first()
    return None if row is None else _read(row)


def _read(run: OperationRun) -> NodeRun:
    assert run.node_id is not None
    operation = run.operation
    return NodeRun(
        run.pk, run.node_id, operation.printed_id, run.use, operation.operation, bytes(operation.statement), operation.digest,
        RunState(run.state), run.token, run.token_expires_at, run.sent_at, run.contact_at, run.gateway_id, run.task_id,
    )  # fmt: skip
