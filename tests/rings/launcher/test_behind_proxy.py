"""The control plane's real process behind a TLS proxy: whose address it sees, and what browsers keep."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from django.utils import timezone

from core.models import User
from governance.models import SignInFailure
from tests.fakes.control_process import ServerProcess, serve_control
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]

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
