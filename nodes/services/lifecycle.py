"""What operators and the owner decide about a box: cordon, drain, lend and reclaim. Each survives reconnects.

Asking for what is already so changes nothing, so a button pressed twice is harmless.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.registry import RunOrder
from governance.services import require_approval
from nodes.errors import BadRequest, NodeNotFound
from nodes.models import Node
from nodes.services.clock import read_clock
from nodes.services.drains import begin_stop, end_stop
from wire.contract import NodeMode

FORCED_DRAIN, EVICT = "node-drain", "node-evict"

Changes = dict[str, object]


def cordon_node(*, node_id: uuid.UUID, actor: str) -> Node:
    """Give the box no new work until it is uncordoned; what runs goes on. Raises NodeNotFound."""
    return _change(node_id, "node.cordon", actor, lambda node: {} if node.cordoned else {"cordoned": True})


def uncordon_node(*, node_id: uuid.UUID, actor: str) -> Node:
    """Lift a cordon. Raises NodeNotFound."""
    return _change(node_id, "node.uncordon", actor, lambda node: {"cordoned": False} if node.cordoned else {})


@transaction.atomic
def drain_node(
    *, node_id: uuid.UUID, actor: str, reason: str, timeout_s: float | None = None, order: RunOrder | None = None
) -> Node:
    """Give the box no new work, and end as interrupted what still runs after ``timeout_s`` (None = the setting).

    Less time than the setting is a forced drain: ``order`` is then the approved run that it belongs to. A second drain replaces
    deadline and reason. Raises NodeNotFound, BadRequest, NeedsApproval.
    """
    limit_s = limits().nodes.drain_timeout_s if timeout_s is None else timeout_s
    if not 0 <= limit_s <= limits().nodes.drain_timeout_max_s:
        raise BadRequest(
            f"timeout_s must be between 0 and {limits().nodes.drain_timeout_max_s:.0f} seconds.", param="timeout_s"
        )
    if limit_s < limits().nodes.drain_timeout_s:
        is_eviction = order is not None and order.operation == EVICT
        usual = f"the same without a time of your own (--timeout, timeout_s) gives {limits().nodes.drain_timeout_s:.0f} s"
        require_approval(
            EVICT if is_eviction else FORCED_DRAIN, order=order, instead=f"A plain drain needs none: {usual} to what runs."
        )  # fmt: skip
    deadline = read_clock() + timedelta(seconds=limit_s)

    def decide(node: Node) -> Changes:
        return {
            "draining": True,
            "drain_deadline_at": _earlier(deadline, _reclaim_deadline(node)),
            "drain_reason": _checked_reason(reason),
            "drain_actor": actor[:200],
            **({} if node.draining else begin_stop()),
        }

    return _change(node_id, "node.drain", actor, decide)


def undrain_node(*, node_id: uuid.UUID, actor: str) -> Node:
    """End a drain. A reclaimed box stays reclaimed, and keeps the deadline of that. Raises NodeNotFound."""

    def decide(node: Node) -> Changes:
        if not node.draining:
            return {}
        if node.mode == NodeMode.SPARE_OFF.value:
            return {"draining": False}
        return {"draining": False, "drain_deadline_at": None, "drain_reason": "", **end_stop()}

    return _change(node_id, "node.undrain", actor, decide)


@transaction.atomic
def set_mode(*, node_id: uuid.UUID, mode: NodeMode, reason: str, actor: str, said_age_s: float = 0.0) -> Node:
    """Lend the box (``spare_on``) or take it back (``spare_off``: no new work, the rest gets the reclaim grace).

    Saying ``spare_off`` again does not extend the grace. ``said_age_s``: how many seconds ago it was asked for; a wish that is
    older than the mode in force changes nothing. Raises NodeNotFound, BadRequest.
    """
    now = read_clock()
    deadline, said_at = now + timedelta(seconds=limits().nodes.reclaim_grace_s), now - timedelta(seconds=said_age_s)
    is_newest = Q(mode_said_at=None) | Q(mode_said_at__lte=said_at)
    is_void = not Node.objects.filter(is_newest, pk=node_id).update(mode_said_at=said_at)

    def decide(node: Node) -> Changes:
        if node.mode == mode.value or is_void:
            return {}
        changes: Changes = {"mode": mode.value}
        if mode is NodeMode.SPARE_OFF:
            changes["drain_deadline_at"] = _earlier(deadline, node.drain_deadline_at if node.draining else None)
            changes["drain_reason"] = _checked_reason(reason)
            if not node.draining:
                changes |= begin_stop()
        elif not node.draining:
            changes |= {"drain_deadline_at": None, "drain_reason": "", **end_stop()}
        return changes

    return _change(node_id, "node.set_mode", actor, decide)


@transaction.atomic
def _change(node_id: uuid.UUID, action: str, actor: str, decide: Callable[[Node], Changes]) -> Node:
    """Apply what ``decide`` says of the locked row, with its audit event; an empty answer means nothing to do."""
    node = Node.objects.select_for_update().filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(f"There is no node {node_id}.", param="node_id")
    changes = decide(node)
    if not changes:
        return node
    for field, value in changes.items():
        setattr(node, field, value)
    node.save(update_fields=[*changes, "updated_at"])
    detail = {"name": node.name, **{field: _plain(value) for field, value in changes.items()}}
    record_event(actor=actor, action=action, target=node.printed_id, detail=detail)
    publish_hint("nodes", str(node.pk))
    return node


def _checked_reason(reason: str) -> str:
    if len(reason) > limits().nodes.drain_reason_chars:
        raise BadRequest(f"reason must have at most {limits().nodes.drain_reason_chars} characters.", param="reason")
    return reason


def _reclaim_deadline(node: Node) -> datetime | None:
    return node.drain_deadline_at if node.mode == NodeMode.SPARE_OFF.value else None


def _earlier(deadline: datetime, other: datetime | None) -> datetime:
    return deadline if other is None else min(deadline, other)


def _plain(value: object) -> object:
    return value.isoformat() if isinstance(value, datetime) else value
