"""History of GPUs: a sample for each step, summed up once, deleted by age, and its charts."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from core.charts import RANGES
from governance.admin_tokens import create_admin_token
from nodes.models import Gpu, GpuMinute, GpuSample, GpuTenMinutes, SweepMark, read_clock
from nodes.services.charts import chart_gpus
from nodes.services.gpus import follow_gpus
from nodes.services.history import FLEET, Span, read_fleet_history, read_history, read_memory, roll_up_history, sample_gpus
from tests.fakes.nodes import ACTOR, make_credential, make_node, make_presence

pytestmark = pytest.mark.django_db


@pytest.fixture
def gpu() -> Gpu:
    named = {"index": 0, "name": "NVIDIA L4", "memory_total_mb": 1_000, "memory_used_mb": 250, "utilization_percent": 40.0}
    make_presence(make_node(), gpus=[named])
    follow_gpus()
    return Gpu.objects.get()


def add_samples(gpu_id: uuid.UUID, begins_at: datetime, count: int, **values: Any) -> None:
    GpuSample.objects.bulk_create(
        GpuSample(gpu_id=gpu_id, at=begins_at + timedelta(seconds=10 * number), load_percent=float(number), **values)
        for number in range(count)
    )


def on_the(minutes: int, moment: datetime) -> datetime:
    return moment.replace(minute=moment.minute - moment.minute % minutes, second=0, microsecond=0)


def test_a_gpu_that_is_heard_has_one_sample_for_each_step(gpu: Gpu) -> None:
    assert [sample_gpus(), sample_gpus()] == [1, 0]
    sample = GpuSample.objects.exclude(gpu_id=FLEET).get()
    assert (sample.gpu_id, sample.load_percent, sample.vram_used_mb, sample.at.second % 10) == (gpu.pk, 40.0, 250.0, 0)
    SweepMark.objects.update(until=F("until") - timedelta(seconds=10))
    GpuSample.objects.all().delete()
    assert sample_gpus() == 1


def test_what_weights_and_caches_take_is_sampled_for_the_gpu_that_they_are_on() -> None:
    named = [{"index": number, "name": "NVIDIA L4", "memory_total_mb": 1_000} for number in (0, 1)]
    models = [
        {"model": "a", "state": "loaded", "weights_mb": 200, "kv_mb": 50, "gpus": [0]},
        {"model": "b", "state": "loaded", "weights_mb": 100, "gpus": [0, 1]},
        {"model": "c", "state": "loaded", "weights_mb": 900, "kv_mb": 9, "device": "cpu"},
        {"model": "d", "state": "loaded", "weights_mb": "many", "gpus": [1]},
    ]
    make_presence(make_node(), gpus=named, replicas=models)
    alone = make_node("alone", credential=make_credential("alone")[0])
    make_presence(alone, gpus=named[:1], replicas=[{"model": "a", "state": "loaded", "weights_mb": 7, "kv_mb": 1}])
    make_presence(make_node("odd", credential=make_credential("odd")[0]), gpus=named[:1], replicas={"odd": 1})
    follow_gpus()
    assert sample_gpus() == 4
    held = {one.gpu_id: (one.weights_mb, one.kv_mb) for one in GpuSample.objects.all()}
    assert [held[gpu.pk] for gpu in Gpu.objects.order_by("node__name", "index")] == [
        (7.0, 1.0), (250.0, 50.0), (50.0, None), (None, None),
    ]  # fmt: skip


@pytest.mark.parametrize("silent", [{"gone_at": F("last_seen_at")}, {"last_seen_at": F("last_seen_at") - timedelta(minutes=1)}])
def test_a_gpu_that_is_gone_or_not_heard_has_none(gpu: Gpu, silent: dict[str, Any]) -> None:
    Gpu.objects.update(**silent)
    assert sample_gpus() == 0


def test_a_thousand_gpus_are_sampled_by_one_statement(gpu: Gpu) -> None:
    seen = {"first_seen_at": gpu.first_seen_at, "last_seen_at": gpu.last_seen_at}
    Gpu.objects.bulk_create(Gpu(id=uuid.uuid4(), node=gpu.node, own_id=f"g{n}", index=1, **seen) for n in range(999))
    with CaptureQueriesContext(connection) as queries:
        assert sample_gpus() == 1_000
    assert len(queries) == 1


def test_the_fleet_has_a_sample_of_all_its_gpus_which_becomes_means_as_theirs_do(gpu: Gpu) -> None:
    heard = {"first_seen_at": gpu.first_seen_at, "last_seen_at": gpu.last_seen_at, "load_percent": 60.0, "vram_used_mb": 150}
    Gpu.objects.create(id=uuid.uuid4(), node=gpu.node, own_id="second", index=1, vram_mb=1_000, **heard)
    Gpu.objects.create(id=uuid.uuid4(), node=gpu.node, own_id="gone", index=2, **{**heard, "gone_at": gpu.last_seen_at})
    assert sample_gpus() == 2
    fleet = GpuSample.objects.get(gpu_id=FLEET)
    assert (fleet.load_percent, fleet.vram_used_mb, fleet.temperature_c) == (50.0, 400.0, None)
    assert read_memory() == (400, 2_000)
    begins_at = on_the(1, read_clock()) - timedelta(minutes=9)
    add_samples(FLEET, begins_at, 12, vram_used_mb=600)
    add_samples(FLEET, begins_at - timedelta(minutes=10), 6, vram_used_mb=200)
    history = read_fleet_history(begins_at, step=timedelta(minutes=1), points=10)
    assert (history.used_mb[:3], history.used_before) == ((600.0, 600.0, None), 200.0)


def test_samples_become_means_of_minutes_and_of_ten_once(gpu: Gpu) -> None:
    begins_at = on_the(10, read_clock()) - timedelta(minutes=10)
    add_samples(gpu.pk, begins_at, 60, vram_used_mb=100)
    roll_up_history()
    minutes = list(GpuMinute.objects.order_by("at"))
    assert [(one.at, one.load_percent) for one in minutes[:2]] == [(begins_at, 2.5), (begins_at + timedelta(minutes=1), 8.5)]
    assert (len(minutes), minutes[0].temperature_c) == (10, None)
    ten = GpuTenMinutes.objects.get()
    assert (ten.at, ten.load_percent, ten.vram_used_mb) == (begins_at, 29.5, 100.0)
    add_samples(uuid.uuid4(), begins_at, 6)
    roll_up_history()
    assert (GpuMinute.objects.count(), GpuTenMinutes.objects.count()) == (10, 1), "what was summed up is not looked at again"


def test_a_minute_that_is_not_over_waits(gpu: Gpu) -> None:
    begins_at = on_the(1, read_clock())
    add_samples(gpu.pk, begins_at, 1)
    roll_up_history()
    is_over = on_the(1, read_clock()) > begins_at
    assert GpuMinute.objects.count() == int(is_over)


def test_what_is_too_old_is_deleted_from_each_level(gpu: Gpu) -> None:
    now = read_clock()
    for model, kept in ((GpuSample, timedelta(hours=2)), (GpuMinute, timedelta(days=2)), (GpuTenMinutes, timedelta(days=30))):
        for age in (kept - timedelta(minutes=1), kept + timedelta(minutes=1)):
            model._default_manager.create(gpu_id=gpu.pk, at=now - age, load_percent=1.0)
    SweepMark.objects.bulk_create(SweepMark(name=name[:20], until=now) for name in ("nodes_gpuminute", "nodes_gputenminutes"))
    assert roll_up_history() == 3
    for span in Span:
        assert len(read_history(gpu.pk, span).moments) == 1


def make_gpus(gpu: Gpu, count: int) -> list[Gpu]:
    seen = {"first_seen_at": gpu.first_seen_at, "last_seen_at": gpu.last_seen_at, "vram_mb": 1_000}
    return Gpu.objects.bulk_create(Gpu(id=uuid.uuid4(), node=gpu.node, own_id=f"g{n}", index=n, **seen) for n in range(count))


def test_charts_have_a_gap_where_nothing_was_reported_and_split_memory_so_that_it_adds_up(gpu: Gpu) -> None:
    now = read_clock()
    begins_at = now.replace(microsecond=0) - timedelta(seconds=now.second % 10 + 100)
    add_samples(gpu.pk, begins_at, 3, vram_used_mb=250, weights_mb=200, kv_mb=100, power_w=70)
    with CaptureQueriesContext(connection) as queries:
        load, memory, heat, power = chart_gpus([gpu], "15min", now=now)
    assert len(queries) == 1
    assert (len(load.starts), load.step_s, load.lines[0].label) == (90, 10, "GPU 0")
    assert [value for value in load.lines[0].values if value is not None] == [0.0, 1.0, 2.0]
    assert load.lines[0].values[-12:-6] == [None, 0.0, 1.0, 2.0, None, None]
    assert (heat.is_empty, max(value or 0 for value in power.lines[0].values)) == (True, 70)
    at = load.lines[0].values.index(0.0)
    parts = {line.label: line.values[at] for line in memory.lines}
    assert parts == {"weights": 200.0, "KV cache": 50.0, "other": 0.0, "free": 750.0}, "estimates never exceed what is used"
    assert memory.is_stacked


def test_charts_of_many_gpus_show_their_mean_and_the_highest_and_add_up_their_memory(gpu: Gpu) -> None:
    now = read_clock()
    many = make_gpus(gpu, 9)
    for number, one in enumerate(many):
        GpuTenMinutes.objects.create(gpu_id=one.pk, at=now - timedelta(days=2), load_percent=10.0 * number, vram_used_mb=100)
    load, memory, *_rest = chart_gpus(many, "30d", now=now)
    assert [(line.label, max(value or 0 for value in line.values)) for line in load.lines] == [
        ("mean of 9 GPUs", 40.0), ("highest", 80.0),
    ]  # fmt: skip
    assert [max(value or 0 for value in line.values) for line in memory.lines] == [0, 0, 900.0, 8_100.0]
    assert chart_gpus([], "1h", now=now)[0].is_empty


@pytest.mark.parametrize("name", RANGES)
def test_every_range_has_about_a_hundred_steps(gpu: Gpu, name: str) -> None:
    charts = chart_gpus([gpu], name, now=read_clock())
    assert {len(chart.starts) in range(90, 181) for chart in charts} == {True}
    assert all(len(line.values) == len(chart.starts) for chart in charts for line in chart.lines)


def test_the_page_and_the_api_show_the_history(gpu: Gpu) -> None:
    client = Client()
    client.force_login(get_user_model().objects.create_user("ada", is_staff=True, is_superuser=True))
    url = reverse("admin:nodes_gpu_change", args=[gpu.pk])
    assert "GPU memory: nothing in this time." in client.get(url).content.decode()
    sample_gpus()
    shown = client.get(url, {"range": "15min"}).content.decode()
    assert "GPU 0: between 40" in shown
    _, token = create_admin_token(name="ops", actor=ACTOR)
    headers = {"authorization": f"Bearer {token}"}
    path = f"/api/v1/gpus/{gpu.printed_id}/history"
    answer = Client().get(path, headers=headers).json()
    assert (answer["step_s"], [one["load_percent"] for one in answer["moments"]]) == (10.0, [40.0])
    assert Client().get(path, {"span": "30d"}, headers=headers).json() == {"step_s": 600.0, "moments": []}
    refused = Client().get(path, {"span": "1y"}, headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "span")
