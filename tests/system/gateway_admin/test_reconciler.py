"""What a dead gateway left open is closed exactly once; nothing else is touched."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import connection, transaction
from django.db.models.functions import Now

from gateway.models import GatewayProcess, RequestRecord
from gateway.reconciler import close_orphaned_requests
from gateway.tasks import RECONCILE_LOCK, reconcile_requests
from tests.fakes.limits import set_limits
from tests.fakes.tenants import make_gateway, make_record
from wire.contract import FINAL_REQUEST_STATES, OPEN_REQUEST_STATES, RequestState
from wire.ids import new_uuid7

pytestmark = pytest.mark.django_db
DEAD_AFTER_S = 0.2
"""Short, because nobody counts as dead before the test's own database server has run for that long."""


@pytest.mark.parametrize("state", sorted(OPEN_REQUEST_STATES))
def test_open_requests_of_a_silent_gateway_are_interrupted(state: RequestState) -> None:
    record = make_record(gateway_id=make_gateway(silent_s=60).pk, state=state, age_s=30)
    assert close_orphaned_requests(dead_after_s=DEAD_AFTER_S, confirm_s=0.01) == 1
    record.refresh_from_db()
    assert (record.state, record.error_code) == ("interrupted", "REQUEST_INTERRUPTED")
    assert record.finished_at is not None
    assert record.latency_ms is not None
    assert 30_000 <= record.latency_ms < 60_000


def test_gateways_that_could_not_write_while_the_database_stood_still_are_not_taken_for_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive, dead = make_gateway(silent_s=60), make_gateway(silent_s=60)
    running, orphan = [make_record(gateway_id=one.pk, state=RequestState.RUNNING, age_s=60) for one in (alive, dead)]

    def write_heartbeat(_seconds: float) -> None:
        GatewayProcess.objects.filter(pk=alive.pk).update(heartbeat_at=Now() + timedelta(hours=1))

    monkeypatch.setattr("gateway.reconciler.clock", SimpleNamespace(sleep=write_heartbeat))  # not that of every thread
    assert close_orphaned_requests(dead_after_s=DEAD_AFTER_S) == 1
    running.refresh_from_db()
    orphan.refresh_from_db()
    assert (running.state, orphan.state) == ("running", "interrupted")


def test_nobody_is_dead_before_a_database_that_began_anew_has_run_for_as_long() -> None:
    record = make_record(gateway_id=make_gateway(silent_s=2e8).pk, state=RequestState.RUNNING, age_s=60)
    assert close_orphaned_requests(dead_after_s=1e8, confirm_s=0.01) == 0
    record.refresh_from_db()
    assert record.state == "running"


def test_an_unknown_gateway_gets_time_to_write_its_first_heartbeat() -> None:
    make_record(gateway_id=new_uuid7(), state=RequestState.QUEUED, age_s=1)
    make_record(gateway_id=new_uuid7(), state=RequestState.QUEUED, age_s=11)
    assert close_orphaned_requests() == 1


@pytest.mark.parametrize("state", sorted(FINAL_REQUEST_STATES))
def test_a_final_state_is_never_changed(state: RequestState) -> None:
    record = make_record(gateway_id=make_gateway(stopped=True).pk, state=state, age_s=60)
    assert close_orphaned_requests(dead_after_s=DEAD_AFTER_S) == 0
    record.refresh_from_db()
    assert (record.state, record.error_code, record.finished_at) == (state.value, None, None)


def test_more_than_one_batch_is_closed_in_one_call() -> None:
    set_limits(gateway={"orphans_batch": 3})
    gateway = make_gateway(stopped=True)
    for _ in range(7):
        make_record(gateway_id=gateway.pk, state=RequestState.RUNNING)
    assert close_orphaned_requests() == 7


@pytest.mark.django_db(transaction=True)
def test_a_row_that_is_being_written_is_left_for_the_next_call() -> None:
    gateway = make_gateway(stopped=True)
    busy = make_record(gateway_id=gateway.pk, state=RequestState.RUNNING)
    make_record(gateway_id=gateway.pk, state=RequestState.RUNNING)
    closed: list[int] = []

    def close() -> None:
        try:
            closed.append(close_orphaned_requests())
        finally:
            connection.close()

    with transaction.atomic():
        RequestRecord.objects.filter(pk=busy.pk).update(state="completed")
        other = threading.Thread(target=close)
        other.start()
        other.join(30)
    assert closed == [1]
    busy.refresh_from_db()
    assert busy.state == "completed"


@pytest.mark.django_db(transaction=True)
def test_a_second_worker_leaves_the_work_to_the_first() -> None:
    make_record(gateway_id=make_gateway(stopped=True).pk, state=RequestState.RUNNING)
    closed: list[int] = []

    def close() -> None:
        try:
            closed.append(reconcile_requests())
        finally:
            connection.close()

    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [RECONCILE_LOCK])
        other = threading.Thread(target=close)
        other.start()
        other.join(30)
    assert closed == [0]
    assert reconcile_requests() == 1
