"""Admin tokens: made, verified, revoked, each with its line in the audit trail, and their pages."""

from __future__ import annotations

import re
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from core.models import User
from core.throttle import AuthThrottle
from governance.errors import AdminTokenNotFound
from governance.models import AdminToken, AuditEvent
from governance.services import admin_tokens, create_admin_token, revoke_admin_token, verify_admin_token
from wire.credentials import CredentialKind, _checksum, digest_credential, mint_credential

pytestmark = pytest.mark.django_db


def test_a_new_token_is_accepted_and_only_its_digest_is_stored() -> None:
    token, text = create_admin_token(name=" deploy ", actor="user:ada")
    assert text.startswith("msa_")
    assert token.name == "deploy"
    assert bytes(AdminToken.objects.get().digest) == digest_credential(text)
    found = verify_admin_token(text)
    assert found is not None
    assert found.pk == token.pk
    event = AuditEvent.objects.get()
    assert (event.actor, event.action, event.target) == ("user:ada", "admin_token.create", "deploy")
    assert text not in str(event.detail)


def test_the_token_of_a_person_who_may_no_longer_sign_in_is_none() -> None:
    owner = User.objects.create_user("ada")
    _, text = create_admin_token(name="deploy", actor="user:ada", owner=owner)
    assert verify_admin_token(text) is not None
    User.objects.update(is_active=False)
    assert verify_admin_token(text) is None


def test_what_is_not_exactly_a_token_is_refused() -> None:
    _, text = create_admin_token(name="deploy", actor="user:ada")
    forged = mint_credential(CredentialKind.ADMIN).text
    same_id = f"msa_{text.split('_')[1]}_{forged.split('_')[2]}"
    for wrong in (
        "",
        "msa_",
        text[:-1],
        text + "x",
        text.replace("msa_", "mst_"),
        forged,
        same_id,
        text.upper(),
        " " + text,
    ):
        assert verify_admin_token(wrong) is None, wrong
    for kind in (CredentialKind.CLIENT, CredentialKind.WORKER):
        assert verify_admin_token(mint_credential(kind).text) is None


def test_a_revoked_token_is_refused_and_revoking_twice_records_once() -> None:
    token, text = create_admin_token(name="deploy", actor="user:ada")
    first = revoke_admin_token(token_id=token.pk, actor="user:bob")
    again = revoke_admin_token(token_id=token.pk, actor="user:bob")
    assert first.revoked_at == again.revoked_at is not None
    assert verify_admin_token(text) is None
    assert AuditEvent.objects.filter(action="admin_token.revoke").count() == 1
    with pytest.raises(AdminTokenNotFound):
        revoke_admin_token(token_id=0, actor="user:bob")


def test_use_is_noted_at_most_once_a_minute() -> None:
    token, text = create_admin_token(name="deploy", actor="user:ada")
    verify_admin_token(text)
    noted = AdminToken.objects.get().last_used_at
    assert noted is not None
    verify_admin_token(text)
    assert AdminToken.objects.get().last_used_at == noted
    long_ago = timezone.now() - timedelta(minutes=2)
    AdminToken.objects.filter(pk=token.pk).update(last_used_at=long_ago)
    verify_admin_token(text)
    renewed = AdminToken.objects.get().last_used_at
    assert renewed is not None
    assert renewed > long_ago


def test_wrong_tokens_of_one_address_are_slowed_down_and_cost_no_query_each(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, text = create_admin_token(name="deploy", actor="user:ada")
    # A second of the throttle's does not pass here, however slow the machine.
    monkeypatch.setattr(admin_tokens, "throttle", AuthThrottle(read_digests=admin_tokens._read_digests, clock=lambda: 1000.0))
    wrongs = [mint_credential(CredentialKind.ADMIN).text for _ in range(200)]

    def ask(token: str) -> Any:  # Any: the response of the test client
        return client.get("/nodes", headers={"authorization": f"Bearer {token}"}, REMOTE_ADDR="192.0.2.77")

    with CaptureQueriesContext(connection) as queries:
        answers = [ask(wrong) for wrong in wrongs]
    assert Counter(answer.status_code for answer in answers)[401] == 20
    late = answers[-1]
    assert (late.status_code, late["Retry-After"], late.json()["error"]["code"]) == (429, "1", "RATE_LIMITED")
    assert len(queries) < 30
    assert ask(text).status_code == 200


@pytest.mark.parametrize("kind", ["unknown id", "wrong secret"])
def test_an_unknown_id_and_a_wrong_secret_take_the_same_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, text = create_admin_token(name="deploy", actor="user:ada")
    forged = mint_credential(CredentialKind.ADMIN).text
    head = f"msa_{text.split('_')[1]}_{forged.split('_')[2][:32]}"
    wrong = forged if kind == "unknown id" else head + _checksum(head)
    compared: list[int] = []

    def compare(_given: bytes, stored: bytes) -> bool:
        compared.append(len(stored))
        return False

    monkeypatch.setattr("wire.credentials.hmac.compare_digest", compare)
    with CaptureQueriesContext(connection) as queries:
        assert verify_admin_token(wrong) is None
    assert (len(queries), compared) == (1, [32])


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
