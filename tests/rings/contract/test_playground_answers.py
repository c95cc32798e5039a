"""The playground on a whole installation: what a browser is sent of an answer, and that leaving ends the request."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.fakes.lab import Lab
from tests.fakes.stack import Stack

pytestmark = pytest.mark.asyncio
SEND, FACTS = "/admin/playground/send", "/admin/playground/facts"
SSE = "text/event-stream"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cookies(stack: Stack) -> dict[str, str]:
    """The cookies of a browser in which the operator has signed in."""
    async with httpx.AsyncClient(base_url=stack.ready.control_url, trust_env=False, timeout=60) as browser:
        await browser.get("/sign-in/")
        who = {"name": stack.ready.admin["username"], "password": stack.ready.admin["password"]}
        answer = await browser.post("/sign-in/", data={**who, "csrfmiddlewaretoken": browser.cookies["csrftoken"]})
        assert answer.status_code == 302, answer.text
        return dict(browser.cookies)


@pytest_asyncio.fixture
async def browser(stack: Stack, cookies: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"x-csrftoken": cookies["csrftoken"]}
    url = stack.ready.control_url
    async with httpx.AsyncClient(base_url=url, cookies=cookies, headers=headers, timeout=60, trust_env=False) as opened:
        yield opened


def form(model: str, **fields: Any) -> dict[str, Any]:
    return {"surface": "chat", "model": model, "tenant": "default", "prompt": "Hello", **fields}


def chunk(text: str) -> bytes:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n".encode()


async def test_an_answer_arrives_piece_by_piece(lab: Lab, browser: httpx.AsyncClient) -> None:
    model = await lab.model()
    box = await lab.box(model)
    request = browser.build_request("POST", SEND, json=form(model, stream=True, temperature="0.5"))
    answering = asyncio.create_task(browser.send(request, stream=True))
    stream = await box.stream()
    assert json.loads(stream.body)["temperature"] == 0.5
    await box.head(stream, content_type=SSE, headers={"set-cookie": "a=1"})
    await box.data(stream, chunk("one"))
    answer = await answering
    pieces = answer.aiter_raw()
    assert b"one" in await anext(pieces)  # before the box has said anything more
    await box.data(stream, chunk("two"))
    assert b"two" in await anext(pieces)
    await box.data(stream, b"data: [DONE]\n\n")
    await box.end(stream)
    assert b"[DONE]" in b"".join([piece async for piece in pieces])
    assert (answer.status_code, answer.headers["content-type"]) == (200, SSE)
    assert answer.headers["x-accel-buffering"] == "no"
    assert "set-cookie" not in answer.headers
    (record,) = await lab.final(model)
    assert record["key_name"] == f"playground: {lab.stack.ready.admin['username']}"
    assert answer.headers["x-request-id"] == f"req_{record['id'].hex}"
    page = await browser.get(answer.headers["x-playground-record"])
    assert (page.status_code, str(record["id"]) in str(page.url)) == (200, True)
    facts = (await browser.get(FACTS, params={"request": answer.headers["x-request-id"]})).json()
    assert (facts["state"], facts["is_final"], facts["node"]) == ("completed", True, record["node_name"])


async def test_leaving_before_the_first_byte_cancels_the_request(lab: Lab, browser: httpx.AsyncClient) -> None:
    model = await lab.model()
    box = await lab.box(model)
    request = browser.build_request("POST", SEND, json=form(model, stream=True))
    answering = asyncio.create_task(browser.send(request, stream=True))
    stream = await box.stream()
    answering.cancel()
    await asyncio.wait({answering})
    assert await box.cancelled(stream) == "client_disconnect"
    (record,) = await lab.final(model)
    assert record["status"] == "cancelled"


async def test_a_refusal_of_the_gateway_arrives_as_it_is(browser: httpx.AsyncClient) -> None:
    refused = await browser.post(SEND, json=form("no such model", surface="messages"))
    assert (refused.status_code, refused.json()["type"]) == (404, "error")
    assert refused.headers["x-request-id"].startswith("req_")


async def test_a_picture_of_five_megabytes_passes(lab: Lab, browser: httpx.AsyncClient) -> None:
    model = await lab.model(max_prompt_chars=20_000_000)
    box = await lab.box(model)
    data = base64.b64encode(bytes(5 * 2**20)).decode()
    image = {"name": "cat.png", "type": "image/png", "data": data}
    answering = asyncio.create_task(browser.post(SEND, json=form(model, image=image)))
    stream = await box.stream()
    await box.answer(stream, b'{"choices":[]}')
    assert (await answering).status_code == 200
    parts = json.loads(stream.body)["messages"][0]["content"]
    assert parts[1]["image_url"]["url"] == f"data:image/png;base64,{data}"
