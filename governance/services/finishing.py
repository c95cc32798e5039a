"""What the end of a run brings: its row, its event, the rest of its batch, and the notices. And ringing for workers."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from datetime import timedelta

from django.conf import settings
from django.db import transaction
from django.utils.module_loading import import_string

from core.hints import publish_hint
from core.limits import limits
from governance.models import OperationRun
from governance.services.evidence import is_stopped_by_failure
from governance.services.transitions import audit_run, skip_runs, tell, tell_when_over
from governance.states import FINAL_RUNS, RunEvent, RunState, next_run
from wire import clock

logger = logging.getLogger("muster.governance")


def ring(run_id: uuid.UUID, *, after_s: float = 0.0) -> None:
    """Wake a worker for a run once the transaction is committed. A lost ring costs seconds: the reconciler looks as well."""

    def send() -> None:
        from celery.exceptions import CeleryError  # loaded by whoever sends a task at all
        from kombu.exceptions import KombuError

        wait = {"countdown": after_s} if after_s else {}
        try:
            import_string(settings.TASK_APP).send_task(
                "governance.tasks.work", args=[str(run_id)], expires=60 + after_s, retry=False, **wait
            )
        except (OSError, KombuError, CeleryError) as error:
            logger.warning("run_not_rung run=%s error=%s; the reconciler takes it up", run_id, type(error).__name__)

    transaction.on_commit(send)


def postpone(run: OperationRun, wait_s: float, *, message: str) -> None:
    """Look at a locked run again later, and say why. It was not heard of: ``updated_at`` stays."""
    due_at = clock.now() + timedelta(seconds=wait_s)
    text = message[: limits().governance.run_message_chars]
    OperationRun.objects.filter(pk=run.pk).update(due_at=due_at, message=text, fence=run.fence)
    if text != run.message:
        publish_hint("operations", str(run.operation_id))


def finish(
    run: OperationRun,
    event: RunEvent,
    *,
    code: str = "",
    message: str = "",
    result: Mapping[str, object] | None = None,
    receipt: str = "",
    receipt_key: str = "",
) -> None:
    """Move a run on that is locked together with its operation; what waits for it is woken or skipped, and people are told."""
    now = clock.now()
    new = next_run(RunState(run.state), event)
    run.state, run.code, run.message = new.value, code[:80], message[: limits().governance.run_message_chars]
    run.result = dict(result) if result else run.result
    run.receipt, run.receipt_key = receipt or run.receipt, receipt_key or run.receipt_key
    run.ended_at = now if new in FINAL_RUNS else None
    run.fraction = 1.0 if new is RunState.SUCCEEDED else run.fraction
    run.eta_s = None
    run.token = ""
    run.due_at = now
    run.save()
    audit_run(run, run.operation, f"operation.run.{new.value}", {"code": run.code, "receipt": bool(run.receipt)})
    publish_hint("operations", str(run.operation_id))
    if new not in FINAL_RUNS:
        tell(run.operation, "unknown", run=run)
        return
    if new is not RunState.SUCCEEDED and is_stopped_by_failure(run.operation):
        skip_runs(run.operation, "an earlier one of this batch failed", code="batch_stopped", after=run)
    else:
        _wake_next(run)
    tell_when_over(run.operation, run)


def _wake_next(run: OperationRun) -> None:
    """Let the rest of the batch be looked at now: in their order, one goes on its way."""
    due_at = max(clock.now(), run.operation.not_before)
    waiting = OperationRun.objects.filter(operation_id=run.operation_id, use=run.use, state=RunState.QUEUED.value)
    if waiting.update(due_at=due_at):
        ring(waiting.order_by("position").values_list("pk", flat=True)[0])
