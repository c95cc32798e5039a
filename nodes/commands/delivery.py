"""What is to be sent to the boxes on the sockets of one gateway process now. Decided by the rows; sending is the caller's.

Two gateways that hold sockets of one box may both send: the box carries out each (op_id, use) once. The compare-and-set only
keeps that rare.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import connection

from core.limits import limits
from governance.services import read_freeze, requeue_run
from nodes.commands.rows import park_command
from nodes.models import NodeCommand
from wire import clock

_OPEN = (NodeCommand.State.WAITING, NodeCommand.State.SENT, NodeCommand.State.RUNNING)
_NODES_WITH_OPEN = "SELECT DISTINCT node_id FROM nodes_nodecommand WHERE state = ANY(%s)"


@dataclass(frozen=True, slots=True)
class Send:
    """Send the command with its token."""

    node_id: uuid.UUID
    op_id: str
    use: int
    operation: str
    body: dict[str, object]
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the box where the command stands."""

    node_id: uuid.UUID
    op_id: str
    use: int


Delivery = Send | Ask


def plan_deliveries(*, linked: Mapping[uuid.UUID, datetime], gateway_id: uuid.UUID) -> list[Delivery]:
    """Return what to send now, marked as sent. ``linked``: since when each box is linked to this process.

    A command whose token has run out goes back to be given another. While all operations are frozen none is sent; boxes are
    still asked about those that they have.
    """
    if not linked:
        return []
    # Few nodes have open commands, and thousands may be linked: the database is not told of all these each time.
    with connection.cursor() as cursor:
        cursor.execute(_NODES_WITH_OPEN, [[state.value for state in _OPEN]])
        wanted = linked.keys() & {node_id for (node_id,) in cursor.fetchall()}
    if not wanted:
        return []
    now = clock.now()
    open_ones = NodeCommand.objects.filter(node_id__in=wanted, state__in=_OPEN).order_by("created_at")
    due = open_ones.exclude(state=NodeCommand.State.WAITING, token="")
    rows = list(due[: limits().nodes.command_batch])
    if rows and read_freeze() is not None:
        rows = list(due.exclude(state=NodeCommand.State.WAITING)[: limits().nodes.command_batch])
    deliveries: list[Delivery] = []
    for row in rows:
        delivery = _plan(row, since=linked[row.node_id], now=now, gateway_id=gateway_id)
        if delivery is not None:
            deliveries.append(delivery)
    return deliveries


def _plan(row: NodeCommand, *, since: datetime, now: datetime, gateway_id: uuid.UUID) -> Delivery | None:
    if row.state == NodeCommand.State.WAITING:
        return _plan_first(row, now=now, gateway_id=gateway_id)
    # What was sent over a socket of ours that is gone may never have arrived. Of another gateway's sockets nothing is known.
    is_cut_off = row.gateway_id == gateway_id and row.updated_at < since
    if not is_cut_off and now - row.updated_at < timedelta(seconds=limits().nodes.command_quiet_s):
        return None
    mine = NodeCommand.objects.filter(pk=row.pk, state=row.state, updated_at=row.updated_at)
    return Ask(row.node_id, row.op_id, row.use) if mine.update(gateway_id=gateway_id, updated_at=now) else None


def _plan_first(row: NodeCommand, *, now: datetime, gateway_id: uuid.UUID) -> Send | None:
    if row.token_expires_at is None or row.token_expires_at - now <= timedelta(seconds=limits().nodes.command_token_margin_s):
        requeue_run(run_id=row.pk, reason="its token ran out before the box could be reached")
        park_command(row)
        return None
    mine = NodeCommand.objects.filter(pk=row.pk, state=NodeCommand.State.WAITING, token=row.token)
    if not mine.update(state=NodeCommand.State.SENT, sent_at=now, gateway_id=gateway_id, updated_at=now):
        return None
    return Send(row.node_id, row.op_id, row.use, row.operation, dict(row.body), row.token)
