"""Operations on their way to nodes: rows that say what is to be delivered, and what the nodes answer.

Over a socket a gateway process delivers them, over HTTP a Celery task (``nodes.direct``). Neither permits anything: that is
what the token in the row is for, which the node judges by itself. Two gateways that hold sockets of one node may both send:
the node carries out each (op_id, use) once. The compare-and-set only keeps that rare.

Each status is stored in one transaction with what governance makes of it, so a crash between the two loses nothing: the node
answers the next question with the same words.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.db import connection, transaction

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_word
from governance.services import finish_run, note_progress, read_freeze, requeue_run
from governance.services.lookup import find_operation
from governance.states import RunEvent
from nodes.models import Node, NodeCommand, NodePresence
from wire import clock
from wire.bridge import OpStatus
from wire.ids import parse_id
from wire.optoken.approval import ApprovalError, decode_bytes
from wire.optoken.receipt import Receipt, ReceiptError, digest_result, read_receipt

FINAL_STATES = frozenset({"succeeded", "failed", "refused", "interrupted"})
TRY_AGAIN_CODES = frozenset({"unavailable", "busy", "leaving", "op_token_expired", "operation_running", "operation_limit"})
"""Refusals that say nothing against the operation: it is sent again, with a new token."""
RECEIPT_INVALID = "receipt_invalid"

logger = logging.getLogger("muster.nodes")

_OPEN = (NodeCommand.State.WAITING, NodeCommand.State.SENT, NodeCommand.State.RUNNING)
_NODES_WITH_OPEN = "SELECT DISTINCT node_id FROM nodes_nodecommand WHERE state = ANY(%s)"


# The rows


@dataclass(frozen=True, slots=True)
class Command:
    """What a box is to be sent. ``body``: what the model-runner API takes, without the token."""

    run_id: uuid.UUID
    node_id: uuid.UUID
    op_id: str
    use: int
    operation: str
    body: Mapping[str, object]
    token: str = field(repr=False)
    token_expires_at: datetime


@transaction.atomic
def put_command(command: Command) -> bool:
    """Have a command delivered; False when it has ended already. A new token replaces the one before.

    Putting it again is harmless: a box carries out each (op_id, use) once.
    """
    row, is_new = NodeCommand.objects.select_for_update().get_or_create(
        pk=command.run_id,
        defaults={
            "node_id": command.node_id,
            "op_id": command.op_id,
            "use": command.use,
            "operation": command.operation,
            "body": dict(command.body),
            "token": command.token,
            "token_expires_at": command.token_expires_at,
        },
    )
    if row.state == NodeCommand.State.ENDED:
        return False
    if not is_new:
        row.token, row.token_expires_at = command.token, command.token_expires_at
        row.state, row.sent_at, row.gateway_id, row.task_id = NodeCommand.State.WAITING, None, None, ""
        row.save(update_fields=["token", "token_expires_at", "state", "sent_at", "gateway_id", "task_id", "updated_at"])
    publish_hint("commands", str(command.node_id))
    return True


def park_command(row: NodeCommand) -> None:
    """Hold it back until it gets another token; a row that has got one meanwhile stays as it is."""
    same = NodeCommand.objects.filter(pk=row.pk, token=row.token).exclude(state=NodeCommand.State.ENDED)
    same.update(state=NodeCommand.State.WAITING, token="", task_id="", updated_at=clock.now())


# What is to be sent


@dataclass(frozen=True, slots=True)
class Send:
    """Send the command with its token."""

    node_id: uuid.UUID
    op_id: str
    use: int
    operation: str
    body: dict[str, object]
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the box where the command stands."""

    node_id: uuid.UUID
    op_id: str
    use: int


Delivery = Send | Ask


def plan_deliveries(*, linked: Mapping[uuid.UUID, datetime], gateway_id: uuid.UUID) -> list[Delivery]:
    """Return what to send now, marked as sent. ``linked``: since when each box is linked to this process.

    A command whose token has run out goes back to be given another. While all operations are frozen none is sent; boxes are
    still asked about those that they have.
    """
    if not linked:
        return []
    # Few nodes have open commands, and thousands may be linked: the database is not told of all these each time.
    with connection.cursor() as cursor:
        cursor.execute(_NODES_WITH_OPEN, [[state.value for state in _OPEN]])
        wanted = linked.keys() & {node_id for (node_id,) in cursor.fetchall()}
    if not wanted:
        return []
    now = clock.now()
    open_ones = NodeCommand.objects.filter(node_id__in=wanted, state__in=_OPEN).order_by("created_at")
    due = open_ones.exclude(state=NodeCommand.State.WAITING, token="")
    rows = list(due[: limits().nodes.command_batch])
    if rows and read_freeze() is not None:
        rows = list(due.exclude(state=NodeCommand.State.WAITING)[: limits().nodes.command_batch])
    deliveries: list[Delivery] = []
    for row in rows:
        delivery = _plan(row, since=linked[row.node_id], now=now, gateway_id=gateway_id)
        if delivery is not None:
            deliveries.append(delivery)
    return deliveries


def _plan(row: NodeCommand, *, since: datetime, now: datetime, gateway_id: uuid.UUID) -> Delivery | None:
    if row.state == NodeCommand.State.WAITING:
        return _plan_first(row, now=now, gateway_id=gateway_id)
    # What was sent over a socket of ours that is gone may never have arrived. Of another gateway's sockets nothing is known.
    is_cut_off = row.gateway_id == gateway_id and row.updated_at < since
    if not is_cut_off and now - row.updated_at < timedelta(seconds=limits().nodes.command_quiet_s):
        return None
    mine = NodeCommand.objects.filter(pk=row.pk, state=row.state, updated_at=row.updated_at)
    return Ask(row.node_id, row.op_id, row.use) if mine.update(gateway_id=gateway_id, updated_at=now) else None


def _plan_first(row: NodeCommand, *, now: datetime, gateway_id: uuid.UUID) -> Send | None:
    if row.token_expires_at is None or row.token_expires_at - now <= timedelta(seconds=limits().nodes.command_token_margin_s):
        requeue_run(run_id=row.pk, reason="its token ran out before the box could be reached")
        park_command(row)
        return None
    mine = NodeCommand.objects.filter(pk=row.pk, state=NodeCommand.State.WAITING, token=row.token)
    if not mine.update(state=NodeCommand.State.SENT, sent_at=now, gateway_id=gateway_id, updated_at=now):
        return None
    return Send(row.node_id, row.op_id, row.use, row.operation, dict(row.body), row.token)


# What nodes say


@transaction.atomic
def store_status(*, node_id: uuid.UUID, status: OpStatus) -> bool:
    """Store what a box said of a command that is for it; False when there is no such command, or it has ended.

    A last word is passed on however late it comes: governance knows whether it still waits for one.
    """
    row = NodeCommand.objects.select_related("node").filter(node_id=node_id, op_id=status.op_id, use=status.use).first()
    if row is None:
        logger.debug("node.unknown_operation node_id=%s state=%s", node_id, status.state)
        return False
    has_ended = row.state == NodeCommand.State.ENDED
    match status.state:
        case "running" if not has_ended:
            _note_progress(row, status)
        case "succeeded":
            _finish(row, status, RunEvent.SUCCEED)
        case "failed":
            _finish(row, status, RunEvent.FAIL)
        case "refused":
            _take_refusal(row, status, has_ended=has_ended)
        case "interrupted":
            lose_run(row, result=status.result, receipt=_check_end(row, status)[1])
        case "unknown" if not has_ended:
            _take_unknown(row)
        case _:
            return False
    return not has_ended


def finish_command(
    row: NodeCommand, event: RunEvent, *, code: str = "", message: str = "", result: Mapping[str, object], receipt: str = ""
) -> None:
    """End a command: the run first, then the row, in the order in which dispatching locks them."""
    finish_run(
        run_id=row.pk,
        event=event,
        code=code,
        message=message,
        result=result,
        receipt=receipt,
        receipt_key=row.node.box_key if receipt else "",
    )
    end_row(row)


def lose_run(row: NodeCommand, *, result: Mapping[str, object], receipt: str = "", loaded: list[str] | None = None) -> None:
    """End a command that was cut off, with what the box has loaded now as its result. ``loaded`` None: as it last said."""
    loaded = find_loaded(row.node_id) if loaded is None else loaded
    what = "The box was cut off while it worked."
    is_lost = finish_run(run_id=row.pk, event=RunEvent.LOSE, code="interrupted", message=what)
    if not is_lost and row.state == NodeCommand.State.WAITING:
        return  # it is about to be sent again, and the box then says so again
    finish_run(
        run_id=row.pk,
        event=RunEvent.RESOLVE,
        code="interrupted",
        message=f"{what} Loaded on it now: {', '.join(loaded) or 'nothing'}"[:500],
        result={**result, "loadedNow": loaded},
        receipt=receipt,
        receipt_key=row.node.box_key if receipt else "",
    )
    end_row(row)


def send_back(row: NodeCommand, reason: str) -> bool:
    """Have the run dispatched again, with a new token; False when that cannot happen to it, and it has begun."""
    if not requeue_run(run_id=row.pk, reason=reason) and row.state == NodeCommand.State.RUNNING:
        return False
    park_command(row)
    return True


def end_row(row: NodeCommand) -> None:
    """Mark a command as ended and forget its token."""
    now = clock.now()
    NodeCommand.objects.filter(pk=row.pk).update(state=NodeCommand.State.ENDED, token="", heard_at=now, updated_at=now)


def note_running(row: NodeCommand, *, stage: str, fraction: float | None, eta_s: float | None) -> None:
    """Store that a command is being carried out, and how far it is."""
    note_progress(run_id=row.pk, stage=stage, fraction=fraction, eta_s=eta_s)
    now = clock.now()
    open_one = NodeCommand.objects.filter(pk=row.pk).exclude(state=NodeCommand.State.ENDED)
    open_one.update(state=NodeCommand.State.RUNNING, heard_at=now, updated_at=now)


def find_loaded(node_id: uuid.UUID) -> list[str]:
    """Return the models that a box said it has loaded, by name."""
    replicas = NodePresence.objects.filter(node_id=node_id).values_list("replicas", flat=True).first() or []
    return sorted({str(replica.get("model")) for replica in replicas if replica.get("state") == "loaded"})


def _note_progress(row: NodeCommand, status: OpStatus) -> None:
    note_running(row, stage=status.stage, fraction=status.fraction, eta_s=status.eta_s)


def _take_refusal(row: NodeCommand, status: OpStatus, *, has_ended: bool) -> None:
    if status.code in TRY_AGAIN_CODES and has_ended:
        return
    if status.code in TRY_AGAIN_CODES and send_back(row, f"the box refused it for now: {status.code}"):
        return
    code = status.code or "refused"
    finish_command(row, RunEvent.FAIL, code=code, message=status.message, result=status.result)


def _take_unknown(row: NodeCommand) -> None:
    if row.state == NodeCommand.State.RUNNING:
        # It had begun there, and the box forgot: nobody can tell how far it came.
        lose_run(row, result={})
    elif (
        row.state == NodeCommand.State.SENT
        and row.sent_at is not None
        and clock.now() - row.sent_at >= timedelta(seconds=limits().nodes.command_unheard_s)
    ):
        send_back(row, "the box never heard of it")


def _finish(row: NodeCommand, status: OpStatus, event: RunEvent) -> None:
    code, receipt = _check_end(row, status)
    finish_command(row, event, code=code, message=status.message, result=status.result, receipt=receipt)


def _check_end(row: NodeCommand, status: OpStatus) -> tuple[str, str]:
    """Return the code and the receipt to keep: one that the box signed about this very end, and that auditors will believe.

    Only at L2 is a box expected to bring one; below, a token names no statement that it could sign for.
    """
    node = row.node
    if not status.receipt and node.op_level != "L2":
        return status.code, ""
    try:
        receipt = read_receipt(status.receipt, decode_bytes(node.box_key))
    except (ReceiptError, ApprovalError, ValueError) as error:
        reason = str(error)
    else:
        reason = _find_fault(receipt, row, status)
        if not reason:
            is_proof = node.op_level == "L2" or _names_statement(receipt, row)
            return status.code, status.receipt if is_proof else ""
    _report_receipt(node, row, reason)
    return RECEIPT_INVALID, ""


def _find_fault(receipt: Receipt, row: NodeCommand, status: OpStatus) -> str:
    """Return why a receipt is not about this end of this command; "" = it is."""
    if row.node.op_level == "L2" and receipt.runner_id != row.node.runner_id:
        return "it is of another box"
    if row.node.op_level == "L2" and not _names_statement(receipt, row):
        return "it is about another statement"
    if (receipt.op_id, receipt.use, receipt.operation) != (row.op_id, row.use, row.operation):
        return "it is about another operation"
    if receipt.outcome != status.state:
        return "it says another outcome"
    return "" if receipt.result_digest == digest_result(status.result) else "it is about another result"


def _names_statement(receipt: Receipt, row: NodeCommand) -> bool:
    """Whether a receipt is for the box and the statement that were approved: one that is not spoils the evidence."""
    ident = parse_id("op", row.op_id)
    if ident is None:
        return False
    operation = find_operation(ident)
    is_target = receipt.runner_id in {run.target for run in operation.runs.all()}
    return is_target and receipt.statement_digest == operation.digest


def _report_receipt(node: Node, row: NodeCommand, reason: str) -> None:
    logger.error("operation.receipt_invalid node=%s run=%s reason=%s", node.name, row.pk, reason)
    record_word(
        actor=f"node:{node.name}",
        action="operation.receipt_invalid",
        target=node.runner_id or node.printed_id,
        detail={"run": str(row.pk), "reason": reason[:200]},
        op_id=row.op_id,
    )
