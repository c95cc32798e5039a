"""Who may ask which route of the gateway, what another tenant hears, and the routes of kept answers."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import openai
import pytest
import uvicorn
from asgiref.sync import sync_to_async
from channels.routing import ProtocolTypeRouter, URLRouter
from django.contrib.sessions.models import Session
from django.db import connection, connections
from django.test import Client, RequestFactory, override_settings
from django.urls import URLPattern, re_path
from openai.types.responses import ResponseInputMessageItem, ResponseInputText

from controlplane.playground.errors import SignedOut
from controlplane.playground.keys import lend_key
from core.models import User
from gateway.dialects import SURFACES
from gateway.models import ApiKey, StoredResponse
from gateway.runtime import GatewayRuntime
from gateway.services import change_response_policy, create_api_key, create_tenant
from gateway.services.responses import keep_response
from gateway.urls import make_application
from gateway.views.responses import make_response_routes
from governance.models import PolicyVersion
from governance.services import create_admin_token
from tests.fakes.policies import make_people, make_policy
from tests.fakes.server_door import run_server
from tests.system.gateway_admin.factories import ACTOR, PASSWORD, make_operator

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


BODY = json.dumps(
    {
        "id": "resp_1",
        "object": "response",
        "model": "tiny",
        "status": "completed",
        "output": [
            {
                "id": "msg_a",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "four", "annotations": []}],
            }
        ],
    }
).encode()

REQUESTS = (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"))


@dataclass(frozen=True)
class Place:
    """A gateway with one kept answer. Keys: two of the tenant whose answer it is, one of a tenant that keeps none."""

    url: str
    key: str
    second_key: str
    foreign_key: str


@sync_to_async
def keep_one_answer() -> tuple[str, str, str]:
    """Keep one answer; return the keys."""
    create_tenant(name="acme", actor=ACTOR)
    create_tenant(name="other", actor=ACTOR)
    change_response_policy(name="acme", stores_responses=True, responses_kept_days=3, actor=ACTOR)
    keys = [create_api_key(name=f"k{n}", tenant_name=tenant, actor=ACTOR) for n, tenant in enumerate(("acme", "acme", "other"))]
    keep_response(
        tenant="acme",
        key_id=uuid.uuid4(),
        kept_days=3,
        model="tiny",
        previous_id="",
        input_items=[{"role": "user", "content": f"question {number}"} for number in range(3)],
        body=BODY,
    )
    first, second, foreign = (text for _, text in keys)
    return first, second, foreign


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    keys = await keep_one_answer()
    # Channels routes ASGI applications where Django's types expect views.
    views = [(pattern, cast("Any", application)) for pattern, application in make_response_routes(GatewayRuntime())]
    routes = [re_path(f"^{pattern}$", view) for pattern, view in views]
    application = ProtocolTypeRouter({"http": URLRouter(routes)})
    config = uvicorn.Config(application, port=0, lifespan="off", log_level="error", ws="none", timeout_keep_alive=60)
    async with run_server(uvicorn.Server(config)) as port:
        yield Place(f"http://127.0.0.1:{port}/v1", *keys)
    await sync_to_async(connections.close_all)()


def make_client(place: Place, key: str = "") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=place.url, api_key=key or place.key, max_retries=0, timeout=30)


async def ask(place: Place, method: str, path: str, key: str = "") -> httpx.Response:
    headers = {"authorization": f"Bearer {key or place.key}"}
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.request(method, f"{place.url}/responses/{path}", headers=headers)


def read_text(item: object) -> str:
    assert isinstance(item, ResponseInputMessageItem)
    (part,) = item.content
    assert isinstance(part, ResponseInputText)
    return part.text


async def test_openais_client_reads_lists_and_deletes_an_answer(place: Place) -> None:
    async with make_client(place) as client:
        assert (await client.responses.retrieve("resp_1")).output_text == "four"
        pages = client.responses.input_items.list("resp_1", limit=2, order="asc")
        texts = [read_text(item) async for item in pages]
        await client.responses.delete("resp_1")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.responses.retrieve("resp_1")

    assert texts == ["question 0", "question 1", "question 2"]
    assert caught.value.code == "previous_response_not_found"
    assert not await StoredResponse.objects.aexists()


async def test_the_answer_is_the_tenants_and_not_the_keys(place: Place) -> None:
    async with make_client(place, place.second_key) as client:
        assert (await client.responses.retrieve("resp_1")).id == "resp_1"


async def test_the_object_comes_back_as_it_was_sent_with_a_request_id(place: Place) -> None:
    answer = await ask(place, "GET", "resp_1?include[]=message.output_text.logprobs&stream=false")

    assert answer.content == BODY
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req_")


async def test_another_tenant_finds_nothing_and_hears_that_nothing_is_kept_for_it(place: Place) -> None:
    for method, path in REQUESTS:
        answer = await ask(place, method, f"resp_1{path}", place.foreign_key)
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert error["code"] == "previous_response_not_found"
        assert "not kept for this tenant" in error["message"]
        assert "operator can allow it" in error["message"]
    assert await StoredResponse.objects.acount() == 1


async def test_an_id_that_nothing_has_is_not_found(place: Place) -> None:
    for name in ("resp_2", "msg_1", "resp_%00", "resp_%E2%82%AC"):
        for method, path in REQUESTS:
            answer = await ask(place, method, f"{name}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "previous_response_not_found")


async def test_what_cannot_be_done_is_refused_by_name(place: Place) -> None:
    refused = {
        ("GET", "?stream=true"): "stream",
        ("POST", "/cancel"): None,
        ("GET", "/input_items?limit=many"): "limit",
        ("GET", "/input_items?limit=1000"): "limit",
        ("GET", "/input_items?order=up"): "order",
        ("GET", "/input_items?after=msg_9"): "after",
    }
    for (method, path), param in refused.items():
        answer = await ask(place, method, f"resp_1{path}")
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), path


RATE = 3


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")])
async def test_kept_answers_which_may_have_megabytes_are_given_out_at_the_keys_rate(
    place: Place, method: str, path: str
) -> None:
    _, key = await sync_to_async(create_api_key)(name="k", tenant_name="acme", actor=ACTOR, requests_per_minute=RATE)
    asked = [await ask(place, method, f"resp_1{path}", key) for _ in range(RATE + 1)]
    assert 429 not in [answer.status_code for answer in asked[:RATE]]
    assert (asked[RATE].status_code, asked[RATE].json()["error"]["code"]) == (429, "RATE_LIMITED")
    assert int(asked[RATE].headers["retry-after"]) >= 1


# The playground


@pytest.mark.parametrize("path", ["playground/send", "gateway/apikey/add/", "gateway/modelalias/add/"])
def test_a_session_that_may_only_look_neither_asks_nor_makes_keys_or_aliases(path: str) -> None:
    make_operator()
    create_tenant(name="default", actor=ACTOR)
    document = make_policy(make_people(3)).raw
    PolicyVersion.objects.create(version=1, document=document, sha256="0" * 64, state="active", created_by="ada")
    client = Client()
    assert client.post("/sign-in/", {"name": "ada", "password": PASSWORD}).status_code == 302
    assert client.get("/admin/playground/").status_code == 200
    form = {"surface": "chat", "model": "m", "tenant": "default", "prompt": "Hello"}
    answer = client.post(f"/admin/{path}", form, content_type="application/json")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "NOT_PERMITTED")
    assert not ApiKey.objects.exists()


def test_a_question_that_crosses_the_sign_out_leaves_no_working_key() -> None:
    create_tenant(name="default", actor=ACTOR)
    client = Client()
    client.force_login(make_operator())
    request = RequestFactory().post("/admin/playground/send")
    request.user = User.objects.get()
    request.session = client.session
    _ = request.session.get("anything")  # loads it, as the middleware did
    Session.objects.all().delete()
    with pytest.raises(SignedOut):
        lend_key(request, "default")
    assert not ApiKey.objects.filter(revoked_at=None).exists()


# While the release before still serves


def test_rows_that_an_older_gateway_writes_need_none_of_the_new_columns() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            """
            SELECT table_name, column_name FROM information_schema.columns
             WHERE is_nullable = 'NO' AND column_default IS NULL
               AND (table_name, column_name) IN (
                   ('gateway_requestrecord', 'asked_model'), ('gateway_model', 'fallbacks'), ('gateway_model', 'tokenizer'),
                   ('gateway_model', 'context_tokens'), ('gateway_tenant', 'stores_responses'),
                   ('gateway_tenant', 'responses_kept_days'))
            """
        )
        assert cursor.fetchall() == []
