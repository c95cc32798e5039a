"""The status in SQL, which filters use, is the status in Python, which lists show."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from django.utils import timezone

from nodes.models import Node, NodePresence
from nodes.services import describe_gpus, judge_status, status_expression
from tests.fakes.nodes import make_credential, make_node, make_presence
from wire.bridge import BRIDGE_V1
from wire.contract import NodeMode, NodeStatus

pytestmark = pytest.mark.django_db


def test_sql_and_python_agree_on_every_combination() -> None:
    credential, _ = make_credential(max_nodes=10_000)
    combinations = itertools.product(
        (None, 1, 12, 17, 46),
        ("", BRIDGE_V1),
        NodeStatus,
        NodeMode,
        (False, True),
        (False, True),
        (False, True),
    )
    nodes, presences = [], []
    for number, (age_s, protocol, reported, mode, draining, cordoned, accepting) in enumerate(combinations):
        node = Node(
            name=str(number),
            credential=credential,
            provider=credential.provider,
            mode=mode,
            draining=draining,
            cordoned=cordoned,
        )
        nodes.append(node)
        heard = None if age_s is None else timezone.now() - timedelta(seconds=age_s)
        presences.append(
            NodePresence(
                node=node,
                last_heartbeat_at=heard,
                protocol=protocol,
                reported_status=reported,
                is_accepting_jobs=accepting,
            )
        )
    Node.objects.bulk_create(nodes)
    NodePresence.objects.bulk_create(presences)
    make_node("never registered a presence", credential=credential)
    now = timezone.now()
    rows = Node.objects.select_related("presence").annotate(status_now=status_expression(now=now))
    differing = [
        (node.name, node.status_now, status)
        for node in rows
        if node.status_now != (status := judge_status(node, getattr(node, "presence", None), now=now))
    ]
    assert len(rows) == 5 * 2 * 5 * 2 * 8 + 1
    assert not differing


def test_the_gpu_line_shows_telemetry_and_else_what_was_registered() -> None:
    node = make_node(gpu_name="NVIDIA L4", vram_total_mb=23040)
    assert describe_gpus(node, None) == "NVIDIA L4 22.5 GiB"
    presence = make_presence(node, gpu_util_percent=63.4, vram_used_mb=18432)
    assert describe_gpus(node, presence) == "NVIDIA L4 63 % 18.0/22.5 GiB"
    presence.gpus = [
        {"index": 0, "name": "RTX 4090", "utilization_percent": 5, "memory_used_mb": 1024, "memory_total_mb": 24576},
        {"index": 1, "name": "RTX 3060"},
    ]
    assert describe_gpus(node, presence) == "RTX 4090 5 % 1.0/24.0 GiB; RTX 3060"
    assert describe_gpus(make_node("plain"), None) == ""
