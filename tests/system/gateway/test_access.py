"""Who may ask which route of the gateway, what another tenant hears, and the routes of kept answers."""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import httpx2
import openai
import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import Client, override_settings
from django.urls import URLPattern

from core.roles import Role, make_role_groups
from gateway.dialects.surface import SURFACES
from gateway.models import ApiKey, StoredResponse
from gateway.process import GatewayRuntime
from gateway.services.keys import create_api_key
from gateway.services.responses import keep_response
from gateway.services.tenants import change_response_policy, create_tenant
from gateway.urls import make_application
from governance.admin_tokens import Grant, create_admin_token
from governance.models import PolicyVersion
from nodes.services.certificates import KnownAuthority
from tests.fakes.asgi_client import on_our_server
from tests.fakes.nodes import ACTOR, PASSWORD, make_operator
from tests.fakes.policies import make_people, make_policy

pytestmark = pytest.mark.django_db(transaction=True)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
REFUSED = {401, 403}
NOT_SERVED = {404, 405}
PUBLIC = {"/", "/health", "/openapi.json", "/favicon.ico", "/v1/ca"}
"""Routes that answer whoever asks: what this is, whether it lives, the API's description, an icon, and whom to trust."""
CODED = {"/setup": {200, 400}, "/v1/worker/connect": {426}, "/dashboard": {302}}
"""A page for whoever has a code: it asks for one, and refuses one that is wrong. The path of the nodes' sockets, and a bookmark
that leads to the console.
"""
HIDDEN = "/internal/"
"""Routes of other gateways: to everybody else there is nothing."""
IDS = {
    "response_id": "resp_kept",
    "name": "tiny",
    "key_id": "key",
    "node": "0" * 32,
    "session_id": "0" * 32,
    "path": "v1/chat/completions",
    "ticket_id": "tkt_none",
}
"""A value for every part of an address that names something. A route with a part of another name fails these tests."""
OF_A_TENANT = {"response_id"}
"""Parts that name what belongs to one tenant. The others name models, and what admin tokens and other gateways ask for."""
UNKNOWN = "resp_nothing"


TEXT = [{"type": "output_text", "text": "four", "annotations": []}]
MESSAGE = {"id": "msg_a", "type": "message", "role": "assistant", "status": "completed", "content": TEXT}
BODY = json.dumps(
    {"id": "resp_kept", "object": "response", "model": "tiny", "status": "completed", "output": [MESSAGE]}
).encode()
RATE = 3


@dataclass(frozen=True)
class Gateway:
    """A gateway in front of two tenants, with a kept answer of the first."""

    application: Any
    routes: tuple[str, ...]
    owner: str
    stranger: str
    admin: str

    async def ask(self, method: str, path: str, key: str = "") -> httpx.Response:
        """Send a request without a body; a key may be missing."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(on_our_server(self.application)), base_url="http://gateway"
        ) as client:
            return await client.request(method, path, headers=headers)


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
        create_tenant(name=name, actor=ACTOR)
    change_response_policy(name="acme", stores_responses=True, responses_kept_days=3, actor=ACTOR)
    keys = [create_api_key(name=tenant, tenant_name=tenant, actor=ACTOR)[1] for tenant in ("acme", "other")]
    asked: list[Any] = [{"role": "user", "content": f"question {number}"} for number in range(3)]
    keep_response(tenant="acme", key_id=uuid.uuid4(), kept_days=3, model="tiny", previous_id="", input_items=asked, body=BODY)
    _, admin = create_admin_token(name="ops", actor=ACTOR)
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
    runtime.node_channel.tickets.certificates.take((KnownAuthority("-----BEGIN CERTIFICATE-----", dropped_at=None),))
    yield Gateway(make_application(runtime), list_routes(runtime), owner, stranger, admin)
    await sync_to_async(connections.close_all)()


async def test_every_route_of_the_gateway_asks_who_it_is_or_is_public(gateway: Gateway) -> None:
    paths = {fill(pattern) for pattern in gateway.routes}
    assert set(SURFACES) | PUBLIC <= paths
    for path in paths:
        statuses = {method: (await gateway.ask(method, path)).status_code for method in METHODS}
        served = {method: status for method, status in statuses.items() if status not in NOT_SERVED}
        assert bool(served) != path.startswith(HIDDEN), (path, statuses)
        assert set(served.values()) <= CODED.get(path, {200} if path in PUBLIC else REFUSED), (path, statuses)


async def test_a_plain_request_to_the_socket_of_nodes_is_told_to_upgrade(gateway: Gateway) -> None:
    answer = await gateway.ask("GET", "/v1/worker/connect?provider=local")
    assert (answer.status_code, answer.headers["upgrade"], answer.headers["connection"]) == (426, "websocket", "upgrade")
    assert "x-worker-secret" in answer.json()["error"]["message"]


async def test_no_key_of_a_tenant_opens_what_is_for_operators_and_gateways(gateway: Gateway) -> None:
    closed = [fill(pattern) for pattern in gateway.routes if pattern.startswith(("^admin/", "^internal/", "^metrics"))]
    assert len(closed) >= 6
    for path in closed:
        statuses = {(await gateway.ask(method, path, gateway.owner)).status_code for method in METHODS}
        assert statuses <= REFUSED | NOT_SERVED, path
        assert bool(statuses & REFUSED) != path.startswith(HIDDEN), path
    for path, key in (("/v1/models", gateway.stranger), ("/admin/keys", gateway.admin)):
        assert (await gateway.ask("GET", path, key)).status_code == 200, path


@sync_to_async
def make_tokens() -> dict[str, str]:
    make_role_groups()
    grants = {role.value: Grant(role.value) for role in (Role.VIEWER, Role.OPERATOR, Role.APPROVER, Role.OWNER)}
    grants |= {"before roles": Grant(), "tenant admin": Grant("tenant-admin", "acme")}
    return {who: create_admin_token(name=who, actor=ACTOR, grant=grant)[1] for who, grant in grants.items()}


async def test_an_admin_token_opens_what_its_role_is_for_and_no_more(gateway: Gateway) -> None:
    table = tomllib.loads((Path(__file__).parents[2] / "permissions.toml").read_text(encoding="utf-8"))
    lines, words = table["gateway"], table["words"]
    routes = [pattern for pattern in gateway.routes if pattern.startswith(("^admin/", "^metrics"))]
    assert sorted(lines) == sorted(routes)

    def holds(who: str, names: str) -> bool:
        return any(name == who or (name in words and holds(who, words[name])) for name in map(str.strip, names.split(",")))

    for who, token in (await make_tokens()).items():
        for route in routes:
            statuses = {method: (await gateway.ask(method, fill(route), token)).status_code for method in METHODS}
            let_in = {method for method, status in statuses.items() if status not in REFUSED | {405}}
            assert let_in - {"HEAD"} == {method for method, names in lines[route].items() if holds(who, names)}, (who, route)


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


async def test_openais_client_reads_lists_and_deletes_an_answer_of_its_tenant(gateway: Gateway) -> None:
    answer = await gateway.ask(
        "GET", "/v1/responses/resp_kept?include[]=message.output_text.logprobs&stream=false", gateway.owner
    )
    assert (answer.content, answer.headers["content-type"]) == (BODY, "application/json")
    assert answer.headers["x-request-id"].startswith("req_")
    _, key = await sync_to_async(create_api_key)(name="second", tenant_name="acme", actor=ACTOR)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(on_our_server(gateway.application)))
    async with openai.AsyncOpenAI(base_url="http://gateway/v1", api_key=key, max_retries=0, http_client=http) as client:
        assert (await client.responses.retrieve("resp_kept")).output_text == "four"
        pages = client.responses.input_items.list("resp_kept", limit=2, order="asc")
        texts = [item.to_dict()["content"] async for item in pages]
        await client.responses.delete("resp_kept")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.retrieve("resp_kept")
    assert [text[0]["text"] for text in texts if isinstance(text, list)] == ["question 0", "question 1", "question 2"]
    assert caught.value.code == "previous_response_not_found"
    assert not await StoredResponse.objects.aexists()


async def test_what_cannot_be_done_with_kept_answers_is_refused_by_name(gateway: Gateway) -> None:
    refused = {
        ("GET", "?stream=true"): "stream", ("POST", "/cancel"): None, ("GET", "/input_items?limit=many"): "limit",
        ("GET", "/input_items?limit=1000"): "limit", ("GET", "/input_items?order=up"): "order",
        ("GET", "/input_items?after=msg_9"): "after",
    }  # fmt: skip
    for (method, path), param in refused.items():
        answer = await gateway.ask(method, f"/v1/responses/resp_kept{path}", gateway.owner)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), path
    for name, key in (("resp_2", gateway.owner), ("resp_%00", gateway.owner), ("resp_kept", gateway.stranger)):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            answer = await gateway.ask(method, f"/v1/responses/{name}{path}", key)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "previous_response_not_found")
            assert key == gateway.owner or "not kept for this tenant" in answer.json()["error"]["message"]
    assert await StoredResponse.objects.acount() == 1


async def test_kept_answers_which_may_have_megabytes_are_given_out_at_the_keys_rate(gateway: Gateway) -> None:
    for method, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
        make = sync_to_async(create_api_key)
        _, key = await make(name=f"{method}{path}", tenant_name="acme", actor=ACTOR, requests_per_minute=RATE)
        asked = [await gateway.ask(method, f"/v1/responses/resp_kept{path}", key) for _ in range(RATE + 1)]
        assert 429 not in [answer.status_code for answer in asked[:RATE]]
        assert (asked[RATE].status_code, asked[RATE].json()["error"]["code"]) == (429, "RATE_LIMITED")
        assert int(asked[RATE].headers["retry-after"]) >= 1


def test_a_session_that_may_only_look_neither_asks_nor_makes_keys_or_aliases() -> None:
    make_operator()
    create_tenant(name="default", actor=ACTOR)
    document = make_policy(make_people(3)).raw
    PolicyVersion.objects.create(version=1, document=document, sha256="0" * 64, state="active", created_by="ada")
    client = Client()
    assert client.post("/sign-in/", {"name": "ada", "password": PASSWORD}).status_code == 302
    assert client.get("/admin/playground/").status_code == 200
    form = {"surface": "chat", "model": "m", "tenant": "default", "prompt": "Hello"}
    for path in ("playground/send", "gateway/apikey/add/", "gateway/modelalias/add/"):
        answer = client.post(f"/admin/{path}", form, content_type="application/json")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "NOT_PERMITTED")
    assert not ApiKey.objects.exists()
