"""What the sweep makes of boxes that fell silent, and that it neither races itself nor repeats itself."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import psycopg
import pytest
from django.db import connection
from django.utils import timezone

from nodes.models import Node, NodePresence
from nodes.services import SweepReport, drain_node, sweep_presence
from nodes.services.sweep import LOCK_KEY
from nodes.tasks import sweep_nodes
from tests.fakes.nodes import ACTOR, audited, make_node, make_presence
from wire.bridge import BRIDGE_V1, MUSTER_V1

pytestmark = pytest.mark.django_db


@pytest.fixture
def other_session() -> Iterator[psycopg.Connection]:
    """A second connection to the test database."""
    with psycopg.connect(**connection.get_connection_params()) as other:
        yield other


def test_a_silent_box_goes_offline_once_and_is_recorded() -> None:
    node = make_node()
    make_presence(node, age_s=16, connected=True, protocol=MUSTER_V1, active_requests=3)
    before = timezone.now()
    assert sweep_presence() == SweepReport(went_offline=1)
    presence = NodePresence.objects.get()
    assert (presence.connected, presence.reported_status, presence.active_requests) == (False, "offline", 0)
    assert presence.updated_at >= before
    (event,) = audited("node.offline")
    assert (event.actor, event.target) == ("system:sweep", node.printed_id)
    assert sweep_presence() == SweepReport()


@pytest.mark.parametrize(("protocol", "age_s", "went"), [("", 5, 0), ("", 16, 1), (BRIDGE_V1, 17, 0), (BRIDGE_V1, 46, 1)])
def test_how_long_a_box_may_be_silent_depends_on_its_protocol(protocol: str, age_s: float, went: int) -> None:
    make_presence(make_node(), age_s=age_s, protocol=protocol, connected=True)
    assert sweep_presence().went_offline == went


def test_a_box_that_connected_and_was_never_heard_goes_offline_too() -> None:
    long_ago = timezone.now() - timedelta(minutes=1)
    make_presence(make_node(), age_s=None, connected=True, updated_at=long_ago)
    assert sweep_presence().went_offline == 1


def test_a_drain_ends_when_its_deadline_is_long_past_and_the_box_is_gone() -> None:
    node = make_node()
    make_presence(node, age_s=60, reported_status="offline", connected=False)
    drain_node(node_id=node.pk, actor=ACTOR, reason="fans")
    assert sweep_presence() == SweepReport(drained=1)
    Node.objects.update(drain_deadline_at=timezone.now() - timedelta(seconds=31))
    assert sweep_presence() == SweepReport(drains_ended=1, deadlines_cleared=1)
    node.refresh_from_db()
    assert (node.draining, node.drain_deadline_at, node.drain_reason) == (False, None, "")
    assert len(audited("node.drain_end")) == 1


def test_a_box_that_is_still_there_stays_drained() -> None:
    node = make_node()
    make_presence(node, connected=True)
    drain_node(node_id=node.pk, actor=ACTOR, reason="fans", timeout_s=0)
    Node.objects.update(drain_deadline_at=timezone.now() - timedelta(seconds=31))
    assert sweep_presence() == SweepReport(deadlines_cleared=1)
    assert Node.objects.get().draining


def test_a_deadline_just_past_is_kept_for_the_gateways_to_see() -> None:
    node = make_node()
    make_presence(node)
    drain_node(node_id=node.pk, actor=ACTOR, reason="", timeout_s=0)
    assert sweep_presence() == SweepReport()
    assert Node.objects.get().drain_deadline_at is not None


def test_while_another_process_sweeps_this_one_does_nothing(other_session: psycopg.Connection) -> None:
    make_presence(make_node(), age_s=60, connected=True)
    other_session.execute("SELECT pg_advisory_xact_lock(%s)", [LOCK_KEY])
    assert sweep_presence() == SweepReport(skipped=True)
    other_session.rollback()
    assert sweep_presence().went_offline == 1


def test_the_task_sweeps() -> None:
    make_presence(make_node(), age_s=60, connected=True)
    sweep_nodes()
    assert not NodePresence.objects.get().connected
    assert sweep_nodes.name == "nodes.tasks.sweep_nodes"
