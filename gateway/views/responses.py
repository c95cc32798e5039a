"""What a client may do with an answer of /v1/responses that was kept: read it, list its input, delete it.

A kept answer belongs to its tenant: every key of the tenant may do this, and to everybody else it does not exist. Answers
may have megabytes, so each of these counts against the rate of its key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import parse_qs

import msgspec

from core.db.threads import run_in_database
from core.limits import limits
from gateway.errors import BadRequest, RecordsUnavailable, ResponseNotFound
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection
from gateway.request.response import Application
from gateway.services.responses import delete_response, get_response, list_input_items, require_response
from gateway.values import Caller
from gateway.views.endpoints import make_endpoint
from wire.ids import format_id, new_uuid7

ROOT = "v1/responses/(?P<response_id>[^/]+)"
NOT_KEPT_HERE = (
    "There is no kept response of that id: answers are not kept for this tenant; an operator can allow it on the tenant's page."
)
T = TypeVar("T")


def make_response_routes(runtime: GatewayRuntime) -> list[tuple[str, Application]]:
    """Return the patterns of the routes below /v1/responses, anchors left out, with their applications."""
    views = ResponseViews(runtime)
    return [
        (ROOT, make_endpoint(runtime, {"GET": views.show, "HEAD": views.show, "DELETE": views.delete})),
        (f"{ROOT}/cancel", make_endpoint(runtime, {"POST": views.cancel})),
        (f"{ROOT}/input_items", make_endpoint(runtime, {"GET": views.list_input, "HEAD": views.list_input})),
    ]


class ResponseViews:
    """Endpoints for kept answers; each needs a client key."""

    def __init__(self, runtime: GatewayRuntime) -> None:
        self._runtime = runtime

    async def show(self, client: ClientConnection) -> None:
        """``GET /v1/responses/{id}``: the object as it was sent."""
        caller, response_id, query = await self._read(client)
        if query.get("stream", "false").lower() not in {"false", "0", ""}:
            raise BadRequest("A kept response is sent whole; leave stream out.", param="stream")
        _send(client, await _ask(caller, lambda: get_response(tenant=caller.tenant, response_id=response_id)))

    async def delete(self, client: ClientConnection) -> None:
        """``DELETE /v1/responses/{id}``."""
        caller, response_id, _ = await self._read(client)
        await _ask(caller, lambda: delete_response(tenant=caller.tenant, response_id=response_id))
        _send(client, msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))

    async def cancel(self, client: ClientConnection) -> None:
        """``POST /v1/responses/{id}/cancel``: refused, because only answers in the background can be cancelled."""
        caller, response_id, _ = await self._read(client)
        await _ask(caller, lambda: require_response(tenant=caller.tenant, response_id=response_id))
        raise BadRequest("Only responses made with background: true can be cancelled, and this gateway makes none.")

    async def list_input(self, client: ClientConnection) -> None:
        """``GET /v1/responses/{id}/input_items``: a page of the turn's input."""
        caller, response_id, query = await self._read(client)
        limit, after, order = _read_limit(query), query.get("after", ""), query.get("order", "desc")

        def ask() -> bytes:
            return list_input_items(tenant=caller.tenant, response_id=response_id, after=after, limit=limit, order=order)

        _send(client, await _ask(caller, ask))

    async def _read(self, client: ClientConnection) -> tuple[Caller, str, dict[str, str]]:
        caller = await self._runtime.keys.identify(client.headers, address=client.address, scope=client.scope)
        # A kept answer may have megabytes.
        self._runtime.limiter.take(caller.key_id, caller.requests_per_minute)
        query = parse_qs(client.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        return (
            caller,
            str(client.scope["url_route"]["kwargs"]["response_id"]),
            {name: last for name, (*_, last) in query.items()},
        )


async def _ask(caller: Caller, ask: Callable[[], T]) -> T:
    """Return what the database says. Raises RecordsUnavailable when it does not, and whatever ``ask`` raises."""
    try:
        async with asyncio.timeout(limits().gateway.kept_read_s):
            return await run_in_database(ask)
    except TimeoutError:
        raise RecordsUnavailable("Kept responses cannot be reached now; please retry", retry_after_s=2) from None
    except ResponseNotFound:
        if caller.stores_responses:
            raise
        raise ResponseNotFound(NOT_KEPT_HERE) from None


def _read_limit(query: dict[str, str]) -> int:
    text = query.get("limit", "")
    if not text:
        return limits().gateway.input_default_items
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise BadRequest("limit must be a number.", param="limit")
    return int(text)


def _send(client: ClientConnection, body: bytes) -> None:
    request_id = format_id("req", new_uuid7()).encode()
    client.respond(200, [(b"content-type", b"application/json"), (b"x-request-id", request_id)], body)
