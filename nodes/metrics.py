"""Prometheus series of the node registry. Label values come from closed sets, and from the nodes linked to this gateway.

A node is named by its name and its id: names may repeat. Beyond MAX_NAMED_NODES nodes the rest share the name ``others``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wire.contract import NodeStatus
from wire.ids import format_id

if TYPE_CHECKING:
    from nodes.links.keeper import LinkKeeper

MAX_NAMED_NODES = 256
OTHERS = ("others", "")
_MIB = 1024 * 1024
_NODE = ("node", "node_id")
_GPU = (*_NODE, "gpu")

SESSIONS = Counter("muster_worker_sessions_total", "Worker sessions opened", ["protocol"])
AUTH_FAILURES = Counter("muster_worker_auth_failures_total", "Worker sockets refused at authentication", ["reason"])
EJECTIONS = Counter("muster_node_ejections_total", "Times a node was held back for how it answered", ["reason"])
FRAMES_DROPPED = Counter("muster_worker_frames_dropped_total", "Late frames of streams that were over")


class FleetGauges(Collector):
    """Nodes by status, slots and GPUs, read from the links of the gateway at a scrape. Touched on the event loop alone."""

    def __init__(self) -> None:
        self.keeper: LinkKeeper | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the series of a scrape; without a gateway they have no values."""
        nodes = GaugeMetricFamily("muster_nodes", "Nodes by status, of the whole fleet", labels=["status"])
        slots = GaugeMetricFamily("muster_node_slots", "Requests that a linked node takes at a time", labels=_NODE)
        used = GaugeMetricFamily("muster_node_slots_used", "Requests that run on a linked node", labels=_NODE)
        total_bytes = GaugeMetricFamily("muster_gpu_memory_bytes", "Memory of a GPU", labels=_GPU)
        used_bytes = GaugeMetricFamily("muster_gpu_memory_used_bytes", "Memory in use on a GPU", labels=_GPU)
        busy = GaugeMetricFamily("muster_gpu_utilization_ratio", "Share of time that a GPU computes, 0 to 1", labels=_GPU)
        if self.keeper is not None:
            counts = self.keeper.count_statuses()
            for status in NodeStatus:
                nodes.add_metric([status.value], counts[status])
            rest = [0, 0]
            for index, link in enumerate(sorted(self.keeper.registry, key=lambda link: link.node_id)):
                running = min(link.load, link.max_concurrent)
                if index >= MAX_NAMED_NODES:
                    rest = [rest[0] + link.max_concurrent, rest[1] + running]
                    continue
                name = [link.node_name, format_id("node", link.node_id)]
                slots.add_metric(name, link.max_concurrent)
                used.add_metric(name, running)
                for gpu in {gpu.index: gpu for gpu in link.gpus}.values():  # a node may say anything, an index twice
                    card = [*name, str(gpu.index)]
                    if gpu.memory_total_mb is not None:
                        total_bytes.add_metric(card, gpu.memory_total_mb * _MIB)
                    if gpu.memory_used_mb is not None:
                        used_bytes.add_metric(card, gpu.memory_used_mb * _MIB)
                    if gpu.utilization_percent is not None:
                        busy.add_metric(card, gpu.utilization_percent / 100)
            if rest[0]:
                slots.add_metric(OTHERS, rest[0])
                used.add_metric(OTHERS, rest[1])
        yield from (nodes, slots, used, total_bytes, used_bytes, busy)


FLEET = FleetGauges()
REGISTRY.register(FLEET)
