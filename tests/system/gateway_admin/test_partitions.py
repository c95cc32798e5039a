"""Day partitions appear ahead of time, take over rows that came before them, and go when their time is over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta

import pytest
from django.db import connection, transaction

from core.limits import limits
from gateway.models import RequestRecord
from gateway.partitions import (
    ADVISORY_LOCK,
    DEFAULT_PARTITION,
    TABLE,
    PartitionsBusy,
    list_partition_days,
    maintain_partitions,
    partition_name,
)
from gateway.tasks import maintain_partitions as maintain_task
from tests.fakes.limits import set_limits
from tests.fakes.tenants import make_record
from tests.fakes.waiting import wait_until

pytestmark = pytest.mark.django_db(transaction=True)
TODAY = date(2031, 5, 17)
NOON = datetime(2031, 5, 17, 12, tzinfo=UTC)
PATIENT_MS = 30_000


@pytest.fixture(autouse=True)
def no_partitions() -> Iterator[None]:
    """Start and end with the DEFAULT partition alone, and have the maintainer wait for its locks as long as that takes."""
    set_limits(gateway={"partition_lock_ms": PATIENT_MS})
    drop_days()
    yield
    drop_days()


def drop_days() -> None:
    with connection.cursor() as cursor:
        for day in list_partition_days():
            cursor.execute(f"DROP TABLE {partition_name(day)}")


def partition_of(record: RequestRecord) -> str:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT tableoid::regclass::text FROM {TABLE} WHERE id = %s", [record.pk])
        row = cursor.fetchone()
    assert row is not None
    return str(row[0])


def test_partitions_of_today_and_the_next_days_are_made_once() -> None:
    report = maintain_partitions(today=TODAY)
    assert len(report.created) == limits().gateway.partition_days_ahead + 1
    assert list_partition_days() == {TODAY + timedelta(days=step) for step in range(limits().gateway.partition_days_ahead + 1)}
    assert maintain_partitions(today=TODAY).created == ()
    assert maintain_partitions(today=TODAY + timedelta(days=1)).created == (
        partition_name(TODAY + timedelta(days=limits().gateway.partition_days_ahead + 1)),
    )


def test_rows_that_came_before_their_partition_move_into_it() -> None:
    early = [make_record(created_at=NOON + timedelta(hours=hour)) for hour in (-12, 0, 11)]
    later = make_record(created_at=NOON + timedelta(days=100))
    report = maintain_partitions(today=TODAY)
    assert report.moved_rows == 3
    assert {partition_of(record) for record in early} == {partition_name(TODAY)}
    assert partition_of(later) == DEFAULT_PARTITION
    assert RequestRecord.objects.count() == 4


def test_what_is_past_its_retention_goes_wherever_it_lies() -> None:
    set_limits(gateway={"retention_days": 3})
    kept = make_record(created_at=NOON - timedelta(days=3))
    make_record(created_at=NOON - timedelta(days=4))
    maintain_partitions(today=TODAY - timedelta(days=4))
    stray = make_record(created_at=NOON - timedelta(days=40))
    report = maintain_partitions(today=TODAY)
    assert report.dropped == (partition_name(TODAY - timedelta(days=4)),)
    assert list(RequestRecord.objects.values_list("pk", flat=True)) == [kept.pk]
    assert not RequestRecord.objects.filter(pk=stray.pk).exists()


def test_a_second_maintainer_leaves_at_once() -> None:
    with hold(f"SELECT pg_advisory_xact_lock({ADVISORY_LOCK})"), pytest.raises(PartitionsBusy):
        maintain_partitions(today=TODAY)


def test_a_table_that_stays_in_use_is_left_for_the_next_call() -> None:
    set_limits(gateway={"partition_lock_ms": 500})
    with hold(f"LOCK TABLE {TABLE} IN ACCESS SHARE MODE"):
        with pytest.raises(PartitionsBusy):
            maintain_partitions(today=TODAY)
        assert maintain_task() == 0
    set_limits(gateway={"partition_lock_ms": PATIENT_MS})
    assert len(maintain_partitions(today=TODAY).created) == limits().gateway.partition_days_ahead + 1


@pytest.mark.timeout(180)  # above the sum of the waits
def test_an_update_that_waits_for_the_move_finds_its_row() -> None:
    """A statement planned before the partition existed must still see the row that moved into it."""
    set_limits(gateway={"partition_lock_ms": 120_000})  # the maintainer must not give up before the update waits too
    record = make_record(created_at=NOON)
    updated: list[int] = []

    def update() -> None:
        try:
            updated.append(RequestRecord.objects.filter(pk=record.pk).update(model="changed"))
        finally:
            connection.close()

    with hold(f"LOCK TABLE {TABLE} IN SHARE MODE", f"LOCK TABLE {DEFAULT_PARTITION} IN SHARE MODE"):
        mover = in_thread(lambda: maintain_partitions(today=TODAY))
        wait_until(lambda: waiting_statements() >= 1, what="the maintainer waits for the table")
        updater = in_thread(update)
        wait_until(lambda: waiting_statements() >= 2, what="the update waits behind it")
    mover.join(30)
    updater.join(30)
    assert updated == [1]
    record.refresh_from_db()
    assert record.model == "changed"


def waiting_statements() -> int:
    with connection.cursor() as cursor:
        # Of this database alone: other tests wait for locks on the same server.
        cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")
        row = cursor.fetchone()
    return int(row[0]) if row else 0


def in_thread(work: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        try:
            work()
        finally:
            connection.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@contextmanager
def hold(*statements: str) -> Iterator[None]:
    """Run statements in another connection's transaction and keep it open for the block."""
    ready, done = threading.Event(), threading.Event()

    def work() -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            ready.set()
            done.wait(120)

    thread = in_thread(work)
    try:
        assert ready.wait(30)
        yield
    finally:
        done.set()
        thread.join(30)
