"""Operators' pages of admin tokens and of the audit trail."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from governance.audit import record_event
from governance.models import AdminToken
from governance.services import create_admin_token, verify_admin_token

pytestmark = pytest.mark.django_db


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    client = Client()
    client.force_login(get_user_model().objects.create_superuser(username="ada"))
    return client


def test_a_new_token_is_shown_exactly_once(boss: Client) -> None:
    response = boss.post(reverse("admin:governance_admintoken_add"), {"name": "deploy"})
    assert "no-store" in response["Cache-Control"]
    (text,) = re.findall(r"msa_[0-9A-Za-z_]{51}", response.content.decode())
    token = verify_admin_token(text)
    assert token is not None
    for name, arguments in (("changelist", []), ("change", [token.pk])):
        shown = boss.get(reverse(f"admin:governance_admintoken_{name}", args=arguments)).content.decode()
        assert "deploy" in shown
        assert text not in shown
    assert text not in str(dict(boss.session))


def test_a_token_is_revoked_after_a_question(boss: Client) -> None:
    token, text = create_admin_token(name="deploy", actor="user:ada")
    url = reverse("admin:governance_admintoken_confirm", args=[token.pk, "revoke"])
    assert "Revoke: deploy?" in boss.get(url).content.decode()
    assert verify_admin_token(text) is not None
    assert "Revoked the admin token deploy" in boss.post(url, follow=True).content.decode()
    assert verify_admin_token(text) is None


def test_the_audit_trail_is_shown_and_offers_no_change(boss: Client) -> None:
    event = record_event(actor="user:bob", action="node.drain", target="node_1", detail={"reason": "fans"})
    shown = boss.get(reverse("admin:governance_auditevent_changelist")).content.decode()
    assert "user:bob" in shown
    assert "reason=fans" in shown
    assert boss.get(reverse("admin:governance_auditevent_add")).status_code == 403
    for page in ("change", "delete"):
        url = reverse(f"admin:governance_auditevent_{page}", args=[event.pk])
        assert boss.post(url, {"actor": "user:eve"}).status_code == 403


@pytest.mark.parametrize("name", ["admintoken", "auditevent"])
def test_a_list_takes_as_many_queries_for_many_rows_as_for_one(boss: Client, name: str) -> None:
    url = reverse(f"admin:governance_{name}_changelist")

    def count() -> int:
        with CaptureQueriesContext(connection) as queries:
            assert boss.get(url).status_code == 200
        return len(queries)

    create_admin_token(name="first", actor="user:ada")
    boss.get(url)
    few = count()
    for number in range(12):
        create_admin_token(name=str(number), actor="user:ada")
    assert AdminToken.objects.count() == 13
    assert count() <= few <= 12
