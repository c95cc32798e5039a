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

from django.db import transaction

from core.limits import limits
from governance.audit import record_word
from governance.operations.freezes import read_freeze
from governance.operations.lookup import find_operation
from governance.operations.runs import (
    NodeRun,
    claim_contact,
    find_run_of,
    finish_run,
    list_node_runs,
    list_nodes_with_runs,
    note_progress,
    requeue_run,
)
from governance.states import RunEvent, RunState
from nodes.models import Node, NodePresence
from wire import clock
from wire.bridge import OpStatus
from wire.ids import parse_id
from wire.optoken.approval import ApprovalError, decode_bytes, read_statement
from wire.optoken.receipt import Receipt, ReceiptError, digest_result, read_receipt

FINAL_STATES = frozenset({"succeeded", "failed", "refused", "interrupted"})
TRY_AGAIN_CODES = frozenset({"unavailable", "busy", "leaving", "op_token_expired", "operation_running", "operation_limit"})
"""Refusals that say nothing against the operation: it is sent again, with a new token."""
RECEIPT_INVALID = "receipt_invalid"

logger = logging.getLogger("muster.nodes")


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
    # Few nodes have operations under way, and thousands may be linked: the database is not told of all these each time.
    wanted = linked.keys() & list_nodes_with_runs()
    if not wanted:
        return []
    now, most = clock.now(), limits().nodes.command_batch
    runs = list_node_runs(wanted, most=most, is_sent=False)
    if runs and read_freeze() is not None:
        runs = list_node_runs(wanted, most=most, is_sent=True)
    found = (_plan(run, since=linked[run.node_id], now=now, gateway_id=gateway_id) for run in runs)
    return [delivery for delivery in found if delivery is not None]


def read_order(run: NodeRun) -> dict[str, object] | None:
    """Return what a node is sent beside the token: what people signed. None when the run goes back to be verified anew."""
    margin = timedelta(seconds=limits().nodes.command_token_margin_s)
    if run.token_expires_at is None or run.token_expires_at - clock.now() <= margin:
        requeue_run(run_id=run.run_id, reason="its token ran out before the node could be reached")
        return None
    try:
        return dict(read_statement(run.statement).params)
    except ApprovalError:
        requeue_run(run_id=run.run_id, reason="its statement cannot be read")
        return None


def _plan(run: NodeRun, *, since: datetime, now: datetime, gateway_id: uuid.UUID) -> Delivery | None:
    if run.is_waiting:
        params = read_order(run)
        if params is None or not claim_contact(run, gateway_id=gateway_id):
            return None
        return Send(run.node_id, run.op_id, run.use, run.operation, params, run.token)
    # What was sent over a socket of ours that is gone may never have arrived. Of another gateway's sockets nothing is known.
    contact_at = run.contact_at or since
    is_cut_off = run.gateway_id == gateway_id and contact_at < since
    if not is_cut_off and now - contact_at < timedelta(seconds=limits().nodes.command_quiet_s):
        return None
    return Ask(run.node_id, run.op_id, run.use) if claim_contact(run, gateway_id=gateway_id) else None


# What nodes say


@transaction.atomic
def store_status(*, node_id: uuid.UUID, status: OpStatus) -> bool:
    """Store what a node said of an operation that is for it; False when there is no such run, or it has ended.

    A last word is passed on however late it comes: governance knows whether it still waits for one.
    """
    op_id = parse_id("op", status.op_id)
    run = None if op_id is None else find_run_of(node_id, op_id, status.use)
    node = None if run is None else Node.objects.filter(pk=node_id).first()
    if node is None or run is None:
        logger.debug("node.unknown_operation node_id=%s state=%s", node_id, status.state)
        return False
    match status.state:
        case "running" if not run.has_ended:
            note_progress(run_id=run.run_id, stage=status.stage, fraction=status.fraction, eta_s=status.eta_s)
        case "succeeded":
            _finish(run, node, status, RunEvent.SUCCEED)
        case "failed":
            _finish(run, node, status, RunEvent.FAIL)
        case "refused" if status.code in TRY_AGAIN_CODES:
            requeue_run(run_id=run.run_id, reason=f"the node refused it for now: {status.code}")
        case "refused":
            finish_run(
                run_id=run.run_id,
                event=RunEvent.FAIL,
                code=status.code or "refused",
                message=status.message,
                result=status.result,
            )
        case "interrupted":
            lose_run(run, node, result=status.result, receipt=_check_end(run, node, status)[1])
        case "unknown" if not run.has_ended:
            _take_unknown(run, node)
        case _:
            return False
    return not run.has_ended


def lose_run(
    run: NodeRun, node: Node, *, result: Mapping[str, object], receipt: str = "", loaded: list[str] | None = None
) -> None:
    """End a run that was cut off, with what the node has loaded now as its result. ``loaded`` None: as it last said.

    Without effect on one that is about to be sent again: the node then says so again.
    """
    loaded = find_loaded(node.pk) if loaded is None else loaded
    what = "The node was cut off while it worked."
    finish_run(run_id=run.run_id, event=RunEvent.LOSE, code="interrupted", message=what)
    finish_run(
        run_id=run.run_id,
        event=RunEvent.RESOLVE,
        code="interrupted",
        message=f"{what} Loaded on it now: {', '.join(loaded) or 'nothing'}"[:500],
        result={**result, "loadedNow": loaded},
        receipt=receipt,
        receipt_key=node.box_key if receipt else "",
    )


def find_loaded(node_id: uuid.UUID) -> list[str]:
    """Return the models that a node said it has loaded, by name."""
    replicas = NodePresence.objects.filter(node_id=node_id).values_list("replicas", flat=True).first() or []
    return sorted({str(replica.get("model")) for replica in replicas if replica.get("state") == "loaded"})


def _take_unknown(run: NodeRun, node: Node) -> None:
    if run.state is RunState.EXECUTING:
        # It had begun there, and the node forgot: nobody can tell how far it came.
        lose_run(run, node, result={})
    elif run.sent_at is not None and clock.now() - run.sent_at >= timedelta(seconds=limits().nodes.command_unheard_s):
        requeue_run(run_id=run.run_id, reason="the node never heard of it")


def _finish(run: NodeRun, node: Node, status: OpStatus, event: RunEvent) -> None:
    code, receipt = _check_end(run, node, status)
    finish_run(
        run_id=run.run_id,
        event=event,
        code=code,
        message=status.message,
        result=status.result,
        receipt=receipt,
        receipt_key=node.box_key if receipt else "",
    )


def _check_end(run: NodeRun, node: Node, status: OpStatus) -> tuple[str, str]:
    """Return the code and the receipt to keep: one that the node signed about this very end, and that auditors will believe.

    Only at L2 is a node expected to bring one; below, a token names no statement that it could sign for.
    """
    if not status.receipt and node.op_level != "L2":
        return status.code, ""
    try:
        receipt = read_receipt(status.receipt, decode_bytes(node.box_key))
    except (ReceiptError, ApprovalError, ValueError) as error:
        reason = str(error)
    else:
        reason = _find_fault(receipt, run, node, status)
        if not reason:
            is_proof = node.op_level == "L2" or _names_statement(receipt, run)
            return status.code, status.receipt if is_proof else ""
    _report_receipt(node, run, reason)
    return RECEIPT_INVALID, ""


def _find_fault(receipt: Receipt, run: NodeRun, node: Node, status: OpStatus) -> str:
    """Return why a receipt is not about this end of this run; "" = it is."""
    if node.op_level == "L2" and receipt.runner_id != node.runner_id:
        return "it is of another node"
    if node.op_level == "L2" and not _names_statement(receipt, run):
        return "it is about another statement"
    if (receipt.op_id, receipt.use, receipt.operation) != (run.op_id, run.use, run.operation):
        return "it is about another operation"
    if receipt.outcome != status.state:
        return "it says another outcome"
    return "" if receipt.result_digest == digest_result(status.result) else "it is about another result"


def _names_statement(receipt: Receipt, run: NodeRun) -> bool:
    """Whether a receipt is for a node and the statement that were approved: one that is not spoils the evidence."""
    op_id = parse_id("op", run.op_id)
    targets = set() if op_id is None else {each.target for each in find_operation(op_id).runs.all()}
    return receipt.runner_id in targets and receipt.statement_digest == run.digest


def _report_receipt(node: Node, run: NodeRun, reason: str) -> None:
    logger.error("operation.receipt_invalid node=%s run=%s reason=%s", node.name, run.run_id, reason)
    record_word(
        actor=f"node:{node.name}",
        action="operation.receipt_invalid",
        target=node.runner_id or node.printed_id,
        detail={"run": str(run.run_id), "reason": reason[:200]},
        op_id=run.op_id,
    )
