"""Endpoints about the gateway itself: is it alive, which models are there, metrics, and ModelRelay's admin API.

The shapes under ``/admin`` are those that users of ModelRelay script against: workers, statistics and client keys.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from django.conf import settings
from django.contrib.staticfiles import finders
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from core.db.threads import run_in_database
from core.roles import ADD_KEY, CHANGE_KEY, SEE_GATEWAYS, SEE_KEYS, SEE_NODES, find_tenants, may
from gateway.dialects.surface import DEFAULT_SURFACE, SURFACES
from gateway.errors import BadRequest, InvalidAdminToken, ModelUnknown, NotPermitted, RouteNotFound, UpgradeRequired
from gateway.models import ApiKey
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection, came_directly
from gateway.services.errors import KeyNotFound
from gateway.services.keys import create_api_key, list_api_keys, revoke_api_key
from gateway.services.rollups import OUTCOMES, read_provider_requests
from gateway.values import Caller
from gateway.views.endpoints import find_admin, is_draining, require_admin, send_answer, send_failure
from gateway.views.models import ModelList, cut_page, render_anthropic, render_openai, render_page
from gateway.views.openapi import make_document
from nodes.links import Link
from wire import RELEASE, clock
from wire.ids import format_id, parse_id

_KNOWN_PATHS = sorted(
    {*SURFACES, "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/models"}, key=len, reverse=True
)


@cache
def _render_document() -> bytes:
    return msgspec.json.encode(make_document(RELEASE))


@cache
def _read_icon() -> bytes:
    found = finders.find("muster/favicon.svg")
    return Path(found).read_bytes() if isinstance(found, str) else b""


class PublicViews:
    """Endpoints that need no admin token."""

    def __init__(self, runtime: GatewayRuntime) -> None:
        self.runtime = runtime
        self._models = ModelList(runtime.catalogue, runtime.registry)

    async def health(self, client: ClientConnection) -> None:
        """``GET /health``: the contract's fields and the relay's; nodes are named to admins only."""
        runtime = self.runtime
        answer: dict[str, Any] = {  # values of the JSON answer
            "ok": True,
            "service": "gateway",
            "time": clock.now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            "status": "ok" if runtime.records.is_healthy else "degraded",
            "version": RELEASE,
            "workers_connected": len(runtime.registry),
            "queue_depth": runtime.dispatcher.depth,
            "uptime_secs": round(clock.unix_s() - runtime.started_at, 1),
            "models_provider": "local",
        }
        holder = await find_admin(client) if client.headers.get("authorization") else None
        if holder is not None and may(holder, SEE_NODES):
            answer["workers"] = [_health_worker(link) for link in runtime.registry]
            answer["providers"] = await _describe_providers(runtime)
        send_answer(client, 200, answer)

    async def index(self, client: ClientConnection) -> None:
        """``GET /`` and ``HEAD /``: what this is; some clients ask before their first request whether anybody is there."""
        send_answer(client, 200, {"service": "muster gateway", "version": RELEASE, "models": "/v1/models", "health": "/health"})

    async def dashboard(self, client: ClientConnection) -> None:
        """``GET /dashboard``: where ModelRelay has its pages; the console is on the control plane."""
        client.respond(302, [(b"location", f"{str(settings.PUBLIC_URL).rstrip('/')}/admin/".encode())], b"")

    async def describe(self, client: ClientConnection) -> None:
        """``GET /openapi.json``: the client API for machines. Anybody may read it, as the page it repeats."""
        client.respond(200, [(b"content-type", b"application/json")], _render_document())

    async def authorities(self, client: ClientConnection) -> None:
        """``GET /v1/ca``: the internal CAs (PEM) that clients with tickets verify nodes with. Raises RouteNotFound."""
        certificates = self.runtime.node_channel.tickets.certificates.authorities
        if not certificates:
            raise RouteNotFound("This installation has no internal CA.")
        client.respond(200, [(b"content-type", b"application/x-pem-file")], certificates.encode())

    async def icon(self, client: ClientConnection) -> None:
        """``GET /favicon.ico``: browsers ask for it beside whatever they open."""
        headers = [(b"content-type", b"image/svg+xml"), (b"cache-control", b"max-age=86400")]
        client.respond(200, headers, _read_icon())

    async def list_models(self, client: ClientConnection) -> None:
        """``GET /v1/models`` and ``GET /models``: what can be routed now and this caller may use, aliases among it."""
        models = self._models.read(await self._optional_caller(client))
        if "anthropic-version" in client.headers:
            send_answer(client, 200, render_page(cut_page(models, client.scope.get("query_string", b""))))
        else:
            send_answer(client, 200, {"object": "list", "data": [render_openai(model) for model in models]})

    async def show_model(self, client: ClientConnection) -> None:
        """``GET /v1/models/{id}``, also for aliases and for ids with a slash."""
        caller = await self._optional_caller(client)
        name = str(client.scope["url_route"]["kwargs"]["name"])
        model = self._models.find(caller, name)
        if model is None:
            raise ModelUnknown(f"The model '{name}' is not available. GET /v1/models lists what can be used.", param="model")
        is_anthropic = "anthropic-version" in client.headers
        send_answer(client, 200, render_anthropic(model) if is_anthropic else render_openai(model))

    async def metrics(self, client: ClientConnection) -> None:
        """``GET /metrics``: Prometheus text, for callers on this machine that no proxy passed on, or with an admin token."""
        is_open = not settings.METRICS_REQUIRE_TOKEN and came_directly(client.scope, client.headers)
        if not is_open:
            if await find_admin(client) is None:
                raise InvalidAdminToken("Metrics need an admin token here: through a proxy or from another machine always.")
            await require_admin(client, SEE_GATEWAYS)
        client.respond(200, [(b"content-type", CONTENT_TYPE_LATEST.encode())], generate_latest())

    async def connect(self, client: ClientConnection) -> None:
        """``/v1/worker/connect`` without an upgrade: somebody tries the address, or a proxy takes the upgrade away."""
        send_failure(client, UpgradeRequired(), DEFAULT_SURFACE, [(b"upgrade", b"websocket"), (b"connection", b"upgrade")])

    async def not_found(self, client: ClientConnection) -> None:
        """Anything else: a base URL is easily one part too long or too short, so the message says what may be meant."""
        meant = _find_meant(str(client.scope["path"]))
        raise RouteNotFound(f"There is no such endpoint here. Did you mean {meant}?" if meant else "")

    async def _optional_caller(self, client: ClientConnection) -> Caller | None:
        if not client.headers.get("authorization") and not client.headers.get("x-api-key") and settings.PUBLIC_MODEL_LIST:
            return None
        return await self.runtime.keys.identify(client.headers, address=client.address, scope=client.scope)


async def _describe_providers(runtime: GatewayRuntime) -> dict[str, dict[str, object]]:
    """Return of each provider its nodes on this gateway, what waits here, and its requests within a day anywhere."""
    depths, requests = runtime.dispatcher.depths_by_provider(), await run_in_database(read_provider_requests)
    links = Counter(link.policy.provider for link in runtime.registry)
    active = Counter(dict.fromkeys(links, 0))
    for link in runtime.registry:
        active[link.policy.provider] += link.active
    return {
        provider: {
            "workers": links[provider],
            "in_flight": active[provider],
            "queue_depth": depths.get(provider, 0),
            "requests": requests.get(provider, dict.fromkeys(OUTCOMES, 0)),
        }
        for provider in sorted({*depths, *links})
    }


def _find_meant(path: str) -> str:
    asked = path.rstrip("/")
    return next((known for known in _KNOWN_PATHS if asked.endswith(known.removeprefix("/v1"))), "")


def _health_worker(link: Link) -> dict[str, object]:
    return {
        "id": format_id("node", link.node_id),
        "provider": link.policy.provider,
        "models": sorted(link.models),
        "in_flight": link.active,
        "max_concurrent": link.max_concurrent,
        "is_draining": is_draining(link),
    }


class AdminViews:
    """Endpoints under ``/admin``; each needs an admin token and answers 403 without."""

    def __init__(self, runtime: GatewayRuntime) -> None:
        self.runtime = runtime

    async def workers(self, client: ClientConnection) -> None:
        """``GET /admin/workers``."""
        await require_admin(client, SEE_NODES)
        workers = [
            {
                "worker_id": format_id("node", link.node_id),
                "provider": link.policy.provider,
                "worker_name": link.node_name,
                "models": sorted(link.models),
                "max_concurrent": link.max_concurrent,
                "reported_load": link.load,
                "in_flight_count": link.active,
                "is_draining": is_draining(link),
            }
            for link in self.runtime.registry
        ]
        send_answer(client, 200, {"workers": workers})

    async def stats(self, client: ClientConnection) -> None:
        """``GET /admin/stats``."""
        await require_admin(client, SEE_GATEWAYS)
        runtime = self.runtime
        providers = await _describe_providers(runtime)
        answer = {
            "queue_depth": {name: one["queue_depth"] for name, one in providers.items()},
            "providers": providers,
            "queue_depth_by_model": runtime.dispatcher.depths(),
            "active_workers": len(runtime.registry),
            "in_flight": sum(link.active for link in runtime.registry),
            "records_pending": runtime.records.pending,
        }
        send_answer(client, 200, answer)

    async def list_keys(self, client: ClientConnection) -> None:
        """``GET /admin/keys``."""
        holder = await require_admin(client, SEE_KEYS, is_per_tenant=True)
        names = find_tenants(holder, SEE_KEYS)
        keys = await run_in_database(lambda: [_render_key(key) for key in list_api_keys(tenants=names)])
        send_answer(client, 200, {"keys": keys})

    async def create_key(self, client: ClientConnection) -> None:
        """``POST /admin/keys``: 201 with the secret, shown this once."""
        holder = await require_admin(client, ADD_KEY, is_per_tenant=True)
        try:
            wanted = msgspec.json.decode(await client.read_body(), type=_NewKey)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"Send a JSON object with a 'name': {error}.", param="name") from None
        if not wanted.name.strip() or len(wanted.name) > 80:
            raise BadRequest("The name must have 1 to 80 characters.", param="name")

        if not may(holder, ADD_KEY, tenant=wanted.tenant):
            raise NotPermitted(
                f"The role of this admin token does not count in the tenant {wanted.tenant[:80]}.", param="tenant"
            )

        def create() -> dict[str, object]:
            key, text = create_api_key(
                name=wanted.name.strip(),
                tenant_name=wanted.tenant,
                actor=holder.actor,
                is_within_tenant=not may(holder, ADD_KEY),
                requests_per_minute=wanted.requests_per_minute,
                allowed_models=tuple(wanted.allowed_models),
                priority=wanted.priority,
            )
            return {**_render_key(key), "secret": text}

        answer = await run_in_database(create)
        self.runtime.keys.forget_unknown()
        send_answer(client, 201, answer)

    async def revoke_key(self, client: ClientConnection) -> None:
        """``DELETE /admin/keys/{id}``: 204, or 404."""
        holder = await require_admin(client, CHANGE_KEY, is_per_tenant=True)
        names = find_tenants(holder, CHANGE_KEY)
        key_id = parse_id("key", str(client.scope["url_route"]["kwargs"]["key_id"]))
        if key_id is None:
            raise KeyNotFound("There is no key with that id.", param="key_id")
        await run_in_database(revoke_api_key, key_id=key_id, actor=holder.actor, tenants=names)
        for keyid, entry in list(self.runtime.catalogue.keys.items()):
            if entry.caller.key_id == key_id:
                del self.runtime.catalogue.keys[keyid]
        client.start(204, [])
        client.finish()


class _NewKey(msgspec.Struct):
    name: str
    tenant: str = "default"
    requests_per_minute: int | None = None
    allowed_models: list[str] = []
    priority: str = "normal"


def _render_key(key: ApiKey) -> dict[str, object]:
    return {
        "id": str(key.pk),
        "name": key.name,
        "prefix": key.prefix,
        "created_at": int(key.created_at.timestamp()),
        "last_used_at": int(key.last_used_at.timestamp()) if key.last_used_at is not None else None,
        "revoked": key.revoked_at is not None,
    }
