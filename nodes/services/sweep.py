"""What nobody reports: boxes that fell silent, drains that have nothing left to drain, deadlines long past."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import F, Q
from django.db.models.functions import Coalesce

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.models import Node, NodeDrainCount, NodePresence
from nodes.services.clock import read_clock
from nodes.services.drains import end_stop, mark_drained
from nodes.states import freshness_windows
from wire.bridge import BRIDGE_V1
from wire.contract import NodeMode, NodeStatus

ACTOR = "system:sweep"
LOCK_KEY = 0x6D757374_6E6F6465
"""Advisory lock of this sweep: ``mustnode`` in ASCII."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """How many rows a sweep changed. ``skipped``: another process was sweeping."""

    skipped: bool = False
    went_offline: int = 0
    drains_ended: int = 0
    deadlines_cleared: int = 0
    drained: int = 0


def sweep_presence() -> SweepReport:
    """Bring the rows in line with what their age says. Idempotent; two at once do the work of one."""
    return _sweep() if _is_anything_due() else SweepReport()


def _is_anything_due() -> bool:
    """Whether a node is silent, or drains, or did: one look, for that is rare and a sweep asks ten times."""
    age_s = min(freshness_windows(limits().nodes, protocol=one)[1] for one in ("", BRIDGE_V1))
    with connection.cursor() as cursor:
        cursor.execute(_IS_ANYTHING_DUE, [age_s])
        row = cursor.fetchone()
    return bool(row == (True,))


_IS_ANYTHING_DUE = """
SELECT EXISTS (
       SELECT FROM nodes_nodepresence
        WHERE (connected OR reported_status <> 'offline')
          AND COALESCE(last_heartbeat_at, updated_at) <= statement_timestamp() - make_interval(secs => %s)
       )
    OR EXISTS (
       SELECT FROM nodes_node
        WHERE draining OR mode = 'spare_off' OR draining_since IS NOT NULL OR drain_deadline_at IS NOT NULL
       )
    OR EXISTS (SELECT FROM nodes_nodedraincount)
"""


@transaction.atomic
def _sweep() -> SweepReport:
    if not _take_lock():
        return SweepReport(skipped=True)
    now = read_clock()
    went_offline = _mark_offline(now)
    deadlines_cleared = _clear_deadlines(now)
    drains_ended = _end_drains()
    _name_drains(now)
    return SweepReport(
        went_offline=went_offline, deadlines_cleared=deadlines_cleared, drains_ended=drains_ended, drained=mark_drained()
    )


def _take_lock() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [LOCK_KEY])
        row = cursor.fetchone()
    return bool(row and row[0])


def _is_overdue(now: datetime) -> Q:
    """Rows whose last sign of life is older than their protocol allows. Needs the annotation ``seen_at``."""
    _, rest_s = freshness_windows(limits().nodes, protocol="")
    _, bridge_s = freshness_windows(limits().nodes, protocol=BRIDGE_V1)
    bridge = Q(protocol=BRIDGE_V1, seen_at__lte=now - timedelta(seconds=bridge_s))
    return bridge | (~Q(protocol=BRIDGE_V1) & Q(seen_at__lte=now - timedelta(seconds=rest_s)))


def _mark_offline(now: datetime) -> int:
    rows = NodePresence.objects.annotate(seen_at=Coalesce("last_heartbeat_at", "updated_at")).filter(_is_overdue(now))
    claimed = rows.filter(Q(connected=True) | ~Q(reported_status=NodeStatus.OFFLINE.value)).select_related("node")
    went = 0
    for presence in claimed.order_by("pk"):
        # Compare and set: a heartbeat that arrived since keeps the box.
        same = NodePresence.objects.filter(pk=presence.pk, last_heartbeat_at=presence.last_heartbeat_at)
        if presence.last_heartbeat_at is None:
            same = NodePresence.objects.filter(pk=presence.pk, last_heartbeat_at__isnull=True)
        changed = same.update(
            connected=False,
            gateway_id=None,
            reported_status=NodeStatus.OFFLINE.value,
            active_requests=0,
            updated_at=now,
        )
        if changed:
            went += 1
            _record(presence.node, "node.offline")
    return went


def _end_drains() -> int:
    """End drains with nothing left to drain: the deadline is long past and the box is gone.

    Until then a drain survives reconnects, and a box that is still there stays drained until an operator undrains it.
    """
    gone = Q(presence__isnull=True) | Q(presence__connected=False, presence__reported_status=NodeStatus.OFFLINE.value)
    over = Node.objects.select_for_update(of=("self",)).filter(gone, draining=True, drain_deadline_at__isnull=True)
    ended = 0
    for node in over.order_by("pk"):
        changes: dict[str, object] = {"draining": False, "drain_reason": ""}
        if node.mode != NodeMode.SPARE_OFF.value:
            changes |= end_stop()
        for field, value in changes.items():
            setattr(node, field, value)
        node.save(update_fields=[*changes, "updated_at"])
        ended += 1
        _record(node, "node.drain_end")
    return ended


def _name_drains(now: datetime) -> None:
    """Name the drains that a release without ``draining_since`` began, and forget what was counted for drains that are over."""
    stopping = Q(draining=True) | Q(mode=NodeMode.SPARE_OFF.value)
    Node.objects.filter(stopping, draining_since=None).update(draining_since=now, updated_at=now)
    Node.objects.filter(~stopping, draining_since__isnull=False).update(**end_stop(), updated_at=now)
    NodeDrainCount.objects.exclude(draining_since=F("node__draining_since")).delete()


def _clear_deadlines(now: datetime) -> int:
    past = Node.objects.filter(drain_deadline_at__lt=now - timedelta(seconds=limits().nodes.drain_deadline_kept_s))
    return past.update(drain_deadline_at=None, updated_at=now)


def _record(node: Node, action: str) -> None:
    record_event(actor=ACTOR, action=action, target=node.printed_id, detail={"name": node.name})
    publish_hint("nodes", str(node.pk))
