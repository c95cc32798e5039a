"""Who can be reached from this process, links in step with rows (policy, drains, fencing, HTTP), and what a scrape says."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from pytest_django import Settings

from core.limits import NodeLimits, limits
from core.outbox import AsgiMessage
from governance.errors import InvalidProposal
from nodes.apps import check_settings
from nodes.links import EndKind, LinkCondition, LinkRegistry
from nodes.links.ejections import Verdict
from nodes.links.http import HttpLink, HttpTarget
from nodes.links.keeper import FleetGauges, LinkKeeper
from nodes.links.port import Link
from nodes.links.relay import RelayLink
from nodes.operations.flush import CACHE_FLUSH
from nodes.operations.hold import NODE_DRAIN, NODE_EVICT
from nodes.operations.load import MODEL_LOAD, MODEL_UNLOAD
from nodes.operations.targets import Field, clean_params
from nodes.session import ServerSession
from nodes.states import (
    TOKENIZE,
    DrainCount,
    Freshness,
    Health,
    NodeFacts,
    NodeRow,
    Unavailable,
    freshness_windows,
    judge_availability,
)
from tests.fakes.clock import virtual_clock
from tests.fakes.limits import set_limits
from tests.fakes.links import FakeLink, RequestSink, make_row, open_request
from tests.fakes.waiting import turns
from wire import bridge, clock
from wire.agent import METALYARD, METALYARD_RELAY
from wire.bridge import BRIDGE_V1, MUSTER_V1
from wire.contract import NodeMode, NodeStatus
from wire.optoken.approval import canonical

HERE, THERE = uuid.UUID(int=1), uuid.UUID(int=2)
TARGET = HttpTarget(scheme="http", host="box.example", address="10.0.0.9", port=8000)
PEER = HttpTarget(scheme="http", host="gw2", address="10.0.0.2", port=8080)


class Box:
    """A socket to a node: what it was sent, and how it was closed."""

    def __init__(self, node_id: uuid.UUID, version: str = MUSTER_V1, *, instance_id: str = "i1") -> None:
        self.sent: list[AsgiMessage] = []
        self.kicks: list[tuple[int, str]] = []
        session = ServerSession(NodeLimits())
        session.receive_text(bridge.encode_message(bridge.Register(models=["m"], protocol_version=version)))
        self.link = RelayLink(
            node_id=node_id, node_name="node", models=frozenset({"m"}), max_concurrent=2, session=session, send=self.send,
            kick=lambda code, reason: self.kicks.append((code, reason)),
        )  # fmt: skip
        self.link.epoch = 1
        self.link.instance_id = instance_id

    async def send(self, message: AsgiMessage) -> None:
        self.sent.append(message)

    def messages(self) -> list[bridge.ServerMessage]:
        """What it was sent as text."""
        return [bridge.decode_server_message(str(m["text"])) for m in self.sent if "text" in m]


def run_on(link: Link) -> RequestSink:
    """Let a request run on the link."""
    ends = RequestSink()
    link.active += 1
    link.open_stream(open_request(), ends)
    return ends


class Setting:
    """A registry with its keeper."""

    def __init__(self) -> None:
        self.registry = LinkRegistry()
        self.keeper = LinkKeeper(self.registry, gateway_id=HERE, connect_s=1.0)

    def apply(self, *rows: NodeRow, read_at: float | None = None) -> None:
        """Hand rows in, with an address for each."""
        targets = {row.node_id: TARGET for row in rows if row.is_direct}
        self.keeper.apply(rows, targets=targets, peers={THERE: PEER}, read_at=read_at)

    def box(self, version: str = MUSTER_V1, *, instance_id: str = "i1") -> Box:
        """Connect a node."""
        box = Box(uuid.uuid4(), version, instance_id=instance_id)
        self.registry.add(box.link)
        return box

    def link_of(self, row: NodeRow) -> HttpLink:
        """Hand a row in and return the link over HTTP that it has led to."""
        self.apply(row)
        link = self.registry.get(row.node_id)
        assert isinstance(link, HttpLink)
        return link


@pytest.fixture
def setting() -> Setting:
    return Setting()


# the registry


def test_links_are_found_by_node_model_and_path_and_follow_every_change(setting: Setting) -> None:
    registry, heard = setting.registry, list[Link | None]()
    registry.subscribe(heard.append)
    first, second = FakeLink("a", "b"), FakeLink("b")
    first.endpoints = {"a": frozenset({"/chat", TOKENIZE})}
    registry.add(first)
    registry.add(second)
    assert (list(registry), registry.get(first.node_id), registry.served_models()) == ([first, second], first, ["a", "b"])
    assert [list(registry.links_for(model)) for model in "bx"] == [[first, second], []]
    assert [list(registry.links_answering("b", ("/chat",))), list(registry.links_answering("a", ("/embed",)))] == [
        [first, second],
        [],
    ]
    registry.update_models(second, frozenset({"a"}), {"a": frozenset({"/other"})})
    assert list(registry.links_answering("b", ("/chat",))) == [first]
    assert registry.endpoints_of("a") == ["/chat", "/other"]
    registry.update_models(first, frozenset({"c"}))
    assert [list(registry.links_answering("a", ("/chat",))), list(registry.links_for("b"))] == [[], []]
    registry.remove(second)
    assert (registry.endpoints_of("a"), registry.served_models()) == ([], ["c"])
    assert heard == [first, second, second, first, None]
    registry.update_models(second, frozenset({"z"}))
    assert (registry.served_models(), set(second.models)) == (["c"], {"z"}), "one that is gone is not listed"


def test_a_removed_or_replaced_link_is_forgotten_and_its_streams_end_as_lost_once(setting: Setting) -> None:
    registry, old = setting.registry, FakeLink("a")
    new, beside = FakeLink("b", node_id=old.node_id), [FakeLink("c") for _ in range(5)]
    registry.add(old)
    sinks = [run_on(old)]
    registry.add(new)
    assert (old.closed, old.close_reasons) == (True, ["replaced by a newer session of the same node"])
    registry.remove(old)
    assert (registry.get(new.node_id), new.closed, registry.served_models()) == (new, False, ["b"])
    sinks.append(run_on(new))
    for _ in range(2):
        registry.remove(new)
    assert [sink.kinds for sink in sinks] == [[EndKind.LINK_LOST]] * 2
    new.closed = False
    registry.add(new)
    assert new.close_reasons == [], "adding a link again does not close it"
    for link in beside:
        registry.add(link)
    for each in registry:
        registry.remove(each)
    assert len(registry) == 0
    for number in range(100):
        assert list(registry.links_answering(f"guess-{number}", ("/chat",))) == []
    assert registry._answering == {}, "names that nobody serves leave nothing behind"


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        (lambda link: None, LinkCondition.READY),
        (lambda link: setattr(link, "last_seen", time.monotonic() - 10), LinkCondition.STALE),
        (lambda link: setattr(link.policy, "draining", True), LinkCondition.DRAINING),
        (lambda link: setattr(link.policy, "cordoned", True), LinkCondition.DRAINING),
        (lambda link: setattr(link.policy, "reclaimed", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "node_draining", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "closed", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "unhealthy_reason", "ECC"), LinkCondition.UNHEALTHY),
        (lambda link: setattr(link.policy, "provider_enabled", False), LinkCondition.DISABLED),
    ],
)
def test_a_link_takes_work_only_when_it_is_ready(change: Callable[[Link], None], condition: LinkCondition) -> None:
    link = FakeLink()
    change(link)
    assert link.condition() is condition
    assert link.can_take(time.monotonic()) == (condition is LinkCondition.READY)


def test_slots_and_a_busy_pause_hold_work_back_and_what_a_box_says_of_its_load_does_not() -> None:
    link, now = FakeLink(slots=4), time.monotonic()
    link.active = 4
    assert not link.can_take(now)
    assert not link.has_slot()
    link.active, link.busy_until = 3, now + 1
    assert [link.can_take(now), link.can_take(now + 1)] == [False, True]
    for reported, external in ((0, 0), (3, 0), (5, 2), (-7, 0), (10**40, 1_000_000)):
        link.report_load(reported)
        assert (link.external_load, link.load, link.can_take(now + 1)) == (external, 3 + external, True)


# rows


async def test_a_fresh_row_of_one_node_says_nothing_of_the_age_of_the_others(setting: Setting) -> None:
    one, other = setting.box().link, setting.box().link
    began = time.monotonic()
    rows = [make_row(link.node_id, mode="spare_off", drain_remaining_s=-1.0) for link in (one, other)]
    for link in (one, other):
        link.applied_row, link.mode_stored_at = None, began + 1
    setting.apply(*rows, read_at=began)
    assert {link.condition() for link in (one, other)} == {LinkCondition.READY}
    setting.keeper.update(rows[:1], gone=[], targets={}, peers={}, read_at=began + 2)
    setting.keeper.welcome(other, asked_at=began + 1)
    assert (one.condition(), other.condition()) == (LinkCondition.DRAINING, LinkCondition.READY)


async def test_a_fresh_row_of_one_node_brings_and_takes_what_it_offers(setting: Setting) -> None:
    kept, row = make_row(uuid.uuid4(), is_direct=True, model_names=("a",)), make_row(uuid.uuid4(), is_direct=True)
    setting.apply(kept)
    said = replace(row, model_names=("b",))
    setting.keeper.update([said], gone=[], targets={row.node_id: TARGET}, peers={}, read_at=time.monotonic())
    assert setting.keeper.known_models == {"a", "b"}
    assert isinstance(setting.registry.get(row.node_id), HttpLink)
    setting.keeper.update([], gone=[row.node_id], targets={}, peers={}, read_at=time.monotonic())
    assert setting.keeper.known_models == {"a"}
    assert list(setting.keeper.rows) == [kept.node_id]


async def test_rows_that_were_read_before_the_owners_word_was_stored_do_not_undo_it(setting: Setting) -> None:
    link = setting.box().link
    taken_back = make_row(link.node_id, mode="spare_off", drain_remaining_s=-1.0)
    setting.apply(taken_back)
    assert link.condition() is LinkCondition.DRAINING
    # Lent again, and stored, while a sweep that had read the row before was on its way.
    began = time.monotonic()
    link.policy.reclaimed, link.policy.drain_deadline_at = False, None
    link.applied_row, link.mode_stored_at = None, began + 1
    ends = run_on(link)
    setting.apply(taken_back, read_at=began)
    assert link.condition() is LinkCondition.READY
    assert ends.kinds == []
    setting.apply(taken_back, read_at=began + 2)
    assert link.condition() is LinkCondition.DRAINING
    assert ends.kinds == [EndKind.RECLAIMED]


async def test_a_muster_box_is_told_once_what_was_decided(setting: Setting) -> None:
    box = setting.box()
    for _ in range(3):
        setting.apply(make_row(box.link.node_id, cordoned=True))
    setting.apply(make_row(box.link.node_id))
    for _ in range(2):
        setting.apply(make_row(box.link.node_id, draining=True, drain_remaining_s=30.2))
    notices = [(m.status, m.cordoned, m.drain_s) for m in box.messages() if isinstance(m, bridge.NodeNotice)]
    assert notices == [("draining", True, None), ("available", False, None), ("draining", False, 30)]


async def test_a_bridge_worker_is_asked_to_leave_once_and_closed_when_it_is_idle_or_too_late(setting: Setting) -> None:
    box, late = setting.box(BRIDGE_V1, instance_id=""), setting.box(BRIDGE_V1, instance_id="")
    ends, cut = run_on(box.link), run_on(late.link)
    rows = [make_row(each.link.node_id, draining=True, drain_reason="fans", drain_remaining_s=30.2) for each in (box, late)]
    for _ in range(2):
        setting.apply(*rows)
    shutdowns = [m for m in box.messages() if isinstance(m, bridge.GracefulShutdown)]
    assert shutdowns == [bridge.GracefulShutdown(reason="fans", drain_timeout_secs=30)]
    assert box.kicks == []
    box.link.active = 0
    setting.keeper.tick()
    setting.keeper.tick()
    assert (box.kicks, ends.kinds) == ([(1000, "graceful shutdown complete")], [])
    setting.apply(make_row(late.link.node_id, draining=True, drain_remaining_s=-0.1))
    assert cut.kinds == [EndKind.RECLAIMED]
    cancels = [m.reason for m in late.messages() if isinstance(m, bridge.Cancel)]
    assert (cancels, late.kicks) == (["graceful_shutdown"], [(1000, "graceful shutdown timed out")])


@pytest.mark.parametrize("reason", [{"draining": True}, {"mode": "spare_off"}, {}])
async def test_work_that_outlives_a_drains_deadline_ends_as_reclaimed(setting: Setting, reason: dict[str, object]) -> None:
    box = setting.box()
    ends = run_on(box.link)
    setting.apply(make_row(box.link.node_id, drain_remaining_s=60.0, **reason))
    assert ends.kinds == []
    setting.apply(make_row(box.link.node_id, drain_remaining_s=-0.1, **reason))
    assert ends.kinds == ([EndKind.RECLAIMED] if reason else []), "a deadline without a drain ends nothing"
    assert any("bytes" in m for m in box.sent[1:]) == bool(reason)  # the CANCEL
    assert box.kicks == []


REPLACED = "replaced by a newer session of the same node"


@pytest.mark.parametrize(
    ("version", "changes", "reason"),
    [
        (MUSTER_V1, {"epoch": 2, "instance_id": "i2"}, REPLACED), (BRIDGE_V1, {"epoch": 2, "instance_id": ""}, REPLACED),
        (MUSTER_V1, {"provider_state": "deleted"}, "provider was deleted"),
        (MUSTER_V1, {"epoch": 1, "instance_id": "i1"}, ""), (MUSTER_V1, {"epoch": 2, "instance_id": "i1"}, ""),
        (MUSTER_V1, {"epoch": 0, "instance_id": "i2"}, ""), (MUSTER_V1, {"epoch": 1, "instance_id": "i2"}, ""),
    ],
)  # fmt: skip
async def test_a_newer_session_of_another_instance_and_a_deleted_provider_let_the_box_go(
    setting: Setting, version: str, changes: dict[str, object], reason: str
) -> None:
    box = setting.box(version, instance_id="i1" if version == MUSTER_V1 else "")
    ends = run_on(box.link)
    setting.apply(make_row(box.link.node_id, **changes))
    assert box.kicks == ([(1000, reason)] if reason else [])
    assert (ends.kinds, len(setting.registry)) == (([EndKind.LINK_LOST], 0) if reason else ([], 1))


async def test_a_direct_node_is_linked_kept_and_dropped_with_its_heartbeat(setting: Setting) -> None:
    node_id = uuid.uuid4()
    link = setting.link_of(make_row(node_id, is_direct=True, max_concurrent=3, heartbeat_age_s=2.0))
    assert (link.max_concurrent, link.is_peer, link.target) == (3, False, TARGET)
    assert link.can_take(time.monotonic())
    setting.apply(make_row(node_id, is_direct=True, heartbeat_age_s=10.0, model_names=("x",)))
    assert setting.registry.get(node_id) is link
    assert link.condition() is LinkCondition.STALE
    assert (setting.registry.served_models(), set(setting.keeper.known_models)) == (["x"], {"x"})
    setting.apply(make_row(node_id, is_direct=True, heartbeat_age_s=15.0))
    assert setting.registry.get(node_id) is None
    assert link.closed
    setting.link_of(make_row(node_id, is_direct=True)).last_seen -= 15.0
    setting.keeper.tick()
    assert len(setting.registry) == 0, "its heartbeats stopped between two sweeps"


@pytest.mark.parametrize(
    ("changes", "active", "condition"),
    [
        ({"reported_status": "error"}, 0, LinkCondition.UNHEALTHY),
        ({"is_accepting_jobs": False}, 0, LinkCondition.DRAINING),
        ({"reported_status": "busy"}, 0, LinkCondition.BUSY),
        ({"reported_status": "busy"}, 1, LinkCondition.READY),  # with our own request
        ({"unreachable": "no answer within 3 s"}, 0, LinkCondition.UNHEALTHY),
        ({"cordoned": True}, 0, LinkCondition.DRAINING),
        ({"provider_state": "disabled"}, 0, LinkCondition.DISABLED),
    ],
)
async def test_what_a_direct_node_reports_decides_its_condition(
    setting: Setting, changes: dict[str, object], active: int, condition: LinkCondition
) -> None:
    row = make_row(uuid.uuid4(), is_direct=True)
    link = setting.link_of(row)
    link.active = active
    for said, expected in ((changes, condition), ({}, LinkCondition.READY)):
        setting.apply(make_row(row.node_id, is_direct=True, **said))
        assert link.condition() is expected


async def test_a_direct_node_that_moved_gets_a_new_link_and_one_with_another_api_key_keeps_it(setting: Setting) -> None:
    row = make_row(uuid.uuid4(), is_direct=True)
    setting.keeper.apply([row], targets={}, peers={})
    assert len(setting.registry) == 0, "no address of it is allowed"
    old, keyed = setting.link_of(row), replace(TARGET, headers={"authorization": "Bearer k"})
    setting.keeper.apply([row], targets={row.node_id: keyed}, peers={})
    assert (setting.registry.get(row.node_id), old.target, old.closed) == (old, keyed, False)
    assert "Bearer k" not in repr(old.target)
    setting.keeper.apply([row], targets={row.node_id: PEER}, peers={})
    new = setting.registry.get(row.node_id)
    assert isinstance(new, HttpLink)
    assert (new.target, old.closed) == (PEER, True)


async def test_an_agents_node_is_judged_by_its_own_windows_and_ramps_up_when_it_is_back(setting: Setting) -> None:
    node_id, session = uuid.uuid4(), uuid.uuid4()
    said: dict[str, object] = {"is_direct": True, "protocol": METALYARD, "agent_session": session, "max_concurrent": 8}
    link: Link = setting.link_of(make_row(node_id, heartbeat_age_s=16.0, **said))
    assert (link.condition(), link.max_concurrent) == (LinkCondition.READY, 8), "nothing to ramp up the first time"
    setting.apply(make_row(node_id, heartbeat_age_s=18.0, **said))
    assert link.condition() is LinkCondition.STALE
    setting.apply(make_row(node_id, heartbeat_age_s=48.0, **said))
    assert setting.registry.get(node_id) is None
    with virtual_clock() as virtual:
        back = setting.link_of(make_row(node_id, **said))
        assert back.max_concurrent == 1
        ejections, heard = setting.registry.ejections, SimpleNamespace(first_byte_at=None, received=0, was_blocked=False)
        for slots in (2, 4):
            trial = ejections.begin(back, "m", caller=node_id, is_streaming=False, answer=heard, now=clock.monotonic())
            ejections.end(trial, Verdict.GOOD, clock.monotonic())
            assert back.max_concurrent == slots
        setting.apply(make_row(node_id, **said))
        assert back.max_concurrent == 4, "a row lifts nothing"
        virtual.advance(limits().nodes.agent_ramp_s)
        setting.keeper.tick()
        assert (back.max_concurrent, back.ramp_until) == (8, 0.0)


@pytest.mark.parametrize("is_direct", [False, True])
async def test_a_node_gets_nothing_for_a_model_that_its_gpus_cannot_run(setting: Setting, is_direct: bool) -> None:
    node_id = uuid.uuid4()
    said: dict[str, object] = {"is_direct": is_direct, "gateway_id": THERE, "model_names": ("m", "n")}
    link: Link = setting.link_of(make_row(node_id, excluded=frozenset({"m"}), **said))
    changes: list[Link | None] = []
    setting.registry.subscribe(changes.append)
    assert (link.answers("m", "/a"), link.answers("n", "/a")) == (False, True)
    assert (setting.registry.links_for("m"), setting.registry.served_models()) == ((), ["n"])
    setting.apply(make_row(node_id, **said))
    assert list(setting.registry.links_answering("m", ("/a",))) == [link]
    assert link in changes, "who waits for the model hears of it"


async def test_a_box_on_another_gateway_is_reached_through_that_gateway_on_its_paths(setting: Setting) -> None:
    node_id = uuid.uuid4()
    there = {"gateway_id": THERE, "endpoints": {"m": frozenset({"/a"})}}
    link = setting.link_of(make_row(node_id, protocol=BRIDGE_V1, **there))
    assert (link.is_peer, link.target, link.carries_bytes) == (True, PEER, False)
    assert (link.answers("m", "/a"), link.answers("m", "/b")) == (True, False)
    setting.apply(make_row(node_id, **there | {"endpoints": {"m": frozenset({"/b"})}}))
    assert setting.registry.get(node_id) is link
    assert (list(setting.registry.links_answering("m", ("/b",))), link.carries_bytes) == ([link], True)
    setting.apply(make_row(node_id, connected=False, **there))
    assert setting.registry.get(node_id) is None
    for gateway in (None, HERE, uuid.UUID(int=3)):
        setting.apply(make_row(uuid.uuid4(), gateway_id=gateway))
        assert len(setting.registry) == 0


async def test_a_silent_box_is_let_go_and_a_quiet_one_is_pinged(setting: Setting) -> None:
    box = setting.box()
    now = time.monotonic()
    setting.keeper.tick()
    assert box.messages() == []
    box.link.ping_at = now
    setting.keeper.tick()
    setting.keeper.tick()
    assert [type(m) for m in box.messages()] == [bridge.Ping]
    ends = run_on(box.link)
    box.link.last_seen = now - 15.0
    setting.keeper.tick()
    assert ends.kinds == [EndKind.LINK_LOST]
    assert box.kicks == [(1000, "worker heartbeat timed out")]


@pytest.mark.parametrize(
    ("every_s", "models", "is_running", "asked"),
    [
        (0.0, {"m"}, False, []),
        (30.0, {"m"}, False, ["periodic"] * 2),
        (30.0, {"m"}, True, []),
        (0.0, set(), False, ["no models"] * 6),
    ],
    ids=["as it was started", "by the setting", "not while something runs", "without models"],
)
async def test_a_bridge_worker_is_asked_for_its_models_where_that_takes_nothing_from_anybody(
    every_s: float, models: set[str], is_running: bool, asked: list[str]
) -> None:
    set_limits(nodes={"bridge_refresh_s": every_s})
    with virtual_clock() as time_:
        setting = Setting()
        worker, box = setting.box(BRIDGE_V1, instance_id=""), setting.box()
        setting.registry.update_models(worker.link, frozenset(models))
        worker.link.active = int(is_running)
        for _ in range(90):
            time_.advance(1.0)
            worker.link.last_seen = box.link.last_seen = clock.awake()
            setting.keeper.tick()
    assert [m.reason for m in worker.messages() if isinstance(m, bridge.ModelsRefresh)] == asked
    assert not [m for m in box.messages() if isinstance(m, bridge.ModelsRefresh)], "it says so itself"


async def test_a_gateway_that_stops_tells_workers_to_finish_and_what_it_cuts_is_told_why(setting: Setting) -> None:
    worker, box = setting.box(BRIDGE_V1, instance_id=""), setting.box()
    ends = run_on(worker.link)
    setting.keeper.announce_stop(30.0)
    assert worker.messages()[1:] == [bridge.GracefulShutdown(reason="server shutdown", drain_timeout_secs=30)]
    assert (box.messages(), ends.ends, worker.kicks) == ([], [], [])
    assert not worker.link.can_take(time.monotonic()), "one more request would end its session"
    worker.link.end_streams(EndKind.RECLAIMED, "the gateway stops", reason=bridge.CANCEL_SERVER_SHUTDOWN)
    (cancel,) = [m for m in worker.messages() if isinstance(m, bridge.Cancel)]
    assert (cancel.request_id, cancel.reason, ends.kinds) == ("req_1", "server_shutdown", [EndKind.RECLAIMED])


@pytest.mark.parametrize(("is_last", "reason"), [(False, "graceful_shutdown"), (True, "requeue_exhausted")])
async def test_a_worker_whose_drain_ends_is_told_whether_somebody_else_gets_the_request(
    setting: Setting, reason: str, *, is_last: bool
) -> None:
    worker = setting.box(BRIDGE_V1, instance_id="")
    worker.link.active += 1
    worker.link.open_stream(open_request(is_last=is_last), RequestSink())
    setting.apply(make_row(worker.link.node_id, draining=True, drain_remaining_s=-0.1))
    assert [m.reason for m in worker.messages() if isinstance(m, bridge.Cancel)] == [reason]


async def test_boxes_are_not_silent_while_the_gateway_itself_stands_still() -> None:
    with virtual_clock() as virtual:
        setting, node_id = Setting(), uuid.uuid4()
        box, keeper = setting.box(), setting.keeper
        setting.apply(make_row(box.link.node_id), make_row(node_id, is_direct=True))
        direct = setting.registry.get(node_id)
        assert direct is not None
        keeper._applied_at += 3600.0  # rows keep coming: it is not for want of them that a node is not given up
        keeper.tick()
        virtual.advance(30.0)
        keeper.tick()
        assert (setting.registry.get(node_id), box.kicks) == (direct, [])
        assert {link.condition() for link in (box.link, direct)} == {LinkCondition.READY}
        for _ in range(26):
            virtual.advance(0.5)
            keeper.tick()
        assert len(setting.registry) == 0


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "peer"])
async def test_what_runs_over_http_goes_on_while_the_database_is_away_and_until_boxes_could_write_again(
    setting: Setting, *, is_direct: bool
) -> None:
    node_id, keeper = uuid.uuid4(), setting.keeper
    where = {"is_direct": True} if is_direct else {"gateway_id": THERE}
    silent = make_row(node_id, heartbeat_age_s=30.0, **where)
    setting.apply(make_row(node_id, **where))
    link = setting.registry.get(node_id)
    assert link is not None
    keeper._applied_at -= 30.0
    link.last_seen -= 30.0
    keeper.tick()
    assert setting.registry.get(node_id) is link
    keeper.apply([silent], targets={node_id: TARGET} if is_direct else {}, peers={})
    assert setting.registry.get(node_id) is link
    assert link.condition() is LinkCondition.STALE
    keeper._believed_at = 0.0
    keeper.apply([silent], targets={node_id: TARGET} if is_direct else {}, peers={})
    assert setting.registry.get(node_id) is None
    await turns(1)


async def test_a_gateway_says_of_each_draining_node_how_much_it_still_runs_there(setting: Setting) -> None:
    busy, idle = setting.box(), setting.box()
    since = datetime(2026, 1, 1, tzinfo=UTC)
    run_on(busy.link)
    elsewhere = uuid.uuid4()
    draining = [make_row(node_id, draining_since=since) for node_id in (busy.link.node_id, elsewhere)]
    setting.apply(*draining, make_row(idle.link.node_id))
    assert setting.keeper.list_drains() == [DrainCount(busy.link.node_id, since, 1), DrainCount(elsewhere, since, 0)]


@pytest.mark.parametrize("is_newer", [True, False])
async def test_a_drain_that_was_read_while_a_session_was_being_opened_holds_for_it(setting: Setting, is_newer: bool) -> None:
    late = Box(uuid.uuid4())
    asked_at = time.monotonic()
    row = make_row(late.link.node_id, draining=True, draining_since=datetime(2026, 1, 1, tzinfo=UTC))
    setting.apply(row, read_at=asked_at + (1.0 if is_newer else -1.0))
    setting.keeper.welcome(late.link, asked_at=asked_at)
    assert late.link.policy.draining is is_newer


# What a scrape says


def scrape(keeper: LinkKeeper | None) -> str:
    """Return what a scrape says of a gateway's links and rows."""
    gauges, registry = FleetGauges(), CollectorRegistry()
    gauges.keeper = keeper
    registry.register(gauges)
    return generate_latest(registry).decode()


async def test_whatever_nodes_call_themselves_and_their_gpus_series_stay_few_and_readable(setting: Setting) -> None:
    counts, most = [], limits().nodes
    boxes = [Box(uuid.UUID(int=number + 1)) for number in range(3)]
    for box in boxes:
        setting.registry.add(box.link)
    for turn in range(30):
        for number, box in enumerate(boxes):
            box.link.node_name = f'{turn}"}} 1\nmuster_nodes{{status="made up\\{number}'
            gpus = [bridge.GpuInfo(index=turn * 1000 + n, name="G", memory_total_mb=1) for n in range(most.report_gpus)]
            box.link.take_telemetry(bridge.Telemetry(current_load=0, gpus=gpus))
        families = list(text_string_to_metric_families(scrape(setting.keeper)))
        counts.append(sum(len(family.samples) for family in families))
        (statuses,) = (family for family in families if family.name == "muster_nodes")
        assert {sample.labels["status"] for sample in statuses.samples} == {status.value for status in NodeStatus}
    setting.apply(*[make_row(uuid.uuid4(), protocol=protocol) for protocol in ("", MUSTER_V1, METALYARD) for _ in range(9)])
    assert scrape(setting.keeper).count("\nmuster_sessions{") == 3 * len(Health)
    assert '\nmuster_sessions{health="healthy",protocol="contract-v1"} 9.0\n' in scrape(setting.keeper)
    cards = tuple(bridge.GpuInfo(index=number, name="G") for number in (0, 0, 1))
    setting.apply(row := make_row(uuid.uuid4(), is_direct=True, gpus=cards))
    assert f"\nmuster_gpus {len(boxes) * most.report_gpus + 2}.0\n" in scrape(setting.keeper)
    assert f'muster_gpu_memory_bytes{{gpu="0",node="{row.name}"' not in scrape(setting.keeper), "it does not say how much"
    assert set(counts) == {counts[0]}, "a name or a GPU that is gone leaves no series"
    assert counts[0] <= len(NodeStatus) + 1 + len(boxes) * (2 + most.report_gpus)


async def test_a_fleet_that_is_large_has_a_bounded_number_of_series(setting: Setting) -> None:
    for number in range(limits().nodes.named_in_metrics + 50):
        setting.registry.add(Link(node_id=uuid.UUID(int=number + 1), node_name="n", models=frozenset(), max_concurrent=2))
    said = scrape(setting.keeper)
    assert said.count("\nmuster_node_slots{") == limits().nodes.named_in_metrics + 1
    assert '\nmuster_node_slots{node="others",node_id=""} 100.0\n' in said


FRESH, STALE, OFFLINE = Freshness.FRESH, Freshness.STALE, Freshness.OFFLINE
AGES = {FRESH: 0.0, STALE: 10.0, OFFLINE: 15.0}
WELL = NodeFacts(
    age_s=1.0, protocol=MUSTER_V1, reported=NodeStatus.AVAILABLE, mode=NodeMode.SPARE_ON, draining=False, cordoned=False,
    is_accepting_jobs=True,
)  # fmt: skip


def test_every_combination_has_the_status_that_overrides_most() -> None:
    for freshness, reported, mode, draining, cordoned, accepting in itertools.product(
        Freshness, NodeStatus, NodeMode, (False, True), (False, True), (False, True)
    ):
        facts = replace(
            WELL, age_s=AGES[freshness], protocol="", reported=reported, mode=mode, draining=draining, cordoned=cordoned,
            is_accepting_jobs=accepting,
        )  # fmt: skip
        found = judge_availability(facts, NodeLimits())
        status = found.status
        assert found.freshness is freshness
        is_able = status in {NodeStatus.AVAILABLE, NodeStatus.BUSY} and freshness is FRESH
        assert (found.unavailable is None) == is_able
        if freshness is OFFLINE or reported is NodeStatus.OFFLINE:
            assert status is NodeStatus.OFFLINE
        elif reported is NodeStatus.ERROR:
            assert status is NodeStatus.ERROR
        elif draining or cordoned or not accepting or mode is NodeMode.SPARE_OFF or reported is NodeStatus.DRAINING:
            assert status is NodeStatus.DRAINING
        else:
            assert status is reported


@pytest.mark.parametrize(
    ("changes", "unavailable"),
    [
        ({}, None),
        ({"age_s": None}, Unavailable.SILENT),
        ({"reported": NodeStatus.OFFLINE}, Unavailable.SILENT),
        ({"unreachable": "answers with 503"}, Unavailable.UNREACHABLE),
        ({"unreachable": "answers with 503", "age_s": 15.0}, Unavailable.SILENT),
        ({"is_enabled": False}, Unavailable.PROVIDER_OFF),
        ({"reported": NodeStatus.ERROR}, Unavailable.ERROR),
        ({"draining": True, "cordoned": True}, Unavailable.DRAINING),
        ({"draining": True, "is_drained": True}, Unavailable.DRAINED),
        ({"cordoned": True}, Unavailable.CORDONED),
        ({"mode": NodeMode.SPARE_OFF, "is_drained": True}, Unavailable.TAKEN_BACK),
        ({"is_accepting_jobs": False}, Unavailable.HOLDS_BACK),
        ({"reported": NodeStatus.DRAINING}, Unavailable.HOLDS_BACK),
        ({"age_s": 10.0}, Unavailable.LATE),
        ({"reported": NodeStatus.BUSY}, None),
    ],
)
def test_of_what_keeps_work_from_a_node_the_first_is_said(changes: dict[str, Any], unavailable: Unavailable | None) -> None:
    assert judge_availability(replace(WELL, **changes), NodeLimits()).unavailable is unavailable


@pytest.mark.parametrize(
    ("protocol", "ages"),
    [
        ("", {"healthy": 9.9, "failing": 10.0, "dead": 15.0}),
        (MUSTER_V1, {"healthy": 9.9, "failing": 14.9, "dead": 15.0}),
        (BRIDGE_V1, {"healthy": 29.9, "failing": 30.0, "dead": 45.0}),
        (METALYARD, {"healthy": 16.9, "suspect": 17.0, "failing": 32.0, "dead": 47.0}),
        (METALYARD_RELAY, {"healthy": 16.9, "suspect": 31.9, "failing": 46.9, "dead": 47.0}),
    ],
)
def test_each_session_is_judged_by_the_heartbeats_that_it_missed(protocol: str, ages: dict[str, float]) -> None:
    for health, age_s in ages.items():
        found = judge_availability(replace(WELL, protocol=protocol, age_s=age_s), NodeLimits())
        assert found.health.value == health
        assert (found.unavailable is None) == (health == "healthy"), "what is not healthy gets nothing new"
        assert (found.status is NodeStatus.OFFLINE) == (health == "dead")


@pytest.mark.parametrize(
    ("changes", "health"),
    [
        ({"age_s": None}, Health.REGISTERING),
        ({"reported": NodeStatus.OFFLINE}, Health.OFFLINE),
        ({"reported": NodeStatus.OFFLINE, "age_s": 900.0}, Health.OFFLINE),
        ({"reported": NodeStatus.OFFLINE, "age_s": 900.0, "silence_before_s": 15.0}, Health.DEAD),
        ({"reported": NodeStatus.DRAINING}, Health.DRAINING),
        ({"draining": True}, Health.DRAINING),
        ({"draining": True, "age_s": 15.0}, Health.DEAD),
        ({"reported": NodeStatus.ERROR}, Health.HEALTHY),
    ],
)
def test_the_health_of_a_session_says_also_whether_it_began_drains_or_left(changes: dict[str, Any], health: Health) -> None:
    assert judge_availability(replace(WELL, **changes), NodeLimits()).health is health


def test_shorter_settings_bring_the_second_heartbeat_forward_and_it_never_comes_after_the_end() -> None:
    policy = NodeLimits(heartbeat_interval_s=1.0, stale_after_s=1.5, offline_after_s=1.8, agent_heartbeat_s=4.0)
    assert freshness_windows(policy, protocol="") == (1.5, 1.8, 1.8)
    assert freshness_windows(policy, protocol=METALYARD) == (6.0, 10.0, 14.0)


# Settings


@pytest.mark.parametrize(
    ("changes", "limits", "found"),
    [
        ({}, {}, []),
        ({"NODE_MODEL_CHECK": "nowhere.is_model_allowed"}, {}, ["nodes.E001"]),
        ({"NODE_MODEL_CHECK": "gateway.services.no_such_function"}, {}, ["nodes.E001"]),
        ({"NODE_MODEL_CHECK": "plain"}, {}, ["nodes.E001"]),
        ({"NODE_MODEL_CHECK": "nodes.errors.__doc__"}, {}, ["nodes.E001"]),
        ({"NODE_DIRECT_HOSTS": ["gpu1.lan", "10.0.0.1/8"]}, {}, ["nodes.E002"]),
        ({}, {"stale_after_s": 5.0}, ["nodes.E003"]),
        ({}, {"stale_after_s": 16.0}, ["nodes.E003"]),
        ({}, {"bridge_pong_window_s": 15.0}, ["nodes.E004"]),
    ],
)
def test_settings_that_mean_nothing_or_contradict_each_other_are_errors(
    settings: Settings, changes: dict[str, object], limits: dict[str, float], found: list[str]
) -> None:
    for name, value in changes.items():
        setattr(settings, name, value)
    set_limits(nodes=limits)
    assert [str(message.id) for message in check_settings(None)] == found


# Parameters of operations, in the one form that is signed

LOAD: dict[str, object] = {"modelId": "org/m", "quantization": "awq", "maxContextLength": 4096, "evictModel": "old"}


def test_a_load_is_signed_as_it_was_asked_for() -> None:
    asked = {**LOAD, "gpuMemoryBudgetMB": 9000, "overrides": {"n_ctx": 5, "flags": ["a"], "deep": {"on": True}}}
    assert clean_params(asked, MODEL_LOAD.fields) == asked
    assert canonical(clean_params(asked, MODEL_LOAD.fields))
    assert clean_params({"modelId": "m", "quantization": None, "evictModel": ""}, MODEL_LOAD.fields) == {"modelId": "m"}
    assert clean_params({"timeout_s": 0}, NODE_DRAIN.fields) == {"timeout_s": 0}
    assert clean_params({"modelId": "m", "force": True}, MODEL_UNLOAD.fields) == {"modelId": "m", "force": True}


UNSIGNABLE: list[tuple[Mapping[str, Field], dict[str, object], str, str]] = [
    (MODEL_LOAD.fields, {"modelId": ""}, "modelId", "must be given"),
    (MODEL_LOAD.fields, {"modelId": 7}, "modelId", "printable text"),
    (MODEL_LOAD.fields, {"modelId": "a\u202eb"}, "modelId", "printable text"),
    (MODEL_LOAD.fields, {"modelId": " m"}, "modelId", "outer blanks"),
    (MODEL_LOAD.fields, {"modelId": "m" * 201}, "modelId", "at most 200"),
    (MODEL_LOAD.fields, {"maxContextLength": 4096.0}, "maxContextLength", "only whole numbers can be signed"),
    (MODEL_LOAD.fields, {"maxContextLength": 0}, "maxContextLength", "from 1 to"),
    (MODEL_LOAD.fields, {"maxContextLength": True}, "maxContextLength", "whole number"),
    (MODEL_LOAD.fields, {"maxContextLength": "4096"}, "maxContextLength", "whole number"),
    (MODEL_LOAD.fields, {"gpuMemoryBudgetMB": 2**31}, "gpuMemoryBudgetMB", "whole number"),
    (
        MODEL_LOAD.fields,
        {"overrides": {"gpu_memory_utilization": 0.9}},
        "overrides.gpu_memory_utilization",
        "only whole numbers",
    ),
    (MODEL_LOAD.fields, {"overrides": {"a": {"b": [1, 0.5]}}}, "overrides.a.b", "only whole numbers"),
    (MODEL_LOAD.fields, {"overrides": [1]}, "overrides", "must be an object"),
    (MODEL_LOAD.fields, {"overrides": {"a": None}}, "params", "cannot be signed"),
    (MODEL_LOAD.fields, {"overrides": {"ä": 1}}, "params", "cannot be signed"),
    (MODEL_LOAD.fields, {"overrides": {str(number): 1 for number in range(65)}}, "overrides", "at most 64"),
    (MODEL_LOAD.fields, {"verifiedOpToken": "x"}, "verifiedOpToken", "There is no parameter 'verifiedOpToken' here"),
    (NODE_DRAIN.fields, {"timeout_s": -1}, "timeout_s", ""),
    (NODE_DRAIN.fields, {"timeout_s": 1.5}, "timeout_s", ""),
    (NODE_DRAIN.fields, {}, "timeout_s", ""),
    (NODE_EVICT.fields, {"timeout_s": 0}, "timeout_s", ""),
    (MODEL_UNLOAD.fields, {"modelId": "m", "force": 1}, "force", ""),
    (MODEL_UNLOAD.fields, {"modelId": "m", "force": "true"}, "force", ""),
]


@pytest.mark.parametrize(("fields", "changes", "param", "words"), UNSIGNABLE, ids=range(len(UNSIGNABLE)))
def test_what_cannot_be_signed_is_refused_in_words(
    fields: Mapping[str, Field], changes: dict[str, object], param: str, words: str
) -> None:
    with pytest.raises(InvalidProposal, match=words or None) as caught:
        clean_params({**(LOAD if fields is MODEL_LOAD.fields else {}), **changes}, fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("params", "param"),
    [
        ({"scope": "all"}, None),
        ({"scope": "all", "modelId": "m"}, None),
        ({"scope": "model", "modelId": "m"}, None),
        ({"scope": "tenant", "tenantId": "t"}, None),
        ({"scope": "tenant", "tenantId": "t", "modelId": "m"}, None),
        ({"scope": "tag", "tag": "x"}, None),
        ({"scope": "tag", "tag": "x", "tenantId": "t"}, None),
        ({}, "scope"),
        ({"scope": "world"}, "scope"),
        ({"scope": "model"}, "modelId"),
        ({"scope": "tenant", "modelId": "m"}, "tenantId"),
        ({"scope": "tag"}, "tag"),
        ({"scope": "all", "tenantId": "t"}, "tenantId"),
        ({"scope": "model", "modelId": "m", "tag": "x"}, "tag"),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_flush_says_what_its_scope_needs_and_nothing_else(params: dict[str, object], param: str | None) -> None:
    if param is None:
        assert CACHE_FLUSH.clean_params(params) == params
        return
    with pytest.raises(InvalidProposal) as caught:
        CACHE_FLUSH.clean_params(params)
    assert caught.value.param == param
