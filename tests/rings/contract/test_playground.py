"""The code of the playground, run: each program sends what the page itself would send, and prints what it is answered."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.typedefs import Handler

from conformance.engine import speech
from conformance.engine.server import ScriptedEngine
from controlplane.playground.asks import Ask, build_body, read_ask
from controlplane.playground.snippets import write_code
from tests.fakes.lab import Lab
from tests.fakes.stack import Stack

PICTURE = b"\x89PNG" + bytes(range(256))
KEY = "mst_of_the_environment"
NASTY = "It costs $HOME `id` $(id) \\ \\n \"q\" 'q' ü 🦙\nJSON\n\ttab"
TOOLS = [{"name": "weather", "description": NASTY, "parameters": {"type": "object", "properties": {"$city": {}}}}]
PLAIN: dict[str, Any] = {"prompt": NASTY}
FULL: dict[str, Any] = {
    "prompt": NASTY,
    "system": "Be brief.\nAlways.",
    "temperature": "0.5",
    "max_tokens": "20",
    "stream": True,
    "tools": json.dumps(TOOLS),
    "image": {"name": "cat.png", "type": "image/png", "data": base64.b64encode(PICTURE).decode()},
    "priority": "low",
    "fallback_models": "other, third",
}
CASES = [
    (surface, name, fields)
    for surface in ("chat", "messages", "responses", "completions", "embeddings")
    for name, fields in (("plain", PLAIN), ("full", FULL))
]
IDS = [f"{surface} {name}" for surface, name, _ in CASES]


@dataclass
class Heard:
    """What a server on loopback was asked."""

    url: str = ""
    requests: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def heard() -> Iterator[Heard]:
    """The scripted engine, which answers every surface, and what it was asked."""
    kept, ready, ended = Heard(), Event(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    @web.middleware
    async def listen(request: web.Request, handler: Handler) -> web.StreamResponse:
        key = request.headers.get("x-api-key") or str(request.headers.get("authorization"))
        kept.requests.append((request.path, key.removeprefix("Bearer "), await request.json()))
        return await handler(request)

    async def serve() -> None:
        application = ScriptedEngine(("tiny",), native=frozenset({"/v1/messages", "/v1/responses"})).application()
        application.middlewares.append(listen)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        kept.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        loops.append(asyncio.get_running_loop())
        ready.set()
        await ended.wait()
        await runner.cleanup()

    thread = Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield kept
    loops[0].call_soon_threadsafe(ended.set)
    thread.join(30)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the picture, and the key in the environment."""
    (tmp_path / "cat.png").write_bytes(PICTURE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_API_KEY", KEY)
    return tmp_path


def make_ask(surface: str, fields: dict[str, Any]) -> Ask:
    return read_ask(json.dumps({"surface": surface, "model": "tiny", **fields}).encode())


def check_heard(heard: Heard, ask: Ask, *, may_add: frozenset[str] = frozenset()) -> None:
    """Check that exactly what the page would send was heard."""
    ((path, key, body),) = heard.requests
    assert (path, key) == (ask.surface.path, KEY)
    assert {name: value for name, value in body.items() if name not in may_add} == build_body(ask)


@pytest.mark.parametrize("shell", ["bash", "dash"])
@pytest.mark.parametrize(("surface", "name", "fields"), CASES, ids=IDS)
def test_curl_sends_what_the_page_sends(
    heard: Heard, here: Path, surface: str, name: str, fields: dict[str, Any], shell: str
) -> None:
    if shutil.which("curl") is None or shutil.which(shell) is None:
        pytest.skip(f"curl or {shell} is not installed")
    ask = make_ask(surface, fields)
    ran = subprocess.run(
        [shell, "-eu"], input=write_code(ask, base_url=heard.url).curl.encode(), capture_output=True, check=True
    )
    check_heard(heard, ask)
    assert speech.TEXT.split()[0].encode() in ran.stdout or surface == "embeddings"


@pytest.mark.parametrize(("surface", "name", "fields"), CASES, ids=IDS)
def test_python_sends_what_the_page_sends(
    heard: Heard, here: Path, capsys: pytest.CaptureFixture[str], surface: str, name: str, fields: dict[str, Any]
) -> None:
    ask = make_ask(surface, fields)
    exec(compile(write_code(ask, base_url=heard.url).python, "playground.py", "exec"), {})
    # The SDK asks for embeddings as base64 by itself.
    check_heard(heard, ask, may_add=frozenset({"encoding_format"}))
    assert speech.TEXT.split()[0] in capsys.readouterr().out or surface == "embeddings"


SDK = """
class Stub {
    constructor(options) { this.options = options; }
    async take(body) {
        console.error(JSON.stringify([this.options, body]));
        return body.stream ? [] : {data: [{}], choices: [{}]};
    }
    get chat() { return {completions: {create: (body) => this.take(body)}}; }
    get completions() { return this.chat.completions; }
    get responses() { return this.chat.completions; }
    get messages() { return this.chat.completions; }
    get embeddings() { return this.chat.completions; }
}
export default Stub;
"""
"""Stands in for both SDKs, which are not installed here: it says what it was given."""


@pytest.mark.parametrize(("surface", "name", "fields"), CASES, ids=IDS)
def test_node_hands_its_sdk_what_the_page_sends(here: Path, surface: str, name: str, fields: dict[str, Any]) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    for package in ("openai", "@anthropic-ai/sdk"):
        folder = here / "node_modules" / package
        folder.mkdir(parents=True)
        (folder / "package.json").write_text('{"type": "module", "main": "index.js"}')
        (folder / "index.js").write_text(SDK)
    ask = make_ask(surface, fields)
    program = here / "playground.mjs"
    program.write_text(write_code(ask, base_url="http://gateway.test").node)
    ran = subprocess.run([node, program], capture_output=True, check=True, env={**os.environ, "NO_COLOR": "1"})
    options, body = json.loads(ran.stderr)
    base = "http://gateway.test" if surface == "messages" else "http://gateway.test/v1"
    assert (options, body) == ({"baseURL": base, "apiKey": KEY}, build_body(ask))


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
