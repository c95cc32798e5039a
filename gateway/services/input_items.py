"""A page of the input of a kept answer, in the shape of OpenAI's lists (API reference, "List input items"). No database."""

from __future__ import annotations

from typing import Any

import msgspec

from core.limits import limits
from gateway.errors import BadRequest

_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


class _Head(msgspec.Struct):
    """What is read of every item. The types are open, because clients may send null or anything else."""

    id: object = None
    type: object = None


_heads = msgspec.json.Decoder(_Head)
_lists = msgspec.json.Decoder(list[msgspec.Raw])


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
    """Return the item as clients read it back: with id and type, and a text of a message as a list of parts."""
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
