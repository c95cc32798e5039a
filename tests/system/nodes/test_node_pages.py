"""What a page shows of a node: models and memory, whatever its rows hold; its status as SQL filters by it; its ejections."""

from __future__ import annotations

import itertools
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.template.loader import render_to_string
from django.utils import timezone

from core.limits import limits
from nodes.models import Node, NodePresence
from nodes.services import delete_provider, describe_gpus, judge_status, status_expression
from nodes.services.boxes import BoxView, count_replicas, describe_box, describe_counts, describe_limits, draw_memory, read_box
from nodes.services.ejections import EjectionReport, list_ejections, write_ejections
from nodes.services.overview import read_fleet
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence
from wire.bridge import BRIDGE_V1, GpuInfo, MemoryInfo, ModelFacts
from wire.contract import NodeMode, NodeStatus

pytestmark = pytest.mark.django_db


def describe(node: Node | None = None, **presence: Any) -> BoxView:
    """Return the view of a box that was heard just now, without a database."""
    box = node or Node(name="box")
    NodePresence(node=box, last_heartbeat_at=timezone.now(), **presence)
    return describe_box(box, now=timezone.now())


def replica(model: str, state: str, **fields: object) -> dict[str, object]:
    return {"model": model, "state": state, **fields}


def test_models_are_shown_by_state_and_name() -> None:
    rows = [
        replica("b", "loaded", slots=4, active=1, weights_mb=10),
        replica("a", "loaded"),
        replica("c", "loading", progress=0.999, eta_s=3.5, detail="weights"),
        replica("d", "unloading"),
        replica("e", "failed", detail="no room"),
        replica("f", "unloaded"),
        replica("g", "something new"),
    ]
    box = describe(replicas=rows, available_models=["x"])
    assert [view.model for view in box.loaded] == ["a", "b"]
    assert [(view.model, view.percent, view.eta_s) for view in box.changing] == [("c", 99, 3.5), ("d", None, None)]
    assert [(view.model, view.detail) for view in box.failed] == [("e", "no room")]
    assert (box.available, box.available_beyond, box.is_current, box.says_something) == (("x",), 0, True, True)


def test_a_long_list_of_available_models_is_cut() -> None:
    box = describe(available_models=[f"m{number}" for number in range(limits().nodes.shown_models + 7)])
    assert (len(box.available), box.available_beyond) == (limits().nodes.shown_models, 7)


def test_copies_are_counted_by_state() -> None:
    presence = NodePresence(
        replicas=[replica("a", "loading"), replica("b", "loaded"), replica("c", "loaded"), replica("d", "x")]
    )
    assert describe_counts(count_replicas(presence)) == "2 loaded, 1 loading"
    assert describe_counts(count_replicas(None)) == ""


@pytest.mark.parametrize("odd", [[{"model": 5}], ["x"], {"a": 1}, [{"model": "m", "state": "loaded", "progress": "half"}]])
def test_rows_that_another_release_wrote_are_no_error(odd: object) -> None:
    box = describe(replicas=odd, gpus=odd, memory={"total_mb": "many"})
    assert not box.says_something
    assert count_replicas(NodePresence(replicas=odd)) == {}


def test_a_box_that_says_nothing_says_nothing() -> None:
    assert not describe().says_something


def test_a_box_over_rest_shows_the_gpu_of_its_heartbeats() -> None:
    box = describe(Node(name="box", gpu_name="L4", vram_total_mb=1000), vram_used_mb=250, gpu_util_percent=30.0)
    assert box.gpus[0].name == "L4"
    assert box.memory is not None
    assert (box.memory.used_mb, box.memory.total_mb) == (250, 1000)


@pytest.mark.parametrize(
    ("memory", "parts"),
    [
        (MemoryInfo(total_mb=100, used_mb=60, weights_mb=40, kv_mb=15), [40, 15, 5, 40]),
        (MemoryInfo(total_mb=100, used_mb=60), [0, 0, 60, 40]),
        (MemoryInfo(total_mb=100, used_mb=60, weights_mb=90, kv_mb=90), [60, 0, 0, 40]),
        (MemoryInfo(total_mb=100, used_mb=900, kv_mb=30), [0, 30, 70, 0]),
        (MemoryInfo(total_mb=100), [0, 0, 0, 100]),
    ],
)
def test_the_parts_of_the_bar_fill_it_whatever_the_figures(memory: MemoryInfo, parts: list[int]) -> None:
    bar = draw_memory(memory, [])
    assert bar is not None
    assert [part.mb for part in bar.parts] == parts
    assert sum(part.share for part in bar.parts) == pytest.approx(100)
    assert [part.start for part in bar.parts] == pytest.approx([sum(parts[:index]) for index in range(4)])


def test_without_a_figure_of_the_box_its_gpus_are_added_up() -> None:
    gpus = [GpuInfo(index=0, name="a", memory_total_mb=10, memory_used_mb=4), GpuInfo(index=1, name="b", memory_total_mb=30)]
    bar = draw_memory(None, gpus)
    assert bar is not None
    assert (bar.used_mb, bar.total_mb, bar.kind) == (4, 40, "gpu")


@pytest.mark.parametrize("memory", [None, MemoryInfo(used_mb=5), MemoryInfo(total_mb=0, used_mb=5)])
def test_there_is_no_bar_without_a_total(memory: MemoryInfo | None) -> None:
    assert draw_memory(memory, [GpuInfo(index=0, name="a")]) is None


@pytest.mark.django_db
def test_a_box_is_read_in_one_query(django_assert_num_queries: Any) -> None:
    node = make_node()
    make_presence(node, age_s=60, replicas=[replica("a", "loading", progress=0.5)])
    with django_assert_num_queries(1):
        box = read_box(node.pk)
    assert box is not None
    assert (box.is_current, box.changing[0].percent) == (False, 50)
    assert [health.models for health in read_fleet().nodes] == ["1 loading"]


@pytest.mark.django_db
def test_a_box_that_was_never_heard_is_not_current() -> None:
    box = describe_box(make_node(), now=timezone.now())
    assert (box.is_current, box.age_s, box.says_something) == (False, None, False)


@pytest.mark.django_db
def test_a_box_of_a_deleted_provider_is_not_there() -> None:
    credential, _ = make_credential(provider="gone")
    node = make_node(credential=credential)
    delete_provider(name="gone", actor=ACTOR)
    assert read_box(node.pk) is None


def test_what_loads_take_and_may_set_is_shown() -> None:
    facts = ModelFacts(
        name="m", backend="gguf", state="unloaded", replica_max=4, target_inflight=2, configured_target_inflight=3,
        estimate_mb=700, estimate_replicas=2, estimate_source="model_artifact_size",
        load_constraints={"gguf_n_ctx": {"kind": "integer", "minimum": 1, "step": 1}},
    )  # fmt: skip
    box = describe(memory=msgspec.to_builtins(MemoryInfo(total_mb=10, models=[facts])))
    (shown,) = box.facts
    assert (shown.name, shown.replicas, shown.estimate_mb, shown.estimate) == (
        "m",
        "up to 4",
        700,
        "size of the files, 2 replicas",
    )
    assert shown.limits == ("gguf_n_ctx: from 1",)
    page = render_to_string("admin/muster/box_state.html", {"box": box})
    assert "What a load takes and may set" in page
    assert "gguf_n_ctx: from 1" in page
    assert "2 <small>3 in the settings</small>" in page
    assert '<span class="mst-name">m</span> <small>unloaded</small>' in page


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"minimum": 1, "maximum": 64, "step": 1, "unit": "replicas", "default": 1}, "1 to 64 replicas; 1 when left out"),
        ({"minimum": 256, "step": 256, "unit": "tokens", "default": None}, "from 256 in steps of 256 tokens"),
        ({"allowed_values": ["f16", None], "default": "f16"}, "f16, nothing; f16 when left out"),
        ({"kind": "string_or_null", "format": "a path"}, "a path"),
        ({}, "any value"),
    ],
)
def test_limits_of_a_field_are_said_in_words(limits: dict[str, object], words: str) -> None:
    assert describe_limits(limits) == words


# Status


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


# Ejections


HERE, THERE = uuid.UUID(int=1), uuid.UUID(int=2)


def report(node: Node, **changes: object) -> EjectionReport:
    """Return that a gateway ejected the node for ``m`` now, for twenty seconds."""
    made = EjectionReport(node_id=node.pk, model="m", reason="failed", age_s=0.0, left_s=20.0, is_news=True)
    return replace(made, **changes)  # type: ignore[arg-type]  # the fields of the report


def shown(node: Node) -> list[str]:
    return [one.words for one in list_ejections(NodePresence.objects.get(pk=node.pk), now=timezone.now())]


def test_why_and_until_when_a_node_is_ejected_is_told_once_and_goes_when_it_is_over() -> None:
    node, other = make_node("bad"), make_node("good", credential=make_credential("second")[0])
    make_presence(node), make_presence(other)
    write_ejections([report(node)], gateway_id=HERE)
    write_ejections([report(node, is_news=False, left_s=40.0)], gateway_id=HERE)
    (words,) = shown(node)
    assert words.startswith("it failed requests that other nodes answered; no new requests until ")
    assert shown(other) == []
    (event,) = audited("node.ejected")
    assert (event.target, event.detail["model"]) == (node.printed_id, "m")
    assert {one.name: len(one.ejections) for one in read_fleet().nodes} == {"bad": 1, "good": 0}
    write_ejections([], gateway_id=HERE)
    assert shown(node) == []


def test_what_another_gateway_holds_against_a_node_stays_until_it_is_long_over() -> None:
    node = make_node()
    make_presence(node)
    write_ejections([report(node, reason="slow")], gateway_id=THERE)
    write_ejections([report(node)], gateway_id=HERE)
    write_ejections([], gateway_id=HERE)
    assert len(shown(node)) == 1
    write_ejections([report(node, left_s=-1.0)], gateway_id=THERE)
    assert shown(node)[0].endswith("one request at a time tries it")
    write_ejections([report(node, left_s=-600.0)], gateway_id=THERE)
    assert shown(node) == []
    write_ejections([report(node, is_held=False, left_s=60.0)], gateway_id=HERE)
    assert NodePresence.objects.get(pk=node.pk).ejections.keys() == {HERE.hex}, "a dead gateway's leftovers go"
    assert "gets requests all the same" in shown(node)[0]
