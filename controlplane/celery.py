"""The Celery application: the bell that wakes background work. Rows hold the work, messages carry opaque ids."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_init, worker_ready
from kombu.transport import TRANSPORT_ALIASES

from core.db import limit_process
from core.limits import limits

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

# By name: kombu takes the transport from the scheme of the URL, and of none but these.
TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), "controlplane.broker:Transport"))

app = Celery("muster")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
app.autodiscover_tasks(["controlplane"])


@worker_init.connect  # type: ignore[untyped-decorator]  # Celery ships no types
def bound_waits(**_kwargs: Any) -> None:  # Any: the signal's own arguments
    """Let no task wait for a silent database for ever: it ends with an error, and its row is due again."""
    limit_process(limits().core.database_silence_s)


@worker_ready.connect  # type: ignore[untyped-decorator]  # Celery ships no types
def prepare_partitions(**_kwargs: Any) -> None:  # Any: the signal's own arguments
    """Make the day partitions when a worker starts: beat waits one whole interval before its first call."""
    app.send_task("gateway.tasks.maintain_partitions", expires=600)
