"""What the control plane answers over HTTP: who is asked, health, errors, documents, headers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence

import pytest
from django.core.exceptions import PermissionDenied
from django.db import OperationalError
from django.test import Client, RequestFactory
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.converters import get_converters
from django.utils.html import escape
from pytest_django import DjangoAssertNumQueries

from controlplane.api_errors import permission_denied, server_error
from controlplane.middleware import ADMIN_POLICY, POLICY
from governance.views.content_policy import STRICT_POLICY
from tests.fakes.limits import set_limits

pytestmark = pytest.mark.django_db


ENVELOPE = {"code", "message", "retryable", "type", "param"}


def test_health_says_what_can_be_reached(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that stands still is not what is told.
    set_limits(console={"health_database_s": 30.0}, core={"hint_read_s": 30.0})
    answer = client.get("/healthz")
    assert answer.status_code == 200
    assert answer.json() == {"ok": True, "service": "control", "database": "ok", "redis": "ok"}
    assert "no-store" in answer["Cache-Control"]


@pytest.mark.parametrize("path", ["/approvals/nothing/at/all", "/sign-in/nothing"])
def test_where_people_read_pages_an_unknown_address_is_a_page_unless_json_is_asked_for(client: Client, path: str) -> None:
    for accept in ("text/html,application/xhtml+xml,*/*;q=0.8", "*/*"):
        page = client.get(path, headers={"accept": accept})
        assert (page.status_code, page["Content-Security-Policy"]) == (404, STRICT_POLICY)
        assert "To the approvals" in page.content.decode()
    for said in (
        client.get(path, headers={"accept": "application/json"}),
        client.post(path, {}, content_type="application/json"),
    ):
        assert (said.status_code, said.json()["error"]["code"]) == (404, "NOT_FOUND")


def test_a_defect_and_a_refusal_there_are_pages_that_say_nothing_of_what_broke(rf: RequestFactory) -> None:
    request = rf.get("/approvals/")
    for page, status in ((server_error(request), 500), (permission_denied(request, PermissionDenied("why")), 403)):
        assert (page.status_code, page["Content-Security-Policy"]) == (status, STRICT_POLICY)
        assert page["Content-Type"].startswith("text/html")
        assert "why" not in page.content.decode()
    assert server_error(rf.get("/requests"))["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "content_type", "is_page"),
    [
        ("/approvals/", "", True), ("/admin/", "", True), ("/admin/login/", "application/x-www-form-urlencoded", True),
        ("/admin/playground/send", "application/json", False), ("/approvals/", "application/json", False),
        ("/requests", "", False),
    ],
)  # fmt: skip
def test_without_the_database_people_get_a_page_and_scripts_the_envelope(
    rf: RequestFactory, django_assert_num_queries: DjangoAssertNumQueries, path: str, content_type: str, *, is_page: bool
) -> None:
    request = rf.generic("POST", path, b"{}", content_type=content_type)
    with django_assert_num_queries(0):
        try:
            raise OperationalError("a word of the server")
        except OperationalError:
            answer = server_error(request)
    assert (answer.status_code, answer["Retry-After"]) == (503, "5")
    assert answer["Content-Type"].startswith("text/html" if is_page else "application/json")
    assert "may or may not have been done" in answer.content.decode()
    assert "a word of the server" not in answer.content.decode()


@pytest.mark.parametrize("policy", [POLICY, ADMIN_POLICY])
def test_the_policy_lets_no_inline_script_run_and_nobody_frame_us(policy: str) -> None:
    assert "script-src 'self'" in policy
    assert "script-src 'self' 'unsafe-inline'" not in policy
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("/admin/login/", {}),
        ("/", {"accept": "text/html,*/*;q=0.8"}),
        ("/approvals/", {}),
        ("/nothing", {"accept": "text/html"}),
    ],
)
@pytest.mark.parametrize("host", ["gpu1.lan:8000", "<script>alert(1)</script>", "a" * 4000])
def test_a_host_that_is_not_allowed_is_named_on_a_page_with_the_setting_that_allows_it(
    client: Client, path: str, headers: dict[str, str], host: str
) -> None:
    answer = client.get(path, headers={**headers, "host": host})
    text = answer.content.decode()
    assert (answer.status_code, answer["Content-Type"]) == (400, "text/html; charset=utf-8")
    assert escape(host[:255]) in text
    assert "<script>" not in text
    assert len(text) < 4000
    assert "MUSTER_ALLOWED_HOSTS" in text


@pytest.mark.parametrize(
    ("path", "headers"),
    [("/requests", {}), ("/api/v1/nodes", {"accept": "text/html"}), ("/admin/", {"accept": "application/json"})],
)
def test_a_program_is_told_of_a_host_that_is_not_allowed_in_the_envelope(
    client: Client, path: str, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.get(path, headers={**headers, "host": "gpu1.lan"})
    assert (answer.status_code, set(answer.json()["error"])) == (400, ENVELOPE)
    assert "'gpu1.lan'" in answer.json()["error"]["message"]
    assert "MUSTER_ALLOWED_HOSTS" in answer.json()["error"]["message"]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "host_refused host='gpu1.lan'")
    ]


METHODS = ("get", "post", "put", "patch", "delete")
REFUSED = {401, 403}
NOT_SERVED = {404, 405}
PUBLIC = {
    "": "leads to the admin",
    "admin": "leads to the admin",
    "favicon.ico": "an icon",
    "healthz": "whether it lives",
    "api/schema": "the description of the REST API",
    "api/docs": "the page of that description",
    "sign-in/": "the way in",
    "sign-in/passkey/options": "the way in",
    "sign-in/passkey": "the way in",
    "sign-in/out": "the way out",
    "sign-in/invitation/<str:token>": "the invitation is the credential",
    "sign-in/invitation/<str:token>/options": "the invitation is the credential",
    "sign-in/invitation/<str:token>/passkey": "the invitation is the credential",
    "admin/login/": "leads to the way in",
    "admin/logout/": "the way out",
    "admin/jsi18n/": "words of Django's own scripts",
}
"""Routes that answer whoever asks, and what they are."""
SAMPLES = {"int": "1", "str": "x", "path": "x", "slug": "x", "uuid": str(uuid.UUID(int=1)), "operation": f"op_{'0' * 32}"}


def walk(patterns: Sequence[URLPattern | URLResolver], before: str = "") -> Iterator[str]:
    """Return every route as it is written in the URL tables."""
    for each in patterns:
        route = before + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from walk(each.url_patterns, route)
        else:
            yield route


ROUTES = sorted(set(walk(get_resolver().url_patterns)))


def fill(route: str) -> str:
    """Return an address of a route: ``<int:key_id>`` becomes a number."""
    path = re.sub(r"\(\?P<\w+>[^)]*\)", "x", route).replace("^", "").replace("/?$", "").replace("$", "")
    for name in get_converters():
        while f"<{name}:" in path:
            head, _, tail = path.partition(f"<{name}:")
            path = head + SAMPLES[name] + tail.partition(">")[2]
    return "/" + path


def test_every_public_route_exists() -> None:
    assert set(PUBLIC) <= set(ROUTES)
    assert len(ROUTES) > 100


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in PUBLIC])
def test_every_route_of_the_control_plane_asks_who_it_is_or_is_public(route: str) -> None:
    client, path = Client(), fill(route)
    answers = {method: getattr(client, method)(path, content_type="application/json") for method in METHODS}
    leads_in = {name for name, answer in answers.items() if answer.status_code == 302 and is_way_in(answer["Location"])}
    statuses = {name: answer.status_code for name, answer in answers.items() if name not in leads_in}
    assert set(statuses.values()) <= REFUSED | NOT_SERVED, (path, statuses)
    assert leads_in or set(statuses.values()) & REFUSED, (path, statuses)


def is_way_in(location: str) -> bool:
    return location.startswith(("/sign-in/", "/admin/login/"))
