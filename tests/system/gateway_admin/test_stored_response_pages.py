"""Operators' pages of kept answers: who sees prompts, and what the tenant's buttons do."""

from __future__ import annotations

import json
import uuid

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.management.commands.invite import let_propose
from gateway.models import StoredResponse, Tenant
from gateway.services import change_response_policy
from gateway.services.responses import keep_response
from tests.fakes.limits import set_limits
from tests.system.gateway_admin.factories import ACTOR, audited, make_operator, make_tenant

pytestmark = pytest.mark.django_db
POLYGLOT = "\"'><img src=x onerror=alert(1)>{{7*7}}"
LIST = "admin:gateway_storedresponse_changelist"
PAGE = "admin:gateway_storedresponse_change"


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    client = Client()
    client.force_login(make_operator())
    return client


def keep(response_id: str, text: str = "a secret question", tenant: str = "research") -> None:
    make_tenant(tenant)
    change_response_policy(name=tenant, stores_responses=True, responses_kept_days=3, actor=ACTOR)
    keep_response(
        tenant=tenant,
        key_id=uuid.uuid4(),
        kept_days=3,
        model="tiny",
        previous_id="",
        input_items=[{"role": "user", "content": text}],
        body=json.dumps({"id": response_id, "output": [{"type": "message", "content": f"about {text}"}]}).encode(),
    )


def make_viewer(*permissions: str) -> Client:
    """Return the browser of an operator with these permissions on kept answers."""
    operator = make_operator("bob", is_superuser=False)
    operator.user_permissions.add(*Permission.objects.filter(codename__in=[f"{name}_storedresponse" for name in permissions]))
    client = Client()
    client.force_login(operator)
    return client


def test_the_list_shows_no_prompt_and_reads_none(boss: Client) -> None:
    counts = []
    for first in (0, 4):
        for number in range(first, first + 4):
            keep(f"resp_{number}")
        with CaptureQueriesContext(connection) as queries:
            html = boss.get(reverse(LIST)).content.decode()
        assert "resp_0" in html
        assert "a secret question" not in html
        assert not [query for query in queries if '"gateway_storedresponse"."body",' in query["sql"]]
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 10


def test_a_row_shows_its_content_folded_and_as_text(boss: Client) -> None:
    keep("resp_1", POLYGLOT)
    html = boss.get(reverse(PAGE, args=["resp_1"])).content.decode()

    assert html.count("<summary") >= 2
    assert "<img src=x" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;{{7*7}}" in html


def test_a_long_content_is_cut(boss: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    set_limits(gateway={"page_body_chars": 50})
    keep("resp_1", "x" * 500)
    html = boss.get(reverse(PAGE, args=["resp_1"])).content.decode()

    assert "x" * 51 not in html
    assert " …</pre>" in html


@pytest.mark.parametrize("permissions", [(), ("change",)], ids=["none", "change"])
def test_who_may_not_view_kept_answers_sees_none(permissions: tuple[str, ...]) -> None:
    keep("resp_1")
    viewer = make_viewer(*permissions)

    assert viewer.get(reverse(LIST)).status_code == 403
    assert viewer.get(reverse(PAGE, args=["resp_1"])).status_code == 403


def test_who_may_view_them_sees_them() -> None:
    keep("resp_1")

    assert "a secret question" in make_viewer("view").get(reverse(PAGE, args=["resp_1"])).content.decode()


def test_who_is_invited_to_propose_may_not_read_prompts() -> None:
    keep("resp_1")
    bob = make_operator("bob", is_superuser=False)
    let_propose(bob)
    client = Client()
    client.force_login(bob)

    assert client.get(reverse("admin:gateway_requestrecord_changelist")).status_code == 200
    assert client.get(reverse(LIST)).status_code == 403


def test_one_is_found_by_its_id(boss: Client) -> None:
    keep("resp_1")
    keep("resp_2")
    page = boss.get(reverse(LIST), {"q": "resp_2"})

    assert [row.pk for row in page.context["cl"].result_list] == ["resp_2"]


def test_a_tenants_policy_is_switched_on_and_off_by_the_answer_to_the_question(boss: Client) -> None:
    tenant = make_tenant()
    url = reverse("admin:gateway_tenant_confirm", args=[tenant.pk, "responses"])
    boss.post(url, {"stores_responses": "on", "responses_kept_days": "7"})
    tenant.refresh_from_db()
    assert (tenant.stores_responses, tenant.responses_kept_days) == (True, 7)
    assert "7 days" in boss.get(reverse("admin:gateway_tenant_changelist")).content.decode()

    boss.post(url, {"responses_kept_days": "7"})
    assert not Tenant.objects.get().stores_responses
    assert [event.actor for event in audited("tenant.response_policy")] == ["user:ada"] * 2


def test_what_is_kept_is_deleted_by_the_answer_to_the_question_alone(boss: Client) -> None:
    keep("resp_1")
    keep("resp_2", tenant="other")
    url = reverse("admin:gateway_tenant_confirm", args=[make_tenant().pk, "forget"])
    assert boss.get(url).status_code == 200
    assert StoredResponse.objects.count() == 2

    page = boss.post(url, follow=True).content.decode()
    assert "Deleted what was kept for research: 1 answers." in page
    assert [row.pk for row in StoredResponse.objects.all()] == ["resp_2"]
    assert audited("tenant.forget_responses")[0].detail == {"responses": 1}


def test_a_tenant_without_kept_answers_offers_nothing_to_delete(boss: Client) -> None:
    make_tenant()
    assert "Delete kept answers" not in boss.get(reverse("admin:gateway_tenant_changelist")).content.decode()

    keep("resp_1")
    assert "Delete kept answers" in boss.get(reverse("admin:gateway_tenant_changelist")).content.decode()
