"""What a scrape says of nodes, slots and GPUs."""

from __future__ import annotations

import uuid

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from core.limits import limits
from nodes.links import LinkRegistry
from nodes.links.keeper import FleetGauges, LinkKeeper
from nodes.links.port import Link
from tests.fakes.links import make_row
from tests.unit.nodes.test_keeper import Box
from wire import bridge
from wire.contract import NodeStatus


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
