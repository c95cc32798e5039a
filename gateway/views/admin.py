"""ModelRelay's admin API on the gateway: workers, statistics and client keys, in the shapes its users script against."""

from __future__ import annotations

import msgspec

from core.db.threads import run_in_database
from gateway.errors import BadRequest
from gateway.models import ApiKey
from gateway.process import GatewayRuntime
from gateway.request.client import ClientConnection
from gateway.services.errors import KeyNotFound
from gateway.services.keys import create_api_key, list_api_keys, revoke_api_key
from gateway.views.endpoints import is_draining, require_admin, send_answer
from wire.ids import format_id, parse_id


class AdminViews:
    """Endpoints under ``/admin``; each needs an admin token and answers 403 without."""

    def __init__(self, runtime: GatewayRuntime) -> None:
        self.runtime = runtime

    async def workers(self, client: ClientConnection) -> None:
        """``GET /admin/workers``."""
        await require_admin(client)
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
        await require_admin(client)
        runtime = self.runtime
        depth = {"local": runtime.dispatcher.depth}
        answer = {
            "queue_depth": depth,
            "queue_depth_by_model": runtime.dispatcher.depths(),
            "active_workers": len(runtime.registry),
            "in_flight": sum(link.active for link in runtime.registry),
            "records_pending": runtime.records.pending,
        }
        send_answer(client, 200, answer)

    async def list_keys(self, client: ClientConnection) -> None:
        """``GET /admin/keys``."""
        await require_admin(client)
        keys = await run_in_database(lambda: [_render_key(key) for key in list_api_keys()])
        send_answer(client, 200, {"keys": keys})

    async def create_key(self, client: ClientConnection) -> None:
        """``POST /admin/keys``: 201 with the secret, shown this once."""
        actor = await require_admin(client)
        try:
            wanted = msgspec.json.decode(await client.read_body(), type=_NewKey)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"Send a JSON object with a 'name': {error}.", param="name") from None
        if not wanted.name.strip() or len(wanted.name) > 80:
            raise BadRequest("The name must have 1 to 80 characters.", param="name")

        def create() -> dict[str, object]:
            key, text = create_api_key(
                name=wanted.name.strip(),
                tenant_name=wanted.tenant,
                actor=actor,
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
        actor = await require_admin(client)
        key_id = parse_id("key", str(client.scope["url_route"]["kwargs"]["key_id"]))
        if key_id is None:
            raise KeyNotFound("There is no key with that id.", param="key_id")
        await run_in_database(revoke_api_key, key_id=key_id, actor=actor)
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
