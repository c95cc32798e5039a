"""Commands for nodes that are called over HTTP: one call of the model-runner API each time, never a wait.

Such nodes are third-party programs. They know no (op_id, use): where the answer to a call is lost, nobody can tell whether the
operation was carried out, and that is what the run then says.
"""

from __future__ import annotations

import json
import logging
import uuid
from contextlib import closing
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from core.limits import limits
from governance.operations.runs import (
    NodeRun,
    RunEnd,
    claim_contact,
    find_node_run,
    finish_run,
    list_unattended,
    note_progress,
    requeue_run,
    wake_worker,
)
from governance.states import RunEvent
from nodes.addresses import build_request, make_trust, resolve_direct_target
from nodes.channel import TRY_AGAIN_CODES, lose_run, read_order
from nodes.errors import NodeError
from nodes.models import Node, Reach
from nodes.reports import clean_result
from nodes.services.certificates import find_authorities
from wire import clock
from wire.optoken.op_token import TOKEN_MEMBER

if TYPE_CHECKING:
    import httpx

_PATHS = {"model-load": "/v1/models/load", "model-unload": "/v1/models/unload", "cache-flush": "/v1/cache/flush"}
_SPENT_CODES = frozenset({"op_token_refused", "op_token_expired"})

TASK_NAME = "nodes.tasks.call_box"

logger = logging.getLogger("muster.nodes")

Answer = tuple[int, dict[str, Any]]
"""HTTP status and JSON members."""


class NodeSilent(Exception):
    """The node gave no answer that can be used. ``was_sent``: it may have got the request."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


def find_unattended() -> list[uuid.UUID]:
    """Return the runs on nodes called over HTTP that no task looks after any more."""
    now, bounds = clock.now(), limits().nodes
    return list_unattended(
        list(Node.objects.filter(reach=Reach.DIRECT, agent_session=None).values_list("pk", flat=True)),
        unsent_since=now - timedelta(seconds=bounds.call_unattended_s),
        silent_since=now - timedelta(seconds=2 * bounds.call_s),
        most=bounds.call_batch,
    )


def call_direct_node(run_id: uuid.UUID) -> bool:
    """Take one run one step further: hand it over, or ask how its load goes. Return whether to call again.

    Two tasks for one run do the work of one: each step is claimed first.
    """
    run = find_node_run(run_id)
    node = None if run is None else Node.objects.filter(pk=run.node_id, reach=Reach.DIRECT, agent_session=None).first()
    if run is None or node is None or run.has_ended:
        return False
    if run.is_waiting:
        return _hand_over(run, node)
    if run.sent_at is None or not claim_contact(run):
        return False
    if run.task_id:
        return _poll(run, node)
    _lose(run, node, result={"error": "the answer of the node was lost"})
    return False


def _hand_over(run: NodeRun, node: Node) -> bool:
    params = read_order(run)
    if params is None or not claim_contact(run):
        return False
    path = _PATHS.get(run.operation)
    if path is None:  # asked for while the node dialled in
        message = f"{run.operation} takes no approval over HTTP; connect the node by its own session, then ask again"
        finish_run(run.run_id, RunEnd(RunEvent.FAIL, "unknown_operation", message))
        return False
    try:
        status, members = _call(node, "POST", path, {**params, TOKEN_MEMBER: run.token})
    except NodeSilent as silence:
        logger.warning("operation.node_silent node=%s reason=%s", node.name, silence)
        if silence.was_sent:
            _lose(run, node, result={"error": str(silence)[:300]})
        else:
            requeue_run(run_id=run.run_id, reason="the node could not be reached")
        return False
    return _take_answer(run, node, status, members)


def _take_answer(run: NodeRun, node: Node, status: int, members: dict[str, Any]) -> bool:
    task_id = members.get("taskId")
    if status == 202 and isinstance(task_id, str) and _is_plain(task_id):
        fraction = _number(members.get("progress"))
        stage = _text(members.get("stage")) or "loading"
        note_progress(run_id=run.run_id, stage=stage, fraction=fraction, eta_s=None, task_id=task_id)
        return True
    if status == 202:
        _lose(run, node, result={"error": "the node began, and named no task that can be asked for"})
        return False
    if 200 <= status < 300:
        finish_run(run.run_id, RunEnd(RunEvent.SUCCEED, result=clean_result(members)))
        return False
    code, message = _read_error(members, status)
    if code in TRY_AGAIN_CODES and code not in _SPENT_CODES:
        requeue_run(run_id=run.run_id, reason=f"the node refused it for now: {code}")
        return False
    finish_run(run.run_id, RunEnd(RunEvent.FAIL, code, message, clean_result(members)))
    return False


def _poll(run: NodeRun, node: Node) -> bool:
    try:
        status, members = _call(node, "GET", f"{_PATHS['model-load']}/{run.task_id}", None)
    except NodeSilent as silence:
        logger.warning("operation.node_silent node=%s reason=%s", node.name, silence)
        return True
    if status == 404:
        _lose(run, node, result={"error": "the node no longer knows the task"})
        return False
    if status != 200:
        return True
    match members.get("status"):
        case "completed":
            finish_run(run.run_id, RunEnd(RunEvent.SUCCEED, result=clean_result(members)))
        case "failed":
            code, message = _text(members.get("code")) or "model_load_failed", _text(members.get("error"))
            finish_run(run.run_id, RunEnd(RunEvent.FAIL, code, message, clean_result(members)))
        case "interrupted":
            _lose(run, node, result=clean_result(members))
        case _:
            stage, fraction = _text(members.get("stage")), _number(members.get("progress"))
            note_progress(run_id=run.run_id, stage=stage, fraction=fraction, eta_s=_number(members.get("eta")))
            return True
    return False


def _lose(run: NodeRun, node: Node, *, result: dict[str, Any]) -> None:
    # Nobody knows the outcome, so the run says what the node has loaded.
    try:
        _, members = _call(node, "GET", "/v1/capabilities", None)
        loaded = _list_loaded(members)
    except NodeSilent:
        loaded = []
    lose_run(run, node, result=result, loaded=loaded)


def _list_loaded(members: dict[str, Any]) -> list[str]:
    models = members.get("models")
    listed = models.get("loaded") if isinstance(models, dict) else None
    rows = [each for each in listed[:100] if isinstance(each, dict)] if isinstance(listed, list) else []
    return [name for name in (_text(each.get("id")) for each in rows) if name]


def _call(node: Node, method: str, path: str, body: dict[str, Any] | None) -> Answer:
    import httpx  # most processes call no node

    try:
        target, api_key = resolve_direct_target(node.public_base_url), node.read_api_key()
        authorities = find_authorities([node.public_base_url])
    except NodeError as error:
        raise NodeSilent(error.message, was_sent=False) from None
    try:
        verify = make_trust(authorities)
        with httpx.Client(timeout=limits().nodes.call_s, follow_redirects=False, trust_env=False, verify=verify) as client:
            request = build_request(client, target, method, path, api_key=api_key, body=body)
            with closing(client.send(request, stream=True)) as response:
                raw = _read(response)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise NodeSilent(type(error).__name__, was_sent=False) from None
    except httpx.HTTPError as error:
        raise NodeSilent(type(error).__name__, was_sent=True) from None
    try:
        members = json.loads(raw or b"{}")
    except ValueError:
        members = None
    if not isinstance(members, dict):
        raise NodeSilent(f"answered {response.status_code} with something that is no JSON object", was_sent=True)
    return response.status_code, members


def _read(response: httpx.Response) -> bytes:
    import httpx

    raw = bytearray()
    until = clock.monotonic() + limits().nodes.call_s
    for piece in response.iter_bytes():
        raw += piece
        if len(raw) > limits().nodes.call_answer_bytes or clock.monotonic() > until:
            raise httpx.ReadError("the answer is too long, or too slow")
    return bytes(raw)


def _read_error(members: dict[str, Any], status: int) -> tuple[str, str]:
    error = members.get("error")
    fields = error if isinstance(error, dict) else {}
    return _text(fields.get("code")) or f"http_{status}", _text(fields.get("message")) or f"The node answered {status}."


def _is_plain(task_id: str) -> bool:
    # It stands in a path as it is.
    return (
        0 < len(task_id) <= 80 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in task_id) and set(task_id) != {"."}
    )


def _text(value: object) -> str:
    return "".join(c if c.isprintable() else " " for c in value[:500]) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def schedule_call(run_id: uuid.UUID) -> None:
    """Have a worker take the command one step further, once the transaction is committed."""
    wake_worker(run_id, task=TASK_NAME, life_s=limits().nodes.call_task_s)
