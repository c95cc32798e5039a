"""Who may not: keys beyond their rate, sessions that only look or have ended. And what the release before still writes."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
import pytest
import uvicorn
from asgiref.sync import sync_to_async
from channels.routing import ProtocolTypeRouter, URLRouter
from django.contrib.sessions.models import Session
from django.db import connection, connections
from django.test import Client, RequestFactory
from django.urls import re_path

from controlplane.playground.errors import SignedOut
from controlplane.playground.keys import lend_key
from core.models import User
from gateway.models import ApiKey
from gateway.runtime import GatewayRuntime
from gateway.services import change_response_policy, create_api_key, create_tenant
from gateway.services.responses import keep_response
from gateway.views.responses import make_response_routes
from governance.models import PolicyVersion
from tests.fakes.policies import make_people, make_policy
from tests.system.gateway_admin.factories import ACTOR, PASSWORD, make_operator
from tests.system.gateway_server.serving import run_server

pytestmark = pytest.mark.django_db(transaction=True)
KEPT = json.dumps({"id": "resp_1", "object": "response", "output": []}).encode()
RATE = 3


@sync_to_async
def prepare() -> str:
    """Keep one answer; return a key of its tenant with a small rate."""
    create_tenant(name="acme", actor=ACTOR)
    change_response_policy(name="acme", stores_responses=True, responses_kept_days=3, actor=ACTOR)
    _, text = create_api_key(name="k", tenant_name="acme", actor=ACTOR, requests_per_minute=RATE)
    keep_response(tenant="acme", key_id=uuid.uuid4(), kept_days=3, model="tiny", previous_id="", input_items=[], body=KEPT)
    return text


@pytest.fixture
async def store() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a gateway with one kept answer, with a key."""
    key = await prepare()
    # Channels routes ASGI applications where Django's types expect views.
    views = [(pattern, cast("Any", application)) for pattern, application in make_response_routes(GatewayRuntime())]
    application = ProtocolTypeRouter({"http": URLRouter([re_path(f"^{pattern}$", view) for pattern, view in views])})
    config = uvicorn.Config(application, port=0, lifespan="off", log_level="error", ws="none", timeout_keep_alive=60)
    async with run_server(uvicorn.Server(config)) as port:
        url, headers = f"http://127.0.0.1:{port}/v1/responses/", {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=30) as client:
            yield client
    await sync_to_async(connections.close_all)()


@pytest.mark.parametrize(("method", "path"), [("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")])
async def test_kept_answers_which_may_have_megabytes_are_given_out_at_the_keys_rate(
    store: httpx.AsyncClient, method: str, path: str
) -> None:
    asked = [await store.request(method, f"resp_1{path}") for _ in range(RATE + 1)]
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
