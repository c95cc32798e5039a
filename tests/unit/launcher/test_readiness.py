"""Questions to a part, and why a server does not answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from controlplane.launcher.readiness import answers_ok, describe_unreachable, fetch, lists_model, names_process
from tests.fakes.limits import set_limits
from tests.unit.closed_port import closed_port


class _Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.path == "/health" or self.headers.get("Authorization") == "Bearer key"
        body = json.dumps({"data": [{"id": "muster-tiny"}]}).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Stay silent."""


@pytest.fixture
def gateway_port() -> Iterator[int]:
    """A server that answers, however long this machine stands still before it does."""
    set_limits(launcher={"ready_answer_s": 30.0})
    with ThreadingHTTPServer(("127.0.0.1", 0), _Gateway) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_a_part_is_ready_when_it_answers_200(gateway_port: int) -> None:
    assert answers_ok("127.0.0.1", gateway_port, "/health")
    assert not answers_ok("127.0.0.1", gateway_port, "/v1/models")
    with closed_port() as port:
        assert not answers_ok("127.0.0.1", port, "/health")


def test_a_model_counts_when_the_holder_of_the_key_sees_it(gateway_port: int) -> None:
    assert lists_model("127.0.0.1", gateway_port, api_key="key", model="muster-tiny")
    assert not lists_model("127.0.0.1", gateway_port, api_key="key", model="another")
    assert not lists_model("127.0.0.1", gateway_port, api_key="wrong", model="muster-tiny")


def test_nobody_there_is_no_answer() -> None:
    with closed_port() as port:
        assert fetch("127.0.0.1", port, "/") is None


def test_a_server_that_answers_is_reachable(gateway_port: int) -> None:
    assert describe_unreachable(f"postgresql://u:p@127.0.0.1:{gateway_port}/db", default_port=5432) == ""
    assert describe_unreachable("redis://127.0.0.1/0", default_port=gateway_port) == ""


@pytest.mark.parametrize("url", ["postgresql:///muster?host=/nowhere", "unix:///nowhere/valkey.sock?db=0"])
def test_a_missing_socket_is_said(url: str) -> None:
    assert "nothing answers at /nowhere" in describe_unreachable(url, default_port=5432)


def test_a_closed_port_is_said() -> None:
    with closed_port() as port:
        said = describe_unreachable(f"redis://127.0.0.1:{port}", default_port=1)
    assert f"nothing answers at 127.0.0.1 port {port}" in said


def test_a_part_is_ready_when_it_wrote_its_own_id(tmp_path: Path) -> None:
    path = tmp_path / "worker.ready"
    assert not names_process(path, 12)
    path.write_text("")
    assert not names_process(path, 12)
    path.write_text("12\n")
    assert names_process(path, 12)
    assert not names_process(path, 1)
