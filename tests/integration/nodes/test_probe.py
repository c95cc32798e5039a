"""The probe of boxes that registered a URL: what an operator is told when nobody answers there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from django.utils import timezone
from pytest_django import Settings

from gateway.services import allow_model
from nodes.models import Node, NodePresence, Reach
from nodes.services import (
    Heartbeat,
    Registration,
    judge_status,
    probe,
    probe_direct_nodes,
    record_heartbeat,
    register_direct_node,
)
from nodes.services.health import explain_unreachable
from nodes.services.overview import read_fleet, read_served_models
from nodes.services.probe import SILENT_S
from nodes.services.sessions import load_node_rows
from tests.integration.nodes.factories import ACTOR, make_credential, make_node
from wire.contract import NodeStatus

pytestmark = pytest.mark.django_db


class _Answering(BaseHTTPRequestHandler):
    status = 200
    seen: list[tuple[str, str]]

    def do_GET(self) -> None:
        type(self).seen.append((self.path, self.headers["host"]))
        self.send_response(self.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        del args


@pytest.fixture
def answering() -> Iterator[tuple[type[_Answering], int]]:
    """A real HTTP server on a free loopback port, and the class that says how it answers."""
    handler = type("Handler", (_Answering,), {"seen": []})
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
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of these tests answer at once, on a machine that may stand still for a moment."""
    monkeypatch.setattr(probe, "_PROBE_TIMEOUT_S", 30.0)


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
    assert handler.seen == [("/engine/v1/models", f"127.0.0.1:{port}")]


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
    long_ago = timezone.now() - timedelta(seconds=SILENT_S + 1)
    NodePresence.objects.update(probed_at=long_ago)
    assert probe_direct_nodes() == 0
    assert record_heartbeat(credential=credential, heartbeat=heartbeat).effective_status is NodeStatus.AVAILABLE
    assert read_served_models() == read_fleet().served_models == frozenset({"m"})


def test_a_node_that_heartbeats_without_url_and_socket_is_offline() -> None:
    node = make_node()
    presence = NodePresence.objects.create(node=node, reported_status="available", last_heartbeat_at=timezone.now())
    assert judge_status(node, presence, now=timezone.now()) is NodeStatus.OFFLINE
    assert "registered no public_base_url" in explain_unreachable(node, presence)


@pytest.mark.parametrize(("error", "age_s", "calls"), [("", 10.0, 0), ("", 31.0, 1), ("refused", 2.0, 0), ("refused", 5.0, 1)])
def test_a_node_that_does_not_answer_is_called_again_sooner(
    answering: tuple[type[_Answering], int], error: str, age_s: float, calls: int
) -> None:
    handler, port = answering
    _direct_node(f"http://127.0.0.1:{port}")
    NodePresence.objects.update(probed_at=timezone.now() - timedelta(seconds=age_s), probe_error=error)
    probe_direct_nodes()
    assert len(handler.seen) == calls
