"""Commands for boxes that are called over HTTP: one call of the model-runner API each time, never a wait.

Such boxes are third-party programs. They know no (op_id, use): where the answer to a call is lost, nobody can tell whether the
operation was carried out, and that is what the run then says.
"""

from __future__ import annotations

import json
import logging
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from django.db.models import Q

from core.limits import limits
from governance.states import RunEvent
from nodes.addresses import build_request, resolve_direct_target
from nodes.delivery import TRY_AGAIN_CODES, finish_command, lose_run, note_running, send_back
from nodes.errors import NodeError
from nodes.models import Node, NodeCommand, Reach
from nodes.reports import clean_result
from wire import clock
from wire.optoken.canonical import TOKEN_MEMBER

if TYPE_CHECKING:
    import httpx

_PATHS = {"model-load": "/v1/models/load", "model-unload": "/v1/models/unload", "cache-flush": "/v1/cache/flush"}
_SPENT_CODES = frozenset({"op_token_refused", "op_token_expired"})

logger = logging.getLogger("muster.nodes")

Answer = tuple[int, dict[str, Any]]
"""HTTP status and JSON members."""


class BoxSilent(Exception):
    """The box gave no answer that can be used. ``was_sent``: it may have got the request."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message)
        self.was_sent = was_sent


def find_unattended() -> list[uuid.UUID]:
    """Return the commands of boxes called over HTTP that no task looks after any more."""
    now = clock.now()
    waiting = Q(
        state=NodeCommand.State.WAITING, updated_at__lte=now - timedelta(seconds=limits().nodes.call_unattended_s)
    ) & ~Q(token="")
    begun = Q(
        state__in=[NodeCommand.State.SENT, NodeCommand.State.RUNNING],
        updated_at__lte=now - timedelta(seconds=2 * limits().nodes.call_s),
    )
    rows = NodeCommand.objects.filter(waiting | begun, node__reach=Reach.DIRECT).order_by("updated_at")
    return list(rows.values_list("pk", flat=True)[: limits().nodes.call_batch])


def call_direct_box(run_id: uuid.UUID) -> bool:
    """Take one command one step further: hand it over, or ask how its load goes. Return whether to call again.

    Two tasks for one command do the work of one: each step is claimed first.
    """
    row = NodeCommand.objects.select_related("node").filter(pk=run_id, node__reach=Reach.DIRECT).first()
    if row is None or row.state == NodeCommand.State.ENDED:
        return False
    if row.state == NodeCommand.State.WAITING:
        return bool(row.token) and _hand_over(row)
    if not _claim(row, state=row.state):
        return False
    if row.task_id:
        return _poll(row)
    _lose(row, result={"error": "the answer of the box was lost"})
    return False


def _claim(row: NodeCommand, *, state: str) -> bool:
    """Whether this step is ours: nobody has touched the row since it was read."""
    now = clock.now()
    same = NodeCommand.objects.filter(pk=row.pk, state=row.state, updated_at=row.updated_at)
    if not same.update(state=state, sent_at=row.sent_at or now, updated_at=now):
        return False
    row.state, row.updated_at = state, now
    return True


def _hand_over(row: NodeCommand) -> bool:
    if row.token_expires_at is None or row.token_expires_at - clock.now() <= timedelta(
        seconds=limits().nodes.command_token_margin_s
    ):
        send_back(row, "its token ran out before the box could be reached")
        return False
    if not _claim(row, state=NodeCommand.State.SENT):
        return False
    path = _PATHS.get(row.operation)
    if path is None:  # asked for while the node dialled in
        words = f"{row.operation} takes no approval over HTTP; connect the node by its own session, then ask again"
        finish_command(row, RunEvent.FAIL, code="unknown_operation", message=words, result={})
        return False
    body = {**row.body, TOKEN_MEMBER: row.token}
    try:
        status, members = _call(row.node, "POST", path, body)
    except BoxSilent as silence:
        logger.warning("operation.box_silent node=%s reason=%s", row.node.name, silence)
        if silence.was_sent:
            _lose(row, result={"error": str(silence)[:300]})
        else:
            send_back(row, "the box could not be reached")
        return False
    return _take_answer(row, status, members)


def _take_answer(row: NodeCommand, status: int, members: dict[str, Any]) -> bool:
    task_id = members.get("taskId")
    if status == 202 and isinstance(task_id, str) and _is_plain(task_id):
        NodeCommand.objects.filter(pk=row.pk).update(task_id=task_id, updated_at=clock.now())
        note_running(row, stage=_text(members.get("stage")) or "loading", fraction=_number(members.get("progress")), eta_s=None)
        return True
    if status == 202:
        _lose(row, result={"error": "the box began, and named no task that can be asked for"})
        return False
    if 200 <= status < 300:
        finish_command(row, RunEvent.SUCCEED, result=clean_result(members))
        return False
    code, message = _read_error(members, status)
    if code in TRY_AGAIN_CODES and code not in _SPENT_CODES:
        send_back(row, f"the box refused it for now: {code}")
        return False
    finish_command(row, RunEvent.FAIL, code=code, message=message, result=clean_result(members))
    return False


def _poll(row: NodeCommand) -> bool:
    try:
        status, members = _call(row.node, "GET", f"{_PATHS['model-load']}/{row.task_id}", None)
    except BoxSilent as silence:
        logger.warning("operation.box_silent node=%s reason=%s", row.node.name, silence)
        return True
    if status == 404:
        _lose(row, result={"error": "the box no longer knows the task"})
        return False
    if status != 200:
        return True
    match members.get("status"):
        case "completed":
            finish_command(row, RunEvent.SUCCEED, result=clean_result(members))
        case "failed":
            code, message = _text(members.get("code")) or "model_load_failed", _text(members.get("error"))
            finish_command(row, RunEvent.FAIL, code=code, message=message, result=clean_result(members))
        case "interrupted":
            _lose(row, result=clean_result(members))
        case _:
            note_running(
                row,
                stage=_text(members.get("stage")),
                fraction=_number(members.get("progress")),
                eta_s=_number(members.get("eta")),
            )
            return True
    return False


def _lose(row: NodeCommand, *, result: dict[str, Any]) -> None:
    """End a command whose outcome nobody knows, with what the box says it has loaded."""
    try:
        _, members = _call(row.node, "GET", "/v1/capabilities", None)
        loaded = _list_loaded(members)
    except BoxSilent:
        loaded = []
    lose_run(row, result=result, loaded=loaded)


def _list_loaded(members: dict[str, Any]) -> list[str]:
    models = members.get("models")
    listed = models.get("loaded") if isinstance(models, dict) else None
    rows = [each for each in listed[:100] if isinstance(each, dict)] if isinstance(listed, list) else []
    return [name for name in (_text(each.get("id")) for each in rows) if name]


def _call(node: Node, method: str, path: str, body: dict[str, Any] | None) -> Answer:
    """Send one request to the address that the guard allows. Raises BoxSilent."""
    import httpx  # most processes call no node

    try:
        target, api_key = resolve_direct_target(node.public_base_url), node.read_api_key()
    except NodeError as error:
        raise BoxSilent(error.message, was_sent=False) from None
    try:
        with httpx.Client(timeout=limits().nodes.call_s, follow_redirects=False, trust_env=False) as client:
            response = client.send(build_request(client, target, method, path, api_key=api_key, body=body), stream=True)
            try:
                raw = _read(response)
            finally:
                response.close()
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise BoxSilent(type(error).__name__, was_sent=False) from None
    except httpx.HTTPError as error:
        raise BoxSilent(type(error).__name__, was_sent=True) from None
    try:
        members = json.loads(raw or b"{}")
    except ValueError:
        members = None
    if not isinstance(members, dict):
        raise BoxSilent(f"answered {response.status_code} with something that is no JSON object", was_sent=True)
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
    return _text(fields.get("code")) or f"http_{status}", _text(fields.get("message")) or f"The box answered {status}."


def _is_plain(task_id: str) -> bool:
    """Whether a task id can stand in a path as it is."""
    return (
        0 < len(task_id) <= 80 and all(c.isascii() and (c.isalnum() or c in "-_.") for c in task_id) and set(task_id) != {"."}
    )


def _text(value: object) -> str:
    return "".join(c if c.isprintable() else " " for c in value[:500]) if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
