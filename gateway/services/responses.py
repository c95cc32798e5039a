"""Kept answers of /v1/responses: written once, read by their tenant until they expire, then deleted.

All functions run in a database thread. Times are the database's, so that every gateway agrees on what has expired.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from django.db import connection, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from core.limits import limits
from gateway.errors import BadRequest, ResponseNotFound
from gateway.models import StoredResponse
from gateway.services.errors import ResponseNotKept
from gateway.services.tenants import get_tenant
from governance.audit import record_event
from wire import clock

_ID = re.compile(r"resp_[A-Za-z0-9_-]{1,75}")

# The tenant's row is locked for sharing: once an operator's change of it is committed, no answer slips in behind it.
_KEEP = """
INSERT INTO gateway_storedresponse
       (id, tenant_id, key_id, model, previous_id, input_items, body, created_at, expires_at)
SELECT %(id)s, tenant.id, %(key_id)s, %(model)s, %(previous_id)s, %(input_items)s, %(body)s,
       statement_timestamp(),
       statement_timestamp() + make_interval(days => LEAST(%(kept_days)s, tenant.responses_kept_days))
  FROM gateway_tenant AS tenant
 WHERE tenant.name = %(tenant)s AND tenant.stores_responses
   FOR SHARE OF tenant
    ON CONFLICT (id) DO NOTHING
"""

# The walk reads links and sizes alone; contents are fetched only for a whole chain within the bounds.
_HISTORY = """
WITH RECURSIVE chain AS (
    SELECT newest.id, newest.tenant_id, newest.previous_id, 1 AS turn,
           octet_length(newest.input_items)::bigint + octet_length(newest.body) AS size_bytes
      FROM gateway_storedresponse AS newest
      JOIN gateway_tenant AS tenant ON tenant.id = newest.tenant_id
     WHERE newest.id = %(id)s AND tenant.name = %(tenant)s AND newest.expires_at > statement_timestamp()
     UNION ALL
    SELECT earlier.id, earlier.tenant_id, earlier.previous_id, chain.turn + 1,
           chain.size_bytes + octet_length(earlier.input_items) + octet_length(earlier.body)
      FROM chain
      JOIN gateway_storedresponse AS earlier ON earlier.id = chain.previous_id AND earlier.tenant_id = chain.tenant_id
     WHERE earlier.expires_at > statement_timestamp()
       AND chain.turn <= %(max_turns)s AND chain.size_bytes <= %(max_bytes)s
), whole AS (
    SELECT bool_or(previous_id = '') AND max(turn) <= %(max_turns)s AND max(size_bytes) <= %(max_bytes)s AS fits FROM chain
)
SELECT chain.turn, chain.size_bytes, chain.previous_id, kept.input_items, kept.body
  FROM chain
 CROSS JOIN whole
  LEFT JOIN gateway_storedresponse AS kept ON kept.id = chain.id AND whole.fits
 ORDER BY chain.turn DESC
"""

_DELETE_EXPIRED = """
DELETE FROM gateway_storedresponse
 WHERE id IN (
       SELECT id FROM gateway_storedresponse
        WHERE expires_at <= statement_timestamp()
        LIMIT %s
          FOR UPDATE SKIP LOCKED
       )
"""


class _Answer(msgspec.Struct):
    id: str
    output: list[msgspec.Raw]


_answers = msgspec.json.Decoder(_Answer)
_lists = msgspec.json.Decoder(list[msgspec.Raw])
_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])


def keep_response(
    *,
    tenant: str,
    key_id: uuid.UUID,
    kept_days: int,
    model: str,
    previous_id: str,
    input_items: Sequence[Any],  # Any: JSON values, or JSON objects as bytes
    body: bytes,
    give_up_at: float | None = None,
) -> None:
    """Store a response object under its own id, for ``kept_days`` or the tenant's days, whichever are fewer.

    ``body``: the object as it is sent. Doing so again changes nothing. ``give_up_at`` (``clock.monotonic`` seconds): later than
    that nothing is written, so that a caller who waited a little longer knows that an answer it gave up on is not kept.
    Raises ResponseNotKept: the tenant does not allow it, the id is another tenant's, or the turn is larger than could be read
    back. DatabaseError when the database refuses or time is up.
    """
    response_id, items = _check_turn(input_items, body)
    parameters: dict[str, str | int | bytes | uuid.UUID] = {
        "id": response_id,
        "tenant": tenant,
        "key_id": key_id,
        "kept_days": kept_days,
        "model": model,
        "previous_id": previous_id,
        "input_items": items,
        "body": body,
    }
    with transaction.atomic(), connection.cursor() as cursor:
        if give_up_at is not None:
            _limit_statements(give_up_at)
        cursor.execute(_KEEP, parameters)
        is_kept = cursor.rowcount == 1
        if give_up_at is not None:
            _measure_left(give_up_at)  # the limit ran from when the statement began: this process may have stood still before
    if not is_kept and not StoredResponse.objects.filter(pk=response_id, tenant__name=tenant).exists():
        raise ResponseNotKept(f"Answers are not kept for the tenant {tenant}, or the id belongs to another one.", param="store")


def load_history(*, tenant: str, response_id: str) -> list[bytes]:
    """Return the items of the conversation that ends with a response, as JSON, oldest first, in one query.

    Raises ResponseNotFound when the response or one before it is deleted, expired, another tenant's or was never kept, and
    BadRequest for more than ``kept_turns`` turns or ``kept_bytes``.
    """
    param = "previous_response_id"
    _check_id(response_id, param=param)
    most_turns, most_bytes = limits().gateway.kept_turns, limits().gateway.kept_bytes
    with connection.cursor() as cursor:
        bounds = {"max_turns": most_turns, "max_bytes": most_bytes}
        cursor.execute(_HISTORY, {"id": response_id, "tenant": tenant, **bounds})
        rows = cursor.fetchall()
    if not rows:
        raise _make_not_found(response_id, param=param)
    turns, size_bytes, missing_id = rows[0][:3]
    if turns > most_turns or size_bytes > most_bytes:
        raise BadRequest(
            f"The conversation is longer than can be continued: at most {most_turns} turns and {most_bytes} bytes. "
            "Start a new one with what is still needed as input.",
            param=param,
        )
    if missing_id:
        raise ResponseNotFound(
            f"The conversation before '{response_id}' is not whole: '{missing_id}' was deleted or has expired. "
            "Send the whole conversation as input.",
            param=param,
        )
    items: list[bytes] = []
    for _, _, _, input_items, body in rows:
        items += [bytes(item) for item in _lists.decode(input_items)]
        items += [bytes(item) for item in _answers.decode(body).output]
    return items


def get_response(*, tenant: str, response_id: str) -> bytes:
    return _read_column(tenant, response_id, "body")


def list_input_items(*, tenant: str, response_id: str, after: str, limit: int, order: str) -> bytes:
    """Return a page of the input of one kept turn, without that of the turns before it, as a list object.

    The other arguments and BadRequest are those of ``render_input_page``. Raises ResponseNotFound too.
    """
    items = _read_column(tenant, response_id, "input_items")
    return render_input_page(items, response_id=response_id, after=after, limit=limit, order=order)


def require_response(*, tenant: str, response_id: str) -> None:
    if not _find(tenant, response_id).exists():
        raise _make_not_found(response_id)


def delete_response(*, tenant: str, response_id: str) -> None:
    """Delete a kept answer and its input. Turns that followed it cannot be continued any more. Raises ResponseNotFound."""
    deleted, _ = _find(tenant, response_id).delete()
    if not deleted:
        raise _make_not_found(response_id)


@transaction.atomic
def forget_responses(*, tenant: str, actor: str) -> int:
    """Delete every kept answer of a tenant, and return how many there were. Raises TenantNotFound."""
    row = get_tenant(tenant)
    deleted, _ = StoredResponse.objects.filter(tenant=row).delete()
    record_event(actor=actor, action="tenant.forget_responses", target=row.name, detail={"responses": deleted})
    return deleted


def delete_expired_responses() -> int:
    """Delete what has expired, in batches, and return how many. Nobody could read it any more; safe to run several at once."""
    total = 0
    while True:
        with connection.cursor() as cursor:
            cursor.execute(_DELETE_EXPIRED, [limits().gateway.kept_batch])
            deleted = int(cursor.rowcount)
        total += deleted
        if deleted < limits().gateway.kept_batch:
            return total


def _check_turn(input_items: Sequence[Any], body: bytes) -> tuple[str, bytes]:
    """Return the id of a response object and its input as a JSON array. Raises ResponseNotKept."""
    try:
        parts = [bytes(item) if isinstance(item, bytes | msgspec.Raw) else msgspec.json.encode(item) for item in input_items]
        items = b"[" + b",".join(parts) + b"]"
        _objects.decode(items)
        answer = _answers.decode(body)
    except msgspec.MsgspecError as error:
        raise ResponseNotKept("This is no response object with an input that could be read back.") from error
    if not _ID.fullmatch(answer.id):
        raise ResponseNotKept("The id of a kept response is 'resp_' and 1 to 75 letters, digits, '_' or '-'.", param="id")
    most_bytes = limits().gateway.kept_bytes
    if len(items) + len(body) > most_bytes:
        raise ResponseNotKept(f"The turn has more than the {most_bytes} bytes that could be continued.", param="input")
    return answer.id, items


def _measure_left(give_up_at: float) -> int:
    left_ms = int((give_up_at - clock.monotonic()) * 1000)
    if left_ms <= 0:
        raise ResponseNotKept("The database was too slow; nothing was written.")
    return left_ms


def _limit_statements(give_up_at: float) -> None:
    left_ms = _measure_left(give_up_at)
    with connection.cursor() as cursor:
        cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(left_ms)])


def _find(tenant: str, response_id: str) -> QuerySet[StoredResponse]:
    _check_id(response_id)
    return StoredResponse.objects.filter(pk=response_id, tenant__name=tenant, expires_at__gt=Now())


def _read_column(tenant: str, response_id: str, column: str) -> bytes:
    content = _find(tenant, response_id).values_list(column, flat=True).first()
    if content is None:
        raise _make_not_found(response_id)
    return bytes(content)


def _check_id(response_id: str, *, param: str | None = None) -> None:
    if not _ID.fullmatch(response_id):
        raise ResponseNotFound("There is no kept response of that id: ids begin with 'resp_'.", param=param)


def _make_not_found(response_id: str, *, param: str | None = None) -> ResponseNotFound:
    return ResponseNotFound(
        f"There is no kept response '{response_id}': it was made with store false, was deleted, has expired, or never was.",
        param=param,
    )


_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class _Head(msgspec.Struct):
    """What is read of every item. The types are open, because clients may send null or anything else."""

    id: object = None
    type: object = None


_heads = msgspec.json.Decoder(_Head)


def render_input_page(items: bytes, *, response_id: str, after: str, limit: int, order: str) -> bytes:
    """Return the list object for a JSON array of input items. ``after``: id of the last item of the page before, or empty.

    An item without an id gets one that says where it stands, so that every page can be asked for.
    Raises BadRequest for a limit outside 1 to ``input_items``, an order other than "asc" and "desc", and an unknown ``after``.
    """
    if not 1 <= limit <= limits().gateway.input_items:
        raise BadRequest(f"limit must be between 1 and {limits().gateway.input_items}.", param="limit")
    if order not in {"asc", "desc"}:
        raise BadRequest("order must be 'asc' or 'desc'.", param="order")
    rows = [(_name_item(item, response_id, position), item) for position, item in enumerate(_lists.decode(items))]
    if order == "desc":
        rows.reverse()
    # The last of several equal ids, so that a client which asks page by page always comes to an end.
    start = next((place + 1 for place in range(len(rows) - 1, -1, -1) if rows[place][0] == after), 0) if after else 0
    if after and not start:
        raise BadRequest("after names no input item of this response.", param="after")
    page = rows[start : start + limit]
    return msgspec.json.encode(
        {
            "object": "list",
            "data": [_render_item(item, name) for name, item in page],
            "first_id": page[0][0] if page else None,
            "last_id": page[-1][0] if page else None,
            "has_more": start + limit < len(rows),
        }
    )


def _name_item(item: msgspec.Raw, response_id: str, position: int) -> str:
    head = _heads.decode(item)
    if isinstance(head.id, str) and head.id:
        return head.id
    prefix = _ID_PREFIXES.get(str(head.type or "message"), "item")
    return f"{prefix}_{response_id.removeprefix('resp_')}_{position}"


def _render_item(item: msgspec.Raw, name: str) -> dict[str, Any]:  # Any: JSON
    fields: dict[str, Any] = {**msgspec.json.decode(item), "id": name}
    fields["type"] = fields.get("type") or "message"
    if fields["type"] != "message":
        return fields
    if isinstance(fields.get("content"), str):
        part: dict[str, object] = {"type": "input_text", "text": fields["content"]}
        if fields.get("role") == "assistant":
            part = {"type": "output_text", "text": fields["content"], "annotations": []}
        fields["content"] = [part]
    return {"status": "completed", **fields}
