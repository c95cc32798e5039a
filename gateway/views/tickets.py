"""``/v1/tickets``: a caller asks for a ticket to a node, and follows what becomes of that node."""

from __future__ import annotations

import asyncio

import msgspec

from gateway.dialects.surface import DEFAULT_SURFACE
from gateway.errors import ClientLeft, GatewayError
from gateway.process import GatewayRuntime
from gateway.request.attempt import COMMENT
from gateway.request.client import ClientConnection
from gateway.request.response import Application, id_headers, send_error
from gateway.request.tickets import GivenTicket
from gateway.values import Header
from gateway.views.endpoints import make_endpoint
from wire import clock
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

    async def follow(client: ClientConnection) -> None:
        """``GET /v1/tickets/{id}/events``: says when the node of a ticket is lost, with a ticket for another one."""
        caller = await runtime.keys.identify(client.headers, address=client.address, scope=client.scope)
        ticket_id = str(client.scope["url_route"]["kwargs"]["ticket_id"])
        slot = runtime.tickets.find_slot(ticket_id, caller)
        client.watch()
        try:
            client.start(200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")])
            client.write(COMMENT)
            said_at, reason = clock.monotonic(), ""
            while ticket_id in runtime.tickets.slots and not (
                reason := runtime.tickets.find_loss(slot.lease.link, is_cut=slot.is_interrupted)
            ):
                await client.wait_for_work(asyncio.sleep(runtime.limits.ticket_look_s))
                if clock.monotonic() - said_at >= runtime.limits.stream_ping_s:
                    client.write(COMMENT)
                    said_at = clock.monotonic()
            if reason:
                client.write(await runtime.tickets.say_failover(client, slot, reason))
            client.finish(b'event: x_pool_end\ndata: {"type":"x_pool_end"}\n\n')
        finally:
            client.unwatch()

    return [
        ("v1/tickets", make_endpoint(runtime, {"POST": issue}, surface=DEFAULT_SURFACE)),
        ("v1/tickets/(?P<ticket_id>[^/]+)/events", make_endpoint(runtime, {"GET": follow}, surface=DEFAULT_SURFACE)),
    ]
