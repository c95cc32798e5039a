"""Nobody becomes another approver: names stay, operators do not raise themselves, and who is gone is told nothing more."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group, Permission
from django.test import Client

from core.models import User
from governance import services
from governance.errors import ApprovalRefused
from governance.services.people import create_invitation
from tests.fakes.governed_team import make_governed, make_key, propose_token
from tests.system.nodes.factories import audited
from wire.optoken.approval import read_statement

pytestmark = [pytest.mark.django_db, pytest.mark.timeout(180)]

STRICT = "default-src 'none'; script-src 'self'; style-src 'self'"


def make_clerk() -> tuple[User, Client]:
    """An operator who may change people and is no administrator."""
    clerk, client = User.objects.create_user("clerk", is_staff=True), Client()
    clerk.user_permissions.set(Permission.objects.filter(codename__in=["view_user", "change_user", "add_user"]))
    client.force_login(clerk)
    return clerk, client


def make_boss() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("boss"))
    return client


def change(client: Client, person: User, **fields: Any) -> Any:
    """The response to saving the form of a person with other values."""
    whole = {
        "username": person.username, "first_name": "", "last_name": "", "email": "", "is_active": "on",
        "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00", **fields,
    }  # fmt: skip
    return client.post(f"/admin/controlplane/user/{person.pk}/change/", whole)


def test_a_name_stays_once_it_is_given_since_policies_and_decisions_are_under_it() -> None:
    mallory = User.objects.create_user("mallory")
    response = change(make_boss(), mallory, username="ben", first_name="M.")
    assert response.status_code == 302
    mallory = User.objects.get(pk=mallory.pk)
    assert (mallory.username, mallory.first_name) == ("mallory", "M.")
    mallory.username = "ben"
    with pytest.raises(ValueError, match="name of a person stays"):
        mallory.save()
    mallory.save(update_fields=["last_name"])
    assert User.objects.get(pk=mallory.pk).username == "mallory"


def test_an_operator_gives_nobody_more_rights_and_changes_no_administrator() -> None:
    clerk, client = make_clerk()
    boss = User.objects.create_superuser("chief")
    rights = [str(each.pk) for each in Permission.objects.all()[:5]]
    change(client, clerk, is_superuser="on", is_staff="on", user_permissions=rights, first_name="C.")
    clerk = User.objects.get(pk=clerk.pk)
    assert (clerk.first_name, clerk.is_superuser, clerk.user_permissions.count()) == ("C.", False, 3)
    assert change(client, boss, first_name="X").status_code == 403
    assert client.post(f"/admin/controlplane/user/{boss.pk}/password/", {"password1": "p" * 20}).status_code == 403
    assert User.objects.get(pk=boss.pk).first_name == ""


def test_a_group_that_an_operator_is_in_gets_rights_from_administrators_alone() -> None:
    clerk, client = make_clerk()
    group = Group.objects.create(name="clerks")
    clerk.groups.add(group)
    clerk.user_permissions.set(Permission.objects.filter(content_type__model="group"))
    rights = [str(each.pk) for each in Permission.objects.all()[:5]]
    for path in (f"{group.pk}/change/", "add/", f"{group.pk}/delete/"):
        assert client.post(f"/admin/auth/group/{path}", {"name": "x", "permissions": rights}).status_code == 403
    assert client.get(f"/admin/auth/group/{group.pk}/change/").status_code == 200
    assert make_boss().post("/admin/auth/group/add/", {"name": "y", "permissions": rights}).status_code == 302


def test_a_password_that_was_set_for_somebody_is_in_the_audit_without_it() -> None:
    ben = User.objects.create_user("ben")
    fields = {"usable_password": "true", "password1": "a long and odd phrase", "password2": "a long and odd phrase"}
    boss, path = make_boss(), f"/admin/controlplane/user/{ben.pk}/password/"
    assert boss.post(path, {**fields, "password2": "another"}).status_code == 200
    assert not audited("operator.change")
    assert boss.post(path, fields).status_code == 302
    (event,) = audited("operator.change")
    assert (event.actor, event.target, event.detail) == ("user:boss", "ben", {"fields": ["password"]})


def test_only_an_administrator_invites_somebody_who_has_keys_since_the_link_opens_the_account() -> None:
    _, client = make_clerk()
    ben = User.objects.create_user("ben")
    link = f"/admin/controlplane/user/{ben.pk}/invite/"
    assert client.post(link).status_code == 200
    make_key(ben)
    assert client.post(link).status_code == 403
    assert make_boss().post(link).status_code == 200


def test_a_key_that_was_added_to_an_approver_approves_nothing_before_the_policy_names_it() -> None:
    team = make_governed()
    asked = propose_token(team[0])
    stolen, _ = make_key(team[1].user)
    proof = stolen.sign(read_statement(bytes(asked.statement)).digest, approver=team[1].name)
    with pytest.raises(ApprovalRefused) as caught:
        services.approve(op_id=asked.pk, user=team[1].user, proof=proof, brought_by="session:ben")
    assert caught.value.rule == "unknown_key"


# What a browser may do with the pages, also with those that are errors


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("get", "/approvals/"),
        ("get", "/approvals/nothing-here"),
        ("put", "/approvals/"),
        ("get", "/approvals/op_00000000000000000000000000000000/"),
        ("post", "/approvals/op_00000000000000000000000000000000/approve"),
        ("get", "/approvals/op_00000000000000000000000000000000/approve"),
        ("get", "/sign-in/nothing-here"),
        ("get", "/sign-in/passkey"),
        ("delete", "/sign-in/"),
        ("get", "/sign-in/keys"),
        ("get", "/sign-in/invitation/unknown"),
        ("post", "/sign-in/keys/1/remove"),
        ("get", "/sign-in/totp"),
    ],
)
def test_every_answer_below_these_paths_has_the_strict_policy(method: str, path: str) -> None:
    for is_checked in (False, True):
        response = getattr(Client(enforce_csrf_checks=is_checked), method)(path)
        assert response.headers["Content-Security-Policy"].startswith(STRICT), response.status_code
        assert "unsafe" not in response.headers["Content-Security-Policy"]
        assert response.headers["X-Frame-Options"] == "DENY"
        assert "no-store" in response.headers["Cache-Control"]


def test_the_link_of_an_invitation_is_in_no_referrer() -> None:
    person = User.objects.create_user("ben")
    _, text = create_invitation(user=person, actor="user:boss")
    response = Client().get(f"/sign-in/invitation/{text}")
    assert response.status_code == 200
    assert response.headers["Referrer-Policy"] == "strict-origin"
