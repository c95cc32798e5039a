"""Waking a worker for a box that is called over HTTP. A lost ring costs seconds: the sweep looks as well."""

from __future__ import annotations

import logging
import uuid

from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string

from core.limits import limits

TASK_NAME = "nodes.tasks.call_box"

logger = logging.getLogger("muster.nodes")


def ring_direct_box(run_id: uuid.UUID) -> None:
    """Have a worker take the command one step further, once the transaction is committed."""

    def send() -> None:
        from celery.exceptions import CeleryError  # loaded by whoever sends a task at all
        from kombu.exceptions import KombuError

        try:
            import_string(settings.TASK_APP).send_task(
                TASK_NAME, args=[str(run_id)], expires=limits().nodes.call_task_s, retry=False
            )
        except (OSError, KombuError, CeleryError) as error:
            logger.warning("command_not_rung run=%s error=%s; the sweep takes it up", run_id, type(error).__name__)

    transaction.on_commit(send)
