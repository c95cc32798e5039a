"""Background work of the gateway. A task translates; the work is one function call that may be repeated."""

from __future__ import annotations

import logging

from celery import shared_task
from django.db import connection, transaction

from gateway.partitions import PartitionsBusy
from gateway.partitions import maintain_partitions as run_maintenance
from gateway.reconciler import close_orphaned_requests
from gateway.services import delete_expired_responses

RECONCILE_LOCK = 0x6D73_7263
"""Key of the advisory lock: one reconciler at a time, however many workers run."""

logger = logging.getLogger(__name__)


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
        report = run_maintenance()
    except PartitionsBusy as error:
        logger.warning("partitions_busy reason=%s", error)
        return 0
    return len(report.created) + len(report.dropped)


@shared_task(name="gateway.tasks.forget_expired_responses")  # type: ignore[untyped-decorator]  # Celery ships no types
def forget_expired_responses() -> int:
    """Delete kept answers that have expired. Returns how many; what a call has no time for, the next one deletes."""
    return delete_expired_responses()
