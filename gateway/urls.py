"""The gateway's routes: inference, models, health, metrics, the relay's admin API, peers, and the worker socket."""

from __future__ import annotations

from channels.routing import ProtocolTypeRouter, URLRouter
from django.urls import path, re_path

from gateway.dialects import SURFACES
from gateway.runtime import GatewayRuntime
from gateway.views.admin import AdminViews
from gateway.views.base import make_endpoint
from gateway.views.inference import make_inference
from gateway.views.peer import make_peer_door
from gateway.views.public import PublicViews

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


def make_application(runtime: GatewayRuntime) -> ProtocolTypeRouter:
    """Return the ASGI application of one gateway process."""
    public, admin = PublicViews(runtime), AdminViews(runtime)

    def get(handler: object) -> object:
        return make_endpoint(runtime, {"GET": handler, "HEAD": handler})  # type: ignore[dict-item]

    http = [path(surface.path.lstrip("/"), make_inference(runtime, surface)) for surface in SURFACES.values()]
    http += [
        path("v1/models", get(public.list_models)),
        path("models", get(public.list_models)),
        re_path(r"^v1/models/(?P<name>.+)$", get(public.show_model)),
        path("health", get(public.health)),
        path("metrics", get(public.metrics)),
        path("admin/workers", get(admin.workers)),
        path("admin/stats", get(admin.stats)),
        path("admin/keys", make_endpoint(runtime, {"GET": admin.list_keys, "POST": admin.create_key})),
        path("admin/keys/<str:key_id>", make_endpoint(runtime, {"DELETE": admin.revoke_key})),
        re_path(r"^internal/v1/nodes/(?P<node>[0-9a-f]{32})/(?P<path>.+)$", make_peer_door(runtime)),
        re_path(r"", make_endpoint(runtime, dict.fromkeys(_METHODS, public.not_found))),
    ]
    sockets = [path("v1/worker/connect", runtime.workers)]
    return ProtocolTypeRouter({"http": URLRouter(http), "websocket": URLRouter(sockets)})
