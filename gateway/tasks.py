"""Background work of the gateway: requests that lost their gateway, the day partitions of the request table, kept answers.

Partitions are made ahead and dropped when their retention is over. Rows whose day has none lie in the DEFAULT partition; they
are moved when theirs is made.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from celery import shared_task
from django.db import OperationalError, connection, transaction
from django.db.backends.utils import CursorWrapper
from psycopg.errors import LockNotAvailable

from core.limits import limits
from gateway.services.compatibility import update_exclusions
from gateway.services.figures import update_figures
from gateway.services.requests import close_orphaned_requests
from gateway.services.responses import delete_expired_responses
from gateway.services.rollups import roll_up_requests
from gateway.services.usage import deliver_usage, forget_old_usage, tell_reached_budgets
from wire import clock

logger = logging.getLogger(__name__)

RECONCILE_LOCK = 0x6D73_7263
"""Key of the advisory lock: one reconciler at a time, however many workers run."""


TABLE = "gateway_requestrecord"
DEFAULT_PARTITION = f"{TABLE}_default"
ADVISORY_LOCK = 0x6D73_7470
"""Key of the advisory lock of partition maintenance."""
_NAME = re.compile(rf"{TABLE}_p(\d{{8}})\Z")


class PartitionsBusy(Exception):
    """Somebody else maintains the partitions, or a long query held the table for ``partition_lock_ms``."""


@dataclass(frozen=True, slots=True)
class MaintenanceReport:
    """What one call did. ``moved_rows`` left the DEFAULT partition for that of their day."""

    created: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    moved_rows: int = 0


def maintain_day_partitions(*, today: date | None = None) -> MaintenanceReport:
    """Make the partitions of today and the next ``partition_days_ahead`` days, drop those past ``retention_days``.

    Idempotent; days are UTC days and each is a transaction of its own. Raises PartitionsBusy.
    """
    first = today or clock.now().date()
    oldest_kept = first - timedelta(days=limits().gateway.retention_days)
    existing = list_partition_days()
    ahead = limits().gateway.partition_days_ahead
    missing = [day for step in range(ahead + 1) if (day := first + timedelta(days=step)) not in existing]
    moved = sum(_create_day(day) for day in missing)
    expired = sorted(day for day in existing if day < oldest_kept)
    for day in expired:
        _drop_day(day)
    _delete_strays(oldest_kept)
    report = MaintenanceReport(
        created=tuple(map(partition_name, missing)), dropped=tuple(map(partition_name, expired)), moved_rows=moved
    )
    if missing or expired:
        logger.info("partitions_maintained created=%d dropped=%d moved_rows=%d", len(missing), len(expired), moved)
    return report


def partition_name(day: date) -> str:
    return f"{TABLE}_p{day:%Y%m%d}"


def list_partition_days() -> set[date]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid WHERE inhparent = %s::regclass",
            [TABLE],
        )
        matches = [_NAME.match(name) for (name,) in cursor.fetchall()]
    return {datetime.strptime(match.group(1), "%Y%m%d").replace(tzinfo=UTC).date() for match in matches if match}


@contextmanager
def _locked() -> Iterator[CursorWrapper]:
    """Hold the advisory lock for one transaction, in which no table lock is waited for longer than ``partition_lock_ms``."""
    try:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [ADVISORY_LOCK])
            if cursor.fetchone() != (True,):
                raise PartitionsBusy("another process maintains the partitions at the moment")
            cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{limits().gateway.partition_lock_ms}ms"])
            yield cursor
    except OperationalError as error:
        if isinstance(error.__cause__, LockNotAvailable):
            waited_s = limits().gateway.partition_lock_ms / 1000
            raise PartitionsBusy(f"{TABLE} was in use for {waited_s:g}s") from error
        raise


def _create_day(day: date) -> int:
    """Make one partition and return how many rows moved into it from the DEFAULT partition."""
    name = partition_name(day)
    start, end = f"{day} 00:00:00+00", f"{day + timedelta(days=1)} 00:00:00+00"
    with _locked() as cursor:
        cursor.execute("SELECT to_regclass(%s)", [name])
        if cursor.fetchone() != (None,):
            return 0
        # An UPDATE planned for the DEFAULT partition alone would miss its moved row, so nobody writes meanwhile.
        cursor.execute(f"LOCK TABLE {TABLE} IN ACCESS EXCLUSIVE MODE")
        cursor.execute(f"CREATE TABLE {name} (LIKE {TABLE} INCLUDING DEFAULTS INCLUDING CONSTRAINTS)")
        cursor.execute(
            f"WITH moved AS (DELETE FROM {DEFAULT_PARTITION} WHERE created_at >= %s AND created_at < %s RETURNING *) "  # noqa: S608  # constants
            f"INSERT INTO {name} SELECT * FROM moved",
            [start, end],
        )
        moved = int(cursor.rowcount)
        cursor.execute(f"ALTER TABLE {TABLE} ATTACH PARTITION {name} FOR VALUES FROM ('{start}') TO ('{end}')")
    return moved


def _drop_day(day: date) -> None:
    with _locked() as cursor:
        cursor.execute(f"DROP TABLE IF EXISTS {partition_name(day)}")


def _delete_strays(oldest_kept: date) -> None:
    with _locked() as cursor:
        cursor.execute(f"DELETE FROM {DEFAULT_PARTITION} WHERE created_at < %s", [f"{oldest_kept} 00:00:00+00"])  # noqa: S608  # constants


@shared_task(name="gateway.tasks.reconcile_requests")  # type: ignore[untyped-decorator]  # Celery ships no types
def reconcile_requests() -> int:
    """Close what dead gateways left open. Returns how many; 0 when another worker is at it."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [RECONCILE_LOCK])
        return close_orphaned_requests() if cursor.fetchone() == (True,) else 0


@shared_task(name="gateway.tasks.maintain_partitions")  # type: ignore[untyped-decorator]  # Celery ships no types
def maintain_partitions() -> int:
    """Make and drop day partitions. Returns how many; 0 when the table is busy, and the next call tries again."""
    try:
        report = maintain_day_partitions()
    except PartitionsBusy as error:
        logger.warning("partitions_busy reason=%s", error)
        return 0
    return len(report.created) + len(report.dropped)


@shared_task(name="gateway.tasks.update_figures")  # type: ignore[untyped-decorator]  # Celery ships no types
def count_figures() -> int:
    """Bring what routing knows of nodes in line: what their GPUs cannot run, and the figures of the requests that ended.

    Returns how many requests were counted; what is left, the next one counts.
    """
    update_exclusions()
    return update_figures()


@shared_task(name="gateway.tasks.roll_up_requests")  # type: ignore[untyped-decorator]  # Celery ships no types
def sum_up_requests() -> int:
    """Add the requests that ended to the sums of charts. Returns how many; what is left, the next one adds."""
    return roll_up_requests()


@shared_task(name="gateway.tasks.forget_expired_responses")  # type: ignore[untyped-decorator]  # Celery ships no types
def forget_expired_responses() -> int:
    """Delete kept answers that have expired. Returns how many; what a call has no time for, the next one deletes."""
    return delete_expired_responses()


@shared_task(name="gateway.tasks.send_usage")  # type: ignore[untyped-decorator]  # Celery ships no types
def send_usage() -> int:
    """Post usage events to the webhooks that take them. Returns how many batches got through."""
    return deliver_usage()


@shared_task(name="gateway.tasks.tell_budgets")  # type: ignore[untyped-decorator]  # Celery ships no types
def tell_budgets() -> int:
    """Tell webhooks of budgets of which 80 or 100 % is used. Returns how many."""
    return tell_reached_budgets()


@shared_task(name="gateway.tasks.forget_usage")  # type: ignore[untyped-decorator]  # Celery ships no types
def forget_usage() -> int:
    """Delete usage events that are too old. Returns how many."""
    return forget_old_usage()
