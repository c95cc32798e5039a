"""The console over HTTP: who is asked, its first page, lists and search, errors; no page writes state past the services."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, Permission
from django.core.exceptions import PermissionDenied
from django.db import OperationalError, connection
from django.db.models import Model
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import URLPattern, URLResolver, get_resolver, reverse
from django.urls.converters import get_converters
from django.utils import timezone
from django.utils.html import escape
from pytest_django import DjangoAssertNumQueries

from controlplane.api_errors import permission_denied, server_error
from controlplane.overview import read_overview
from controlplane.problems import look_for_problems
from core.admin_pages import CreatingAdmin, ShowingAdmin
from core.models import User
from gateway.models import ApiKey, GatewayProcess, UsageEvent
from gateway.routing import Target
from gateway.services.models import allow_model, create_alias
from gateway.services.requests import read_gateways
from gateway.services.responses import keep_response
from gateway.services.rollups import roll_up_requests
from gateway.services.tenants import change_response_policy
from governance.admin_tokens import create_admin_token
from governance.alerts import Problem, list_open_problems, look, silence_alert
from governance.notices import add_webhook
from governance.web.pages import ADMIN_POLICY, POLICY, STRICT_POLICY
from nodes.services.gpus import follow_gpus
from tests.fakes.governed_team import make_governed
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, make_event, make_gateway, make_key, make_node, make_operator, make_presence, make_record
from wire.contract import RequestState

pytestmark = pytest.mark.django_db


MOST_LOOK_QUERIES = 40
"""One or two each for what the cases look at, and for what is written."""


@pytest.fixture
def boss() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    return client


def see_problems() -> set[str]:
    look_for_problems()
    return {problem.what for problem in read_overview().problems}


@pytest.mark.django_db(transaction=True)
def test_charts_that_are_behind_are_a_problem() -> None:
    set_limits(console={"problem_sums_s": 60.0})
    assert "Charts are behind." not in see_problems()
    roll_up_requests()
    assert "Charts are behind." not in see_problems()
    set_limits(console={"problem_sums_s": 60.0}, gateway={"rollup_batch": 2, "rollup_budget_s": 0.0})
    UsageEvent.objects.bulk_create([make_event(ago_s=age) for age in (300, 200, 100)])
    roll_up_requests()
    assert "Charts are behind." in see_problems()
    roll_up_requests()
    assert "Charts are behind." not in see_problems()


def test_a_gateway_that_died_counts_until_another_one_took_its_place() -> None:
    make_gateway(stopped=True)
    died = make_gateway(silent_s=120)
    GatewayProcess.objects.filter(pk=died.pk).update(started_at=timezone.now() - timedelta(hours=1))
    assert [gateway.silent_s >= 120 for gateway in read_gateways()] == [True]
    assert "No gateway runs." in see_problems()
    make_gateway()
    assert [gateway.silent_s < 60 for gateway in read_gateways()] == [True]
    assert not any("gateway" in what for what in see_problems())


def test_a_look_for_problems_takes_as_many_queries_for_many_rows_as_for_few() -> None:
    counts = []
    make_governed()
    for first in (0, 5):
        for number in range(first, first + 5):
            make_presence(make_node(f"node {number}"))
            make_record()
            make_record(state=RequestState.QUEUED, age_s=9, model=f"model {number}")
            allow_model(name=f"unserved {number}", actor=ACTOR)
            make_record(model=f"unserved {number}", state=RequestState.FAILED)
            make_gateway(silent_s=60)
            key, _ = make_key(f"key {number}", expires_at=timezone.now() + timedelta(days=1))
            ApiKey.objects.filter(pk=key.pk).update(last_used_at=timezone.now())
        with CaptureQueriesContext(connection) as looked:
            look_for_problems()
        counts.append(len(looked))
    # The second look also writes what changed.
    assert counts[1] <= counts[0] + 2 <= MOST_LOOK_QUERIES, counts


def search(client: Client, text: str) -> str:
    return client.get(reverse("palette"), {"s": text}).content.decode()


def test_an_operator_finds_only_what_they_may_look_at() -> None:
    make_node("rack-2")
    make_key("rack bot")
    person = make_operator("bob", is_superuser=False)
    person.user_permissions.add(Permission.objects.get(codename="view_node"))
    client = Client()
    client.force_login(person)
    found = search(client, "rack")
    assert "rack-2" in found
    assert "rack bot" not in found


WRITTEN_BY_THE_ADMIN = {User, Group}
STATE = sorted((model for model in admin.site._registry if model not in WRITTEN_BY_THE_ADMIN), key=lambda model: model.__name__)


def keep_answer(key: ApiKey) -> None:
    change_response_policy(name=key.tenant.name, stores_responses=True, responses_kept_days=1, actor=ACTOR)
    body = b'{"id": "resp_1", "output": []}'
    keep_response(tenant=key.tenant.name, key_id=key.pk, kept_days=1, model="tiny", previous_id="", input_items=[], body=body)


def name_of(model: type[Model]) -> str:
    return f"{model._meta.app_label}_{model._meta.model_name}"


ASKING_ACTIONS = {"cordon_nodes", "uncordon_nodes", "drain_nodes", "undrain_nodes"}
"""Changes of many rows: each shows a page that asks first, and then calls one service for each row."""


@pytest.mark.parametrize("model", STATE, ids=name_of)
def test_no_form_of_a_model_is_offered_even_to_a_superuser(model: type[Model]) -> None:
    page = admin.site._registry[model]
    request = RequestFactory().get("/")
    request.user = User(username="ada", is_superuser=True, is_staff=True, is_active=True)
    request.session = {"muster_assurance": "passkey"}  # type: ignore[assignment]  # all that the pages read of one
    assert isinstance(page, ShowingAdmin)
    assert not page.has_change_permission(request)
    assert not page.has_delete_permission(request)
    assert set(page.get_actions(request)) <= ASKING_ACTIONS
    assert not page.list_editable
    assert not page.inlines
    assert not any((page.actions_row, page.actions_detail, page.actions_list, page.actions_submit_line))
    if page.has_add_permission(request):
        assert isinstance(page, CreatingAdmin)
        assert type(page).add_view is CreatingAdmin.add_view


def test_posting_to_a_row_or_to_its_deletion_is_refused(boss: Client) -> None:
    key, _ = make_key()
    keep_answer(key)
    make_record()
    make_gateway()
    make_presence(make_node(), gpus=[{"index": 0, "name": "NVIDIA L4"}])
    follow_gpus()
    allow_model(name="tiny", actor=ACTOR)
    create_alias(name="small", targets=[Target("tiny")], actor=ACTOR)
    create_admin_token(name="tests", actor=ACTOR)
    add_webhook(name="tests", url="https://chat.example.com/", actor=ACTOR)
    look(lambda: [Problem("charts.behind")])
    (alert,) = list_open_problems()
    tomorrow = timezone.now() + timedelta(days=1)
    silence_alert(alert_id=alert.id, until=tomorrow, reason="tests", actor=ACTOR, is_lasting=True)
    for model in STATE:
        name, row = name_of(model), model._default_manager.first()
        assert row is not None, f"make a row of {name} above"
        before = model._default_manager.filter(pk=row.pk).values().get()
        for page in ("change", "delete"):
            answer = boss.post(reverse(f"admin:{name}_{page}", args=[row.pk]), {"name": "changed", "post": "yes"})
            assert answer.status_code == 403, name
        form = {"action": "delete_selected", "_selected_action": str(row.pk), "post": "yes", "_save": "Save"}
        assert boss.post(reverse(f"admin:{name}_changelist"), form).status_code in {200, 302, 403}
        assert model._default_manager.filter(pk=row.pk).values().get() == before, name


ENVELOPE = {"code", "message", "retryable", "type", "param"}


def test_health_says_what_can_be_reached(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    # A machine that stands still is not what is told.
    set_limits(console={"health_database_s": 30.0}, core={"hint_read_s": 30.0})
    answer = client.get("/healthz")
    assert answer.status_code == 200
    assert answer.json() == {"ok": True, "service": "control", "database": "ok", "redis": "ok"}
    assert "no-store" in answer["Cache-Control"]
    for path in ("/healthz", "/nothing", "/api/docs", "/requests", "/"):
        assert client.get(path)["Content-Security-Policy"] == POLICY
    assert client.get("/admin/login/")["Content-Security-Policy"] == ADMIN_POLICY
    assert "unsafe-eval" not in POLICY
    assert client.get("/nothing", headers={"accept": "text/html"})["Content-Type"].startswith("text/html")
    assert client.get("/nothing").json()["error"]["code"] == "NOT_FOUND"


@pytest.mark.parametrize("path", ["/approvals/nothing/at/all", "/sign-in/nothing"])
def test_where_people_read_pages_errors_are_pages_that_say_nothing_of_what_broke_unless_json_is_asked_for(
    client: Client, rf: RequestFactory, path: str
) -> None:
    for accept in ("text/html,application/xhtml+xml,*/*;q=0.8", "*/*"):
        page = client.get(path, headers={"accept": accept})
        assert (page.status_code, page["Content-Security-Policy"]) == (404, STRICT_POLICY)
        assert "To the approvals" in page.content.decode()
    for said in (
        client.get(path, headers={"accept": "application/json"}),
        client.post(path, {}, content_type="application/json"),
    ):
        assert (said.status_code, said.json()["error"]["code"]) == (404, "NOT_FOUND")
    request = rf.get(path)
    for answer, status in ((server_error(request), 500), (permission_denied(request, PermissionDenied("why")), 403)):
        assert (answer.status_code, answer["Content-Security-Policy"]) == (status, STRICT_POLICY)
        assert answer["Content-Type"].startswith("text/html")
        assert "why" not in answer.content.decode()
    assert server_error(rf.get("/requests"))["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "content_type", "is_page"),
    [("/approvals/", "", True), ("/admin/", "", True), ("/admin/login/", "application/x-www-form-urlencoded", True),
        ("/admin/playground/send", "application/json", False), ("/approvals/", "application/json", False), ("/requests", "",
            False)],
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


HOSTS = ("gpu1.lan", "<script>alert(1)</script>", "a" * 4000)
PLACES = [
    ("/admin/login/", {}, True), ("/", {"accept": "text/html,*/*;q=0.8"}, True), ("/approvals/", {}, True),
    ("/nothing", {"accept": "text/html"}, True), ("/requests", {}, False), ("/api/v1/nodes", {"accept": "text/html"}, False),
    ("/admin/", {"accept": "application/json"}, False),
]  # fmt: skip


@pytest.mark.parametrize(("path", "headers", "is_page"), PLACES)
def test_a_host_that_is_not_allowed_is_named_with_the_setting_that_allows_it(
    client: Client, path: str, headers: dict[str, str], caplog: pytest.LogCaptureFixture, *, is_page: bool
) -> None:
    for host in HOSTS:
        answer = client.get(path, headers={**headers, "host": host})
        text, kind = answer.content.decode(), "text/html; charset=utf-8" if is_page else "application/json"
        assert (answer.status_code, answer["Content-Type"]) == (400, kind)
        said = text if is_page else answer.json()["error"]["message"]
        assert is_page or set(answer.json()["error"]) == ENVELOPE
        assert "MUSTER_ALLOWED_HOSTS" in said
        assert not is_page or (escape(host[:255]) in text and "<script>" not in text)
        assert len(text) < 4000
    first = caplog.records[0]
    assert (first.levelname, first.getMessage()) == ("WARNING", "host_refused host='gpu1.lan'")


METHODS = ("get", "post", "put", "patch", "delete")
REFUSED = {401, 403}
NOT_SERVED = {404, 405}
PUBLIC = {
    "", "admin", "favicon.ico", "healthz", "api/schema", "api/docs",
    "sign-in/", "sign-in/passkey/options", "sign-in/passkey", "sign-in/out", "admin/login/", "admin/logout/",
    *(f"sign-in/invitation/<str:token>{part}" for part in ("", "/options", "/passkey")),  # the invitation is the credential
    "admin/jsi18n/",  # words of Django's own scripts
    "sign-in/oidc", "sign-in/oidc/callback",  # the way to the issuer and back
    "language",  # sets a cookie
}  # fmt: skip
"""Routes that answer whoever asks."""
WAYS_IN = ("/sign-in/", "/admin/login/")
SAMPLES = {"int": "1", "str": "x", "path": "x", "slug": "x", "uuid": str(uuid.UUID(int=1)), "operation": f"op_{'0' * 32}"}


def walk(patterns: Sequence[URLPattern | URLResolver], before: str = "") -> Iterator[str]:
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


def test_every_public_route_exists_and_no_policy_lets_a_script_in_or_a_frame_around() -> None:
    for policy in (POLICY, ADMIN_POLICY):
        assert not [
            words for words in ("script-src 'self'", "frame-ancestors 'none'", "default-src 'none'") if words not in policy
        ]
        assert "script-src 'self' 'unsafe-inline'" not in policy
    assert set(ROUTES) >= PUBLIC
    assert len(ROUTES) > 100


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in PUBLIC])
def test_every_route_of_the_control_plane_asks_who_it_is_or_is_public(route: str) -> None:
    client, path = Client(), fill(route)
    answers = {method: getattr(client, method)(path, content_type="application/json") for method in METHODS}
    leads_in = {
        name for name, answer in answers.items() if answer.status_code == 302 and answer["Location"].startswith(WAYS_IN)
    }
    statuses = {name: answer.status_code for name, answer in answers.items() if name not in leads_in}
    assert set(statuses.values()) <= REFUSED | NOT_SERVED, (path, statuses)
    assert leads_in or set(statuses.values()) & REFUSED, (path, statuses)
