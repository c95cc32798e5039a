"""Background work of the node registry. A task is a bell: what is to do stands in the rows."""

from __future__ import annotations

import logging

from celery import shared_task

from nodes.services import probe_direct_nodes, sweep_presence

logger = logging.getLogger(__name__)


@shared_task(name="nodes.tasks.sweep_nodes")  # type: ignore[untyped-decorator]  # Celery ships no types
def sweep_nodes() -> None:
    """Bring the rows of silent boxes in line with their age. Idempotent; a lost ring does no harm."""
    report = sweep_presence()
    if report.went_offline or report.drains_ended:
        logger.info("nodes_swept went_offline=%d drains_ended=%d", report.went_offline, report.drains_ended)


@shared_task(name="nodes.tasks.probe_direct_nodes")  # type: ignore[untyped-decorator]  # Celery ships no types
def probe_direct() -> None:
    """See whether the boxes that registered a URL answer on it. Idempotent; a lost ring is made up by the next."""
    failed = probe_direct_nodes()
    if failed:
        logger.warning("nodes_probed unreachable=%d", failed)
