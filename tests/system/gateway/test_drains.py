"""When a draining node is drained: nothing runs on it for any gateway or by its own account, and none may start."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from gateway.models import GatewayProcess
from governance.models import Notice
from governance.services.notice_text import write_message
from governance.services.webhooks import add_webhook
from nodes.models import Node, NodePresence
from nodes.services import describe_drain, drain_node, set_mode, sweep_presence, undrain_node
from nodes.services.drains import mark_drained, write_drain_counts
from nodes.states import DrainCount
from tests.fakes.nodes import ACTOR, audited, make_node, make_presence
from tests.fakes.tenants import make_gateway, make_operator, make_record
from wire.bridge import MUSTER_V1
from wire.contract import ErrorCode, NodeMode, RequestState

pytestmark = pytest.mark.django_db


def drain(name: str = "box", *, active: int = 0, heard_after_s: float = 1.0, **presence: Any) -> Node:
    """Return a draining node that said ``heard_after_s`` after the drain began that it runs ``active`` requests."""
    node = make_node(name)
    values = {"active_requests": active, "connected": True, "protocol": MUSTER_V1, **presence}
    make_presence(node, age_s=0.0, **values)
    node = drain_node(node_id=node.pk, actor=ACTOR, reason="new fans")
    heard = node.draining_since + timedelta(seconds=heard_after_s)  # type: ignore[operator]  # it drains
    NodePresence.objects.update(last_heartbeat_at=heard)
    return node


def tell(node: Node, gateway: GatewayProcess, active: int) -> None:
    """Have a gateway say how many requests it runs on the node, knowing of the drain as the row is now."""
    since = Node.objects.get(pk=node.pk).draining_since
    assert since is not None
    write_drain_counts([DrainCount(node.pk, since, active)], gateway_id=gateway.pk)


def drained_at(node: Node) -> object:
    return Node.objects.get(pk=node.pk).drained_at


def test_a_node_is_drained_when_the_last_gateway_has_said_zero() -> None:
    here, there = make_gateway(), make_gateway()
    node = drain()
    assert sweep_presence().drained == 0, "no gateway has heard of the drain yet"
    tell(node, here, 0)
    tell(node, there, 1)
    assert (sweep_presence().drained, drained_at(node)) == (0, None)
    tell(node, there, 0)
    assert drained_at(node) is not None
    (event,) = audited("node.drained")
    assert (event.target, event.detail) == (node.printed_id, {"name": "box", "interrupted": 0})
    assert sweep_presence().drained == 0
    assert len(audited("node.drained")) == 1


@pytest.mark.parametrize(
    ("presence", "is_done"),
    [
        ({}, True),
        ({"active": 1}, False),  # on its own port, or for a gateway whose word has not come
        ({"heard_after_s": -1.0}, False),  # what it said is of before the drain
        ({"active": 1, "reported_status": "offline", "connected": False}, True),
    ],
)
def test_the_nodes_own_account_counts(presence: dict[str, Any], is_done: bool) -> None:
    node = drain(**presence)
    assert mark_drained() == int(is_done)
    assert (drained_at(node) is not None) is is_done


def test_a_request_whose_record_is_open_keeps_the_node_from_being_drained() -> None:
    node = drain()
    record = make_record(state=RequestState.RUNNING, node_id=node.pk)
    assert mark_drained() == 0
    type(record).objects.update(state=RequestState.COMPLETED.value)
    assert mark_drained() == 1


def test_what_a_gateway_said_of_an_earlier_drain_counts_for_nothing() -> None:
    gateway = make_gateway()
    node = drain()
    tell(node, gateway, 1)
    earlier = Node.objects.get().draining_since
    assert earlier is not None
    undrain_node(node_id=node.pk, actor=ACTOR)
    again = drain_node(node_id=node.pk, actor=ACTOR, reason="again")
    NodePresence.objects.update(last_heartbeat_at=again.draining_since)
    write_drain_counts([DrainCount(node.pk, earlier, 0)], gateway_id=gateway.pk)
    assert (mark_drained(), drained_at(node)) == (0, None)
    tell(node, gateway, 0)
    assert drained_at(node) is not None


def test_a_reclaimed_node_is_drained_too_and_lending_it_again_clears_that() -> None:
    node = make_node()
    set_mode(node_id=node.pk, mode=NodeMode.SPARE_OFF, reason="mine", actor="node:box")
    assert mark_drained() == 1
    assert not Notice.objects.exists()
    assert set_mode(node_id=node.pk, mode=NodeMode.SPARE_ON, reason="", actor="node:box").drained_at is None


def test_what_the_deadline_interrupted_is_counted_and_said() -> None:
    node = drain()
    values: dict[str, Any] = {"node_id": node.pk, "error_code": ErrorCode.REQUEST_INTERRUPTED.value}
    later = timezone.now() + timedelta(seconds=1)
    for _ in range(2):
        make_record(state=RequestState.INTERRUPTED, finished_at=later, **values)
    make_record(state=RequestState.INTERRUPTED, finished_at=later - timedelta(hours=1), age_s=3_700, **values)
    make_record(state=RequestState.COMPLETED, finished_at=later, node_id=node.pk)
    mark_drained()
    found = Node.objects.get()
    assert found.drain_interrupted == 2
    said = describe_drain(found, NodePresence.objects.get())
    assert said == f"drained at {found.drained_at:%Y-%m-%d %H:%M:%S} UTC, 2 requests interrupted: safe to power off"


def test_whoever_asked_for_the_drain_and_every_webhook_are_told(settings: Any) -> None:
    settings.NOTICE_SENDER = "muster@example.org"
    ada = make_operator("ada")
    ada.email = "ada@example.org"
    ada.save()
    make_operator("bob")
    add_webhook(name="pager", url="https://pager.example.org/hook", actor=ACTOR)
    node = drain()
    mark_drained()
    mail, hook = Notice.objects.order_by("webhook")
    if mail.person is None:
        mail, hook = hook, mail
    assert (mail.person, str(hook.webhook)) == (ada, "pager")
    message = write_message(mail)
    assert message.subject == "box is drained: safe to power off"
    assert "nothing runs on it" in message.text
    body = json.loads(json.dumps(dict(write_message(hook).body)))
    assert (body["event"], body["node"]) == ("drained", {"id": node.printed_id, "name": "box"})
    assert body["link"].endswith(f"/admin/nodes/node/{node.pk}/change/")
