"""Two boxes with one name and one credential: the one that is at work goes on, the other is told and shown to the operator.

What a box is called does not tell two of them apart; its key does, which lies in its data folder, and so does the instance id,
which is new with every start of the program. A box that was started again has its old key and an instance id that nobody has
seen, so it replaces its own dead session at once. A program whose session was replaced never had its instance id new again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from datetime import timedelta
from uuid import UUID

from django.db.models.functions import Now

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.models import Node, NodePresence
from wire import clock
from wire.bridge import Register

logger = logging.getLogger("muster.nodes")


def name_installation(message: Register) -> str:
    """Return what the box's key is called here; empty when it says none, as older boxes and bridge v1 workers do."""
    key = message.governance.public_key if message.governance is not None else ""
    return hashlib.sha256(key.encode()).hexdigest() if key else ""


def is_held_elsewhere(node: Node, other_gateways: Collection[UUID]) -> bool:
    """Whether one of these gateways holds the box's socket and heard it lately."""
    since = Now() - timedelta(seconds=limits().nodes.rival_heard_s)
    held = NodePresence.objects.filter(connected=True, gateway_id__in=other_gateways, last_heartbeat_at__gte=since)
    return held.filter(pk=node.pk).exists()


def is_rival(node: Node, message: Register) -> bool:
    """Whether this cannot be the box that holds the node's session, nor that box started again."""
    instance = (message.instance_id or "")[:64]
    if not instance or not node.instance_id or instance == node.instance_id:
        return False
    installation = name_installation(message)
    is_another = bool(installation and node.installation and installation != node.installation)
    return is_another or instance in node.former_instances


def take_instance(node: Node, message: Register) -> None:
    """Note on the row, without saving it, which program holds the session from now on. The epoch rises with another one."""
    instance = (message.instance_id or "")[:64]
    if not (instance and node.instance_id == instance):
        node.epoch += 1  # one box on the sockets of several gateways is one session; another program fences it
        former = [*node.former_instances, node.instance_id] if node.instance_id else node.former_instances
        node.former_instances = [each for each in former if each != instance][-limits().nodes.former_instances :]
    node.instance_id = instance
    node.installation = name_installation(message)


def note_rival(node: Node, *, peer_address: str) -> None:
    """Write down that a second box asked for the session of a live one; in the audit trail once an hour."""
    now = clock.now()
    logger.warning("node.rival_refused node=%s address=%s", node.name, peer_address)
    if node.rival_seen_at is None or now - node.rival_seen_at >= timedelta(seconds=limits().nodes.rival_audit_s):
        detail = {"name": node.name, "address": peer_address[:64]}
        record_event(actor=f"node:{node.name}", action="node.rival_refused", target=node.printed_id, detail=detail)
    Node.objects.filter(pk=node.pk).update(rival_seen_at=now, rival_address=peer_address[:64])
    publish_hint("nodes", str(node.pk))
