"""The admin: its first page, its lists and search; no page of it writes state past the services."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib import admin
from django.contrib.auth.models import Group, Permission
from django.db import connection
from django.db.models import Model
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.overview import count_live, read_overview
from core.admin_pages import CreatingAdmin, ShowingAdmin
from core.models import User
from gateway.models import ApiKey, GatewayProcess
from gateway.routing import Target
from gateway.services import allow_model, change_response_policy, create_alias
from gateway.services.overview import read_gateways
from gateway.services.responses import keep_response
from governance.services import create_admin_token
from governance.services.webhooks import add_webhook
from tests.fakes.governed_team import make_governed
from tests.system.gateway_admin.factories import ACTOR, make_gateway, make_key, make_operator, make_record
from tests.system.nodes.factories import make_node, make_presence
from wire.contract import RequestState

pytestmark = pytest.mark.django_db


MOST_QUERIES = 21
"""Session, operator, and one or two each for nodes, gateways, open requests, the last hour, allowed models, the policy and keys
that end; three for what waits, two for models that no node answers for, and one for those that a node lost."""
POLYGLOT = "\"'><img src=x onerror=alert(1)>"


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    return client


def test_the_numbers_are_those_of_the_rows() -> None:
    make_presence(make_node("alive"))
    make_presence(make_node("lost"), age_s=3600)
    make_node("never")
    for latency_ms in (100, 200, 300):
        make_record(latency_ms=latency_ms, prompt_tokens=10, completion_tokens=20)
    make_record(state=RequestState.FAILED, latency_ms=9000)
    make_record(state=RequestState.REJECTED, status_code=400)
    make_record(state=RequestState.REJECTED, status_code=503)
    make_record(state=RequestState.CANCELLED, status_code=499)
    make_record(state=RequestState.QUEUED, age_s=8)
    make_record(age_s=2 * 3600)
    overview = read_overview()
    assert (overview.fleet.online, len(overview.fleet.nodes)) == (1, 3)
    assert (overview.open_requests.queued, overview.open_requests.running) == (1, 0)
    assert 7 <= overview.open_requests.oldest_wait_s < 60
    traffic = overview.traffic
    assert (traffic.requests, traffic.served, traffic.refused, traffic.failed) == (8, 3, 1, 2)
    assert traffic.failed_percent == pytest.approx(200 / 7)
    assert (traffic.p50_ms, traffic.p95_ms) == (200, 290)
    assert (traffic.prompt_tokens, traffic.completion_tokens) == (30, 60)
    assert sum(minute.requests for minute in traffic.minutes) == 8
    assert sum(minute.refused for minute in traffic.minutes) == 1
    assert sum(minute.failed for minute in traffic.minutes) == 2
    assert len(traffic.minutes) == 60
    assert count_live(overview) == {"nodes_online": 1, "nodes_total": 3, "queued": 1, "running": 0}


def test_a_gateway_that_died_counts_until_another_one_took_its_place() -> None:
    make_gateway(stopped=True)
    died = make_gateway(silent_s=120)
    GatewayProcess.objects.filter(pk=died.pk).update(started_at=timezone.now() - timedelta(hours=1))
    assert [gateway.silent_s >= 120 for gateway in read_gateways()] == [True]
    assert "No gateway runs." in {problem.what for problem in read_overview().problems}
    make_gateway()
    assert [gateway.silent_s < 60 for gateway in read_gateways()] == [True]
    assert not any("gateway" in problem.what for problem in read_overview().problems)


def test_the_page_takes_as_many_queries_for_many_rows_as_for_few(boss: Client) -> None:
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
        with CaptureQueriesContext(connection) as queries:
            boss.get(reverse("admin:index"))
        counts.append(len(queries))
    assert counts[0] == counts[1] <= MOST_QUERIES, counts


def search(client: Client, text: str) -> str:
    return client.get(reverse("admin:search"), {"s": text, "extended": "1"}).content.decode()


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
    """Keep an answer for the tenant of a key."""
    change_response_policy(name=key.tenant.name, stores_responses=True, responses_kept_days=1, actor=ACTOR)
    body = b'{"id": "resp_1", "output": []}'
    keep_response(tenant=key.tenant.name, key_id=key.pk, kept_days=1, model="tiny", previous_id="", input_items=[], body=body)


def name_of(model: type[Model]) -> str:
    return f"{model._meta.app_label}_{model._meta.model_name}"


@pytest.mark.parametrize("model", STATE, ids=name_of)
def test_no_form_of_a_model_is_offered_even_to_a_superuser(model: type[Model]) -> None:
    page = admin.site._registry[model]
    request = RequestFactory().get("/")
    request.user = User(username="ada", is_superuser=True, is_staff=True, is_active=True)
    request.session = {"muster_assurance": "passkey"}  # type: ignore[assignment]  # all that the pages read of one
    assert isinstance(page, ShowingAdmin)
    assert not page.has_change_permission(request)
    assert not page.has_delete_permission(request)
    assert page.get_actions(request) == {}
    assert not page.list_editable
    assert not page.inlines
    assert not any((page.actions_row, page.actions_detail, page.actions_list, page.actions_submit_line))
    if page.has_add_permission(request):
        assert isinstance(page, CreatingAdmin)
        assert type(page).add_view is CreatingAdmin.add_view


@pytest.mark.parametrize("model", STATE, ids=name_of)
def test_posting_to_a_row_or_to_its_deletion_is_refused(model: type[Model]) -> None:
    key, _ = make_key()
    keep_answer(key)
    make_record()
    make_gateway()
    make_node()
    allow_model(name="tiny", actor=ACTOR)
    create_alias(name="small", targets=[Target("tiny")], actor=ACTOR)
    create_admin_token(name="tests", actor=ACTOR)
    add_webhook(name="tests", url="https://chat.example.com/", actor=ACTOR)
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    row = model._default_manager.first()
    assert row is not None, f"make a row of {model.__name__} above"
    before = model._default_manager.filter(pk=row.pk).values().get()
    for page in ("change", "delete"):
        answer = client.post(reverse(f"admin:{name_of(model)}_{page}", args=[row.pk]), {"name": "changed", "post": "yes"})
        assert answer.status_code == 403
    answer = client.post(
        reverse(f"admin:{name_of(model)}_changelist"),
        {"action": "delete_selected", "_selected_action": str(row.pk), "post": "yes", "_save": "Save"},
    )
    assert answer.status_code in {200, 302, 403}
    assert model._default_manager.filter(pk=row.pk).values().get() == before
