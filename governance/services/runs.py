"""Carrying out what was approved: rows say what is due, workers take one at a time under its lease, boxes answer as events.

``due_at`` is the lease: taking a run moves it, so whoever dies, or stumbles over a run, leaves it to the next look and holds
up no other. What follows from the look is written in one transaction under the lock of the operation.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models.fields.json import KeyTextTransform

from core.hints import publish_hint
from core.limits import limits
from governance.models import OperationRun
from governance.services.dispatching import dispatch
from governance.services.evidence import read_stored
from governance.services.finishing import finish, ring
from governance.services.lookup import find_operation, lock_run
from governance.services.transitions import audit_run
from governance.states import FINAL_RUNS, ApprovalState, RunEvent, RunState, next_run, sources_of
from wire import clock
from wire.optoken.approval import ApprovalError

logger = logging.getLogger("muster.governance")

_WORKER = f"{socket.gethostname()}:{os.getpid()}"[:80]


def run_due(limit: int = 50) -> int:
    """Work on whatever is due, oldest first, and return how many runs were looked at."""
    done = 0
    for _ in range(limit):
        if not work_on(None):
            return done
        done += 1
    return done


def work_on(run_id: uuid.UUID | None) -> bool:
    """Take one due run (that one, or the one that waits longest) and move it on; False when there is none to be had."""
    taken = _take(run_id)
    if taken is not None:
        _move_on(taken)
    return taken is not None


@transaction.atomic
def _take(run_id: uuid.UUID | None) -> uuid.UUID | None:
    now = clock.now()
    due = OperationRun.objects.select_for_update(skip_locked=True, of=("self",), no_key=True)
    due = due.filter(ended_at=None, due_at__lte=now, operation__state=ApprovalState.APPROVED.value)
    found = (due if run_id is None else due.filter(pk=run_id)).order_by("due_at", "position").first()
    if found is None:
        return None
    OperationRun.objects.filter(pk=found.pk).update(
        due_at=now + timedelta(seconds=limits().governance.run_lease_s), lease_owner=_WORKER
    )
    return found.pk


@transaction.atomic
def _move_on(run_id: uuid.UUID) -> None:
    op_id = OperationRun.objects.values_list("operation_id", flat=True).get(pk=run_id)
    operation = find_operation(op_id, lock=True)
    run = OperationRun.objects.select_for_update(no_key=True).get(pk=run_id)
    run.operation = operation
    state = RunState(run.state)
    if operation.state != ApprovalState.APPROVED.value or state in FINAL_RUNS:
        return
    now = clock.now()
    if state is RunState.QUEUED:
        dispatch(run, operation)
    elif state is RunState.DISPATCHED and not run.token:
        _requeue(run, "it was sent by an earlier release")
    elif now > max(operation.not_after, run.updated_at) + timedelta(seconds=limits().governance.run_silence_s):
        _give_up(run)
    else:
        OperationRun.objects.filter(pk=run.pk).update(due_at=now + timedelta(seconds=limits().governance.run_look_again_s))


def _give_up(run: OperationRun) -> None:
    if RunState(run.state) is not RunState.UNKNOWN:
        finish(run, RunEvent.LOSE, code="box_lost", message="The node has not been heard for a day.")
    finish(run, RunEvent.RESOLVE, code="box_lost", message="The node never came back to tell how it went; look at it by hand.")


# What boxes report


@transaction.atomic
def note_progress(*, run_id: uuid.UUID, stage: str, fraction: float | None, eta_s: float | None, task_id: str = "") -> None:
    """Take down how far a run is. Without effect on one that has ended or was never sent.

    ``task_id``: how the node calls it, where that is to be asked for over HTTP.
    """
    rows, now = OperationRun.objects.filter(pk=run_id), clock.now()
    share = None if fraction is None or not math.isfinite(fraction) else min(1.0, max(0.0, fraction))
    left_s = None if eta_s is None or not math.isfinite(eta_s) else max(0.0, eta_s)
    told = {"stage": stage[:200], "fraction": share, "eta_s": left_s, "contact_at": now, "updated_at": now}
    if task_id:
        told["task_id"] = task_id
    if rows.filter(state=RunState.DISPATCHED.value).update(state=RunState.EXECUTING.value, **told):
        run = rows.select_related("operation").get()
        audit_run(run, run.operation, "operation.run.executing", {"attempt": run.attempt})
    elif not rows.filter(state=RunState.EXECUTING.value).update(**told):
        return
    publish_hint("operations", str(rows.values_list("operation_id", flat=True).get()))


@transaction.atomic
def finish_run(
    *,
    run_id: uuid.UUID,
    event: RunEvent,
    code: str = "",
    message: str = "",
    result: Mapping[str, object] | None = None,
    receipt: str = "",
    receipt_key: str = "",
) -> bool:
    """End a run as its box says (LOSE makes it unknown, to be resolved). False when it had ended or that cannot be.

    A box cannot know how something went that was never sent to it, whatever it says.
    """
    run = lock_run(run_id)
    if run is None or RunState(run.state) in FINAL_RUNS or RunState(run.state) not in sources_of(event):
        return False
    if run.dispatched_at is None:
        return False
    finish(run, event, code=code, message=message, result=result, receipt=receipt, receipt_key=receipt_key)
    return True


@transaction.atomic
def requeue_run(*, run_id: uuid.UUID, reason: str) -> bool:
    """Send a run again, with a new token: the box never heard of it. False when it is not on its way."""
    run = lock_run(run_id)
    if run is None or RunState(run.state) not in sources_of(RunEvent.REQUEUE):
        return False
    _requeue(run, reason)
    return True


def _requeue(run: OperationRun, reason: str) -> None:
    wait_s = min(limits().governance.run_pause_max_s, 0.5 * 2 ** min(run.attempt, 6))
    run.state = next_run(RunState(run.state), RunEvent.REQUEUE).value
    run.message, run.due_at = reason[: limits().governance.run_message_chars], clock.now() + timedelta(seconds=wait_s)
    run.token, run.sent_at, run.task_id = "", None, ""
    run.save()
    audit_run(run, run.operation, "operation.run.queued", {"attempt": run.attempt})
    publish_hint("operations", str(run.operation_id))
    ring(run.pk, after_s=wait_s)


def last_run(operation: str, *, target: str, params: Mapping[str, object]) -> OperationRun | None:
    """Return the last time the same was done to the same target (the same model, where there is one); None = never."""
    ended = OperationRun.objects.filter(operation__operation=operation, target=target, ended_at__isnull=False)
    model = params.get("modelId")
    for run in ended.exclude(state=RunState.SKIPPED.value).select_related("operation").order_by("-ended_at")[:20]:
        if model is None or _model_of(run) == model:
            return run
    return None


@dataclass(frozen=True, slots=True)
class LastRun:
    """The last success on one target about one ``subject``, with what people signed. ``ended_at``: when it ended."""

    op_id: uuid.UUID
    operation: str
    op_class: str
    target: str
    subject: str
    ended_at: datetime
    params: Mapping[str, object]


def list_last_successes(*, targets: Collection[str], operations: Collection[str], member: str) -> list[LastRun]:
    """Return the last run of these operations that succeeded, for each target and each value of ``member`` in its result.

    One query. A row whose statement was changed in the database is left out: nobody signed what it says.
    """
    rows = OperationRun.objects.filter(
        state=RunState.SUCCEEDED.value, target__in=targets, operation__operation__in=operations, ended_at__isnull=False
    ).annotate(subject=KeyTextTransform(member, "result"))
    last = rows.filter(subject__isnull=False).order_by("target", "subject", "-ended_at").distinct("target", "subject")
    found = []
    for run in last.select_related("operation"):
        operation = run.operation
        with contextlib.suppress(ApprovalError):
            params = read_stored(operation).params
            found.append(LastRun(
                operation.pk, operation.operation, operation.op_class, run.target, str(run.subject),
                run.ended_at or clock.now(), params,
            ))  # fmt: skip
    return found


def _model_of(run: OperationRun) -> object:
    try:
        return read_stored(run.operation).params.get("modelId")
    except ApprovalError:
        return None  # changed in the database: this tells nothing about any model
