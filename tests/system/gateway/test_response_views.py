"""Kept answers over HTTP: OpenAI's own client against the routes, and what a raw request gets."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import httpx
import openai
import pytest
import uvicorn
from asgiref.sync import sync_to_async
from channels.routing import ProtocolTypeRouter, URLRouter
from django.db import connections
from django.urls import re_path
from openai.types.responses import ResponseInputMessageItem, ResponseInputText

from gateway.models import StoredResponse
from gateway.runtime import GatewayRuntime
from gateway.services import change_response_policy, create_api_key, create_tenant
from gateway.services.responses import keep_response
from gateway.views.responses import make_response_routes
from tests.system.gateway_server.serving import run_server

pytestmark = pytest.mark.django_db(transaction=True)
ACTOR = "user:ada"
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
def prepare() -> tuple[str, str, str]:
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
    keys = await prepare()
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


async def test_deleting_says_so_in_openais_words(place: Place) -> None:
    answer = await ask(place, "DELETE", "resp_1")

    assert answer.json() == {"id": "resp_1", "object": "response", "deleted": True}


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


async def test_nothing_is_said_or_done_without_a_key(place: Place) -> None:
    for method, path in REQUESTS:
        answer = await ask(place, method, f"resp_1{path}", "mst_wrong")
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "INVALID_API_KEY")
    assert await StoredResponse.objects.acount() == 1


async def test_what_was_kept_is_still_given_out_after_the_policy_was_switched_off(place: Place) -> None:
    switch_off = sync_to_async(change_response_policy)
    await switch_off(name="acme", stores_responses=False, responses_kept_days=3, actor=ACTOR)

    assert (await ask(place, "GET", "resp_1")).status_code == 200
    assert "not kept for this tenant" in (await ask(place, "GET", "resp_2")).json()["error"]["message"]
