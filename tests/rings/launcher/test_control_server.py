"""The control plane's server as a process: flow control, timeouts, stops, health, and whose address it sees behind a proxy."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from django.utils import timezone
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from core.models import User
from governance.models import SignInFailure
from tests.fakes.control_process import ROOT, ServerProcess, free_port, serve, serve_control
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


APPLICATION = str(ROOT / "tests" / "fakes" / "flow_application.py")
FLAT_MB = 24.0
"""Far below what 3 s of an endless sender cost without flow control (hundreds of MB), far above noise."""
WATCH_S = 3.0


@contextmanager
def running(tmp_path: Path, **options: float) -> Iterator[ServerProcess]:
    port = free_port()
    argv = [APPLICATION, str(port), json.dumps(options)]
    with serve(argv, port=port, log=tmp_path / "server.log", env={"PYTHONPATH": "."}) as server:
        yield server


def growth_mb(server: ServerProcess) -> float:
    """Return by how much the process grew at most while a client misbehaved for WATCH_S seconds."""
    before, most = server.rss_mb(), 0.0
    deadline = time.monotonic() + WATCH_S
    while time.monotonic() < deadline:
        most = max(most, server.rss_mb())
        assert not server.has_ended(within_s=0.05)
    return most - before


def start(server: ServerProcess, sent: bytes, source: str = "127.0.0.1") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.port), timeout=30, source_address=(source, 0))
    client.sendall(sent)
    return client


def request(server: ServerProcess, path: str, more: str = "") -> socket.socket:
    return start(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{more}\r\n".encode())


def is_cut_off(client: socket.socket) -> bool:
    """Return whether the server reset the connection, after what was still on its way."""
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        return True
    return False


def get(server: ServerProcess, path: str, timeout: float = 30.0) -> bytes:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout)
    client.request("GET", path)
    body = client.getresponse().read()
    client.close()
    return body


UPGRADE = (
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
)


@pytest.mark.parametrize(("more", "status"), [("", b"200"), (UPGRADE, b"101")], ids=["response", "socket"])
def test_a_client_that_never_reads_costs_no_memory(tmp_path: Path, more: str, status: bytes) -> None:
    with running(tmp_path) as server, request(server, "/endless", more) as client:
        assert client.recv(12) == b"HTTP/1.1 " + status
        assert growth_mb(server) < FLAT_MB
        assert get(server, "/echo") == b"read 0"


def test_a_client_that_floods_a_slow_application_is_held_back(tmp_path: Path) -> None:
    frame = b"y" * 60_000
    with (
        running(tmp_path) as server,
        connect(f"ws://127.0.0.1:{server.port}/slow", open_timeout=30, close_timeout=0.1) as client,
    ):
        client.socket.setblocking(True)
        client.socket.settimeout(0.5)
        before, sent = server.rss_mb(), 0
        deadline = time.monotonic() + WATCH_S
        with suppress(TimeoutError, ConnectionClosed):
            while time.monotonic() < deadline:
                client.send(frame)
                sent += len(frame)
        assert sent < 40 * 2**20
        assert server.rss_mb() - before < FLAT_MB
        assert get(server, "/echo") == b"read 0"


def test_a_stalled_client_is_cut_off_after_the_write_timeout(tmp_path: Path) -> None:
    with running(tmp_path, write_timeout_s=0.5) as server, request(server, "/endless") as client:
        wait_until(lambda: "client_stalled" in server.log.read_text(), what="the server gave the client up")
        assert is_cut_off(client)


def test_a_body_that_says_it_is_too_large_is_refused_and_one_that_has_grown_is_cut_off(tmp_path: Path) -> None:
    chunk, post = b"10000\r\n" + b"z" * 0x10000 + b"\r\n", b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
    with running(tmp_path) as server:
        with start(server, post + b"Content-Length: 99999999\r\n\r\n") as client:
            answer = http.client.HTTPResponse(client)
            answer.begin()
            assert (answer.status, b"BODY_TOO_LARGE" in answer.read()) == (413, True)
        growing = start(server, post + b"Transfer-Encoding: chunked\r\n\r\n")
        with growing as client, suppress(ConnectionResetError, BrokenPipeError):
            for _ in range(2000):
                client.sendall(chunk)
            pytest.fail("the server took 125 MiB")
        assert server.rss_mb() < 200


def is_open(client: socket.socket) -> bool:
    """Send one more header line and return whether the server has not ended the connection."""
    try:
        client.sendall(b"X: a\r\n")
        client.setblocking(False)
        client.recv(65536)
    except BlockingIOError:
        return True
    except (ConnectionResetError, BrokenPipeError):
        pass
    return False


HEADERS = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    ("sent", "more", "what"),
    [
        (HEADERS, b"X: a\r\n", b"headers"),
        (b"G", b"E", b"headers"),
        (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n", b"z", b"body"),
        (b"POST /echo HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nz\r\n", b"body"),
    ],
    ids=["header lines", "bytes of the first line", "a body", "chunks"],
)
def test_a_request_that_trickles_in_is_refused_after_its_time(tmp_path: Path, sent: bytes, more: bytes, what: bytes) -> None:
    with running(tmp_path, header_timeout_s=1, body_timeout_s=1) as server, start(server, sent) as client:
        said = b""

        def is_refused() -> bool:
            nonlocal said
            with suppress(BrokenPipeError, ConnectionResetError):
                client.sendall(more)
            client.settimeout(0.1)
            with suppress(TimeoutError, ConnectionResetError):
                said += client.recv(65536)
            return bool(said)

        wait_until(is_refused, what="the server refused the request")
        assert said.startswith(b"HTTP/1.1 408 ")
        assert b"The request " + what + b" did not arrive in time" in said


def test_a_kept_connection_has_time_for_each_request_anew(tmp_path: Path) -> None:
    with running(tmp_path, header_timeout_s=1, body_timeout_s=1) as server:
        kept = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        for _ in range(2):
            kept.request("POST", "/echo", body=b"abc")
            assert kept.getresponse().read() == b"read 3"
            with start(server, HEADERS) as late:  # refused after as long as the kept connection has been idle for
                assert late.recv(65536).startswith(b"HTTP/1.1 408 ")
        kept.close()


@pytest.mark.parametrize("sources", [1, 4], ids=["from one address", "from four addresses"])
def test_a_good_client_is_served_beside_a_thousand_that_trickle(tmp_path: Path, sources: int) -> None:
    with running(tmp_path, header_timeout_s=60, files=256) as server, ExitStack() as opened:
        clients: list[socket.socket] = []
        for index in range(1000):
            clients.append(opened.enter_context(start(server, HEADERS, f"127.0.0.{1 + index % sources}")))
            if index % 50 == 49:
                assert get(server, "/echo", timeout=10) == b"read 0"
        assert 0 < sum(map(is_open, clients)) < 256


def test_a_live_page_is_not_cut_off_for_those_that_trickle(tmp_path: Path) -> None:
    with (
        running(tmp_path, files=256) as server,
        connect(f"ws://127.0.0.1:{server.port}/endless", open_timeout=30, close_timeout=1) as page,
        ExitStack() as opened,
    ):
        for _ in range(300):
            opened.enter_context(start(server, HEADERS))
        for _ in range(200):
            assert page.recv(timeout=30)


def test_a_stop_lets_the_request_that_runs_finish(tmp_path: Path) -> None:
    with running(tmp_path, stop_grace_s=600) as server, request(server, "/sleep") as client:
        wait_until(lambda: "working" in server.log.read_text(), what="the request reached the application")
        assert server.terminate() == 0
        answer = http.client.HTTPResponse(client)
        answer.begin()
        assert answer.read() == b"read 0"


def test_a_stop_closes_sockets_with_going_away_and_does_not_wait_for_ever(tmp_path: Path) -> None:
    with (
        running(tmp_path, stop_grace_s=0.5) as server,
        request(server, "/endless"),
        connect(f"ws://127.0.0.1:{server.port}/slow", open_timeout=30) as client,
    ):
        with pytest.raises(InvalidStatus, match="404"):
            connect(f"ws://127.0.0.1:{server.port}/nowhere", open_timeout=30)
        assert server.terminate() == 0
        with pytest.raises(ConnectionClosed) as closed:
            client.recv(timeout=30)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001


@pytest.mark.parametrize(
    ("variable", "status", "said"),
    [
        ("DATABASE_URL", 503, {"ok": False, "service": "control", "database": "unreachable", "redis": "ok"}),
        ("REDIS_URL", 200, {"ok": True, "service": "control", "database": "ok", "redis": "unreachable"}),
    ],
)
def test_it_lives_without_its_database_or_redis(tmp_path: Path, variable: str, status: int, said: dict[str, object]) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    url = f"postgresql://muster@{nowhere}/muster" if variable == "DATABASE_URL" else f"redis://{nowhere}/0"
    with serve_control(tmp_path / "control.log", env={variable: url}) as server:

        def says_so() -> bool:
            answer = httpx.get(f"{server.url}/healthz", timeout=30)
            return (answer.status_code, answer.json()) == (status, said)

        wait_until(says_so, what="it misses that, and nothing else")


BEHIND = {"MUSTER_BEHIND_TLS": "true", "MUSTER_TRUSTED_PROXIES": "127.0.0.1", "MUSTER_ALLOWED_HOSTS": "muster.example.com"}
HEAD = {"host": "muster.example.com", "origin": "https://muster.example.com"}
PASSWORD = "correct horse battery"
ATTACKER, VISITOR = "203.0.113.9", "198.51.100.4"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with serve_control(tmp_path / "control.log", "--access-log", env=BEHIND) as running:
        yield running


class Browser:
    """A visitor behind a proxy whose own connections come from ``local``."""

    def __init__(self, server: ServerProcess, *, proto: str = "https", local: str = "127.0.0.1") -> None:
        self.server, self.local = server, local
        self.head = {**HEAD, "x-forwarded-proto": proto}
        self.page = self.ask("GET", "/sign-in/", VISITOR)
        self.head["cookie"] = self.page.headers["set-cookie"].split(";")[0]
        found = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', self.page.text)
        assert found is not None
        self.token = found[1]

    def ask(self, method: str, path: str, hops: str, form: dict[str, str] | None = None) -> httpx.Response:
        transport = httpx.HTTPTransport(local_address=self.local)
        with httpx.Client(base_url=self.server.url, transport=transport, timeout=60) as client:
            return client.request(method, path, headers={**self.head, "x-forwarded-for": hops}, data=form)

    def sign_in(self, name: str, password: str, hops: str) -> httpx.Response:
        return self.ask("POST", "/sign-in/", hops, {"name": name, "password": password, "csrfmiddlewaretoken": self.token})


def ask_raw(server: ServerProcess, path: str, **headers: str) -> int:
    """Return the status of the answer to a path that no library tidies up."""
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    client.request("GET", path, headers={"host": HEAD["host"], **headers})
    status = client.getresponse().status
    client.close()
    return status


def test_guessing_is_slowed_down_by_the_true_address_and_nobody_else_is(server: ServerProcess) -> None:
    User.objects.create_user("admin", password=PASSWORD)
    browser = Browser(server)
    for number in range(3):
        assert browser.sign_in("admin", f"guess{number}", f"10.1.2.{number}, {ATTACKER}").status_code == 403
    assert set(SignInFailure.objects.exclude(address="").values_list("address", flat=True)) == {ATTACKER}
    guesses = SignInFailure.objects.filter(address=ATTACKER).exclude(name="")
    assert list(guesses.values_list("count", flat=True)) == [3]
    guesses.update(count=14, last_at=timezone.now())  # minutes to wait, however slow the machine
    assert browser.sign_in("admin", PASSWORD, f"10.1.2.99, {ATTACKER}").status_code == 403
    assert browser.sign_in("admin", PASSWORD, VISITOR).status_code == 302


def test_who_is_no_trusted_proxy_is_believed_nothing(server: ServerProcess) -> None:
    browser = Browser(server, local="127.0.0.2")
    assert "strict-transport-security" not in browser.page.headers
    wait_until(lambda: "127.0.0.2:" in server.log.read_text(), what="the access log names who asked")
    assert VISITOR not in server.log.read_text()


def test_behind_tls_browsers_keep_to_it(server: ServerProcess) -> None:
    User.objects.create_user("ada", password=PASSWORD)
    browser = Browser(server)
    assert browser.page.headers["strict-transport-security"] == "max-age=31536000"
    assert "strict-transport-security" not in Browser(server, proto="http").page.headers
    signed_in = browser.sign_in("ada", PASSWORD, VISITOR)
    cookies = [*browser.page.headers.get_list("set-cookie"), *signed_in.headers.get_list("set-cookie")]
    assert {cookie.split("=")[0] for cookie in cookies} == {"__Host-csrftoken", "__Host-sessionid"}
    for cookie in cookies:
        attributes = {attribute.lower() for attribute in cookie.split("; ")}
        assert {"secure", "path=/", "samesite=lax"} <= attributes
        assert not any(attribute.startswith("domain") for attribute in attributes)
    assert "httponly" in next(cookie for cookie in cookies if "sessionid" in cookie).lower()


def test_a_page_socket_has_the_true_address_too_and_two_slashes_lead_nowhere(server: ServerProcess) -> None:
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    upgrade |= {"sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ==", "origin": HEAD["origin"]}
    said = {"x-forwarded-for": f"10.9.9.9, {VISITOR}"}
    assert ask_raw(server, "/ws/overview", **upgrade, **said) == 403  # nobody is signed in
    wait_until(lambda: f"{VISITOR}:0" in server.log.read_text(), what="the access log names the client of the socket")
    assert "10.9.9.9" not in server.log.read_text()
    for path in ("//admin/login/", "//sign-in/", "//healthz", "///requests", "/%2Fsign-in/", "//static/muster/admin.css"):
        assert ask_raw(server, path) == 404, path
    for path in ("//ws/overview", "///ws/overview", "/%2Fws/overview"):
        assert ask_raw(server, path, **upgrade) in {400, 404}, path
