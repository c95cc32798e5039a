"""Counting for another gateway: the box's socket is here, the client is there."""

from __future__ import annotations

from core.limits import limits
from gateway.counting.boxes import exchange
from gateway.request.client import ClientConnection
from gateway.request.response import read_name
from nodes.links import Link
from nodes.session import OpenRequest
from nodes.states import TOKENIZE

_JSON = [(b"content-type", b"application/json")]


async def count_for_peer(client: ClientConnection, link: Link) -> None:
    """Pass a question on to the box and its answer back; 502 when there is none. Raises BodyTooLarge, ClientLeft."""
    body = await client.read_body(limits().gateway.count_body_bytes)
    headers = client.headers
    asked_ms = headers.get("x-muster-deadline-ms", "")
    most_ms = limits().gateway.count_node_ms
    deadline_ms = int(asked_ms) if asked_ms.isascii() and asked_ms.isdigit() and len(asked_ms) < 9 else most_ms
    request = OpenRequest(
        request_id=headers.get("x-request-id", "")[:80],
        attempt=1,
        model=read_name(headers, "x-muster-model", max_chars=200),
        path=TOKENIZE,
        body=body,
        headers={"content-type": "application/json"},
        is_streaming=False,
        deadline_ms=max(1, min(deadline_ms, most_ms)),
        tenant=read_name(headers, "x-muster-tenant", max_chars=80),
    )
    try:
        answer = await exchange(link, request) if TOKENIZE in link.endpoints.get(request.model, ()) else None
    except TimeoutError:
        answer = None
    if answer is None:
        client.respond(502, _JSON, b"{}")
    else:
        client.respond(answer[0], _JSON, answer[1])
