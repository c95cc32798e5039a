"""Background work of governance. A task carries an id at most; rows say what is to do."""

from __future__ import annotations

import logging
import uuid

from celery import shared_task

from core.hints import read_unreadable
from governance.checkpoints import checkpoint_if_due
from governance.notices import deliver_due, notify_of_unreadable
from governance.operations.runs import work_on
from governance.passwords import sweep_failures
from governance.signin import sweep_sessions
from wire import clock

logger = logging.getLogger("muster.governance")


@shared_task(name="governance.tasks.work")  # type: ignore[untyped-decorator]  # Celery ships no types
def work(run_id: str) -> bool:
    """Look at one run. Anything but the id of a run that is due has no effect."""
    try:
        ident = uuid.UUID(run_id)
    except (ValueError, TypeError, AttributeError):
        logger.warning("task_with_bad_id name=work")
        return False
    return work_on(ident)


@shared_task(name="governance.tasks.deliver_notices")  # type: ignore[untyped-decorator]  # Celery ships no types
def deliver_notices() -> int:
    return deliver_due(50)


@shared_task(name="governance.tasks.report_unreadable")  # type: ignore[untyped-decorator]  # Celery ships no types
def report_unreadable() -> bool:
    """Tell of messages that workers could not read."""
    total = read_unreadable()
    return total is not None and notify_of_unreadable(total, now=clock.now())


@shared_task(name="governance.tasks.checkpoint_audit")  # type: ignore[untyped-decorator]  # Celery ships no types
def checkpoint_audit() -> bool:
    """Sign a checkpoint of the audit log when enough is new."""
    return checkpoint_if_due() is not None


@shared_task(name="governance.tasks.forget_sign_ins")  # type: ignore[untyped-decorator]  # Celery ships no types
def forget_sign_ins() -> int:
    """Delete sessions that have ended and failed sign-ins that no longer count."""
    return sweep_sessions() + sweep_failures(now=clock.now())
