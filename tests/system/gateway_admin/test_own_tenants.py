"""What members of a tenant see and change: theirs, and nothing of another tenant, on pages and with tokens."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from core.models import Membership, User
from core.roles import Role, make_role_groups
from gateway.models import ApiKey, RequestRecord, Tenant
from governance.admin_tokens import Grant, create_admin_token
from governance.members import change_roles, set_member
from tests.fakes.nodes import audited, make_gateway, make_key, make_operator, make_tenant
from wire import clock
from wire.contract import RequestState
from wire.ids import new_uuid7

pytestmark = pytest.mark.django_db


def make_record(key: ApiKey, **changes: Any) -> RequestRecord:
    told = {"state": RequestState.COMPLETED.value, "endpoint": "/v1/chat/completions", "model": "tiny", **changes}
    now = clock.now()
    return RequestRecord.objects.create(
        id=new_uuid7(), tenant=key.tenant.name, key_id=key.pk, key_name=key.name, created_at=now - timedelta(minutes=1),
        finished_at=now, prompt_tokens_est=1, gateway_id=make_gateway().pk, **told,
    )  # fmt: skip


def make_member(name: str, tenant: str, role: Role = Role.TENANT_ADMIN) -> Client:
    make_tenant(tenant)
    person, client = User.objects.create_user(name), Client()
    set_member(person=person, tenant=tenant, role=role, actor="t")
    client.force_login(person)
    return client


def page_of(tenant: str, part: str = "") -> str:
    return f"/tenants/{Tenant.objects.get(name=tenant).pk}/{part}"


def text_of(client: Client, path: str) -> str:
    answer = client.get(path)
    assert answer.status_code == 200, answer.content.decode()
    return answer.content.decode()


def test_an_admin_of_a_tenant_sees_all_of_it_and_nothing_of_another() -> None:
    mine, theirs = make_key("notebook", tenant="research")[0], make_key("till", tenant="sales")[0]
    make_record(mine, model="tiny-mine")
    make_record(theirs, model="tiny-theirs")
    set_member(person=User.objects.create_user("sam"), tenant="sales", role=Role.TENANT_VIEWER, actor="t")
    client = make_member("ana", "research")
    assert client.get("/tenants/")["Location"] == page_of("research")
    text = text_of(client, page_of("research"))
    assert "notebook" in text
    assert "tiny-mine" in text
    assert not [word for word in ("till", "tiny-theirs", "sam", "sales") if word in text]
    for part in ("", "keys/new", "members/new", f"keys/{theirs.pk}/rotate", "members/1/remove"):
        assert client.get(page_of("sales", part)).status_code == 404, part
    # The row of another tenant under the address of one's own.
    other = Membership.objects.get(tenant="sales")
    for part in (f"keys/{theirs.pk}/rotate", f"keys/{theirs.pk}/revoke", f"members/{other.pk}/remove"):
        assert client.post(page_of("research", part)).status_code == 404, part
    for path in (
        "/admin/",
        "/admin/gateway/apikey/",
        "/admin/usage/",
        "/approvals/",
        "/admin/gateway/requestrecord/export.csv",
    ):
        assert client.get(path).status_code in {302, 403}, path
    assert "My tenants" in text
    assert "Approvals" not in text


def test_keys_are_made_rotated_and_revoked_within_the_limits_of_the_tenant() -> None:
    client = make_member("ana", "research")
    Tenant.objects.update(requests_per_minute=100)
    answer = client.post(page_of("research", "keys/new"), {"name": "big", "requests_per_minute": "101"})
    assert "The tenant has 100 requests per minute" in answer.content.decode()
    answer = client.post(page_of("research", "keys/new"), {"name": "fine", "requests_per_minute": "100"})
    key = ApiKey.objects.get()
    assert (key.tenant.name, key.requests_per_minute, key.priority) == ("research", 100, "normal")
    assert f"mst_{key.keyid}" in answer.content.decode()
    assert answer["Cache-Control"] == "no-store, private"
    for change in ("rotate", "revoke"):
        assert client.get(page_of("research", f"keys/{key.pk}/{change}")).status_code == 200
    assert "mst_" in client.post(page_of("research", f"keys/{key.pk}/rotate")).content.decode()
    assert ApiKey.objects.get().keyid != key.keyid
    client.post(page_of("research", f"keys/{key.pk}/revoke"))
    assert ApiKey.objects.get().revoked_at is not None
    assert [event.actor for name in ("create", "rotate", "revoke") for event in audited(f"api_key.{name}")] == ["user:ana"] * 3


def test_a_viewer_of_a_tenant_only_looks() -> None:
    key = make_key("notebook", tenant="research")[0]
    client = make_member("vic", "research", Role.TENANT_VIEWER)
    text = text_of(client, page_of("research"))
    assert not [word for word in ("New API key", "Rotate", "Invite") if word in text]
    for part in ("keys/new", "members/new", f"keys/{key.pk}/revoke", f"members/{Membership.objects.get().pk}/remove"):
        assert client.post(page_of("research", part)).status_code == 403, part


def test_members_are_invited_and_removed_and_nobody_is_taken_over() -> None:
    owner = make_operator("boss")
    client = make_member("ana", "research")
    answer = client.post(page_of("research", "members/new"), {"name": "new", "role": "tenant-viewer"})
    assert "/sign-in/invitation/" in answer.content.decode()
    new = User.objects.get(username="new")
    assert (new.is_staff, new.is_superuser, new.groups.count()) == (False, False, 0)
    for name in ("boss", "BOSS"):  # no link into an account that is there
        answer = client.post(page_of("research", "members/new"), {"name": name, "role": "tenant-admin"})
        assert "somebody of this name" in answer.content.decode()
    assert (
        "Select a valid choice"
        in client.post(page_of("research", "members/new"), {"name": "eve", "role": "owner"}).content.decode()
    )
    row = Membership.objects.get(user=new)
    client.post(page_of("research", f"members/{row.pk}/remove"))
    assert not Membership.objects.filter(user=new).exists()
    assert [event.actor for event in audited("person.join-tenant")[1:]] == ["user:ana"]
    assert [event.detail["tenant"] for event in audited("person.leave-tenant")] == ["research"]
    bosses = Client()
    bosses.force_login(owner)
    bosses.post(page_of("research", "members/new"), {"name": "new", "role": "tenant-admin"})
    assert Membership.objects.get(user=new).role == Role.TENANT_ADMIN


def test_what_a_role_holds_is_what_its_group_holds_and_a_role_of_tenants_is_none_elsewhere() -> None:
    client = make_member("ana", "research")
    person = User.objects.get(username="ana")
    assert not person.has_perm("gateway.view_tenant")
    Group.objects.get(name="tenant-admin").permissions.clear()
    assert client.get(page_of("research")).status_code == 404


def test_the_page_costs_the_same_however_much_a_tenant_has() -> None:
    client, costs = make_member("ana", "research"), []
    for number in (1, 5):
        for index in range(number):
            key = make_key(f"key {number} {index}", tenant="research")[0]
            make_record(key)
            person = User.objects.create_user(f"p{number}-{index}")
            set_member(person=person, tenant="research", role=Role.TENANT_VIEWER, actor="t")
        with CaptureQueriesContext(connection) as queries:
            text_of(client, page_of("research"))
        costs.append(len(queries))
    assert costs[0] == costs[1], costs


def call(path: str, grant: Grant, **query: str) -> Any:
    make_role_groups()
    token = create_admin_token(name="t", actor="t", grant=grant)[1]
    return Client().get(path, query, headers={"authorization": f"Bearer {token}"})


def test_a_token_of_a_tenant_reads_that_tenant_alone() -> None:
    mine, theirs = make_key("notebook", tenant="research")[0], make_key("till", tenant="sales")[0]
    records = [make_record(key) for key in (mine, theirs)]
    grant = Grant("tenant-viewer", "research")
    assert [one["request_id"] for one in call("/requests", grant).json()["requests"]] == [records[0].printed_id]
    assert [one["name"] for one in call("/api/v1/tenants", grant).json()["tenants"]] == ["research"]
    assert [call(f"/api/v1/tenants/{name}", grant).status_code for name in ("research", "sales")] == [200, 404]
    asked = [call("/api/v1/usage", grant, **query).status_code for query in ({}, {"tenant": "research"}, {"tenant": "sales"})]
    assert asked == [200, 200, 403]
    assert call("/nodes", grant).status_code == 403
    assert len(call("/requests", Grant("viewer")).json()["requests"]) == 2


def test_a_token_may_never_more_than_its_person_and_ends_on_its_day() -> None:
    ana = change_roles(person=User.objects.create_user("ana"), roles=[Role.OPERATOR], actor="t")
    token, text = create_admin_token(name="t", actor="t", owner=ana, grant=Grant("operator"))
    headers = {"authorization": f"Bearer {text}"}
    assert Client().get("/nodes", headers=headers).status_code == 200
    change_roles(person=ana, roles=[Role.APPROVER], actor="t")
    assert Client().get("/nodes", headers=headers).status_code == 403
    change_roles(person=ana, roles=[Role.OPERATOR], actor="t")
    token.expires_at = clock.now()
    token.save(update_fields=["expires_at"])
    assert Client().get("/nodes", headers=headers).status_code == 401
