"""What the control plane answers over HTTP apart from its two REST lists: health, errors, documents, headers."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from controlplane.middleware import POLICY
from controlplane.models import User

pytestmark = pytest.mark.django_db
ENVELOPE = {"code", "message", "retryable", "type", "param"}


def test_health_says_what_can_be_reached(client: Client) -> None:
    answer = client.get("/healthz")

    assert answer.status_code == 200
    assert answer.json() == {"ok": True, "service": "control", "database": "ok", "redis": "ok"}
    assert "no-store" in answer["Cache-Control"]


@pytest.mark.parametrize("path", ["/nothing", "/v1/chat/completions", "/requests/1", "/api", "/healthz/"])
def test_an_unknown_address_is_answered_in_the_envelope(client: Client, path: str) -> None:
    answer = client.get(path)

    assert answer.status_code == 404
    assert answer["Content-Type"] == "application/json"
    assert set(answer.json()["error"]) == ENVELOPE
    assert answer.json()["error"]["code"] == "NOT_FOUND"


def test_an_unknown_page_of_the_admin_is_a_page(client: Client) -> None:
    client.force_login(User.objects.create_superuser("ada"))
    answer = client.get("/admin/nothing/")

    assert answer.status_code == 404
    assert answer["Content-Type"].startswith("text/html")


def test_a_foreign_host_header_is_refused_in_the_envelope(client: Client) -> None:
    answer = client.get("/requests", headers={"host": "evil.example"})

    assert answer.status_code == 400
    assert set(answer.json()["error"]) == ENVELOPE
    assert "evil" not in answer.content.decode()


def test_the_root_leads_to_the_admin(client: Client) -> None:
    assert client.get("/")["Location"] == reverse("admin:index")


@pytest.mark.parametrize("path", ["/healthz", "/admin/login/", "/nothing", "/api/docs", "/requests"])
def test_every_response_carries_the_content_security_policy(client: Client, path: str) -> None:
    assert client.get(path)["Content-Security-Policy"] == POLICY


def test_the_policy_lets_no_inline_script_run_and_nobody_frame_us() -> None:
    assert "script-src 'self' 'unsafe-eval'" in POLICY
    assert "frame-ancestors 'none'" in POLICY
    assert "default-src 'none'" in POLICY


def test_the_openapi_document_describes_both_credentials(client: Client) -> None:
    document = client.get("/api/schema", headers={"accept": "application/json"}).content.decode()

    assert all(word in document for word in ("adminToken", "nodeToken", "/requests", "/nodes/heartbeat"))


def test_the_documentation_page_loads_nothing_from_elsewhere(client: Client) -> None:
    page = client.get("/api/docs").content.decode()

    assert "https://" not in page
    assert "<script>" not in page


def test_session_cookies_cannot_be_read_by_scripts(client: Client) -> None:
    User.objects.create_superuser("ada", password="a password for tests only")
    client.post("/admin/login/", {"username": "ada", "password": "a password for tests only"})
    cookie = client.cookies["sessionid"]

    assert cookie["httponly"]
    assert cookie["samesite"] == "Lax"


def test_signing_in_changes_the_session() -> None:
    client = Client()
    client.get("/admin/login/")
    client.cookies["sessionid"] = "planted-by-somebody-else"
    User.objects.create_superuser("ada", password="a password for tests only")
    client.post("/admin/login/", {"username": "ada", "password": "a password for tests only"})

    assert client.cookies["sessionid"].value != "planted-by-somebody-else"
