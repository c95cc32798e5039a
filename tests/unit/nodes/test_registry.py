"""Who can be reached from this process, by node and by model; and what a scrape says of nodes, slots and GPUs."""

from __future__ import annotations

import time
import uuid

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core.limits import limits
from nodes.links import EndKind, LinkCondition, LinkRegistry
from nodes.links.keeper import FleetGauges, LinkKeeper
from nodes.links.port import Link
from nodes.states import TOKENIZE
from tests.fakes.links import FakeLink, RequestSink, make_row, open_request
from tests.unit.nodes.test_keeper import Box
from wire import bridge
from wire.contract import NodeStatus


def open_on(link: FakeLink) -> RequestSink:
    sink = RequestSink()
    link.open_stream(open_request(), sink)
    return sink


def test_links_are_found_by_node_and_by_each_model() -> None:
    registry = LinkRegistry()
    first, second = FakeLink("a", "b"), FakeLink("b")
    registry.add(first)
    registry.add(second)
    assert list(registry) == [first, second]
    assert len(registry) == 2
    assert registry.get(first.node_id) is first
    assert list(registry.links_for("b")) == [first, second]
    assert list(registry.links_for("x")) == []
    assert registry.served_models() == ["a", "b"]


def test_a_removed_link_is_forgotten_and_its_streams_end_as_lost_once() -> None:
    registry = LinkRegistry()
    link = FakeLink("a", "b")
    registry.add(link)
    sink = open_on(link)
    registry.remove(link)
    registry.remove(link)
    assert link.closed
    assert sink.kinds == [EndKind.LINK_LOST]
    assert (registry.served_models(), registry.get(link.node_id), len(registry)) == ([], None, 0)


def test_a_newer_session_replaces_the_older_whose_late_removal_harms_nothing() -> None:
    registry = LinkRegistry()
    old = FakeLink("a")
    new = FakeLink("b", node_id=old.node_id)
    registry.add(old)
    sink = open_on(old)
    registry.add(new)
    assert old.close_reasons == ["replaced by a newer session of the same node"]
    assert sink.kinds == [EndKind.LINK_LOST]
    registry.remove(old)
    assert registry.get(new.node_id) is new
    assert not new.closed
    assert registry.served_models() == ["b"]


def test_a_link_that_was_removed_answers_nothing_any_more() -> None:
    registry = LinkRegistry()
    link = FakeLink("a")
    registry.add(link)
    assert list(registry.links_answering("a", "/v1/chat/completions")) == [link]
    other = FakeLink("a")
    registry.add(other)
    assert list(registry.links_answering("a", "/v1/chat/completions")) == [link, other]
    registry.remove(link)
    assert list(registry.links_answering("a", "/v1/chat/completions")) == [other]


def test_adding_a_link_twice_does_not_close_it() -> None:
    registry = LinkRegistry()
    link = FakeLink("a")
    registry.add(link)
    registry.remove(link)
    link.closed = False
    registry.add(link)
    assert link.close_reasons == []


def test_new_models_are_found_and_old_ones_are_not() -> None:
    registry = LinkRegistry()
    link = FakeLink("a")
    registry.add(link)
    registry.update_models(link, frozenset({"b", "c"}))
    assert registry.served_models() == ["b", "c"]
    assert list(registry.links_for("a")) == []


def test_models_of_a_link_that_was_replaced_are_not_listed() -> None:
    registry = LinkRegistry()
    link = FakeLink("a")
    registry.update_models(link, frozenset({"b"}))
    assert registry.served_models() == []
    assert link.models == {"b"}


def test_listeners_hear_of_every_change() -> None:
    registry = LinkRegistry()
    heard: list[Link | None] = []
    registry.subscribe(heard.append)
    link = FakeLink("a")
    registry.add(link)
    registry.update_models(link, frozenset({"b"}))
    registry.remove(link)
    assert heard == [link, link, None]


def test_links_may_be_removed_while_they_are_walked() -> None:
    registry = LinkRegistry()
    for _ in range(5):
        registry.add(FakeLink("a"))
    for link in registry:
        registry.remove(link)
    assert len(registry) == 0


@pytest.mark.parametrize(
    ("change", "condition"),
    [
        (lambda link: None, LinkCondition.READY),
        (lambda link: setattr(link, "last_seen", time.monotonic() - 10), LinkCondition.STALE),
        (lambda link: setattr(link.policy, "draining", True), LinkCondition.DRAINING),
        (lambda link: setattr(link.policy, "cordoned", True), LinkCondition.DRAINING),
        (lambda link: setattr(link.policy, "reclaimed", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "box_draining", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "closed", True), LinkCondition.DRAINING),
        (lambda link: setattr(link, "unhealthy_reason", "ECC"), LinkCondition.UNHEALTHY),
        (lambda link: setattr(link.policy, "provider_enabled", False), LinkCondition.DISABLED),
    ],
)
def test_a_link_takes_work_only_when_it_is_ready(change: object, condition: LinkCondition) -> None:
    assert callable(change)
    link = FakeLink()
    change(link)
    now = time.monotonic()
    assert link.condition() is condition
    assert link.can_take(now) == (condition is LinkCondition.READY)


def test_slots_and_a_busy_pause_hold_work_back() -> None:
    link = FakeLink(slots=2)
    now = time.monotonic()
    link.active = 2
    assert not link.can_take(now)
    assert not link.has_slot()
    link.active = 1
    link.busy_until = now + 1
    assert not link.can_take(now)
    assert link.can_take(now + 1)


@pytest.mark.parametrize(("reported", "external"), [(0, 0), (3, 0), (5, 2), (-7, 0), (10**40, 1_000_000)])
def test_what_a_box_says_of_its_load_orders_but_never_takes_a_slot(reported: int, external: int) -> None:
    link = FakeLink(slots=4)
    link.active = 3
    link.report_load(reported)
    assert (link.external_load, link.load) == (external, 3 + external)
    assert link.can_take(time.monotonic())


# API paths


def test_links_are_found_by_model_and_path_and_follow_every_change() -> None:
    registry = LinkRegistry()
    first, second = FakeLink("a"), FakeLink("a")
    first.endpoints = {"a": frozenset({"/chat", TOKENIZE})}
    registry.add(first)
    registry.add(second)
    assert list(registry.links_answering("a", "/chat")) == [first, second]
    assert list(registry.links_answering("a", "/embed")) == [second]
    registry.update_models(second, frozenset({"a"}), {"a": frozenset({"/other"})})
    assert list(registry.links_answering("a", "/embed")) == []
    assert registry.endpoints_of("a") == ["/chat", "/other"]
    registry.update_models(first, frozenset({"b"}))
    assert list(registry.links_answering("a", "/chat")) == []
    registry.remove(second)
    assert registry.endpoints_of("a") == []


def test_names_that_nobody_serves_leave_nothing_behind() -> None:
    registry = LinkRegistry()
    for number in range(100):
        assert list(registry.links_answering(f"guess-{number}", "/chat")) == []
    assert registry._answering == {}


# What a scrape says


class Scrape:
    """A gateway's links and rows, and what a scrape of them says."""

    def __init__(self) -> None:
        self.registry = LinkRegistry()
        self.keeper = LinkKeeper(self.registry, gateway_id=uuid.uuid4(), connect_s=1.0)
        self.gauges = FleetGauges()
        self.gauges.keeper = self.keeper

    def add(self, link: Link) -> Link:
        self.registry.add(link)
        return link

    def read(self) -> dict[str, float]:
        """Return each series with its value."""
        registry = CollectorRegistry()
        registry.register(self.gauges)
        lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


async def test_nodes_are_counted_by_their_status_and_those_of_deleted_providers_are_not() -> None:
    scrape = Scrape()
    changes: tuple[dict[str, object], ...] = (
        {},
        {},
        {"draining": True},
        {"reported_status": "error"},
        {"heartbeat_age_s": 60.0},
        {"provider_state": "deleted"},
    )
    rows = [make_row(uuid.uuid4(), **each) for each in changes]
    scrape.keeper.apply(rows, targets={}, peers={})
    said = scrape.read()

    assert {name: value for name, value in said.items() if name.startswith("muster_nodes")} == {
        'muster_nodes{status="available"}': 2.0,
        'muster_nodes{status="busy"}': 0.0,
        'muster_nodes{status="draining"}': 1.0,
        'muster_nodes{status="error"}': 1.0,
        'muster_nodes{status="offline"}': 1.0,
    }


async def test_a_linked_node_has_its_slots_and_gpus_once_each() -> None:
    scrape = Scrape()
    box = Box(uuid.UUID(int=7))
    gpus = [
        bridge.GpuInfo(index=0, name="L4", memory_total_mb=1024, memory_used_mb=512, utilization_percent=25.0),
        bridge.GpuInfo(index=0, name="L4", memory_total_mb=1024),
        bridge.GpuInfo(index=1, name="L4"),
    ]
    box.link.take_telemetry(bridge.Telemetry(current_load=1, gpus=gpus))
    box.link.node_name = 'rack "2"\n'
    scrape.add(box.link)
    said = scrape.read()
    node = r'node="rack \"2\"\n",node_id="node_00000000000000000000000000000007"'

    assert said[f"muster_node_slots{{{node}}}"] == 2.0
    assert said[f"muster_node_slots_used{{{node}}}"] == 1.0
    gpu = {name: value for name, value in said.items() if name.startswith("muster_gpu")}
    assert set(gpu) == {f'muster_gpu_memory_bytes{{gpu="0",{node}}}'}
    assert next(iter(gpu.values())) == 1024 * 1024 * 1024


async def test_a_fleet_that_is_large_has_a_bounded_number_of_series() -> None:
    scrape = Scrape()
    for number in range(limits().nodes.named_in_metrics + 50):
        scrape.add(Link(node_id=uuid.UUID(int=number + 1), node_name="n", models=frozenset(), max_concurrent=2))
    said = scrape.read()

    assert sum(name.startswith("muster_node_slots{") for name in said) == limits().nodes.named_in_metrics + 1
    assert said['muster_node_slots{node="others",node_id=""}'] == 100.0


async def test_whatever_nodes_call_themselves_and_their_gpus_series_stay_few_and_readable() -> None:
    scrape, counts = Scrape(), []
    boxes = [Box(uuid.UUID(int=number + 1)) for number in range(3)]
    for box in boxes:
        scrape.add(box.link)
    for turn in range(30):
        for number, box in enumerate(boxes):
            box.link.node_name = f'{turn}"}} 1\nmuster_nodes{{status="made up\\{number}'
            gpus = [
                bridge.GpuInfo(index=turn * 1000 + index, name="G", memory_total_mb=1)
                for index in range(limits().nodes.report_gpus)
            ]
            box.link.take_telemetry(bridge.Telemetry(current_load=0, gpus=gpus))
        registry = CollectorRegistry()
        registry.register(scrape.gauges)
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        counts.append(sum(len(family.samples) for family in families))
        (statuses,) = (family for family in families if family.name == "muster_nodes")
        assert {sample.labels["status"] for sample in statuses.samples} == {status.value for status in NodeStatus}
    assert set(counts) == {counts[0]}, "a name or a GPU that is gone leaves no series"
    assert counts[0] <= len(NodeStatus) + len(boxes) * (2 + limits().nodes.report_gpus)


async def test_without_a_gateway_there_are_no_values() -> None:
    assert Scrape().read() != {}
    scrape = Scrape()
    scrape.gauges.keeper = None
    assert scrape.read() == {}
