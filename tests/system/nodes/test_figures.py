"""Figures of nodes: counted once from request records whatever a node says, weighed by age, read by routing; and uptime."""

from __future__ import annotations

import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from core.limits import limits
from gateway.services.figures import update_figures
from governance.admin_tokens import create_admin_token
from nodes.models import Gpu, GpuFigures, Node, NodeFigures, NodeOnline, NodePresence, SweepMark, read_clock
from nodes.services.figures import (
    add_to_sketch,
    follow_uptime,
    publish_figures,
    read_figures,
    read_gpu_figures,
    read_quantile,
    read_uptimes,
)
from nodes.services.gpus import follow_gpus, list_gpus
from nodes.services.sessions import load_node_rows
from nodes.states import Figures
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, make_node, make_presence, make_record
from wire.bridge import BRIDGE_V1
from wire.contract import ErrorCode, RequestState

pytestmark = pytest.mark.django_db
FAILED: dict[str, Any] = {
    "state": RequestState.FAILED,
    "status_code": 502,
    "error_code": ErrorCode.FORWARDED_REQUEST_FAILED.value,
}


@pytest.fixture(autouse=True)
def _no_lag() -> None:
    set_limits(nodes={"figures_lag_s": 0.0})


def end_requests(node: Node | None, count: int = 1, *, ago_s: float = 1.0, **changes: Any) -> None:
    """Let requests end on a node; each took 1.1 s, 0.1 s of it in the queue."""
    ended = read_clock() - timedelta(seconds=ago_s)
    fields = {"latency_ms": 1_100, "queue_ms": 100, "status_code": 200, "finished_at": ended, "node_id": node and node.pk}
    for _ in range(count):
        make_record(age_s=ago_s + 1.1, **{**fields, **changes})


def figures_of(node: Node, model: str = "tiny") -> Figures:
    return next(one.figures for one in read_figures([node.pk], now=read_clock())[node.pk] if one.model == model)


def test_the_figures_of_a_gpu_are_its_own_where_the_node_says_that_it_alone_answers() -> None:
    node = make_node(model_names=["own", "wide", "both", "mute", "host"])
    cards = [{"index": index, "name": "NVIDIA L4", "memory_total_mb": 24_000} for index in range(2)]
    places: dict[str, list[dict[str, Any]]] = {
        "own": [{"gpus": [0]}, {"gpus": [0]}], "wide": [{"gpus": [0, 1]}], "both": [{"gpus": [0]}, {"gpus": [1]}],
        "mute": [{"gpus": [0]}, {}], "host": [{"device": "cpu"}],
    }  # fmt: skip
    replicas = [{"model": model, "state": "loaded", **one} for model, each in places.items() for one in each]
    make_presence(node, gpus=cards, replicas=replicas)
    follow_gpus()
    for model in places:
        end_requests(node, 3, model=model)
    end_requests(node, model="own", **FAILED)
    end_requests(node, model="gone")
    assert update_figures() == 17
    first, second = Gpu.objects.order_by("index").select_related("node__presence")
    told = {
        gpu.index: {one.model: (one.is_of_gpu, round(one.requests)) for one in each}
        for gpu, each in ((gpu, read_gpu_figures([gpu], now=read_clock())[gpu.pk]) for gpu in (first, second))
    }
    shared = {"wide": (False, 3), "both": (False, 3), "mute": (False, 3), "gone": (False, 1)}
    assert told == {0: {"own": (True, 4), **shared}, 1: shared}
    own = next(one for one in read_gpu_figures([first], now=read_clock())[first.pk] if one.model == "own")
    assert own.figures.reliability == pytest.approx(4 / 6, abs=0.001)
    NodePresence.objects.update(replicas=[{"model": "own", "state": "loaded", "gpus": [1]}])
    end_requests(node, 2, model="own", ago_s=0.0)
    update_figures()
    counts = {(row.gpu_id, row.model): round(row.ok + row.failed) for row in GpuFigures.objects.all()}
    assert counts == {(first.pk, "own"): 4, (second.pk, "own"): 2}, "what it did elsewhere stays there"


def test_what_a_node_with_one_gpu_does_is_that_gpus() -> None:
    node = make_node(model_names=["tiny", "host"])
    replicas = [{"model": "tiny", "state": "loaded"}, {"model": "host", "state": "loaded", "device": "cpu"}]
    make_presence(node, gpus=[{"index": 0, "name": "NVIDIA L4"}], replicas=replicas)
    follow_gpus()
    for model in ("tiny", "host"):
        end_requests(node, 2, model=model)
    update_figures()
    gpu = Gpu.objects.select_related("node__presence").get()
    assert [(one.model, one.is_of_gpu) for one in read_gpu_figures([gpu], now=read_clock())[gpu.pk]] == [("tiny", True)]
    assert not GpuFigures.objects.exists(), "it is written once"


# Sketches


@pytest.mark.parametrize("seed", range(5))
def test_a_sketch_tells_quantiles_within_five_percent_and_does_not_grow(seed: int) -> None:
    source = random.Random(seed)
    sketch: dict[str, float] = {}
    values = sorted(source.lognormvariate(6, 2) for _ in range(5_000))
    for value in values:
        add_to_sketch(sketch, value, 1.0)
    for share in (0.05, 0.5, 0.95):
        told = read_quantile(sketch, share)
        assert told == pytest.approx(values[round(share * len(values)) - 1], rel=0.05)
    for value in (0.0, -5.0, 1e300, *(10**power for power in range(-9, 30))):
        add_to_sketch(sketch, value, 1.0)
    assert len(sketch) <= limits().nodes.figures_buckets + 1


def test_an_empty_sketch_tells_nothing() -> None:
    assert read_quantile({}, 0.5) is None
    assert read_quantile({"3": 0.5}, 0.5) is None, "half a request is too little"


# Counting


def test_reliability_and_times_follow_from_records() -> None:
    node = make_node()
    end_requests(node, 8)
    end_requests(node, 2, **FAILED)
    assert update_figures() == 10
    found = figures_of(node)
    assert found.reliability == pytest.approx((8 + 1) / (10 + 2), abs=0.001)
    assert found.latency_ms == pytest.approx(1_000, rel=0.06), "the queue is not the node's"
    assert (found.ttft_ms, found.tokens_per_s) == (None, None)


def test_streams_tell_the_first_token_and_the_rate_from_then_on() -> None:
    node = make_node()
    end_requests(node, 3, is_streaming=True, ttfb_ms=300, completion_tokens=80, bytes_out=9_000)
    update_figures()
    found = figures_of(node)
    assert found.ttft_ms == pytest.approx(200, rel=0.06)
    assert found.tokens_per_s == pytest.approx(100, rel=0.06)


def test_a_node_that_counts_more_tokens_than_it_sent_bytes_is_not_believed() -> None:
    node = make_node()
    end_requests(node, 2, completion_tokens=10**9, bytes_out=500)
    end_requests(node, 2, model="guessed", completion_tokens=100, bytes_out=500, tokens_estimated=True)
    update_figures()
    assert figures_of(node).tokens_per_s == pytest.approx(500, rel=0.06)
    assert figures_of(node, "guessed").tokens_per_s is None


def test_a_node_that_lies_about_its_gpu_is_exposed_by_its_figures() -> None:
    honest, liar = make_node("honest", model_names=["tiny"]), make_node("liar", model_names=["tiny"], max_concurrent=64)
    card = {"index": 0, "memory_total_mb": 81_920, "utilization_percent": 0.0, "active_requests": 0}
    make_presence(honest, gpus=[{**card, "name": "NVIDIA T4", "memory_total_mb": 16_384, "utilization_percent": 80.0}])
    make_presence(liar, gpus=[{**card, "name": "NVIDIA H200"}], active_requests=0)
    follow_gpus()
    end_requests(honest, 9)
    end_requests(liar, 5, latency_ms=8_100)
    end_requests(liar, 4, **FAILED)
    update_figures()
    told = {gpu.node.name: read_gpu_figures([gpu], now=read_clock())[gpu.pk][0] for gpu in list_gpus()}
    assert told["liar"].is_of_gpu
    assert told["liar"].figures.reliability < 0.6 < told["honest"].figures.reliability
    assert (told["liar"].figures.latency_ms or 0) > 7 * (told["honest"].figures.latency_ms or 1)
    routed = {row.name: row.figures["tiny"] for row in load_node_rows()}
    assert routed["liar"].latency_ms == told["liar"].figures.latency_ms, "and routing goes by them"


def test_each_request_counts_once_however_often_they_are_counted_and_in_whatever_batches() -> None:
    set_limits(nodes={"figures_batch": 3})
    node = make_node()
    ended = read_clock() - timedelta(seconds=1)
    end_requests(node, 7, finished_at=ended)
    assert [update_figures(), update_figures()] == [7, 0]
    end_requests(node, 1, ago_s=0.0)
    assert [update_figures(), update_figures()] == [1, 0]
    assert NodeFigures.objects.get().ok == pytest.approx(8, abs=0.01)


def test_what_a_node_is_not_to_blame_for_is_no_failure() -> None:
    node = make_node()
    end_requests(node)
    end_requests(node, 2, state=RequestState.CANCELLED, status_code=499)
    end_requests(node, 2, state=RequestState.REJECTED, status_code=400)
    end_requests(node, 2, state=RequestState.INTERRUPTED, status_code=None)  # its gateway died
    end_requests(node, 2, state=RequestState.FAILED, status_code=500, error_code=ErrorCode.INTERNAL_ERROR.value)
    end_requests(None, 2, **FAILED)
    assert update_figures() == 1
    row = NodeFigures.objects.get()
    assert (round(row.ok, 2), row.failed) == (1.0, 0.0)
    end_requests(
        node, 2, ago_s=0.0, state=RequestState.INTERRUPTED, status_code=503, error_code=ErrorCode.REQUEST_INTERRUPTED.value
    )
    update_figures()
    assert round(NodeFigures.objects.get().failed, 2) == 2.0


def test_a_node_that_failed_before_another_one_answered_is_not_forgotten() -> None:
    flaky, good = make_node("flaky"), make_node("good")
    end_requests(good, 3, lost_attempts=f"{flaky.pk.hex} tiny\n{flaky.pk.hex} a model, with spaces\t120\tlost\n")
    end_requests(flaky, 1, state=RequestState.CANCELLED, status_code=499, lost_attempts=f"{flaky.pk.hex} tiny\n")
    assert update_figures() == 4
    assert figures_of(flaky).reliability == pytest.approx(1 / 6, abs=0.001)
    assert figures_of(flaky, "a model, with spaces").reliability == pytest.approx(1 / 5, abs=0.001)
    assert figures_of(good).reliability == pytest.approx(4 / 5, abs=0.001)


def test_records_of_nodes_that_are_no_more_are_passed_over() -> None:
    make_record(node_id=uuid.uuid4(), finished_at=read_clock(), status_code=200)
    assert update_figures() == 1
    assert not NodeFigures.objects.exists()


def test_an_hour_takes_one_percent_of_what_a_request_weighs() -> None:
    node = make_node()
    end_requests(node, ago_s=7_200)
    end_requests(node, ago_s=0)
    update_figures()
    row = NodeFigures.objects.get()
    assert row.ok == pytest.approx(1 + 0.99**2, abs=0.001)
    assert sum(row.latency.values()) == pytest.approx(row.ok)
    NodeFigures.objects.update(counted_at=F("counted_at") - timedelta(hours=100))
    assert read_figures([node.pk], now=read_clock())[node.pk][0].requests == pytest.approx(row.ok * 0.99**100, abs=0.01)
    end_requests(node, ago_s=0)
    update_figures()
    assert NodeFigures.objects.get().ok == pytest.approx(row.ok * 0.99**100 + 1, abs=0.001)
    NodeFigures.objects.update(counted_at=F("counted_at") - timedelta(hours=2_000))
    update_figures()
    assert not NodeFigures.objects.exists(), "nothing is left of it"


def test_a_request_as_long_as_the_time_out_allows_is_counted() -> None:
    set_limits(gateway={"request_s": 3_600.0})
    node = make_node()
    assert update_figures() == 0
    end_requests(node, ago_s=0.0, created_at=read_clock() - timedelta(seconds=3_000))
    assert update_figures() == 1


@pytest.mark.django_db(transaction=True)
def test_workers_that_count_at_the_same_time_count_each_request_once() -> None:
    set_limits(nodes={"figures_batch": 5})
    node, start = make_node(model_names=["tiny"]), Barrier(3)
    end_requests(node, 40, ago_s=0.0)

    def count() -> int:
        try:
            start.wait()
            return update_figures()
        finally:
            connection.close()

    with ThreadPoolExecutor(3) as pool:
        counted = sum(future.result() for future in [pool.submit(count) for _ in range(3)])
    counted += update_figures()  # whoever found another one at it left the rest
    assert counted == 40
    assert NodeFigures.objects.get().ok == pytest.approx(40, abs=0.01)


def test_a_mark_in_the_future_counts_nothing_and_stays() -> None:
    end_requests(make_node())
    later = read_clock() + timedelta(hours=1)
    SweepMark.objects.create(name="requests", until=later, last_id=uuid.UUID(int=0))
    assert update_figures() == 0
    assert SweepMark.objects.get().until == later


def test_a_batch_costs_the_same_statements_for_one_node_as_for_many() -> None:
    counts = []
    for count in (1, 20):
        for number in range(count):
            end_requests(make_node(f"n{count}-{number}", model_names=["tiny"]), ago_s=0.0)
        with CaptureQueriesContext(connection) as queries:
            assert update_figures() == count
        counts.append(len([one for one in queries if "SAVEPOINT" not in one["sql"]]))
    first, second = counts
    assert second <= first <= 22, "the first one makes the mark, too"


# What routing reads


def test_routing_reads_own_figures_and_for_a_new_node_the_median_of_the_fleet() -> None:
    fast, slow, new, other = (make_node(name, model_names=["tiny"]) for name in ("fast", "slow", "new", "other"))
    Node.objects.filter(pk=other.pk).update(model_names=["unheard"])
    end_requests(fast, 30)
    end_requests(slow, 10, latency_ms=4_100)
    end_requests(slow, 20, **FAILED)
    update_figures()
    rows = {row.name: row.figures.get("tiny") for row in load_node_rows()}
    first, second, prior = rows["fast"], rows["slow"], rows["new"]
    assert first is not None
    assert second is not None
    assert prior is not None
    assert first.reliability > prior.reliability > second.reliability
    assert (first.latency_ms or 0) < (prior.latency_ms or 0) < (second.latency_ms or 0)
    assert rows["other"] is None
    assert publish_figures() == 0, "nothing changed since"
    end_requests(new, 2, ago_s=0.0, **FAILED)
    update_figures()
    spoiled = next(row.figures["tiny"] for row in load_node_rows() if row.name == "new")
    assert spoiled.reliability < prior.reliability
    assert spoiled.latency_ms == pytest.approx(prior.latency_ms, rel=0.3), "no request of it ended well yet"


def test_a_model_that_left_a_node_leaves_what_routing_reads() -> None:
    node = make_node(model_names=["tiny"])
    end_requests(node)
    update_figures()
    assert set(load_node_rows()[0].figures) == {"tiny"}
    Node.objects.update(model_names=[])
    assert publish_figures() == 1
    assert load_node_rows()[0].figures == {}


# Uptime


def hear(**ago: float) -> None:
    """Let nodes have been heard so many seconds ago, by name."""
    for name, ago_s in ago.items():
        NodePresence.objects.filter(node__name=name).update(last_heartbeat_at=read_clock() - timedelta(seconds=ago_s))


def grow_older(seconds: float) -> None:
    age = timedelta(seconds=seconds)
    NodeOnline.objects.update(began_at=F("began_at") - age, ended_at=F("ended_at") - age)
    SweepMark.objects.update(until=F("until") - age)


def test_uptime_is_the_share_of_a_day_in_which_a_node_was_heard() -> None:
    node = make_node()
    Node.objects.update(created_at=read_clock() - timedelta(days=9))
    make_presence(node)
    assert follow_uptime() == 1
    NodeOnline.objects.update(began_at=read_clock() - timedelta(hours=12))
    assert read_uptimes([node.pk])[node.pk] == pytest.approx(0.5, abs=0.001)
    NodeOnline.objects.update(began_at=read_clock() - timedelta(hours=40))
    assert read_uptimes([node.pk])[node.pk] == pytest.approx(1.0, abs=0.001)
    Node.objects.update(created_at=read_clock() - timedelta(hours=2))
    NodeOnline.objects.update(began_at=read_clock() - timedelta(hours=1))
    assert read_uptimes([node.pk])[node.pk] == pytest.approx(0.5, abs=0.001), "it is only two hours old"


def test_silence_ends_a_time_online_by_the_window_of_the_protocol() -> None:
    for name, protocol in (("plain", ""), ("patient", BRIDGE_V1)):
        make_presence(make_node(name), protocol=protocol, age_s=0.0)
    assert follow_uptime() == 2
    grow_older(30)
    SweepMark.objects.update(until=read_clock())
    hear(plain=0, patient=0)
    assert follow_uptime() == 1
    assert NodeOnline.objects.filter(node__name="plain").count() == 2
    assert NodeOnline.objects.filter(node__name="patient").count() == 1


def test_a_sweep_that_stood_still_takes_no_uptime_from_nodes() -> None:
    make_presence(make_node(), age_s=0.0)
    follow_uptime()
    grow_older(600)
    hear(box=0)
    assert follow_uptime() == 0
    assert NodeOnline.objects.count() == 1


def test_times_online_of_the_day_before_are_forgotten() -> None:
    make_presence(make_node(), age_s=0.0)
    follow_uptime()
    grow_older(25 * 3_600)
    hear(box=26 * 3_600)
    follow_uptime()
    assert not NodeOnline.objects.exists()


def test_uptime_costs_few_statements_for_a_thousand_nodes() -> None:
    first = make_node("first")
    nodes = Node.objects.bulk_create(
        Node(name=f"n{number}", credential=first.credential, provider=first.provider) for number in range(1_000)
    )
    NodePresence.objects.bulk_create(NodePresence(node=node, last_heartbeat_at=read_clock()) for node in nodes)
    with CaptureQueriesContext(connection) as queries:
        assert follow_uptime() == 1_000
    assert len([one for one in queries if "SAVEPOINT" not in one["sql"]]) <= 6
    assert follow_uptime() == 0


# Pages and the API


def test_the_page_and_the_api_of_a_gpu_show_its_figures_and_its_uptime() -> None:
    node = make_node()
    make_presence(node, gpus=[{"index": 0, "name": "NVIDIA L4"}])
    follow_gpus()
    client = Client()
    client.force_login(get_user_model().objects.create_user("ada", is_staff=True, is_superuser=True))
    url = reverse("admin:nodes_gpu_change", args=[Gpu.objects.get().pk])
    assert "No request has ended on this node yet" in client.get(url).content.decode()
    end_requests(node, 8, is_streaming=True, ttfb_ms=300, completion_tokens=80, bytes_out=9_000)
    follow_uptime()
    update_figures()
    shown = client.get(url).content.decode()
    assert "0.900" in shown
    _, token = create_admin_token(name="ops", actor=ACTOR)
    (gpu,) = Client().get("/api/v1/gpus", headers={"authorization": f"Bearer {token}"}).json()["gpus"]
    (found,) = gpu["figures"]
    assert (found["model"], found["reliability"], found["requests"]) == ("tiny", 0.9, pytest.approx(8, abs=0.01))
    assert found["latency_p95_ms"] == pytest.approx(1_000, rel=0.06)
    assert 0.0 < gpu["uptime_24h"] <= 1.0
