"""Cordon, drain, lend and reclaim; what a sweep makes of nodes that fell silent, and of clocks that are wrong."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.utils import timezone

from core.limits import limits
from governance.errors import NeedsApproval
from nodes.errors import BadRequest, NodeNotFound
from nodes.models import Node, NodePresence
from nodes.services.drains import (
    LOCK_KEY,
    SweepReport,
    cordon_node,
    drain_node,
    set_mode,
    sweep_presence,
    uncordon_node,
    undrain_node,
)
from nodes.services.nodes import Heartbeat, record_heartbeat
from nodes.services.sessions import (
    OpenedSession,
    PresenceReport,
    SessionRequest,
    load_node_rows,
    open_sessions,
    write_presences,
)
from nodes.session import Registered
from nodes.states import NodeRow
from nodes.tasks import sweep_nodes
from tests.fakes.clock import shift_clock
from tests.fakes.governed_team import make_governed
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence
from wire import bridge
from wire.bridge import BRIDGE_V1, MUSTER_V1
from wire.contract import NodeMode, NodeStatus

pytestmark = pytest.mark.django_db


def seconds_left(node: Node, *, since: datetime | None = None) -> float:
    """Return how far the deadline is away, or was away at a moment before it was set."""
    assert node.drain_deadline_at is not None
    return (node.drain_deadline_at - (since or timezone.now())).total_seconds()


def reclaim(node: Node) -> Node:
    """Take the node back."""
    return set_mode(node_id=node.pk, mode=NodeMode.SPARE_OFF, reason="owner_reclaim", actor=ACTOR)


def lend(node: Node) -> Node:
    """Lend the node again."""
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


def test_every_change_touches_updated_at_and_needs_a_node() -> None:
    node, nobody = make_node(), uuid.UUID(int=0)
    changes: list[Callable[[uuid.UUID], Node]] = [
        lambda pk: cordon_node(node_id=pk, actor=ACTOR),
        lambda pk: uncordon_node(node_id=pk, actor=ACTOR),
        lambda pk: drain_node(node_id=pk, actor=ACTOR, reason=""),
        lambda pk: undrain_node(node_id=pk, actor=ACTOR),
        lambda pk: set_mode(node_id=pk, mode=NodeMode.SPARE_OFF, reason="", actor=ACTOR),
        lambda pk: set_mode(node_id=pk, mode=NodeMode.SPARE_ON, reason="", actor=ACTOR),
    ]
    for change in changes:
        before = Node.objects.get().updated_at
        change(node.pk)
        assert Node.objects.get().updated_at > before
        with pytest.raises(NodeNotFound):
            change(nobody)


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


def test_a_drain_time_that_makes_no_sense_and_a_reason_without_end_are_refused() -> None:
    node = make_node()
    for timeout_s in (-1, 86_401, float("nan"), float("inf")):
        with pytest.raises(BadRequest) as caught:
            drain_node(node_id=node.pk, actor=ACTOR, reason="", timeout_s=timeout_s)
        assert caught.value.param == "timeout_s"
    with pytest.raises(BadRequest):
        drain_node(node_id=node.pk, actor=ACTOR, reason="x" * 201)
    assert not Node.objects.get().draining


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


# Sweeps


@pytest.fixture
def other_session() -> Iterator[psycopg.Connection]:
    """A second connection to the test database."""
    with psycopg.connect(**connection.get_connection_params()) as other:
        yield other


def test_a_silent_box_goes_offline_once_and_is_recorded() -> None:
    node = make_node()
    make_presence(node, age_s=16, connected=True, protocol=MUSTER_V1, active_requests=3)
    before = timezone.now()
    sweep_nodes()
    presence = NodePresence.objects.get()
    assert (presence.connected, presence.reported_status, presence.active_requests) == (False, "offline", 0)
    assert presence.updated_at >= before
    (event,) = audited("node.offline")
    assert (event.actor, event.target) == ("system:sweep", node.printed_id)
    assert sweep_presence() == SweepReport()


def test_a_heartbeat_that_comes_while_the_sweep_looks_keeps_the_node_online() -> None:
    presence = make_presence(make_node(), age_s=16, connected=True, protocol=MUSTER_V1)
    rows, beats = NodePresence.objects.filter(pk=presence.pk), ["one"]

    def beat(execute: Callable[..., object], sql: str, *rest: Any) -> object:
        if sql.startswith("UPDATE") and beats:
            beats.clear()
            rows.update(last_heartbeat_at=timezone.now())
        return execute(sql, *rest)

    with connection.execute_wrapper(beat):
        assert sweep_presence().went_offline == 0
    assert (beats, rows.get().connected, audited("node.offline")) == ([], True, [])


@pytest.mark.parametrize(
    ("protocol", "age_s", "went"), [("", 5, 0), ("", 16, 1), (BRIDGE_V1, 17, 0), (BRIDGE_V1, 46, 1), ("", None, 1)]
)
def test_how_long_a_box_may_be_silent_depends_on_its_protocol(protocol: str, age_s: float | None, went: int) -> None:
    long_ago = timezone.now() - timedelta(minutes=1)
    make_presence(make_node(), age_s=age_s, protocol=protocol, connected=True, updated_at=long_ago)
    assert sweep_presence().went_offline == went


@pytest.mark.parametrize("is_there", [True, False])
def test_a_drain_ends_when_its_deadline_is_long_past_and_the_box_is_gone(is_there: bool) -> None:
    node = make_node()
    make_presence(node, age_s=1 if is_there else 60, connected=is_there)
    drain_node(node_id=node.pk, actor=ACTOR, reason="fans", timeout_s=0)
    sweep_presence()
    assert Node.objects.get().drain_deadline_at is not None, "a deadline just past is kept for the gateways to see"
    Node.objects.update(drain_deadline_at=timezone.now() - timedelta(seconds=31))
    assert sweep_presence() == SweepReport(drains_ended=0 if is_there else 1, deadlines_cleared=1)
    node.refresh_from_db()
    assert (node.draining, node.drain_deadline_at, node.drain_reason) == (is_there, None, "fans" if is_there else "")
    assert len(audited("node.drain_end")) == (not is_there)


def test_while_another_process_sweeps_this_one_does_nothing(other_session: psycopg.Connection) -> None:
    make_presence(make_node(), age_s=60, connected=True)
    other_session.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK_KEY])
    assert sweep_presence() == SweepReport(skipped=True)
    other_session.rollback()
    assert sweep_presence().went_offline == 1


# Machines whose clock is wrong: what they write is judged by the database's clock, and so is what they judge


HERE = uuid.UUID(int=1)


@pytest.fixture(params=[-3600, 3600], ids=["behind", "ahead"])
def wrong_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_clock(monkeypatch, request.param)


def read_row() -> NodeRow:
    (row,) = load_node_rows()
    return row


def is_about(value: float | None, wanted: float) -> bool:
    return value is not None and abs(value - wanted) < 60


@pytest.mark.usefixtures("wrong_clock")
def test_what_is_heard_over_a_socket_or_http_is_heard_now_or_as_long_ago_as_is_said() -> None:
    credential, _ = make_credential()
    said = Registered("rig", ("m",), 1, MUSTER_V1, (), bridge.Register(worker_name="rig"))
    request = SessionRequest(credential.pk, "10.0.0.1", said)
    (opened,) = open_sessions([request], gateway_id=HERE)
    assert isinstance(opened, OpenedSession)
    assert is_about(read_row().heartbeat_age_s, 0)
    report = PresenceReport(
        node_id=opened.node_id, epoch=1, age_s=300.0, active=0, models=("m",), status="available",
        last_error="", endpoints={}, said=None, link_id=opened.link_id,
    )  # fmt: skip
    NodePresence.objects.update(last_heartbeat_at=None)
    write_presences([report], gateway_id=HERE)
    assert is_about(read_row().heartbeat_age_s, 300)
    heartbeat = Heartbeat(node_id=opened.node_id, status=NodeStatus.AVAILABLE, is_accepting_jobs=True)
    result = record_heartbeat(credential=credential, heartbeat=heartbeat)
    assert is_about((result.server_time - datetime.now(UTC)).total_seconds(), 0)
    assert is_about(read_row().heartbeat_age_s, 0)


@pytest.mark.usefixtures("wrong_clock")
def test_a_sweep_finds_silent_boxes_alone_and_a_drain_and_a_reclaim_leave_the_time_that_they_say() -> None:
    heard, silent = make_node("heard"), make_node("silent")
    for node, age_s in ((heard, 1), (silent, 600)):
        make_presence(node, connected=True)
        NodePresence.objects.filter(node=node).update(last_heartbeat_at=datetime.now(UTC) - timedelta(seconds=age_s))
    assert sweep_presence() == SweepReport(went_offline=1)
    assert NodePresence.objects.get(connected=True).node == heard
    Node.objects.filter(pk=silent.pk).delete()
    drain_node(node_id=heard.pk, actor=ACTOR, reason="fans", timeout_s=2000)
    assert is_about(read_row().drain_remaining_s, 2000)
    reclaim(heard)
    assert is_about(read_row().drain_remaining_s, limits().nodes.reclaim_grace_s)
