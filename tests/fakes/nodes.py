"""Rows for the tests of the node registry; each takes only what the test is about."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone

from governance.models import AuditEvent
from nodes.models import Node, NodeCredential, NodePresence, Provider, Reach
from nodes.services import create_credential, create_provider
from wire.contract import NodeStatus

ACTOR = "user:ada"


def make_provider(name: str = "local") -> Provider:
    return Provider.objects.filter(name=name).first() or create_provider(name=name, actor=ACTOR)


def make_credential(name: str = "box", *, provider: str = "local", **changes: Any) -> tuple[NodeCredential, str]:
    make_provider(provider)
    return create_credential(name=name, provider_name=provider, actor=ACTOR, **changes)


def make_node(name: str = "box", *, credential: NodeCredential | None = None, **changes: Any) -> Node:
    held = credential or make_credential(name)[0]
    return Node.objects.create(name=name, credential=held, provider=held.provider, **changes)


def make_presence(node: Node, *, age_s: float | None = 1.0, **changes: Any) -> NodePresence:
    """Return a presence that was heard ``age_s`` seconds ago (None = never); on a socket, or with a URL that answers."""
    heard = timezone.now() - timedelta(seconds=age_s) if age_s is not None else None
    is_dialled = node.reach == Reach.DIRECT.value
    reach: dict[str, Any] = {"probed_at": heard} if is_dialled else {"connected": age_s is not None}
    values = {"reported_status": NodeStatus.AVAILABLE.value, "last_heartbeat_at": heard, **reach, **changes}
    return NodePresence.objects.create(node=node, **values)


def audited(action: str) -> list[AuditEvent]:
    return list(AuditEvent.objects.filter(action=action).order_by("pk"))
