"""Keeping links in step with the rows: policy, drains, fencing, and links over HTTP."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from core.limits import NodeLimits
from core.outbox import AsgiMessage
from nodes.links import EndKind, LinkCondition, LinkRegistry
from nodes.links.http import HttpLink, HttpTarget
from nodes.links.keeper import LinkKeeper
from nodes.links.relay import RelayLink
from nodes.session import ServerSession
from nodes.states import DrainCount, NodeRow
from tests.fakes.clock import virtual_clock
from tests.fakes.links import RequestSink, make_row, open_request
from wire import bridge
from wire.bridge import BRIDGE_V1, MUSTER_V1

HERE, THERE = uuid.UUID(int=1), uuid.UUID(int=2)
TARGET = HttpTarget(scheme="http", host="box.example", address="10.0.0.9", port=8000)
PEER = HttpTarget(scheme="http", host="gw2", address="10.0.0.2", port=8080)


class Box:
    """A socket to a box: what it was sent, and how it was closed."""

    def __init__(self, node_id: uuid.UUID, version: str = MUSTER_V1, *, instance_id: str = "i1") -> None:
        self.sent: list[AsgiMessage] = []
        self.kicks: list[tuple[int, str]] = []
        session = ServerSession(NodeLimits())
        session.receive_text(bridge.encode_message(bridge.Register(models=["m"], protocol_version=version)))
        self.link = RelayLink(
            node_id=node_id,
            node_name="node",
            models=frozenset({"m"}),
            max_concurrent=2,
            session=session,
            send=self.send,
            kick=lambda code, reason: self.kicks.append((code, reason)),
        )
        self.link.epoch = 1
        self.link.instance_id = instance_id

    async def send(self, message: AsgiMessage) -> None:
        self.sent.append(message)

    def messages(self) -> list[bridge.ServerMessage]:
        """What it was sent as text."""
        return [bridge.decode_server_message(str(m["text"])) for m in self.sent if "text" in m]


def run_on(link: RelayLink) -> RequestSink:
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
        """Connect a box."""
        box = Box(uuid.uuid4(), version, instance_id=instance_id)
        self.registry.add(box.link)
        return box


@pytest.fixture
def setting() -> Setting:
    return Setting()


async def test_policy_of_a_row_reaches_the_link(setting: Setting) -> None:
    box = setting.box()
    setting.apply(make_row(box.link.node_id, cordoned=True, provider="lab"))
    assert box.link.policy.cordoned
    assert box.link.policy.provider == "lab"
    assert box.link.condition() is LinkCondition.DRAINING
    setting.apply(make_row(box.link.node_id))
    assert box.link.condition() is LinkCondition.READY
    setting.apply(make_row(box.link.node_id, provider_state="disabled"))
    assert box.link.condition() is LinkCondition.DISABLED


async def test_rows_that_were_read_before_the_owners_word_was_stored_do_not_undo_it(setting: Setting) -> None:
    link = setting.box().link
    taken_back = make_row(link.node_id, mode="spare_off", drain_remaining_s=-1.0)
    setting.apply(taken_back)
    assert link.condition() is LinkCondition.DRAINING
    # Lent again, and stored, while a sweep that had read the row before was on its way.
    began = time.monotonic()
    link.policy.reclaimed, link.policy.drain_deadline_at, link.mode_stored_at = False, None, began + 1
    ends = run_on(link)
    setting.apply(taken_back, read_at=began)
    assert link.condition() is LinkCondition.READY
    assert ends.kinds == []
    setting.apply(taken_back, read_at=began + 2)
    assert link.condition() is LinkCondition.DRAINING
    assert ends.kinds == [EndKind.RECLAIMED]


async def test_context_and_engine_of_a_model_are_known_from_its_node_and_from_the_row_of_another(
    setting: Setting,
) -> None:
    box = setting.box()
    assert box.link.context_of("m") is None
    replicas = [
        bridge.ReplicaInfo(model="m", state="loaded", context_tokens=tokens, engine=engine)
        for tokens, engine in ((8192, "llamacpp"), (4096, "vllm"))
    ]
    box.link.take_register(bridge.Register(models=["m"], protocol_version=MUSTER_V1, replicas=replicas))
    assert (box.link.context_of("m"), dict(box.link.engines)) == (4096, {"m": frozenset({"llamacpp", "vllm"})})
    box.link.take_telemetry(bridge.Telemetry(replicas=replicas[:1]))
    assert (box.link.context_of("m"), box.link.context_of("other")) == (8192, None)
    assert box.link.engines == {"m": frozenset({"llamacpp"})}
    engines = {"m": frozenset({"tgi"})}
    elsewhere = make_row(
        uuid.uuid4(), is_direct=True, public_base_url="http://box.example", contexts={"m": 77}, engines=engines
    )
    setting.apply(make_row(box.link.node_id), elsewhere)
    link = setting.registry.get(elsewhere.node_id)
    assert link is not None
    assert (link.context_of("m"), link.engines) == (77, engines)


async def test_known_models_are_those_of_every_row(setting: Setting) -> None:
    setting.apply(make_row(uuid.uuid4(), model_names=("a", "b")), make_row(uuid.uuid4(), model_names=("b", "c")))
    assert setting.keeper.known_models == {"a", "b", "c"}
    setting.apply()
    assert setting.keeper.known_models == set()


async def test_a_muster_box_is_told_once_what_was_decided(setting: Setting) -> None:
    box = setting.box()
    for _ in range(3):
        setting.apply(make_row(box.link.node_id, cordoned=True))
    setting.apply(make_row(box.link.node_id))
    notices = [(m.status, m.cordoned) for m in box.messages() if isinstance(m, bridge.NodeNotice)]
    assert notices == [("draining", True), ("available", False)]


async def test_a_bridge_worker_is_asked_to_leave_once_and_closed_when_it_is_idle(setting: Setting) -> None:
    box = setting.box(BRIDGE_V1, instance_id="")
    ends = run_on(box.link)
    for _ in range(2):
        setting.apply(make_row(box.link.node_id, draining=True, drain_reason="fans", drain_remaining_s=30.2))
    shutdowns = [m for m in box.messages() if isinstance(m, bridge.GracefulShutdown)]
    assert shutdowns == [bridge.GracefulShutdown(reason="fans", drain_timeout_secs=30)]
    assert box.kicks == []
    box.link.active = 0
    setting.keeper.tick()
    setting.keeper.tick()
    assert box.kicks == [(1000, "graceful shutdown complete")]
    assert ends.kinds == []


async def test_a_bridge_worker_that_outlives_its_drain_is_told_so_and_closed(setting: Setting) -> None:
    box = setting.box(BRIDGE_V1, instance_id="")
    ends = run_on(box.link)
    setting.apply(make_row(box.link.node_id, draining=True, drain_remaining_s=60.0))
    setting.apply(make_row(box.link.node_id, draining=True, drain_remaining_s=-0.1))
    assert ends.kinds == [EndKind.RECLAIMED]
    cancels = [m.reason for m in box.messages() if isinstance(m, bridge.Cancel)]
    assert (cancels, box.kicks) == (["graceful_shutdown"], [(1000, "graceful shutdown timed out")])


@pytest.mark.parametrize("reason", [{"draining": True}, {"mode": "spare_off"}])
async def test_work_that_outlives_a_drains_deadline_ends_as_reclaimed(setting: Setting, reason: dict[str, object]) -> None:
    box = setting.box()
    ends = run_on(box.link)
    setting.apply(make_row(box.link.node_id, drain_remaining_s=60.0, **reason))
    assert ends.kinds == []
    setting.apply(make_row(box.link.node_id, drain_remaining_s=-0.1, **reason))
    assert ends.kinds == [EndKind.RECLAIMED]
    assert any("bytes" in m for m in box.sent[1:])  # the CANCEL
    assert box.kicks == []


async def test_a_deadline_without_a_drain_ends_nothing(setting: Setting) -> None:
    box = setting.box()
    ends = run_on(box.link)
    setting.apply(make_row(box.link.node_id, drain_remaining_s=-5.0))
    assert ends.kinds == []


async def test_a_newer_session_of_another_instance_fences_the_link(setting: Setting) -> None:
    box = setting.box()
    ends = run_on(box.link)
    setting.apply(make_row(box.link.node_id, epoch=2, instance_id="i2"))
    assert ends.kinds == [EndKind.LINK_LOST]
    assert box.kicks == [(1000, "replaced by a newer session of the same node")]
    assert len(setting.registry) == 0


@pytest.mark.parametrize(("epoch", "instance"), [(1, "i1"), (2, "i1"), (0, "i2"), (1, "i2")])
async def test_a_row_of_the_same_box_or_an_older_session_does_not_fence(setting: Setting, epoch: int, instance: str) -> None:
    box = setting.box()
    setting.apply(make_row(box.link.node_id, epoch=epoch, instance_id=instance))
    assert box.kicks == []
    assert len(setting.registry) == 1


async def test_a_newer_session_of_a_bridge_worker_fences_the_older_one(setting: Setting) -> None:
    box = setting.box(BRIDGE_V1, instance_id="")
    setting.apply(make_row(box.link.node_id, epoch=2, instance_id=""))
    assert box.kicks == [(1000, "replaced by a newer session of the same node")]


async def test_a_deleted_provider_lets_the_box_go(setting: Setting) -> None:
    box = setting.box()
    ends = run_on(box.link)
    setting.apply(make_row(box.link.node_id, provider_state="deleted"))
    assert ends.kinds == [EndKind.LINK_LOST]
    assert (1000, "provider was deleted") in box.kicks
    assert len(setting.registry) == 0


async def test_a_silent_box_is_let_go_and_a_quiet_one_is_pinged(setting: Setting) -> None:
    box = setting.box()
    now = time.monotonic()
    setting.keeper.tick()
    assert box.messages() == []
    box.link.last_ping_at = now - 5.0
    setting.keeper.tick()
    setting.keeper.tick()
    assert [type(m) for m in box.messages()] == [bridge.Ping]
    ends = run_on(box.link)
    box.link.last_seen = now - 15.0
    setting.keeper.tick()
    assert ends.kinds == [EndKind.LINK_LOST]
    assert box.kicks == [(1000, "worker heartbeat timed out")]


async def test_boxes_are_not_silent_while_the_gateway_itself_stands_still() -> None:
    with virtual_clock() as virtual:
        setting, node_id = Setting(), uuid.uuid4()
        box, keeper = setting.box(), setting.keeper
        setting.apply(make_row(box.link.node_id), make_row(node_id, is_direct=True))
        direct = setting.registry.get(node_id)
        assert direct is not None
        keeper._applied_at += 3600.0  # rows keep coming: it is not for want of them that a box is not given up
        keeper.tick()
        virtual.advance(30.0)
        keeper.tick()
        assert (setting.registry.get(node_id), box.kicks) == (direct, [])
        assert {link.condition() for link in (box.link, direct)} == {LinkCondition.READY}
        for _ in range(26):
            virtual.advance(0.5)
            keeper.tick()
        assert len(setting.registry) == 0


async def test_a_direct_node_is_linked_kept_and_dropped_with_its_heartbeat(setting: Setting) -> None:
    node_id = uuid.uuid4()
    setting.apply(make_row(node_id, is_direct=True, max_concurrent=3, heartbeat_age_s=2.0))
    link = setting.registry.get(node_id)
    assert isinstance(link, HttpLink)
    assert (link.max_concurrent, link.is_peer, link.target) == (3, False, TARGET)
    assert link.can_take(time.monotonic())
    setting.apply(make_row(node_id, is_direct=True, heartbeat_age_s=10.0, model_names=("x",)))
    assert setting.registry.get(node_id) is link
    assert link.condition() is LinkCondition.STALE
    assert setting.registry.served_models() == ["x"]
    setting.apply(make_row(node_id, is_direct=True, heartbeat_age_s=15.0))
    assert setting.registry.get(node_id) is None
    assert link.closed


@pytest.mark.parametrize(
    ("changes", "condition"),
    [
        ({"reported_status": "error"}, LinkCondition.UNHEALTHY),
        ({"reported_status": "draining"}, LinkCondition.DRAINING),
        ({"is_accepting_jobs": False}, LinkCondition.DRAINING),
        ({"reported_status": "busy"}, LinkCondition.BUSY),
        ({"unreachable": "no answer within 3 s"}, LinkCondition.UNHEALTHY),
        ({"cordoned": True}, LinkCondition.DRAINING),
        ({"provider_state": "disabled"}, LinkCondition.DISABLED),
    ],
)
async def test_what_a_direct_node_reports_decides_its_condition(
    setting: Setting, changes: dict[str, object], condition: LinkCondition
) -> None:
    node_id = uuid.uuid4()
    setting.apply(make_row(node_id, is_direct=True, **changes))
    link = setting.registry.get(node_id)
    assert link is not None
    assert link.condition() is condition
    setting.apply(make_row(node_id, is_direct=True))
    assert link.condition() is LinkCondition.READY


async def test_a_direct_node_that_is_busy_with_our_own_request_is_ready(setting: Setting) -> None:
    node_id = uuid.uuid4()
    setting.apply(make_row(node_id, is_direct=True))
    link = setting.registry.get(node_id)
    assert link is not None
    link.active = 1
    setting.apply(make_row(node_id, is_direct=True, reported_status="busy"))
    assert link.condition() is LinkCondition.READY


async def test_a_direct_node_without_an_allowed_address_is_not_linked(setting: Setting) -> None:
    row = make_row(uuid.uuid4(), is_direct=True)
    setting.keeper.apply([row], targets={}, peers={})
    assert len(setting.registry) == 0


async def test_a_direct_node_that_moved_gets_a_new_link(setting: Setting) -> None:
    row = make_row(uuid.uuid4(), is_direct=True)
    setting.apply(row)
    old = setting.registry.get(row.node_id)
    setting.keeper.apply([row], targets={row.node_id: PEER}, peers={})
    new = setting.registry.get(row.node_id)
    assert isinstance(new, HttpLink)
    assert new is not old
    assert new.target == PEER
    assert old is not None
    assert old.closed


async def test_a_direct_node_with_another_api_key_keeps_its_link_and_what_runs_on_it(setting: Setting) -> None:
    row = make_row(uuid.uuid4(), is_direct=True)
    setting.apply(row)
    link = setting.registry.get(row.node_id)
    keyed = replace(TARGET, headers={"authorization": "Bearer k"})
    setting.keeper.apply([row], targets={row.node_id: keyed}, peers={})
    assert setting.registry.get(row.node_id) is link
    assert isinstance(link, HttpLink)
    assert (link.target, link.closed) == (keyed, False)
    assert "Bearer k" not in repr(link.target)


async def test_a_box_on_another_gateway_is_reached_through_that_gateway(setting: Setting) -> None:
    node_id = uuid.uuid4()
    setting.apply(make_row(node_id, gateway_id=THERE))
    link = setting.registry.get(node_id)
    assert isinstance(link, HttpLink)
    assert (link.is_peer, link.target) == (True, PEER)
    setting.apply(make_row(node_id, gateway_id=THERE, connected=False))
    assert setting.registry.get(node_id) is None


@pytest.mark.parametrize("gateway", [None, HERE, uuid.UUID(int=3)])
async def test_a_box_on_no_known_gateway_is_not_linked(setting: Setting, gateway: uuid.UUID | None) -> None:
    setting.apply(make_row(uuid.uuid4(), gateway_id=gateway))
    assert len(setting.registry) == 0


async def test_a_direct_node_whose_heartbeats_stop_between_sweeps_is_dropped_by_the_tick(setting: Setting) -> None:
    node_id = uuid.uuid4()
    setting.apply(make_row(node_id, is_direct=True))
    link = setting.registry.get(node_id)
    assert link is not None
    link.last_seen -= 15.0
    setting.keeper.tick()
    assert len(setting.registry) == 0
    await asyncio.sleep(0)


async def test_the_paths_of_a_row_reach_the_link_and_follow(setting: Setting) -> None:
    node_id = uuid.uuid4()
    setting.apply(make_row(node_id, gateway_id=THERE, endpoints={"m": frozenset({"/a"})}, carries_bytes=False))
    link = setting.registry.get(node_id)
    assert link is not None
    assert (link.answers("m", "/a"), link.answers("m", "/b"), link.carries_bytes) == (True, False, False)
    setting.apply(make_row(node_id, gateway_id=THERE, endpoints={"m": frozenset({"/b"})}, carries_bytes=True))
    assert setting.registry.get(node_id) is link
    assert list(setting.registry.links_answering("m", "/b")) == [link]
    assert link.carries_bytes


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
    await asyncio.sleep(0)


async def test_a_gateway_says_of_each_draining_node_how_much_it_still_runs_there(setting: Setting) -> None:
    busy, idle = setting.box(), setting.box()
    since = datetime(2026, 1, 1, tzinfo=UTC)
    run_on(busy.link)
    elsewhere = uuid.uuid4()
    draining = [make_row(node_id, draining_since=since) for node_id in (busy.link.node_id, elsewhere)]
    setting.apply(*draining, make_row(idle.link.node_id))
    assert setting.keeper.list_drains() == [
        DrainCount(busy.link.node_id, since, 1),
        DrainCount(elsewhere, since, 0),
    ]


@pytest.mark.parametrize("is_newer", [True, False])
async def test_a_drain_that_was_read_while_a_session_was_being_opened_holds_for_it(setting: Setting, is_newer: bool) -> None:
    late = Box(uuid.uuid4())
    asked_at = time.monotonic()
    row = make_row(late.link.node_id, draining=True, draining_since=datetime(2026, 1, 1, tzinfo=UTC))
    setting.apply(row, read_at=asked_at + (1.0 if is_newer else -1.0))
    setting.keeper.welcome(late.link, asked_at=asked_at)
    assert late.link.policy.draining is is_newer


async def test_what_a_box_told_of_its_models_holds_until_it_tells_it_again(setting: Setting) -> None:
    link = setting.box().link

    def hear(models: list[bridge.ModelFacts] | None) -> list[str] | None:
        link.take_telemetry(bridge.Telemetry(memory=bridge.MemoryInfo(used_mb=1, models=models)))
        assert link.telemetry is not None
        assert link.telemetry.memory is not None
        known = link.telemetry.memory.models
        return None if known is None else [facts.name for facts in known]

    first, second = [bridge.ModelFacts(name="a")], [bridge.ModelFacts(name="b")]
    assert [hear(told) for told in (None, first, None, None, second, None, [])] == [
        None, ["a"], ["a"], ["a"], ["b"], ["b"], [],
    ]  # fmt: skip
