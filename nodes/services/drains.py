"""Cordons, drains and reclaims of nodes: what operators and owners decide, how it stands, and the sweep of silent nodes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.db import connection, transaction
from django.db.models import F, Q
from django.db.models.functions import Coalesce
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.notices import notify_of_event
from governance.operations.approvals import require_approval
from governance.registry import RunOrder
from nodes.errors import BadRequest, NodeNotFound
from nodes.models import Node, NodeDrainCount, NodePresence, presence_of, read_clock, save_changes
from nodes.services.availability import is_drained, judge_status
from nodes.states import DrainCount, freshness_windows
from wire import clock
from wire.agent import METALYARD, METALYARD_RELAY
from wire.bridge import BRIDGE_V1
from wire.contract import NodeMode, NodeStatus

FORCED_DRAIN, EVICT = "node-drain", "node-evict"
ACTOR = "system:sweep"

Changes = dict[str, object]


def cordon_node(*, node_id: uuid.UUID, actor: str) -> Node:
    """Give the node no new work until it is uncordoned; what runs goes on. Raises NodeNotFound."""
    return _change(node_id, "node.cordon", actor, lambda node: {} if node.cordoned else {"cordoned": True})


def uncordon_node(*, node_id: uuid.UUID, actor: str) -> Node:
    """Lift a cordon. Raises NodeNotFound."""
    return _change(node_id, "node.uncordon", actor, lambda node: {"cordoned": False} if node.cordoned else {})


@transaction.atomic
def drain_node(
    *, node_id: uuid.UUID, actor: str, reason: str, timeout_s: float | None = None, order: RunOrder | None = None
) -> Node:
    """Give the node no new work, and end as interrupted what still runs after ``timeout_s`` (None = the setting).

    Less time than the setting is a forced drain: ``order`` is then the approved run that it belongs to. A second drain replaces
    deadline and reason. Raises NodeNotFound, BadRequest, NeedsApproval.
    """
    limit_s = limits().nodes.drain_timeout_s if timeout_s is None else timeout_s
    if not 0 <= limit_s <= limits().nodes.drain_timeout_max_s:
        raise BadRequest(
            _("timeout_s must be between 0 and %(drain_timeout_max_s)s seconds.")
            % {"drain_timeout_max_s": f"{limits().nodes.drain_timeout_max_s:.0f}"},
            param="timeout_s",
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
            "drain_deadline_at": _earlier(deadline, node.drain_deadline_at if is_reclaimed(node) else None),
            "drain_reason": _checked_reason(reason),
            "drain_actor": actor[:200],
            **({} if node.draining else begin_stop()),
        }

    return _change(node_id, "node.drain", actor, decide)


def undrain_node(*, node_id: uuid.UUID, actor: str) -> Node:
    """End a drain. A reclaimed node stays reclaimed, and keeps the deadline of that. Raises NodeNotFound."""

    def decide(node: Node) -> Changes:
        if not node.draining:
            return {}
        if is_reclaimed(node):
            return {"draining": False}
        return {"draining": False, "drain_deadline_at": None, "drain_reason": "", **end_stop()}

    return _change(node_id, "node.undrain", actor, decide)


@transaction.atomic
def set_mode(*, node_id: uuid.UUID, mode: NodeMode, reason: str, actor: str, said_age_s: float = 0.0) -> Node:
    """Lend the node (``spare_on``) or take it back (``spare_off``: no new work, the rest gets the reclaim grace).

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
        raise NodeNotFound(_("There is no node %(node_id)s.") % {"node_id": node_id}, param="node_id")
    changes = decide(node)
    if not changes:
        return node
    save_changes(node, changes)
    said = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in changes.items()}
    detail = {"name": node.name, **said}
    record_event(actor=actor, action=action, target=node.printed_id, detail=detail)
    publish_hint("nodes", str(node.pk))
    return node


def _checked_reason(reason: str) -> str:
    if len(reason) > limits().nodes.drain_reason_chars:
        raise BadRequest(
            _("reason must have at most %(most)s characters.") % {"most": limits().nodes.drain_reason_chars}, param="reason"
        )
    return reason


def is_reclaimed(node: Node) -> bool:
    return node.mode == NodeMode.SPARE_OFF.value


def _earlier(deadline: datetime, other: datetime | None) -> datetime:
    return deadline if other is None else min(deadline, other)


@dataclass(frozen=True, slots=True)
class DrainFacts:
    """What the data plane knows of a drain: gateways that are alive, requests that run on the node, and those interrupted."""

    gateways: frozenset[uuid.UUID]
    running: int
    interrupted: int


def begin_stop() -> dict[str, object]:
    """Return the changes of a node row with which a drain or reclaim begins."""
    return {"draining_since": read_clock(), "drained_at": None, "drain_interrupted": 0}


def end_stop() -> dict[str, object]:
    """Return the changes of a node row that takes work again."""
    return {"draining_since": None, "drained_at": None, "drain_interrupted": 0, "drain_actor": ""}


def write_drain_counts(counts: Sequence[DrainCount], *, gateway_id: uuid.UUID) -> None:
    """Write what a gateway runs on draining nodes, and see whether they are drained now. A drain that is over is skipped."""
    known = dict(Node.objects.filter(pk__in=[count.node_id for count in counts]).values_list("pk", "draining_since"))
    now = clock.now()
    rows = [
        NodeDrainCount(**asdict(count), gateway_id=gateway_id, updated_at=now)
        for count in counts
        if known.get(count.node_id) == count.draining_since
    ]
    if not rows:
        return
    NodeDrainCount.objects.bulk_create(
        rows,
        update_conflicts=True,
        unique_fields=["node", "gateway_id"],
        update_fields=["draining_since", "active", "updated_at"],
    )
    mark_drained([row.node_id for row in rows if not row.active])


def mark_drained(node_ids: Collection[uuid.UUID] | None = None) -> int:
    """Write down which of the draining nodes (None = all) run nothing any more; return how many. Idempotent."""
    due = Node.objects.filter(draining_since__isnull=False, drained_at=None)
    if node_ids is not None:
        due = due.filter(pk__in=node_ids)
    now = read_clock()
    return sum(_mark(node, now=now) for node in due.select_related("presence").prefetch_related("drain_counts").order_by("pk"))


def describe_drain(node: Node) -> str:
    """Return how the drain or reclaim of a node stands, for a page; empty when there is none."""
    if not node.draining and not is_reclaimed(node):
        return ""
    presence = presence_of(node)
    running = _count_requests(presence.active_requests)
    if node.drained_at is None:
        limit = f"; what still runs at {_clock_time(node.drain_deadline_at)} is interrupted" if node.drain_deadline_at else ""
        return f"draining: {running} now{limit}"
    interrupted = f", {_count_requests(node.drain_interrupted)} interrupted" if node.drain_interrupted else ""
    drained = f"drained at {_clock_time(node.drained_at)}{interrupted}"
    if not is_drained(node):
        return f"{drained}; {running} now on its own port"
    if presence.protocol == BRIDGE_V1:
        return f"{drained}: no gateway runs a request there; a ModelRelay worker does not say what else it does"
    return f"{drained}: safe to power off"


def _mark(node: Node, *, now: datetime) -> bool:
    since = node.draining_since
    if since is None or not _says_idle(node, since, now=now):
        return False
    facts: DrainFacts = import_string(settings.NODE_DRAIN_FACTS)(node.pk, since)
    told = {count.gateway_id for count in node.drain_counts.all() if count.draining_since == since and not count.active}
    if facts.running or not facts.gateways <= told:
        return False
    with transaction.atomic():
        same = Node.objects.filter(pk=node.pk, draining_since=since, drained_at=None)
        if not same.update(drained_at=now, drain_interrupted=facts.interrupted, updated_at=now):
            return False
        detail = {"name": node.name, "interrupted": facts.interrupted}
        event = record_event(actor=ACTOR, action="node.drained", target=node.printed_id, detail=detail)
        if node.draining:  # an owner who takes the node back needs no message about it
            kind, _, name = node.drain_actor.partition(":")
            notify_of_event(event, "drained", usernames={name} if kind == "user" else set())
        publish_hint("nodes", str(node.pk))
    return True


def _says_idle(node: Node, since: datetime, *, now: datetime) -> bool:
    # A node that is gone runs nothing for us.
    if judge_status(node, now=now) is NodeStatus.OFFLINE:
        return True
    presence = presence_of(node)
    return presence.active_requests == 0 and presence.last_heartbeat_at is not None and presence.last_heartbeat_at >= since


def _count_requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _clock_time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


_PATIENT = (BRIDGE_V1, METALYARD, METALYARD_RELAY)
"""Protocols whose signs of life are rarer than those of all others."""
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
    # One look first: silence and drains are rare, and a sweep asks ten times.
    age_s = min(freshness_windows(limits().nodes, protocol=one).offline_s for one in ("", *_PATIENT))
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
    went_offline, deadlines_cleared, drains_ended = _mark_offline(now), _clear_deadlines(now), _end_drains()
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

    def is_late(protocol: str) -> Q:
        return Q(seen_at__lte=now - timedelta(seconds=freshness_windows(limits().nodes, protocol=protocol).offline_s))

    overdue = ~Q(protocol__in=_PATIENT) & is_late("")
    for protocol in _PATIENT:
        overdue |= Q(protocol=protocol) & is_late(protocol)
    return overdue


def _mark_offline(now: datetime) -> int:
    rows = NodePresence.objects.annotate(seen_at=Coalesce("last_heartbeat_at", "updated_at")).filter(_is_overdue(now))
    claimed = rows.filter(Q(connected=True) | ~Q(reported_status=NodeStatus.OFFLINE.value)).select_related("node")
    went = 0
    for presence in claimed.order_by("pk"):
        # Compare and set: a heartbeat that arrived since keeps the node.
        same = NodePresence.objects.filter(pk=presence.pk, last_heartbeat_at=presence.last_heartbeat_at)
        gone = {"connected": False, "gateway_id": None, "reported_status": NodeStatus.OFFLINE.value, "active_requests": 0}
        if same.update(**gone, updated_at=now):
            went += 1
            _record(presence.node, "node.offline")
    return went


def _end_drains() -> int:
    # Until the deadline is long past and the node is gone, a drain survives reconnects; a node that is still there stays
    # drained until an operator undrains it.
    gone = Q(presence__isnull=True) | Q(presence__connected=False, presence__reported_status=NodeStatus.OFFLINE.value)
    over = Node.objects.select_for_update(of=("self",)).filter(gone, draining=True, drain_deadline_at__isnull=True)
    ended = 0
    for node in over.order_by("pk"):
        changes: dict[str, object] = {"draining": False, "drain_reason": ""}
        if not is_reclaimed(node):
            changes |= end_stop()
        save_changes(node, changes)
        ended += 1
        _record(node, "node.drain_end")
    return ended


def _name_drains(now: datetime) -> None:
    stopping = Q(draining=True) | Q(mode=NodeMode.SPARE_OFF.value)
    # A release without ``draining_since`` may have begun some.
    Node.objects.filter(stopping, draining_since=None).update(draining_since=now, updated_at=now)
    Node.objects.filter(~stopping, draining_since__isnull=False).update(**end_stop(), updated_at=now)
    NodeDrainCount.objects.exclude(draining_since=F("node__draining_since")).delete()


def _clear_deadlines(now: datetime) -> int:
    past = Node.objects.filter(drain_deadline_at__lt=now - timedelta(seconds=limits().nodes.drain_deadline_kept_s))
    return past.update(drain_deadline_at=None, updated_at=now)


def _record(node: Node, action: str) -> None:
    record_event(actor=ACTOR, action=action, target=node.printed_id, detail={"name": node.name})
    publish_hint("nodes", str(node.pk))
