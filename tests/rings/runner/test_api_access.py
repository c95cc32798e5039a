"""The node's own port: who may use it, what it shows of itself, whether its documentation is true, and how it leaves."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

import runner.api.server  # noqa: F401  # makes the refusals of the API known
from runner.api.server import _serve
from runner.errors import RequestRefused
from tests.fakes.control_process import free_port
from tests.fakes.runners.process import NO_KEEP_ALIVE, ROOT, ApiBox, is_alive, run_api_box
from tests.fakes.waiting import DEADLINE_S
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.timeout(180)

KEY = "a key of more than 16 characters"
ROUTES = {
    ("get", "/v1/capabilities"), ("post", "/v1/models/load"), ("get", "/v1/models/load/{task_id}"),
    ("post", "/v1/models/unload"),
    ("post", "/v1/cache/flush"), ("get", "/health"), ("get", "/metrics"), ("get", "/v1/models"), ("get", "/v1/models/{name}"),
    ("post", "/v1/chat/completions"), ("post", "/v1/completions"), ("post", "/v1/embeddings"), ("post", "/v1/responses"),
    ("post", "/v1/messages"), ("post", "/v1/tokenize"), ("post", "/v1/images/generations"),
    ("post", "/v1/audio/transcriptions"),
    ("post", "/v1/audio/translations"), ("get", "/v1/admin/models"), ("get", "/v1/admin/gpu-memory"),
    ("post", "/v1/admin/models/{name}/load"), ("post", "/v1/admin/models/{name}/unload"), ("post", "/v1/admin/settings/reload"),
}  # fmt: skip


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiBox]:
    with run_api_box(tmp_path_factory.mktemp("open"), models=("a",), env={"OP_TOKEN_LEVEL": "0"}, has_op_key=False) as running:
        yield running


def test_without_a_key_only_loopback_names_reach_the_box(box: ApiBox) -> None:
    port = urlsplit(box.url).port
    for host in ("localhost", "127.0.0.1", f"127.0.0.1:{port}", "[::1]:80", "LOCALHOST:1"):
        assert box.client.get("/health", headers={"host": host}).status_code == 200, host
    for host in ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", ""):
        reply = box.client.get("/health", headers={"host": host})
        assert (reply.status_code, reply.json()["error"]["code"]) == (403, "forbidden"), host


def test_without_a_key_a_web_page_of_another_origin_cannot_drive_the_box(box: ApiBox) -> None:
    own = f"http://{urlsplit(box.url).netloc}"
    assert box.client.get("/v1/models", headers={"origin": own}).status_code == 200
    for origin in ("http://evil.example", "null", "http://localhost:3000", own + ".evil.example", "file://"):
        reply = box.client.post("/v1/chat/completions", json={"model": "a"}, headers={"origin": origin})
        assert reply.status_code == 403, origin
        assert not [name for name in reply.headers if name.startswith("access-control-")]
    preflight = box.client.request("OPTIONS", "/v1/chat/completions", headers={"origin": "http://evil.example"})
    assert preflight.status_code == 403


def test_without_an_operation_key_nothing_is_loaded(box: ApiBox) -> None:
    reply = box.load("a")
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "operations_disabled")
    pool = box.client.post("/v1/admin/models/a/load", json={})
    assert (pool.status_code, pool.json()["detail"]["code"]) == (403, "operations_disabled")


def test_the_openapi_document_has_every_route_and_its_references_lead_somewhere(box: ApiBox) -> None:
    document = box.client.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    assert {(method, path) for path, methods in document["paths"].items() for method in methods} == ROUTES
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert referred <= set(document["components"]["schemas"])
    assert "contextLength" in document["components"]["schemas"]["LoadedModel"]["properties"]
    capabilities = box.client.get("/v1/capabilities").json()
    assert set(capabilities) == set(document["components"]["schemas"]["CapabilitiesAnswer"]["properties"])


def test_the_page_has_no_script_and_names_of_files_cannot_put_markup_into_it(box: ApiBox) -> None:
    (box.log.parent / "models" / "<b>bold.gguf").write_bytes(b"GGUF")
    reply = box.client.get("/")
    policy = reply.headers["content-security-policy"]
    assert (policy.startswith("default-src 'none'; style-src 'sha256-"), "unsafe" in policy) == (True, False)
    assert not [word for word in ("<script", " style=", "<b>bold") if word in reply.text]
    assert box.wait_for(lambda: {"page": box.client.get("/").text}, lambda seen: "&lt;b&gt;bold" in str(seen["page"]))


def test_with_a_key_every_route_but_health_asks_for_it(tmp_path: Path) -> None:
    with run_api_box(tmp_path, "--api-key", KEY) as running:
        client = running.client
        assert client.get("/health", headers={"host": "box.example"}).status_code == 200
        for path in ("/", "/metrics", "/v1/models", "/openapi.json", "/nowhere", "/v1/admin/models", "/health/"):
            reply = client.get(path)
            assert reply.status_code == 401, path
            assert reply.headers["www-authenticate"] == "Bearer"
            assert "unauthorized" in reply.text
        good: list[dict[str, str]] = [
            {"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY}"}, {"x-api-key": KEY},
            {"x-api-key": KEY, "authorization": "Bearer wrong"}, {"x-api-key": KEY, "origin": "http://page.example"},
        ]  # fmt: skip
        assert [client.get("/v1/models", headers=headers).status_code for headers in good] == [200] * len(good)
        bad: list[dict[str, str]] = [
            {"authorization": KEY}, {"authorization": f"Basic {KEY}"}, {"authorization": "Bearer"}, {"x-api-key": KEY[:-1]},
            {"x-api-key": ""}, {"x-api-key": KEY + "x"}, {"cookie": f"x-api-key={KEY}"},
        ]  # fmt: skip
        assert [client.get("/v1/models", headers=headers).status_code for headers in bad] == [401] * len(bad)
        assert KEY not in running.log_text()
        assert client.get("/openapi.json", headers=good[0]).json()["security"] == [{"key": []}]


def test_a_ticket_is_no_key(tmp_path: Path) -> None:
    """Only the key of the node opens it: nothing that somebody may call a ticket, a token or another server's key does."""
    ticket = base64.urlsafe_b64encode(b'{"aud": "node", "request": "req_1", "tenant": "acme"}').decode()
    digest = hmac.new(KEY.encode(), ticket.encode(), "sha256").hexdigest()
    with run_api_box(tmp_path, "--api-key", KEY) as running:
        client, path = running.client, "/v1/chat/completions"
        for text in (ticket, f"{ticket}.{digest}", digest, mint_credential(CredentialKind.CLIENT).text, "*", "null"):
            for name, value in (
                ("authorization", f"Bearer {text}"), ("authorization", f"Ticket {text}"), ("x-api-key", text),
                ("x-routing-ticket", text), ("x-muster-ticket", text), ("x-admin-key", text), ("cookie", f"ticket={text}"),
            ):  # fmt: skip
                assert client.post(path, headers={name: value}, json={"model": "muster-tiny"}).status_code == 401, (name, value)
            for asked in (f"{path}?ticket={text}", f"{path}?api_key={KEY}", f"{path}?token={KEY}"):
                assert client.post(asked, json={"model": "muster-tiny"}).status_code == 401, asked
        assert client.get("/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200


def test_metrics_move_to_their_own_port_or_are_switched_off(tmp_path: Path) -> None:
    base = f"http://127.0.0.1:{(port := free_port())}"
    with (
        run_api_box(tmp_path, env={"METRICS_PORT": str(port)}) as running,
        httpx.Client(base_url=base, timeout=DEADLINE_S, trust_env=False, limits=NO_KEEP_ALIVE) as client,
    ):
        assert running.client.get("/metrics").status_code == 404
        assert "vllm_queue_depth 0.0" in client.get("/metrics").text
        assert client.get("/v1/models").status_code == 404
        assert client.get("/metrics", headers={"host": "evil.example"}).status_code == 403
    with run_api_box(tmp_path, env={"ENABLE_METRICS": "false"}) as running:
        assert running.client.get("/metrics").status_code == 404


def test_a_box_that_starts_says_so_until_its_first_models_have_settled(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, until = f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "go"
        program = "tests.fakes.runners.process"
        with run_api_box(tmp_path, "--backend", url, env={"HELD_UNTIL": str(until)}, waits=False, program=program) as running:
            reply = running.client.get("/v1/capabilities")
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
            assert int(reply.headers["retry-after"]) >= 1
            health = running.client.get("/health")
            assert (health.status_code, health.json()["reasons"]) == (503, ["the node is starting"])
            assert running.client.get("/").status_code == 200
            until.touch()
            running.wait_for(lambda: running.client.get("/v1/capabilities").json(), lambda body: "runnerType" in body)


def test_settings_files_that_come_after_the_start_are_found(tmp_path: Path) -> None:
    with run_api_box(tmp_path, models=("a",)) as running:

        def names() -> dict[str, object]:
            return dict.fromkeys(entry["name"] for entry in running.client.get("/v1/admin/models").json()["models"])

        for file, model in (("settings.json", "one"), ("local.json", "two")):
            models = {model: {"model_path": "a"}}
            (tmp_path / "data" / file).write_bytes(msgspec.json.encode({"engine": {"backend": "gguf", "models": models}}))
            if model == "one":
                assert running.client.post("/v1/admin/settings/reload").status_code == 200
                assert model in names()
        running.process.send_signal(signal.SIGHUP)
        running.wait_for(names, lambda found: "two" in found)


TEXT = (ROOT / "docs" / "runner-api.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^```sh node\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def refusal_codes() -> set[str]:
    """Return the code of every refusal that a client may see."""
    found, classes = set(), [RequestRefused]
    while classes:
        one = classes.pop()
        found.add(one.code)
        classes += one.__subclasses__()
    return found


def test_the_commands_of_the_page_work_in_their_order(tmp_path: Path) -> None:
    with run_api_box(tmp_path, models=("tiny",)) as box:
        surroundings = {**os.environ, "NODE": box.url, "KEY_FILE": str(tmp_path / "model-api.key"), "PYTHONPATH": str(ROOT)}
        sign = f"{sys.executable} -m runner.operations.sign"
        for block in COMMANDS:
            script = block.replace("./muster sign", sign)
            if "/v1/models/load/$TASK_ID" in script:  # and wait, for what follows needs the model
                box.wait_for(
                    lambda: box.client.get(f"/v1/models/load/{surroundings['TASK_ID']}").json(),
                    lambda task: task["status"] == "completed",
                )
            if "/v1/chat/completions" in script:
                box.ensure_loaded("tiny")
            if "/v1/admin/models/tiny/load" in script:
                box.ensure_unloaded("tiny")
            ran = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, env=surroundings, capture_output=True, text=True,
                check=False, timeout=30,
            )  # fmt: skip
            assert ran.returncode == 0, f"{script}\n{ran.stderr}"
            assert '"error"' not in ran.stdout.replace('"error":null', ""), f"{script}\n{ran.stdout}"
            assert '"detail":{' not in ran.stdout, f"{script}\n{ran.stdout}"
            if '"taskId"' in ran.stdout:
                surroundings["TASK_ID"] = json.loads(ran.stdout)["taskId"]


def test_every_code_and_metric_is_on_the_page_and_no_other(tmp_path: Path) -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| ")]
    documented = {
        code for row in rows if re.match(r"\| [45]\d\d \|", row) for code in re.findall(r"`([a-z_]+)`", row.split("|")[2])
    }
    assert documented == refusal_codes()
    named = {name for row in rows for name in re.findall(r"`((?:vllm|muster_runner)_\w+)", row.split("|")[1])}
    with run_api_box(tmp_path, models=("tiny",)) as box:
        box.ensure_loaded("tiny")
        shown = {
            family.name + ("_total" if family.type == "counter" else "")
            for family in text_string_to_metric_families(box.client.get("/metrics").text)
        }
        paths = [path.replace("{task_id}", "{taskId}") for path in box.client.get("/openapi.json").json()["paths"]]
    assert named == {name for name in shown if ":" not in name}
    engines = {name.partition(":")[0] for name in shown if ":" in name}
    assert engines == {"llamacpp"}
    assert all(f"`{engine}:…`" in TEXT for engine in engines)
    assert [path for path in paths if path not in TEXT and path != "/v1/models/{name}"] == []


HEAD = b"POST /x HTTP/1.1\r\nhost: a\r\n"
CHUNKED = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n"


async def show_headers(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer with the names of the headers, once the body is there."""
    while (await receive()).get("more_body"):
        pass
    body = json.dumps(sorted(name.decode() for name, _ in scope["headers"])).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def ask(data: bytes) -> tuple[int, str]:
    """Return status and body of what these bytes are answered with."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with _serve(show_headers, listener), asyncio.timeout(30):  # type: ignore[arg-type]  # ASGI's open dictionaries
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(data)
            answer = await reader.read()
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET /x HTTP/1.1\r\naccept: */*\r\n\r\n", "Host"), (HEAD + b"host: b\r\n\r\n", "'host'"),
        (HEAD + b"authorization: Bearer a\r\nauthorization: Bearer b\r\n\r\n", "'authorization'"),
        (b"GET /x HTTP/2.0\r\nhost: a\r\n\r\n", "HTTP/2.0"), (HEAD + b"x-a: " + b"b" * 70_000 + b"\r\n\r\n", "65536"),
        (HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nab", "Upgrade"),
    ],
)  # fmt: skip
async def test_a_head_with_two_readings_is_refused_with_what_would_do(data: bytes, said: str) -> None:
    status, message = await ask(data)
    assert (status, said in message) == (400, True)


async def test_a_trailer_becomes_no_header() -> None:
    status, names = await ask(CHUNKED + b"authorization: Bearer key\r\n\r\n")
    assert (status, json.loads(names)) == (200, ["connection", "host", "transfer-encoding"])


SMALL_BUFFER = (socket.SOL_SOCKET, socket.SO_RCVBUF, 256 * 1024)
LONG: dict[str, object] = {"model": "a", "stream": True, "max_tokens": 200, "ignore_eos": True, "n_probs": 1000}
"""Some 15 MB, far more than lies between the node and a client that does not read: it ends when the client has read on."""


def children(box: ApiBox) -> list[psutil.Process]:
    return psutil.Process(box.process.pid).children(recursive=True)


def test_while_the_box_leaves_an_answer_is_finished_and_nothing_new_is_taken(tmp_path: Path) -> None:
    with run_api_box(tmp_path, models=("a",), env={"MUSTER_RUNNER_DRAIN_S": "600"}) as box:
        box.ensure_loaded("a")
        engines = children(box)
        body = {**LONG, "messages": [{"role": "user", "content": "Explain the gateway."}]}
        has_begun, reads_on, whole = threading.Event(), threading.Event(), bytearray()

        def read() -> None:
            transport = httpx.HTTPTransport(socket_options=[SMALL_BUFFER])
            with (
                httpx.Client(base_url=box.url, timeout=DEADLINE_S, trust_env=False, transport=transport) as client,
                client.stream("POST", "/v1/chat/completions", json=body) as reply,
            ):
                for chunk in reply.iter_raw():
                    whole.extend(chunk)
                    has_begun.set()
                    reads_on.wait(DEADLINE_S)

        reader = threading.Thread(target=read)
        reader.start()
        assert has_begun.wait(DEADLINE_S)
        box.process.send_signal(signal.SIGTERM)
        box.wait_for(lambda: box.client.get("/health").json(), lambda health: health["status"] == "unhealthy")
        asked = box.client.post("/v1/chat/completions", json={"model": "a", "messages": []})
        assert (asked.status_code, asked.json()["error"]["code"]) == (503, "unavailable")
        operation = box.flush("all")
        assert (operation.status_code, operation.json()["error"]["code"]) == (503, "unavailable")
        reads_on.set()
        reader.join(DEADLINE_S)
        assert whole.endswith(b"data: [DONE]\n\n")
        assert box.process.wait(DEADLINE_S) == 0
        assert not any(is_alive(engine) for engine in engines)
