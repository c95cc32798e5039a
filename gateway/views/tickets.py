"""``POST /v1/tickets``: a caller asks for a ticket to a node."""

from __future__ import annotations

import msgspec

from gateway.dialects.surface import DEFAULT_SURFACE
from gateway.errors import ClientLeft, GatewayError
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection
from gateway.request.response import Application, id_headers, send_error
from gateway.request.tickets import GivenTicket
from gateway.values import Header
from gateway.views.endpoints import make_endpoint
from wire.ids import format_id, new_uuid7, parse_id

_json = msgspec.json.Encoder()


def make_ticket_routes(runtime: GatewayRuntime) -> list[tuple[str, Application]]:
    """Return the patterns of the routes of tickets, anchors left out, with their applications."""

    async def issue(client: ClientConnection) -> None:
        """``POST /v1/tickets``: 201 with a ticket, or 200 with the advice to ask the gateway itself."""
        extra: list[Header] = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        client.watch()
        try:
            answer = await runtime.tickets.issue(client, extra)
        except ClientLeft:
            raise
        except GatewayError as error:
            request_id = format_id("req", new_uuid7())
            send_error(client, DEFAULT_SURFACE, error, request_id, [*id_headers(request_id, is_anthropic=False), *extra[2:]])
            return
        finally:
            client.unwatch()
        record_id = parse_id("tkt", answer.ticket_id) if isinstance(answer, GivenTicket) else None
        extra += id_headers(format_id("req", record_id or new_uuid7()), is_anthropic=False)
        client.respond(200 if record_id is None else 201, extra, _json.encode(answer))

    return [("v1/tickets", make_endpoint(runtime, {"POST": issue}, surface=DEFAULT_SURFACE))]
