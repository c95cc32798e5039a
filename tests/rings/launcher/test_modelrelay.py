"""Coming from ModelRelay: its environment file, its worker by frames and by command line, clients without keys, bookmarks."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any  # frames and answers are JSON

import aiohttp
import httpx
import psycopg
import pytest

from controlplane.env import ALIASES
from controlplane.launcher.environment import ROOT
from tests.fakes.control_process import free_port
from tests.fakes.waiting import wait_until
from wire.variables import HIDDEN

pytestmark = pytest.mark.timeout(400)
WORKER, ADMIN = "their-worker-secret", "their-admin-token-1"
OWN = {"DATABASE_URL", "REDIS_URL", "MUSTER_SECRET_KEY"}
QUESTION = {"messages": [{"role": "user", "content": "Hi"}]}


@dataclass(frozen=True)
class Relay:
    """An installation that was started with an environment file of ModelRelay's server."""

    folder: Path
    gateway: str
    ready: dict[str, Any]
    said: str

    def ask(self, model: str, *, key: str = "", stream: bool = False) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        body = {**QUESTION, "model": model, "stream": stream}
        return httpx.post(f"{self.gateway}/v1/chat/completions", json=body, headers=headers, timeout=60)

    def call(self, method: str, path: str, *, token: str = f"Bearer {ADMIN}", **more: Any) -> httpx.Response:
        return httpx.request(method, self.gateway + path, headers={"authorization": token}, timeout=60, **more)

    def lists(self, model: str) -> bool:
        return model in {one["id"] for one in httpx.get(f"{self.gateway}/v1/models").json()["data"]}


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with tempfile.TemporaryDirectory(prefix="muster-relay-", dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o711)
        port = free_port()
        (folder / "modelrelay.env").write_text(
            f"LISTEN_ADDR=127.0.0.1:{port}\nPROVIDER_NAME=lab\nWORKER_SECRET={WORKER}\nMODELRELAY_ADMIN_TOKEN={ADMIN}\n"
            "MODELRELAY_REQUIRE_API_KEYS=false\nMAX_QUEUE_LEN=50\nQUEUE_TIMEOUT_SECS=20\nREQUEST_TIMEOUT_SECS=60\nLOG_LEVEL=warn\n"
        )
        ready = folder / "ready.json"
        up = [sys.executable, str(ROOT / "muster"), "up", "--data", str(folder / "data"), "--ready-file", str(ready)]
        up += ["--port", str(free_port()), "--no-node"]
        script = f"set -a; . {folder}/modelrelay.env; set +a; exec {shlex.join(up)}"
        bare = {name: value for name, value in os.environ.items() if name not in OWN}
        with (folder / "up.log").open("w") as log:
            process = subprocess.Popen(["sh", "-c", script], stdout=log, stderr=log, env=bare, start_new_session=True)
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None, within_s=120, pause_s=0.05)
            said = (folder / "up.log").read_text()
            assert process.poll() is None, said
            yield Relay(folder, f"http://127.0.0.1:{port}", json.loads(ready.read_text()), said)
        finally:
            process.terminate()
            process.wait(timeout=60)


def test_each_variable_that_is_read_is_named_once(relay: Relay) -> None:
    named = {alias.theirs for alias in ALIASES if f"{alias.theirs} is read as {alias.ours}.\n" in relay.said}
    assert named == {alias.theirs for alias in ALIASES} - {"RUST_LOG", "MODELRELAY_REJECT_UNVERSIONED_WORKERS"}
    assert relay.ready["gateway_url"] == relay.gateway


async def serve_frames(relay: Relay, model: str, *, count: int) -> list[dict[str, Any]]:
    """Be ModelRelay's worker on a real socket for ``count`` requests: golden frames, and nothing beyond its wire page."""
    url = f"{relay.gateway.replace('http', 'ws')}/v1/worker/connect?provider=lab"
    asked: list[dict[str, Any]] = []
    async with aiohttp.ClientSession() as client, client.ws_connect(url, headers={"x-worker-secret": WORKER}) as socket:
        await socket.send_str(
            f'{{"type":"register","worker_name":"worker","models":["{model}"],"max_concurrent":1,'
            '"protocol_version":"2026-04-bridge-v1","current_load":0}'
        )
        async for message in socket:
            frame = json.loads(message.data)
            match frame["type"]:
                case "ping":
                    await socket.send_str(json.dumps({"type": "pong", "current_load": 0}))
                case "request":
                    asked.append(frame)
                    for answer in answer_frames(frame):
                        await socket.send_str(json.dumps({"request_id": frame["request_id"], **answer}))
                    if len(asked) == count:
                        break
    return asked


def answer_frames(frame: dict[str, Any]) -> list[dict[str, Any]]:
    whole = {
        "id": "c", "object": "chat.completion", "created": 1, "model": frame["model"],
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    }  # fmt: skip
    done = {"type": "response_complete", "status_code": 200}
    if not frame["is_streaming"]:
        return [{**done, "headers": {"content-type": "application/json"}, "body": json.dumps(whole)}]
    piece = {**whole, "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "Hello"}}]}
    last = {**piece, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    texts = [f"data: {json.dumps(piece)}\n\n", f"data: {json.dumps(last)}\n\n", "data: [DONE]\n\n"]
    chunks = [{"type": "response_chunk", "chunk": text} for text in texts]
    return [*chunks, {**done, "headers": {"content-type": "text/event-stream"}, "body": ""}]


def test_its_worker_serves_requests_without_a_key_as_those_of_their_tenant_and_a_wrong_key_is_refused(relay: Relay) -> None:
    found: list[dict[str, Any]] = []
    worker = threading.Thread(target=lambda: found.extend(asyncio.run(serve_frames(relay, "llama3-8b", count=2))))
    worker.start()
    wait_until(lambda: relay.lists("llama3-8b"), within_s=30)
    wrong = relay.ask("llama3-8b", key="sk-none")
    whole, stream = relay.ask("llama3-8b"), relay.ask("llama3-8b", stream=True)
    worker.join(timeout=60)
    assert (wrong.status_code, whole.status_code, stream.status_code) == (401, 200, 200)
    assert whole.json()["choices"][0]["message"]["content"] == "Hello"
    assert '"Hello"' in stream.text
    assert stream.text.rstrip().endswith("[DONE]")
    assert [frame["endpoint_path"] for frame in found] == ["/v1/chat/completions"] * 2
    with psycopg.connect(relay.ready["database_url"]) as database:
        sql = "SELECT DISTINCT tenant, key_name FROM gateway_requestrecord WHERE model = 'llama3-8b' AND state = 'completed'"
        wait_until(lambda: database.execute(sql).fetchall() == [("keyless", "keyless")], within_s=30)


@contextmanager
def serve_backend() -> Iterator[str]:
    """A server as llama.cpp is one, with one model."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer({"object": "list", "data": [{"id": "phi", "object": "model"}]})

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            frames = answer_frames({"model": asked["model"], "is_streaming": asked.get("stream", False)})
            if not asked.get("stream"):
                self.answer(json.loads(frames[0]["body"]))
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for frame in frames[:-1]:
                self.wfile.write(frame["chunk"].encode())
                self.wfile.flush()

        def answer(self, content: object) -> None:
            body = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("by", ["options", "environment", "file"])
def test_the_command_line_of_its_worker_runs_a_node(relay: Relay, tmp_path: Path, by: str) -> None:
    with serve_backend() as backend:
        values = {
            "proxy_url": relay.gateway, "worker_secret": WORKER, "provider": "lab", "backend_url": backend,
            "models": f"phi-{by}", "worker_name": f"gpu-box-{by}",
        }  # fmt: skip
        names = {"provider": "PROVIDER_NAME"}
        words: list[str] = []
        env = {name: value for name, value in os.environ.items() if name not in OWN}
        if by == "options":
            words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]
        elif by == "environment":
            env |= {names.get(name, name.upper()): value for name, value in values.items()}
        else:
            (tmp_path / "worker.toml").write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
            words = ["--config", str(tmp_path / "worker.toml")]
        command = [sys.executable, str(ROOT / "muster"), "modelrelay-worker", *words]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, env=env, cwd=tmp_path, stdout=log, stderr=log)
        try:
            wait_until(lambda: relay.lists(f"phi-{by}") or process.poll() is not None, within_s=60)
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert relay.ask(f"phi-{by}").json()["choices"][0]["message"]["content"] == "Hello"
            (worker,) = [one for one in relay.call("GET", "/admin/workers").json()["workers"] if by in one["worker_name"]]
            assert (worker["provider"], worker["models"], worker["max_concurrent"]) == ("lab", [f"phi-{by}"], 1)
        finally:
            process.terminate()
            process.wait(timeout=60)


@pytest.mark.skipif(shutil.which("modelrelay-worker") is None, reason="ModelRelay's worker is not on PATH")
def test_the_real_worker_serves_comes_back_after_a_cut_and_leaves(relay: Relay, tmp_path: Path) -> None:
    with serve_backend() as backend:
        given = {
            "PROXY_URL": relay.gateway, "WORKER_SECRET": WORKER, "PROVIDER_NAME": "lab", "BACKEND_URL": backend,
            "WORKER_NAME": "real", "MODELS": "phi-real", "MAX_CONCURRENCY": "2", "LOG_LEVEL": "debug",
        }  # fmt: skip
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(["modelrelay-worker"], env={**os.environ, **given}, stdout=log, stderr=log)
        try:
            for _ in range(2):
                wait_until(lambda: relay.lists("phi-real"), within_s=60)
                assert relay.ask("phi-real").json()["choices"][0]["message"]["content"] == "Hello"
                stream = relay.ask("phi-real", stream=True)
                assert '"Hello"' in stream.text
                assert stream.text.rstrip().endswith("[DONE]")
                assert relay.ask("phi-real", key="sk-none").status_code == 401
                process.send_signal(signal.SIGSTOP)  # until the gateway has cut it off: its pings find nobody
                wait_until(lambda: not relay.lists("phi-real"), within_s=120)
                process.send_signal(signal.SIGCONT)
            wait_until(lambda: relay.lists("phi-real"), within_s=60)
            (worker,) = [one for one in relay.call("GET", "/admin/workers").json()["workers"] if one["worker_name"] == "real"]
            assert (worker["models"], worker["max_concurrent"], worker["reported_load"]) == (["phi-real"], 2, 0)
            assert process.poll() is None, (tmp_path / "log").read_text()
        finally:
            process.terminate()
            process.wait(timeout=60)
        wait_until(lambda: not relay.lists("phi-real"), within_s=60)


def test_its_bookmarks_and_scripts_lead_somewhere(relay: Relay) -> None:
    there = httpx.get(f"{relay.gateway}/dashboard")
    assert (there.status_code, there.headers["location"]) == (302, f"{relay.ready['public_url']}/admin/")
    assert httpx.get(f"{relay.gateway}/setup").status_code == 200
    assert httpx.get(f"{relay.gateway}/health").json().keys() >= {
        "status", "version", "workers_connected", "queue_depth", "uptime_secs",
    }  # fmt: skip
    assert httpx.get(f"{relay.gateway}/v1/worker/connect").status_code == 426
    for token, status in ((f"Bearer {ADMIN}", 200), (ADMIN, 200), ("Bearer nonsense", 403), ("", 403)):
        for path in ("/admin/workers", "/admin/stats", "/admin/keys"):
            assert relay.call("GET", path, token=token).status_code == status, (path, token)
    made = relay.call("POST", "/admin/keys", json={"name": "production-app"})
    assert made.status_code == 201
    assert made.json().keys() >= {"id", "name", "prefix", "created_at", "last_used_at", "revoked", "secret"}
    (listed,) = [one for one in relay.call("GET", "/admin/keys").json()["keys"] if one["id"] == made.json()["id"]]
    assert "secret" not in listed
    assert relay.ask("nothing", key=made.json()["secret"]).status_code == 404
    assert relay.call("DELETE", f"/admin/keys/{listed['id']}").status_code == 204
    wait_until(lambda: relay.ask("nothing", key=made.json()["secret"]).status_code == 401, within_s=10)


@pytest.mark.parametrize(
    ("words", "given", "status", "said"),
    [
        ("--check", {}, 0, "Every setting can be used."),
        ("--check", {"MAX_QUEUE_LEN": "x"}, 1, "MAX_QUEUE_LEN (read as MUSTER_MAX_QUEUE_LEN) must be a whole number, not 'x'"),
        ("node --check --gateway http://h", {"WORKER_SECRET": WORKER}, 0, "WORKER_SECRET is read as MUSTER_TOKEN."),
        ("node --check --gateway http://h", {"MAX_CONCURRENCY": "0"}, 1, "2 settings cannot be used:"),
    ],
    ids=["good", "bad", "good node", "bad node"],
)
def test_a_check_of_the_settings_names_what_is_read_and_what_is_wrong(
    words: str, given: dict[str, str], status: int, said: str
) -> None:
    ended = run_config(*words.split(), **given)
    assert (ended.returncode, said in ended.stdout) == (status, True), ended.stdout + ended.stderr
    assert WORKER not in ended.stdout


def test_the_settings_of_a_running_installation_are_shown_over_those_of_the_shell(relay: Relay) -> None:
    shown = run_config(
        "--json", "--data", str(relay.folder / "data"), LOG_LEVEL="warn", MUSTER_PUBLIC_URL="http://other.example"
    )
    found = {one["name"]: (one["text"], one["origin"]) for one in json.loads(shown.stdout)["settings"]}
    assert found["MUSTER_PUBLIC_URL"] == (relay.ready["public_url"], "installation")
    assert found["MUSTER_LOG_LEVEL"] == ("warn", "alias")
    assert found["MUSTER_SECRET_KEY"] == (HIDDEN, "installation")
    assert found["MUSTER_QUEUE_TIMEOUT_S"] == ("30", "default")


def run_config(*words: str, **given: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in OWN}
    command = [sys.executable, str(ROOT / "muster"), "config", *words]
    return subprocess.run(command, env={**env, **given}, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("program", ["-m controlplane.serve_gateway", "muster up --data {data}"])
def test_without_keys_nothing_listens_for_others_unless_that_address_is_named(program: str, tmp_path: Path) -> None:
    env = {**os.environ, "LISTEN_ADDR": f"0.0.0.0:{free_port()}", "MODELRELAY_REQUIRE_API_KEYS": "false"}
    words = program.format(data=tmp_path / "data").split()
    ended = subprocess.run([sys.executable, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert "MODELRELAY_REQUIRE_API_KEYS (read as MUSTER_REQUIRE_API_KEYS) is off" in ended.stderr
    assert "MUSTER_KEYLESS_ADDRESSES=0.0.0.0" in ended.stderr
    assert not (tmp_path / "data").exists()
