"""The probe of boxes that registered a URL: what an operator is told when nobody answers there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from pytest_django import Settings

from nodes.models import Node, NodePresence, Reach
from nodes.services import probe, probe_direct_nodes
from tests.integration.nodes.factories import make_node

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
