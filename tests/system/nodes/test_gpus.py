"""One row per GPU: written from presences however they came about, kept when a GPU goes, bounded whatever a node says."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from core.limits import limits
from governance.admin_tokens import create_admin_token
from nodes.models import Gpu, Node, NodePresence, Provider
from nodes.reports import clean_register, read_capabilities
from nodes.services.agents import AgentReport, record_agent_heartbeats, register_agent
from nodes.services.gpus import GpuReport, derive_gpu_id, follow_gpus
from nodes.services.nodes import Heartbeat, record_heartbeat, store_capabilities
from nodes.services.sessions import PresenceReport, SessionRequest, open_sessions, write_presences
from nodes.session import Registered
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, make_credential, make_node, make_presence
from wire import agent, bridge
from wire.contract import NodeStatus

pytestmark = pytest.mark.django_db

GPU: dict[str, Any] = {"index": 0, "name": "NVIDIA L4", "memory_total_mb": 23_034, "memory_used_mb": 1_000}


def hear(*, after_s: float = 10.0, **changes: Any) -> None:
    """Let every node be heard again a little later, and say this."""
    NodePresence.objects.update(last_heartbeat_at=F("last_heartbeat_at") + timedelta(seconds=after_s), **changes)


def make_gpus(*gpus: dict[str, Any], name: str = "box", **changes: Any) -> Node:
    node = make_node(name)
    make_presence(node, gpus=list(gpus) or [GPU], **changes)
    follow_gpus()
    return node


def ask(path: str, **query: str) -> tuple[int, Any]:
    _, token = create_admin_token(name="ops", actor=ACTOR)
    response = Client().get(path, query, headers={"authorization": f"Bearer {token}"})
    return response.status_code, response.json()


def test_a_gpu_keeps_its_id_and_shows_what_was_said_last() -> None:
    node = make_gpus({**GPU, "gpu_id": "GPU-1", "vendor": "nvidia", "compute_capability": "8.9", "driver_version": "550"})
    first = Gpu.objects.get()
    assert (first.id, first.own_id, first.node) == (derive_gpu_id(node.pk, "GPU-1"), "GPU-1", node)
    assert (first.vendor, first.model, first.vram_mb, first.vram_free_mb) == ("nvidia", "NVIDIA L4", 23_034, 22_034)
    hear(gpus=[{**GPU, "gpu_id": "GPU-1", "index": 3, "utilization_percent": 40.0, "temperature_c": 61.0, "power_w": 55.0}])
    assert follow_gpus() == GpuReport(written=1)
    again = Gpu.objects.get()
    assert (again.id, again.index, again.load_percent, again.temperature_c, again.power_w) == (first.id, 3, 40.0, 61.0, 55.0)
    assert (again.first_seen_at, again.last_seen_at > first.last_seen_at) == (first.first_seen_at, True)


def test_the_limits_of_a_node_are_those_of_its_gpus_until_they_name_their_own() -> None:
    replicas = [{"model": "a", "state": "loaded", "context_tokens": 8_192}, {"model": "b", "state": "loaded"}]
    make_gpus(GPU, {**GPU, "index": 1, "max_batch": 3, "max_context_tokens": 512}, replicas=replicas)
    assert list(Gpu.objects.order_by("index").values_list("max_batch", "max_context_tokens")) == [(1, 8_192), (3, 512)]
    hear(replicas={})
    follow_gpus()
    assert Gpu.objects.get(index=0).max_context_tokens is None


def test_a_gpu_has_the_limits_and_the_load_of_the_replicas_that_are_on_it() -> None:
    replicas: list[dict[str, object]] = [
        {"model": "a", "state": "loaded", "slots": 4, "active": 3, "context_tokens": 8_192, "gpus": [0]},
        {"model": "b", "state": "loaded", "slots": 2, "active": 1, "context_tokens": 4_096, "gpus": [0, 1]},
        {"model": "c", "state": "loaded", "slots": 8, "active": 5, "context_tokens": 32_768, "device": "cpu"},
    ]
    columns = ("max_batch", "max_context_tokens", "active_requests")
    make_gpus(GPU, {**GPU, "index": 1}, {**GPU, "index": 2}, replicas=replicas)
    assert list(Gpu.objects.order_by("index").values_list(*columns)) == [(6, 8_192, 4), (2, 4_096, 1), (1, 32_768, None)]
    hear(replicas=[*replicas, {"model": "mute", "state": "loaded", "slots": 2}])
    follow_gpus()
    assert list(Gpu.objects.order_by("index").values_list(*columns)) == [(1, 32_768, None)] * 3, "one does not say where it is"


def test_a_gpu_shows_the_models_that_its_node_says_are_on_it() -> None:
    replicas = [{"model": "a", "state": "loaded", "gpus": [0, 1]}, {"model": "b", "state": "loaded", "gpus": [1]}]
    make_gpus(*({**GPU, "index": index} for index in range(3)), replicas=replicas)
    Node.objects.update(model_names=["a", "b"])
    assert [entry["models"] for entry in sorted(ask("/api/v1/gpus")[1]["gpus"], key=lambda entry: entry["index"])] == [
        ["a"], ["a", "b"], [],
    ]  # fmt: skip
    hear(replicas=[{"model": "a", "state": "loaded"}])
    follow_gpus()
    assert all(entry["models"] == ["a", "b"] for entry in ask("/api/v1/gpus")[1]["gpus"]), "it does not say"


def test_nothing_is_written_while_nothing_was_heard() -> None:
    make_gpus()
    hear(after_s=1.0)
    assert follow_gpus() == GpuReport()
    assert GpuReport() == follow_gpus()


def test_a_gpu_that_is_no_longer_named_is_gone_and_the_same_one_when_it_comes_back() -> None:
    make_gpus(GPU, {**GPU, "index": 1})
    hear(gpus=[GPU])
    assert follow_gpus() == GpuReport(written=1, gone=1)
    assert [gpu.gone_at is not None for gpu in Gpu.objects.order_by("own_id")] == [False, True]
    hear(gpus=[])
    assert follow_gpus().gone == 1
    hear(gpus=[GPU, {**GPU, "index": 1}])
    assert follow_gpus() == GpuReport(written=2)
    assert not Gpu.objects.exclude(gone_at=None).exists()
    assert Gpu.objects.count() == 2


def test_a_gpu_that_is_gone_for_too_long_is_forgotten() -> None:
    make_gpus(GPU, {**GPU, "index": 1})
    hear(gpus=[GPU])
    follow_gpus()
    Gpu.objects.filter(own_id="1").update(gone_at=F("gone_at") - timedelta(seconds=limits().nodes.gpu_gone_s))
    hear()
    assert follow_gpus().forgotten == 1
    assert [gpu.own_id for gpu in Gpu.objects.all()] == ["0"]


def test_a_node_that_names_new_gpus_each_time_fills_no_table() -> None:
    set_limits(nodes={"gpu_gone_per_node": 3})
    make_gpus()
    for turn in range(5):
        hear(gpus=[{**GPU, "gpu_id": f"{turn}-{number}"} for number in range(2)])
        follow_gpus()
    assert Gpu.objects.count() == 2 + 3
    assert set(Gpu.objects.filter(gone_at=None).values_list("own_id", flat=True)) == {"4-0", "4-1"}


def test_what_a_node_lies_about_its_gpus_is_brought_into_range() -> None:
    said = bridge.Register(
        protocol_version=bridge.MUSTER_V1,
        gpus=[
            bridge.GpuInfo(index=-1, name="x" * 500, memory_total_mb=-5, memory_used_mb=2**60, gpu_id="a", max_batch=2**60),
            bridge.GpuInfo(index=1, name="twice", gpu_id="a", vendor="v" * 99),
            bridge.GpuInfo(index=2, name="nul\x00", gpu_id="\ud800", utilization_percent=1e9, active_requests=-1),
            *(bridge.GpuInfo(index=number, name="many") for number in range(3, 1_000)),
        ],
    )
    clean_register(said)
    make_gpus(*msgspec.to_builtins(said.gpus))
    gpus = {gpu.own_id: gpu for gpu in Gpu.objects.all()}
    assert len(gpus) == limits().nodes.report_gpus - 1
    first, odd = gpus["a"], gpus["2"]
    assert (first.index, len(first.model), first.vram_mb, first.vram_free_mb) == (0, 200, 0, 0)
    assert (first.vram_used_mb, first.max_batch) == (limits().nodes.report_mb, limits().nodes.report_load)
    assert (odd.model, odd.load_percent, odd.active_requests) == ("nul", 100.0, 0)


def test_gpus_that_another_release_stored_in_another_form_are_none() -> None:
    make_node("quiet")
    make_gpus({"index": "first"})
    make_presence(Node.objects.get(name="quiet"), gpus=[GPU])
    follow_gpus()
    assert [gpu.node.name for gpu in Gpu.objects.all()] == ["quiet"]


def test_a_gpu_that_cannot_be_stored_keeps_out_no_other_ones() -> None:
    make_presence(make_node("odd"), gpus=[{**GPU, "gpu_id": "x" * 99}])
    make_gpus()
    assert [gpu.node.name for gpu in Gpu.objects.all()] == ["box"]


def test_a_thousand_nodes_cost_five_statements() -> None:
    credential, _ = make_credential(max_nodes=1_000)
    nodes = Node.objects.bulk_create(
        Node(name=f"n{number}", credential=credential, provider=credential.provider) for number in range(999)
    )
    moment = make_presence(make_node("last", credential=credential), gpus=[GPU]).last_heartbeat_at
    gpus = [{**GPU, "index": index} for index in range(4)]
    NodePresence.objects.bulk_create(NodePresence(node=node, gpus=gpus, last_heartbeat_at=moment) for node in nodes)
    set_limits(nodes={"gpu_batch": 1_001})
    with CaptureQueriesContext(connection) as queries:
        assert follow_gpus().written == 4 * 999 + 1
    work = [one["sql"].split()[0] for one in queries if "SAVEPOINT" not in one["sql"]]
    assert work == ["SELECT", "SELECT", "INSERT", "UPDATE", "DELETE"]


def test_batches_reach_every_node_once() -> None:
    set_limits(nodes={"gpu_batch": 2})
    for number in range(5):
        make_presence(make_node(f"n{number}"), gpus=[GPU])
    assert follow_gpus() == GpuReport(written=5)


# Every way of reporting


def test_a_muster_node_has_its_gpus_from_registration_and_telemetry() -> None:
    gateway, (credential, _) = uuid.uuid4(), make_credential()
    gpu = bridge.GpuInfo(index=0, name="NVIDIA L4", gpu_id="GPU-7")
    message = bridge.Register(protocol_version=bridge.MUSTER_V1, models=["m"], gpus=[gpu])
    said = Registered(message=message, name="rig", protocol=bridge.MUSTER_V1, models=("m",), warnings=(), max_concurrent=1)
    (opened,) = open_sessions([SessionRequest(credential.pk, "10.0.0.1", said)], gateway_id=gateway)
    follow_gpus()
    assert Gpu.objects.get().own_id == "GPU-7"
    hear(after_s=-60.0)
    Gpu.objects.update(last_seen_at=F("last_seen_at") - timedelta(seconds=60))
    report = PresenceReport(
        node_id=opened.node_id, epoch=opened.epoch, age_s=0.0, active=2, models=("m",), status="busy", last_error="",  # type: ignore[union-attr]
        endpoints={}, link_id=opened.link_id,  # type: ignore[union-attr]
        said=bridge.Telemetry(gpus=[bridge.GpuInfo(index=0, name="NVIDIA L4", gpu_id="GPU-7", utilization_percent=80.0)]),
    )  # fmt: skip
    write_presences([report], gateway_id=gateway)
    assert follow_gpus().written == 1
    found = Gpu.objects.get()
    assert (found.load_percent, found.active_requests, found.vendor) == (80.0, 2, "nvidia")


def test_an_agent_of_the_document_has_its_gpus_from_registration_and_heartbeats() -> None:
    gpu = agent.AgentGpu(
        gpu_id="gpu-0", vendor="nvidia", model="RTX 4090", vram_mb=24_576, compute_capability="8.9", driver_version="535",
        cuda_version="12.2",
    )  # fmt: skip
    said = agent.AgentRegister(agent_id=str(uuid.uuid4()), gpus=[gpu])
    said.capacity = agent.Capacity(max_concurrent_requests=2, max_context_tokens=16_384)
    session = register_agent(credential=make_credential()[0], said=said, peer_address="10.0.0.2", endpoint=("", ""))
    follow_gpus()
    found = Gpu.objects.get()
    assert (found.own_id, found.vendor, found.model, found.vram_mb) == ("gpu-0", "nvidia", "nvidia RTX 4090", 24_576)
    assert (found.compute_capability, found.driver_version, found.runtime_version) == ("8.9", "535", "12.2")
    assert (found.max_batch, found.max_context_tokens) == (2, 16_384)
    state = agent.GpuState(gpu_id="gpu-0", load_percent=45, vram_used_mb=8_200, temperature_c=68, active_requests=1)
    record_agent_heartbeats([AgentReport(session.session_id, agent.AgentHeartbeat(gpu_states=[state]))])
    hear()
    follow_gpus()
    found.refresh_from_db()
    assert (found.load_percent, found.vram_free_mb, found.temperature_c, found.active_requests) == (45.0, 16_376, 68.0, 1)
    assert found.compute_capability == "8.9", "a heartbeat says nothing of it"


def test_a_node_of_the_contract_has_the_one_gpu_that_it_registered() -> None:
    credential, _ = make_credential()
    node = make_node(credential=credential, gpu_name="RTX Pro 6000", vram_total_mb=98_304)
    beat = Heartbeat(
        node_id=node.pk, status=NodeStatus.AVAILABLE, is_accepting_jobs=True, gpu_util_percent=22.0, vram_used_mb=24_576
    )
    record_heartbeat(credential=credential, heartbeat=beat)
    follow_gpus()
    found = Gpu.objects.get()
    assert (found.model, found.vram_mb, found.vram_used_mb, found.load_percent) == ("RTX Pro 6000", 98_304, 24_576, 22.0)


def test_a_node_whose_capabilities_are_polled_has_the_gpus_that_it_lists() -> None:
    node = make_node(reach="direct", public_base_url="http://10.0.0.3/v1")
    presence = make_presence(node, age_s=None)
    gpus = [{"index": 0, "name": "NVIDIA L4", "memoryTotalMB": 23034, "utilization": 0.5}, {"index": 1}]
    body = json.dumps({"models": {}, "resources": {"gpus": gpus}}).encode()
    store_capabilities(node, presence, read_capabilities(body, policy=limits().nodes, gpu_name="AMD MI300"))
    follow_gpus()
    assert list(Gpu.objects.values_list("own_id", "model", "vendor", "load_percent")) == [
        ("0", "NVIDIA L4", "nvidia", 50.0),
        ("1", "AMD MI300", "amd", None),
    ]


# What administrators and operators see


def test_the_api_lists_gpus_with_the_status_of_their_node() -> None:
    node = make_gpus(GPU, {**GPU, "index": 1}, queue_depth=4)
    Node.objects.update(model_names=["tiny"])
    hear(gpus=[GPU], after_s=11.0)
    follow_gpus()
    NodePresence.objects.update(last_heartbeat_at=F("last_heartbeat_at") - timedelta(seconds=11))
    status, answer = ask("/api/v1/gpus")
    (shown,) = answer["gpus"]
    assert (status, answer["next"]) == (200, None)
    found = {name: shown[name] for name in ("node_id", "node_name", "own_id", "vram_mb", "vram_free_mb", "models", "status")}
    assert found == {
        "node_id": node.printed_id, "node_name": "box", "own_id": "0", "vram_mb": 23_034, "vram_free_mb": 22_034,
        "models": ["tiny"], "status": "available",
    }  # fmt: skip
    assert (shown["queue_depth"], shown["gone_at"]) == (4, None)
    everything = ask("/api/v1/gpus", gone="true")[1]["gpus"]
    assert len(everything) == 2
    for gpu in everything:
        status, one = ask(f"/api/v1/gpus/{gpu['gpu_id']}")
        assert (status, one["own_id"]) == (200, gpu["own_id"])
    Provider.objects.update(state="deleted")
    assert ask("/api/v1/gpus", gone="true")[1]["gpus"] == []


def test_the_api_pages_through_gpus_and_filters_by_node() -> None:
    for name in ("a", "b"):
        make_gpus(*({**GPU, "index": index} for index in range(3)), name=name)
    seen: list[str] = []
    after: dict[str, str] = {}
    while True:
        _, answer = ask("/api/v1/gpus", limit="4", **after)
        seen += [gpu["gpu_id"] for gpu in answer["gpus"]]
        if answer["next"] is None:
            break
        after = {"after": answer["next"]}
    assert (len(seen), len(set(seen))) == (6, 6)
    _, answer = ask("/api/v1/gpus", node_id=Node.objects.get(name="b").printed_id)
    assert {gpu["node_name"] for gpu in answer["gpus"]} == {"b"}


@pytest.mark.parametrize(
    ("path", "query", "status", "param"),
    [
        ("", {"limit": "0"}, 400, "limit"),
        ("", {"limit": "1001"}, 400, "limit"),
        ("", {"limit": "-1"}, 400, "limit"),
        ("", {"after": "gpu_x"}, 400, "after"),
        ("", {"gone": "maybe"}, 400, "gone"),
        ("", {"node_id": "box"}, 404, "node_id"),
        ("/gpu_x", {}, 400, "gpu_id"),
        ("/gpu_" + "0" * 32, {}, 404, "gpu_id"),
    ],
)
def test_the_api_names_what_it_cannot_use(path: str, query: dict[str, str], status: int, param: str) -> None:
    answer = ask(f"/api/v1/gpus{path}", **query)
    assert (answer[0], answer[1]["error"]["param"]) == (status, param)


def test_only_administrators_may_list_gpus() -> None:
    assert Client().get("/api/v1/gpus").status_code == 401


def test_pages_show_gpus_and_the_page_of_a_node_leads_to_them() -> None:
    client = Client()
    client.force_login(get_user_model().objects.create_user("ada", is_staff=True, is_superuser=True))
    node = make_gpus({**GPU, "utilization_percent": 40.0, "temperature_c": 61.0, "compute_capability": "8.9"})
    gpu = Gpu.objects.get()
    url = reverse("admin:nodes_gpu_change", args=[gpu.pk])
    assert url in client.get(reverse("admin:nodes_node_change", args=[node.pk])).content.decode()
    listed = client.get(reverse("admin:nodes_gpu_changelist")).content.decode()
    for text in ("0 · NVIDIA L4", "1000 MiB of 22.5 GiB", "61 °C", "40 %", "ready"):
        assert text in listed, text
    shown = client.get(url).content.decode()
    for text in (gpu.printed_id, "NVIDIA L4", "8.9", "1000 MiB of 22.5 GiB", "GPU utilisation"):
        assert text in shown, text
    assert client.post(url).status_code == 403
    counts = []
    for number in range(3):
        with CaptureQueriesContext(connection) as queries:
            assert "NVIDIA L4" in client.get(reverse("admin:nodes_gpu_changelist")).content.decode()
        counts.append(len(queries))
        make_gpus(*({**GPU, "index": index} for index in range(8)), name=f"box-{number}")
    assert counts[1] == counts[2], "a list of GPUs takes as many queries whatever it holds"
