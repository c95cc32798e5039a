"""The sweep: every few seconds one task looks at everything that time or a lost message may have made due."""

from __future__ import annotations

import logging

from celery import shared_task
from django.db import InterfaceError, OperationalError

from gateway.tasks import reconcile_requests
from governance.notices import is_delivery_due
from governance.tasks import deliver_notices
from nodes.services.nodes import is_probe_due
from nodes.tasks import probe_direct, schedule_calls, sweep_gpus, sweep_nodes

logger = logging.getLogger(__name__)


@shared_task(name="controlplane.tasks.sweep")  # type: ignore[untyped-decorator]  # Celery ships no types
def sweep() -> None:
    """Look at requests, nodes, GPUs, runs on nodes that are called, and notices; what may wait gets a task of its own.

    A look that fails keeps none of the others from being taken. Idempotent. Raises OperationalError when the database is away.
    """
    # Operations are not among them: ``serve_control.Reconciler`` looks at those, without the broker.
    # One task for all: while nothing is due, sending and taking five costs more than the looks do.
    for look in (reconcile_requests, sweep_nodes, sweep_gpus, schedule_calls, _ring_probe, _ring_delivery):
        try:
            look()
        except (OperationalError, InterfaceError):
            raise
        except Exception:
            logger.exception("sweep_failed look=%s", look.__name__)


def _ring_probe() -> None:
    if is_probe_due():
        probe_direct.apply_async(expires=5)


def _ring_delivery() -> None:
    if is_delivery_due():
        deliver_notices.apply_async(expires=20)
