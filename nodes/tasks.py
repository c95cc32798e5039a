"""Background work of the node registry. A task is a bell: what is to do stands in the rows."""

from __future__ import annotations

import logging

from celery import shared_task

from nodes.services import sweep_presence

logger = logging.getLogger(__name__)


@shared_task(name="nodes.tasks.sweep_nodes")  # type: ignore[untyped-decorator]  # Celery ships no types
def sweep_nodes() -> None:
    """Bring the rows of silent boxes in line with their age. Idempotent; a lost ring does no harm."""
    report = sweep_presence()
    if report.went_offline or report.drains_ended:
        logger.info("nodes_swept went_offline=%d drains_ended=%d", report.went_offline, report.drains_ended)
