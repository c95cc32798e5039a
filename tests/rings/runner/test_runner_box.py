"""The real runner process with the real tiny model, against a scripted gateway, and called over HTTP by the control plane."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from datetime import timedelta
from http import HTTPStatus
from pathlib import Path

import pytest
from django.utils import timezone
from pytest_django import Settings

from core.limits import limits
from gateway.services.models import allow_model
from nodes.models import Node, NodePresence
from nodes.services.nodes import Registration, probe_direct_nodes, register_direct_node
from tests.fakes.engines.scripted_server import run_engine
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, make_credential
from tests.fakes.runners.process import PATIENT, is_alive, run_api_box, run_box
from tests.fakes.scripted_gateway import TOKEN, run_gateway
from tests.fakes.waiting import eventually
from wire import bridge, frames
from wire.contract import NodeStatus

pytestmark = pytest.mark.timeout(180)

QUESTION: dict[str, object] = {"messages": [{"role": "user", "content": "What is a generator?"}], "temperature": 0}


def read_events(body: bytes) -> list[dict[str, object]]:
    """Return the JSON of every event but ``[DONE]``."""
    lines = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


async def test_a_box_registers_with_its_loaded_model_and_streams_an_answer(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url, "--provider", "home lab", program=PATIENT):
        box = await gateway.accept()
        assert box.secret == TOKEN
        assert box.path == "/v1/worker/connect?provider=home%20lab"
        assert box.register.protocol_version == bridge.MUSTER_V1
        assert (box.register.worker_name, box.register.models) == ("box-under-test", ["muster-tiny"])
        assert box.register.replicas[0].state == "loaded"
        answer = await (await box.open(QUESTION | {"stream": True, "max_tokens": 60})).finish()
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert all(piece.endswith(b"\n\n") for piece in answer.pieces)
    assert answer.body.endswith(b"data: [DONE]\n\n")
    events = read_events(answer.body)
    assert all(event["choices"] for event in events), "the usage chunk that nobody asked for stays in the node"
    assert answer.end.error == ""
    assert answer.end.usage is not None
    assert answer.end.usage.completion_tokens >= 20


@pytest.mark.parametrize("how", ["http", "close", "name"])
async def test_a_refused_credential_or_name_is_explained_in_one_line_and_not_hammered(tmp_path: Path, how: str) -> None:
    async with run_gateway() as gateway:
        gateway.refusal, gateway.close_code = HTTPStatus.FORBIDDEN if how == "http" else None, 1008
        words = "refuses this node's credential"
        if how == "name":
            gateway.close_reason, words = bridge.NAME_TAKEN, "start one of them with another --name"
        async with run_box(tmp_path, gateway.url) as process:
            await eventually(lambda: words in process.log_text(), "the refusal is explained")
            assert "; retrying every 30 s" in process.log_text()
            assert (gateway.attempts, TOKEN in process.log_text()) == (1, False)


async def test_a_silent_gateway_is_left_and_dialled_again(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url, env={"MUSTER_OFFLINE_AFTER_S": "0.7"}) as process:
        gateway.pings = False
        for _ in range(2):
            await gateway.accept()
        assert "nothing heard" in process.log_text()


async def test_sigterm_drains_what_runs_refuses_the_rest_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url) as process:
        box = await gateway.accept()
        await box.declares("muster-tiny")
        stream = await box.open(QUESTION | {"stream": True, "max_tokens": 30}, window_bytes=500)
        assert (await stream.next()).kind == frames.HEAD
        children = process.children()
        assert children
        process.signal(signal.SIGTERM)
        await box.expect(bridge.Draining)
        late = await (await box.open(QUESTION)).expect_end()
        assert (late.error, late.retryable) == ("busy", True)
        await stream.credit(1 << 20)
        assert (await stream.expect_end()).error == ""
        assert await process.exit_status() == 0
        assert not any(is_alive(child) for child in children)
        await box.expect_loss()


async def test_the_owner_takes_the_box_back_and_lends_it_again_by_signal(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_box(tmp_path, gateway.url) as process:
        box = await gateway.accept()
        process.signal(signal.SIGUSR1)
        assert (await box.expect(bridge.ModeChange)).mode == "spare_off"
        process.signal(signal.SIGUSR2)
        assert (await box.expect(bridge.ModeChange, skip=1)).mode == "spare_on"
        box.socket.transport.abort()
        again = await gateway.accept()
        assert (await again.expect(bridge.ModeChange)).mode == "spare_on"


async def test_a_killed_runner_leaves_nothing_for_ever_and_no_runner_clears_up_after_a_living_one(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as shared:  # the name of a socket in it has to be short
        await check_what_runners_leave(tmp_path, Path(shared))


async def check_what_runners_leave(tmp_path: Path, shared: Path) -> None:
    def left() -> set[str]:
        return {folder.name for folder in shared.iterdir()}

    async with run_gateway() as gateway:
        async with run_box(tmp_path, gateway.url, env={"TMPDIR": str(shared)}) as first:
            await gateway.accept()
            (of_first,) = left()
            async with run_box(tmp_path, gateway.url, "--data", str(tmp_path / "data"), env={"TMPDIR": str(shared)}):
                await gateway.accept()
                assert left() == {of_first}  # a runner with a folder of its own needs none here
            async with run_box(tmp_path, gateway.url, env={"TMPDIR": str(shared)}) as second:
                await gateway.accept()
                assert len(left()) == 2
                await eventually(lambda: len(second.children()) == 1, "one engine process runs")
                child = second.children()[0]
                second.signal(signal.SIGKILL)
                await eventually(lambda: not is_alive(child), "the engine dies with it")
            first.signal(signal.SIGKILL)
        assert len(left()) == 2
        async with run_box(tmp_path, gateway.url, env={"TMPDIR": str(shared)}):
            await gateway.accept()
            assert len(left()) == 1
            assert of_first not in left()


async def test_the_gateways_of_the_ack_are_dialled_too(tmp_path: Path) -> None:
    async with run_gateway() as first, run_gateway() as second:
        first.more_gateways = [first.url + "/", second.url, "ftp://nonsense"]
        async with run_box(tmp_path, first.url):
            one, two = await first.accept(), await second.accept()
            assert one.register.instance_id == two.register.instance_id
            await two.declares("muster-tiny")
            assert (await (await two.open(QUESTION | {"max_tokens": 2})).finish()).status == 200
            assert first.arrivals.empty()


STREAMED: dict[str, object] = {"model": "alpha", "stream": True, "messages": []}


async def test_the_servers_key_is_added_and_a_wrong_one_is_explained_until_it_is_right(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_engine() as engine:
        engine.key = "sk-right"
        wrong = ["--backend", engine.url, "--backend-key", "sk-later"]
        async with run_box(tmp_path, gateway.url, *wrong) as process:
            box = await gateway.accept()

            def last_error() -> str:
                said = [message.last_error for message in box.messages if isinstance(message, bridge.Telemetry)]
                return (said[-1] if said else None) or ""

            async with asyncio.timeout(30), box.news:
                await box.news.wait_for(lambda: "refuses the key (HTTP 401)" in last_error())
            assert box.models() == []
            assert "sk-later" not in process.log_text()
            engine.key = "sk-later"
            await box.declares("alpha", "beta")
            async with asyncio.timeout(30), box.news:
                await box.news.wait_for(lambda: not last_error())
            headers = {"content-type": "application/json", "authorization": "Bearer client", "x-request-id": "r1"}
            await (await box.open(b"{}", headers=headers)).finish()
            _, seen, _ = engine.seen[0]
            assert (seen["authorization"], seen["x-request-id"]) == ("Bearer sk-later", "r1")
            assert seen["accept-encoding"] == "identity"


async def test_a_server_that_is_gone_is_withdrawn_and_declared_again_when_it_is_back(tmp_path: Path) -> None:
    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        await engine.stop()
        end = await (await box.open(STREAMED)).expect_end()
        assert end.error in {"engine_failed", "busy"}, "the second when the node has noticed before"
        assert end.retryable
        await box.declares()
        await engine.start()
        await box.declares("alpha", "beta")


MANAGING = (
    "/v1/models/load", "/v1/models/unload", "/v1/cache/flush", "/v1/admin/models/alpha/unload", "/v1/admin/settings/reload",
    "/v1/model/load", "/v1/model/unload", "/v1/download", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/v1/model/unload?x=1", "/v1/chat/completions/../../model/unload", "/v1//model/unload", "/slots/0?action=erase", "/sleep",
)  # fmt: skip


async def test_paths_that_manage_an_engine_do_not_pass_also_with_forged_headers(tmp_path: Path) -> None:
    forged = {
        "content-type": "application/json", "x-http-method-override": "DELETE", "x-original-url": "/v1/model/unload",
        "x-rewrite-url": "/v1/model/unload", "x-admin-key": "admin",
    }  # fmt: skip
    async with run_gateway() as gateway, run_engine() as engine, run_box(tmp_path, gateway.url, "--backend", engine.url):
        box = await gateway.accept()
        await box.declares("alpha", "beta")
        for path in MANAGING:
            answer = await (await box.open({"model": "alpha"}, path=path, headers=forged)).finish()
            assert answer.status == 400, path
        assert engine.seen == []
        assert (await (await box.open({"model": "alpha"}, headers=forged)).finish()).status == 200
        ((path, headers, _),) = engine.seen
        assert path == "/v1/chat/completions"
        assert not (forged.keys() - {"content-type"}) & {name.lower() for name in headers}


@pytest.mark.django_db
def test_a_real_runner_that_is_called_over_http_is_seen_with_what_it_has_loaded(tmp_path: Path, settings: Settings) -> None:
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    set_limits(nodes={"probe_s": 30.0})
    allow_model(name="a", actor=ACTOR)
    credential, _ = make_credential()
    with run_api_box(tmp_path, models=("a", "b"), env={"MUSTER_API_KEY": "a-key-of-the-node"}) as box:
        box.client.headers["authorization"] = "Bearer a-key-of-the-node"
        about = Registration(node_name="agent", current_model="a", public_base_url=box.url, api_key="a-key-of-the-node")
        registered = register_direct_node(credential=credential, registration=about)
        assert (registered.status, registered.unreachable) == (NodeStatus.AVAILABLE, "")
        presence = NodePresence.objects.get()
        assert (presence.replicas, sorted(presence.available_models or [])) == ([], ["a", "b"])
        box.ensure_loaded("a")
        NodePresence.objects.update(probed_at=timezone.now() - timedelta(seconds=limits().nodes.probe_silent_s + 1))
        assert probe_direct_nodes() == 0
    node = Node.objects.select_related("presence").get()
    assert node.model_names == ["a"]
    assert "/v1/chat/completions" in (node.model_endpoints or {})["a"]
    (replica,) = node.presence.replicas
    assert (replica["model"], replica["state"], replica["engine"]) == ("a", "loaded", "llamacpp")
    assert replica["context_tokens"] > 0
    assert (node.presence.memory or {})["total_mb"] > 0
