"""The probe of boxes that registered a URL: what an operator is told when nobody answers there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from django.utils import timezone
from pytest_django import Settings

from core.limits import limits
from gateway.services import allow_model
from nodes.models import Node, NodePresence, Reach
from nodes.serializers import NodeSerializer
from nodes.services import (
    Heartbeat,
    Registration,
    describe_box,
    judge_status,
    probe_direct_nodes,
    record_heartbeat,
    register_direct_node,
    set_api_key,
)
from nodes.services.clock import clock_of, with_clock
from nodes.services.health import explain_unreachable
from nodes.services.overview import read_fleet, read_served_models
from nodes.services.sessions import load_node_rows
from tests.fakes.limits import set_limits
from tests.fakes.runners.api_process import run_api_box
from tests.system.nodes.factories import ACTOR, make_credential, make_node
from tests.unit.nodes.test_reports import CAPABILITIES
from wire.contract import NodeStatus

pytestmark = pytest.mark.django_db

EXAMPLE = CAPABILITIES.encode()


class _Answering(BaseHTTPRequestHandler):
    status = 200
    capabilities: tuple[int, bytes] = (404, b"")
    api_key = ""
    seen: list[tuple[str, str]]
    bearers: list[str | None]

    def do_GET(self) -> None:
        type(self).seen.append((self.path, self.headers["host"]))
        type(self).bearers.append(self.headers["authorization"])
        status, body = self.capabilities if self.path.endswith("/v1/capabilities") else (self.status, b"")
        if self.api_key and self.headers["authorization"] != f"Bearer {self.api_key}":
            status, body = 401, b""
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if 300 <= status < 400:
            self.send_header("location", "/elsewhere")
        self.end_headers()
        with suppress(ConnectionError):  # who has read enough of a body hangs up
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        del args


@pytest.fixture
def answering() -> Iterator[tuple[type[_Answering], int]]:
    """A real HTTP server on a free loopback port, and the class that says how it answers."""
    handler = type("Handler", (_Answering,), {"seen": [], "bearers": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield handler, server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def loopback_allowed(settings: Settings) -> None:
    """Boxes of these tests live on loopback."""
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True


@pytest.fixture(autouse=True)
def _patient() -> None:
    """The servers of these tests answer at once, on a machine that may stand still for a moment."""
    set_limits(nodes={"probe_s": 30.0})


def _direct_node(url: str) -> Node:
    node = make_node(reach=Reach.DIRECT, public_base_url=url)
    NodePresence.objects.get_or_create(node=node)
    return node


def test_a_box_that_answers_is_marked_as_reachable_and_asked_below_its_base_path(
    answering: tuple[type[_Answering], int],
) -> None:
    """The request names the URL's host and goes below its path."""
    handler, port = answering
    node = _direct_node(f"http://127.0.0.1:{port}/engine")
    assert probe_direct_nodes() == 0
    presence = NodePresence.objects.get(node=node)
    assert presence.probe_error == ""
    assert presence.probed_at is not None
    host = f"127.0.0.1:{port}"
    assert handler.seen == [("/engine/v1/capabilities", host), ("/engine/v1/models", host)]


def test_a_closed_port_is_reported_in_words() -> None:
    """Nobody listens on the port."""
    with socket.socket() as placeholder:
        placeholder.bind(("127.0.0.1", 0))
        port = placeholder.getsockname()[1]
        node = _direct_node(f"http://127.0.0.1:{port}")
        assert probe_direct_nodes() == 1
    assert "ConnectError" in NodePresence.objects.get(node=node).probe_error


def test_a_failing_server_is_reported_with_its_status(answering: tuple[type[_Answering], int]) -> None:
    """A 5xx is an answer nobody can use."""
    handler, port = answering
    handler.status = 502
    node = _direct_node(f"http://127.0.0.1:{port}")
    assert probe_direct_nodes() == 1
    assert NodePresence.objects.get(node=node).probe_error == "answers with 502"


def test_an_address_that_is_no_longer_allowed_is_not_called(
    answering: tuple[type[_Answering], int], settings: Settings
) -> None:
    """The guard holds for probes too."""
    handler, port = answering
    node = _direct_node(f"http://127.0.0.1:{port}")
    settings.NODE_DIRECT_ALLOW_LOOPBACK = False
    assert probe_direct_nodes() == 1
    assert NodePresence.objects.get(node=node).probe_error
    assert handler.seen == []


def test_a_node_whose_url_nobody_listens_on_is_told_so_and_is_not_available_until_a_call_succeeds(
    answering: tuple[type[_Answering], int],
) -> None:
    handler, port = answering
    handler.status = 503
    credential, _ = make_credential()
    about = Registration(node_name="agent", current_model="m", public_base_url=f"http://127.0.0.1:{port}")
    allow_model(name="m", actor=ACTOR)
    registered = register_direct_node(credential=credential, registration=about)
    assert registered.unreachable == "answers with 503"
    heartbeat = Heartbeat(node_id=registered.node.pk, status=NodeStatus.AVAILABLE, is_accepting_jobs=True)
    beaten = record_heartbeat(credential=credential, heartbeat=heartbeat)
    assert (beaten.effective_status, beaten.unreachable) == (NodeStatus.OFFLINE, "answers with 503")
    (row,) = load_node_rows()
    assert row.unreachable == "answers with 503"
    assert read_fleet().served_models == frozenset()
    handler.status = 404  # it has no such path, and it is there
    long_ago = timezone.now() - timedelta(seconds=limits().nodes.probe_silent_s + 1)
    NodePresence.objects.update(probed_at=long_ago)
    assert probe_direct_nodes() == 0
    assert record_heartbeat(credential=credential, heartbeat=heartbeat).effective_status is NodeStatus.AVAILABLE
    assert read_served_models() == read_fleet().served_models == frozenset({"m"})


def test_a_node_that_heartbeats_without_url_and_socket_is_offline() -> None:
    node = make_node()
    presence = NodePresence.objects.create(node=node, reported_status="available", last_heartbeat_at=timezone.now())
    assert judge_status(node, presence, now=timezone.now()) is NodeStatus.OFFLINE
    assert "registered no public_base_url" in explain_unreachable(node, presence)


@pytest.mark.parametrize(    ("error", "tells", "age_s", "calls"),
    [
        ("", False, 10.0, 0), ("", False, 31.0, 1), ("refused", False, 2.0, 0), ("refused", False, 5.0, 1),
        ("", True, 3.0, 0), ("", True, 5.0, 1), ("refused", True, 5.0, 1),
    ],
)  # fmt: skip
def test_a_node_that_does_not_answer_or_tells_its_capabilities_is_called_again_sooner(
    answering: tuple[type[_Answering], int], error: str, tells: bool, age_s: float, calls: int
) -> None:
    handler, port = answering
    handler.capabilities = (200, EXAMPLE)
    _direct_node(f"http://127.0.0.1:{port}")
    before = timezone.now() - timedelta(seconds=age_s)
    NodePresence.objects.update(probed_at=before, probe_error=error, capabilities_at=before if tells else None)
    probe_direct_nodes()
    assert len(handler.seen) == calls


def test_what_a_node_says_of_its_capabilities_stands_where_the_telemetry_of_a_dialled_in_node_does(
    answering: tuple[type[_Answering], int],
) -> None:
    handler, port = answering
    handler.capabilities = (200, EXAMPLE)
    node = _direct_node(f"http://127.0.0.1:{port}")
    Node.objects.update(gpu_name="NVIDIA H100", model_names=["registered"])
    assert probe_direct_nodes() == 0
    node = with_clock(Node.objects.select_related("provider", "presence")).get()
    said = NodeSerializer(node).data
    assert (said["status"], said["reachable"], said["models"]) == ("available", True, ["meta-llama/Llama-3.1-70B-Instruct"])
    assert [(one["model"], one["state"]) for one in said["replicas"]] == [
        ("meta-llama/Llama-3.1-70B-Instruct", "loaded"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "loading"),
    ]
    assert said["available_models"] == ["meta-llama/Llama-3.1-8B-Instruct", "deepseek-ai/deepseek-r1-distill-llama-70b"]
    assert (said["queue_depth"], said["avg_wait_ms"], said["vram_free_mb"]) == (3, 150, 23920)
    (row,) = load_node_rows()
    assert row.contexts == {"meta-llama/Llama-3.1-70B-Instruct": 32768}
    view = describe_box(node, now=clock_of(node))
    assert view.memory is not None
    assert (view.memory.total_mb, view.memory.used_mb, view.gpus[0].name) == (81920, 58000, "NVIDIA H100")
    assert (view.changing[0].percent, view.changing[0].eta_s) == (45, 180.0)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ((503, b"starting"), "answers with 503"),
        ((200, b"[" + b" " * (1024 * 1024)), "ReadError: GET /v1/capabilities answers with more than 1048576 bytes"),
        ((200, b"<html>"), ""),
        ((200, b'{"models": {"loaded": [{"id": 7}]}}'), ""),
        ((302, b""), ""),
        ((404, b""), ""),
        ((500, b""), ""),
    ],
)
def test_a_call_that_tells_nothing_changes_nothing_but_whether_the_node_is_reachable(
    answering: tuple[type[_Answering], int], answer: tuple[int, bytes], error: str
) -> None:
    handler, port = answering
    handler.capabilities = (200, EXAMPLE)
    _direct_node(f"http://127.0.0.1:{port}")
    probe_direct_nodes()
    changed = {"presence__probed_at", "presence__probe_error"}
    fields = [f"presence__{field.attname}" for field in NodePresence._meta.concrete_fields]
    kept = [name for name in ("model_names", "model_endpoints", *fields) if name not in changed]
    before = Node.objects.values(*kept).get()
    NodePresence.objects.update(probed_at=timezone.now() - timedelta(seconds=limits().nodes.probe_silent_s + 1))
    handler.capabilities = answer
    assert probe_direct_nodes() == bool(error)
    assert Node.objects.values(*kept).get() == before
    assert NodePresence.objects.get().probe_error == error


@pytest.mark.parametrize(
    ("health", "beats", "status", "last_error"),
    [
        ("healthy", None, "available", ""),
        ("unhealthy", None, "error", "the node says that its health is unhealthy"),
        ("healthy", NodeStatus.DRAINING, "draining", ""),
        ("unhealthy", NodeStatus.BUSY, "busy", ""),
    ],
)
def test_a_node_that_never_sent_a_heartbeat_lives_by_its_capabilities_and_any_other_by_its_heartbeats(
    answering: tuple[type[_Answering], int], health: str, beats: NodeStatus | None, status: str, last_error: str
) -> None:
    handler, port = answering
    handler.capabilities = (200, EXAMPLE.replace(b'"healthy"', b'"%s"' % health.encode()))
    allow_model(name="m", actor=ACTOR)
    credential, _ = make_credential()
    about = Registration(node_name="agent", current_model="m", public_base_url=f"http://127.0.0.1:{port}")
    registered = register_direct_node(credential=credential, registration=about)
    assert registered.status is (NodeStatus.AVAILABLE if health == "healthy" else NodeStatus.ERROR)
    if beats is not None:
        heartbeat = Heartbeat(node_id=registered.node.pk, status=beats, is_accepting_jobs=beats is not NodeStatus.DRAINING)
        record_heartbeat(credential=credential, heartbeat=heartbeat)
    earlier = timezone.now() - timedelta(minutes=5)
    NodePresence.objects.update(probed_at=earlier)
    heard_at = NodePresence.objects.get().last_heartbeat_at
    assert probe_direct_nodes() == 0
    presence = NodePresence.objects.get()
    assert (presence.reported_status, presence.last_error) == (status, last_error)
    assert (presence.last_heartbeat_at == heard_at) is (beats is not None)


def test_a_node_that_holds_a_socket_is_not_overwritten_by_what_its_url_says(answering: tuple[type[_Answering], int]) -> None:
    handler, port = answering
    handler.capabilities = (200, EXAMPLE)
    _direct_node(f"http://127.0.0.1:{port}")
    NodePresence.objects.update(connected=True)
    probe_direct_nodes()
    assert NodePresence.objects.get().replicas == []


@pytest.mark.parametrize(
    ("first", "second", "url", "kept"),
    [
        ("k1", None, "", "k1"),
        ("k1", "k1", "", "k1"),
        ("k1", "k2", "", "k2"),
        ("k1", "", "", ""),
        ("k1", None, "/elsewhere", ""),
        ("k1", "k1", "/elsewhere", "k1"),
        (None, "k2", "", "k2"),
    ],
)
def test_a_key_is_kept_until_another_is_given_or_the_node_has_another_url(
    answering: tuple[type[_Answering], int], first: str | None, second: str | None, url: str, kept: str
) -> None:
    handler, port = answering
    allow_model(name="m", actor=ACTOR)
    credential, _ = make_credential()
    about = Registration(node_name="agent", current_model="m", public_base_url=f"http://127.0.0.1:{port}", api_key=first)
    register_direct_node(credential=credential, registration=about)
    handler.bearers.clear()
    register_direct_node(
        credential=credential, registration=replace(about, public_base_url=about.public_base_url + url, api_key=second)
    )
    wanted = f"Bearer {kept}" if kept else None
    assert set(handler.bearers) == {wanted}
    assert Node.objects.get().read_api_key() == kept
    (row,) = load_node_rows()
    assert (row.api_key, "k1" in repr(row), "k1" in repr(about)) == (kept, False, False)


def test_the_same_key_again_is_no_change(answering: tuple[type[_Answering], int]) -> None:
    _, port = answering
    allow_model(name="m", actor=ACTOR)
    credential, _ = make_credential()
    about = Registration(node_name="agent", current_model="m", public_base_url=f"http://127.0.0.1:{port}", api_key="k1")
    register_direct_node(credential=credential, registration=about)
    before = Node.objects.values("sealed_api_key", "updated_at").get()
    register_direct_node(credential=credential, registration=about)
    assert Node.objects.values("sealed_api_key", "updated_at").get() == before


def test_a_key_that_the_node_does_not_accept_or_that_cannot_be_decrypted_is_said(
    answering: tuple[type[_Answering], int], settings: Settings
) -> None:
    handler, port = answering
    handler.api_key, handler.capabilities = "right", (200, EXAMPLE)
    node = _direct_node(f"http://127.0.0.1:{port}")
    assert probe_direct_nodes() == 0  # without a key any answer says that somebody is there
    set_api_key(node_id=node.pk, api_key="wrong", actor=ACTOR)
    assert probe_direct_nodes() == 1
    assert "does not accept the API key" in NodePresence.objects.get().probe_error
    set_api_key(node_id=node.pk, api_key="right", actor=ACTOR)
    assert probe_direct_nodes() == 0
    assert NodePresence.objects.get().queue_depth == 3
    NodePresence.objects.update(probed_at=None)
    settings.SECRET_KEY = "another"
    handler.seen.clear()
    assert probe_direct_nodes() == 1
    assert "MUSTER_SECRET_KEY" in NodePresence.objects.get().probe_error
    assert (handler.seen, load_node_rows()[0].api_key) == ([], "")


def test_a_key_does_not_follow_a_redirect(answering: tuple[type[_Answering], int]) -> None:
    handler, port = answering
    handler.capabilities = (307, b"")
    handler.status = 307
    node = _direct_node(f"http://127.0.0.1:{port}")
    set_api_key(node_id=node.pk, api_key="k1", actor=ACTOR)
    probe_direct_nodes()
    assert [path for path, _ in handler.seen] == ["/v1/capabilities", "/v1/models"]


def test_a_real_runner_that_is_called_over_http_is_seen_with_what_it_has_loaded(tmp_path: Path) -> None:
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
