"""The door for other gateways: a stream on a box whose socket is here.

This process owns the slots of its sockets, so a peer is told ``busy`` rather than let in over the count.
"""

from __future__ import annotations

import hmac

from django.conf import settings

from gateway.dialects import SURFACES
from gateway.dialects.surface import DEFAULT_SURFACE
from gateway.errors import GatewayError, RouteNotFound
from gateway.request.client import Receive, Scope, Send
from gateway.request.peers import count_for_peer, refuse_peer, serve_peer
from gateway.request.response import Application
from gateway.runtime import GatewayRuntime
from gateway.views.base import make_client, send_failure
from nodes.links.relay import RelayLink
from nodes.states import POOL_RESPONSES, TOKENIZE
from wire.ids import parse_id


def make_peer_door(runtime: GatewayRuntime) -> Application:
    """Return the application behind ``/internal/v1/nodes/{node}/{path}``; without a cluster secret it does not exist."""

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        client = make_client(runtime, scope, receive, send)
        secret = settings.CLUSTER_SECRET
        shown = client.headers.get("x-muster-cluster", "")
        route = scope["url_route"]["kwargs"]
        path = "/" + str(route["path"])
        surface = SURFACES.get("/v1/responses" if path == POOL_RESPONSES else path)
        is_known = surface is not None or path == TOKENIZE
        if not secret or not hmac.compare_digest(shown.encode(), secret.encode()) or not is_known:
            send_failure(client, RouteNotFound(), DEFAULT_SURFACE)
            return
        node_id = parse_id("node", str(route["node"]))
        link = runtime.registry.get(node_id) if node_id is not None else None
        if not isinstance(link, RelayLink):
            refuse_peer(client, b"gone")
            return
        try:
            if surface is None:
                await count_for_peer(client, link)
                return
            dispatcher, limits = runtime.dispatcher, runtime.limits
            await serve_peer(dispatcher=dispatcher, limits=limits, client=client, link=link, surface=surface, path=path)
        except GatewayError as error:
            if not client.started and not client.is_gone:
                send_failure(client, error, DEFAULT_SURFACE)

    return application
