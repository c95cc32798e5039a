"""The input of a request as items with ids, for surfaces that keep them."""

from __future__ import annotations

import msgspec

from gateway.dialects.responses.credentials import hide_item_credentials
from gateway.dialects.responses.fields import read_request
from gateway.dialects.responses.items import Item, item_kind
from wire.ids import format_id, new_uuid7

_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}


def list_input_items(body: bytes) -> list[bytes]:
    """Return the request's own input as JSON items, each with ``id`` and ``type``; text is one message of the user.

    References are left out: what they name is kept already. Raises BadRequest for a body that cannot be read.
    """
    request, _fields = read_request(body)
    given: list[Item] = []
    if isinstance(request.input, str):
        given = [{"type": "message", "role": "user", "content": request.input}]
    elif request.input is not None:
        given = request.input
    kinds = [(item, item_kind(item)) for item in given]
    return [msgspec.json.encode(_complete(item, kind)) for item, kind in kinds if kind != "item_reference"]


def _complete(item: Item, kind: str) -> Item:
    given = item.get("id")
    new_id = given if isinstance(given, str) and given else format_id(_PREFIXES.get(kind, "item"), new_uuid7())
    complete: Item = {**hide_item_credentials(item), "id": new_id, "type": kind}
    if kind == "message":
        complete.setdefault("status", "completed")
        content = item.get("content")
        if isinstance(content, str):
            is_said = item.get("role") == "assistant"
            part: Item = {"type": "output_text", "text": content, "annotations": []} if is_said else _say(content)
            complete["content"] = [part]
    return complete


def _say(text: str) -> Item:
    return {"type": "input_text", "text": text}
