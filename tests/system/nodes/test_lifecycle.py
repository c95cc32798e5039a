"""Cordon, drain, lend and reclaim."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from governance.errors import NeedsApproval
from nodes.errors import BadRequest, NodeNotFound
from nodes.models import Node
from nodes.services import cordon_node, drain_node, set_mode, uncordon_node, undrain_node
from tests.fakes.nodes import ACTOR, audited, make_node
from tests.system.governance.team import make_governed
from wire.contract import NodeMode

pytestmark = pytest.mark.django_db


def seconds_left(node: Node, *, since: datetime | None = None) -> float:
    """Return how far the deadline is away, or was away at a moment before it was set."""
    assert node.drain_deadline_at is not None
    return (node.drain_deadline_at - (since or timezone.now())).total_seconds()


def reclaim(node: Node) -> Node:
    """Take the box back."""
    return set_mode(node_id=node.pk, mode=NodeMode.SPARE_OFF, reason="owner_reclaim", actor=ACTOR)


def lend(node: Node) -> Node:
    """Lend the box again."""
    return set_mode(node_id=node.pk, mode=NodeMode.SPARE_ON, reason="", actor=ACTOR)


def test_a_cordon_is_set_and_lifted_and_each_is_recorded_once() -> None:
    node = make_node()
    for _ in range(2):
        assert cordon_node(node_id=node.pk, actor=ACTOR).cordoned
    for _ in range(2):
        assert not uncordon_node(node_id=node.pk, actor=ACTOR).cordoned
    (event,) = audited("node.cordon")
    assert (event.actor, event.target, event.detail) == (ACTOR, node.printed_id, {"name": "box", "cordoned": True})
    assert len(audited("node.uncordon")) == 1


def test_every_change_touches_updated_at() -> None:
    node = make_node()
    before = node.updated_at
    changes: list[Callable[[], Node]] = [
        lambda: cordon_node(node_id=node.pk, actor=ACTOR),
        lambda: uncordon_node(node_id=node.pk, actor=ACTOR),
        lambda: drain_node(node_id=node.pk, actor=ACTOR, reason=""),
        lambda: undrain_node(node_id=node.pk, actor=ACTOR),
        lambda: reclaim(node),
        lambda: lend(node),
    ]
    for change in changes:
        change()
        after = Node.objects.get().updated_at
        assert after > before
        before = after


def test_a_drain_has_a_deadline_and_leaves_the_cordon_alone() -> None:
    node = make_node()
    began = timezone.now()
    drained = drain_node(node_id=node.pk, actor=ACTOR, reason="new fans")
    assert (drained.draining, drained.cordoned, drained.drain_reason) == (True, False, "new fans")
    assert seconds_left(drained) <= 120 <= seconds_left(drained, since=began)
    began = timezone.now()
    shorter = drain_node(node_id=node.pk, actor=ACTOR, reason="now", timeout_s=5)
    assert seconds_left(shorter) <= 5 <= seconds_left(shorter, since=began)
    ended = undrain_node(node_id=node.pk, actor=ACTOR)
    assert (ended.draining, ended.drain_deadline_at, ended.drain_reason) == (False, None, "")
    undrain_node(node_id=node.pk, actor=ACTOR)
    assert len(audited("node.drain")) == 2
    assert len(audited("node.undrain")) == 1


def test_a_reclaim_has_the_grace_and_saying_it_again_does_not_extend_it() -> None:
    node = make_node()
    began = timezone.now()
    first = reclaim(node)
    assert first.mode == "spare_off"
    assert seconds_left(first) <= 15 <= seconds_left(first, since=began)
    assert reclaim(node).drain_deadline_at == first.drain_deadline_at
    lent = lend(node)
    assert (lent.mode, lent.drain_deadline_at, lent.drain_reason) == ("spare_on", None, "")
    assert len(audited("node.set_mode")) == 2


def test_of_a_drain_and_a_reclaim_the_earlier_deadline_holds() -> None:
    node = make_node()
    drain_node(node_id=node.pk, actor=ACTOR, reason="", timeout_s=600)
    assert seconds_left(reclaim(node)) <= 15
    assert seconds_left(drain_node(node_id=node.pk, actor=ACTOR, reason="", timeout_s=600)) <= 15
    undrained = undrain_node(node_id=node.pk, actor=ACTOR)
    assert (undrained.draining, undrained.mode) == (False, "spare_off")
    assert seconds_left(undrained) <= 15
    drain_node(node_id=node.pk, actor=ACTOR, reason="", timeout_s=1)
    assert seconds_left(lend(node)) <= 1
    assert Node.objects.get().draining


@pytest.mark.parametrize("timeout_s", [-1, 86_401, float("nan"), float("inf")])
def test_a_drain_time_that_makes_no_sense_is_refused(timeout_s: float) -> None:
    with pytest.raises(BadRequest) as caught:
        drain_node(node_id=make_node().pk, actor=ACTOR, reason="", timeout_s=timeout_s)
    assert caught.value.param == "timeout_s"


def test_a_reason_has_a_length() -> None:
    node = make_node()
    with pytest.raises(BadRequest):
        drain_node(node_id=node.pk, actor=ACTOR, reason="x" * 201)
    assert not Node.objects.get().draining


def test_a_node_that_is_not_there_cannot_be_changed() -> None:
    nobody = uuid.UUID(int=0)
    for change in (cordon_node, uncordon_node, undrain_node):
        with pytest.raises(NodeNotFound):
            change(node_id=nobody, actor=ACTOR)
    with pytest.raises(NodeNotFound):
        drain_node(node_id=nobody, actor=ACTOR, reason="", timeout_s=timedelta(minutes=1).total_seconds())
    with pytest.raises(NodeNotFound):
        set_mode(node_id=nobody, mode=NodeMode.SPARE_ON, reason="", actor=ACTOR)


def test_an_owners_word_that_is_stored_late_does_not_undo_one_that_was_said_after_it() -> None:
    node = make_node()
    lend(node)  # said now, and nothing changes by it
    late = set_mode(node_id=node.pk, mode=NodeMode.SPARE_OFF, reason="", actor=ACTOR, said_age_s=60)
    assert late.mode == "spare_on"
    assert audited("node.set_mode") == []
    assert reclaim(node).mode == "spare_off"
    assert set_mode(node_id=node.pk, mode=NodeMode.SPARE_ON, reason="", actor=ACTOR, said_age_s=60).mode == "spare_off"


def test_a_forced_drain_is_direct_before_there_is_a_policy_and_proposed_afterwards() -> None:
    node = make_node()
    assert drain_node(node_id=node.pk, actor=ACTOR, reason="", timeout_s=1).draining
    make_governed()
    with pytest.raises(NeedsApproval, match=r"propose node-drain .* A plain drain needs none: the same without .* gives 120 s"):
        drain_node(node_id=node.pk, actor=ACTOR, reason="", timeout_s=119)
    assert drain_node(node_id=node.pk, actor=ACTOR, reason="", timeout_s=120).draining
    assert drain_node(node_id=node.pk, actor=ACTOR, reason="").draining
