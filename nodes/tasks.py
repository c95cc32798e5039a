"""Background work of the node registry. What is to do stands in the rows; a task only has a worker look at them."""

from __future__ import annotations

import logging
import uuid

from celery import shared_task

from core.limits import limits
from nodes.direct import call_direct_node, find_unattended
from nodes.operations.load import tell_failed_reloads
from nodes.services.certificates import drop_authorities
from nodes.services.drains import sweep_presence
from nodes.services.figures import follow_uptime
from nodes.services.gpus import follow_gpus
from nodes.services.history import roll_up_history, sample_gpus
from nodes.services.hub import forget_searches
from nodes.services.logs import forget_logs
from nodes.services.nodes import probe_direct_nodes, remove_dead_nodes
from nodes.services.tickets import renew_ticket_key

logger = logging.getLogger(__name__)


@shared_task(name="nodes.tasks.sweep_nodes")  # type: ignore[untyped-decorator]  # Celery ships no types
def sweep_nodes() -> None:
    """Bring the rows of silent nodes in line with their age. Idempotent; a lost task does no harm."""
    report = sweep_presence()
    if report.went_offline or report.drains_ended or report.drained:
        logger.info(
            "nodes_swept went_offline=%d drains_ended=%d drained=%d", report.went_offline, report.drains_ended, report.drained
        )


@shared_task(name="nodes.tasks.follow_gpus")  # type: ignore[untyped-decorator]  # Celery ships no types
def sweep_gpus() -> None:
    """Write what nodes newly reported of their GPUs, when they were heard, and samples for charts. Idempotent."""
    follow_uptime()
    report = follow_gpus()
    sample_gpus()
    if report.gone or report.forgotten:
        logger.info("gpus_swept written=%d gone=%d forgotten=%d", report.written, report.gone, report.forgotten)


@shared_task(name="nodes.tasks.roll_up_history")  # type: ignore[untyped-decorator]  # Celery ships no types
def roll_up() -> None:
    """Sum up the history of GPUs, and delete what is too old, told logs too. Idempotent; the next one makes up for it."""
    roll_up_history()
    forget_logs()
    forget_searches()


@shared_task(name="nodes.tasks.tell_failed_reloads")  # type: ignore[untyped-decorator]  # Celery ships no types
def tell_reloads() -> None:
    """Tell of kept models that nodes have given up loading again. Idempotent."""
    given_up = tell_failed_reloads()
    if given_up:
        logger.warning("nodes_swept reloads_failed=%d", given_up)


@shared_task(name="nodes.tasks.renew_ticket_key")  # type: ignore[untyped-decorator]  # Celery ships no types
def renew_key() -> None:
    """Replace a ticket key that is old, forget CAs that hold no more and dead nodes. The next one makes up for a lost task."""
    drop_authorities()
    if removed := remove_dead_nodes():
        logger.info("nodes_removed dead=%d", removed)
    if renew_ticket_key():
        logger.info("ticket_key_renewed")


@shared_task(name="nodes.tasks.probe_direct_nodes")  # type: ignore[untyped-decorator]  # Celery ships no types
def probe_direct() -> None:
    """See whether the nodes that registered a URL answer on it. Idempotent; the next one makes up for a lost task."""
    failed = probe_direct_nodes()
    if failed:
        logger.warning("nodes_probed unreachable=%d", failed)


@shared_task(name="nodes.tasks.call_box")  # type: ignore[untyped-decorator]  # Celery ships no types
def call_node(run_id: str) -> None:
    """Take the command for a node that is called over HTTP one step further. Idempotent; two at once do the work of one."""
    if call_direct_node(uuid.UUID(run_id)):
        call_node.apply_async(args=[run_id], countdown=limits().nodes.call_poll_s, expires=limits().nodes.call_task_s)


@shared_task(name="nodes.tasks.ring_direct_boxes")  # type: ignore[untyped-decorator]  # Celery ships no types
def schedule_calls() -> None:
    """Take up the commands whose own task, or whose worker, was lost."""
    for run_id in find_unattended():
        call_node.apply_async(args=[str(run_id)], expires=limits().nodes.call_task_s)
