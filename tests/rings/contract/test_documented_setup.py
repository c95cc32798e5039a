"""Gateway and control plane set up as docs/lan-and-https.md says, behind nginx and Caddy; and what its readers type.

A block is run when its fence says so: three back-quotes, the language, and the word ``run``.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import psycopg
import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from conformance.engine import script as speech
from conformance.engine.server import ScriptedEngine
from controlplane.launcher.environment import ROOT
from controlplane.playground.asks import Ask, build_body, read_ask
from controlplane.playground.snippets import write_code
from tests.fakes.control_process import ServerProcess, free_port, serve
from tests.fakes.lab import CHAT, Lab, bearer, chat_body, unique
from tests.fakes.proxies import CONTROL_HOST, GATEWAY_HOST, PROXIES, Proxy, run_proxy
from tests.fakes.scripted_box import ScriptedWorker, delta_text
from tests.fakes.stack import Gateway, Stack, answers
from tests.fakes.waiting import eventually, wait_until

SETTINGS = {
    "MUSTER_TRUSTED_PROXIES": "127.0.0.1", "MUSTER_BEHIND_TLS": "true", "MUSTER_ALLOWED_HOSTS": CONTROL_HOST,
    "MUSTER_CSRF_TRUSTED_ORIGINS": f"https://{CONTROL_HOST}", "MUSTER_WORKER_AUTH_FAILURES": "3",
    "MUSTER_WORKER_AUTH_BLOCK_S": "600",
}  # fmt: skip
ATTACKER, VISITOR = "127.0.0.3", "127.0.0.4"
SOCKET = f"wss://{GATEWAY_HOST}/v1/worker/connect"

dials_from_elsewhere = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="dials from other loopback addresses")


@dataclass(frozen=True)
class Site:
    """What stands behind the proxy, and the proxy."""

    proxy: Proxy
    gateway: Gateway
    control: ServerProcess


@pytest.fixture(scope="module", params=sorted(PROXIES))
def site(stack: Stack, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Site]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    with ExitStack() as running:
        gateway = running.enter_context(stack.lend_gateway(f"proxied-{request.param}", SETTINGS))
        port = free_port()
        argv = ["-m", "controlplane.serve_control", "--port", str(port)]
        environment = {**stack.env, **SETTINGS}
        control = running.enter_context(serve(argv, port=port, log=folder / "control.log", env=environment))
        proxy = running.enter_context(run_proxy(request.param, folder, gateway_port=gateway.port, control_port=port))
        yield Site(proxy, gateway, control)


@pytest.mark.parametrize("host", [GATEWAY_HOST, "localhost", "127.0.0.1"])
@pytest.mark.parametrize("path", ["/metrics", "//metrics", "/admin/keys", "/internal/v1/nodes/" + "0" * 32 + "/v1/models"])
@dials_from_elsewhere
async def test_what_is_for_operators_is_not_there_for_the_public(site: Site, host: str, path: str) -> None:
    async with site.proxy.client(host) as client:
        answer = await client.get(f"https://127.0.0.1:{site.proxy.port}{path}")
        assert answer.status_code == 404 or (host != GATEWAY_HOST and not answer.content)
        assert b"muster_" not in answer.content
        health = await client.get("/health", headers={"host": GATEWAY_HOST})
    assert health.json()["service"]


@dials_from_elsewhere
async def test_wrong_worker_secrets_keep_out_who_sends_them_and_no_good_worker(lab: Lab, site: Site) -> None:
    """A node works behind the proxy, and answers a stream piece by piece, while somebody else guesses beside it."""
    forged = {"x-forwarded-for": VISITOR}
    guesses = []
    for _ in range(5):
        guess = await ScriptedWorker.dial(
            SOCKET, secret="msw_guess", local_host=ATTACKER, headers=forged, options=site.proxy.socket_options
        )
        guesses.append(await guess.closed())
    assert guesses[-1] == (1008, "worker authentication temporarily rate limited")

    lab.gateway = site.gateway
    model = await lab.model()
    worker = await ScriptedWorker.dial(SOCKET, secret=lab.secret, local_host=VISITOR, options=site.proxy.socket_options)
    lab.workers.append(worker)
    name = unique("proxied")
    await worker.register([model], name=name)
    assert await eventually(partial(read_address, lab.stack, name), what="the session is written") == VISITOR

    head = {**bearer(lab.stack.ready.api_key), "content-type": "application/json"}
    async with (
        site.proxy.client(GATEWAY_HOST) as client,
        client.stream("POST", CHAT, headers=head, content=chat_body(model, stream=True)) as answer,
    ):
        job = await worker.job()
        pieces = answer.aiter_text()
        for text in ("first", "second"):
            await worker.chunk(job, delta_text(job, text))
            while text not in (piece := await anext(pieces)):
                assert piece == ": ping\n\n"
        await worker.stream(job, [])
        assert "[DONE]" in "".join([piece async for piece in pieces])


async def test_port_80_leads_to_https_and_keeps_method_and_path(site: Site) -> None:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{site.proxy.plain_port}", headers={"host": GATEWAY_HOST}
    ) as client:
        answer = await client.post("/v1/models?x=1", content=b"{}")
    port = answer.headers["location"].removeprefix(f"https://{GATEWAY_HOST}").removesuffix("/v1/models?x=1")
    assert (answer.status_code, port) in {(308, ""), (308, f":{site.proxy.port}")}


async def test_a_large_body_goes_through_and_the_gateway_itself_refuses_one_that_is_too_large(lab: Lab, site: Site) -> None:
    head = {**bearer(lab.stack.ready.api_key), "content-type": "application/json"}
    sizes = [(24, 404, "MODEL_NOT_ALLOWED"), (40, 413, "BODY_TOO_LARGE")]
    # Caddy closes a connection whose body it has not read: over HTTP/1.1 whoever still sends sees a reset.
    for size_mb, status, said in sizes if site.proxy.name == "nginx" else sizes[:1]:
        async with site.proxy.client(GATEWAY_HOST) as client:
            messages = [{"role": "user", "content": "x" * 1000}]
            body = json.dumps({"model": "none", "messages": messages, "pad": "x" * (size_mb << 20)})
            answer = await client.post(CHAT, headers=head, content=body.encode())
            assert (answer.status_code, said in answer.text) == (status, True), answer.text[:300]


async def read_address(stack: Stack, name: str) -> str | None:
    """Return where a node's session comes from; None = it has none yet."""
    query = "SELECT peer_address FROM nodes_nodepresence p JOIN nodes_node n ON n.id = p.node_id WHERE n.name = %s"
    async with await psycopg.AsyncConnection.connect(stack.ready.database_url) as database:
        row = await (await database.execute(query, (name,))).fetchone()
    return row[0] if row else None


@dials_from_elsewhere
async def test_the_sign_in_throttle_sees_who_guesses(lab: Lab, site: Site) -> None:
    name = unique("guessed")
    before = count_guesses(lab.stack)
    for number in range(4):
        async with site.proxy.client(CONTROL_HOST, local=ATTACKER, x_forwarded_for=f"10.1.2.{number}") as client:
            page = await client.get("/sign-in/")
            token = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', page.text)
            assert token is not None
            assert page.headers["strict-transport-security"]
            head = {"origin": f"https://{CONTROL_HOST}", "cookie": page.headers["set-cookie"].split(";")[0]}
            form = {"name": name, "password": "guess", "csrfmiddlewaretoken": token[1]}
            assert (await client.post("/sign-in/", data=form, headers=head)).status_code == 403
    after = count_guesses(lab.stack)
    assert (set(after), after[ATTACKER] - before.get(ATTACKER, 0)) == ({ATTACKER}, 4)


def count_guesses(stack: Stack) -> dict[str, int]:
    query = "SELECT address, max(count) FROM governance_signinfailure WHERE address <> '' GROUP BY address"
    with psycopg.connect(stack.ready.database_url) as database:
        return dict(database.execute(query).fetchall())


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
RUNNABLE = re.compile(r"^```(sh|python) run\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MODEL = "muster-tiny"
BLOCKS = [
    pytest.param(language, code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (language, code) in enumerate(RUNNABLE.findall(page.read_text(encoding="utf-8")), 1)
]


@pytest.fixture(scope="module")
def served(stack: Stack, worker_secret: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    directory = tmp_path_factory.mktemp("node")
    token = directory / "worker.token"
    token.write_text(worker_secret, encoding="utf-8")
    command = [sys.executable, str(ROOT / "muster"), "node", "--gateway", stack.ready.gateway_url]
    command += ["--token-file", str(token), "--name", "documented"]
    with (directory / "node.log").open("wb") as log:
        node = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            address = f"{stack.ready.gateway_url}/v1/models/{MODEL}"
            wait_until(lambda: node.poll() is not None or answers(address), within_s=120, what="the node serves the tiny model")
            assert node.poll() is None, Path(log.name).read_text(encoding="utf-8")
            yield stack
        finally:
            node.terminate()
            node.wait(60)


def fill_in(code: str, stack: Stack) -> str:
    filled = code.replace("http://127.0.0.1:8080", stack.ready.gateway_url)
    filled = filled.replace("http://127.0.0.1:8000", stack.ready.control_url)
    filled = filled.replace("mst_…", stack.ready.api_key).replace("curl ", "curl --silent --show-error --fail-with-body ")
    launcher, data = f"{sys.executable} {ROOT / 'muster'}", stack.directory / "data"
    filled = filled.replace("./muster demo governance", f"{launcher} demo governance --data {data}")
    return filled.replace("./muster manage", f"{launcher} manage --data {data}")


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 5


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("language", "code"), BLOCKS)
def test_a_documented_command_does_what_the_page_says(language: str, code: str, served: Stack) -> None:
    interpreter = ["sh", "-e", "-c"] if language == "sh" else [sys.executable, "-c"]
    # Not the servers of the other tests: a reader has none of these set.
    foreign = ("DATABASE_URL", "REDIS_URL", "DJANGO_", "MUSTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    secrets = {"MUSTER_API_KEY": served.ready.api_key, "MUSTER_ADMIN_TOKEN": served.ready.admin_token}
    ran = subprocess.run(
        [*interpreter, fill_in(code, served)], cwd=ROOT, env=environment | secrets, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip()
    assert '"error":{' not in ran.stdout.replace(" ", "")


PICTURE = b"\x89PNG" + bytes(range(256))
KEY = "mst_of_the_environment"
NASTY = "It costs $HOME `id` $(id) \\ \\n \"q\" 'q' ü 🦙\nJSON\n\ttab"
TOOLS = [{"name": "weather", "description": NASTY, "parameters": {"type": "object", "properties": {"$city": {}}}}]
PLAIN: dict[str, Any] = {"prompt": NASTY}
FULL: dict[str, Any] = {
    "prompt": NASTY, "system": "Be brief.\nAlways.", "temperature": "0.5", "max_tokens": "20", "stream": True,
    "tools": json.dumps(TOOLS), "image": {"name": "cat.png", "type": "image/png", "data": base64.b64encode(PICTURE).decode()},
    "priority": "low", "fallback_models": "other, third",
}  # fmt: skip
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
    (tmp_path / "cat.png").write_bytes(PICTURE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MUSTER_API_KEY", KEY)
    return tmp_path


def make_ask(surface: str, fields: dict[str, Any]) -> Ask:
    return read_ask(json.dumps({"surface": surface, "model": "tiny", **fields}).encode())


def check_heard(heard: Heard, ask: Ask, *, may_add: frozenset[str] = frozenset()) -> None:
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
