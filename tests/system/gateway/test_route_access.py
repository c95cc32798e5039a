"""Every route of the gateway, read from its own URL table: who may ask it, and what another tenant hears."""

from __future__ import annotations

import re
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import httpx
import pytest
import uvicorn
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import override_settings
from django.urls import URLPattern

from gateway.dialects import SURFACES
from gateway.runtime import GatewayRuntime
from gateway.services import change_response_policy, create_api_key, create_tenant
from gateway.services.responses import keep_response
from gateway.urls import make_application
from governance.services import create_admin_token
from tests.system.gateway_server.serving import run_server

pytestmark = pytest.mark.django_db(transaction=True)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
REFUSED = {401, 403}
NOT_SERVED = {404, 405}
PUBLIC = {"/", "/health", "/openapi.json", "/favicon.ico"}
"""Routes that answer whoever asks: what this is, whether it lives, the API's description and an icon."""
HIDDEN = "/internal/"
"""Routes of other gateways: to everybody else there is nothing."""
IDS = {"response_id": "resp_kept", "name": "tiny", "key_id": "key", "node": "0" * 32, "path": "v1/chat/completions"}
"""A value for every part of an address that names something. A route with a part of another name fails these tests."""
OF_A_TENANT = {"response_id"}
"""Parts that name what belongs to one tenant. The others name models, and what admin tokens and other gateways ask for."""
UNKNOWN = "resp_nothing"


@dataclass(frozen=True)
class Gateway:
    """A gateway in front of two tenants, with a kept answer of the first."""

    url: str
    routes: tuple[str, ...]
    owner: str
    stranger: str
    admin: str

    async def ask(self, method: str, path: str, key: str = "") -> httpx.Response:
        """Send a request without a body; a key may be missing."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(timeout=30) as client:
            return await client.request(method, self.url + path, headers=headers)


def list_routes(runtime: GatewayRuntime) -> tuple[str, ...]:
    """Return the pattern of every route but the last, which is for what there is not."""
    routes = make_application(runtime).application_mapping["http"].routes
    patterns = [str(route.pattern.regex.pattern) for route in routes if isinstance(route, URLPattern)]
    assert patterns[-1] == "^(?s:.*)$"
    return tuple(patterns[:-1])


def fill(pattern: str, **ids: str) -> str:
    """Return an address that the pattern matches."""
    path = re.sub(r"\(\?P<(\w+)>.+?\)(?=/|\$)", lambda found: {**IDS, **ids}[found.group(1)], pattern)
    path = "/" + path.removeprefix("^").removesuffix("$").replace("\\", "")
    assert re.match(pattern, path[1:]), (pattern, path)
    return path


def parts_of(pattern: str) -> set[str]:
    return set(re.compile(pattern).groupindex)


@sync_to_async
def prepare() -> tuple[str, str, str]:
    """Make two tenants and keep an answer of the first; return a key of each and an admin token."""
    for name in ("acme", "other"):
        create_tenant(name=name, actor="user:ada")
        change_response_policy(name=name, stores_responses=True, responses_kept_days=3, actor="user:ada")
    keys = [create_api_key(name=tenant, tenant_name=tenant, actor="user:ada")[1] for tenant in ("acme", "other")]
    body = b'{"id": "resp_kept", "object": "response", "model": "tiny", "status": "completed", "output": []}'
    keep_response(tenant="acme", key_id=uuid.uuid4(), kept_days=3, model="tiny", previous_id="", input_items=[], body=body)
    _, admin = create_admin_token(name="ops", actor="user:ada")
    return keys[0], keys[1], admin


@pytest.fixture(autouse=True)
def closed_lists() -> Iterator[None]:
    """Show models and metrics to nobody without a credential, as docs/secure.md asks for on a public address."""
    with override_settings(PUBLIC_MODEL_LIST=False, METRICS_REQUIRE_TOKEN=True):
        yield


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    owner, stranger, admin = await prepare()
    runtime = GatewayRuntime()
    config = uvicorn.Config(make_application(runtime), port=0, lifespan="off", log_level="error", ws="none")
    async with run_server(uvicorn.Server(config)) as port:
        yield Gateway(f"http://127.0.0.1:{port}", list_routes(runtime), owner, stranger, admin)
    await sync_to_async(connections.close_all)()


async def test_every_route_of_the_gateway_asks_who_it_is_or_is_public(gateway: Gateway) -> None:
    paths = {fill(pattern) for pattern in gateway.routes}
    assert set(SURFACES) | PUBLIC <= paths
    for path in paths:
        statuses = {method: (await gateway.ask(method, path)).status_code for method in METHODS}
        served = {method: status for method, status in statuses.items() if status not in NOT_SERVED}
        assert bool(served) != path.startswith(HIDDEN), (path, statuses)
        assert set(served.values()) <= ({200} if path in PUBLIC else REFUSED), (path, statuses)


async def test_who_has_a_credential_is_let_in_where_others_are_refused(gateway: Gateway) -> None:
    for path, key in (
        ("/v1/models", gateway.stranger),
        ("/v1/responses/resp_kept", gateway.owner),
        ("/admin/keys", gateway.admin),
    ):
        assert (await gateway.ask("GET", path, key)).status_code == 200, path


async def test_what_belongs_to_a_tenant_is_unknown_to_every_other_one(gateway: Gateway) -> None:
    named = [pattern for pattern in gateway.routes if parts_of(pattern)]
    assert set().union(*map(parts_of, named)) == set(IDS)
    asked = 0
    for pattern in named:
        if not parts_of(pattern) & OF_A_TENANT:
            continue
        path, unknown = fill(pattern), fill(pattern, **dict.fromkeys(OF_A_TENANT, UNKNOWN))
        for method in METHODS:
            foreign, missing = (
                await gateway.ask(method, path, gateway.stranger),
                await gateway.ask(method, unknown, gateway.stranger),
            )
            if missing.status_code == 405:
                continue
            asked += 1
            assert foreign.status_code == missing.status_code == 404, (method, path)
            assert hide(foreign, IDS["response_id"]) == hide(missing, UNKNOWN)
    assert asked >= 6
    own = await gateway.ask("GET", fill(next(p for p in named if p.endswith("response_id>[^/]+)$"))), gateway.owner)
    assert own.status_code == 200


def hide(answer: httpx.Response, name: str) -> tuple[str, dict[str, str]]:
    """Return what a caller can tell answers apart by, but for the name it asked for and what is new in every answer."""
    own = {"date", "x-request-id", "request-id", "content-length"}
    text = re.sub(r"req_[0-9a-f]+", "req", answer.text).replace(name, "ID")
    return text, {key: value for key, value in answer.headers.items() if key not in own}


@pytest.mark.parametrize("kind", ["owner", "stranger"])
async def test_no_key_of_a_tenant_opens_what_is_for_operators_and_gateways(gateway: Gateway, kind: str) -> None:
    key = str(getattr(gateway, kind))
    closed = [fill(pattern) for pattern in gateway.routes if pattern.startswith(("^admin/", "^internal/", "^metrics"))]
    assert len(closed) >= 6
    for path in closed:
        statuses = {(await gateway.ask(method, path, key)).status_code for method in METHODS}
        assert statuses <= REFUSED | NOT_SERVED, path
        assert bool(statuses & REFUSED) != path.startswith(HIDDEN), path
