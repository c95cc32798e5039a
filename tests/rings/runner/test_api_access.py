"""Who may use the box's own port, what it shows of itself, and where its metrics are."""

from __future__ import annotations

import base64
import hmac
import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from tests.fakes.control_process import free_port
from tests.fakes.runners.api_process import DEADLINE_S, NO_KEEP_ALIVE, ApiBox, run_api_box
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


def test_the_page_says_how_the_box_is_without_a_script(box: ApiBox) -> None:
    reply = box.client.get("/")
    policy = reply.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "<script" not in reply.text
    assert " style=" not in reply.text
    assert "/v1/chat/completions" in reply.text
    assert "healthy" in reply.text


def test_names_of_files_cannot_put_markup_into_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "<b>bold.gguf").write_bytes(b"GGUF")
    with run_api_box(tmp_path) as running:
        text = running.client.get("/").text
    assert "&lt;b&gt;bold" in text
    assert "<b>bold" not in text


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


def test_a_port_that_is_taken_is_explained(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = rf"runner: cannot listen on 127\.0\.0\.1 port {port}: .*--api-port"
        with pytest.raises(AssertionError, match=words), run_api_box(tmp_path, "--api-port", str(port)):
            pass


def test_settings_are_read_again_and_conflicts_change_nothing(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    settings = data / "settings.json"

    def write(**models: dict[str, object]) -> None:
        settings.write_bytes(msgspec.json.encode({"engine": {"backend": "gguf", "models": models}}))

    write(one={"model_path": "a"}, two={"model_path": "a"})
    with run_api_box(tmp_path, models=("a",)) as running:
        client = running.client
        write(one={"model_path": "a"}, two={"model_path": "a", "gguf_n_ctx": 512}, three={"model_path": "a"})
        changed = client.post("/v1/admin/settings/reload").json()
        assert changed == {
            "added_models": ["three"], "removed_models": [], "updated_models": ["two"], "unchanged_models": ["one"],
            "service_restart_required": False,
        }  # fmt: skip
        running.ensure_loaded("two")
        write(one={"model_path": "a"})
        refused = client.post("/v1/admin/settings/reload")
        detail = refused.json()["detail"]
        assert (refused.status_code, detail["code"]) == (409, "settings_reload_conflict")
        assert detail["conflicts"] == ["engine.models.two"]
        settings.write_text("{ no json", encoding="utf-8")
        broken = client.post("/v1/admin/settings/reload")
        assert (broken.status_code, broken.json()["detail"]["code"]) == (400, "invalid_settings")
        names = [entry["name"] for entry in client.get("/v1/admin/models").json()["models"]]
        assert {"one", "two", "three"} <= set(names)


def test_a_box_that_starts_says_so_until_its_first_models_have_settled(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url, until = f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path / "go"
        program = "tests.fakes.runners.held_runner"
        with run_api_box(tmp_path, "--backend", url, env={"HELD_UNTIL": str(until)}, waits=False, program=program) as running:
            reply = running.client.get("/v1/capabilities")
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
            assert int(reply.headers["retry-after"]) >= 1
            health = running.client.get("/health")
            assert (health.status_code, health.json()["reasons"]) == (503, ["the box is starting"])
            assert running.client.get("/").status_code == 200
            until.touch()
            running.wait_for(lambda: running.client.get("/v1/capabilities").json(), lambda body: "runnerType" in body)


def _has(name: str) -> Callable[[dict[str, object]], bool]:
    return lambda found: name in found


@pytest.mark.parametrize("by_signal", [False, True])
def test_settings_files_that_come_after_the_start_are_found(tmp_path: Path, *, by_signal: bool) -> None:
    data = tmp_path / "data"
    with run_api_box(tmp_path, models=("a",)) as running:
        client = running.client

        def states() -> dict[str, object]:
            return {entry["name"]: entry["runtime_state"] for entry in client.get("/v1/admin/models").json()["models"]}

        def reload() -> None:
            if by_signal:
                running.process.send_signal(signal.SIGHUP)
            else:
                assert client.post("/v1/admin/settings/reload").status_code == 200

        for file, model in (("settings.json", "one"), ("local.json", "two")):
            models = {model: {"model_path": "a"}}
            (data / file).write_bytes(msgspec.json.encode({"engine": {"backend": "gguf", "models": models}}))
            reload()
            running.wait_for(states, _has(model))
