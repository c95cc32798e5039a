"""Machines whose clock is wrong: what they write is judged by the database's clock, and so is what they judge."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest
from pytest_django import Settings

from core.limits import limits
from nodes.models import NodePresence
from nodes.services import SweepReport, drain_node, set_mode, sweep_presence
from nodes.services.registry import Heartbeat, record_heartbeat
from nodes.services.sessions import PresenceReport, SessionRequest, load_node_rows, open_session, write_presences
from nodes.states import NodeRow
from tests.fakes.clock import shift_clock
from tests.fakes.nodes import ACTOR, make_credential, make_node, make_presence
from wire import bridge
from wire.contract import NodeMode, NodeStatus

pytestmark = pytest.mark.django_db

HERE = uuid.UUID(int=1)


@pytest.fixture(params=[-3600, 3600], ids=["behind", "ahead"], autouse=True)
def _wrong_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_clock(monkeypatch, request.param)


def read_row() -> NodeRow:
    (row,) = load_node_rows()
    return row


def is_about(value: float | None, wanted: float) -> bool:
    return value is not None and abs(value - wanted) < 60


def test_a_box_that_connects_is_heard_now() -> None:
    credential, _ = make_credential()
    open_session(
        SessionRequest(
            credential_id=credential.pk,
            worker_name="rig",
            models=("m",),
            max_concurrent=1,
            protocol=bridge.MUSTER_V1,
            gateway_id=HERE,
            live_nodes=frozenset(),
            other_gateways=frozenset(),
            peer_address="10.0.0.1",
            message=bridge.Register(worker_name="rig"),
        )
    )
    assert is_about(read_row().heartbeat_age_s, 0)


def test_what_a_gateway_says_of_its_boxes_has_the_age_that_it_says() -> None:
    node = make_node(epoch=1)
    link_id = uuid.UUID(int=7)
    make_presence(node, age_s=None, gateway_links={HERE.hex: link_id.hex})
    report = PresenceReport(
        node_id=node.pk, epoch=1, age_s=300.0, active=0, max_concurrent=1, models=("m",), status="available", last_error="",
        endpoints={}, said=None, link_id=link_id,
    )  # fmt: skip
    write_presences([report], gateway_id=HERE)
    assert is_about(read_row().heartbeat_age_s, 300)


def test_a_heartbeat_over_http_is_heard_now() -> None:
    credential, _ = make_credential()
    node = make_node(credential=credential)
    heartbeat = Heartbeat(node_id=node.pk, status=NodeStatus.AVAILABLE, is_accepting_jobs=True)
    result = record_heartbeat(credential=credential, heartbeat=heartbeat)
    assert is_about((result.server_time - datetime.now(UTC)).total_seconds(), 0)
    assert is_about(read_row().heartbeat_age_s, 0)


def test_a_sweep_leaves_boxes_alone_that_are_heard_and_finds_those_that_are_not() -> None:
    heard, silent = make_node("heard"), make_node("silent")
    for node, age_s in ((heard, 1), (silent, 600)):
        make_presence(node, connected=True)
        NodePresence.objects.filter(node=node).update(last_heartbeat_at=datetime.now(UTC) - timedelta(seconds=age_s))
    assert sweep_presence() == SweepReport(went_offline=1)
    assert NodePresence.objects.get(connected=True).node == heard


def test_a_drain_and_a_reclaim_leave_the_time_that_they_say(settings: Settings) -> None:
    node = make_node()
    drain_node(node_id=node.pk, actor=ACTOR, reason="fans", timeout_s=2000)
    assert is_about(read_row().drain_remaining_s, 2000)
    set_mode(node_id=node.pk, mode=NodeMode.SPARE_OFF, reason="gaming", actor=ACTOR)
    assert is_about(read_row().drain_remaining_s, limits().nodes.reclaim_grace_s)
