"""The gateway's routes: inference, models, health, metrics, the relay's admin API, peers, and the worker socket."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import cast

from channels.routing import ProtocolTypeRouter
from django.conf import settings
from django.http.response import HttpResponseBase
from django.urls import URLPattern, re_path

from gateway.dialects.surface import SURFACES
from gateway.process import GatewayRuntime
from gateway.request.client import Receive, Scope, Send
from gateway.request.response import Application, SlashRouter, admit_programs, is_preflight, refuse_unknown_socket
from gateway.values import HeaderView
from gateway.views.agents import make_agent_routes, make_agent_socket
from gateway.views.endpoints import Handler, Inference, InferenceConsumer, make_endpoint, make_preflight
from gateway.views.peers import make_peer_application
from gateway.views.responses import make_response_routes
from gateway.views.service import AdminViews, PublicViews
from gateway.views.setup import make_setup_routes
from gateway.views.tickets import make_ticket_routes
from gateway.views.token_counts import make_counting_routes
from nodes.consumers import NodeConsumer

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def make_inference(runtime: GatewayRuntime) -> dict[str, Inference]:
    return {surface.path: Inference(runtime, surface) for surface in SURFACES.values()}


def make_application(runtime: GatewayRuntime, inference: Mapping[str, Inference] | None = None) -> ProtocolTypeRouter:
    """Return the ASGI application of one gateway process. ``inference``: what ``make_inference`` made, if that was done."""
    inference = make_inference(runtime) if inference is None else inference
    public, admin = PublicViews(runtime), AdminViews(runtime)

    def get(handler: Handler) -> Application:
        return make_endpoint(runtime, {"GET": handler, "HEAD": handler})

    everything = make_endpoint(runtime, dict.fromkeys(_METHODS, public.not_found))
    consumers = {path: InferenceConsumer.as_asgi(inference=one) for path, one in inference.items()}
    http = [_route(re.escape(path[1:]), consumer) for path, consumer in consumers.items()]
    http += [_route(re.escape(path[1:]), application) for path, application in make_counting_routes(runtime).items()]
    http += [_route(pattern, application) for pattern, application in make_response_routes(runtime)]
    http += [_route(pattern, application) for pattern, application in make_agent_routes(runtime)]
    http += [_route(pattern, application) for pattern, application in make_ticket_routes(runtime)]
    http += [_route(pattern, application) for pattern, application in make_setup_routes(runtime)]
    http += [
        _route("", get(public.index)),
        _route("dashboard", get(public.dashboard)),
        _route("v1/models", get(public.list_models)),
        _route("models", get(public.list_models)),
        _route("v1/models/(?P<name>.+)", get(public.show_model)),
        _route("openapi\\.json", get(public.describe)),
        _route("v1/ca", get(public.authorities)),
        _route("favicon\\.ico", get(public.icon)),
        _route("health", get(public.health)),
        _route("metrics", get(public.metrics)),
        _route("v1/worker/connect", get(public.connect)),
        _route("admin/workers", get(admin.workers)),
        _route("admin/stats", get(admin.stats)),
        _route("admin/keys", make_endpoint(runtime, {"GET": admin.list_keys, "POST": admin.create_key})),
        _route("admin/keys/(?P<key_id>[^/]+)", make_endpoint(runtime, {"DELETE": admin.revoke_key})),
        _route("internal/v1/nodes/(?P<node>[0-9a-f]{32})/(?P<path>.+)", make_peer_application(runtime)),
        _route("(?s:.*)", everything),
    ]
    preflight = make_preflight(runtime) if settings.CORS_ORIGINS else None
    nodes = NodeConsumer.as_asgi(channel=runtime.node_channel)
    origins = {settings.PUBLIC_URL, settings.GATEWAY_PUBLIC_URL, *settings.CORS_ORIGINS}
    workers, agents = admit_programs(nodes, origins), admit_programs(make_agent_socket(runtime), origins)
    sockets = [_route("v1/worker/connect", workers), _route("api/v1/session/(?P<session_id>[^/]+)", agents)]
    sockets += [_route("(?s:.*)", refuse_unknown_socket)]
    return ProtocolTypeRouter(
        {"http": _ExactFirstRouter(http, exact=consumers, preflight=preflight), "websocket": SlashRouter(sockets)}
    )


class _ExactFirstRouter(SlashRouter):
    """A router with a table of literal paths in front: the inference paths need no pattern.

    ``preflight``: answers browsers that ask for a page; None = no page is let in, and they get what everybody gets.
    """

    def __init__(self, routes: list[URLPattern], *, exact: Mapping[str, Application], preflight: Application | None) -> None:
        super().__init__(routes)
        self._exact = exact
        self._preflight = preflight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._preflight is not None and is_preflight(scope["method"], HeaderView(scope["headers"])):
            await self._preflight(scope, receive, send)
            return
        application = self._exact.get(scope["path"])
        if application is not None:
            await application(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def _route(pattern: str, application: Application) -> URLPattern:
    return re_path(f"^{pattern}$", cast("Callable[..., HttpResponseBase]", application))
