"""Two Celery beats, of two control planes: each periodic task runs twice at the same moment and does what one does."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import redis
from django.conf import settings
from django.db import connection
from django.utils import timezone
from pytest_django import Settings

from controlplane.celery import app
from core.hints import UNREADABLE_TOTAL_KEY
from gateway.models import RequestRecord
from governance.models import AuditCheckpoint, AuditEvent
from nodes.models import GpuSample, NodeFigures, NodePresence
from nodes.services.gpus import follow_gpus
from tests.fakes.audit_logs import LOG_KEY
from tests.fakes.nodes import make_gateway, make_node, make_presence, make_record
from wire.contract import RequestState

pytestmark = pytest.mark.django_db(transaction=True)
TASKS = sorted(str(entry["task"]) for entry in settings.CELERY_BEAT_SCHEDULE.values())


def run_twice(name: str) -> None:
    """Run a task in two threads, as two workers do that took one message each. Raises what one of them raised."""
    task, start = app.tasks[name], threading.Barrier(2)

    def work() -> None:
        try:
            connection.ensure_connection()
            start.wait()
            task.run()
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as pool:
        for running in [pool.submit(work) for _ in range(2)]:
            running.result()


def test_two_beats_do_what_one_does(settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_KEY
    app.loader.import_default_modules()
    silent, heard = make_node("silent"), make_node("heard")
    make_presence(silent, age_s=600.0)
    make_presence(heard, gpus=[{"index": 0, "name": "a", "gpu_id": "g"}])
    orphan = make_record(state=RequestState.RUNNING, gateway_id=make_gateway(stopped=True).pk, age_s=60.0)
    now = timezone.now()
    for _ in range(5):
        make_record(node_id=heard.pk, finished_at=now - timedelta(seconds=30), latency_ms=5, status_code=200, age_s=40.0)
    follow_gpus()
    with redis.Redis.from_url(settings.REDIS_URL) as valkey:
        valkey.set(UNREADABLE_TOTAL_KEY, 3)
        try:
            for name in TASKS:
                run_twice(name)
        finally:
            valkey.delete(UNREADABLE_TOTAL_KEY)
    told = Counter(AuditEvent.objects.values_list("action", flat=True))
    assert (told["node.offline"], told["messages.set_aside"]) == (1, 1)
    assert not NodePresence.objects.get(node=silent).connected
    assert RequestRecord.objects.get(pk=orphan.pk).state == RequestState.INTERRUPTED.value
    assert AuditCheckpoint.objects.count() == 1
    assert GpuSample.objects.count() == 2, "of the GPU, and of the fleet"
    (figures,) = NodeFigures.objects.all()
    assert sum(figures.latency.values()) == pytest.approx(5.0, rel=0.01), "older ones weigh a little less"
